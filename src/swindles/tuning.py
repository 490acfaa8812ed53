"""Tuning: how long a step?

Mirrored from book/tuning.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.adaptation.step_size import dual_averaging_adaptation
from blackjax.base import SamplingAlgorithm
from blackjax.mcmc import integrators
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Key
from scipy.interpolate import PchipInterpolator
from scipy.special import ndtri
from tqdm import tqdm

from swindles.accuracy import Moments, add_step, empty_moments, summarize
from swindles.antithetic import check_statistic, pair_values
from swindles.control import feature_values
from swindles.coupling import (
    LogDensity,
    Rates,
    Sampler,
    Total,
    add_rates,
    advance,
    empty_rates,
    gather,
    hmc,
    mala,
    random_walk,
    require_positive,
    room,
    start,
    step_keys,
)
from swindles.latent import Problem


def efficiency_bound(
    acceptance: ArrayLike, power: float = 0.5
) -> Float[np.ndarray, "..."]:
    """ESS per gradient at an acceptance rate, up to a constant (Beskos et al. 2013).

    ``power`` is 1/2 for HMC with leapfrog steps and a fixed trajectory length, 2/3 for
    MALA and 2 for the random walk.

    Examples
    --------
    >>> rates = np.linspace(0.01, 0.99, 99)
    >>> float(rates[efficiency_bound(rates).argmax()].round(2))
    0.65
    """
    acceptance = np.asarray(acceptance, np.float64)
    return acceptance * ndtri(1 - acceptance / 2).clip(0) ** power


class Family(NamedTuple):
    """A kind of sampler whose step size is still open.

    Parameters
    ----------
    name
        What to call it.
    make
        From step size and number of integration steps to a sampler.
    power
        That of the normal quantile, in ``efficiency_bound``.
    target
        The acceptance that ``quick`` aims at.
    has_length
        Whether trajectories have several steps.
    cost
        Evaluations of the density in each of them.

    Examples
    --------
    HMC with another integrator, which takes two gradients a step:

    >>> make = partial(hmc, integrator=integrators.mclachlan)
    >>> family = Family("McLachlan", make, 1 / 2, 0.99, has_length=True, cost=2)
    >>> algorithm = family.make(0.5, 3)(lambda x: -0.5 * jnp.sum(x**2))
    >>> algorithm.init(jnp.ones(2)).logdensity.item()
    -1.0
    """

    name: str
    make: Callable[[Any, Any], Sampler]
    power: float
    target: float
    has_length: bool = False
    cost: int = 1


HMC = Family("HMC", hmc, 1 / 2, 0.95, has_length=True)
MALA = Family("MALA", lambda size, _: mala(size), 2 / 3, 0.95)
RANDOM_WALK = Family("random walk", lambda size, _: random_walk(size), 2, 0.4)


def variance_left(covariance: np.ndarray, f: list[int], g: list[int]) -> np.ndarray:
    """Var Z / Var f: the part of the variance that a scheme leaves.

    ``covariance`` has shape (rows, rows, ...); ``f`` and ``g`` are the scheme's rows.

    Examples
    --------
    >>> pair = np.array([[1.0, 0.8], [0.8, 1.0]])
    >>> variance_left(pair, [0], [1]).round(2), variance_left(-pair, [0, 1], [])
    (np.float64(0.36), np.float64(0.9))
    """
    own = sum(covariance[i, i] for i in f)
    weights = {i: np.ones_like(own) for i in f}
    if g:
        both = sum(covariance[i, j] for i, j in zip(f, g, strict=True))
        slope = both / sum(covariance[j, j] for j in g)
        weights |= {j: -slope for j in g}
    left = sum(
        a * b * covariance[i, j] for i, a in weights.items() for j, b in weights.items()
    )
    return np.maximum(left / (len(f) * own), 1e-6)


def scheme_rows(chains: set[str]) -> dict[str, tuple[list[int], list[int]]]:
    """For each scheme that these chains contain, its rows of f and of controls."""
    rows: dict[str, tuple[list[int], list[int]]] = {"plain": ([0], [])}
    if "minus" in chains:
        rows["antithetic"] = ([0, 1], [])
    if "control" in chains:
        rows["control"] = ([0], [len(chains) - 1])
    if {"minus", "control"} <= chains:
        rows["cva"] = ([0, 1], [2, 3])
    return rows


class Grid(NamedTuple):
    """Settings to try: an entry for each."""

    step_size: Array | np.ndarray
    num_integration_steps: Array | np.ndarray


@partial(
    jax.jit,
    static_argnames=("build", "update"),
    donate_argnames=("states", "sums"),
)
def advance_grid(
    key: Array,
    grid: Grid,
    states: Any,
    sums: Any,
    first: Array,
    last: Array,
    build: Callable,
    update: Callable,
) -> tuple[Any, Any]:
    """Take steps ``first`` up to ``last`` of every setting, one after the other."""

    def one(row: tuple) -> tuple[Any, Any]:
        setting, states, sums, first, last = row
        step = build(*setting).step
        return advance(key, states, sums, first, last, step, update, store=False)

    return jax.lax.map(one, (grid, states, sums, first, last))


def repeat(tree: Any, times: int) -> Any:
    """The same pytree for every setting, along a new first axis."""
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (times, *jnp.shape(leaf))), tree
    )


def run_grid(
    key: Array,
    build: Callable[[Any, Any], SamplingAlgorithm],
    grid: Grid,
    states: Any,
    num_steps: ArrayLike,
    fold: tuple[Any, Callable],
    num_blocks: int = 4,
    progress: bool = True,
) -> tuple[Any, Any]:
    """Run all chains at every setting of a grid, with one key for all settings.

    ``build`` makes an algorithm from a step size and a number of integration steps.
    ``states`` have the settings along their first axis, ``num_steps`` may have one
    entry for each. Otherwise as ``coupling.run``; the sums have the settings behind the
    blocks.
    """
    zero, update = fold
    size = len(grid.step_size)
    counts = np.broadcast_to(num_steps, size)
    edges = np.arange(num_blocks + 1)[:, None] * counts // num_blocks
    kept = room(repeat(zero, size), num_blocks)
    hidden = {} if progress else {"disable": True}
    for row in tqdm(range(num_blocks), "pilot runs", delay=2, leave=False, **hidden):
        states, sums = advance_grid(
            key, grid, states, repeat(zero, size), *edges[row : row + 2], build, update
        )
        gather(kept, sums, row)
    return states, kept


class PilotSums(NamedTuple):
    """Running sums of a pilot run."""

    plus: Moments  # of f(X+)
    first: Total  # (rows, chains, dim): f at X+ (and X-), then at Y (and -Y)
    second: Total  # (rows, rows, chains, dim): their products
    rates: Rates


def fold_pilot(feature: Callable, states: dict[str, Any]) -> tuple[Any, Callable]:
    """Sums from which the variance left by every scheme can be told."""
    center = check_statistic(feature, states)

    def values(states: dict[str, Any]) -> Array:
        here = pair_values(feature, states)
        if "control" not in states:
            return here
        return jnp.concatenate([here, feature_values(feature, states)])

    def update(sums: PilotSums, states: dict, infos: dict) -> PilotSums:
        rows = values(states)
        away = rows - center
        return PilotSums(
            add_step(sums.plus, rows[0]),
            Total(sums.first.value + away),
            Total(sums.second.value + away[:, None] * away),
            add_rates(sums.rates, infos),
        )

    zero = 0 * values(states)
    totals = Total(zero), Total(zero[:, None] * zero)
    moments = empty_moments(center, zero.shape[1])
    return PilotSums(moments, *totals, empty_rates(states)), update


class Pilot(NamedTuple):
    """What short runs at every setting of a grid found."""

    grid: Grid
    family: Family
    num_steps: np.ndarray  # (settings,)
    acceptance: np.ndarray  # (settings,)
    decoupling: dict[str, np.ndarray]  # by chain: (settings,)
    ess: np.ndarray  # of the plain chain, per step: (settings, dim)
    rhat: np.ndarray  # (settings, dim)
    first: np.ndarray  # means of all rows: (settings, rows, chains, dim)
    second: np.ndarray  # means of their products: (settings, rows, rows, chains, dim)
    gradients: int  # spent, over all chains and settings

    @property
    def chains(self) -> set[str]:
        """The names of the coupled chains."""
        return {"plus", *self.decoupling}

    def covariance(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Covariances of all rows, chains weighted: (rows, rows, settings, dim)."""
        first = np.average(self.first, 2, weights)
        second = np.average(self.second, 3, weights)
        return np.moveaxis(second - first[:, :, None] * first[:, None], 0, 2)


