"""Models: bring your own.

Mirrored from book/models.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree


class Model(NamedTuple):
    """A posterior, as ``estimate`` wants it.

    Examples
    --------
    >>> model = Model(lambda x: -x["height"] ** 2 / 2, {"height": 0.0})
    >>> model.constrain({"height": 1.0})
    {'height': 1.0}
    """

    logdensity: Callable[[Any], Array]  # of an unconstrained position, any pytree
    position: Any  # where to start
    constrain: Callable[[Any], Any] = lambda position: position  # what statistics see


def need(module: str, extra: str) -> Any:
    """Import an optional library, or say how to install it."""
    try:
        return import_module(module)
    except ImportError as problem:
        raise ImportError(
            f"this needs {module.split('.')[0]}: pip install 'swindles[{extra}]'"
        ) from problem


def from_numpyro(model: Callable, *args: Any, **kwargs: Any) -> Model:
    """A NumPyro model, called with these arguments, as a ``Model``.

    Statistics see a dictionary of the constrained values of all sites that are not
    observed, deterministic ones included.

    Examples
    --------
    >>> import numpyro
    >>> from numpyro.distributions import Exponential, Poisson
    >>> def counts(y):
    ...     rate = numpyro.sample("rate", Exponential(1.0))
    ...     numpyro.sample("y", Poisson(rate), obs=y)
    >>> model = from_numpyro(counts, jnp.array([3, 0, 2]))
    >>> sorted(model.constrain({"rate": jnp.zeros(())}))
    ['rate']
    """
    util = need("numpyro.infer.util", "numpyro")
    start = need("numpyro.infer", "numpyro").init_to_uniform(radius=0.1)
    key = jax.random.key(0)
    found, potential, constrain, _ = util.initialize_model(
        key, model, init_strategy=start, model_args=args, model_kwargs=kwargs
    )
    return Model(lambda position: -potential(position), found.z, constrain)


def from_pymc(model: Any) -> Model:
    """A PyMC model as a ``Model``.

    Statistics see a dictionary of the constrained values of all variables that are not
    observed, deterministic ones included. All variables must be continuous.

    Examples
    --------
    >>> import pymc as pm
    >>> with pm.Model() as counts:
    ...     rate = pm.Exponential("rate", 1.0)
    ...     y = pm.Poisson("y", rate, observed=[3, 0, 2])
    >>> sorted(from_pymc(counts).position)
    ['rate_log__']
    """
    precision = jax.config.read("jax_enable_x64")
    bridge = need("pymc.sampling.jax", "pymc")
    jax.config.update("jax_enable_x64", precision)  # PyMC changes it
    if model.discrete_value_vars:
        raise ValueError(f"{model.discrete_value_vars} are discrete: sum them out")
    names = [variable.name for variable in model.value_vars]
    wanted = [v for v in model.unobserved_value_vars if not v.name.endswith("__")]
    logdensity = bridge.get_jaxified_logp(model)
    values = bridge.get_jaxified_graph(inputs=model.value_vars, outputs=wanted)

    def constrain(position: dict) -> dict:
        found = values(*(position[name] for name in names))
        return {variable.name: x for variable, x in zip(wanted, found, strict=True)}

    start = {name: jnp.asarray(model.initial_point()[name], float) for name in names}
    return Model(lambda p: logdensity([p[name] for name in names]), start, constrain)


def named(tree: Any) -> list[str]:
    """A name for every number in a pytree.

    Examples
    --------
    >>> named({"a": np.zeros(2), "b": np.zeros(())}), named(np.zeros((1, 2)))
    (['a[0]', 'a[1]', 'b'], ['x[0, 0]', 'x[0, 1]'])
    """
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "x"
        names += [name + str(list(i)) * bool(i) for i in np.ndindex(leaf.shape)]
    return names


class Flat(NamedTuple):
    """A model and its statistics, as functions of one vector."""

    logdensity: Callable[[Array], Array]
    statistic: Callable[[Array], Array]
    constrain: Callable[[Array], Any]
    position: Array  # (dim,)
    names: list[str]  # of the numbers that the statistic returns
    shapes: Any  # what the statistics return: a pytree of shapes

    @property
    def dim(self) -> int:
        """The number of parameters."""
        return self.position.size

    def restore(self, numbers: np.ndarray) -> Any:
        """One number for each name, in the pytree that the statistics return."""
        leaves, structure = jax.tree.flatten(self.shapes)
        cuts = np.cumsum([int(np.prod(leaf.shape)) for leaf in leaves])[:-1]
        parts = np.split(np.asarray(numbers), cuts)
        shaped = [p.reshape(x.shape) for p, x in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(structure, shaped)


def shapes_of(what: str, function: Callable, position: Any, kinds: str = "f") -> Any:
    """Shapes of what a function returns, or a ValueError in plain words."""
    try:
        found = jax.eval_shape(function, position)
    except jax.errors.JAXTypeError as problem:
        raise ValueError(
            f"JAX cannot compile the {what}: use jax.numpy in place of numpy, and "
            "jnp.where in place of `if`"
        ) from problem
    except Exception as problem:
        raise ValueError(f"the {what} fails at the position: {problem}") from problem
    for name, leaf in zip(named_leaves(found), jax.tree.leaves(found), strict=True):
        if leaf.dtype.kind not in kinds or leaf.dtype == jnp.float16:
            raise ValueError(
                f"the {what} returns {leaf.dtype}{name}: it must compute in float32, "
                "or in float64 with jax_enable_x64"
            )
    return found


def named_leaves(tree: Any) -> list[str]:
    """Where each leaf of a pytree is, in words to put behind its type."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [f" at {jax.tree_util.keystr(path)}" if path else "" for path in paths]


