"""Transport: make the posterior round first.

Mirrored from book/transport.md: edit there, then run `make mirror`.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from blackjax.vi import pathfinder
from jax import Array
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike
from jaxtyping import Float, Key
from tqdm import tqdm

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

    shift: Float[Array, " dim"]
    scale: Float[Array, "dim dim"] | Float[Array, " dim"]

    def __call__(self, z: Float[Array, " dim"]) -> Float[Array, " dim"]:
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


def find_mode(logdensity: Density, position: Array) -> Array:
    """Climb from ``position`` to a maximum of ``logdensity``."""
    from scipy.optimize import minimize

    value_and_slope = jax.jit(jax.value_and_grad(lambda x: -logdensity(x)))

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = value_and_slope(jnp.asarray(x, position.dtype))
        return float(value), np.asarray(slope, np.float64)

    if not np.isfinite(objective(np.asarray(position))[0]):
        raise ValueError(
            "the log density is not finite at the starting position: start elsewhere"
        )
    climbed = minimize(objective, np.asarray(position, np.float64), jac=True)
    return jnp.asarray(climbed.x, position.dtype)


def hessian(slope: Callable[[Array], Array], position: Array) -> Array:
    """The derivative of ``slope``, a few rows at a time to spare memory."""

    def row(direction: Array) -> Array:
        return jax.jvp(slope, (position,), (direction,))[1]

    rows = jnp.eye(position.size, dtype=position.dtype)
    return jax.lax.map(row, rows, batch_size=16)


def laplace(logdensity: Density, position: ArrayLike) -> Affine:
    """The affine map of Laplace's approximation: mode and curvature.

    Raises ValueError when the curvature at the mode is not that of a maximum.

    Examples
    --------
    >>> transport = laplace(lambda x: -0.5 * ((x - 3) ** 2 / 4).sum(), jnp.zeros(2))
    >>> bool(jnp.allclose(transport.shift, 3)), transport.scale.round(3).tolist()
    (True, [[2.0, 0.0], [0.0, 2.0]])
    """
    mode = find_mode(logdensity, jnp.asarray(position, float))
    slope = jax.jit(jax.grad(logdensity))
    curvature = jax.jit(partial(hessian, slope))
    for _ in range(3):
        mode = mode - jnp.linalg.solve(curvature(mode), slope(mode))
    precision = -np.asarray(curvature(mode), np.float64)
    smallest = np.linalg.eigvalsh(precision)[0] if np.isfinite(precision).all() else 0
    if not smallest > 0:
        raise ValueError(
            "no Gaussian fits at the mode: the negative Hessian has smallest "
            f"eigenvalue {smallest:.3g}; start elsewhere or give a map of your own"
        )
    root = np.linalg.cholesky(np.linalg.inv(precision))
    return Affine(mode, jnp.asarray(root, mode.dtype))


def gaussian_start(
    key: Key[Array, ""], logdensity: Density, position: ArrayLike
) -> Affine:
    """Laplace's map or, where there is none, Pathfinder's; it warns when it changes.

    Examples
    --------
    >>> gaussian_start(jax.random.key(0), standard_normal, jnp.ones(2)).scale.shape
    (2, 2)
    """
    try:
        return laplace(logdensity, position)
    except ValueError as reason:
        if "starting position" in str(reason):
            raise
        warnings.warn(f"{reason}. Using Pathfinder instead.", stacklevel=2)
    start = jnp.asarray(position, float)
    climb = jax.jit(lambda key, x: pathfinder.approximate(key, logdensity, x)[0])
    best = climb(key, start)
    spread = jnp.diag(best.alpha) + best.beta @ best.gamma @ best.beta.T
    transport = Affine(best.position, jnp.linalg.cholesky(spread))
    if not all(jnp.isfinite(part).all() for part in transport):
        raise ValueError("Pathfinder finds no Gaussian either: give a map of your own")
    return transport


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


def path_log_weight(logdensity: Density, transport: Affine, z: Array) -> Array:
    """Value of ``log_weight``; its gradient sees q move only through x."""
    x = transport(z)
    frozen = Affine(*map(jax.lax.stop_gradient, transport))
    back = frozen.inverse(x)
    log_normal = standard_normal(back) - 0.5 * z.size * jnp.log(2 * jnp.pi)
    return logdensity(x) + frozen.with_log_det(back)[1] - log_normal


class Schedule(NamedTuple):
    """How to fit a map by variational inference.

    Parameters
    ----------
    num_steps
        The most steps to take.
    batch
        Draws in each step.
    learning_rate
        The rate at first.
    tolerance
        Nats to gain in a tenth of the steps, to go on at that rate.

    Examples
    --------
    >>> brief = Schedule(num_steps=50, batch=8, learning_rate=1e-3)
    >>> fit = fit_affine(jax.random.key(0), standard_normal, identity(2), brief)
    >>> 0 < fit.loss.size <= 50
    True
    """

    num_steps: int
    batch: int
    learning_rate: float
    tolerance: float = 0.02


AFFINE_SCHEDULE = Schedule(num_steps=1000, batch=64, learning_rate=1e-3)


def check_schedule(schedule: Schedule) -> None:
    """Raise ValueError when a schedule makes no sense."""
    for name, least in {"num_steps": 10, "batch": 2, "learning_rate": 0}.items():
        value = getattr(schedule, name)
        if not (np.isfinite(value) and value >= least and value > 0):
            raise ValueError(
                f"{name} is {value}: give at least 10 steps, 2 draws and a positive "
                "learning rate"
            )


def adam(dim: int) -> optax.GradientTransformation:
    """Adam's direction, from gradients of a length of at most twice the dimension."""
    clip = optax.clip_by_global_norm(2.0 * dim)
    return optax.chain(clip, optax.scale_by_adam())


