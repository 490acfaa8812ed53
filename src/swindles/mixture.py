"""Mixtures: when one Gaussian is not enough.

Mirrored from book/mixture.md: edit there, then run `make mirror`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import gammaincinv, gammaln, ndtri

from swindles.importance import far_modes, sobol_uniform
from swindles.transport import (
    Affine,
    Evaluator,
    Gaussian,
    pareto_k,
    weight_efficiency,
)

# Of freedom, of every part.
DEGREES = 5.0


class Mixture(NamedTuple):
    """A mixture of Student's t distributions, in latent space: a proposal.

    Parameters
    ----------
    shares
        Of the parts.
    centers
        Of the parts.
    roots
        Lower triangular, of the parts' scales.

    Examples
    --------
    >>> mixture = Mixture(np.ones(1), np.full((1, 2), 3.0), np.eye(2)[None])
    >>> z = mixture.pairs(np.random.default_rng(0), 4)
    >>> z.shape, (z[:4] + z[4:]).round(9)[0].tolist()  # mirrored at the centre
    ((8, 2), [6.0, 6.0])
    """

    shares: Float[np.ndarray, " parts"]
    centers: Float[np.ndarray, "parts dim"]
    roots: Float[np.ndarray, "parts dim dim"]

    def distances(
        self, z: Float[np.ndarray, "points dim"]
    ) -> Float[np.ndarray, "parts points"]:
        """Squared, of points from the centres, in units of the parts' scales."""
        inverses = np.linalg.inv(self.roots)
        pairs = zip(inverses, self.centers, strict=True)
        return np.stack([(((z - c) @ inverse.T) ** 2).sum(1) for inverse, c in pairs])

    def log_parts(
        self, z: Float[np.ndarray, "points dim"]
    ) -> Float[np.ndarray, "parts points"]:
        """Log density of each part times its share, as in ``log_density``."""
        dim, half = z.shape[1], (DEGREES + z.shape[1]) / 2
        constant = gammaln(half) - gammaln(DEGREES / 2) - dim / 2 * np.log(DEGREES / 2)
        with np.errstate(divide="ignore"):
            size = np.log(self.shares) - np.linalg.slogdet(self.roots)[1]
        fall = half * np.log1p(self.distances(z) / DEGREES)
        return constant + size[:, None] - fall

    def log_density(
        self, z: Float[np.ndarray, "points dim"]
    ) -> Float[np.ndarray, " points"]:
        """Up to the constant of a standard normal."""
        return np.logaddexp.reduce(self.log_parts(z), axis=0)

    def pairs(
        self, rng: np.random.Generator, number: int
    ) -> Float[np.ndarray, "points dim"]:
        """Points, and then the mirror image of each."""
        uniform = sobol_uniform(rng, number, self.centers.shape[1] + 2)
        part = np.searchsorted(np.cumsum(self.shares)[:-1], uniform[:, 0])
        length = np.sqrt(DEGREES / 2 / gammaincinv(DEGREES / 2, uniform[:, 1]))
        step = length[:, None] * ndtri(uniform[:, 2:])
        step = np.einsum("nij,nj->ni", self.roots[part], step)
        return np.concatenate([self.centers[part] + step, self.centers[part] - step])

    def reach(self, share: float) -> float:
        """The radius beyond which only this share of the points lies."""
        far = np.linalg.norm(self.pairs(np.random.default_rng(0), 2**13), axis=1)
        seen = max(share, 10 / far.size)
        return float(np.quantile(far, 1 - seen) * (seen / share) ** (1 / DEGREES))

    def widened(self) -> "Mixture":
        """A wider one, whose weights are still worth most of its points."""
        return self._replace(roots=self.roots * (1 + 0.4 / np.sqrt(len(self.roots[0]))))


# A part with less than this share, or fewer effective points than that, is dropped.
LEAST_SHARE, LEAST_POINTS = 0.005, 3.0


