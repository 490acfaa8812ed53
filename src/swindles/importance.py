"""Importance: do you need a chain at all?

Mirrored from book/importance.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int
from scipy.special import gammainccinv, gammaincinv, gammaln, ndtr, ndtri, stdtrit

from swindles.accuracy import Estimate, beyond_chance
from swindles.control import PENALTIES, full_beta
from swindles.stein import Order, feature_orders, stein_features
from swindles.transport import (
    BATCH,
    LARGEST_LAPLACE,
    Affine,
    Evaluator,
    Gaussian,
    Points,
    find_mode,
    fit_gaussian,
    pareto_k,
    triangular,
    unit_map,
    weight_efficiency,
)

# SciPy has Sobol points up to this dimension.
LARGEST_SOBOL = 21_201
# Binary digits of a point's coordinates.
DIGITS = 50


@lru_cache(maxsize=2)
def scrambled_digits(number: int, dim: int) -> Int[np.ndarray, "number dim"]:
    """Scrambled Sobol points, as integers of DIGITS binary digits."""
    from scipy.stats import qmc  # slow to import

    points = qmc.Sobol(dim, bits=DIGITS, rng=0).random(number)
    return (points * 2.0**DIGITS).astype(np.int64)


def sobol_uniform(
    rng: np.random.Generator, number: int, dim: int
) -> Float[np.ndarray, "number dim"]:
    """Sobol points in the unit cube, at random; ``number`` is a power of two.

    Examples
    --------
    >>> points = sobol_uniform(np.random.default_rng(0), 8, 2)
    >>> np.sort(np.floor(8 * points), axis=0)[:, 0].tolist()  # one in each eighth
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    if dim > LARGEST_SOBOL:
        return rng.random((number, dim)).clip(2.0**-52, 1 - 2.0**-52)
    shift = rng.integers(2**DIGITS, size=dim)
    return ((scrambled_digits(number, dim) ^ shift) + 0.5) / 2.0**DIGITS


def sobol_normal(
    rng: np.random.Generator, number: int, dim: int
) -> Float[np.ndarray, "number dim"]:
    """Scrambled Sobol points, as draws of N(0, I); ``number`` is a power of two.

    Examples
    --------
    >>> z = sobol_normal(np.random.default_rng(0), 1024, 3)
    >>> bool(abs(z.mean()) < 1e-3), bool(abs(z.var() - 1) < 0.01)  # better than chance
    (True, True)
    """
    return ndtri(sobol_uniform(rng, number, dim))


class RoundProposal(NamedTuple):
    """Where points come from: N(0, I) in latent space, the map itself.

    Parameters
    ----------
    dim
        The dimension.
    draw
        From random numbers, a number and the dimension to points.
    degrees
        Of freedom, of a multivariate t distribution in the place of N(0, I).

    Examples
    --------
    >>> z = RoundProposal(3).pairs(np.random.default_rng(0), 4)
    >>> z.shape, bool((z[:4] == -z[4:]).all())
    ((8, 3), True)
    """

    dim: int
    draw: Callable = sobol_normal
    degrees: float = np.inf

    def pairs(
        self, rng: np.random.Generator, number: int
    ) -> Float[np.ndarray, "points dim"]:
        """Points, and then the mirror image of each."""
        z = self.draw(rng, number, self.dim + (self.degrees < np.inf))
        if self.degrees < np.inf:
            half, part = self.degrees / 2, ndtr(z[:, :1])
            z = np.sqrt(half / gammaincinv(half, part)) * z[:, 1:]
        return np.concatenate([z, -z])

    def log_density(
        self, z: Float[np.ndarray, "points dim"]
    ) -> Float[np.ndarray, " points"]:
        """Up to the constant of a standard normal."""
        square, half = (z**2).sum(1), self.degrees / 2
        if self.degrees == np.inf:
            return -0.5 * square
        power = half + self.dim / 2
        constant = gammaln(power) - gammaln(half) - self.dim / 2 * np.log(half)
        return constant - power * np.log1p(square / self.degrees)

    def reach(self, share: float) -> float:
        """The radius beyond which only this share of the points lies."""
        return float(np.sqrt(2 * gammainccinv(self.dim / 2, share)))

    def widened(self) -> "RoundProposal":
        """One with heavy tails, whose weights are still worth most of its points."""
        return self._replace(degrees=4.0 + self.dim)


