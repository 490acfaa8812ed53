"""Models: bring your own.

Mirrored from book/models.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from functools import cache, partial, reduce
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.scipy.special import erfinv, log_ndtr, ndtr, ndtri
from jaxtyping import Float

from swindles.coupling import compiled
from swindles.transport import Evaluator, Transport, pull_back, unit_map


class Model(NamedTuple):
    """A posterior, as ``estimate`` wants it.

    Parameters
    ----------
    logdensity
        From an unconstrained position to its log density, up to a constant.
        Log-determinants of transformations are accounted for.
    position
        Where to start: any pytree of numbers.
    constrain
        From the position to the values that statistics see; by default the position.
    name
        What to call it in a table or a figure.
    held_out
        From the position to the log likelihood of each held-out observation;
        ``None`` where nothing is held out.
    truth
        Exact expectations, where they are known.
    whitened
        Makes the same posterior in coordinates that are standard normal under the
        prior; ``None`` where nobody knows how.
    labels
        By the name of a value, what to call the entries along each of its axes.

    Examples
    --------
    >>> model = Model(lambda x: -x["height"] ** 2 / 2, {"height": 0.0})
    >>> model.constrain({"height": 1.0}), model.dim
    ({'height': 1.0}, 1)
    """

    logdensity: Callable[[Any], Array]
    position: Any
    constrain: Callable[[Any], Any] = lambda position: position
    name: str = "posterior"
    held_out: Callable[[Any], Array] | None = None
    truth: dict[str, Float[np.ndarray, " dim"]] | None = None
    whitened: Callable[[], "Model"] | None = None
    labels: dict[str, list[list[str]]] | None = None

    @property
    def dim(self) -> int:
        """How many numbers are in the position."""
        return sum(np.size(leaf) for leaf in jax.tree.leaves(self.position))


def need(module: str, extra: str) -> Any:
    """Import an optional library, or say how to install it.

    Examples
    --------
    >>> need("numpyro.infer", "numpyro").__name__
    'numpyro.infer'
    """
    try:
        return import_module(module)
    except ImportError as error:
        library = module.split(".")[0]
        raise ImportError(
            f"this needs {library}: pip install 'swindles[{extra}]', or {library} alone"
        ) from error


# Behind the name of a site: that of its coordinate that is standard normal a priori.
WHITE = "_whitened"


def from_numpyro(
    model: Callable, *args: Any, init: dict[str, Any] | None = None, **kwargs: Any
) -> Model:
    """A NumPyro model, called with these arguments, as a ``Model``.

    Statistics see a dictionary of the constrained values of all sites that are not
    observed, deterministic ones included. ``init`` has values of sites to start from.

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
    usual = trace_numpyro(model, args, kwargs, init)
    unknown = sorted(set(init or {}) - set(usual.position))
    if unknown:
        sites = list(usual.position)
        raise ValueError(f"init has {unknown}, and the sites are {sites}")
    return usual._replace(
        whitened=cache(lambda: trace_numpyro(whiten_sites(model), args, kwargs))
    )


def trace_numpyro(
    model: Callable, args: tuple, kwargs: dict, init: dict[str, Any] | None = None
) -> Model:
    """A NumPyro model as a ``Model``, in the coordinates of its sites."""
    util = need("numpyro.infer.util", "numpyro")
    infer = need("numpyro.infer", "numpyro")
    start = infer.init_to_uniform(radius=0.1)
    if init:
        start = infer.init_to_value(values=init)
    key = jax.random.key(0)
    options = {"init_strategy": start, "validate_grad": False}  # we do that ourselves
    found, potential, constrain, _ = util.initialize_model(
        key, model, model_args=args, model_kwargs=kwargs, **options
    )

    def seen(position: dict) -> dict:
        values = constrain(position)
        return {k: v for k, v in values.items() if not k.endswith(WHITE)}

    return Model(lambda position: -potential(position), found.z, seen)


