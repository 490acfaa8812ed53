"""Control: a chain whose answer we know.

Mirrored from book/control.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.base import SamplingAlgorithm
from jax import Array
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Key

from swindles.accuracy import (
    Moments,
    add_step,
    block_means,
    empty_moments,
    summarize,
    target_variance,
)
from swindles.antithetic import (
    PairSums,
    Result,
    antithetic_correlation,
    evaluate,
    fold_pairs,
    negate,
    pair_values,
)
from swindles.coupling import LogDensity, Sampler, Total, couple
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
    >>> sorted(start(algorithm, jnp.ones((4, 2))))
    ['control', 'plus']
    """
    return couple(plus=sampler(logdensity), control=sampler(reference))


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
    >>> known = draw_expectation(jax.random.key(0), jnp.square, jnp.zeros(1), 20_000)
    >>> error = np.sqrt(known.covariance[0, 0])
    >>> bool(0.01 < error < 0.02), bool(abs(known.mean[0] - 1) < 4 * error)
    (True, True)
    """

    mean: Float[np.ndarray, " features"]
    covariance: Float[np.ndarray, "features features"]
    num_draws: int = 0


def exact(mean: Any) -> Expectation:
    """An expectation that is known exactly; ``mean`` may be a pytree.

    Examples
    --------
    >>> exact({"mean": np.zeros(2), "square": np.ones(2)}).mean.tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(mean)]
    flat = np.concatenate(leaves).astype(np.float64)
    return Expectation(flat, np.zeros((flat.size, flat.size)))


@partial(jax.jit, static_argnames=("feature", "batch"))
def sum_draws(
    keys: Array, like: Any, feature: Callable, batch: int
) -> tuple[Array, Array, Array]:
    """Sums over antithetic pairs from N(0, I), one batch of pairs for each key.

    Returns a center, the products summed over all pairs, and the deviations from the
    center summed over each batch.
    """
    flat, unravel = ravel_pytree(like)

    def pair_mean(z: Array) -> Array:
        ends = [ravel_pytree(feature(unravel(end)))[0] for end in (z, -z)]
        return (ends[0] + ends[1]) / 2

    center = pair_mean(jnp.zeros_like(flat))

    def add(gram: Array, key: Array) -> tuple[Array, Array]:
        z = jax.random.normal(key, (batch, flat.size), flat.dtype)
        deviation = jax.vmap(pair_mean)(z) - center
        product = jnp.matmul(deviation.T, deviation, precision="highest")
        return gram + product, deviation.sum(0)

    zero = jnp.zeros((center.size, center.size), center.dtype)
    return center, *jax.lax.scan(add, zero, keys)


