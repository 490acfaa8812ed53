"""Pilot: what would win?

Mirrored from book/pilot.md: edit there, then run `make mirror`.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.adaptation.step_size import dual_averaging_adaptation
from jax import Array

from swindles.antithetic import mirror, pair_values
from swindles.control import solve_beta
from swindles.coupling import couple, hmc, run, step_keys
from swindles.cva import cva
from swindles.latent import is_quadratic, second_derivatives
from swindles.models import Flat
from swindles.stein import ORDERS, Order, levels, only, scores, stein_features
from swindles.transport import (
    Affine,
    Transport,
    fit_affine,
    laplace,
    log_weights,
    pareto_k,
    pull_back,
    standard_normal,
)

# How far out every second chain begins, in standard deviations of the map.
WIDE = 3.0


@eqx.filter_jit
def levels_at(z: Array, transport: Transport, logdensity: Callable) -> Array:
    """Latent log densities; minus infinity where something is not finite: (chains,)."""
    latent = jax.vmap(jax.value_and_grad(pull_back(logdensity, transport)))
    value, slope = latent(z)
    sound = jnp.isfinite(value) & jnp.isfinite(slope).all(1)
    return jnp.where(sound, value, -jnp.inf)


def spread_starts(
    key: Array, transport: Transport, flat: Flat, num_chains: int
) -> Array:
    """Starts in latent space: (chains, dim)."""
    z = jax.random.normal(key, (num_chains, flat.dim))
    far = jnp.where(jnp.arange(num_chains) % 2, WIDE, 1.0)[:, None]
    near = levels_at(z, transport, flat.logdensity)
    if not jnp.isfinite(near).any():
        raise ValueError("the log density is finite nowhere near the position")
    least = jnp.median(near[jnp.isfinite(near)]) - 10 * flat.dim
    begin = far * z
    for closer in (0.5, 0.2, 0.05, 0.0):
        lost = ~(levels_at(begin, transport, flat.logdensity) > least)
        if not lost.any():
            break
        begin = jnp.where(lost[:, None], closer * far * z, begin)
    return begin


# Trajectories have no more steps than this, however small they get.
MOST_LEAPS = 64


def leaps_for(step_size: Any) -> Any:
    """Leapfrog steps in a quarter of a turn."""
    return jnp.clip(jnp.round(jnp.pi / 2 / step_size), 1, MOST_LEAPS).astype(int)


@eqx.filter_jit
def adapt(
    key: Array,
    z: Array,
    target: Array,
    transport: Transport,
    logdensity: Callable,
    num_steps: int,
) -> tuple[Array, Array, Array]:
    """Step size, acceptance, and the chains' positions: (steps, chains, dim)."""
    latent = pull_back(logdensity, transport)
    first, update, final = dual_averaging_adaptation(target)

    def body(carry: tuple, i: Array) -> tuple[tuple, tuple]:
        states, average = carry
        size: Any = jnp.exp(average.log_step_size)
        step = hmc(size, leaps_for(size))(latent).step
        states, infos = jax.vmap(step)(step_keys(key, i, len(z)), states)
        rate = jnp.nan_to_num(infos.acceptance_rate).mean()
        return (states, update(average, rate)), (rate, states.position)

    states = jax.vmap(hmc(0.1, 1)(latent).init)(z)
    begin = states, first(0.1 * z.shape[1] ** -0.25)
    (_, average), (rates, trail) = jax.lax.scan(body, begin, jnp.arange(num_steps))
    return final(average), rates[num_steps // 2 :].mean(), trail


# Up to this Pareto k, a fitted Gaussian is used as it is.
GOOD_K = 0.7
# Up to this dimension, a map learned from chains has a full covariance,
FULL_MAP = 100
# and up to this one, Laplace's has.
LAPLACE_MAP = 2000


def gaussian_map(key: Array, flat: Flat) -> Affine:
    """Laplace's map, improved; or one standard deviation around the position."""
    unit = Affine(flat.position, jnp.ones(flat.dim))
    if flat.dim > LAPLACE_MAP:
        return unit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            begin = laplace(flat.logdensity, flat.position)
            return fit_affine(key, flat.logdensity, begin).transport
        except ValueError:
            return unit


def map_from_draws(draws: Array, full: bool) -> Affine:
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


def tail(key: Array, transport: Transport, flat: Flat) -> tuple[float, float]:
    """Pareto k of a map, and its ELBO; infinite where a weight is not finite."""
    weights = log_weights(key, flat.logdensity, transport, flat.dim, 4096)
    if not np.isfinite(weights).all():
        return np.inf, -np.inf
    return pareto_k(weights), float(weights.mean())


def find_map(key: Array, flat: Flat, num_chains: int) -> tuple[Affine, float]:
    """A map for this posterior, and its Pareto k."""
    keys = jax.random.split(key, 7)
    found = gaussian_map(keys[0], flat)
    k, elbo = tail(keys[1], found, flat)
    if k <= GOOD_K:
        return found, k
    unit = Affine(flat.position, jnp.ones(flat.dim))
    if tail(keys[1], unit, flat)[1] > elbo or elbo == -np.inf:
        found = unit
    z = spread_starts(keys[2], found, flat, num_chains)
    for each in keys[3:]:
        _, _, trail = adapt(each, z, jnp.array(0.8), found, flat.logdensity, 100)
        draws = jax.vmap(jax.vmap(found.__call__))(trail[50:])
        found = map_from_draws(draws, flat.dim <= FULL_MAP)
        z = jax.vmap(found.inverse)(draws[-1])
    return found, tail(keys[1], found, flat)[0]


ACCEPTANCE = (0.8, 0.95)


class Warm(NamedTuple):
    """Chains that have settled, and a step size for each acceptance."""

    z: Array  # (chains, dim)
    step_size: list[float]
    stuck: int  # chains that had to begin anew


def check_acceptance(rate: float, target: float, step_size: float) -> None:
    """Raise ValueError when no step size gives the acceptance wanted."""
    if not rate > target / 2 or not step_size > 1e-6:
        raise ValueError(
            f"nearly all proposals are rejected (acceptance {rate:.0%} with steps of "
            f"{step_size:.1g}): is the log density finite and differentiable?"
        )
    if rate > (1 + target) / 2 or step_size > 1e6:
        raise ValueError(
            f"nearly all proposals are accepted, whatever the step size ({rate:.0%}): "
            "the log density is constant or has no maximum, so there is no posterior"
        )


def warm_up(key: Array, transport: Transport, flat: Flat, num_chains: int) -> Warm:
    """Let chains settle, and find step sizes."""
    keys = jax.random.split(key, 4)
    z, sizes = spread_starts(keys[0], transport, flat, num_chains), []
    moved = np.zeros(num_chains, bool)
    for each, target in zip(keys[1:], ACCEPTANCE, strict=False):
        size, rate, trail = adapt(
            each, z, jnp.array(target), transport, flat.logdensity, 100
        )
        check_acceptance(float(rate), target, float(size))
        sizes.append(float(size))
        moved |= np.asarray((trail != z).any((0, 2)))
        z = trail[-1]
    free = np.flatnonzero(moved)
    other = jax.random.choice(keys[3], free, (num_chains,))
    return Warm(jnp.where(moved[:, None], z, z[other]), sizes, num_chains - free.size)


# Programs of these have derivatives of all orders.
SMOOTH = """
add sub mul div neg square integer_pow dot_general reduce_sum reshape squeeze split
broadcast_in_dim concatenate slice dynamic_slice gather transpose copy pjit jit
convert_element_type
"""


def is_smooth(jaxpr: Any) -> bool:
    """Whether a program adds, multiplies and divides, and does nothing else.

    Examples
    --------
    >>> [
    ...     is_smooth(jax.make_jaxpr(f)(1.0).jaxpr)
    ...     for f in (lambda x: 3 * x**2 + 1, jnp.exp, lambda x: 1.0 * (x > 0))
    ... ]
    [True, False, False]
    """
    for equation in jaxpr.eqns:
        inner = [p.jaxpr for p in equation.params.values() if hasattr(p, "jaxpr")]
        if equation.primitive.name not in SMOOTH.split():
            return False
        if not all(map(is_smooth, inner)):
            return False
    return True


@eqx.filter_jit
def draw_means(keys: Array, feature: Callable, dim: int) -> Array:
    """Means over 512 antithetic pairs from N(0, I) for each key: (keys, statistics)."""

    def mean(key: Array) -> Array:
        z = jax.random.normal(key, (512, dim))
        return (jax.vmap(feature)(z) + jax.vmap(feature)(-z)).mean(0) / 2

    return jax.lax.map(mean, keys)


def mean_under_normal(
    key: Array, transport: Transport, flat: Flat
) -> tuple[np.ndarray, np.ndarray]:
    """The statistics' means when z is normal, and the variances of their errors."""

    def feature(z: Array) -> Array:
        return flat.statistic(transport(z))

    dim, origin = flat.dim, jnp.zeros(flat.dim)
    affine = isinstance(transport, Affine)
    if affine and is_smooth(jax.make_jaxpr(feature)(origin).jaxpr):
        if is_quadratic(feature, jax.random.normal(key, (3, dim))):
            bent = np.asarray(second_derivatives(feature, origin), np.float64).sum(0)
            mean = np.asarray(feature(origin), np.float64) + bent / 2
            return mean, np.zeros(mean.size)
    batches = int(np.clip(2e8 / (1024 * dim), 100, 2000))
    keys = jax.random.split(key, batches)
    means = np.asarray(draw_means(keys, feature, dim), np.float64)
    return means.mean(0), means.var(0, ddof=1) / batches


class Trace(NamedTuple):
    """A recorded run of CVA; the axes are (steps, pair, chains, ...)."""

    z: Any  # X+ and X-, latent
    slope: Any  # gradients of the latent log density there
    y: Any  # (steps, chains, dim): the control chain
    values: Any  # the statistics at X+, X-, Y and -Y


@eqx.filter_jit
def trace(
    key: Array,
    z: Array,
    step_size: Any,
    transport: Transport,
    flat: Flat,
    num_steps: int,
) -> tuple[dict, Trace]:
    """Run CVA; states after the last step, and what the steps saw."""
    latent = pull_back(flat.logdensity, transport)
    sampler = hmc(step_size, leaps_for(step_size))
    algorithm = cva(sampler, latent)

    def body(states: dict, i: Array) -> tuple[dict, tuple]:
        states, _ = jax.vmap(algorithm.step)(step_keys(key, i, len(z)), states)
        pair = pair_values(lambda z: z, states)
        return states, (pair, scores(states), states["control"].position)

    def observe(row: tuple) -> Array:
        places = jnp.concatenate([row[0], jnp.stack([row[1], -row[1]])])
        return jax.vmap(jax.vmap(lambda z: flat.statistic(transport(z))))(places)

    states = jax.vmap(algorithm.init)(z)
    states["minus"] = jax.vmap(sampler(mirror(latent)).init)(-z)
    states, rows = jax.lax.scan(body, states, jnp.arange(num_steps))
    pairs, slopes, y = jax.tree.map(lambda x: x[num_steps // 3 :], rows)
    return states, Trace(pairs, slopes, y, jax.lax.map(observe, (pairs, y)))


class Scheme(NamedTuple):
    """A way to make an estimate from coupled chains."""

    chains: tuple[str, ...]
    stein: bool = False

    @property
    def targets(self) -> int:
        """Chains that cost gradients of the posterior."""
        return 2 if "minus" in self.chains else 1


SCHEMES = {
    "plain": Scheme(("plus",)),
    "antithetic": Scheme(("plus", "minus")),
    "control": Scheme(("plus", "control")),
    "cva": Scheme(("plus", "minus", "control")),
    "stein": Scheme(("plus",), True),
    "antithetic+stein": Scheme(("plus", "minus"), True),
}


class Fitted(NamedTuple):
    """Coefficients of a scheme, and what they leave."""

    slope: np.ndarray  # (statistics,): of the control chain
    beta: np.ndarray  # (features, statistics): of the Stein features
    variance: np.ndarray  # (statistics,): left, of a step of one chain
    mean: np.ndarray  # (statistics,): a first estimate
    size: np.ndarray  # (statistics,): of the numbers that are added up


def halves(chains: int) -> list[np.ndarray]:
    """Every second chain, the others, and all."""
    even = np.arange(chains) % 2 == 0
    return [even, ~even, np.ones(chains, bool)]


def fit_control(f: np.ndarray, g: np.ndarray, known: np.ndarray) -> Fitted:
    """Regress f on g (steps, chains, statistics), whose mean is known."""
    steps, slopes = len(f), []
    for use in halves(f.shape[1]):
        a, b = (x[:, use] - x[:, use].mean((0, 1)) for x in (f, g))
        square = (b * b).mean((0, 1))
        slopes.append((a * b).mean((0, 1)) / np.where(square > 0, square, np.inf))
    f, g = f.mean(0), g.mean(0) - known
    even, odd, _ = halves(len(f))
    left = [(f - slopes[0] * g)[odd], (f - slopes[1] * g)[even]]
    variance = steps * np.mean([part.var(0, ddof=1) for part in left], axis=0)
    mean, none = (f - slopes[2] * g).mean(0), np.zeros((0, f.shape[1]))
    return Fitted(slopes[2], none, variance, mean, np.zeros(f.shape[1]))


PENALTIES = (1e-1, 1e-3, 1e-5, 1e-7)


def stein_betas(
    f: np.ndarray, features: np.ndarray, widths: list[int]
) -> list[list[np.ndarray]]:
    """Coefficients to try, each fitted on every second chain, on the others, on all."""
    number = f.shape[-1]
    tries: dict[tuple, list] = {(0, 0.0): [np.zeros((0, number))] * 3}
    for use in halves(f.shape[1]):
        g, y = (x[:, use].reshape(-1, x.shape[-1]) for x in (features, f))
        g, y = g - g.mean(0), y - y.mean(0)
        gram, cross = g.T @ g / len(g), g.T @ y / len(g)
        for width in widths:
            for penalty in PENALTIES:
                beta = solve_beta(gram[:width, :width], cross[:width], penalty)
                tries.setdefault((width, penalty), []).append(beta)
    return list(tries.values())


def is_off(correction: np.ndarray) -> np.ndarray:
    """Whether averages (chains, statistics) are not around zero: (statistics,)."""
    error = correction.std(0, ddof=1) / np.sqrt(len(correction))
    return np.abs(correction.mean(0)) > 6 * error


def left_by(betas: list, average: np.ndarray, rough: np.ndarray) -> np.ndarray:
    """Variance of the chains' averages that betas leave where they were not fitted."""
    even, odd, _ = halves(len(average))
    rest = [
        average[use] - rough[use, : len(beta)] @ beta
        for beta, use in zip(betas, (odd, even), strict=False)
    ]
    return np.mean([part.var(0, ddof=1) for part in rest], axis=0)


def fit_stein(f: np.ndarray, features: np.ndarray, widths: list[int]) -> Fitted:
    """Regress f (steps, chains, statistics) on the first so and so many features."""
    tries = stein_betas(f, features, widths)
    average, rough = f.mean(0), features.mean(0)
    variances = np.stack([left_by(betas, average, rough) for betas in tries])
    best = variances.argmin(0)
    width = max(len(tries[number][2]) for number in best)
    beta = np.zeros((width, f.shape[-1]))
    for number in np.unique(best):
        chosen = tries[number][2]
        beta[: len(chosen), best == number] = chosen[:, best == number]
    correction = rough[:, :width] @ beta
    variance = len(f) * np.where(is_off(correction), np.inf, variances.min(0))
    size = np.sqrt((features[..., :width] ** 2).mean((0, 1))) @ np.abs(beta)
    mean = (average - correction).mean(0)
    return Fitted(np.zeros(mean.size), beta, variance, mean, size)


def affordable(dim: int, draws: int) -> Order:
    """The highest order of Stein features that so many draws can fit."""
    orders: tuple[Order, ...] = ("full", "diagonal", "first")
    fits = [order for order in orders if levels(dim, order).size <= draws / 10]
    return fits[0] if fits else "none"


def average(pair: np.ndarray, eps: float) -> np.ndarray:
    """Means over pairs (steps, pair, chains, k); zero where only rounding varies.

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=(9, 1, 4, 1))
    >>> both = np.concatenate([x, 1e-9 - x], axis=1)
    >>> average(both, 1e-7).any(), average(both, 1e-20).any()
    (np.False_, np.True_)
    """
    mean = pair.mean(1)
    size = np.sqrt((pair**2).mean((0, 1, 2)))
    return np.where(mean.std((0, 1)) > 100 * eps * size, mean, 0)


def fit_all(seen: Trace, known: np.ndarray, names: list[str]) -> dict[str, Fitted]:
    """The schemes of these names, fitted to a recorded run."""
    eps = float(np.finfo(seen.values.dtype).eps)
    z, slope, values = (np.asarray(x, np.float64) for x in seen[:2] + seen[3:])
    order = affordable(z.shape[3], z.shape[0] * z.shape[2])
    level = levels(z.shape[3], order)
    widths = [int((level <= last).sum()) for last in np.unique(level)]
    fits = {}
    for name in names:
        scheme = SCHEMES[name]
        pair = slice(scheme.targets)
        f, g = values[:, pair].mean(1), average(values[:, 2:][:, pair], eps)
        if scheme.stein:
            both = jnp.asarray(z[:, pair]), jnp.asarray(slope[:, pair])
            features = np.asarray(stein_features(*both, order), np.float64)
            fitted = fit_stein(f, average(features, eps), widths)
        else:
            fitted = fit_control(f, g if "control" in scheme.chains else 0 * f, known)
        size = fitted.size + np.abs(values[:, 0]).mean((0, 1))
        fits[name] = fitted._replace(size=size)
    return fits


def clock(action: Callable[[int], Any]) -> float:
    """Seconds that ``action(n)`` takes for each of n, after a call that compiles."""
    number, best = 10, np.inf
    action(number)
    for _ in range(4):
        begin = time.perf_counter()
        jax.block_until_ready(action(number))
        spent = time.perf_counter() - begin
        best = min(best, spent / number)
        number = max(number, min(1000, int(number * 0.02 / max(spent, 1e-6))))
    return best


def time_chain(states: dict, name: str, logdensity: Callable, size: float) -> float:
    """Seconds of one step of one of the coupled chains."""
    algorithm = couple(**{name: hmc(size, int(leaps_for(size)))(logdensity)})
    mine, key = only((name,), states), jax.random.key(0)
    return clock(lambda n: run(key, algorithm, mine, n, num_blocks=1, progress=False))


class Prices(NamedTuple):
    """Seconds for all chains."""

    target: float  # a leapfrog step on the posterior
    reference: float  # a leapfrog step on the Gaussian
    product: float  # one Stein feature times one coefficient

    def step(self, scheme: Scheme, leaps: int, beta: np.ndarray) -> float:
        """One step of a scheme."""
        chains = scheme.targets * self.target
        chains += self.reference * ("control" in scheme.chains)
        return leaps * chains + self.product * beta.size


def measure(states: dict, transport: Transport, flat: Flat, size: float) -> Prices:
    """Time the parts of a step."""
    latent, leaps = pull_back(flat.logdensity, transport), int(leaps_for(size))
    target = time_chain(states, "plus", latent, size) / leaps
    reference = time_chain(states, "control", standard_normal, size) / leaps
    left, right = jnp.ones((len(states["plus"].position), 100)), jnp.ones((100, 100))
    multiply = jax.jit(lambda n: jax.lax.fori_loop(0, n, lambda _, x: x @ right, left))
    return Prices(target, reference, clock(multiply) / right.size)


class Plan(NamedTuple):
    """All that a run needs to know, apart from the model and the map."""

    scheme: str
    step_size: float
    leaps: int
    order: Order  # of the Stein features
    slope: np.ndarray  # (statistics,): coefficients of the control chain
    known: np.ndarray  # (statistics,): means under the Gaussian
    shared: np.ndarray  # (statistics,): variance of the error of those, in the answer
    beta: np.ndarray  # (features, statistics): coefficients of the Stein features
    center: np.ndarray  # (statistics,): a first estimate
    rounding: np.ndarray  # (statistics,): what the arithmetic may be off by

    @property
    def gradients(self) -> int:
        """Gradients of the posterior in a step of one chain (or pair of chains)."""
        return self.leaps * SCHEMES[self.scheme].targets


class Candidate(NamedTuple):
    """A scheme at one of the settings, fitted."""

    scheme: str
    setting: int
    fitted: Fitted
    step: float  # seconds of a step
    seconds: float  # until it is accurate enough


def seconds_needed(
    fitted: Fitted, asked: np.ndarray, shared: np.ndarray, chains: int, step: float
) -> float:
    """Seconds until the error of every statistic is what was asked for.

    ``step`` is the time of a step, ``shared`` the variance of an error that does not
    go away.
    """
    room = asked**2 - fitted.slope**2 * shared
    if not (room > 0).all():
        return np.inf
    return float((fitted.variance / room).max()) * step / chains


def decide(candidates: list[Candidate]) -> Candidate:
    """The quickest; the best plain one unless another is quicker by a tenth."""
    best = min(candidates, key=lambda c: c.seconds)
    simple = [c for c in candidates if c.scheme == "plain"]
    plain = min(simple, key=lambda c: c.seconds, default=best)
    return plain if plain.seconds <= 1.1 * best.seconds else best


def compare(
    runs: Sequence[Trace],
    sizes: list[float],
    prices: Prices,
    known: tuple[np.ndarray, np.ndarray],
    asked: np.ndarray,
    names: list[str],
) -> list[Candidate]:
    """Fit the schemes of these names to the runs at all settings."""
    found = []
    for setting, (seen, size) in enumerate(zip(runs, sizes, strict=True)):
        chains, number = seen.y.shape[1], int(leaps_for(size))
        for name, fitted in fit_all(seen, known[0], names).items():
            step = prices.step(SCHEMES[name], number, fitted.beta)
            seconds = seconds_needed(fitted, asked, known[1], chains, step)
            found.append(Candidate(name, setting, fitted, step, seconds))
    return found


def make_plan(
    winner: Candidate,
    step_size: float,
    known: tuple[np.ndarray, np.ndarray],
    dim: int,
    dtype: Any,
) -> Plan:
    """A plan from the winner, its step size, and the means that are known."""
    fitted = winner.fitted
    order = next(o for o in ORDERS if levels(dim, o).size >= len(fitted.beta))
    return Plan(
        winner.scheme,
        step_size,
        int(leaps_for(step_size)),
        order,
        fitted.slope,
        known[0],
        fitted.slope**2 * known[1],
        fitted.beta,
        fitted.mean,
        np.finfo(dtype).eps * fitted.size,
    )


class Pilot(NamedTuple):
    """What the pilot found."""

    plan: Plan
    states: dict[str, Any]  # of the chains of the scheme
    forecast: dict[str, float]  # seconds to the accuracy asked, by scheme
    seconds: float  # of a step
    trails: np.ndarray  # (steps, 3): X+, X- and Y of one chain, along one axis
    stuck: int  # chains that had to begin anew


def trails(seen: Trace) -> np.ndarray:
    """X+, X- and Y of the first chain along the first axis: (steps, 3)."""
    return np.column_stack([seen.z[:, 0, 0, 0], seen.z[:, 1, 0, 0], seen.y[:, 0, 0]])


def fly(
    key: Array,
    flat: Flat,
    transport: Transport,
    asked: Callable[[np.ndarray], np.ndarray],
    names: list[str],
    num_chains: int,
) -> Pilot:
    """Find step sizes, try the schemes of these names, choose.

    ``asked`` takes the posterior's standard deviations of the statistics to the errors
    that are asked for.
    """
    keys = jax.random.split(key, 3)
    warm = warm_up(keys[0], transport, flat, num_chains)
    known = mean_under_normal(keys[1], transport, flat)
    count = int(np.clip(1e7 / (num_chains * flat.dim), 45, 150))
    sizes = list(map(jnp.array, warm.step_size))
    runs = [trace(keys[2], warm.z, size, transport, flat, count) for size in sizes]
    states, seen = zip(*jax.device_get(runs), strict=True)
    prices = measure(states[1], transport, flat, warm.step_size[1])
    goal = asked(seen[0].values[:, 0].std((0, 1), dtype=np.float64))
    found = compare(seen, warm.step_size, prices, known, goal, names)
    best = decide(found)
    plan = make_plan(best, warm.step_size[best.setting], known, flat.dim, warm.z.dtype)
    mine = only(SCHEMES[best.scheme].chains, states[best.setting])
    forecast = {n: min(c.seconds for c in found if c.scheme == n) for n in names}
    return Pilot(
        plan, mine, forecast, best.step, trails(seen[best.setting]), warm.stuck
    )
