"""Accuracy: how far from the truth?

Mirrored from book/accuracy.md: edit there, then run `make mirror`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Num
from scipy.special import stdtrit

from swindles.scale import joined

# From this many chains on, the spread between chains measures the error.
MANY_CHAINS = 16


@joined(total=-2, square=-2)
class Moments(NamedTuple):
    """Running sums of a series ``f`` over steps, one row per chain.

    A run returns them with one more axis in front: a row of sums for each block of
    steps.

    Parameters
    ----------
    center
        What is subtracted from the series before it is summed.
    steps
        Number of steps summed.
    total
        Sum of f - center.
    square
        Sum of (f - center)^2.

    Examples
    --------
    >>> trace = np.array([[[0.0]], [[2.0]], [[3.0]], [[5.0]]])  # of one chain
    >>> moments = trace_moments(trace, num_blocks=2)
    >>> moments.steps.tolist(), moments.total.ravel().tolist()
    ([2, 2], [-3.0, 3.0])
    """

    center: Float[Array | np.ndarray, "*blocks dim"]
    steps: Num[Array | np.ndarray, "*blocks"]
    total: Float[Array | np.ndarray, "*blocks chains dim"]
    square: Float[Array | np.ndarray, "*blocks chains dim"]


def empty_moments(center: ArrayLike, num_chains: int) -> Moments:
    """Sums over no steps yet.

    Examples
    --------
    >>> empty_moments(jnp.zeros(3), num_chains=2).total.shape
    (2, 3)
    """
    center = jnp.asarray(center)
    zero = jnp.zeros((num_chains, *center.shape), center.dtype)
    return Moments(center, jnp.zeros((), center.dtype), zero, zero)


def add_step(moments: Moments, series: Array) -> Moments:
    """Add one step of all chains: ``series`` has shape (chains, dim).

    Examples
    --------
    >>> sums = add_step(empty_moments(jnp.ones(1), 2), jnp.array([[2.0], [4.0]]))
    >>> sums.total.tolist(), sums.square.tolist()
    ([[1.0], [3.0]], [[1.0], [9.0]])
    """
    deviation = series - moments.center
    return Moments(
        moments.center,
        moments.steps + 1,
        moments.total + deviation,
        moments.square + deviation**2,
    )


def trace_moments(trace: ArrayLike, num_blocks: int = 20) -> Moments:
    """The sums of a stored trace of shape (steps, chains, dim), block by block.

    Examples
    --------
    >>> trace_moments(np.zeros((100, 4, 2)), num_blocks=5).total.shape
    (5, 4, 2)
    """
    trace = np.asarray(trace, np.float64)
    if trace.ndim != 3 or len(trace) < num_blocks:
        raise ValueError(
            "a trace has shape (steps, chains, dim) and at least "
            f"{num_blocks} steps, got shape {trace.shape}"
        )
    center = trace.mean((0, 1))
    blocks = np.array_split(trace - center, num_blocks)
    return Moments(
        np.broadcast_to(center, (num_blocks, *center.shape)),
        np.array([len(block) for block in blocks]),
        np.stack([block.sum(0) for block in blocks]),
        np.stack([(block**2).sum(0) for block in blocks]),
    )


def block_means(moments: Moments) -> np.ndarray:
    """Mean of the series in each block of each chain: (blocks, chains, dim)."""
    count, total = np.asarray(moments.steps), np.asarray(moments.total, np.float64)
    center = np.asarray(moments.center, np.float64)[:, None]
    return center + total / count[:, None, None]


def target_variance(moments: Moments) -> np.ndarray:
    """Variance of the series over all chains and steps: (dim,).

    Examples
    --------
    >>> trace = np.random.default_rng(0).normal(5, 2, (500, 20, 1))
    >>> float(target_variance(trace_moments(trace))[0].round())
    4.0
    """
    total = np.asarray(moments.total, np.float64).sum((0, 1))
    square = np.asarray(moments.square, np.float64).sum((0, 1))
    number = np.asarray(moments.steps).sum() * moments.total.shape[1]
    return np.maximum(square - total**2 / number, 0) / (number - 1)


def group_means(means: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Averages to be treated as independent: (groups, dim).

    From block means (blocks, chains, dim): one per chain when there are many chains,
    one per block and chain when there are few.
    """
    if means.shape[1] >= MANY_CHAINS:
        return np.average(means, axis=0, weights=count)
    return means.reshape(-1, means.shape[-1])