def pymc_labels(model: Any) -> dict[str, list[list[str]]]:
    """What the coordinates of a PyMC model call the entries of its variables."""
    return {
        name: [list(map(str, model.coords[dim])) for dim in dims]
        for name, dims in model.named_vars_to_dims.items()
        if all(model.coords.get(dim) is not None for dim in dims)
    }


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
    moved = [model.rvs_to_values[x] for x, t in model.rvs_to_transforms.items() if t]
    wanted = [v for v in model.unobserved_value_vars if v not in moved]
    try:
        logdensity = bridge.get_jaxified_logp(model)
        values = bridge.get_jaxified_graph(inputs=model.value_vars, outputs=wanted)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"PyMC cannot make JAX functions of the model ({error}): give it all the "
            "data, not a Minibatch, and only distributions that PyMC knows in JAX"
        ) from error

    def constrain(position: dict) -> dict:
        found = values(*(position[name] for name in names))
        return {variable.name: x for variable, x in zip(wanted, found, strict=True)}

    initial = model.initial_point()
    start = {name: jnp.asarray(initial[name], float) for name in names}
    model_of = partial(Model, labels=pymc_labels(model))
    return model_of(lambda p: logdensity([p[k] for k in names]), start, constrain)


def name_numbers(
    tree: Any, labels: dict[str, list[list[str]]] | None = None
) -> list[str]:
    """A name for every number in a pytree.

    ``labels`` are those of the entries along each axis, by the name of a leaf.

    Examples
    --------
    >>> name_numbers({"a": np.zeros(2), "b": np.zeros(())})
    ['a[0]', 'a[1]', 'b']
    >>> name_numbers(np.zeros((1, 2)))
    ['x[0, 0]', 'x[0, 1]']
    >>> name_numbers({"height": np.zeros(2)}, {"height": [["Ann", "Bob"]]})
    ['height[Ann]', 'height[Bob]']
    """
    names: list[str] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "x"
        axes = [list(map(str, range(size))) for size in leaf.shape]
        own = (labels or {}).get(name, axes)
        axes = own if [len(axis) for axis in own] == list(leaf.shape) else axes
        places = [f"[{', '.join(place)}]" for place in product(*axes)]
        names += [name + place for place in places] if axes else [name]
    return names


