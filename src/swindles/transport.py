"""Transport: make the posterior round first.

Mirrored from book/transport.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike
from jaxtyping import Float, Key

from swindles.coupling import compiled
from swindles.scale import fetch, put_chains, row_mesh, spread_rows

Density = Callable[[Array], Array]


class Transport(Protocol):
    """An invertible map from latent z to parameters x.

    Examples
    --------
    Any class with these methods will do:

    >>> class Double:
    ...     def __call__(self, z):
    ...         return 2 * z
    ...
    ...     def inverse(self, x):
    ...         return x / 2
    ...
    ...     def with_log_det(self, z):
    ...         return 2 * z, z.size * jnp.log(2.0)
    >>> round(float(pull_back(standard_normal, Double())(jnp.zeros(1))), 3)
    0.693
    """

    def __call__(self, z: Float[Array, " dim"]) -> Float[Array, " dim"]:
        """Map z to x."""

    def inverse(self, x: Float[Array, " dim"]) -> Float[Array, " dim"]:
        """Map x back to z."""

    def with_log_det(
        self, z: Float[Array, " dim"]
    ) -> tuple[Float[Array, " dim"], Float[Array, ""]]:
        """Map z to x, and the log of the absolute determinant of dx/dz there."""


def pull_back(logdensity: Density, transport: Transport) -> Density:
    """The log density of z when x = transport(z) has log density ``logdensity``.

    Examples
    --------
    >>> double = Affine(jnp.zeros(1), 2 * jnp.eye(1))
    >>> latent = pull_back(lambda x: -x[0], double)
    >>> bool(jnp.isclose(latent(jnp.ones(1)), -2 + jnp.log(2)))
    True
    """

    def latent(z: Array) -> Array:
        x, log_det = transport.with_log_det(z)
        return logdensity(x) + log_det

    return latent


def standard_normal(z: Float[Array, " dim"]) -> Float[Array, ""]:
    """Log density of N(0, I) without its constant; ``z`` may be a pytree.

    Examples
    --------
    >>> float(standard_normal(jnp.array([1.0, 2.0])))
    -2.5
    """
    squares = [jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(z)]
    return -0.5 * jnp.sum(jnp.stack(squares))


class Affine(NamedTuple):
    """The map x = shift + scale z, full-rank or diagonal.

    Parameters
    ----------
    shift
        Where the origin goes.
    scale
        A lower triangular matrix, or the diagonal of one.

    Examples
    --------
    >>> to_x = Affine(shift=jnp.ones(2), scale=jnp.array([1.0, 2.0]))
    >>> to_x(jnp.ones(2)).tolist(), to_x.inverse(jnp.ones(2)).tolist()
    ([2.0, 3.0], [0.0, 0.0])
    """

    shift: Float[Array | np.ndarray, " dim"]
    scale: Float[Array | np.ndarray, "dim dim"] | Float[Array | np.ndarray, " dim"]

    def __call__(self, z: Float[Any, " dim"]) -> Float[Any, " dim"]:
        """Map z to x."""
        full = self.scale.ndim == 2
        return self.shift + (self.scale @ z if full else self.scale * z)

    def inverse(self, x: Float[Array, " dim"]) -> Float[Array, " dim"]:
        """Map x back to z."""
        if self.scale.ndim == 1:
            return (x - self.shift) / self.scale
        return solve_triangular(self.scale, x - self.shift, lower=True)

    def with_log_det(
        self, z: Float[Array, " dim"]
    ) -> tuple[Float[Array, " dim"], Float[Array, ""]]:
        """Map z to x; the log-determinant is the sum of the logs on the diagonal."""
        diagonal = jnp.diagonal(self.scale) if self.scale.ndim == 2 else self.scale
        return self(z), jnp.log(jnp.abs(diagonal)).sum()


def identity(dim: int, full: bool = False) -> Affine:
    """The map that changes nothing, as a diagonal or a full-rank one.

    Examples
    --------
    >>> identity(3)(jnp.arange(3.0)).tolist()
    [0.0, 1.0, 2.0]
    """
    return Affine(jnp.zeros(dim), jnp.eye(dim) if full else jnp.ones(dim))


class Points(NamedTuple):
    """What is known at some points of latent space.

    Parameters
    ----------
    z
        The points.
    logdensity
        Of z, up to a constant: the log-determinant of the affine map is left out.
    score
        Its gradient.
    values
        Of the statistics.
    log_proposal
        Log density of what z was drawn from, up to the constant of a standard normal.

    Examples
    --------
    >>> evaluate = Evaluator(standard_normal, 2)
    >>> evaluate(identity(2), np.ones((5, 2))).score.shape
    (5, 2)
    """

    z: Float[np.ndarray, "points dim"]
    logdensity: Float[np.ndarray, " points"]
    score: Float[np.ndarray, "points dim"]
    values: Float[np.ndarray, "points statistics"]
    log_proposal: Float[np.ndarray, " points"]

    @property
    def log_weights(self) -> Float[np.ndarray, " points"]:
        """Log of p / q for points drawn from q, up to a constant."""
        return self.logdensity - self.log_proposal


def no_statistic(x: Float[Array, " dim"]) -> Float[Array, " none"]:
    """The statistic of who only wants the density."""
    return x[:0]


def points_program(
    logdensity: Density, statistic: Callable, mesh: Any = None
) -> Callable:
    """From an affine map and points z to log densities, scores and statistics."""

    def at_one(transport: Affine, z: Array) -> tuple[Array, Array, Array]:
        def latent(z: Array) -> tuple[Array, Array]:
            x = transport(z)
            return logdensity(x), x

        (value, x), score = jax.value_and_grad(latent, has_aux=True)(z)
        return value, score, statistic(x)

    return jax.jit(spread_rows(mesh, jax.vmap(at_one, (None, 0))))


# Points that the program takes at a time.
BATCH = 64


class Evaluator:
    """Log density, score and statistics at many points, through an affine map.

    ``gradients`` counts the points so far.

    Parameters
    ----------
    logdensity
        Of a vector.
    dim
        The length of the vector.
    statistic
        From the vector to one vector of statistics.
    dtype
        The type to compute in; by default that of JAX.

    Examples
    --------
    >>> evaluate = Evaluator(standard_normal, 2, jnp.square)
    >>> points = evaluate(Affine(jnp.ones(2), 2 * jnp.ones(2)), np.zeros((3, 2)))
    >>> points.logdensity.tolist(), points.values[0].tolist(), evaluate.gradients
    ([-1.0, -1.0, -1.0], [1.0, 1.0], 3)
    """

    def __init__(
        self,
        logdensity: Density,
        dim: int,
        statistic: Callable = no_statistic,
        dtype: Any = None,
    ) -> None:
        """Nothing is compiled until points are to be looked at."""
        self.dim, self.dtype = dim, jax.dtypes.canonicalize_dtype(dtype or float)
        self.eps = float(np.finfo(self.dtype).eps)
        self.gradients = 0
        self.logdensity, self.statistic = logdensity, statistic

    def program(self, mesh: Any) -> Callable:
        """``points_program``, compiled once."""
        return compiled(
            self.logdensity,
            ("points", self.statistic, mesh),
            lambda: points_program(self.logdensity, self.statistic, mesh),
        )

    def __call__(self, transport: Affine, z: Float[np.ndarray, "points dim"]) -> Points:
        """Look at some points."""
        number, mesh = len(z), row_mesh(len(z), BATCH)
        batch = BATCH * (mesh.size if mesh else 1)
        padded = np.zeros((-(-number // batch) * batch, self.dim), self.dtype)
        padded[:number] = z
        inner = Affine(*(np.asarray(part, self.dtype) for part in transport))
        program, batches = self.program(mesh), range(0, len(padded), batch)
        rows = (put_chains(mesh, padded[i : i + batch]) for i in batches)
        parts = [program(inner, row) for row in rows]
        parts = fetch(parts)
        self.gradients += number
        value, score, statistics = (
            np.concatenate([np.asarray(part[i], np.float64) for part in parts])[:number]
            for i in range(3)
        )
        z = np.asarray(z, np.float64)
        return Points(z, value, score, statistics, -0.5 * (z**2).sum(1))


def curvature(evaluate: Evaluator, transport: Affine) -> Float[np.ndarray, "dim dim"]:
    """Minus the Hessian at the origin of latent space, by central differences.

    Examples
    --------
    >>> with jax.enable_x64(True):
    ...     evaluate = Evaluator(lambda x: -2 * x @ x, 2)
    ...     curvature(evaluate, identity(2)).round(6).tolist()
    [[4.0, 0.0], [0.0, 4.0]]
    """
    step = 1e-3 if evaluate.eps < 1e-10 else 1e-2
    steps = step * np.eye(transport.shift.size)
    score = evaluate(transport, np.concatenate([steps, -steps])).score
    above, below = np.split(score, 2)
    slope = (below - above) / (2 * step)
    return (slope + slope.T) / 2


def newton_step(
    evaluate: Evaluator, transport: Affine, longest: float = 64.0
) -> tuple[Affine, float]:
    """Climb from the origin of a map: the map there, and the gain beyond rounding.

    ``longest`` is the longest step to try, in units of Newton's.
    """
    bend = curvature(evaluate, transport)
    too_wide = not np.isfinite(bend).all()
    bend = np.eye(len(bend)) if too_wide else bend
    sizes, axes = np.linalg.eigh(bend)
    sizes = np.abs(sizes).clip(1e-4, 1e12)
    here = evaluate(transport, np.zeros((1, len(bend))))
    way = axes @ ((axes.T @ here.score[0]) / sizes)
    way = way / max(1.0, np.linalg.norm(way) / (100 * np.sqrt(way.size)))
    tried = longest * 2.0 ** (-np.arange(BATCH) / 2)[:, None] * way
    found = evaluate(transport, tried).logdensity
    best = int(np.argmax(np.where(np.isfinite(found), found, -np.inf)))
    gain = float(found[best] - here.logdensity[0])
    gain -= 8 * evaluate.eps * abs(float(here.logdensity[0]))
    move = tried[best] if gain > 0 else np.zeros_like(way)
    shift = transport.shift + transport.scale @ move
    if too_wide:  # the units are, and no end of it
        return Affine(shift, transport.scale / 100), np.inf
    return Affine(shift, transport.scale @ (axes / np.sqrt(sizes)) @ axes.T), gain


# Newton steps to take at the most, and the gain in nats that is not worth another.
MOST_STEPS, LITTLE_GAIN = 60, 1e-6


def find_mode(
    evaluate: Evaluator,
    position: ArrayLike,
    scale: ArrayLike | None = None,
    longest: float = 64.0,
) -> tuple[Affine, Float[np.ndarray, "dim dim"]]:
    """Climb to a mode: a map that is centred there, and the curvature in its space.

    ``scale`` is a first guess of the units, ``longest`` is as in ``newton_step``.
    """
    start = np.asarray(position, np.float64)
    units = np.diag(np.abs(start).clip(1)) if scale is None else np.asarray(scale)
    transport = Affine(start, units)
    if not np.isfinite(evaluate(transport, np.zeros((1, start.size))).logdensity[0]):
        raise ValueError(
            "the log density is not finite at the starting position: start elsewhere"
        )
    for _ in range(MOST_STEPS):
        transport, gain = newton_step(evaluate, transport, longest)
        if not gain > LITTLE_GAIN:
            break
    return transport, curvature(evaluate, transport)


def triangular(transport: Affine) -> Affine:
    """The same Gaussian, by the lower triangular root of its covariance."""
    upper = np.linalg.qr(np.asarray(transport.scale).T)[1]
    return Affine(transport.shift, upper.T * np.sign(np.diagonal(upper)))


def usual_precision(transport: Affine) -> Affine:
    """A triangular map in the precision that JAX has by default."""
    return Affine(*(jnp.asarray(part, float) for part in triangular(transport)))


def laplace(logdensity: Density, position: ArrayLike) -> Affine:
    """The affine map of Laplace's approximation: mode and curvature.

    It is found in double precision. Raises ValueError when the curvature at the mode is
    not that of a maximum.

    Examples
    --------
    >>> transport = laplace(lambda x: -0.5 * ((x - 3) ** 2 / 4).sum(), jnp.zeros(2))
    >>> bool(jnp.allclose(transport.shift, 3)), transport.scale.round(3).tolist()
    (True, [[2.0, 0.0], [0.0, 2.0]])
    """
    with jax.enable_x64(True):
        evaluate = Evaluator(logdensity, np.size(position))
        found, precision = find_mode(evaluate, position)
    smallest = np.linalg.eigvalsh(precision)[0] if np.isfinite(precision).all() else 0
    if not smallest > 1e-6:
        raise ValueError(
            "no Gaussian fits at the mode: the negative Hessian has smallest "
            f"eigenvalue {smallest:.3g}; start elsewhere or give a map of your own"
        )
    root = np.linalg.cholesky(np.linalg.inv(precision))
    return usual_precision(Affine(found.shift, found.scale @ root))


def log_weight(logdensity: Density, transport: Transport, z: Array) -> Array:
    """Log of p(x) / q(x) at x = transport(z), where z ~ N(0, I) makes x ~ q."""
    log_normal = standard_normal(z) - 0.5 * z.size * jnp.log(2 * jnp.pi)
    return pull_back(logdensity, transport)(z) - log_normal


def log_weights(
    key: Key[Array, ""],
    logdensity: Density,
    transport: Transport,
    dim: int,
    num_draws: int,
) -> Float[np.ndarray, " draws"]:
    """Log weights of independent draws of q, in double precision.

    Examples
    --------
    A perfect map gives all draws the same weight, the log of the normaliser:

    >>> key = jax.random.key(0)
    >>> weights = log_weights(key, standard_normal, identity(2), dim=2, num_draws=100)
    >>> bool(np.allclose(weights, np.log(2 * np.pi)))
    True
    """

    @jax.jit
    def weigh(z: Array) -> Array:
        weight = partial(log_weight, logdensity, transport)
        return jax.lax.map(weight, z, batch_size=64)

    draws = jax.random.normal(key, (num_draws, dim))
    return np.asarray(weigh(draws), np.float64)


def finite_points(points: Points) -> Points:
    """Those of the points where all is finite; at least one must be."""
    use = np.isfinite(points.logdensity) & np.isfinite(points.score).all(1)
    if not use.any():
        raise ValueError("the log density is finite nowhere near the position")
    return Points(*(part[use] for part in points))


def mirrored_normal(rng: np.random.Generator, number: int, dim: int) -> np.ndarray:
    """Draws of N(0, I), each followed by its mirror image: (number, dim)."""
    half = rng.normal(size=(number // 2, dim))
    return np.concatenate([half, -half])


def improve_map(transport: Affine, points: Points, rate: float = 1.0) -> Affine:
    """The map, moved towards the best Gaussian, from points drawn from it.

    A ``rate`` below 1 goes only a part of the way.

    Examples
    --------
    >>> start = unit_map(np.zeros(2))
    >>> z = mirrored_normal(np.random.default_rng(0), 20_000, 2)
    >>> with jax.enable_x64(True):
    ...     points = Evaluator(lambda x: -((x - 1) @ (x - 1)) / 8, 2)(start, z)
    >>> found = improve_map(start, points)
    >>> deviations = np.diagonal(found.scale)
    >>> np.allclose(found.shift, 1, atol=0.2), np.allclose(deviations, 2, atol=0.2)
    (True, True)
    """
    z, residual = points.z, points.score + points.z
    number, dim = z.shape
    product = z.T @ residual / number
    noise = ((z**2).T @ residual**2 / number - product**2) / number
    keep = 1 - noise / np.maximum(product**2, noise + 1e-300)
    product = keep * product
    sizes, axes = np.linalg.eigh(np.eye(dim) - (product + product.T) / 2)
    sizes = sizes.clip(0.1, 10) ** rate  # a step of moderate length
    move = rate * axes @ ((axes.T @ points.score.mean(0)) / sizes)
    move = move / max(1.0, np.linalg.norm(move) / (2 * np.sqrt(dim)))
    shift = transport.shift + transport.scale @ move
    return Affine(shift, transport.scale @ (axes / np.sqrt(sizes)) @ axes.T)


def pareto_shape(excess: Float[np.ndarray, " draws"]) -> float:
    """The shape of a generalised Pareto distribution, from sorted draws of it.

    The estimator of Zhang and Stephens (2009), drawn a little towards 1/2 as in
    smoothed importance sampling.

    Examples
    --------
    >>> draws = np.random.default_rng(0).pareto(2.0, 5000)  # shape 1 / 2
    >>> round(pareto_shape(np.sort(draws)), 1)
    0.5
    """
    number = excess.size
    grid = 30 + int(np.sqrt(number))
    quartile = excess[int(number / 4 + 0.5) - 1]
    if not quartile > 0:  # a quarter of them vanish beside the largest
        return np.inf
    rates = 1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))
    rates = rates / (3 * quartile) + 1 / excess[-1]
    shapes = np.log1p(-rates[:, None] * excess).mean(1)
    profile = number * (np.log(-rates / shapes) - shapes - 1)
    weights = np.exp(profile - profile.max())
    weights /= weights.sum()
    shape = np.log1p(-(rates @ weights) * excess).mean()
    return float((number * shape + 5) / (number + 10))


def pareto_k(weights: Float[np.ndarray, " draws"]) -> float:
    """Pareto k of log weights; below 0.7 their tail can be trusted.

    It is infinite when a log weight is NaN or infinite, or when almost all weights
    vanish beside the largest, and minus infinity when the largest are all the same.

    Examples
    --------
    >>> pareto_k(np.random.default_rng(0).normal(size=4000)) < 0.7
    True
    >>> pareto_k(np.linspace(0, 1e5, 4000)), pareto_k(np.ones(4000))
    (inf, -inf)
    """
    weights = np.asarray(weights, np.float64)
    if not (weights < np.inf).all() or not np.isfinite(weights.max()):
        return np.inf
    weights = np.sort(weights - weights.max())
    number = weights.size
    size = int(3 * np.sqrt(number)) if number > 225 else number // 5
    if weights[-size] > -1e-4:  # the same, but for rounding
        return -np.inf
    if weights[-size] < -500:  # exp would underflow
        return np.inf
    return pareto_shape(np.exp(weights[-size:]) - np.exp(weights[-size - 1]))


def weight_efficiency(log_weights: Float[np.ndarray, " points"]) -> float:
    """What weights leave of the number of points, from 0 to 1.

    Examples
    --------
    >>> round(weight_efficiency(np.log(np.array([1.0, 1.0, 0.0 + 1e-9]))), 2)
    0.67
    """
    if not (log_weights < np.inf).all() or not np.isfinite(log_weights.max()):
        return 0.0
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (weights**2).sum() / weights.size)


# Up to this dimension a matrix for every pair of axes is affordable.
LARGEST_LAPLACE = 2000
# Rounds at the most, and the gain in nats that is not worth another.
MOST_ROUNDS, LITTLE_ELBO = 20, 0.02


def unit_map(position: ArrayLike) -> Affine:
    """One standard deviation in every direction around a position.

    Examples
    --------
    >>> unit_map(np.ones(2)).scale.tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    shift = np.asarray(position)
    full = shift.size <= LARGEST_LAPLACE
    return Affine(shift, np.eye(shift.size) if full else np.ones(shift.size))


