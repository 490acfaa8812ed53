"""Stein: what the gradient knows.

Mirrored from book/stein.md: edit there, then run `make mirror`.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from swindles.accuracy import block_means, target_variance
from swindles.antithetic import (
    Result,
    antithetic,
    estimate_pairs,
    evaluate,
    negate,
    pair_values,
    plain,
)
from swindles.control import (
    NUM_GROUPS,
    ControlSums,
    Expectation,
    control,
    covariances,
    estimate_controls,
    exact,
    feature_values,
    fold_features,
    group_edges,
    products,
    solve_beta,
)
from swindles.coupling import (
    Sampler,
    Total,
    couple,
    require_positive,
    run,
    start,
)
from swindles.cva import cva
from swindles.latent import Problem, known_expectation
from swindles.transport import standard_normal

Order = Literal["none", "first", "diagonal", "full"]
ORDERS: tuple[Order, ...] = get_args(Order)


def levels(dim: int, order: Order) -> np.ndarray:
    """At which order each Stein feature comes in, from 1 ("first") on: (features,).

    Examples
    --------
    >>> levels(3, "full").tolist()
    [1, 1, 1, 2, 2, 2, 3, 3, 3]
    """
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}: say one of {', '.join(ORDERS)}")
    sizes = [0, dim, dim, dim * (dim - 1) // 2][: ORDERS.index(order) + 1]
    return np.repeat(np.arange(len(sizes)), sizes)


def stein_features(z: Array, score: Array, order: Order) -> Array:
    """The features of polynomials up to an order: from (..., dim) to (..., features).

    Examples
    --------
    >>> z = jnp.array([1.0, 2.0])
    >>> stein_features(z, -z, "full").tolist()
    [-1.0, -2.0, 0.0, -3.0, -4.0]
    """
    blocks = [z[..., :0], score, 1 + z * score][: ORDERS.index(order) + 1]
    if order == "full":
        i, j = np.triu_indices(z.shape[-1], 1)
        blocks.append(z[..., i] * score[..., j] + z[..., j] * score[..., i])
    return jnp.concatenate(blocks, -1)


def scores(states: dict[str, Any]) -> Array:
    """Gradients that the sampler has left at X+ and X-: (1 or 2, chains, dim)."""
    if not hasattr(states["plus"], "logdensity_grad"):
        raise ValueError(
            "Stein features need gradients, and the states of this sampler have no "
            '"logdensity_grad": use HMC or MALA, or order="none"'
        )
    slopes = [states["plus"].logdensity_grad]
    if "minus" in states:
        slopes.append(negate(states["minus"].logdensity_grad))
    return evaluate(lambda slope: slope, slopes)


def all_features(statistic: Callable, order: Order, states: dict[str, Any]) -> Array:
    """Those of the control chain, if any, then Stein's: (1 or 2, chains, features)."""
    z = pair_values(lambda z: z, states)
    slopes = z if order == "none" else scores(states)
    found = [stein_features(z, slopes, order)]
    if "control" in states:
        found.insert(0, feature_values(statistic, states))
    return jnp.concatenate(found, -1)


class SteinSums(NamedTuple):
    """Running sums of a run with Stein features."""

    controls: ControlSums  # of all features, averaged over X+ and X-
    level: Any  # (features,): 0 for the control chain's, then as ``levels``
    size: Total  # (features,): squares of the features at each of X+ and X-


def known_means(expectation: Expectation | None, num_stein: int) -> Expectation:
    """What is known of the control chain's features, then zeros for Stein's."""
    known = exact(np.zeros(0)) if expectation is None else expectation
    mean = np.append(known.mean, np.zeros(num_stein))
    covariance = np.zeros((mean.size, mean.size))
    covariance[: known.mean.size, : known.mean.size] = known.covariance
    return Expectation(mean, covariance, known.num_draws)


# The products of so many features fill a third of a gigabyte.
MOST_FEATURES = 3000


def plan_features(
    states: dict[str, Any], order: Order, expectation: Expectation | None
) -> tuple[Expectation, np.ndarray]:
    """The known means of all features, and the level of each; or a ValueError."""
    if "control" not in states:
        expectation = None
    elif expectation is None:
        raise ValueError("a control chain is of use only with the expectation under Q")
    stein = levels(pair_values(lambda z: z, states).shape[-1], order)
    known = known_means(expectation, stein.size)
    number = known.mean.size
    if number > MOST_FEATURES:
        raise ValueError(
            f"{number} features are more than {MOST_FEATURES}: use a lower order"
        )
    return known, np.append(np.zeros(number - stein.size, int), stein)