def draw_expectation(
    key: Key[Array, ""],
    feature: Callable,
    like: Any,
    num_draws: int,
    batch: int = 1024,
) -> Expectation:
    """Estimate E_Q of ``feature`` for Q = N(0, I) from at least ``num_draws`` draws.

    ``like`` is one position: draws have its shape. Draws come in antithetic pairs, in
    batches of ``batch`` pairs.

    Examples
    --------
    >>> known = draw_expectation(jax.random.key(0), jnp.square, jnp.zeros(2), 20_000)
    >>> bool(np.allclose(known.mean, 1, atol=0.05)), known.num_draws
    (True, 20480)
    """
    keys = jax.random.split(key, -(-num_draws // (2 * batch)))
    sums = jax.device_get(sum_draws(keys, like, feature, batch))
    center, gram, totals = (part.astype(np.float64) for part in sums)
    pairs = len(keys) * batch
    shift = totals.sum(0) / pairs
    covariance = gram / pairs - np.outer(shift, shift)
    return Expectation(center + shift, covariance / (pairs - 1), 2 * pairs)


class ControlSums(NamedTuple):
    """Running sums of a run with a control chain."""

    pairs: PairSums
    feature: Moments  # of g(Y), averaged over Y and -Y if there are two
    gram: Total  # (groups, features, features): g g^T
    cross: Total  # (groups, features, dim): g f^T
    total: Total  # (groups, 1 + dim + features): 1, f and g, over the same steps


def feature_values(feature: Callable, states: dict[str, Any]) -> Array:
    """Features at Y and, when there is a "minus" chain, at -Y: (1 or 2, chains, k)."""
    places = [states["control"].position]
    if "minus" in states:
        places.append(negate(states["control"].position))
    return evaluate(feature, places)


# Groups of chains for cross-fitting: each uses the coefficients of the others.
NUM_GROUPS = 4


def group_edges(num_chains: int) -> np.ndarray:
    """Where the groups of chains begin and end: (groups + 1,)."""
    return np.linspace(0, num_chains, NUM_GROUPS + 1).astype(int)


def products(a: Array, b: Array) -> Array:
    """Sums over the chains of each group, mean over signs, of a b^T."""
    return jnp.stack(
        [
            jnp.einsum("sck,scd->kd", a[:, i:j], b[:, i:j], precision="highest")
            for i, j in pairwise(group_edges(a.shape[1]))
        ]
    ) / len(a)


def diagonal_products(a: Array, b: Array) -> Array:
    """The diagonals of ``products``: (groups, features)."""
    both = (a * b).mean(0)
    edges = pairwise(group_edges(a.shape[1]))
    return jnp.stack([both[i:j].sum(0) for i, j in edges])


def values_in(statistic: Callable, states: dict[str, Any], rows: int) -> Array:
    """The statistic at X+ and X- or, in one row, their average: (rows, chains, dim)."""
    values = pair_values(statistic, states)
    return values if len(values) == rows else values.mean(0, keepdims=True)


def add_products(
    sums: list[Total], features: Array, values: Array, product: Callable
) -> list[Total]:
    """Add one step of all chains to the sums for the regression."""
    one = jnp.ones_like(values[..., :1])
    everything = jnp.concatenate([one, values, features], -1)
    total = product(one, everything).reshape(NUM_GROUPS, -1)
    parts = product(features, features), product(features, values), total
    return [Total(old.value + new) for old, new in zip(sums, parts, strict=True)]


def fold_features(
    statistic: Callable,
    states: dict[str, Any],
    observe: Callable[[dict[str, Any]], Array],
    expectation: Expectation,
    full: bool = True,
    every: int = 1,
) -> tuple[Any, Callable]:
    """What to give ``coupling.run`` as ``fold`` for any features of known mean.

    ``observe`` takes the states of all chains to features of shape (1 or 2, chains,
    features): at each of a pair of chains, or their average. ``full`` is whether to sum
    all products, or only those of f_j with g_j; ``every`` at how many steps once.
    """
    pairs, update_pairs = fold_pairs(statistic, states)
    center = jnp.asarray(expectation.mean, pairs.plus.center.dtype)
    features = observe(states)
    values = values_in(statistic, states, len(features))
    check_features(features, values, center, full)
    add = partial(add_products, product=products if full else diagonal_products)

    def update(sums: ControlSums, states: dict, infos: dict) -> ControlSums:
        features = observe(states)
        values = values_in(statistic, states, len(features)) - sums.pairs.plus.center
        moments = add_step(sums.feature, features.mean(0))
        more = partial(add, features=features - center, values=values)
        turn = (moments.steps - 1) % every == 0
        parts = jax.lax.cond(turn, more, lambda same: same, list(sums[2:]))
        return ControlSums(update_pairs(sums.pairs, states, infos), moments, *parts)

    some = add([Total(jnp.zeros(()))] * 3, features, values)
    zeros = jax.tree.map(jnp.zeros_like, some)
    return ControlSums(pairs, empty_moments(center, features.shape[1]), *zeros), update


def fold_controls(
    statistic: Callable,
    states: dict[str, Any],
    expectation: Expectation,
    feature: Callable | None = None,
    full: bool = True,
) -> tuple[Any, Callable]:
    """What to give ``coupling.run`` as ``fold`` for a run with a control chain.

    Parameters
    ----------
    expectation
        The mean of ``feature`` under Q.
    feature
        What to evaluate at the control chain; the statistic itself by default.
    full
        Whether to sum all products of features, or only those of f_j with g_j.

    Examples
    --------
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = control(hmc(0.5, 3), lambda z: -jnp.sum(jnp.cosh(z)))
    >>> states = start(algorithm, jnp.ones((32, 2)))
    >>> fold = fold_controls(jnp.square, states, exact(np.ones(2)))
    >>> _, sums = run(jax.random.key(0), algorithm, states, 100, fold, num_blocks=5)
    >>> sums.feature.total.shape, sums.gram.value.shape
    ((5, 32, 2), (4, 2, 2))
    """
    observe = partial(feature_values, feature or statistic)
    return fold_features(statistic, states, observe, expectation, full)


def check_features(features: Array, values: Array, mean: Array, full: bool) -> None:
    """Raise ValueError when features, expectation and chains do not go together."""
    _, num_chains, num_features = features.shape
    dim = values.shape[-1]
    if mean.shape != (num_features,):
        raise ValueError(
            f"the expectation has {mean.size} entries but there are {num_features} "
            "features: give E_Q of the same function"
        )
    if not full and num_features != dim:
        raise ValueError(
            f"the diagonal regression pairs each of {dim} statistics with one feature, "
            f"but there are {num_features}: use full=True"
        )
    if num_chains < 2 * NUM_GROUPS:
        raise ValueError(
            f"{num_chains} chains are too few to fit coefficients on some and use them "
            f"on others: use at least {2 * NUM_GROUPS}"
        )
    if not jnp.isfinite(features).all() or not jnp.isfinite(mean).all():
        raise ValueError("a feature or its expectation is not finite")


def solve_beta(gram: np.ndarray, cross: np.ndarray, ridge: float = 1e-6) -> np.ndarray:
    """Least squares coefficients (features, dim) from covariances.

    With vectors for ``gram`` and ``cross`` the regression is diagonal. Features that do
    not vary get the coefficient zero.

    Examples
    --------
    >>> solve_beta(np.diag([2.0, 0.0]), np.array([[1.0], [0.0]])).round(3).tolist()
    [[0.5], [0.0]]
    """
    if gram.ndim == 1:
        varies = gram > 0
        return np.diag(np.where(varies, cross / np.where(varies, gram, 1), 0))
    scale = np.sqrt(np.diagonal(gram))
    scale = np.where(scale > 0, scale, np.inf)
    standard = gram / np.outer(scale, scale) + ridge * np.eye(len(gram))
    return np.linalg.solve(standard, cross / scale[:, None]) / scale[:, None]


def covariances(
    sums: ControlSums, diagonal: bool, groups: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Covariances of features with features and with f, over some groups of chains."""
    number, *means = sums.total.value[groups].sum(0)
    f, g = np.split(np.array(means) / number, [sums.pairs.plus.total.shape[-1]])
    gram, cross = (t.value[groups].sum(0) / number for t in (sums.gram, sums.cross))
    if gram.ndim == 1:
        return gram - g * g, cross - g * f
    gram, cross = gram - np.outer(g, g), cross - np.outer(g, f)
    return (np.diagonal(gram), np.diagonal(cross)) if diagonal else (gram, cross)


Beta = Literal["full", "diagonal"] | np.ndarray


def fit_groups(sums: ControlSums, beta: Beta) -> np.ndarray:
    """Coefficients to use on each group of chains: (groups, features, dim).

    A group's coefficients are fitted on the other groups, or given as an array.
    """
    if not isinstance(beta, str):
        shape = (sums.feature.total.shape[-1], sums.pairs.plus.total.shape[-1])
        return np.broadcast_to(np.asarray(beta, np.float64), (NUM_GROUPS, *shape))
    if beta not in ("full", "diagonal") or (
        beta == "full" and sums.gram.value.ndim == 2
    ):
        raise ValueError(
            f'beta={beta!r}: say "diagonal", "full" (after a fold with full=True), or '
            "give an array of shape (features, dim)"
        )
    everyone = range(NUM_GROUPS)
    others = [[k for k in everyone if k != group] for group in everyone]
    fits = [solve_beta(*covariances(sums, beta == "diagonal", k)) for k in others]
    return np.stack(fits)


def control_correlation(sums: ControlSums, beta: np.ndarray) -> np.ndarray:
    """Correlation of f(X) with its prediction from g(Y): sqrt(1 - Var Z / Var f)."""
    gram, cross = covariances(sums, False, list(range(NUM_GROUPS)))
    if gram.ndim == 1:
        slope = np.diagonal(beta)
        removed = 2 * slope * cross - slope**2 * gram
    else:
        removed = 2 * (beta * cross).sum(0) - (beta * (gram @ beta)).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(np.clip(removed / target_variance(sums.pairs.plus), 0, 1))


def estimate_controls(
    sums: ControlSums,
    expectation: Expectation,
    beta: Literal["full", "diagonal"] | Float[np.ndarray, "features dim"] = "diagonal",
) -> Result:
    """The estimate of a run with a control chain from its running sums.

    Parameters
    ----------
    beta
        "diagonal" regresses each f_j on its own feature g_j, "full" on all features; an
        array is used as it is.

    Examples
    --------
    With Q = P the control chain knows the whole error:

    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = control(hmc(0.5, 3), standard_normal)
    >>> states = start(algorithm, jax.random.normal(jax.random.key(0), (32, 2)))
    >>> known = exact(np.ones(2))
    >>> fold = fold_controls(jnp.square, states, known)
    >>> _, sums = run(jax.random.key(1), algorithm, states, 100, fold)
    >>> estimate_controls(sums, known, np.eye(2)).estimate.mean.round(5).tolist()
    [1.0, 1.0]
    """
    betas = fit_groups(sums, beta)
    means = block_means(sums.pairs.average)
    excess = block_means(sums.feature) - np.asarray(expectation.mean)
    groups = zip(betas, pairwise(group_edges(means.shape[1])), strict=True)
    means = np.concatenate(
        [means[:, i:j] - excess[:, i:j] @ beta for beta, (i, j) in groups], axis=1
    )
    average = betas.mean(0)
    shared = (average * (expectation.covariance @ average)).sum(0)
    rates = sums.pairs.rates.means()
    rho = {"control": control_correlation(sums, average)}
    if "minus" in rates["acceptance"]:
        rho["minus"] = antithetic_correlation(sums.pairs.plus, sums.pairs.average)
    return Result(summarize(sums.pairs.plus, means, shared), rho, rates, average)


def worthwhile_draws(
    result: Result, expectation: Expectation, cost_ratio: float
) -> Float[np.ndarray, " dim"]:
    """How many draws of Q balance the run behind ``result``, for each statistic.

    ``cost_ratio`` is what one step of one chain costs, counted in draws of Q. The
    expectation must come from ``draw_expectation``: it tells how much one draw varies.

    Examples
    --------
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = control(hmc(0.5, 3), lambda z: -0.6 * jnp.sum(z**2))
    >>> states = start(algorithm, jax.random.normal(jax.random.key(0), (32, 2)))
    >>> known = draw_expectation(jax.random.key(1), jnp.square, jnp.zeros(2), 2000)
    >>> fold = fold_controls(jnp.square, states, known)
    >>> _, sums = run(jax.random.key(2), algorithm, states, 100, fold)
    >>> draws = worthwhile_draws(estimate_controls(sums, known), known, cost_ratio=10)
    >>> bool(draws.min() > 2000)  # more draws would have paid
    True
    """
    if expectation.num_draws == 0 or result.beta is None:
        raise ValueError("an exact expectation needs no draws")
    estimate, beta = result.estimate, result.beta
    shared = np.einsum("kd,kl,ld->d", beta, expectation.covariance, beta)
    per_draw = shared * expectation.num_draws
    from_chains = np.maximum(estimate.mcse**2 - shared, 0)
    # a / N is `from_chains`, so n = N sqrt(b r / a) = sqrt(N b r / from_chains).
    with np.errstate(divide="ignore"):
        return np.sqrt(estimate.num_draws * per_draw * cost_ratio / from_chains)