def read_pilot(
    family: Family, grid: Grid, counts: np.ndarray, sums: PilotSums, gradients: int
) -> Pilot:
    """Turn the sums of ``run_grid`` over some counts of steps into a ``Pilot``."""
    moments = [Moments(*(part[:, i] for part in sums.plus)) for i in range(len(counts))]
    estimates = [summarize(each) for each in moments]

    def rates(by_chain: dict[str, Any]) -> dict[str, np.ndarray]:
        return {name: total.sum(0) / counts for name, total in by_chain.items()}

    return Pilot(
        Grid(*map(np.asarray, grid)),
        family,
        counts,
        rates(sums.rates.acceptance)["plus"],
        rates(sums.rates.decoupling),
        np.stack([each.ess / each.num_draws for each in estimates]),
        np.stack([each.rhat for each in estimates]),
        np.asarray(sums.first.value) / counts[:, None, None, None],
        np.asarray(sums.second.value) / counts[:, None, None, None, None],
        gradients,
    )


class Trial(NamedTuple):
    """What to run at every setting: made once, so it is compiled once."""

    family: Family
    build: Callable[[Any, Any], SamplingAlgorithm]
    states: dict[str, Any]
    fold: tuple[Any, Callable]

    @property
    def scheme(self) -> str:
        """The scheme that uses all the chains."""
        return list(scheme_rows(set(self.states)))[-1]

    def cost(self, num_integration_steps: Any) -> np.ndarray:
        """Gradients of the target in a step of all chains."""
        f, _ = scheme_rows(set(self.states))[self.scheme]
        num_chains = len(self.states["plus"].position)
        return num_integration_steps * self.family.cost * len(f) * num_chains


