"""Stein: what the gradient knows.

Mirrored from book/stein.md: edit there, then run `make mirror`.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from swindles.accuracy import target_variance
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
    solve_beta,
)
from swindles.coupling import Sampler, Total, run, start
from swindles.cva import cva
from swindles.latent import Problem, known_expectation

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
    rows, columns = np.triu_indices(z.shape[-1], 1)
    blocks = [
        score,
        1 + z * score,
        z[..., rows] * score[..., columns] + z[..., columns] * score[..., rows],
    ]
    return jnp.concatenate([z[..., :0], *blocks[: ORDERS.index(order)]], -1)


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
    level: Array  # (features,): 0 for the control chain's, then as ``levels``
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
    """
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


PENALTIES = (np.inf, *10.0 ** np.arange(1, -9, -1))


def ridge_path(gram: np.ndarray, cross: np.ndarray) -> Callable[[float], np.ndarray]:
    """Ridge coefficients as a function of the penalty, from one eigendecomposition.

    Features are standardised first; those that do not vary get the coefficient zero.

    Examples
    --------
    >>> path = ridge_path(np.diag([4.0, 0.0]), np.array([[2.0], [0.0]]))
    >>> path(0.001).round(3).tolist(), path(1.0).tolist(), path(np.inf).tolist()
    ([[0.5], [0.0]], [[0.25], [0.0]], [[0.0], [0.0]])
    """
    deviation = np.sqrt(np.maximum(np.diagonal(gram), 0))
    scale = np.where(deviation > 0, deviation, np.inf)
    values, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
    rotated = vectors.T @ (cross / scale[:, None])

    def coefficients(penalty: float) -> np.ndarray:
        shrunk = rotated / (np.maximum(values, 0) + penalty)[:, None]
        return (vectors @ shrunk) / scale[:, None]

    return coefficients


def candidates(
    gram: np.ndarray, cross: np.ndarray, level: np.ndarray
) -> list[Callable[[], np.ndarray]]:
    """Coefficients worth a trial, as functions that work them out.

    The paper's diagonal ones, when there is a control chain; then, for the features up
    to each level, ridge with every penalty.
    """
    own = int(np.sum(level == 0))
    found: list[Callable] = []
    if own:
        pair = np.diagonal(gram)[:own], np.diagonal(cross)[:own]
        found.append(partial(solve_beta, *pair))
    for width in np.flatnonzero(np.diff(level, append=level[-1] + 1)) + 1:
        path = ridge_path(gram[:width, :width], cross[:width])
        found += [partial(path, penalty) for penalty in PENALTIES]
    return found


def remaining(beta: np.ndarray, gram: np.ndarray, cross: np.ndarray) -> np.ndarray:
    """Variance of f - beta^T g, less that of f: (dim,)."""
    width = len(beta)
    return (beta * (gram[:width, :width] @ beta - 2 * cross[:width])).sum(0)


def tables(sums: SteinSums, known: Expectation, groups: list[int]) -> tuple:
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


def fit_stein(sums: SteinSums, known: Expectation) -> np.ndarray:
    """Coefficients to use on each group of chains: (groups, features, dim).

    They are fitted on the other groups. Which candidate to use is decided for each
    statistic, by the variance that it leaves in the chains it was not fitted on.
    """
    everyone = list(range(NUM_GROUPS))
    tests = [tables(sums, known, [group]) for group in everyone]
    tried = []
    for group in everyone:
        gram, cross = tables(sums, known, [k for k in everyone if k != group])
        tried.append(candidates(gram, cross, sums.level[0]))
    left = [
        [remaining(beta(), *test) for beta in row]
        for row, test in zip(tried, tests, strict=True)
    ]
    best = np.sum(left, axis=0).argmin(0)
    betas = np.zeros((NUM_GROUPS, *sums.controls.cross.value.shape[1:]))
    for row, beta in zip(tried, betas, strict=True):
        for choice in np.unique(best):
            chosen = row[choice]()
            beta[: len(chosen), best == choice] = chosen[:, best == choice]
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
    pairs = estimate_pairs(sums.controls.pairs)
    if sums.level.size == 0:
        return pairs
    stein = np.sum(sums.level[0] > 0)
    known = known_means(None if stein == sums.level[0].size else expectation, stein)
    result = estimate_controls(sums.controls, known, fit_stein(sums, known))
    size = np.sqrt(sums.size.value / np.sum(sums.controls.feature.steps))
    dtype = sums.controls.feature.total.dtype
    magnitude = np.abs(result.estimate.mean) + size @ np.abs(result.beta)
    rounding = np.finfo(dtype).eps * magnitude
    return result._replace(estimate=result.estimate._replace(rounding=rounding))