class Gaussian(NamedTuple):
    """A Gaussian approximation.

    Parameters
    ----------
    transport
        Its map.
    pareto_k, efficiency, elbo
        How good it is, by the weights of its own points.

    Examples
    --------
    >>> with jax.enable_x64(True):
    ...     evaluate = Evaluator(lambda x: -((x - 1) @ (x - 1)) / 8, 2)
    ...     found = fit_gaussian(evaluate, jnp.zeros(2), seed=0)
    >>> found.transport.shift.round(1).tolist(), found.efficiency > 0.9
    ([1.0, 1.0], True)
    """

    transport: Affine
    pareto_k: float
    efficiency: float
    elbo: float


def assess_map(transport: Affine, points: Points) -> Gaussian:
    """How good a map is, by points drawn from it."""
    weights, dim = points.log_weights, transport.shift.size
    scale = np.asarray(transport.scale)
    log_det = np.linalg.slogdet(scale)[1] if scale.ndim == 2 else np.log(scale).sum()
    elbo = weights.mean() + log_det + 0.5 * dim * np.log(2 * np.pi)
    k, even = pareto_k(weights), weight_efficiency(weights)
    return Gaussian(transport, k, even, float(elbo) if np.isfinite(elbo) else -np.inf)


def improve_gaussian(
    evaluate: Evaluator, start: Affine, seed: Any
) -> tuple[Gaussian, Points]:
    """The best Gaussian that rounds of improvement find from a start."""
    rng, dim = np.random.default_rng(seed), start.shift.size
    number = int(2 ** np.ceil(np.log2(np.clip(8 * dim, 1024, 8192))))
    points = evaluate(start, mirrored_normal(rng, number, dim))
    best, rate, idle = assess_map(start, points), 1.0, 0
    for _ in range(MOST_ROUNDS):
        now = improve_map(best.transport, finite_points(points), rate)
        tried = evaluate(now, mirrored_normal(rng, number, dim))
        found = assess_map(now, tried)
        gain = found.elbo - best.elbo
        idle = 0 if gain > LITTLE_ELBO else idle + 1
        if gain > -LITTLE_ELBO:  # or a step on the level: it has noise
            best, points, rate = found, tried, min(1.0, 2 * rate)
        else:
            rate /= 4
        if idle == 2 or rate < 0.03:
            break
    return best, points