def fold_stein(
    statistic: Callable,
    states: dict[str, Any],
    order: Order = "full",
    expectation: Expectation | None = None,
    every: int = 1,
) -> tuple[Any, Callable]:
    """What to give ``coupling.run`` as ``fold`` for any scheme with Stein features.

    ``expectation`` is the mean of the statistic under Q, for schemes with a control
    chain. Products for the regression are summed at every ``every``-th step.

    Examples
    --------
    >>> from swindles.coupling import hmc
    >>> algorithm = plain(hmc(0.5, 3), lambda z: -jnp.sum(jnp.cosh(z)))
    >>> states = start(algorithm, jnp.ones((32, 2)))
    >>> fold = fold_stein(jnp.square, states, "diagonal")
    >>> _, sums = run(jax.random.key(0), algorithm, states, 10, fold, num_blocks=5)
    >>> sums.controls.feature.total.shape  # blocks, chains, features
    (5, 32, 4)
    """
    require_positive(every=every)
    known, level = plan_features(states, order, expectation)
    observe = partial(all_features, statistic, order)

    def average(states: dict) -> Array:
        return observe(states).mean(0, keepdims=True)

    controls, update_controls = fold_features(
        statistic, states, average, known, every=every
    )

    def update(sums: SteinSums, states: dict, infos: dict) -> SteinSums:
        squares = (observe(states) ** 2).mean((0, 1))
        controls = update_controls(sums.controls, states, infos)
        return SteinSums(controls, sums.level, Total(sums.size.value + squares))

    size = Total(jnp.zeros_like(controls.feature.center))
    return SteinSums(controls, jnp.asarray(level), size), update


def take(sums: SteinSums, order: Order) -> SteinSums:
    """The sums that a run with features of this order, or less, would have kept."""
    width = int(np.sum(sums.level[0] <= ORDERS.index(order)))
    feature, dim = sums.controls.feature, sums.controls.pairs.plus.total.shape[-1]
    controls = sums.controls._replace(
        feature=feature._replace(
            center=feature.center[..., :width],
            total=feature.total[..., :width],
            square=feature.square[..., :width],
        ),
        gram=Total(sums.controls.gram.value[:, :width, :width]),
        cross=Total(sums.controls.cross.value[:, :width]),
        total=Total(sums.controls.total.value[:, : 1 + dim + width]),
    )
    return SteinSums(controls, sums.level[:, :width], Total(sums.size.value[:width]))


PENALTIES = 10.0 ** np.arange(1, -9, -1)


class Ridge(NamedTuple):
    """Ridge regression on standardised features, in the basis of eigenvectors."""

    scale: np.ndarray  # (features,): standard deviations; infinite for constants
    values: np.ndarray  # (features,): eigenvalues of the correlations
    vectors: np.ndarray  # (features, features)
    cross: np.ndarray  # (features, dim): covariances with f, in that basis

    def weights(self, penalty: float) -> np.ndarray:
        """The coefficients in the basis of eigenvectors."""
        return self.cross / (np.maximum(self.values, 0) + penalty)[:, None]

    def beta(self, penalty: float) -> np.ndarray:
        """The coefficients of the features: (features, dim)."""
        return (self.vectors @ self.weights(penalty)) / self.scale[:, None]

    def left(self, gram: np.ndarray, cross: np.ndarray) -> list[np.ndarray]:
        """Variance left where these are the covariances, for every penalty."""
        turn = self.vectors / self.scale[:, None]
        gram, cross = turn.T @ gram @ turn, turn.T @ cross
        tried = map(self.weights, PENALTIES)
        return [(w * (gram @ w - 2 * cross)).sum(0) for w in tried]


def ridge(gram: np.ndarray, cross: np.ndarray) -> Ridge:
    """Prepare a ridge regression for all penalties: one eigendecomposition.

    Features that do not vary get the coefficient zero.

    Examples
    --------
    >>> fit = ridge(np.diag([4.0, 0.0]), np.array([[2.0], [0.0]]))
    >>> fit.beta(0.0001).round(3).tolist(), fit.beta(1.0).tolist()
    ([[0.5], [0.0]], [[0.25], [0.0]])
    """
    variance = np.diagonal(gram)
    scale = np.sqrt(np.where(variance > 0, variance, np.inf))
    values, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
    return Ridge(scale, values, vectors, vectors.T @ (cross / scale[:, None]))