def set_up(
    scheme: Callable, family: Family, problem: Problem, positions: Array
) -> Trial:
    """A trial of a scheme with a family of samplers, from some latent positions."""
    latent = problem.latent()

    def build(step_size: Any, num_integration_steps: Any) -> SamplingAlgorithm:
        return scheme(family.make(step_size, num_integration_steps), latent)

    states = start(build(0.1, 1), positions)
    return Trial(family, build, states, fold_pilot(problem.feature(), states))


def explore(
    key: Array, trial: Trial, grid: Grid, gradients: float, progress: bool = True
) -> Pilot:
    """Run a trial at every setting of a grid, for the same number of gradients each.

    A third of the steps is a warm-up. All settings have the same starts and keys.
    Settings whose trajectories are too long for a dozen steps are left out.
    """
    family, build, states, fold = trial
    steps = (gradients / trial.cost(grid[1]) / len(grid[1])).astype(int)
    use = steps >= 12
    if not use.any():
        raise ValueError(
            f"{gradients:.2g} gradients are too few for pilot runs of at least "
            f"{grid[1].min()} leapfrog steps: raise the budget, or use fewer chains"
        )
    warmup, steps = steps[use] // 3, steps[use] - steps[use] // 3
    grid = Grid(jnp.asarray(grid[0][use], float), jnp.asarray(grid[1][use], int))
    leaps = np.asarray(grid.num_integration_steps)
    keys = jax.random.split(key)
    states = repeat(states, leaps.size)
    states, _ = run_grid(keys[0], build, grid, states, warmup, fold, progress=progress)
    _, sums = run_grid(keys[1], build, grid, states, steps, fold, progress=progress)
    spent = int((trial.cost(leaps) * (warmup + steps)).sum())
    return read_pilot(family, grid, steps, sums, spent)