def fit_parts(
    mixture: Mixture,
    z: Float[np.ndarray, "points dim"],
    weights: Float[np.ndarray, " points"],
    caution: float = 5.0,
) -> Mixture:
    """One step of the EM algorithm, from points whose weights add up to one.

    The more ``caution``, the more the old scale of a part counts beside the points.

    Examples
    --------
    >>> begin = Mixture(np.ones(1), np.zeros((1, 1)), np.ones((1, 1, 1)))
    >>> z = np.random.default_rng(0).normal(3, 1, (10_000, 1))
    >>> for _ in range(20):
    ...     begin = fit_parts(begin, z, np.full(10_000, 1e-4))
    >>> begin.centers.round(1).tolist()
    [[3.0]]
    """
    dim, parts = z.shape[1], mixture.log_parts(z)
    mine = np.exp(parts - np.logaddexp.reduce(parts, axis=0)) * weights
    near = (DEGREES + dim) / (DEGREES + mixture.distances(z))
    share = mine.sum(1)
    number = share**2 / ((mine**2).sum(1) + 1e-300)
    keep = np.flatnonzero((share > LEAST_SHARE) & (number > LEAST_POINTS))
    centers, roots = mixture.centers.copy(), mixture.roots.copy()
    for k in keep:
        part = mine[k] * near[k]
        centers[k] = part @ z / part.sum()
        away = z - centers[k]
        scale = (away * part[:, None]).T @ away / share[k]
        before, prior = roots[k] @ roots[k].T, caution * (dim + 2)
        scale = (number[k] * scale + prior * before) / (number[k] + prior)
        roots[k] = np.linalg.cholesky(scale)
    return Mixture(share[keep] / share[keep].sum(), centers[keep], roots[keep])


def soften(
    log_weights: Float[np.ndarray, " points"], least: float
) -> Float[np.ndarray, " points"]:
    """Weights to a power of at most one, so that they are worth so many points.

    Examples
    --------
    >>> even = soften(np.array([0.0, 0.0, -1e9]), least=1.5)
    >>> uneven = soften(np.linspace(0, 1000, 100), least=20)
    >>> even.round(2).tolist(), round(1 / (uneven**2).sum())
    ([0.5, 0.5, 0.0], 20)
    """

    def normalized(power: float) -> np.ndarray:
        weights = np.exp(power * (log_weights - log_weights.max()))
        return weights / weights.sum()

    low, high = 0.0, 1.0
    if 1 / (normalized(1.0) ** 2).sum() >= least:
        return normalized(1.0)
    for _ in range(40):
        middle = (low + high) / 2
        enough = 1 / (normalized(middle) ** 2).sum() >= least
        low, high = (middle, high) if enough else (low, middle)
    return normalized(low)


# Parts, beside two for every other mode; more in every round; rounds at the most.
PARTS, MORE_PARTS, MOST_MIXTURES = 6, 5, 8
# Worth of the weights and Pareto k that need no more rounds; the worth that will do, if
# three rounds gain less than a tenth.
GOOD_WORTH, LOW_K, FAIR_WORTH, WORTH_GAIN = 0.6, 0.5, 0.3, 1.1


class MixtureRound(NamedTuple):
    """A mixture, and how good it is by the weights of its own points."""

    mixture: Mixture
    pareto_k: float
    efficiency: float


def begin_mixture(dim: int, modes: list[Gaussian]) -> Mixture:
    """Two parts at the map and two at every other mode: a narrow and a wide one.

    Examples
    --------
    >>> begin_mixture(3, []).shares.tolist()
    [0.5, 0.5]
    """
    maps = [Affine(np.zeros(dim), np.eye(dim)), *(mode.transport for mode in modes)]
    centers = np.array([each.shift for each in maps] * 2)
    roots = np.array([each.scale for each in maps])
    roots = np.concatenate([roots, 3 * roots])
    return Mixture(np.full(len(roots), 1 / len(roots)), centers, roots)


def spread_parts(
    rng: np.random.Generator, z: np.ndarray, weights: np.ndarray, number: int
) -> Mixture:
    """Parts at points that are drawn by weight, each with its share of the spread."""
    dim = z.shape[1]
    away = z - weights @ z
    spread = (away * weights[:, None]).T @ away + 1e-9 * np.eye(dim)
    root = np.linalg.cholesky(spread) / number ** (1 / dim)
    taken = rng.choice(len(z), number, p=weights)
    return Mixture(np.full(number, 1 / number), z[taken], np.array([root] * number))