class Candidates(NamedTuple):
    """Coefficients that were fitted on some chains, to be tried on others."""

    own: np.ndarray  # the paper's diagonal ones; no rows without a control chain
    ridges: list[Ridge]  # of the features up to each level

    def left(self, gram: np.ndarray, cross: np.ndarray) -> np.ndarray:
        """What each candidate makes of the variance of f: (candidates, dim)."""
        n = len(self.own)
        found = [(self.own * (gram[:n, :n] @ self.own - 2 * cross[:n])).sum(0)]
        for fit in self.ridges:
            n = len(fit.scale)
            found += fit.left(gram[:n, :n], cross[:n])
        return np.stack(found)

    def beta(self, number: int) -> np.ndarray:
        """The coefficients of one candidate: (features, dim)."""
        if number == 0:
            return self.own
        ridge, penalty = divmod(number - 1, len(PENALTIES))
        return self.ridges[ridge].beta(PENALTIES[penalty])


def fit_candidates(
    gram: np.ndarray, cross: np.ndarray, level: np.ndarray
) -> Candidates:
    """Fit everything worth a trial to the covariances of some chains."""
    own = int(np.sum(level == 0))
    diagonals = np.diagonal(gram)[:own], np.diagonal(cross)[:own]
    widths = [int(np.sum(level <= last)) for last in np.unique(level)]
    return Candidates(
        solve_beta(*diagonals) if own else np.zeros((0, cross.shape[1])),
        [ridge(gram[:width, :width], cross[:width]) for width in widths],
    )