# For the last step, whose noise stays in the map.
MANY_DRAWS = 2**15


def best_gaussian(logdensity: Density, position: ArrayLike, seed: Any = 0) -> Affine:
    """The affine map with the highest ELBO: Laplace's, and rounds of improvement.

    Examples
    --------
    >>> found = best_gaussian(lambda x: -jnp.sum(jnp.cosh(x - 1)), jnp.zeros(2))
    >>> found.shift.round(1).tolist(), found.scale.shape
    ([1.0, 1.0], (2, 2))
    """
    start = laplace(logdensity, position)
    with jax.enable_x64(True):
        evaluate = Evaluator(logdensity, start.shift.size)
        best, _ = improve_gaussian(evaluate, start, seed)
        draws = mirrored_normal(np.random.default_rng(seed), MANY_DRAWS, evaluate.dim)
        found = improve_map(best.transport, evaluate(best.transport, draws))
    return usual_precision(found)


def widen_map(transport: Affine, points: Points) -> Affine:
    """The map with the posterior's mean and covariance, by weights, and a bit wider."""
    log_weights = points.log_weights
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean = weights @ points.z
    excess = (points.z * weights[:, None]).T @ points.z - np.eye(mean.size)
    excess = excess - np.outer(mean, mean)
    noise = (weights**2).sum()
    keep = 1 - noise / np.maximum(excess**2, noise)
    sizes, axes = np.linalg.eigh(np.eye(mean.size) + keep * excess)
    root = axes * np.sqrt(sizes.clip(0.1, 10)) @ axes.T
    wider = 1 + 0.15 / np.sqrt(mean.size)
    shift = transport.shift + transport.scale @ mean
    return Affine(shift, wider * transport.scale @ root)