def missing_parts(
    rng: np.random.Generator, z: np.ndarray, weights: np.ndarray, number: int
) -> Mixture:
    """Parts at points whose weight is far too large, shaped like what is around them.

    Examples
    --------
    >>> rng, z = np.random.default_rng(0), np.linspace(-1, 1, 1001)[:, None]
    >>> weights = np.where(z[:, 0] > 0.9, 10.0, 0.1)
    >>> parts = missing_parts(rng, z, weights / weights.sum(), 3)
    >>> bool((parts.centers > 0.9).all()), bool((parts.roots < 0.1).all())
    (True, True)
    """
    dim, few = z.shape[1], max(50, 10 * z.shape[1])
    excess = np.clip(weights - 3 * weights.mean(), 0, None)
    excess = excess if np.count_nonzero(excess) >= number else weights
    taken = rng.choice(len(z), number, p=excess / excess.sum())
    cloud = z[rng.choice(len(z), 2000, p=weights)]
    spread = np.atleast_2d(np.cov(cloud.T)) + 1e-9 * np.eye(dim)
    inverse, roots = np.linalg.inv(np.linalg.cholesky(spread)), []
    for center in z[taken]:
        away = cloud - center
        near = away[np.argsort(((away @ inverse.T) ** 2).sum(1))[:few]]
        roots.append(np.linalg.cholesky(near.T @ near / few + 1e-4 * spread))
    return Mixture(np.full(number, 1 / number), z[taken], np.array(roots))


def join_mixtures(one: Mixture, other: Mixture) -> Mixture:
    """The parts of both, a new one with the average share of all."""
    new = len(other.shares) / (len(one.shares) + len(other.shares))
    shares = np.concatenate([(1 - new) * one.shares, new * other.shares])
    centers = np.concatenate([one.centers, other.centers])
    return Mixture(shares, centers, np.concatenate([one.roots, other.roots]))


def next_mixture(
    rng: np.random.Generator,
    mixture: Mixture,
    seen: list[tuple[np.ndarray, np.ndarray]],
    used: list[Mixture],
) -> Mixture:
    """A better mixture, from the points of all rounds; ``mixture`` is the last one.

    Each round has seen points and their log densities.
    """
    z, logdensity = (np.concatenate(part) for part in zip(*seen, strict=True))
    proposals = np.stack([each.log_density(z) for each in used])
    log_weights = logdensity - np.logaddexp.reduce(proposals, axis=0)
    least = max(100, 60 * z.shape[1])
    weights = soften(log_weights, least)
    if len(used) == 1:
        mixture = spread_parts(rng, z, weights, PARTS + len(mixture.shares) - 2)
    else:
        own = seen[-1][1] - mixture.log_density(seen[-1][0])
        fresh = missing_parts(rng, seen[-1][0], soften(own, least), MORE_PARTS)
        mixture = join_mixtures(mixture, fresh)
    for _ in range(5):
        mixture = fit_parts(mixture, z, weights)
    return mixture


def improve_mixture(
    rng: np.random.Generator, evaluate: Evaluator, transport: Affine, mixture: Mixture
) -> Iterator[MixtureRound]:
    """Better and better mixtures, while that pays; the first is the one given."""
    seen, used, best, stale = [], [], 0.0, 0
    wanted = np.ceil(np.log2(200 * mixture.centers.shape[1]))
    for _ in range(MOST_MIXTURES):
        points = evaluate(transport, mixture.pairs(rng, 2 ** int(wanted.clip(11, 13))))
        density = np.where(np.isnan(points.logdensity), -np.inf, points.logdensity)
        own = density - mixture.log_density(points.z)
        if not np.isfinite(own.max()):
            return
        now = MixtureRound(mixture, pareto_k(own), weight_efficiency(own))
        yield now
        worth = now.efficiency if now.pareto_k <= 0.7 else 0.0
        stale = 0 if worth > WORTH_GAIN * best else stale + 1
        best = max(best, worth)
        good = worth > GOOD_WORTH and now.pareto_k <= LOW_K
        if good or (stale > 2 and best > FAIR_WORTH):
            return
        seen.append((points.z, density))
        used.append(mixture)
        mixture = next_mixture(rng, mixture, seen, used)