def measured(pilot: Pilot, scheme: str) -> np.ndarray:
    """ESS per gradient: the plain chain's, over the variance left: (settings, dim)."""
    f, g = scheme_rows(pilot.chains)[scheme]
    per_step = pilot.grid.num_integration_steps * pilot.family.cost * len(f)
    left = variance_left(pilot.covariance(), f, g)
    return pilot.ess / left / per_step[:, None]


def smooth(x: np.ndarray, values: np.ndarray, fine: np.ndarray) -> np.ndarray:
    """A parabola through the logs of positive values (points, dim), read at ``fine``.

    Examples
    --------
    >>> x = np.array([0.0, 1.0, 2.0, 3.0])
    >>> smooth(x, np.exp(x**2)[:, None], np.array([0.0, 1.5])).round(3).tolist()
    [[1.0], [9.488]]
    """
    coefficients = np.polyfit(x, np.log(values), min(2, len(x) - 1))
    return np.exp(np.vander(fine, len(coefficients)) @ coefficients)


def trusted(pilot: Pilot, quantile: float) -> np.ndarray:
    """How far to trust each setting, from 0 to 1: (settings,).

    It falls from 1 to 0 as R-hat goes from 1.1 to 1.3, and is 0 where fewer than a
    quarter of the proposals are accepted. When fewer than two settings have a good
    R-hat, the acceptance alone decides.
    """
    accepted = 1.0 * (pilot.acceptance >= 0.25)
    rhat = np.quantile(pilot.rhat, 1 - quantile, axis=1)
    both = accepted * np.clip((1.3 - rhat) / 0.2, 0, 1)
    return both if np.count_nonzero(both) > 1 else accepted