def widen_gaussian(evaluate: Evaluator, best: Gaussian, seed: Any) -> Gaussian:
    """A Gaussian that covers the posterior, if that is better than the best inside."""
    rng, dim = np.random.default_rng(seed), best.transport.shift.size
    number = max(4096, 2 ** int(np.ceil(np.log2(8 * dim))))
    points = evaluate(best.transport, mirrored_normal(rng, number, dim))
    best = assess_map(best.transport, points)
    if best.efficiency * number < 20 * dim:
        return best
    wide = widen_map(best.transport, finite_points(points))
    found = assess_map(wide, evaluate(wide, mirrored_normal(rng, 1024, dim)))
    small_k = found.pareto_k <= max(best.pareto_k, 0.5)
    return found if small_k and found.efficiency > 0.8 * best.efficiency else best


def fit_gaussian(evaluate: Evaluator, position: ArrayLike, seed: Any) -> Gaussian:
    """The best Gaussian near a mode; in very many dimensions, one at the position.

    Examples
    --------
    >>> with jax.enable_x64(True):
    ...     evaluate = Evaluator(lambda x: -jnp.sum(jnp.cosh(x - 1)), 2)
    ...     found = fit_gaussian(evaluate, jnp.zeros(2), seed=0)
    >>> found.transport.shift.round(1).tolist()
    [1.0, 1.0]
    """
    start = np.asarray(position, np.float64)
    if start.size <= LARGEST_LAPLACE:
        mode = find_mode(evaluate, start)[0]
        try:
            best, _ = improve_gaussian(evaluate, mode, seed)
        except ValueError:  # flat, and then cut off
            best, _ = improve_gaussian(evaluate, unit_map(start), seed)
        found = widen_gaussian(evaluate, best, seed)
        return found._replace(transport=triangular(found.transport))
    unit = unit_map(start)
    draws = mirrored_normal(np.random.default_rng(seed), 1024, start.size)
    return assess_map(unit, evaluate(unit, draws))