# Share of the broad part, and its width.
BROAD_SHARE, BROAD = 0.1, 2.0


def with_broad_part(mixture: Mixture) -> Mixture:
    """The mixture, and a part that covers all of it and more.

    Examples
    --------
    >>> at, roots = np.array([[-3.0], [3.0]]), np.full((2, 1, 1), 0.1)
    >>> narrow = Mixture(np.full(2, 0.5), at, roots)
    >>> broad = with_broad_part(narrow)
    >>> broad.shares.round(2).tolist(), broad.roots[2].round(1).tolist()
    ([0.45, 0.45, 0.1], [[6.0]])
    """
    mean = mixture.shares @ mixture.centers
    away = mixture.centers - mean
    within = np.einsum("k,kij,klj->il", mixture.shares, mixture.roots, mixture.roots)
    between = (away * mixture.shares[:, None]).T @ away
    spread = within * DEGREES / (DEGREES - 2) + between
    return Mixture(
        np.append((1 - BROAD_SHARE) * mixture.shares, BROAD_SHARE),
        np.concatenate([mixture.centers, mean[None]]),
        np.concatenate([mixture.roots, BROAD * np.linalg.cholesky(spread)[None]]),
    )


# Up to this dimension a mixture is tried.
LARGEST_MIXTURE = 30


def find_mixture(
    rng: np.random.Generator, evaluate: Evaluator, transport: Affine
) -> MixtureRound | None:
    """The mixture whose weights are worth most, of those with a Pareto k below 0.7.

    Without one of those, of all; and None where the density is zero at every point.
    What is said of it was seen before it got its broad part.

    Examples
    --------
    >>> from jax import enable_x64
    >>> from jax import numpy as jnp
    >>> from swindles.transport import standard_normal, unit_map
    >>> def two(x):
    ...     return jnp.logaddexp(standard_normal(x), standard_normal(x - 9))
    >>> with enable_x64(True):
    ...     evaluate, rng = Evaluator(two, 2), np.random.default_rng(0)
    ...     found = find_mixture(rng, evaluate, unit_map(np.zeros(2)))
    >>> found.efficiency > 0.5, found.pareto_k < 0.7
    (True, True)
    """
    modes = far_modes(rng, evaluate, transport)
    centers = [mode.transport.shift for mode in modes]
    for mode in far_modes(rng, evaluate, transport):  # who looks twice sees more
        away = [np.linalg.norm(mode.transport.shift - center) for center in centers]
        if min(away, default=np.inf) > 1:
            modes.append(mode)
    first = begin_mixture(evaluate.dim, modes)
    rounds = improve_mixture(rng, evaluate, transport, first)
    best = max(
        rounds, key=lambda each: (each.pareto_k <= 0.7, each.efficiency), default=None
    )
    return best and best._replace(mixture=with_broad_part(best.mixture))


# Nats above the average weight, at which a mode counts as missed.
MISSED = 6.0


def missed_mode(
    rng: np.random.Generator,
    evaluate: Evaluator,
    transport: Affine,
    mixture: Mixture,
    log_mean_weight: float,
) -> float:
    """How far off a mode is that a mixture does not cover; infinite without one.

    Examples
    --------
    >>> from jax import enable_x64
    >>> from jax import numpy as jnp
    >>> from swindles.transport import standard_normal, unit_map
    >>> def two(x):
    ...     return jnp.logaddexp(standard_normal(x), standard_normal(x - 18))
    >>> with enable_x64(True):
    ...     evaluate, rng = Evaluator(two, 1), np.random.default_rng(0)
    ...     inputs = rng, evaluate, unit_map([0]), begin_mixture(1, [])
    ...     round(missed_mode(*inputs, log_mean_weight=0.7), 1)
    18.0
    """
    away = np.inf
    for mode in far_modes(rng, evaluate, transport):
        top = np.asarray(mode.transport.shift)[None]
        ratio = evaluate(transport, top).logdensity - mixture.log_density(top)
        if ratio[0] > log_mean_weight + MISSED:
            away = min(away, float(np.linalg.norm(top)))
    return away