class Problem(NamedTuple):
    """A log density and statistics, as functions of one vector.

    Parameters
    ----------
    logdensity
        From a vector of shape ``(dim,)`` to its log density, up to a constant.
    statistic
        From the vector to all statistics, as one vector.
    constrain
        From the vector to the constrained values.
    position
        Where to start.
    names
        Of the numbers that ``statistic`` returns.
    shapes
        What the statistics return before they are made one vector: a pytree of shapes.

    Examples
    --------
    >>> problem = make_problem(Model(lambda x: -x["a"] @ x["a"], {"a": jnp.ones(2)}))
    >>> problem.dim, problem.names, problem.restore(np.arange(2.0))
    (2, ['a[0]', 'a[1]'], {'a': array([0., 1.])})
    """

    logdensity: Callable[[Array], Array]
    statistic: Callable[[Array], Array]
    constrain: Callable[[Array], Any]
    position: Float[Array, " dim"]
    names: list[str]
    shapes: Any

    @property
    def dim(self) -> int:
        """The length of the vector."""
        return self.position.size

    def restore(self, numbers: Float[np.ndarray, " statistics"]) -> Any:
        """One number for each name, in the pytree that the statistics return."""
        leaves, structure = jax.tree.flatten(self.shapes)
        cuts = np.cumsum([int(np.prod(leaf.shape)) for leaf in leaves])[:-1]
        parts = np.split(np.asarray(numbers), cuts)
        shaped = [p.reshape(x.shape) for p, x in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(structure, shaped)

    def evaluator(self) -> Evaluator:
        """What looks at many points at once, through an affine map.

        Examples
        --------
        >>> problem = make_problem(Model(lambda x: -x @ x, jnp.ones(2)))
        >>> problem.evaluator()(unit_map(np.ones(2)), np.zeros((3, 2))).values.shape
        (3, 2)
        """
        kind = self.position.dtype
        return Evaluator(self.logdensity, self.dim, self.statistic, kind)

    def through(self, transport: Transport) -> "Problem":
        """The same problem in the latent space of a map: functions of z.

        It starts at the origin.

        Examples
        --------
        >>> from swindles.transport import Affine
        >>> problem = make_problem(Model(lambda x: -x @ x, jnp.ones(2)))
        >>> latent = problem.through(Affine(jnp.ones(2), 2 * jnp.ones(2)))
        >>> latent.statistic(latent.position).tolist()
        [1.0, 1.0]
        """
        return self._replace(
            logdensity=pull_back(self.logdensity, transport),
            statistic=lambda z: self.statistic(transport(z)),
            constrain=lambda z: self.constrain(transport(z)),
            position=jnp.zeros_like(self.position),
        )


def leaf_locations(tree: Any) -> list[str]:
    """Where each leaf of a pytree is, in words to put behind its type.

    Examples
    --------
    >>> leaf_locations({"a": 1.0, "b": [2.0]}), leaf_locations(1.0)
    ([" at ['a']", " at ['b'][0]"], [''])
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [f" at {jax.tree_util.keystr(path)}" if path else "" for path in paths]


def output_shapes(
    what: str, function: Callable, position: Any, kinds: str = "f"
) -> Any:
    """Shapes of what a function returns, or a ValueError in plain words.

    ``what`` is what to call the function there, and ``kinds`` are those of the types
    that it may return.

    Examples
    --------
    >>> output_shapes("density", jnp.sum, jnp.ones(2))
    ShapeDtypeStruct(shape=(), dtype=float32)
    """
    try:
        found = jax.eval_shape(function, position)
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            f"JAX cannot compile the {what}: use jax.numpy in place of numpy, and "
            "jnp.where in place of `if`"
        ) from error
    except Exception as error:
        raise ValueError(f"the {what} fails at the position: {error}") from error
    for where, leaf in zip(leaf_locations(found), jax.tree.leaves(found), strict=True):
        if leaf.dtype.kind not in kinds or leaf.dtype == jnp.float16:
            raise ValueError(
                f"the {what} returns {leaf.dtype}{where}: it must compute in float32, "
                "or in float64 with jax_enable_x64"
            )
    return found


def as_floats(position: Any) -> Any:
    """The position with all its numbers of one floating point type."""
    leaves = jax.tree.leaves(position)
    if not sum(np.size(leaf) for leaf in leaves):
        raise ValueError(
            "the position is empty: give a starting value to each parameter"
        )
    for where, leaf in zip(leaf_locations(position), leaves, strict=True):
        if isinstance(leaf, jax.core.Tracer):
            raise ValueError("the position is traced: call it outside of jit and grad")
        kind = np.asarray(leaf).dtype
        if kind.kind not in "iuf" and kind.name != "bfloat16":
            raise ValueError(f"the position must be real numbers, got {kind}{where}")
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, float), position)


def check_density(logdensity: Callable, position: Any) -> None:
    """Raise ValueError unless the log density is one floating point number."""
    found = output_shapes("log density", logdensity, position)
    if getattr(found, "shape", None) != ():
        raise ValueError(f"the log density must be one number, not {found}: take a sum")


def check_values(problem: Problem, names: list[str]) -> None:
    """Raise ValueError unless density, gradient and statistics are finite.

    ``names`` are those of the parameters, to say which one is at fault.
    """
    position = np.asarray(problem.position)
    bad = np.flatnonzero(~np.isfinite(position))
    if bad.size:
        raise ValueError(f"the position is not finite: {names[bad[0]]}")
    here = problem.evaluator()(unit_map(position), np.zeros((1, position.size)))
    value, slope, statistics = here.logdensity[0], here.score[0], here.values[0]
    if not np.isfinite(value):
        raise ValueError(f"the log density is {value} at the position: start elsewhere")
    bad = np.flatnonzero(~np.isfinite(slope))
    if bad.size:
        raise ValueError(
            f"the gradient of the log density by {names[bad[0]]} is {slope[bad[0]]} at "
            "the position: start elsewhere, or look for a square root or logarithm of 0"
        )
    bad = np.flatnonzero(~np.isfinite(statistics))
    if bad.size:
        name, value = problem.names[bad[0]], statistics[bad[0]]
        raise ValueError(f"the statistic {name} is {value} at the position")


def same_values(values: Any) -> Any:
    """The statistics when none are given: the values themselves."""
    return values


def problem_functions(model: Model, statistics: Callable, position: Any) -> tuple:
    """Log density, statistics and constrained values as functions of one vector.

    The last of what it returns are the shapes of the statistics.
    """
    unravel = ravel_pytree(position)[1]
    check_density(model.logdensity, position)

    def values(p: Any) -> Any:
        return statistics(model.constrain(p))

    shapes = output_shapes("statistic", values, position, "fiub")

    def statistic(x: Array) -> Array:
        floats = jax.tree.map(lambda v: jnp.asarray(v, x.dtype), values(unravel(x)))
        return ravel_pytree(floats)[0]

    def logdensity(x: Array) -> Array:
        return jnp.asarray(model.logdensity(unravel(x)), x.dtype)

    return logdensity, statistic, lambda x: model.constrain(unravel(x)), shapes


def make_problem(
    model: Model, statistics: Callable[[Any], Any] | None = None
) -> Problem:
    """Check a model and its statistics, and make them functions of one vector.

    Statistics are functions of the constrained values, and by default those values
    themselves.

    Examples
    --------
    >>> model = Model(lambda x: -x["a"] @ x["a"], {"a": jnp.ones(2)})
    >>> problem = make_problem(model, lambda x: {"square": x["a"] ** 2})
    >>> problem.names, problem.statistic(jnp.array([1.0, 2.0])).tolist()
    (['square[0]', 'square[1]'], [1.0, 4.0])
    """
    position = as_floats(model.position)
    leaves, structure = jax.tree.flatten(position)
    kinds = structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
    statistics = statistics or same_values
    logdensity, statistic, constrain, shapes = compiled(
        model.logdensity,
        ("problem", statistics, model.constrain, kinds),
        lambda: problem_functions(model, statistics, position),
    )
    vector = jnp.asarray(np.concatenate([np.ravel(leaf) for leaf in leaves]))
    names = name_numbers(shapes, model.labels)
    problem = Problem(logdensity, statistic, constrain, vector, names, shapes)
    if not problem.names:
        raise ValueError("the statistic returns nothing: return one number or more")
    check_values(problem, name_numbers(position))
    return problem


def by_tail(u: Array, below: Callable, above: Callable) -> Array:
    """A function of the smaller tail: ``below`` of Phi(u), or ``above`` of Phi(-u)."""
    low, high = jnp.where(u < 0, u, -1.0), jnp.where(u < 0, -1.0, -u)
    return jnp.where(u < 0, below(ndtr(low)), above(ndtr(high)))


def half_normal_quantile(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """The quantile of a half-normal distribution at Phi(u).

    Examples
    --------
    >>> [round(float(x), 1) for x in half_normal_quantile(jnp.array([-1.0, 0.0, 5.0]))]
    [0.2, 0.7, 5.1]
    """
    root = jnp.sqrt(2.0)
    return by_tail(u, lambda p: root * erfinv(p), lambda p: -ndtri(p / 2))


def half_cauchy_quantile(u: Array) -> Array:
    """The quantile of a half-Cauchy distribution at Phi(u)."""
    half = jnp.pi / 2
    return by_tail(u, lambda p: jnp.tan(half * p), lambda p: 1 / jnp.tan(half * p))


def cauchy_quantile(u: Array) -> Array:
    """The quantile of a Cauchy distribution at Phi(u)."""
    return by_tail(
        u, lambda p: -1 / jnp.tan(jnp.pi * p), lambda p: 1 / jnp.tan(jnp.pi * p)
    )


# By the name of a distribution in NumPyro: a draw of it, from a standard normal one.
QUANTILES: dict[str, Callable[[Any, Array], Array]] = {
    "Normal": lambda prior, u: prior.loc + prior.scale * u,
    "HalfNormal": lambda prior, u: prior.scale * half_normal_quantile(u),
    "Cauchy": lambda prior, u: prior.loc + prior.scale * cauchy_quantile(u),
    "HalfCauchy": lambda prior, u: prior.scale * half_cauchy_quantile(u),
    "Exponential": lambda prior, u: -log_ndtr(-u) / prior.rate,
    "Uniform": lambda prior, u: prior.low + (prior.high - prior.low) * ndtr(u),
    "Logistic": lambda p, u: p.loc + p.scale * (log_ndtr(u) - log_ndtr(-u)),
    "Gumbel": lambda prior, u: prior.loc - prior.scale * jnp.log(-log_ndtr(u)),
    "Gamma": lambda prior, u: half_normal_quantile(u) ** 2 / (2 * prior.rate),
    "MultivariateNormal": lambda p, u: p.loc + (p.scale_tril @ u[..., None])[..., 0],
}


def is_half(value: Any) -> bool:
    """Whether a number that is known before anything runs is one half."""
    return not isinstance(value, jax.core.Tracer) and bool(np.all(value == 0.5))


def transformed(quantile: Callable, transforms: list[Callable], u: Array) -> Array:
    """A quantile, and what some functions make of it, one after the other."""
    return reduce(lambda value, function: function(value), transforms, quantile(u))


def quantile_of(prior: Any) -> Callable[[Array], Array] | None:
    """From standard normal numbers to draws of a prior; None if that is not known."""
    dist = need("numpyro.distributions", "numpyro")
    while isinstance(prior, dist.Independent | dist.ExpandedDistribution):
        prior = prior.base_dist
    if isinstance(prior, dist.TransformedDistribution):
        by_entry = not any(part.domain.event_dim for part in prior.transforms)
        inner = quantile_of(prior.base_dist) if by_entry else None
        return inner and partial(transformed, inner, prior.transforms)
    kinds = [kind.__name__ for kind in type(prior).__mro__]
    kind = next((kind for kind in kinds if kind in QUANTILES), "")
    if not kind or (kind == "Gamma" and not is_half(prior.concentration)):
        return None
    return lambda u: QUANTILES[kind](prior, u)


def whiten_site(name: str, prior: Any, value: Any) -> tuple[None, Array]:
    """A site as a function of a new one that is standard normal."""
    numpyro = need("numpyro", "numpyro")
    normal = numpyro.distributions.Normal(0.0, 1.0).expand(prior.shape())
    u = numpyro.sample(name + WHITE, normal.to_event(prior.event_dim))
    quantile: Any = quantile_of(prior)
    return None, quantile(u)


def whiten_sites(model: Callable) -> Callable:
    """A NumPyro model with a standard normal prior for every site that has a quantile.

    Examples
    --------
    >>> import numpyro
    >>> from numpyro.distributions import Exponential
    >>> def wait():
    ...     return numpyro.sample("time", Exponential(2.0))
    >>> model = numpyro.handlers.seed(whiten_sites(wait), 0)
    >>> sorted(numpyro.handlers.trace(model).get_trace())
    ['time', 'time_whitened']
    """
    handlers = need("numpyro.handlers", "numpyro")

    def config(site: dict) -> Callable | None:
        new = not site["is_observed"] and not site["name"].endswith(WHITE)
        new = new and site["scale"] is None  # a power of a prior is none
        return whiten_site if new and quantile_of(site["fn"]) else None

    return handlers.reparam(model, config=config)
