"""Control: a chain whose answer we know.

Mirrored from book/control.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.base import SamplingAlgorithm
from jax import Array
from jax.extend.core import jaxpr_as_fun
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Float, Key

from swindles.antithetic import (
    Result,
    Series,
    check_statistic,
    evaluate,
    negate,
    pair_values,
)
from swindles.coupling import LogDensity, Sampler, Total, couple
from swindles.scale import joined
from swindles.transport import standard_normal


def control(
    sampler: Sampler, logdensity: LogDensity, reference: LogDensity = standard_normal
) -> SamplingAlgorithm:
    """HMC-CONTROL, for any sampler: chains "plus" and "control" under one key.

    ``reference`` is the log density of Q. In the latent space of a transport it is the
    standard normal.

    Examples
    --------
    >>> from swindles.coupling import hmc, start
    >>> algorithm = control(hmc(0.3, 5), lambda z: -jnp.sum(jnp.cosh(z)))
    >>> start(algorithm, jnp.ones((4, 2)))._fields
    ('plus', 'control')
    """
    return couple(plus=sampler(logdensity), control=sampler(reference))


def control_values(feature: Callable, states: Any) -> Array:
    """Features at Y and, when there is a "minus" chain, at -Y: (1 or 2, chains, k)."""
    places = [states.control.position]
    if hasattr(states, "minus"):
        places.append(negate(states.control.position))
    return evaluate(feature, places)


def apply_beta(features: Array, beta: ArrayLike) -> Array:
    """What coefficients make of features (..., features): (..., dim).

    Examples
    --------
    >>> apply_beta(jnp.ones((5, 2)), np.ones(2)).shape
    (5, 2)
    >>> apply_beta(jnp.ones((5, 2)), np.ones((2, 3))).shape
    (5, 3)
    """
    beta = jnp.asarray(beta, features.dtype)
    if beta.ndim == 1:
        return features * beta
    return jnp.matmul(features, beta, precision="highest")


def control_series(
    statistic: Callable,
    observe: Callable[[Any], Array],
    mean: ArrayLike,
    beta: ArrayLike,
) -> Series:
    """Z is f, less what features predict of its error: f - beta (g - E g).

    ``observe`` takes the states of all chains to features of shape (1 or 2, chains,
    features); ``mean`` is what is known of their mean.

    Examples
    --------
    With Q = P the control chain knows the whole error:

    >>> from swindles.antithetic import estimate_series, fold_series
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = control(hmc(0.5, 3), standard_normal)
    >>> states = start(algorithm, jax.random.normal(jax.random.key(0), (32, 2)))
    >>> observe = partial(control_values, jnp.square)
    >>> series = control_series(jnp.square, observe, np.ones(2), np.ones(2))
    >>> fold = fold_series(series, states)
    >>> _, sums = run(jax.random.key(1), algorithm, states, 100, fold)
    >>> estimate_series(sums).estimate.mean.round(5).tolist()
    [1.0, 1.0]
    """

    def series(states: Any) -> tuple[Array, Any]:
        values, features = pair_values(statistic, states), observe(states)
        excess = features.mean(0) - jnp.asarray(mean, features.dtype)
        return values[0], values.mean(0) - apply_beta(excess, beta)

    return series


class Expectation(NamedTuple):
    """The mean of some features under Q, and the covariance of its error.

    Parameters
    ----------
    mean
        The mean.
    covariance
        That of the mean's error; zero when the mean is exact.
    num_draws
        Independent draws behind the mean; 0 when it is exact.

    Examples
    --------
    >>> key = jax.random.key(0)
    >>> expectation = draw_expectation(key, jnp.square, jnp.zeros(1), 20_000)
    >>> error = np.sqrt(expectation.covariance[0, 0])
    >>> bool(0.01 < error < 0.02), bool(abs(expectation.mean[0] - 1) < 4 * error)
    (True, True)
    """

    mean: Float[np.ndarray, " features"]
    covariance: Float[np.ndarray, "features features"]
    num_draws: int = 0


def exact_expectation(mean: Any) -> Expectation:
    """An expectation that is known exactly; ``mean`` may be a pytree.

    Examples
    --------
    >>> exact_expectation({"mean": np.zeros(2), "square": np.ones(2)}).mean.tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(mean)]
    flat = np.concatenate(leaves).astype(np.float64)
    return Expectation(flat, np.zeros((flat.size, flat.size)))