class Training(NamedTuple):
    """The state of a fit."""

    params: Any
    optimizer: Any
    average: Any  # of the params over the last steps


def make_trainer(weigh: Callable, dim: int, batch: int) -> Callable:
    """A function that takes training steps; ``weigh(params, z)`` is a log weight.

    Its arguments are a key, a ``Training`` and rows (step, learning rate, weight in the
    average), one for each step. It returns the new ``Training`` and the losses.
    """

    def loss(params: Any, key: Array) -> Array:
        half = jax.random.normal(key, (batch // 2, dim))
        return -jax.vmap(partial(weigh, params))(jnp.concatenate([half, -half])).mean()

    def train(key: Array, training: Training, rows: Array) -> tuple[Training, Array]:
        def body(now: Training, row: Array) -> tuple[Training, Array]:
            step, rate, weight = row
            here = jax.random.fold_in(key, step.astype(int))
            value, slope = jax.value_and_grad(loss)(now.params, here)
            way, optimizer = adam(dim).update(slope, now.optimizer)
            params = jax.tree.map(lambda p, w: p - rate * w, now.params, way)
            mean = jax.tree.map(lambda a, p: a + weight * (p - a), now.average, params)
            return Training(params, optimizer, mean), value

        return jax.lax.scan(body, training, rows)

    return train


def training_rows(first: int, size: int, decay: int | None, rate: float) -> Array:
    """Rows for a trainer: a constant learning rate, or one that falls to zero.

    The rate falls from step ``decay`` on, for four times ``size`` steps. The average is
    over the last of those blocks.
    """
    steps = np.arange(first, first + size)
    if decay is None:
        return jnp.stack([steps, np.full(size, rate), np.ones(size)], 1)
    remaining = 1 - (steps - decay) / (4 * size)
    weights = 1 / np.maximum(steps - decay - 3 * size + 1, 1)
    return jnp.stack([steps, rate * remaining, weights], 1)


def has_settled(losses: list[np.ndarray], tolerance: float) -> bool:
    """Whether the last block of losses improves on the one before by too little.

    Too little is ``tolerance`` (in nats) plus two standard errors.
    """
    if len(losses) < 2:
        return False
    before, now = losses[-2:]
    noise = np.sqrt(before.var() / before.size + now.var() / now.size)
    return bool(before.mean() - now.mean() < tolerance + 2 * noise)


def check_loss(losses: np.ndarray, first: int) -> np.ndarray:
    """Raise ValueError at the first loss that is not finite; ``first`` is its step."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if bad.size:
        raise ValueError(
            f"the loss is {losses[bad[0]]} at step {first + bad[0]}: the log density "
            "is not finite at a draw of the map, or the learning rate is too large"
        )
    return losses


def minimize_loss(
    key: Array, weigh: Callable, params: Any, dim: int, schedule: Schedule
) -> tuple[Any, np.ndarray]:
    """Train in up to ten blocks: at a constant rate until settled, then four more.

    Returns the averaged parameters and the losses of all steps.
    """
    check_schedule(schedule)
    num_steps, batch, rate, tolerance = schedule
    size = num_steps // 10
    train = jax.jit(make_trainer(weigh, dim, batch))
    training = Training(params, adam(dim).init(params), params)
    losses: list[np.ndarray] = []
    decay = None
    with tqdm(total=10 * size, delay=2, leave=False) as bar:
        while decay is None or len(losses) * size < decay + 4 * size:
            first = len(losses) * size
            if decay is None and (len(losses) == 6 or has_settled(losses, tolerance)):
                decay = first
            rows = training_rows(first, size, decay, rate)
            training, loss = train(key, training, rows)
            losses.append(check_loss(np.asarray(loss, np.float64), first))
            bar.update(size)
            bar.set_postfix(loss=f"{losses[-1].mean():.2f}")
    return training.average, np.concatenate(losses)


class Fit(NamedTuple):
    """A fitted map and how good it is.

    Parameters
    ----------
    transport
        The map.
    loss
        Minus the ELBO, estimated at every step.
    log_weights
        Those of fresh draws.

    Examples
    --------
    >>> brief = Schedule(num_steps=50, batch=8, learning_rate=1e-3)
    >>> fit = fit_affine(jax.random.key(0), standard_normal, identity(2), brief)
    >>> round(fit.elbo, 2), fit.elbo_error < 0.01, pareto_k(fit.log_weights) < 0.7
    (1.84, True, True)
    """

    transport: Any
    loss: Float[np.ndarray, " steps"]
    log_weights: Float[np.ndarray, " draws"]

    @property
    def elbo(self) -> float:
        """The evidence lower bound of the map."""
        return float(self.log_weights.mean())

    @property
    def elbo_error(self) -> float:
        """The standard error of ``elbo``."""
        return float(self.log_weights.std() / np.sqrt(self.log_weights.size))


def keep_better(
    key: Array, logdensity: Density, start: Affine, fitted: Any, loss: np.ndarray
) -> Fit:
    """Compare the fitted map with its start on the same fresh draws; keep the better.

    It warns when that is the start.
    """
    dim = start.shift.size
    before, after = (
        log_weights(key, logdensity, transport, dim, 4096)
        for transport in (start, fitted)
    )
    gain = after - before
    if gain.mean() < -2 * gain.std() / np.sqrt(gain.size):
        warnings.warn(
            f"the fit made the map worse by {-gain.mean():.3g} nats, so this is the "
            "one it started from: try a smaller learning rate or more steps",
            stacklevel=3,
        )
        fitted, after = start, before
    return Fit(fitted, loss, after)


def lower_triangular(transport: Affine) -> Affine:
    """The map without what is above the diagonal of its scale."""
    full = transport.scale.ndim == 2
    return transport._replace(scale=jnp.tril(transport.scale)) if full else transport


def fit_affine(
    key: Key[Array, ""],
    logdensity: Density,
    start: Affine,
    schedule: Schedule = AFFINE_SCHEDULE,
) -> Fit:
    """Improve an affine map by variational inference; a diagonal one stays diagonal.

    The learning rate is in units of the start's standard deviations.

    Examples
    --------
    >>> def logdensity(x):
    ...     return -0.5 * ((x - 1) ** 2).sum() / 4
    >>> schedule = Schedule(num_steps=2000, batch=16, learning_rate=0.01)
    >>> fit = fit_affine(jax.random.key(0), logdensity, identity(2), schedule)
    >>> fit.transport.shift.round(2).tolist(), fit.transport.scale.round(2).tolist()
    ([1.0, 1.0], [2.0, 2.0])
    """
    fit_key, check_key = jax.random.split(key)
    dim, full = start.shift.size, start.scale.ndim == 2
    latent = pull_back(logdensity, start)

    def weigh(inner: Affine, z: Array) -> Array:
        return path_log_weight(latent, lower_triangular(inner), z)

    inner, loss = minimize_loss(fit_key, weigh, identity(dim, full), dim, schedule)
    inner = lower_triangular(inner)
    scale = start.scale @ inner.scale if full else start.scale * inner.scale
    fitted = Affine(start(inner.shift), scale)
    return keep_better(check_key, logdensity, start, fitted, loss)


def pareto_k(weights: Float[np.ndarray, " draws"]) -> float:
    """Pareto k of log weights; below 0.7 their tail can be trusted.

    It is infinite when a weight is not finite or when almost all of them vanish beside
    the largest, and minus infinity when the largest are all the same.

    Examples
    --------
    >>> pareto_k(np.random.default_rng(0).normal(size=4000)) < 0.7
    True
    >>> pareto_k(np.linspace(0, 1e5, 4000)), pareto_k(np.ones(4000))
    (inf, -inf)
    """
    weights = np.asarray(weights, np.float64)
    if not np.isfinite(weights).all():
        return np.inf
    weights = weights - weights.max()
    number = weights.size
    size = int(np.ceil(3 * np.sqrt(number))) if number > 225 else number // 5
    largest = np.sort(weights)[-size:]  # what ArviZ looks at
    if np.ptp(weights) < 1e-4 or largest[0] == 0:  # the same, but for rounding: no tail
        return -np.inf
    if largest[0] < -500:  # exp would underflow
        return np.inf
    from arviz_stats.base import array_stats

    # ArviZ takes log likelihoods, whose negatives are the log weights.
    return float(array_stats.psislw(-weights)[1])


# Up to this dimension a matrix for every pair of axes is affordable.
LARGEST_LAPLACE = 2000


def gaussian_map(key: Key[Array, ""], problem: Any) -> Affine:
    """Laplace's map, improved; or one standard deviation around the position.

    ``problem`` has a ``logdensity`` of a vector, a ``position`` and a ``dim``.

    Examples
    --------
    >>> from swindles.targets import gaussian
    >>> target = gaussian(jnp.array([3.0, 0.0]), jnp.diag(jnp.array([4.0, 1.0])))
    >>> found = gaussian_map(jax.random.key(0), target)
    >>> bool(jnp.allclose(found.scale, jnp.diag(jnp.array([2.0, 1.0])), atol=1e-2))
    True
    """
    unit = Affine(problem.position, jnp.ones(problem.dim))
    if problem.dim > LARGEST_LAPLACE:
        return unit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            start = laplace(problem.logdensity, problem.position)
            return fit_affine(key, problem.logdensity, start).transport
        except ValueError:
            return unit


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