class WeightedPairs(NamedTuple):
    """Weighted averages over pairs of points: the rows of the regression.

    Parameters
    ----------
    weight
        Of the pair.
    features
        Weighted Stein features.
    values
        Weighted statistics, less a first guess of their mean.
    square
        Weighted squares of the same.

    Examples
    --------
    >>> z = np.array([[1.0], [2.0], [-1.0], [-2.0]])
    >>> points = Points(z, np.zeros(4), -z, z**2, -0.5 * (z**2).sum(1))
    >>> weigh_pairs(points, "diagonal", np.zeros(1), peak=2.0).values.round(2).tolist()
    [[0.22], [4.0]]
    """

    weight: Float[np.ndarray, " pairs"]
    features: Float[np.ndarray, "pairs features"]
    values: Float[np.ndarray, "pairs statistics"]
    square: Float[np.ndarray, "pairs statistics"]


def weigh_pairs(
    points: Points,
    order: Order,
    center: Float[np.ndarray, " statistics"],
    peak: float,
) -> WeightedPairs:
    """Pairs from points whose second half is the mirror image of the first.

    ``center`` is a first guess of the answer; weights are divided by exp(peak).
    """
    weight = np.exp(points.log_weights - peak).reshape(2, -1)
    z, score = (x.reshape(2, -1, x.shape[1]) for x in (points.z, points.score))
    away = points.values.reshape(2, weight.shape[1], -1) - center

    def average(x: np.ndarray) -> np.ndarray:
        return (weight[..., None] * x).mean(0)

    raw = weight[..., None] * stein_features(z, score, order)
    features, size = raw.mean(0), np.sqrt((raw**2).mean((0, 1)))
    # What is odd leaves only its rounding: no feature.
    features[:, np.sqrt((features**2).mean(0)) < 1e-5 * size] = 0
    return WeightedPairs(weight.mean(0), features, average(away), average(away**2))


# Independent sequences of points, and groups of them for fitting.
SEQUENCES, GROUPS = 16, 8


def group_products(pairs: WeightedPairs) -> tuple[np.ndarray, np.ndarray]:
    """Products of the columns (weight, features), and with the values, by group."""
    columns = np.column_stack([pairs.weight, pairs.features])
    rows = columns.reshape(GROUPS, -1, columns.shape[1])
    values = pairs.values.reshape(GROUPS, -1, pairs.values.shape[1])
    turned = rows.swapaxes(1, 2)
    return turned @ rows, turned @ values


def fit_columns(
    gram: np.ndarray, cross: np.ndarray, width: int, penalty: float
) -> np.ndarray:
    """Coefficients of the first so many features: (all features, statistics)."""
    beta = np.zeros((len(gram) - 1, cross.shape[1]))
    if width:
        some = slice(width + 1)
        beta[:width] = full_beta(gram[some, some], cross[some], penalty)[1:]
    return beta


def choose_columns(
    pairs: WeightedPairs, gram: np.ndarray, cross: np.ndarray, widths: list[int]
) -> list[tuple[tuple[int, float], np.ndarray]]:
    """Number of features and penalty, and the statistics that want them so."""
    tried = [(0, 1.0), *product([w for w in widths if w], PENALTIES)]
    test = len(pairs.weight) // 4  # the first two groups
    residual = []
    for each in tried:
        beta = fit_columns(gram[2:].sum(0), cross[2:].sum(0), *each)
        rest = pairs.values[:test] - pairs.features[:test] @ beta
        weight = pairs.weight[:test, None]
        rest = rest - weight * (rest.sum(0) / weight.sum())
        residual.append((rest**2).sum(0))
    best = np.argmin(residual, axis=0)
    return [(tried[i], np.flatnonzero(best == i)) for i in np.unique(best)]