def draw_expectation(
    key: Key[Array, ""],
    feature: Callable,
    like: Any,
    num_draws: int,
    batch: int = 256,
) -> Expectation:
    """Estimate E_Q of ``feature`` for Q = N(0, I) from at least ``num_draws`` draws.

    ``like`` is one position: draws have its shape. Draws come in antithetic pairs, in
    16 or more batches of ``batch`` draws. The spread between batches gives the error.

    Examples
    --------
    >>> key = jax.random.key(0)
    >>> expectation = draw_expectation(key, jnp.square, jnp.zeros(2), 20_000)
    >>> bool(np.allclose(expectation.mean, 1, atol=0.05)), expectation.num_draws
    (True, 20224)
    """
    flat, unravel = ravel_pytree(like)

    def pair_mean(z: Array) -> Array:
        ends = [ravel_pytree(feature(unravel(end)))[0] for end in (z, -z)]
        return (ends[0] + ends[1]) / 2

    @jax.jit
    def batch_means(keys: Array) -> tuple[Array, Array]:
        center = pair_mean(jnp.zeros_like(flat))

        def mean(key: Array) -> Array:
            z = jax.random.normal(key, (batch // 2, flat.size), flat.dtype)
            return (jax.vmap(pair_mean)(z) - center).mean(0)

        return jax.lax.map(mean, keys), center

    number = max(-(-num_draws // batch), 16)
    means, center = jax.device_get(batch_means(jax.random.split(key, number)))
    means = means.astype(np.float64)
    covariance = np.atleast_2d(np.cov(means.T)) / number
    return Expectation(center + means.mean(0), covariance, number * batch)


# Operations that keep the degree of a polynomial, or the largest of several. A choice
# that depends on x has a comparison among its arguments, which is no polynomial.
LINEAR = frozenset(
    {"add", "sub", "neg", "add_any", "copy", "reduce_sum", "cumsum", "concatenate"}
    | {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "rev"}
    | {"slice", "split", "stack", "pad", "convert_element_type", "select_n"}
)
# Operations that are linear in the first of their arguments, if the others are fixed.
LINEAR_IN_FIRST = frozenset(["div", "gather", "dynamic_slice"])
# Operations of which the degrees add up.
BILINEAR = frozenset(["mul", "dot_general"])
NO_POLYNOMIAL = np.inf


def constant_power(equation: Any) -> float:
    """The exponent of a power, if the program names it; else NaN."""
    if equation.primitive.name == "pow":
        return getattr(equation.invars[1], "val", np.nan)
    return equation.params.get("y", 2)


def loses_precision(equation: Any, degrees: list[float]) -> bool:
    """Whether numbers come out of an operation coarser than they went in."""
    given = [v for v, d in zip(equation.invars, degrees, strict=True) if d]
    finest = min(jnp.finfo(v.aval.dtype).eps for v in given)
    kinds = [v.aval.dtype for v in equation.outvars]
    return any(
        not jnp.issubdtype(kind, jnp.floating) or jnp.finfo(kind).eps > finest
        for kind in kinds
    )


def equation_degree(equation: Any, degrees: list[float]) -> float:
    """The degree of what an operation returns, from those of what it is given."""
    name, most = equation.primitive.name, max(degrees, default=0)
    if most in (0, NO_POLYNOMIAL):
        return most
    if loses_precision(equation, degrees):
        return NO_POLYNOMIAL
    if name in LINEAR:
        return most
    if name in BILINEAR:
        return sum(degrees)
    if name in ("square", "integer_pow", "pow"):
        power = constant_power(equation)
        return most * int(power) if power > 0 and power % 1 == 0 else NO_POLYNOMIAL
    if name in LINEAR_IN_FIRST and max(degrees[1:]) == 0:
        return most
    return NO_POLYNOMIAL


def program_degrees(jaxpr: Any, inputs: list[float]) -> list[float]:
    """The degrees of a program's results as polynomials of its arguments."""
    degrees = dict(zip(jaxpr.invars, inputs, strict=True))

    def degree(atom: Any) -> float:
        return 0 if hasattr(atom, "val") else degrees.get(atom, 0)

    for equation in jaxpr.eqns:
        given = [degree(atom) for atom in equation.invars]
        if equation.primitive.name in ("jit", "pjit"):
            found = program_degrees(equation.params["jaxpr"].jaxpr, given)
        else:
            found = [equation_degree(equation, given)] * len(equation.outvars)
        degrees |= dict(zip(equation.outvars, found, strict=True))
    return [degree(atom) for atom in jaxpr.outvars]


def polynomial_degree(function: Callable, like: Any) -> float:
    """The degree of a function as a polynomial, proven from its program; else infinity.

    It may be lower than that. Only additions and multiplications count as proof.

    Examples
    --------
    >>> x = jnp.ones(3)
    >>> [polynomial_degree(f, x) for f in (jnp.sum, lambda x: x @ x, jnp.exp)]
    [1, 2, inf]
    >>> [polynomial_degree(f, x) for f in (jnp.floor, jnp.abs, lambda x: 1.0 * (x > 2))]
    [inf, inf, inf]
    """
    program = jax.make_jaxpr(function)(like).jaxpr
    return max(program_degrees(program, [1] * len(program.invars)), default=0)


def quadratic_expectation(feature: Callable, origin: Array) -> Expectation:
    """E_Q of a polynomial of degree two or less: f(0) + trace of f''(0) / 2."""
    program = jaxpr_as_fun(jax.make_jaxpr(feature)(origin))

    def slope(direction: Array, z: Array) -> list[Array]:
        return jax.jvp(program, (z,), (direction,))[1]

    def bend(direction: Array) -> list[Array]:
        return jax.jvp(partial(slope, direction), (origin,), (direction,))[1]

    @jax.jit
    def parts(axes: Array) -> tuple[list[Array], list[Array]]:
        return program(origin), jax.lax.map(bend, axes, batch_size=16)

    axes = jnp.eye(origin.size, dtype=origin.dtype)
    values, bends = jax.device_get(parts(axes))
    return exact_expectation(
        [
            np.float64(value) + np.sum(second, 0, np.float64) / 2
            for value, second in zip(values, bends, strict=True)
        ]
    )


def reference_mean(
    key: Key[Array, ""], problem: Any, num_draws: int = 400_000
) -> Expectation:
    """The mean of a problem's statistic under Q = N(0, I).

    It is exact where the statistic is provably a polynomial of degree two or less, as
    means and squares are in the latent space of an affine map; else from draws.

    Examples
    --------
    >>> from swindles.models import Model, make_problem
    >>> from swindles.transport import Affine
    >>> to_x = Affine(jnp.ones(2), jnp.array([1.0, 2.0]))
    >>> model = Model(standard_normal, jnp.zeros(2))
    >>> squares = make_problem(model, jnp.square).through(to_x)
    >>> expectation = reference_mean(jax.random.key(0), squares)
    >>> expectation.mean.tolist(), expectation.num_draws
    ([2.0, 5.0], 0)
    """
    origin = jnp.zeros(problem.dim, problem.position.dtype)
    if polynomial_degree(problem.statistic, origin) <= 2:
        return quadratic_expectation(problem.statistic, origin)
    return draw_expectation(key, problem.statistic, origin, num_draws)


@joined(first=-2, second=-2)
class PairProducts(NamedTuple):
    """Sums, along each chain, of the statistic and of products of its values.

    The rows are the statistic at X+, X-, Y and -Y, as far as there are such chains.
    """

    center: Any  # (dim,): what is subtracted first; one for each block
    steps: Total  # ()
    first: Total  # (rows, chains, dim)
    second: Total  # (rows, rows, chains, dim)

    def covariance(self, weights: ArrayLike | None = None) -> np.ndarray:
        """Covariances of the rows, chains weighted: (rows, rows, dim)."""
        first = np.average(self.first.value, 1, weights) / self.steps.value
        second = np.average(self.second.value, 2, weights) / self.steps.value
        return second - first[:, None] * first

    def chain_means(self) -> np.ndarray:
        """Averages along each chain: (rows, chains, dim)."""
        center = np.asarray(self.center, np.float64).reshape(
            -1, self.first.value.shape[-1]
        )
        return center[0] + self.first.value / self.steps.value


def fold_pair_products(statistic: Callable, states: Any) -> tuple[Any, Callable]:
    """What to give ``coupling.run`` as ``fold``, to learn diagonal coefficients.

    Examples
    --------
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = control(hmc(0.5, 3), lambda z: -jnp.sum(jnp.cosh(z)))
    >>> states = start(algorithm, jnp.ones((32, 2)))
    >>> fold = fold_pair_products(jnp.square, states)
    >>> _, sums = run(jax.random.key(0), algorithm, states, 100, fold)
    >>> sums.covariance().shape  # of f(X) and f(Y), for each entry of f
    (2, 2, 2)
    """
    center = check_statistic(statistic, states)

    def rows(states: Any) -> Array:
        here = pair_values(statistic, states)
        if not hasattr(states, "control"):
            return here - center
        both = [here, control_values(statistic, states)]
        return jnp.concatenate(both) - center

    def update(sums: PairProducts, states: Any, infos: Any) -> PairProducts:
        away = rows(states)
        new = jnp.ones(()), away, away[:, None] * away
        old = (total.value for total in sums[1:])
        added = (Total(a + b) for a, b in zip(old, new, strict=True))
        return PairProducts(center, *added)

    shape = jax.eval_shape(rows, states)
    zero = jnp.zeros(shape.shape, shape.dtype)
    empty = jnp.zeros(()), zero, zero[:, None] * zero
    return PairProducts(center, *map(Total, empty)), update


def diagonal_beta(gram: ArrayLike, cross: ArrayLike) -> np.ndarray:
    """The slope of each statistic on its own feature, from variance and covariance.

    A feature that does not vary gets the coefficient zero.

    Examples
    --------
    >>> diagonal_beta(np.array([2.0, 0.0]), np.array([1.0, 0.0])).tolist()
    [0.5, 0.0]
    """
    gram = np.asarray(gram, np.float64)
    return np.asarray(cross, np.float64) / np.where(gram > 0, gram, np.inf)


def pair_beta(
    covariance: np.ndarray, f: list[int], g: list[int], noise: ArrayLike = 0.0
) -> np.ndarray:
    """The slope of each statistic on its control, over all pairs of chains: (dim,).

    ``f`` and ``g`` are rows of ``PairProducts``. ``noise`` counts as variance of the
    control: that of its known mean, times the draws to come.
    """
    gram = sum(covariance[j, j] for j in g)
    cross = sum(covariance[i, j] for i, j in zip(f, g, strict=True))
    return diagonal_beta(gram + len(g) * np.asarray(noise), cross)


def residual_variance(
    covariance: np.ndarray, f: list[int], g: list[int]
) -> Float[np.ndarray, "..."]:
    """Var Z / Var f: the part of the variance that a scheme leaves.

    ``covariance`` has shape (rows, rows, ...); ``f`` and ``g`` are the scheme's rows.

    Examples
    --------
    >>> pair = np.array([[1.0, 0.8], [0.8, 1.0]])[..., None]
    >>> residual_variance(pair, [0], [1]).round(2), residual_variance(-pair, [0, 1], [])
    (array([0.36]), array([0.9]))
    """
    own = sum(covariance[i, i] for i in f)
    weights = {i: np.ones_like(own) for i in f}
    if g:
        beta = pair_beta(covariance, f, g)
        weights |= {j: -beta for j in g}
    total = sum(
        a * b * covariance[i, j] for i, a in weights.items() for j, b in weights.items()
    )
    return np.maximum(total / (len(f) * own), 1e-6)


class Fitted(NamedTuple):
    """Coefficients, and what they leave.

    Parameters
    ----------
    beta
        One for each statistic, or (features, dim).
    variance
        Of Z, in a step of one chain, correlations between steps included: that of the
        averages of chains on which the coefficients were not fitted.
    mean
        A first estimate of E f.
    size
        Of the numbers that are added up; their rounding is not averaged out.

    Examples
    --------
    >>> fitted = Fitted(np.ones(2), np.ones(2), np.zeros(2), np.ones(2))
    >>> fitted.beta.tolist()
    [1.0, 1.0]
    """

    beta: Float[np.ndarray, "*features dim"]
    variance: Float[np.ndarray, " dim"]
    mean: Float[np.ndarray, " dim"]
    size: Float[np.ndarray, " dim"]


def halves(num_chains: int) -> tuple[np.ndarray, np.ndarray]:
    """Every second chain, and the others, as masks."""
    even = np.arange(num_chains) % 2 == 0
    return even, ~even


def spread(averages: np.ndarray) -> np.ndarray:
    """Variance of averages of chains; infinite when they are too few to tell."""
    few = len(averages) < 2
    return np.full(averages.shape[1], np.inf) if few else averages.var(0, ddof=1)


def fit_pair(
    sums: PairProducts,
    f: list[int],
    g: list[int],
    expectation: Expectation | None = None,
    draws: float = 0.0,
) -> Fitted:
    """Fit diagonal coefficients for the rows ``f`` and ``g`` of a scheme.

    ``expectation`` is the mean of the statistic under Q, for a scheme with a control.
    It is used for so many ``draws``: the poorer it is known, the less it is leaned on.
    """
    rows, dim = sums.chain_means(), sums.first.value.shape[-1]
    even, odd = halves(rows.shape[1])
    noise = draws * np.diagonal(expectation.covariance) if expectation else 0.0

    def beta(weights: Any = None) -> np.ndarray:
        if not g:
            return np.zeros(dim)
        return pair_beta(sums.covariance(weights), f, g, noise)

    def average(beta: np.ndarray) -> np.ndarray:
        excess = rows[g].mean(0) - expectation.mean if expectation and g else 0.0
        return rows[f].mean(0) - beta * excess

    rest = [average(beta(even))[odd], average(beta(odd))[even]]
    variance = np.mean([spread(part) for part in rest], axis=0)
    found = average(beta()).mean(0)
    size = np.sqrt(np.einsum("iid->id", sums.covariance()) + rows.mean(1) ** 2)
    control = np.abs(beta()) * size[g].mean(0) if g else 0.0
    steps = float(sums.steps.value)
    return Fitted(beta(), steps * variance, found, size[0] + control)


@joined(total=-2, gram="sum", cross="sum", square="mean")
class FeatureProducts(NamedTuple):
    """Sums for a regression of every statistic on all features.

    Features and statistics are averaged over the pair of chains, if there is one. Sums
    of products are those of every second chain, and of the others.
    """

    center: Any  # (dim,): what is subtracted from f first; one for each block
    steps: Total  # ()
    total: Total  # (chains, features + dim): features, less their known mean, and f
    gram: Total  # (2, features, features)
    cross: Total  # (2, features, dim)
    square: Total  # (features + dim,): squares at each of a pair, averaged over chains


def fold_feature_products(
    statistic: Callable,
    observe: Callable[[Any], Array],
    mean: ArrayLike,
    states: Any,
) -> tuple[Any, Callable]:
    """What to give ``coupling.run`` as ``fold``, to learn coefficients of all features.

    ``observe`` and ``mean`` are as in ``control_series``.

    Examples
    --------
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = control(hmc(0.5, 3), lambda z: -jnp.sum(jnp.cosh(z)))
    >>> states = start(algorithm, jnp.ones((32, 2)))
    >>> observe = partial(control_values, lambda z: jnp.append(z, z**2))
    >>> mean = np.array([0, 0, 1, 1])
    >>> fold = fold_feature_products(jnp.square, observe, mean, states)
    >>> _, sums = run(jax.random.key(0), algorithm, states, 100, fold)
    >>> fit_features(sums, [4]).beta.shape
    (4, 2)
    """
    center = check_statistic(statistic, states)
    mean = jnp.asarray(mean, center.dtype)
    check_features(jax.jit(lambda states: observe(states))(states), mean)

    def products(states: Any) -> tuple:
        raw, values = observe(states), pair_values(statistic, states)
        g, f = raw.mean(0) - mean, values.mean(0) - center
        halves = [(g[i::2], f[i::2]) for i in (0, 1)]
        multiply = partial(jnp.matmul, precision="highest")
        return (
            jnp.ones(()),
            jnp.concatenate([g, f], 1),
            jnp.stack([multiply(a.T, a) for a, _ in halves]),
            jnp.stack([multiply(a.T, b) for a, b in halves]),
            jnp.append((raw**2).mean((0, 1)), (values**2).mean((0, 1))),
        )

    def update(sums: FeatureProducts, states: Any, infos: Any) -> FeatureProducts:
        pairs = zip(sums[1:], products(states), strict=True)
        return FeatureProducts(center, *(Total(old.value + new) for old, new in pairs))

    shapes = jax.eval_shape(products, states)
    zeros = jax.tree.map(lambda x: Total(jnp.zeros(x.shape, x.dtype)), shapes)
    return FeatureProducts(center, *zeros), update


def full_beta(gram: ArrayLike, cross: ArrayLike, ridge: float = 1e-6) -> np.ndarray:
    """The slopes of every statistic on all features, from covariances.

    ``gram`` has shape (features, features), ``cross`` and the slopes (features, dim).
    ``ridge`` is added to the variance of every standardised feature. A feature that
    does not vary gets the coefficient zero.

    Examples
    --------
    >>> full_beta(np.diag([2.0, 0.0]), np.array([[1.0], [0.0]])).round(3).tolist()
    [[0.5], [0.0]]
    """
    gram, cross = np.asarray(gram, np.float64), np.asarray(cross, np.float64)
    scale = np.sqrt(np.diagonal(gram))
    scale = np.where(scale > 0, scale, np.inf)
    standard = gram / np.outer(scale, scale) + ridge * np.eye(len(gram))
    return np.linalg.solve(standard, cross / scale[:, None]) / scale[:, None]


def check_features(features: Array, mean: Array | np.ndarray) -> None:
    """Raise ValueError when features, their means and the chains do not go together."""
    _, num_chains, number = features.shape
    if mean.shape != (number,):
        raise ValueError(
            f"the expectation has {mean.size} entries but there are {number} features: "
            "give E_Q of the same function"
        )
    if num_chains < 8:
        raise ValueError(
            f"{num_chains} chains are too few to fit coefficients on some and try them "
            "on others: use at least 8"
        )
    if not jnp.isfinite(features).all() or not jnp.isfinite(mean).all():
        raise ValueError("a feature or its expectation is not finite")


PENALTIES = (1e-1, 1e-3, 1e-5, 1e-7)


def constant_features(sums: FeatureProducts, eps: float) -> np.ndarray:
    """Which features vary by no more than their rounding: (features,)."""
    steps = sums.steps.value
    chains, number = sums.total.value.shape[0], sums.gram.value.shape[-1]
    size = np.sqrt(sums.square.value[:number] / steps)
    draws = steps * chains
    mean = sums.total.value[:, :number].sum(0) / draws
    variance = np.einsum("hkk->k", sums.gram.value) / draws - mean**2
    return np.sqrt(np.maximum(variance, 0)) <= 100 * eps * size


def feature_covariances(
    sums: FeatureProducts, use: np.ndarray, groups: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Covariances of features, and with the statistics, over some halves of chains."""
    chains, number = sums.total.value.shape[0], sums.gram.value.shape[-1]
    some = np.isin(np.arange(chains) % 2, groups)
    draws = float(sums.steps.value) * some.sum()
    g, f = np.split(sums.total.value[some].sum(0) / draws, [number])
    gram = sums.gram.value[groups].sum(0) / draws - np.outer(g, g)
    cross = sums.cross.value[groups].sum(0) / draws - np.outer(g, f)
    return np.where(use[:, None] & use, gram, 0), np.where(use[:, None], cross, 0)


class CrossFit:
    """Fits coefficients on half of the chains, and tries them on the other half."""

    def __init__(self, sums: FeatureProducts, noise: np.ndarray, eps: float) -> None:
        """Prepare covariances of the first half, the second, and all chains."""
        self.sums, self.steps = sums, float(sums.steps.value)
        number = sums.gram.value.shape[-1]
        self.features, self.values = np.split(
            sums.total.value / self.steps, [number], axis=1
        )
        use = ~constant_features(sums, eps)
        groups = [0], [1], [0, 1]
        self.tables = [feature_covariances(sums, use, group) for group in groups]
        self.noise = np.broadcast_to(noise, (number, number))

    def fit(self, table: int, width: int, penalty: float) -> np.ndarray:
        """Coefficients of the first ``width`` features: (width, dim)."""
        gram, cross = self.tables[table]
        gram = (gram + self.noise)[:width, :width]
        return full_beta(gram, cross[:width], penalty)

    def residual(self, width: int, penalty: float) -> np.ndarray:
        """Variance of averages of chains that nothing was fitted on: (dim,)."""
        even, odd = halves(len(self.values))
        rest = [
            self.values[some]
            - self.features[some, :width] @ self.fit(i, width, penalty)
            for i, some in enumerate((odd, even))
        ]
        return np.mean([part.var(0, ddof=1) for part in rest], axis=0)

    def mean(self, beta: np.ndarray) -> np.ndarray:
        """The estimate with these coefficients: (dim,)."""
        center = np.asarray(self.sums.center, np.float64)
        rest = self.values - self.features[:, : len(beta)] @ beta
        return center.reshape(-1, rest.shape[1])[0] + rest.mean(0)

    def size(self, beta: np.ndarray) -> np.ndarray:
        """How large the numbers are that are added up: (dim,)."""
        root = np.sqrt(self.sums.square.value / self.steps)
        own = root[self.features.shape[1] :]
        return own + root[: len(beta)] @ np.abs(beta)


def fit_features(
    sums: FeatureProducts,
    widths: list[int],
    noise: ArrayLike = 0.0,
    eps: float = 1.2e-7,
) -> Fitted:
    """Fit coefficients of the first so and so many features: the best of ``widths``.

    How many features, and which penalty, is decided for each statistic by what they
    leave of the averages of chains that they were not fitted on. ``noise`` counts as
    covariance of the features: that of their known mean, times the draws to come.

    Examples
    --------
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = control(hmc(0.5, 3), standard_normal)
    >>> states = start(algorithm, jax.random.normal(jax.random.key(0), (32, 2)))
    >>> observe = partial(control_values, jnp.square)
    >>> fold = fold_feature_products(jnp.square, observe, np.ones(2), states)
    >>> _, sums = run(jax.random.key(1), algorithm, states, 100, fold)
    >>> bool(np.allclose(fit_features(sums, [2]).beta, np.eye(2), atol=1e-3))  # Q = P
    True
    """
    trial = CrossFit(sums, np.asarray(noise), eps)
    tried = [(0, 1.0), *product([w for w in widths if w], PENALTIES)]
    variances = np.stack([trial.residual(*each) for each in tried])
    best = variances.argmin(0)
    beta = np.zeros((max(tried[i][0] for i in best), best.size))
    for i in np.unique(best):
        chosen = trial.fit(2, *tried[i])
        beta[: len(chosen), best == i] = chosen[:, best == i]
    return Fitted(
        beta, trial.steps * variances.min(0), trial.mean(beta), trial.size(beta)
    )


def shared_variance(
    expectation: Expectation, beta: ArrayLike
) -> Float[np.ndarray, " dim"]:
    """Variance that the error of a known mean gives to Z: (dim,).

    Examples
    --------
    >>> expectation = Expectation(np.zeros(2), np.eye(2), num_draws=100)
    >>> shared_variance(expectation, np.array([1.0, 2.0])).tolist()
    [1.0, 4.0]
    """
    beta = np.asarray(beta, np.float64)
    if beta.ndim == 1:
        return beta**2 * np.diagonal(expectation.covariance)
    covariance = expectation.covariance[: len(beta), : len(beta)]
    return (beta * (covariance @ beta)).sum(0)


def worthwhile_draws(
    result: Result, expectation: Expectation, cost_ratio: float
) -> Float[np.ndarray, " dim"]:
    """How many draws of Q balance the run behind ``result``, for each statistic.

    ``cost_ratio`` is what one step of one chain costs, counted in draws of Q. The
    expectation must come from ``draw_expectation``: it tells how much one draw varies.

    Examples
    --------
    >>> from swindles.models import Model, make_problem
    >>> from swindles.schemes import swindle
    >>> from swindles.coupling import hmc
    >>> model = Model(lambda z: -0.6 * jnp.sum(z**2), jnp.zeros(2))
    >>> problem, key = make_problem(model, jnp.square), jax.random.key(0)
    >>> expectation = draw_expectation(key, jnp.square, jnp.zeros(2), 2000)
    >>> result = swindle(key, "control", hmc(0.5, 3), problem, 32, 100, 50, expectation)
    >>> draws = worthwhile_draws(result, expectation, cost_ratio=10)
    >>> bool(draws.min() > 2000)  # more draws would have paid
    True
    """
    if expectation.num_draws == 0 or result.beta is None:
        raise ValueError("an exact expectation needs no draws")
    estimate, beta = result.estimate, result.beta
    noise = shared_variance(expectation, beta)
    per_draw = noise * expectation.num_draws
    from_chains = np.maximum(estimate.mcse**2 - noise, 0)
    # a / N is `from_chains`, so n = N sqrt(b r / a) = sqrt(N b r / from_chains).
    with np.errstate(divide="ignore"):
        return np.sqrt(estimate.num_draws * per_draw * cost_ratio / from_chains)