class Curve(NamedTuple):
    """Predicted efficiency against acceptance, for one trajectory length."""

    step_size: np.ndarray
    acceptance: np.ndarray
    efficiency: np.ndarray  # ESS per gradient, times trust
    trust: np.ndarray  # from 0 to 1

    def at(self, step_size: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Acceptance and efficiency at some step sizes; zeros out of range."""
        x, known = np.asarray(step_size), self.step_size
        inside = (x > known[0] * (1 - 1e-5)) & (x < known[-1] * (1 + 1e-5))
        both = (
            np.interp(x, known, self.acceptance),
            np.interp(x, known, self.efficiency),
        )
        return both[0] * inside, both[1] * inside

    @property
    def best(self) -> int:
        """Where the efficiency is highest."""
        return int(self.efficiency.argmax())


def predict(
    pilot: Pilot,
    scheme: str,
    quantile: float = 0.5,
    weights: np.ndarray | None = None,
) -> Curve:
    """Predict the ESS per gradient from the bound and the variance left.

    All settings of the pilot must have the same trajectory length. The bound's constant
    is that of the measured efficiency of the plain chain. ``weights`` of the chains are
    for resampling.
    """
    trust = trusted(pilot, quantile)
    use = np.flatnonzero(trust)[np.argsort(pilot.grid.step_size[trust > 0])]
    if use.size < 2:
        raise ValueError(
            "fewer than two step sizes can be trusted: proposals are rejected too "
            "often, or the budget is too small"
        )
    f, g = scheme_rows(pilot.chains)[scheme]
    power, sizes = pilot.family.power, np.log(pilot.grid.step_size[use])
    rejection = np.clip(1 - pilot.acceptance[use], 1e-6, 1)
    bound = efficiency_bound(1 - rejection, power).sum()
    constant = measured(pilot, "plain")[use].sum(0) / bound / len(f)
    left = variance_left(pilot.covariance(weights), f, g)[use]
    fine = np.linspace(sizes[0], sizes[-1], 400)
    lost = np.exp(PchipInterpolator(sizes, np.log(rejection))(fine))
    gain = np.quantile(constant / smooth(sizes, left, fine), quantile, axis=1)
    gain *= efficiency_bound(1 - lost, power)
    trust = np.interp(fine, sizes, trust[use])
    return Curve(np.exp(fine), 1 - lost, gain * trust, trust)


def resample(
    pilot: Pilot, scheme: str, quantile: float, number: int = 50
) -> np.ndarray:
    """Recommended step sizes when the chains of a pilot are drawn again: (number,)."""
    chains = pilot.first.shape[2]
    counts = np.random.default_rng(0).multinomial(
        chains, np.full(chains, 1 / chains), number
    )
    curves = [predict(pilot, scheme, quantile, weights) for weights in counts]
    return np.array([curve.step_size[curve.best] for curve in curves])


class Quick(NamedTuple):
    """A step size for a given acceptance.

    Parameters
    ----------
    step_size, num_integration_steps
        The settings.
    acceptance
        That of the second half of the adaptation.
    positions
        Where the chains ended.
    gradients
        How many were spent, over all chains.

    Examples
    --------
    >>> from swindles.transport import identity, standard_normal
    >>> problem = Problem(standard_normal, identity(10), 10)
    >>> found = quick(jax.random.key(0), problem, num_chains=16)
    >>> found.positions.shape
    (16, 10)
    >>> sampler = hmc(found.step_size, found.num_integration_steps)
    """

    step_size: float
    num_integration_steps: int
    acceptance: float
    positions: Float[Array, "chains dim"]
    gradients: int


# An adaptation takes no more leapfrog steps than this, however small they get.
MOST_LEAPS = 64


@partial(jax.jit, static_argnames=("family", "logdensity", "num_steps"))
def adapt(
    key: Array,
    states: Any,
    length: float,
    target: float,
    family: Family,
    logdensity: LogDensity,
    num_steps: int,
) -> tuple[Array, Any, Array, Array]:
    """Step size, states, and acceptance and leapfrog steps along dual averaging."""
    num_chains, dim = states.position.shape
    first, update, final = dual_averaging_adaptation(target)

    def body(carry: tuple, i: Array) -> tuple[tuple, tuple]:
        states, average = carry
        size = jnp.exp(average.log_step_size)
        most = MOST_LEAPS if family.has_length else 1
        leaps = jnp.clip(jnp.round(length / size), 1, most).astype(int)
        step = family.make(size, leaps)(logdensity).step
        states, infos = jax.vmap(step)(step_keys(key, i, num_chains), states)
        rate = jnp.nan_to_num(infos.acceptance_rate).mean()
        return (states, update(average, rate)), (rate, leaps)

    begin = states, first(0.1 * dim**-0.25)
    (states, average), trail = jax.lax.scan(body, begin, jnp.arange(num_steps))
    return final(average), states, *trail


def check_acceptance(rate: float, target: float, relative_size: float) -> None:
    """Raise ValueError when no sensible step size gives the acceptance wanted."""
    if rate < target / 2 or relative_size < 1e-4:
        raise ValueError(
            "nearly all proposals are rejected unless the steps are tiny (acceptance "
            f"{rate:.0%}, steps {relative_size:.1g} of the chains' spread): the log "
            "density is not finite or not differentiable around the start"
        )
    if rate > (1 + target) / 2 or relative_size > 1e4:
        raise ValueError(
            f"nearly all proposals are accepted, whatever the step size ({rate:.1%}): "
            "the log density is constant in some direction, so it is no distribution"
        )


def quick(
    key: Key[Array, ""],
    problem: Problem,
    family: Family = HMC,
    target: float | None = None,
    trajectory_length: float = np.pi / 2,
    num_chains: int = 64,
    num_steps: int = 150,
) -> Quick:
    """Find the step size for an acceptance of ``target`` by dual averaging.

    The default target is the family's: 0.95 for HMC.

    Examples
    --------
    >>> from swindles.transport import identity, standard_normal
    >>> found = quick(jax.random.key(0), Problem(standard_normal, identity(10), 10))
    >>> 0.9 < found.acceptance < 0.99
    True
    """
    target = family.target if target is None else target
    if not 0 < target < 1:
        raise ValueError(f"the target is a rate between 0 and 1, got {target}")
    require_positive(trajectory_length=trajectory_length, num_chains=num_chains)
    keys, latent = jax.random.split(key), problem.latent()
    z = jax.random.normal(keys[0], (num_chains, problem.dim))
    states = start(family.make(0.1, 1)(latent), z)
    size, states, rates, leaps = adapt(
        keys[1], states, trajectory_length, target, family, latent, num_steps
    )
    rate = float(rates[num_steps // 2 :].mean())
    check_acceptance(rate, target, float(size) / float(states.position.std()))
    number = max(round(trajectory_length / float(size)), 1) if family.has_length else 1
    spent = int(jnp.sum(leaps)) * family.cost * num_chains
    return Quick(float(size), number, rate, states.position, spent)


# Trajectories that `tune` compares, in units of the chains' standard deviation.
LENGTHS = np.array([0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 1.8, 2.2, 2.7])


def ladder(middle: int) -> np.ndarray:
    """Nine whole numbers from about a third of ``middle`` to three times it.

    Examples
    --------
    >>> ladder(5).tolist()
    [1, 2, 3, 4, 5, 7, 9, 11, 15]
    >>> ladder(1).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    around = np.geomspace(max(middle / 3, 1), 3 * middle, len(LENGTHS))
    wanted = np.unique(around.round().astype(int))
    others = np.setdiff1d(np.arange(1, 3 * len(LENGTHS)), wanted)
    return np.sort(np.concatenate([wanted, others[: len(LENGTHS) - wanted.size]]))


def grid_of_lengths(begin: Quick) -> Grid:
    """Trajectories of several lengths, with steps near one size."""
    lengths = LENGTHS * np.std(begin.positions)
    counts = np.maximum(np.round(lengths / begin.step_size), 1).astype(int)
    return Grid(lengths / counts, counts)


def choose_length(pilot: Pilot, scheme: str, quantile: float) -> int:
    """The setting with the highest measured ESS per gradient, if it can be trusted."""
    scores = np.quantile(measured(pilot, scheme), quantile, axis=1)
    return int((scores * trusted(pilot, quantile)).argmax())


def divide(grid: Grid, at: int) -> Grid:
    """Steps of several sizes that divide the trajectory of one setting of a grid."""
    number = int(grid.num_integration_steps[at])
    counts = ladder(number)
    return Grid(float(grid.step_size[at]) * number / counts, counts)


def spread_sizes(step_size: float) -> Grid:
    """Nine step sizes around one, for samplers without trajectories."""
    sizes = step_size * np.geomspace(1 / 3, 3, len(LENGTHS))
    return Grid(sizes, np.ones(len(LENGTHS), int))


class Tuning(NamedTuple):
    """Recommended settings, and why.

    Parameters
    ----------
    scheme
        The name of the scheme that was tuned.
    step_size, num_integration_steps
        The settings.
    acceptance
        What they are predicted to give.
    interval
        90 % of resampled pilots want a step size in here.
    lengths
        Pilot runs with trajectories of several lengths, and one step size.
    sizes
        Pilot runs with several step sizes, and one trajectory length.
    curve
        Predicted efficiency against acceptance.
    quantile
        Which statistic was tuned for.
    gradients
        How many were spent, over all chains.

    Examples
    --------
    >>> from swindles.antithetic import plain
    >>> from swindles.transport import identity
    >>> problem = Problem(lambda x: -jnp.sum(jnp.cosh(x)), identity(5), 5)
    >>> tuning = tune(jax.random.key(0), plain, problem, MALA, 16, budget=2e4)
    >>> print(tuning)  # doctest: +ELLIPSIS
    MALA, plain: step size ..., 1 to a trajectory
    acceptance ..., 19,968 gradients spent
       step  leaps  accept    left  R-hat  ESS/grad  predicted
    ...
    """

    scheme: str
    step_size: float
    num_integration_steps: int
    acceptance: float
    interval: tuple[float, float]
    lengths: Pilot | None
    sizes: Pilot
    curve: Curve
    quantile: float
    gradients: int

    @property
    def sampler(self) -> Sampler:
        """The sampler with these settings."""
        return self.sizes.family.make(self.step_size, self.num_integration_steps)

    def warnings(self) -> list[str]:
        """Reasons not to trust the settings, in words; empty when there are none."""
        return doubts(self)

    def __str__(self) -> str:
        """The settings, and the table of the step sizes behind them."""
        return "\n".join(describe(self))

    def plot(self) -> Any:
        """Draw the evidence; returns a matplotlib figure."""
        return draw(self)


def doubts(tuning: Tuning) -> list[str]:
    """What speaks against the settings of a ``Tuning``."""
    found, sizes, curve = [], tuning.sizes, tuning.curve
    rhat = np.quantile(sizes.rhat, 1 - tuning.quantile, axis=1).min()
    if rhat > 1.1:
        found.append(
            f"R-hat is {rhat:.2f} or more in all pilot runs: give a larger budget"
        )
    if tuning.lengths is not None:
        best = choose_length(tuning.lengths, tuning.scheme, tuning.quantile)
        if best == len(LENGTHS) - 1:
            found.append(
                "the longest trajectory is the best: longer ones may be better"
            )
    free = curve.step_size[(curve.efficiency / curve.trust.clip(1e-9)).argmax()]
    if free < 0.9 * curve.step_size[curve.best]:
        found.append("R-hat forbids smaller steps: a larger budget may allow them")
    if curve.best == 0:
        found.append("the smallest step is the best: smaller ones may be better")
    return found


def describe(tuning: Tuning) -> list[str]:
    """A ``Tuning`` as lines of text."""
    pilot, scheme, quantile = tuning.sizes, tuning.scheme, tuning.quantile
    low, high = tuning.interval
    f, g = scheme_rows(pilot.chains)[scheme]
    left = np.median(variance_left(pilot.covariance(), f, g), axis=1)
    rhat = np.quantile(pilot.rhat, 1 - quantile, axis=1)
    found = np.quantile(measured(pilot, scheme), quantile, axis=1)
    _, guess = tuning.curve.at(pilot.grid.step_size)
    rows = zip(*pilot.grid, pilot.acceptance, left, rhat, found, guess, strict=True)
    return [
        f"{pilot.family.name}, {scheme}: step size {tuning.step_size:.3g} "
        f"({low:.2g} to {high:.2g}), {tuning.num_integration_steps} to a trajectory",
        f"acceptance {tuning.acceptance:.4f}, {tuning.gradients:,} gradients spent",
        "   step  leaps  accept    left  R-hat  ESS/grad  predicted",
        *(
            f"{size:7.3f}{leaps:7d}{rate:8.4f}{rest:8.4f}{r:7.2f}{ess:10.3g}{p:11.3g}"
            for size, leaps, rate, rest, r, ess, p in rows
        ),
        *tuning.warnings(),
    ]


def acceptance_axis(axis: Any) -> None:
    """Label a log axis of rejection rates with acceptance rates, from left to right."""
    low, high = sorted(axis.get_xlim())
    rates = np.array([0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999])
    shown = rates[(1 - rates > low) & (1 - rates < high)]
    axis.set_xticks(1 - shown, [f"{rate:g}" for rate in shown], size="small")
    axis.minorticks_off()
    axis.set(xlim=(high, low), xlabel="acceptance")


def draw(tuning: Tuning) -> Any:
    """A figure of what a ``Tuning`` found."""
    import matplotlib.pyplot as plt

    pilot, scheme, quantile = tuning.sizes, tuning.scheme, tuning.quantile
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.2))
    if tuning.lengths is not None:
        grid = tuning.lengths.grid
        found = np.quantile(measured(tuning.lengths, scheme), quantile, axis=1)
        axes[0].plot(grid.step_size * grid.num_integration_steps, found, "o-")
        axes[0].axvline(tuning.step_size * tuning.num_integration_steps, color="0.7")
        axes[0].set(xlabel="trajectory length", ylabel="ESS per gradient")
    else:
        axes[0].plot(pilot.grid.step_size, pilot.acceptance, "o-")
        axes[0].axvline(tuning.step_size, color="0.7")
        axes[0].set(xlabel="step size", ylabel="acceptance")
    found = np.quantile(measured(pilot, scheme), quantile, axis=1)
    lost, curve = 1 - pilot.acceptance, tuning.curve
    axes[1].semilogx(lost[lost < 0.5], found[lost < 0.5], "o", label="measured")
    use = curve.acceptance > 0.5
    axes[1].plot(1 - curve.acceptance[use], curve.efficiency[use], label="predicted")
    axes[1].axvline(1 - tuning.acceptance, color="0.7")
    axes[1].legend()
    acceptance_axis(axes[1])
    return figure