def cross_fit(pairs: WeightedPairs, widths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """What features leave of the values, fitted on other groups; and all in all.

    Returns the rest (pairs, statistics) and coefficients (features, statistics).
    """
    gram, cross = group_products(pairs)
    beta = np.zeros((pairs.features.shape[1], cross.shape[2]))
    rest = pairs.values.copy()
    groups = np.split(np.arange(len(rest)), GROUPS)
    for options, mine in choose_columns(pairs, gram, cross, widths):
        every, wanted = gram.sum(0), cross[..., mine].sum(0)
        beta[:, mine] = fit_columns(every, wanted, *options)
        for i, rows in enumerate(groups):
            others = every - gram[i], wanted - cross[i][:, mine]
            found = fit_columns(*others, *options)
            rest[np.ix_(rows, mine)] -= pairs.features[rows] @ found
    return rest, beta


class Weighted(NamedTuple):
    """Sums over weighted points of a map, sequence by sequence.

    Parameters
    ----------
    order, beta
        Stein features and their coefficients, from the first block.
    center, peak
        What is subtracted from the statistics and from the log weights.
    weight, plain, swindled, square
        Sums over pairs, a row for each block: of weights, of weighted statistics, of
        the same less the features, of weighted squares.
    pairs
        In a sequence, for each block.
    pareto_k, efficiency
        Of the weights, for each block.
    undefined
        Share of the points where the density is NaN, for each block.
    draws
        A few draws of the posterior, in latent space.
    rounding
        What the arithmetic may be off by.

    Examples
    --------
    >>> from jax import enable_x64
    >>> from swindles.transport import Evaluator, identity, standard_normal
    >>> with enable_x64(True):
    ...     evaluate = Evaluator(standard_normal, 2, lambda x: 3 + x)
    ...     found = weigh_points(0, evaluate, identity(2), pairs=64)
    >>> found.estimate().mean.round(6).tolist(), found.gradients
    ([3.0, 3.0], 2048)
    """

    order: Order
    beta: Float[np.ndarray, "features statistics"]
    center: Float[np.ndarray, " statistics"]
    peak: float
    weight: Float[np.ndarray, "blocks sequences"]
    plain: Float[np.ndarray, "blocks sequences statistics"]
    swindled: Float[np.ndarray, "blocks sequences statistics"]
    square: Float[np.ndarray, "blocks sequences statistics"]
    pairs: Int[np.ndarray, " blocks"]
    pareto_k: Float[np.ndarray, " blocks"]
    efficiency: Float[np.ndarray, " blocks"]
    undefined: Float[np.ndarray, " blocks"]
    draws: Float[np.ndarray, "rows chains dim"]
    rounding: Float[np.ndarray, " statistics"]

    @property
    def gradients(self) -> int:
        """Points so far."""
        return int(2 * SEQUENCES * np.sum(self.pairs))

    def ratio(
        self, sums: Float[np.ndarray, "blocks sequences statistics"]
    ) -> tuple[
        Float[np.ndarray, " statistics"], Float[np.ndarray, "sequences statistics"]
    ]:
        """A ratio of sums to weights, and how far each sequence strays from it."""
        weight, total = self.weight.sum(0), sums.sum(0)
        found = total.sum(0) / weight.sum()
        return found, (total - weight[:, None] * found) / weight.sum()

    def estimate(self) -> Estimate:
        """The expectations, with their errors."""
        mean, stray = self.ratio(self.swindled)
        number = len(stray)
        mcse = np.sqrt((stray**2).sum(0) * number / (number - 1))
        raw = self.ratio(self.plain)[0]
        variance = np.maximum(self.ratio(self.square)[0] - raw**2, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ess = variance / mcse**2
        unknown = np.full(mean.size, np.nan)  # R-hat is for chains
        draws = self.gradients
        return Estimate(
            self.center + mean, mcse, ess, unknown, variance, number - 1, draws
        )

    def is_biased(self) -> bool:
        """Whether what the features predict is not zero on average."""
        apart = self.ratio(self.plain - self.swindled)
        number = len(apart[1])
        return beyond_chance(
            number * apart[1] + apart[0], np.zeros(apart[0].size), 1e-4
        )


def draw_points(
    rng: np.random.Generator,
    evaluate: Evaluator,
    transport: Affine,
    pairs: int,
    proposal: Any = None,
) -> Points:
    """Points of all sequences, one after the other, then their mirror images."""
    proposal = proposal or RoundProposal(np.size(transport.shift))
    drawn = [proposal.pairs(rng, pairs).reshape(2, pairs, -1) for _ in range(SEQUENCES)]
    z = np.concatenate(drawn, 1).reshape(2 * SEQUENCES * pairs, -1)
    found = evaluate(transport, z)
    return found._replace(log_proposal=proposal.log_density(found.z))


def drop_impossible(points: Points) -> Points:
    """Points with zeros for values and scores where the density is zero, or NaN.

    NaN is zero for a chain, too: it does not go there.
    """
    possible = points.logdensity > -np.inf
    score, values = (np.where(possible[:, None], x, 0.0) for x in points[2:4])
    logdensity = np.where(possible, points.logdensity, -np.inf)
    return points._replace(logdensity=logdensity, score=score, values=values)


def resample(
    rng: np.random.Generator, points: Points, rows: int = 8, chains: int = 128
) -> Float[np.ndarray, "rows chains dim"]:
    """A few draws of the posterior: points taken in proportion to their weights."""
    weights = np.exp(points.log_weights - points.log_weights.max())
    total, number = np.cumsum(weights), rows * chains
    wanted = (np.arange(number) + rng.random()) / number * total[-1]
    taken = np.searchsorted(total, wanted).clip(max=len(total) - 1)
    return points.z[rng.permutation(taken)].reshape(rows, chains, -1)


def weigh_points(
    seed: Any,
    evaluate: Evaluator,
    transport: Affine,
    pairs: int = 512,
    order: Order = "diagonal",
    proposal: Any = None,
) -> Weighted:
    """Estimate the evaluator's statistics from weighted points of a map.

    Parameters
    ----------
    seed
        For NumPy's random numbers: an integer, or several.
    pairs
        In each of 16 sequences; a power of two.
    order
        Of the Stein features.
    proposal
        Where the points come from: by default N(0, I) in latent space.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import enable_x64
    >>> from swindles.transport import Evaluator, identity
    >>> with enable_x64(True):
    ...     evaluate = Evaluator(lambda x: -jnp.sum(jnp.cosh(x)), 2, jnp.square)
    ...     found = weigh_points(0, evaluate, identity(2), order="full").estimate()
    >>> found.mean.round(2).tolist()
    [0.73, 0.73]
    """
    rng = np.random.default_rng(seed)
    points = draw_points(rng, evaluate, transport, pairs, proposal)
    undefined = np.array([np.isnan(points.logdensity).mean()])
    points = drop_impossible(points)
    log_weights = points.log_weights
    peak = float(np.nanmax(log_weights))
    weights = np.exp(log_weights - peak)
    center = weights @ points.values / weights.sum()
    rows = weigh_pairs(points, order, center, peak)
    orders = feature_orders(np.size(transport.shift), order)
    widths = [int((orders <= last).sum()) for last in np.unique(orders)]
    rest, beta = cross_fit(rows, widths)
    weight, *sums = (x[None] for x in pair_sums(rows, rest, SEQUENCES))
    k, worth = pareto_k(log_weights), weight_efficiency(log_weights)
    numbers = np.array([pairs]), np.array([k]), np.array([worth]), undefined
    rounding = evaluate.eps * rounding_size(points, rows, beta, weights)
    draws = resample(rng, points)
    first = order, beta, center, peak
    return Weighted(*first, weight[..., 0], *sums, *numbers, draws, rounding)  # type: ignore


def rounding_size(
    points: Points, rows: WeightedPairs, beta: np.ndarray, weights: np.ndarray
) -> Float[np.ndarray, " statistics"]:
    """What is off by one unit in the last place: statistics, weights, features."""
    size = np.sqrt(weights @ points.values**2 / weights.sum())
    moved = np.sqrt((rows.features**2).mean(0)) @ np.abs(beta) / rows.weight.mean()
    noise = np.abs(points.logdensity[weights > 0]).mean() / np.sqrt(len(weights))
    return (1 + noise) * size + moved


def pair_sums(rows: WeightedPairs, rest: np.ndarray, parts: int = 1) -> list:
    """Sums of weights, values, what is left of them, and squares; by equal parts."""
    each = rows.weight[:, None], rows.values, rest, rows.square
    return [x.reshape(parts, -1, x.shape[1]).sum(1) for x in each]


def weigh_more(
    seed: Any,
    evaluate: Evaluator,
    transport: Affine,
    run: Weighted,
    pairs: int,
    proposal: Any = None,
) -> Weighted:
    """The sums with one more block of points, under the coefficients of the first.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import enable_x64
    >>> from swindles.transport import Evaluator, identity
    >>> with enable_x64(True):
    ...     evaluate = Evaluator(lambda x: -jnp.sum(jnp.cosh(x)), 2, jnp.square)
    ...     run = weigh_points(0, evaluate, identity(2), 128)
    ...     weigh_more((0, 1), evaluate, identity(2), run, 256).gradients
    12288
    """
    rng = np.random.default_rng(seed)
    proposal = proposal or RoundProposal(np.size(transport.shift))
    inputs = rng, evaluate, transport, run, pairs, proposal
    found = [weigh_sequence(*inputs) for _ in range(SEQUENCES)]
    weight, plain, swindled, square, log_weights, undefined = (
        np.concatenate(part) for part in zip(*found, strict=True)
    )
    return run._replace(
        weight=np.concatenate([run.weight, weight[None, :, 0]]),
        plain=np.concatenate([run.plain, plain[None]]),
        swindled=np.concatenate([run.swindled, swindled[None]]),
        square=np.concatenate([run.square, square[None]]),
        pairs=np.append(run.pairs, pairs),
        pareto_k=np.append(run.pareto_k, pareto_k(log_weights)),
        efficiency=np.append(run.efficiency, weight_efficiency(log_weights)),
        undefined=np.append(run.undefined, undefined.mean()),
    )


def weigh_sequence(
    rng: np.random.Generator,
    evaluate: Evaluator,
    transport: Affine,
    run: Weighted,
    pairs: int,
    proposal: Any,
) -> list[np.ndarray]:
    """Sums over one more sequence; its log weights, and where the density is NaN."""
    points = evaluate(transport, proposal.pairs(rng, pairs))
    undefined = np.isnan(points.logdensity)
    log_proposal = proposal.log_density(points.z)
    points = drop_impossible(points._replace(log_proposal=log_proposal))
    rows = weigh_pairs(points, run.order, run.center, run.peak)
    rest = rows.values - rows.features @ run.beta
    return [*pair_sums(rows, rest), points.log_weights, undefined]


# How far out climbers start at the most, in standard deviations.
FARTHEST = 20.0


def climb_from_afar(
    rng: np.random.Generator, evaluate: Evaluator, transport: Affine, steps: int = 40
) -> Points:
    """Climbers that start far out and go uphill, where they have come to rest."""
    dim = np.size(transport.shift)
    far = np.geomspace(2, FARTHEST, BATCH)[:, None]
    now = evaluate(transport, far * rng.normal(size=(BATCH, dim)))
    size, last = np.ones(BATCH), np.full(BATCH, np.inf)
    for _ in range(steps):
        move = size[:, None] * np.nan_to_num(now.score).clip(-1e100, 1e100)
        length = np.linalg.norm(move, axis=1, keepdims=True)
        reach = 1 + np.linalg.norm(now.z, axis=1, keepdims=True) / 2
        tried = evaluate(
            transport, now.z + move * np.minimum(1, reach / (length + 1e-300))
        )
        with np.errstate(invalid="ignore"):
            gain = tried.logdensity - now.logdensity
        better = gain > 0
        now = Points(
            *(
                np.where(better[(slice(None),) + (None,) * (x.ndim - 1)], y, x)
                for x, y in zip(now, tried, strict=True)
            )
        )
        last = np.where(better, gain, last)
        size = np.where(better, 1.5 * size, 0.3 * size).clip(1e-8, 1e8)
    flat = np.linalg.norm(now.score, axis=1) < 0.01
    still = ((last < 0.1) | flat) & np.isfinite(now.logdensity)
    return Points(*(part[still] for part in now))


# A mode so many nats below the other one does not matter.
LOW_MODE = 15.0


def far_modes(
    rng: np.random.Generator, evaluate: Evaluator, transport: Affine, most: int = 4
) -> list[Gaussian]:
    """Other modes that matter, as Gaussians in latent space, the highest first.

    Those that are not much lower than the highest, and not where the map is. The
    ``elbo`` of each is its logarithmic mass by Laplace's approximation, in excess of
    that of the map.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import enable_x64
    >>> from swindles.transport import standard_normal, unit_map
    >>> def two(x):
    ...     return jnp.logaddexp(standard_normal(x), 1 + standard_normal((x - 12) / 2))
    >>> with enable_x64(True):
    ...     evaluate, rng = Evaluator(two, 1), np.random.default_rng(0)
    ...     (found,) = far_modes(rng, evaluate, unit_map([0]))
    >>> found.transport.shift.round(1).tolist(), round(float(found.elbo - np.log(2)), 2)
    ([12.0], 1.0)
    """
    dim, modes = np.size(transport.shift), []
    climbed = climb_from_afar(rng, evaluate, transport)
    origin = evaluate(transport, np.zeros((1, dim))).logdensity[0]
    top = climbed.logdensity.max(initial=origin)
    rest = climbed.z[np.argsort(-climbed.logdensity)]
    rest = rest[: int((climbed.logdensity > top - LOW_MODE).sum())]
    places = np.zeros((1, dim))
    for _ in range(most):
        apart = np.linalg.norm(rest[:, None] - places, axis=2).min(1, initial=np.inf)
        rest = rest[apart > 3 + np.sqrt(dim)]
        if not len(rest):
            break
        mode = climb_to_end(evaluate, transport, rest[0])
        near = np.linalg.norm(places - mode.transport.shift, axis=1).min()
        places = np.concatenate([places, rest[:1], mode.transport.shift[None]])
        if near > 3 + np.sqrt(dim):
            modes.append(mode._replace(elbo=mode.elbo - float(origin)))
    return modes


def climb_to_end(
    evaluate: Evaluator, transport: Affine, z: Float[np.ndarray, " dim"]
) -> Gaussian:
    """The mode uphill of a point, as a Gaussian; all in latent space."""
    dim = len(z)
    if dim > LARGEST_LAPLACE:
        height = evaluate(transport, z[None]).logdensity[0]
        return Gaussian(unit_map(z), np.nan, np.nan, height)
    start = np.asarray(transport(z))
    found, precision = find_mode(evaluate, start, transport.scale, 1)
    height = evaluate(found, np.zeros((1, dim))).logdensity[0]
    shift = np.linalg.solve(transport.scale, found.shift - transport.shift)
    scale = np.linalg.solve(transport.scale, np.asarray(found.scale))
    if not np.isfinite(precision).all() or np.linalg.eigvalsh(precision)[0] < 1e-6:
        return Gaussian(unit_map(shift), np.nan, np.nan, float(height))  # flat on top
    scale = scale @ np.linalg.cholesky(np.linalg.inv(precision))
    mass = float(height + np.linalg.slogdet(scale)[1])
    return Gaussian(triangular(Affine(shift, scale)), np.nan, np.nan, mass)


def other_mode(
    rng: np.random.Generator, evaluate: Evaluator, transport: Affine
) -> float:
    """How far off the nearest other mode is that matters; infinite if none was found.

    In standard deviations of the map.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import enable_x64
    >>> from swindles.transport import standard_normal, unit_map
    >>> def two(x):
    ...     return jnp.logaddexp(standard_normal(x), standard_normal(x - 12))
    >>> with enable_x64(True):
    ...     evaluate = Evaluator(two, 1)
    ...     round(other_mode(np.random.default_rng(0), evaluate, unit_map([0])), 1)
    12.0
    """
    found = far_modes(rng, evaluate, transport)
    away = [float(np.linalg.norm(x.transport.shift)) for x in found]
    return min(away, default=np.inf)


# Nats of mass that another mode must have more, and how often a map may move.
MORE_MASS, MOST_MOVES = 2.0, 3


def fit_highest(evaluate: Evaluator, position: ArrayLike, seed: Any) -> Gaussian:
    """The best Gaussian, at the mode with most of the mass that climbers find.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import enable_x64
    >>> from swindles.transport import standard_normal
    >>> def two(x):
    ...     return jnp.logaddexp(standard_normal(x), 9 + standard_normal(x - 12))
    >>> with enable_x64(True):
    ...     found = fit_highest(Evaluator(two, 1), jnp.zeros(1), seed=0)
    >>> found.transport.shift.round(1).tolist()
    [12.0]
    """
    found = fit_gaussian(evaluate, position, seed)
    rng = np.random.default_rng([*np.ravel(seed), 1])
    for _ in range(MOST_MOVES):
        modes = far_modes(rng, evaluate, found.transport)
        modes = [mode for mode in modes if mode.elbo > MORE_MASS]
        if not modes or np.ndim(found.transport.scale) < 2:
            break
        there = max(modes, key=lambda mode: mode.elbo).transport.shift
        moved = fit_gaussian(evaluate, np.asarray(found.transport(there)), seed)
        if not moved.elbo > found.elbo:
            break
        found = moved
    return found


# Segments to follow, and the nodes on each.
SEGMENTS, NODES = 48, 16


def segment_errors(
    evaluate: Evaluator, transport: Affine, ends: np.ndarray, nodes: int
) -> np.ndarray:
    """Log densities at both ends, less the integral of the score between them."""
    places, weights = np.polynomial.legendre.leggauss(nodes)
    z = np.concatenate([ends, -ends, *(place * ends for place in places)])
    found = evaluate(transport, z)
    values = found.logdensity.reshape(nodes + 2, -1)
    slope = (found.score.reshape(nodes + 2, len(ends), -1) * ends).sum(-1)[2:]
    with np.errstate(invalid="ignore"):
        return np.abs(values[0] - values[1] - weights @ slope)


def largest_jump(
    rng: np.random.Generator, evaluate: Evaluator, transport: Affine
) -> float:
    """The largest jump of the log density within reach; infinite where it is cut off.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import enable_x64
    >>> from swindles.transport import identity, standard_normal
    >>> def step(x):
    ...     return standard_normal(x) - 0.5 * (x[0] > 2)
    >>> with enable_x64(True):
    ...     evaluate, rng = Evaluator(step, 1), np.random.default_rng(0)
    ...     found = largest_jump(rng, evaluate, identity(1))
    >>> round(found, 3)
    0.5
    """
    ends = 1.6 * rng.normal(size=(SEGMENTS, np.size(transport.shift)))
    errors = segment_errors(evaluate, transport, ends, NODES)
    if not np.isfinite(errors).all():
        return np.inf
    size = np.abs(evaluate(transport, ends).logdensity)
    odd = np.argsort(-errors)[:4]
    odd = odd[errors[odd] > 1e-4 + 100 * evaluate.eps * size[odd]]
    if not odd.size:
        return 0.0
    # Of a kink, a rule eight times as fine leaves much less; of a jump, it does not.
    again = segment_errors(evaluate, transport, ends[odd], 8 * NODES)
    return float(np.where(again > 0.3 * errors[odd], again, 0.0).max())


# Rays, places on each, and the points that the map must expect to be believed.
RAYS, PLACES, FEW_POINTS = 32, 31, 10


def beyond_reach(
    rng: np.random.Generator,
    evaluate: Evaluator,
    transport: Affine,
    run: Weighted,
    proposal: Any = None,
) -> Float[np.ndarray, " statistics"]:
    """What the region beyond the points' reach adds to each expectation.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import enable_x64
    >>> from swindles.transport import unit_map
    >>> def student(x):  # three degrees of freedom
    ...     return -2 * jnp.log1p(x @ x / 3)
    >>> with enable_x64(True):
    ...     evaluate = Evaluator(student, 1, jnp.abs)
    ...     run = weigh_points(0, evaluate, unit_map([0]), 64, "none")
    ...     found = beyond_reach(np.random.default_rng(0), evaluate, unit_map([0]), run)
    >>> bool(found > run.estimate().mcse)
    True
    """
    dim = np.size(transport.shift)
    proposal = proposal or RoundProposal(dim)
    share = min(FEW_POINTS / run.gradients, 0.5)
    first, last = proposal.reach(share), 20 * RoundProposal(dim).reach(share)
    radius = np.geomspace(first, max(last, 3 * first), PLACES)
    ways = rng.normal(size=(RAYS, dim))
    ways /= np.linalg.norm(ways, axis=1, keepdims=True)
    z = (radius[:, None, None] * ways).reshape(-1, dim)
    points = evaluate(transport, np.concatenate([z, -z]))
    features = stein_features(points.z, points.score, run.order) @ run.beta
    mean = run.center + run.ratio(run.swindled)[0]
    rest = np.nan_to_num(points.values - features - mean)
    # The constant of q cancels against that of the weights.
    log_area = np.log(2) - 0.5 * dim * np.log(2) - gammaln(dim / 2)
    log_mean = run.peak + np.log(run.weight.sum() / np.sum(run.pairs) / SEQUENCES)
    shell = dim * np.log(np.tile(np.repeat(radius, RAYS), 2)) + points.logdensity
    share = np.exp(np.nan_to_num(shell + log_area - log_mean, nan=-np.inf))
    pairs = (share[:, None] * rest).reshape(2, PLACES, RAYS, -1).mean(0)
    inner = np.abs(pairs).mean(1)
    return np.trapezoid(inner, np.log(radius), axis=0)


def heavy_statistics(
    rng: np.random.Generator, evaluate: Evaluator, transport: Affine
) -> Bool[np.ndarray, " statistics"]:
    """Which statistics have no variance, or hardly one, by the tails of the density.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import enable_x64
    >>> from swindles.transport import unit_map
    >>> def cauchy(x):
    ...     return -jnp.log1p(x[0] ** 2)
    >>> def statistic(x):
    ...     return jnp.concatenate([jnp.arctan(x), jnp.sqrt(jnp.abs(x)), x])
    >>> with enable_x64(True):
    ...     evaluate, rng = Evaluator(cauchy, 1, statistic), np.random.default_rng(0)
    ...     heavy_statistics(rng, evaluate, unit_map([0])).tolist()
    [False, True, True]
    """
    dim = np.size(transport.shift)
    ways = rng.normal(size=(RAYS, dim))
    ways /= np.linalg.norm(ways, axis=1, keepdims=True)
    radii = np.sqrt(dim) * np.array([100.0, 400.0])
    found = evaluate(transport, np.concatenate([radius * ways for radius in radii]))
    with np.errstate(all="ignore"):
        power = -(found.z * found.score).sum(1).reshape(2, RAYS) - dim
        possible = np.isfinite(found.logdensity).reshape(2, RAYS) & np.isfinite(power)
        flat = possible.all(0) & (np.abs(power[1] - power[0]) < 0.2)
        size = np.abs(found.values.reshape(2, RAYS, -1))
        growth = np.log(size[1] / size[0]) / np.log(4)
    growth = np.where(np.isfinite(growth), growth, 0.0)
    least = 2 * growth + 0.5 * (growth > 0.1)
    return (flat[:, None] & (power[1][:, None] < least)).any(0)


class SecondLook(NamedTuple):
    """How a second set of points, with heavy tails, compares with the first.

    Parameters
    ----------
    apart
        The largest difference, in units of what chance allows.
    error
        The largest error of a difference, in posterior standard deviations.

    Examples
    --------
    >>> SecondLook(apart=0.4, error=1e-4).digits
    4.0
    """

    apart: float
    error: float

    @property
    def digits(self) -> float:
        """Of a standard deviation, to which the two agree."""
        return float(-np.log10(self.error))


# Part of the points that a second look takes, and the probability of a false alarm.
SECOND_SHARE, SECOND_ALARM = 8, 1e-4
# What a run keeps of each of its blocks.
BLOCKS = ["weight", "plain", "swindled", "square"]
BLOCKS += ["pairs", "pareto_k", "efficiency", "undefined"]


def look_again(
    seed: Any, evaluate: Evaluator, transport: Affine, run: Weighted, proposal: Any
) -> SecondLook:
    """Compare the estimate with that of fewer, independent points with heavy tails.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import enable_x64
    >>> from swindles.transport import Evaluator, identity
    >>> with enable_x64(True):
    ...     evaluate = Evaluator(lambda x: -jnp.sum(jnp.cosh(x)), 2, jnp.square)
    ...     run = weigh_points(0, evaluate, identity(2), order="full")
    ...     found = look_again(1, evaluate, identity(2), run, RoundProposal(2))
    >>> found.apart < 1, found.digits > 2
    (True, True)
    """
    pairs = 2 ** int(max(np.log2(np.sum(run.pairs) / SECOND_SHARE), 5))
    none = run._replace(**{name: getattr(run, name)[:0] for name in BLOCKS})
    other = weigh_more(seed, evaluate, transport, none, pairs, proposal.widened())
    one, two = run.estimate(), other.estimate()
    error = np.sqrt(one.mcse**2 + two.mcse**2 + run.rounding**2)
    limit = -stdtrit(SEQUENCES - 1, SECOND_ALARM / 2 / error.size)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.abs(one.mean - two.mean) / (limit * error)
        relative = error / np.sqrt(one.variance)
    return SecondLook(
        float(np.nanmax(apart, initial=0.0)), float(np.nanmax(relative, initial=0.0))
    )
