"""Choice: which swindle would win?

Mirrored from book/choice.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from swindles.control import (
    Expectation,
    FeatureProducts,
    Fitted,
    fit_features,
    fit_pair,
    reference_mean,
    shared_variance,
)
from swindles.coupling import compiled, hmc
from swindles.importance import fit_highest
from swindles.models import Problem
from swindles.schemes import SCHEMES, Plan, Scheme, make_features, make_plan
from swindles.stein import Order, affordable_order, feature_orders
from swindles.transport import (
    Affine,
    Evaluator,
    Gaussian,
    assess_map,
    map_from_draws,
    mirrored_normal,
    pull_back,
    standard_normal,
    unit_map,
)
from swindles.tuning import (
    HMC,
    Grid,
    Pilot,
    adapt_step_size,
    dual_averaging,
    make_trial,
    run_pilot,
    some_chains,
)

# How far out every second chain begins, in standard deviations of the map.
WIDE = 3.0
# Acceptance rates to aim at: one for a plain chain, one for coupled chains.
ACCEPTANCE = (0.8, 0.95)
# Steps of an adaptation.
ADAPTATION = 100


def sound_values(z: Array, problem: Problem) -> Array:
    """Log densities; minus infinity where something is not finite: (chains,)."""

    def make() -> Callable:
        return jax.jit(jax.vmap(jax.value_and_grad(problem.logdensity)))

    value, slope = compiled(problem.logdensity, "values and slopes", make)(z)
    sound = jnp.isfinite(value) & jnp.isfinite(slope).all(1)
    return jnp.where(sound, value, -jnp.inf)


def spread_starts(key: Array, problem: Problem, num_chains: int) -> Array:
    """Starts in latent space, every second one wide, none hopeless: (chains, dim)."""
    z = jax.random.normal(key, (num_chains, problem.dim), problem.position.dtype)
    near = sound_values(z, problem)
    if not jnp.isfinite(near).any():
        raise ValueError("the log density is finite nowhere near the position")
    least = jnp.median(near[jnp.isfinite(near)]) - 10 * problem.dim
    far = jnp.where(jnp.arange(num_chains) % 2, WIDE, 1.0)[:, None]
    begin = far * z
    for closer in (0.5, 0.2, 0.05, 0.0):
        lost = ~(sound_values(begin, problem) > least)
        if not lost.any():
            break
        begin = jnp.where(lost[:, None], closer * far * z, begin)
    return begin


def short_chains(problem: Problem) -> Callable:
    """Chains in the latent space of an affine map, which is an argument.

    From a key, latent positions and the map to draws of x: (steps, chains, dim).
    """

    def sample(key: Array, z: Array, transport: Affine) -> Array:
        latent = pull_back(problem.logdensity, transport)
        states = jax.vmap(hmc(0.1, 1)(latent).init)(z)
        settings = jnp.pi / 2, ACCEPTANCE[0], HMC, latent, ADAPTATION
        *_, (_, _, trail) = dual_averaging(key, states, *settings)
        return jax.vmap(jax.vmap(transport.__call__))(trail[ADAPTATION // 2 :])

    return jax.jit(sample)


# Up to this Pareto k, and from this worth of the weights on, a Gaussian will do.
GOOD_K, LEAST_EFFICIENCY = 0.7, 0.05
# Up to this dimension, a map learned from chains has a full covariance.
FULL_MAP = 100


def reshape_scale(transport: Affine, full: bool) -> Affine:
    """The map with a matrix for its scale; or with a vector, of the same deviations.

    Examples
    --------
    >>> thin = reshape_scale(Affine(jnp.zeros(2), jnp.array([[3.0, 0], [3, 4]])), False)
    >>> thin.scale.tolist(), reshape_scale(thin, True).scale.tolist()
    ([3.0, 5.0], [[3.0, 0.0], [0.0, 5.0]])
    """
    shift, scale = transport
    if scale.ndim == 1 + full:
        return transport
    return Affine(shift, jnp.diag(scale) if full else jnp.linalg.norm(scale, axis=1))


def key_seed(key: Key[Array, ""], *more: int) -> list[int]:
    """A seed for NumPy's random numbers, from a random key of JAX.

    Examples
    --------
    >>> key_seed(jax.random.key(5), 1)
    [0, 5, 1]
    """
    return [*np.ravel(jax.random.key_data(key)).tolist(), *more]


def learn_map(
    key: Key[Array, ""], problem: Problem, start: Affine, num_chains: int
) -> Affine:
    """A map from where short chains have been, in several rounds."""
    keys, full = jax.random.split(key, 5), problem.dim <= FULL_MAP
    kind = problem.position.dtype
    found = reshape_scale(Affine(*(jnp.asarray(x, kind) for x in start)), full)
    z = spread_starts(keys[0], problem.through(found), num_chains)
    sample = compiled(problem.logdensity, "chains", lambda: short_chains(problem))
    for each in keys[1:]:
        draws = sample(each, z, found)
        found = map_from_draws(draws, full)
        z = jax.vmap(found.inverse)(draws[-1])
    return found


def find_map(
    key: Key[Array, ""],
    problem: Problem,
    num_chains: int,
    evaluate: Evaluator | None = None,
    start: Affine | None = None,
) -> Gaussian:
    """An affine map for a posterior, and how good it is.

    The best Gaussian at a mode, or the one to ``start`` from; where that is poor, one
    that chains have learned.

    Examples
    --------
    >>> from swindles.models import make_problem
    >>> from swindles.targets import gaussian
    >>> problem = make_problem(gaussian([3.0], [[4.0]]))
    >>> found = find_map(jax.random.key(0), problem, num_chains=64)
    >>> found.transport.shift.round(1).tolist(), found.pareto_k < 0.7
    ([3.0], True)
    """
    evaluate = evaluate or problem.evaluator()
    rng = np.random.default_rng(key_seed(key, 1))
    draws = mirrored_normal(rng, 1024, problem.dim)
    if start is None:
        found = fit_highest(evaluate, problem.position, key_seed(key))
    else:
        found = assess_map(start, evaluate(start, draws))
    if found.pareto_k <= GOOD_K and found.efficiency >= LEAST_EFFICIENCY:
        return found
    unit = unit_map(problem.position)
    around = assess_map(unit, evaluate(unit, draws))
    best = found if found.elbo > around.elbo else around
    learned = learn_map(key, problem, best.transport, num_chains)
    return assess_map(learned, evaluate(learned, draws))


class Settled(NamedTuple):
    """Chains that have settled, and settings for each acceptance."""

    positions: Array  # (chains, dim)
    grid: Grid
    stuck: int  # chains that had to begin anew


def settle(key: Array, problem: Problem, num_chains: int) -> Settled:
    """Let chains settle, and find step sizes; problem is a latent one."""
    keys = jax.random.split(key, 4)
    z, found = spread_starts(keys[0], problem, num_chains), []
    accepted = np.zeros(num_chains)
    for each, target in zip(keys[1:3], ACCEPTANCE, strict=True):
        adapted = adapt_step_size(
            each, problem, target=target, num_steps=ADAPTATION, positions=z
        )
        accepted += adapted.accepted
        z = adapted.positions
        found.append((adapted.step_size, adapted.num_integration_steps))
    free = np.flatnonzero(accepted)
    other = jax.random.choice(keys[3], free, (num_chains,))
    moved = jnp.asarray(accepted > 0)[:, None]
    sizes, leaps = map(np.array, zip(*found, strict=True))
    stuck = num_chains - free.size
    return Settled(jnp.where(moved, z, z[other]), Grid(sizes, leaps), stuck)


# The schemes to choose from.
CANDIDATES = ("plain", "antithetic", "control", "cva", "stein", "antithetic+stein")


def is_biased(sums: FeatureProducts, beta: np.ndarray) -> np.ndarray:
    """Whether what features predict is not zero on average: (statistics,).

    Stein's identity fails where a density is cut off.
    """
    average = sums.total.value[:, : len(beta)] / sums.steps.value
    correction = average @ beta
    error = correction.std(0, ddof=1) / np.sqrt(len(correction))
    return np.abs(correction.mean(0)) > 6 * error


def fit_candidate(
    pilot: Pilot, setting: int, name: str, expectation: Expectation, order: Order
) -> Fitted:
    """Fit a scheme to a pilot run of the chains of CVA at one setting."""
    scheme, (pair, features) = SCHEMES[name], pilot.setting(setting)
    if not scheme.stein:
        f, g = scheme.rows()
        fitted = fit_pair(pair, f, g, expectation if g else None)
        none = np.zeros((0, expectation.mean.size))
        return fitted if g else fitted._replace(beta=none)
    orders = feature_orders(pilot.states.plus.position.shape[-1], order)
    widths = [int((orders <= last).sum()) for last in np.unique(orders)]
    eps = float(np.finfo(pilot.states.plus.position.dtype).eps)
    fitted = fit_features(features[name], widths, eps=eps)
    biased = is_biased(features[name], fitted.beta)
    return fitted._replace(variance=np.where(biased, np.inf, fitted.variance))


def operations(function: Callable, like: Array) -> float:
    """Operations in one call of a function, as XLA counts them before it compiles."""
    found = jax.jit(function).lower(like).cost_analysis() or {}
    return float(found.get("flops", 0.0)) + float(found.get("transcendentals", 0.0))


class Work(NamedTuple):
    """Floating point operations, for one chain.

    Parameters
    ----------
    target, reference
        A leapfrog step on the posterior, and on the Gaussian.
    statistic
        The statistic at one place.

    Examples
    --------
    >>> work = Work(target=1000.0, reference=50.0, statistic=10.0)
    >>> work.step(SCHEMES["cva"], 3, np.zeros(2))  # 2 x 3 x 1000 + 3 x 50 + 4 x 10 + 4
    6194.0
    """

    target: float
    reference: float
    statistic: float

    def step(self, scheme: Scheme, leaps: int, beta: np.ndarray) -> float:
        """One step of a scheme with these coefficients."""
        places = scheme.num_targets * (1 + scheme.has_control)
        chains = scheme.num_targets * self.target + scheme.has_control * self.reference
        return leaps * chains + places * self.statistic + 2.0 * beta.size


def count_work(problem: Problem) -> Work:
    """Count the operations that the parts of a step take."""
    z = jnp.zeros_like(problem.position)
    leap = 6.0 * problem.dim
    return Work(
        operations(jax.value_and_grad(problem.logdensity), z) + leap,
        operations(jax.value_and_grad(standard_normal), z) + leap,
        operations(problem.statistic, z),
    )


def work_needed(
    fitted: Fitted, required: np.ndarray, noise: np.ndarray, step: float
) -> float:
    """Work until the error of every statistic is what was asked for.

    ``step`` is the work of a step of one chain, ``noise`` the variance of an error
    that does not go away.

    Examples
    --------
    >>> fitted = Fitted(np.zeros(2), np.array([1.0, 4.0]), np.zeros(2), np.ones(2))
    >>> work_needed(fitted, np.array([1.0, 0.5]), np.zeros(2), step=100.0)
    1600.0
    """
    allowed = required**2 - noise
    if not (allowed > 0).all():
        return np.inf
    return float((fitted.variance / allowed).max()) * step


class Candidate(NamedTuple):
    """A scheme at one of the settings, fitted."""

    scheme: str
    setting: int
    fitted: Fitted
    work: float  # until it is accurate enough


def compare(
    pilot: Pilot,
    names: list[str],
    expectation: Expectation,
    order: Order,
    required: np.ndarray,
    work: Work,
) -> list[Candidate]:
    """What the schemes of these names would need, at every setting."""
    found = []
    for setting, leaps in enumerate(pilot.grid.num_integration_steps):
        for name in names:
            fitted = fit_candidate(pilot, setting, name, expectation, order)
            step = work.step(SCHEMES[name], int(leaps), fitted.beta)
            noise = np.zeros_like(required)
            if SCHEMES[name].has_control:
                noise = shared_variance(expectation, fitted.beta)
            needed = work_needed(fitted, required, noise, step)
            found.append(Candidate(name, setting, fitted, needed))
    return found


def choose(candidates: list[Candidate]) -> Candidate:
    """The cheapest; the best plain one unless another is cheaper by a tenth.

    Examples
    --------
    >>> nothing = Fitted(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0))
    >>> plain = Candidate("plain", 0, nothing, work=100.0)
    >>> choose([plain, Candidate("cva", 0, nothing, work=95.0)]).scheme
    'plain'
    """
    best = min(candidates, key=lambda c: c.work)
    simple = [c for c in candidates if c.scheme == "plain"]
    plain = min(simple, key=lambda c: c.work, default=best)
    return plain if plain.work <= 1.1 * best.work else best


class Choice(NamedTuple):
    """The scheme that promises most, ready to run.

    Parameters
    ----------
    plan
        The scheme with its coefficients.
    step_size, num_integration_steps
        Settings of HMC.
    states
        Of the chains of the scheme, settled.
    forecast
        Floating point operations to the accuracy asked for, by scheme.
    stuck
        Chains that had to begin anew.

    Examples
    --------
    >>> choice = Choice(None, 0.5, 3, None, {"plain": 900.0, "cva": 100.0}, stuck=0)
    >>> choice.forecast["plain"] / choice.forecast["cva"]
    9.0
    """

    plan: Plan
    step_size: float
    num_integration_steps: int
    states: Any
    forecast: dict[str, float]
    stuck: int


def make_choice(
    pilot: Pilot,
    found: list[Candidate],
    expectation: Expectation,
    order: Order,
    problem: Problem,
    stuck: int,
) -> Choice:
    """The winner, with a plan."""
    best = choose(found)
    scheme, dim = SCHEMES[best.scheme], problem.dim
    features = make_features(scheme, problem.statistic, dim, expectation, order)
    plan = make_plan(best.scheme, order, features, best.fitted, problem.position.dtype)
    states = jax.tree.map(lambda x: x[best.setting], pilot.states)
    each = {c.scheme: c.work for c in sorted(found, key=lambda c: -c.work)}
    return Choice(
        plan,
        float(pilot.grid.step_size[best.setting]),
        int(pilot.grid.num_integration_steps[best.setting]),
        some_chains(states, scheme.chains),
        each,
        stuck,
    )


def choose_scheme(
    key: Key[Array, ""],
    problem: Problem,
    required: Callable[[np.ndarray], np.ndarray],
    num_chains: int,
    names: list[str] | None = None,
) -> Choice:
    """Find step sizes, try schemes in a pilot run of the chains of CVA, choose.

    Parameters
    ----------
    problem
        In the latent space of a map.
    required
        From the posterior's standard deviations of the statistics to the errors that
        are asked for.
    names
        Schemes to try; by default ``CANDIDATES``.

    Examples
    --------
    >>> from swindles.models import Model, make_problem
    >>> model = Model(lambda x: -jnp.sum(jnp.cosh(x)), jnp.zeros(2))
    >>> problem, key = make_problem(model, jnp.square), jax.random.key(0)
    >>> choice = choose_scheme(key, problem, lambda sd: 0.001 * sd, 64)
    >>> choice.plan.scheme, sorted(choice.forecast) == sorted(CANDIDATES)
    ('stein', True)
    """
    names, keys = list(names or CANDIDATES), jax.random.split(key, 3)
    stein = [name for name in names if SCHEMES[name].stein]
    settled = settle(keys[0], problem, num_chains)
    expectation = reference_mean(keys[1], problem)
    steps = int(np.clip(1e7 / (num_chains * problem.dim), 45, 150))
    draws = num_chains * steps * 2 // 3
    order = affordable_order(problem.dim, draws) if stein else "none"
    trial = make_trial("cva", HMC, problem, settled.positions, stein, order)
    pilot = run_pilot(keys[2], trial, settled.grid, steps, progress=False)
    deviation = np.sqrt(pilot.covariance()[0, 0, 0])
    work = count_work(problem)
    found = compare(pilot, names, expectation, order, required(deviation), work)
    return make_choice(pilot, found, expectation, order, problem, settled.stuck)