def check_request(problem: Problem, num_chains: int, quantile: float) -> None:
    """Raise ValueError for what ``tune`` cannot do."""
    if num_chains < 16:
        raise ValueError(
            f"{num_chains} chains are too few to tune with: use 16 or more"
        )
    if not 0 <= quantile <= 1:
        raise ValueError(
            f"quantile is {quantile}: from 0 (the worst statistic) to 1 (the best)"
        )
    shape = jax.eval_shape(problem.latent(), jnp.zeros(problem.dim)).shape
    if shape != ():
        raise ValueError(f"the log density must be one number, got shape {shape}")


def conclude(
    scheme: str, lengths: Pilot | None, sizes: Pilot, quantile: float, gradients: int
) -> Tuning:
    """Settings from pilot runs: the best step size, divided into the length."""
    curve = predict(sizes, scheme, quantile)
    size, number = float(curve.step_size[curve.best]), 1
    if lengths is not None:
        length = float(sizes.grid.step_size[0] * sizes.grid.num_integration_steps[0])
        numbers = np.array([np.floor(length / size), np.ceil(length / size)]).clip(1)
        number = int(numbers[curve.at(length / numbers)[1].argmax()])
        size = length / number
    rate = float(curve.at(size)[0])
    low, high = np.quantile(resample(sizes, scheme, quantile), [0.05, 0.95])
    return Tuning(
        scheme,
        size,
        number,
        rate,
        (low, high),
        lengths,
        sizes,
        curve,
        quantile,
        gradients,
    )