def as_floats(position: Any) -> Any:
    """The position with all its numbers of one floating point type."""
    leaves = jax.tree.leaves(position)
    if not sum(np.size(leaf) for leaf in leaves):
        raise ValueError(
            "the position is empty: give a starting value to each parameter"
        )
    for where, leaf in zip(named_leaves(position), leaves, strict=True):
        kind = np.asarray(leaf).dtype
        if kind.kind not in "iuf" and kind.name != "bfloat16":
            raise ValueError(f"the position must be real numbers, got {kind}{where}")
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float), position)


def check_density(logdensity: Callable, position: Any) -> None:
    """Raise ValueError unless the log density is one floating point number."""
    found = shapes_of("log density", logdensity, position)
    if getattr(found, "shape", None) != ():
        raise ValueError(f"the log density must be one number, not {found}: take a sum")


def check_values(flat: Flat, names: list[str]) -> None:
    """Raise ValueError unless density, gradient and statistics are finite."""
    value, slope = jax.jit(jax.value_and_grad(flat.logdensity))(flat.position)
    bad = np.flatnonzero(~np.isfinite(flat.position))
    if bad.size:
        raise ValueError(f"the position is not finite: {names[bad[0]]}")
    if not np.isfinite(value):
        raise ValueError(f"the log density is {value} at the position: start elsewhere")
    bad = np.flatnonzero(~np.isfinite(slope))
    if bad.size:
        raise ValueError(
            f"the gradient of the log density by {names[bad[0]]} is {slope[bad[0]]} at "
            "the position: start elsewhere, or look for a square root or logarithm of 0"
        )
    statistics = np.asarray(jax.jit(flat.statistic)(flat.position))
    bad = np.flatnonzero(~np.isfinite(statistics))
    if bad.size:
        name, value = flat.names[bad[0]], statistics[bad[0]]
        raise ValueError(f"the statistic {name} is {value} at the position")


def flatten(model: Model, statistics: Callable[[Any], Any] | None = None) -> Flat:
    """Check a model and its statistics, and make them functions of one vector.

    The default statistics are the constrained values themselves.

    Examples
    --------
    >>> flat = flatten(Model(lambda x: -x["a"] @ x["a"], {"a": jnp.ones(2)}))
    >>> flat.names, flat.restore(np.arange(2.0))
    (['a[0]', 'a[1]'], {'a': array([0., 1.])})
    """
    statistics = statistics or (lambda values: values)
    position = as_floats(model.position)
    vector, unravel = ravel_pytree(position)
    check_density(model.logdensity, position)

    def values(p: Any) -> Any:
        return statistics(model.constrain(p))

    shapes = shapes_of("statistic", values, position, "fiub")

    def statistic(x: Array) -> Array:
        floats = jax.tree.map(lambda v: jnp.asarray(v, x.dtype), values(unravel(x)))
        return ravel_pytree(floats)[0]

    flat = Flat(
        lambda x: model.logdensity(unravel(x)).astype(x.dtype),
        statistic,
        lambda x: model.constrain(unravel(x)),
        vector,
        named(shapes),
        shapes,
    )
    if not flat.names:
        raise ValueError("the statistic returns nothing: return one number or more")
    check_values(flat, named(position))
    return flat