def map_quality(
    key: Key[Array, ""], problem: Any, transport: Transport
) -> tuple[float, float]:
    """Pareto k of a map, and its ELBO; infinite where a weight is not finite.

    ``problem`` has a ``logdensity`` of a vector and a ``dim``.

    Examples
    --------
    >>> from swindles.targets import gaussian
    >>> target = gaussian(jnp.zeros(2), jnp.eye(2))
    >>> k, elbo = map_quality(jax.random.key(0), target, identity(2))
    >>> k, round(elbo, 3)
    (-inf, 1.838)
    """
    weights = log_weights(key, problem.logdensity, transport, problem.dim, 4096)
    if not np.isfinite(weights).all():
        return np.inf, -np.inf
    return pareto_k(weights), float(weights.mean())


def map_from_draws(draws: Float[Array, "*any dim"], full: bool) -> Affine:
    """The affine map with the (robust) mean and covariance of draws (..., dim).

    Examples
    --------
    >>> draws = 3 + 2 * jax.random.normal(jax.random.key(0), (100, 100, 1))
    >>> found = map_from_draws(draws, full=True)
    >>> found.shift.round(1).tolist(), found.scale.round(1).tolist()
    ([3.0], [[2.0]])
    """
    x = np.asarray(draws, np.float64).reshape(-1, draws.shape[-1])
    if not np.isfinite(x).all():
        raise ValueError("the chains run off to infinity: is the posterior proper?")
    low, middle, high = np.quantile(x, [0.25, 0.5, 0.75], axis=0)
    width = np.where(high > low, (high - low) / 1.349, x.std(0) + 1e-30)
    inner = np.clip((x - middle) / width, -3, 3)
    shift = jnp.asarray(middle + width * inner.mean(0), draws.dtype)
    if not full:
        return Affine(shift, jnp.asarray(width * inner.std(0), draws.dtype))
    spread = np.atleast_2d(np.cov(inner.T)) + 1e-8 * np.eye(width.size)
    root = width[:, None] * np.linalg.cholesky(spread)
    return Affine(shift, jnp.asarray(root, draws.dtype))