def tune(
    key: Key[Array, ""],
    scheme: Callable,
    problem: Problem,
    family: Family = HMC,
    num_chains: int = 64,
    budget: float = 1e6,
    quantile: float = 0.5,
    progress: bool = True,
) -> Tuning:
    """Find the step size, and for HMC the trajectory length, that suit a scheme.

    Parameters
    ----------
    scheme
        ``plain``, ``antithetic``, ``control`` or ``cva``.
    budget
        How many gradients of the target to spend, over all chains.
    quantile
        Which statistic to tune for: 0 is the worst one, 0.5 the median, 1 the best.

    Examples
    --------
    >>> from swindles.control import control
    >>> from swindles.targets import skewed
    >>> from swindles.transport import laplace
    >>> target = skewed(dim=5)
    >>> to_x = laplace(target.logdensity, jnp.zeros(5))
    >>> problem = Problem(target.logdensity, to_x, 5)
    >>> tuning = tune(jax.random.key(0), control, problem, budget=3e5)
    >>> 0.5 < tuning.acceptance < 1
    True
    """
    check_request(problem, num_chains, quantile)
    keys = jax.random.split(key, 3)
    begin = quick(keys[0], problem, family, num_chains=num_chains)
    trial = set_up(scheme, family, problem, begin.positions)
    rest = max(budget - begin.gradients, budget / 2)
    share = rest / (2 if family.has_length else 1)
    lengths, grid = None, spread_sizes(begin.step_size)
    if family.has_length:
        lengths = explore(keys[1], trial, grid_of_lengths(begin), share, progress)
        grid = divide(lengths.grid, choose_length(lengths, trial.scheme, quantile))
    sizes = explore(keys[2], trial, grid, share, progress)
    spent = sum(part.gradients for part in (begin, sizes, lengths) if part is not None)
    return conclude(trial.scheme, lengths, sizes, quantile, spent)


def with_integrator(name: str, integrator: Callable, order: int, cost: int) -> Family:
    """HMC with another integrator: its order, and its gradients in each step."""
    make = partial(hmc, integrator=integrator)
    return Family(f"HMC ({name})", make, 1 / order, 0.99, has_length=True, cost=cost)


INTEGRATORS = {
    "velocity Verlet": HMC,
    "McLachlan": with_integrator("McLachlan", integrators.mclachlan, 2, 2),
    "three-stage": with_integrator("three-stage", integrators.yoshida, 2, 3),
    "Omelyan": with_integrator("Omelyan", integrators.omelyan, 4, 5),
}