def tables(
    sums: SteinSums, known: Expectation, groups: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Covariances over some groups of chains, for a choice of coefficients.

    The error of a mean that is known from draws counts as variance of its feature.
    Features that average to rounding errors count as constant.
    """
    gram, cross = covariances(sums.controls, False, groups)
    moments = sums.controls.feature
    steps, dtype = np.sum(moments.steps), moments.total.dtype
    size = np.sqrt(sums.size.value / steps)
    dead = np.sqrt(np.maximum(np.diagonal(gram), 0)) < 100 * np.finfo(dtype).eps * size
    gram = gram + steps * moments.total.shape[1] * known.covariance
    gram[dead], gram[:, dead], cross[dead] = 0, 0, 0
    return gram, cross


def block_tables(
    sums: SteinSums, known: Expectation, group: int
) -> tuple[np.ndarray, np.ndarray]:
    """Covariances of block means over one group of chains, for a trial.

    They are multiplied by the steps of a block: if steps were independent, these would
    be the covariances of a step.
    """
    moments = sums.controls.feature
    chains = slice(*group_edges(moments.total.shape[1])[group : group + 2])
    g, f = (
        block_means(m)[:, chains].reshape(-1, m.total.shape[-1])
        for m in (moments, sums.controls.pairs.average)
    )
    g, f = g - g.mean(0), f - f.mean(0)
    each = np.mean(moments.steps) / (len(g) - 1)
    draws = np.sum(moments.steps) * moments.total.shape[1]
    return each * g.T @ g + draws * known.covariance, each * g.T @ f


def fit_stein(sums: SteinSums, known: Expectation) -> np.ndarray:
    """Coefficients to use on each group of chains: (groups, features, dim).

    They are fitted on the other groups. Which candidate to use is decided for each
    statistic, by the error that it leaves in the chains it was not fitted on.
    """
    everyone = list(range(NUM_GROUPS))
    others = [[k for k in everyone if k != group] for group in everyone]
    trains = [tables(sums, known, groups) for groups in others]
    fits = [fit_candidates(gram, cross, sums.level[0]) for gram, cross in trains]
    left = [fit.left(*block_tables(sums, known, k)) for k, fit in enumerate(fits)]
    best = np.sum(left, axis=0).argmin(0)
    betas = np.zeros((NUM_GROUPS, *sums.controls.cross.value.shape[1:]))
    for fit, beta in zip(fits, betas, strict=True):
        for number in np.unique(best):
            chosen = fit.beta(number)
            beta[: len(chosen), best == number] = chosen[:, best == number]
    return betas


def estimate_stein(
    sums: SteinSums, expectation: Expectation | None = None, order: Order = "full"
) -> Result:
    """The estimate of a run with Stein features from its running sums.

    ``order`` may be lower than that of the fold.

    Examples
    --------
    On a Gaussian nothing is left of the error of a quadratic:

    >>> from swindles.coupling import hmc
    >>> algorithm = plain(hmc(0.5, 3), lambda z: -0.5 * jnp.sum(z**2))
    >>> states = start(algorithm, jax.random.normal(jax.random.key(0), (32, 2)))
    >>> fold = fold_stein(jnp.square, states)
    >>> _, sums = run(jax.random.key(1), algorithm, states, 100, fold)
    >>> estimate_stein(sums).estimate.mean.round(5).tolist()
    [1.0, 1.0]
    """
    sums = take(sums, order)
    controls, level = sums.controls, sums.level[0]
    result = estimate_pairs(controls.pairs)
    if level.size == 0:
        return result
    known = known_means(expectation if level[0] == 0 else None, np.sum(level > 0))
    found = estimate_controls(controls, known, fit_stein(sums, known))
    both = target_variance(controls.pairs.plus), target_variance(controls.pairs.average)
    with np.errstate(divide="ignore", invalid="ignore"):
        predicted = found.rho["control"] * np.sqrt(np.divide(*both))
    rho = result.rho | {"features": np.minimum(predicted, 1)}
    size = np.sqrt(sums.size.value / np.sum(controls.feature.steps))
    magnitude = np.abs(found.estimate.mean) + size @ np.abs(np.asarray(found.beta))
    rounding = np.finfo(controls.feature.total.dtype).eps * magnitude
    return found._replace(rho=rho, estimate=found.estimate._replace(rounding=rounding))


def stein_swindle(
    key: Key[Array, ""],
    scheme: Callable,
    sampler: Sampler,
    problem: Problem,
    num_chains: int,
    num_steps: int,
    warmup: int,
    order: Order = "full",
    expectation: Expectation | None = None,
) -> Result:
    """Run a scheme with Stein features, as ``latent.swindle`` does without them.

    ``expectation``, the mean of the statistic under Q, is worked out when there is a
    control chain and it is not given.

    Examples
    --------
    >>> from swindles.coupling import hmc
    >>> from swindles.transport import identity
    >>> problem = Problem(lambda x: -jnp.sum(jnp.cosh(x)), identity(2), 2, jnp.square)
    >>> key = jax.random.key(0)
    >>> result = stein_swindle(key, antithetic, hmc(0.5, 3), problem, 32, 100, 20)
    >>> bool(result.estimate.ess.min() > 5 * result.estimate.num_draws)
    True
    """
    keys = jax.random.split(key, 4)
    algorithm = scheme(sampler, problem.latent())
    states = start(algorithm, jax.random.normal(keys[0], (num_chains, problem.dim)))
    if expectation is None and "control" in states:
        expectation = known_expectation(keys[3], problem)
    features = plan_features(states, order, expectation)[1].size
    # Fifty draws for each feature fit the coefficients well enough.
    every = max(num_chains * num_steps // (50 * max(features, 1)), 1)
    fold = fold_stein(problem.feature(), states, order, expectation, every)
    states, _ = run(keys[1], algorithm, states, warmup, fold)
    _, sums = run(keys[2], algorithm, states, num_steps, fold)
    return estimate_stein(sums, expectation, order)


SCHEMES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "plain": (plain, ("plus",)),
    "antithetic": (antithetic, ("plus", "minus")),
    "control": (control, ("plus", "control")),
    "cva": (cva, ("plus", "minus", "control")),
}


def only(chains: tuple[str, ...], states: dict[str, Any]) -> dict[str, Any]:
    """The states, or infos, of some chains."""
    return {name: states[name] for name in chains}


def fold_schemes(
    statistic: Callable,
    states: dict[str, Any],
    order: Order,
    expectation: Expectation,
) -> tuple[Any, Callable]:
    """Sums for all four schemes from one run of the chains of CVA."""
    folds = {
        name: fold_stein(statistic, only(chains, states), order, expectation)
        for name, (_, chains) in SCHEMES.items()
    }

    def update(sums: dict, states: dict, infos: dict) -> dict:
        return {
            name: folds[name][1](sums[name], only(chains, states), only(chains, infos))
            for name, (_, chains) in SCHEMES.items()
        }

    return {name: zero for name, (zero, _) in folds.items()}, update


def seconds(action: Callable[[], Any]) -> float:
    """The shortest of three times, after a call that compiles."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        jax.block_until_ready(action())
        times.append(time.perf_counter() - begin)
    return min(times[1:])


class Prices(NamedTuple):
    """Seconds that the parts of one step take."""

    target: float  # a chain on the posterior
    reference: float  # a chain on Q
    product: float  # one product of two features, summed over all chains

    def step(self, scheme: str, num_features: int, dim: int) -> float:
        """Seconds of a step of a scheme with so many features and statistics."""
        chains = SCHEMES[scheme][1]
        targets = len(chains) - ("control" in chains)
        products = num_features * (num_features + dim)
        price = targets * self.target + products * self.product
        return price + ("control" in chains) * self.reference


def price(sampler: Sampler, problem: Problem, states: dict, features: Array) -> Prices:
    """Time the parts of a step at the states of a pilot run."""

    def steps(name: str, logdensity: Callable) -> float:
        algorithm = couple(**{name: sampler(logdensity)})
        mine = only((name,), states)
        key = jax.random.key(0)
        go = partial(run, key, algorithm, mine, 10, num_blocks=1, progress=False)
        return seconds(go) / 10

    multiply = jax.jit(products)
    each = seconds(lambda: multiply(features, features)) / features.shape[-1] ** 2
    target, reference = problem.latent(), standard_normal
    return Prices(steps("plus", target), steps("control", reference), each)


def describe(scheme: str, order: Order) -> str:
    """What to call a candidate."""
    return f"{scheme} with {'no' if order == 'none' else order} Stein features"


class Choice(NamedTuple):
    """The scheme and the order of Stein features that promise most.

    Parameters
    ----------
    scheme, order
        What to give ``stein_swindle``.
    forecast
        Effective draws a second, by the scheme's name and the order.

    Examples
    --------
    >>> forecast = {("plain", "none"): 10.0, ("cva", "full"): 900.0}
    >>> print(Choice(cva, "full", forecast))  # doctest: +NORMALIZE_WHITESPACE
    use cva with full Stein features: 900 effective draws a second, 90 times a plain
    chain; the next best is plain with no Stein features with 10
    """

    scheme: Callable
    order: Order
    forecast: dict[tuple[str, Order], float]

    def __str__(self) -> str:
        """One line to read."""
        first, second, *_ = sorted(self.forecast.items(), key=lambda x: -x[1])
        alone = self.forecast["plain", "none"]
        return (
            f"use {describe(*first[0])}: {first[1]:.3g} effective draws a second, "
            f"{first[1] / alone:.3g} times a plain chain; the next best is "
            f"{describe(*second[0])} with {second[1]:.3g}"
        )


def highest_order(states: dict[str, Any], expectation: Expectation) -> Order:
    """The highest order whose features exist and are not too many."""
    if not hasattr(states["plus"], "logdensity_grad"):
        return "none"
    dim = pair_values(lambda z: z, states).shape[-1]
    room = MOST_FEATURES - expectation.mean.size
    return max((o for o in ORDERS if levels(dim, o).size <= room), key=ORDERS.index)


def draws_per_second(
    sums: SteinSums, known: Expectation, scheme: str, order: Order, prices: Prices
) -> float:
    """Effective draws a second, from pilot sums: geometric mean over statistics."""
    estimate = estimate_stein(sums, known, order).estimate
    error = np.maximum(estimate.mcse, estimate.rounding)
    number = take(sums, order).level.shape[1]
    steps = np.sum(sums.controls.feature.steps)
    time = steps * prices.step(scheme, number, estimate.mean.size)
    return float(np.exp(np.mean(np.log(estimate.variance / error**2))) / time)


def choose(
    key: Key[Array, ""],
    sampler: Sampler,
    problem: Problem,
    num_chains: int = 64,
    num_steps: int = 200,
    expectation: Expectation | None = None,
) -> Choice:
    """Choose scheme and Stein features by a pilot run, and print why.

    The pilot runs the chains of CVA, the first third of its steps for warm-up. It
    predicts the effective draws a second of every scheme with every order: a geometric
    mean over the statistics.

    Examples
    --------
    >>> from swindles.coupling import hmc
    >>> from swindles.transport import identity
    >>> problem = Problem(lambda x: -jnp.sum(jnp.cosh(x)), identity(2), 2, jnp.square)
    >>> choice = choose(jax.random.key(0), hmc(0.5, 3), problem)  # doctest: +ELLIPSIS
    use ... with ... Stein features: ... effective draws a second, ...
    """
    keys = jax.random.split(key, 4)
    algorithm = cva(sampler, problem.latent())
    states = start(algorithm, jax.random.normal(keys[0], (num_chains, problem.dim)))
    known = expectation or known_expectation(keys[3], problem)
    order, feature = highest_order(states, known), problem.feature()
    fold = fold_schemes(feature, states, order, known)
    states, _ = run(keys[1], algorithm, states, num_steps // 3, fold)
    states, sums = run(keys[2], algorithm, states, num_steps - num_steps // 3, fold)
    prices = price(sampler, problem, states, all_features(feature, order, states)[:1])
    forecast = {
        (scheme, low): draws_per_second(sums[scheme], known, scheme, low, prices)
        for scheme, low in product(SCHEMES, ORDERS[: ORDERS.index(order) + 1])
    }
    scheme, best = max(forecast, key=lambda name: forecast[name])
    choice = Choice(SCHEMES[scheme][0], best, forecast)
    print(choice)
    return choice