class Estimate(NamedTuple):
    """An expectation with its error. Every array has one entry per component of f.

    Parameters
    ----------
    mean
        The estimate.
    mcse
        Monte Carlo standard error of ``mean``.
    ess
        Independent draws that would give this error.
    rhat
        Split R-hat of the chain that targets P; near 1 is good.
    variance
        That of f under the target.
    degrees
        Degrees of freedom of ``mcse``.
    num_draws
        Chains times steps.
    rounding
        What the arithmetic may be off by, if known.

    Examples
    --------
    >>> trace = np.random.default_rng(0).normal(3, 1, (200, 32, 1))
    >>> estimate = summarize(trace_moments(trace))
    >>> low, high = estimate.interval(level=0.99)
    >>> bool(low[0] < 3 < high[0]), estimate.num_draws, estimate.warnings()
    (True, 6400, [])
    """

    mean: Float[np.ndarray, " dim"]
    mcse: Float[np.ndarray, " dim"]
    ess: Float[np.ndarray, " dim"]
    rhat: Float[np.ndarray, " dim"]
    variance: Float[np.ndarray, " dim"]
    degrees: int
    num_draws: int
    rounding: Float[np.ndarray, " dim"] | float = 0.0

    def interval(
        self, level: float = 0.95
    ) -> tuple[Float[np.ndarray, " dim"], Float[np.ndarray, " dim"]]:
        """Lower and upper ends of a confidence interval (Student's t)."""
        half = stdtrit(self.degrees, (1 + level) / 2) * self.mcse
        return self.mean - half, self.mean + half

    def warnings(self) -> list[str]:
        """Reasons not to trust these numbers, in words; empty when there are none."""
        found = []
        broken = ~(np.isfinite(self.mean) & np.isfinite(self.mcse))
        if broken.any():
            found.append(f"{broken.sum()} of {broken.size} estimates are not finite")
        if np.nanmax(self.rhat, initial=0) > 1.05:
            found.append(f"R-hat is up to {np.nanmax(self.rhat):.2f}: run longer")
        lost = np.sum(self.mcse < self.rounding)
        if lost:
            found.append(f"{lost} of {broken.size} errors are below rounding: use x64")
        return found


def summarize(
    moments: Moments,
    means: Float[np.ndarray, "blocks chains dim"] | None = None,
    shared_variance: ArrayLike = 0.0,
) -> Estimate:
    """Estimate E f from running sums.

    Parameters
    ----------
    moments
        Sums of f along the chains that target P, by block. They give the variance of
        f, R-hat and, unless ``means`` is given, the estimate.
    means
        Block means of the series that estimates E f, if that is another one: a
        swindled series, say.
    shared_variance
        That of an error which all chains have in common.

    Examples
    --------
    >>> trace = np.random.default_rng(0).normal(size=(500, 32, 1))
    >>> estimate = summarize(trace_moments(trace))
    >>> bool(abs(estimate.mean[0]) < 4 * estimate.mcse[0]), estimate.degrees
    (True, 31)
    """
    means = block_means(moments) if means is None else np.asarray(means, np.float64)
    count = np.asarray(moments.steps, np.float64)
    groups = group_means(means, count)
    if len(groups) < 2:
        raise ValueError("one chain in one block has no spread: use more chains")
    mean = np.average(means, axis=0, weights=count).mean(0)
    variance = target_variance(moments)
    squared_error = groups.var(0, ddof=1) / len(groups) + np.asarray(shared_variance)
    with np.errstate(divide="ignore", invalid="ignore"):
        ess = variance / squared_error
    mcse, rhat = np.sqrt(squared_error), split_rhat(moments)
    draws = int(count.sum()) * means.shape[1]
    return Estimate(mean, mcse, ess, rhat, variance, len(groups) - 1, draws)


def split_rhat(moments: Moments) -> np.ndarray:
    """Split R-hat from running sums: (dim,). NaN when there is only one block."""
    num_blocks = len(moments.steps)
    if num_blocks < 2:
        return np.full(moments.total.shape[-1], np.nan)
    cut = [0, num_blocks // 2]
    count = np.add.reduceat(np.asarray(moments.steps, np.float64), cut)[:, None, None]
    total = np.add.reduceat(np.asarray(moments.total, np.float64), cut)
    square = np.add.reduceat(np.asarray(moments.square, np.float64), cut)
    within = ((square - total**2 / count) / (count - 1)).mean((0, 1))
    between = (total / count).var((0, 1), ddof=1)
    shrink = 1 - 1 / count.mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(shrink + between / within)


def rank_rhat(trace: ArrayLike) -> Float[np.ndarray, " dim"]:
    """Rank-normalised split R-hat of a trace (steps, chains, dim), by ArviZ.

    Examples
    --------
    >>> trace = np.random.default_rng(0).normal(size=(500, 4, 2))
    >>> rank_rhat(trace).round(1).tolist()
    [1.0, 1.0]
    """
    from arviz_stats.base import array_stats  # slow to import

    trace = np.asarray(trace)
    return np.array([array_stats.rhat(trace[..., i].T) for i in range(trace.shape[-1])])


def long_run_variance(trace: ArrayLike) -> np.ndarray:
    """Steps x variance of a chain's average, by Geyer's monotone sequence: (dim,)."""
    trace = np.asarray(trace, np.float64)
    steps = len(trace)
    deviation = trace - trace.mean((0, 1))
    spectrum = np.abs(np.fft.rfft(deviation, 2 * steps, axis=0)) ** 2
    covariance = np.fft.irfft(spectrum, axis=0)[:steps].mean(1) / steps
    pairs = covariance[0 : steps - 1 : 2] + covariance[1:steps:2]
    positive = np.cumprod(pairs > 0, axis=0)
    monotone = np.minimum.accumulate(np.maximum(pairs, 0), axis=0)
    variance = -covariance[0] + 2 * (monotone * positive).sum(0)
    return np.where(variance > 0, variance, np.nan)


def summarize_trace(trace: ArrayLike) -> Estimate:
    """Estimate E f from the stored trace of a few long chains (steps, chains, dim).

    Examples
    --------
    >>> trace = np.random.default_rng(0).normal(size=(4000, 4, 1))
    >>> bool(summarize_trace(trace).ess[0] > 10_000)
    True
    """
    trace = np.asarray(trace, np.float64)
    moments = trace_moments(trace, num_blocks=2)
    steps, chains, _ = trace.shape
    squared_error = long_run_variance(trace) / (steps * chains)
    variance = target_variance(moments)
    with np.errstate(divide="ignore", invalid="ignore"):
        ess = variance / squared_error
        degrees = int(np.nanmin(ess, initial=steps * chains).clip(2)) - 1
    mean, mcse = trace.mean((0, 1)), np.sqrt(squared_error)
    draws = steps * chains
    return Estimate(mean, mcse, ess, rank_rhat(trace), variance, degrees, draws)


def correlation(first: ArrayLike, second: ArrayLike) -> Float[np.ndarray, " dim"]:
    """Correlation of two traces (steps, chains, dim), for each component.

    Examples
    --------
    >>> trace = np.random.default_rng(0).normal(size=(50, 4, 2))
    >>> correlation(trace, 1 - 2 * trace).round(6).tolist()
    [-1.0, -1.0]
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    a, b = a - a.mean((0, 1)), b - b.mean((0, 1))
    return (a * b).sum((0, 1)) / np.sqrt((a**2).sum((0, 1)) * (b**2).sum((0, 1)))


def decoupling_rate(first: ArrayLike, second: ArrayLike) -> float:
    """Fraction of steps at which two chains' Metropolis decisions differ.

    Examples
    --------
    >>> decoupling_rate([True, True, False, True], [True, False, False, True])
    0.25
    """
    return float(np.mean(np.asarray(first, bool) != np.asarray(second, bool)))


def beyond_chance(
    difference: Float[np.ndarray, "chains statistics"],
    noise: Float[np.ndarray, " statistics"],
    level: float,
) -> bool:
    """Whether chains agree that a difference (chains, statistics) is not zero.

    ``noise`` is a standard error to allow for, besides that of the mean over chains.
    ``level`` is the probability of a false alarm, over all statistics.

    Examples
    --------
    >>> chance = np.random.default_rng(0).normal(size=(100, 5))
    >>> [beyond_chance(chance + shift, np.zeros(5), 1e-3) for shift in (0.0, 1.0)]
    [False, True]
    """
    chains, number = difference.shape
    error = np.sqrt(difference.var(0, ddof=1) / chains + noise**2)
    limit = -stdtrit(chains - 1, level / 2 / number)
    return bool((np.abs(difference.mean(0)) > limit * error).any())


def heavy_tails(
    values: Float[np.ndarray, "draws statistics"],
) -> Bool[np.ndarray, " statistics"]:
    """Which statistics (draws, statistics) have tails too heavy for a reliable error.

    Examples
    --------
    >>> draws = np.random.default_rng(0).standard_cauchy((4000, 1))
    >>> heavy_tails(draws).tolist(), heavy_tails(np.arctan(draws)).tolist()
    ([True], [False])
    """
    from swindles.transport import pareto_k

    def is_heavy(column: np.ndarray) -> bool:
        away = np.abs(column - np.median(column))
        away = away[away > 0]
        return away.size > 500 and pareto_k(np.log(away)) > 0.7

    return np.array([is_heavy(column) for column in values.T], bool)
