"""Tuning: how long a step?

Mirrored from book/tuning.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable, Sequence
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
from scipy.special import ndtri
from tqdm import tqdm

from swindles.accuracy import Moments, add_step, empty_moments, summarize
from swindles.antithetic import pair_values
from swindles.control import (
    FeatureProducts,
    PairProducts,
    fold_feature_products,
    fold_pair_products,
    residual_variance,
)
from swindles.coupling import (
    Rates,
    Sampler,
    add_rates,
    append_row,
    begin_run,
    compiled,
    coupled,
    empty_rates,
    hmc,
    mala,
    random_walk,
    require_positive,
    start,
    step_keys,
    take_steps,
)
from swindles.models import Problem, need
from swindles.scale import (
    by_device,
    chain_mesh,
    fetch,
    is_first,
    put_chains,
    sum_rules,
)
from swindles.schemes import SCHEMES, find_scheme, make_features, start_mirrored
from swindles.stein import Order


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
        The acceptance that ``adapt_step_size`` aims at.
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


class Grid(NamedTuple):
    """Settings to try: an entry for each."""

    step_size: Array | np.ndarray
    num_integration_steps: Array | np.ndarray


def grid_program(build: Callable, update: Callable, mesh: Any = None) -> Callable:
    """Take steps of every setting of a grid, one after the other; compiled once."""

    def one(key: Array, devices: int, row: tuple) -> tuple[Any, Any]:
        setting, states, sums, first, last = row
        fixed = build(*setting).step, update, False, devices
        return take_steps(key, states, sums, first, last, *fixed)

    def all_settings(
        key: Array, grid: Grid, states: Any, sums: Any, *ends: Any
    ) -> tuple[Any, Any]:
        def settings(states: Any, sums: Any, devices: int) -> tuple[Any, Any]:
            rows = grid, states, sums, *ends
            return jax.lax.map(partial(one, key, devices), rows)

        return by_device(mesh, settings, states, sums, sum_rules(sums), axis=1)

    return compiled(build, (update, mesh), lambda: jax.jit(all_settings))


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
    mesh = chain_mesh(jax.tree.leaves(states)[0].shape[1])
    program = grid_program(build, update, mesh)
    states = put_chains(mesh, states, 1)
    zeros = put_chains(mesh, repeat(zero, size), sum_rules(zero))
    rows = begin_run(states, zeros).rows
    hidden = {} if progress and is_first() else {"disable": True}
    for row in tqdm(range(num_blocks), "pilot runs", delay=2, leave=False, **hidden):
        states, sums = program(key, grid, states, zeros, *edges[row : row + 2])
        rows = append_row(rows, fetch(sums))
    return fetch(states), rows


class PilotSums(NamedTuple):
    """Running sums of a pilot run: what every scheme would leave of the variance."""

    plus: Moments  # of f(X+)
    pair: PairProducts
    features: dict[str, FeatureProducts]  # of schemes with Stein features
    rates: Rates


def some_chains(states: Any, chains: tuple[str, ...]) -> Any:
    """The states, or infos, of some of the coupled chains."""
    return coupled(*chains)(*(getattr(states, name) for name in chains))


def fold_pilot(
    problem: Problem, states: Any, names: Sequence[str] = (), order: Order = "none"
) -> tuple[Any, Callable]:
    """Sums from which the variance left by every scheme can be told.

    ``names`` are those of schemes with Stein features, up to an order.
    """
    statistic = problem.statistic
    pair, update_pair = fold_pair_products(statistic, states)
    folds = {}
    for name in names:
        scheme = SCHEMES[name]
        mine = some_chains(states, scheme.chains)
        found = make_features(scheme, statistic, problem.dim, order=order)
        mean = found.expectation.mean
        folds[name] = fold_feature_products(statistic, found.observe, mean, mine)

    def update(sums: PilotSums, states: Any, infos: Any) -> PilotSums:
        features = {
            name: folds[name][1](old, some_chains(states, SCHEMES[name].chains), infos)
            for name, old in sums.features.items()
        }
        return PilotSums(
            add_step(sums.plus, pair_values(statistic, states)[0]),
            update_pair(sums.pair, states, infos),
            features,
            add_rates(sums.rates, infos),
        )

    moments = empty_moments(pair.center, len(states.plus.position))
    zeros = {name: zero for name, (zero, _) in folds.items()}
    return PilotSums(moments, pair, zeros, empty_rates(states)), update


class Pilot(NamedTuple):
    """What short runs at every setting of a grid found."""

    grid: Grid
    family: Family
    num_steps: np.ndarray  # (settings,)
    acceptance: np.ndarray  # (settings,)
    decoupling: dict[str, np.ndarray]  # by chain: (settings,)
    ess: np.ndarray  # of the plain chain, per step: (settings, dim)
    rhat: np.ndarray  # (settings, dim)
    sums: PilotSums  # totals over blocks, with the settings along the first axis
    gradients: int  # spent, over all chains and settings
    states: Any = None  # after the last step, with the settings along the first axis

    @property
    def chains(self) -> tuple[str, ...]:
        """The names of the coupled chains."""
        names = {"plus", *self.decoupling}
        return tuple(name for name in ("plus", "minus", "control") if name in names)

    def setting(self, number: int) -> Any:
        """The sums for a regression at one setting: pairs, and features by scheme."""
        sums = self.sums.pair, self.sums.features
        return jax.tree.map(lambda x: x[number], sums)

    def covariance(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Covariances of all rows, chains weighted: (rows, rows, settings, dim)."""
        each = [
            self.setting(i)[0].covariance(weights) for i in range(len(self.num_steps))
        ]
        return np.stack(each, 2)


def summarize_pilot(
    family: Family,
    grid: Grid,
    counts: np.ndarray,
    sums: PilotSums,
    gradients: int,
    states: Any = None,
) -> Pilot:
    """Turn the sums of ``run_grid`` over some counts of steps into a ``Pilot``."""
    moments = [Moments(*(part[:, i] for part in sums.plus)) for i in range(len(counts))]
    estimates = [summarize(each) for each in moments]

    def rates(by_chain: dict[str, Any]) -> dict[str, np.ndarray]:
        return {name: x.mean(-1).sum(0) / counts for name, x in by_chain.items()}

    # What has a row for each block and each setting keeps those of the first block.
    pair = sums.pair._replace(center=sums.pair.center[0])
    features = {n: x._replace(center=x.center[0]) for n, x in sums.features.items()}
    return Pilot(
        Grid(*map(np.asarray, grid)),
        family,
        counts,
        rates(sums.rates.acceptance)["plus"],
        rates(sums.rates.decoupled),
        np.stack([each.ess / each.num_draws for each in estimates]),
        np.stack([each.rhat for each in estimates]),
        sums._replace(pair=pair, features=features),
        gradients,
        states,
    )


class Trial(NamedTuple):
    """What to run at every setting: made once, so it is compiled once."""

    scheme: str  # the name of the one that uses all the chains
    family: Family
    build: Callable[[Any, Any], SamplingAlgorithm]
    states: Any
    fold: tuple[Any, Callable]

    def cost(self, num_integration_steps: Any) -> np.ndarray:
        """Gradients of the target in a step of all chains."""
        targets = SCHEMES[self.scheme].num_targets
        num_chains = len(self.states.plus.position)
        return num_integration_steps * self.family.cost * targets * num_chains


def make_trial(
    scheme: str,
    family: Family,
    problem: Problem,
    positions: Array,
    names: Sequence[str] = (),
    order: Order = "none",
) -> Trial:
    """A trial of a scheme with a family of samplers, from some latent positions.

    ``names`` and ``order`` are as in ``fold_pilot``. With a sampler that couples slowly
    the mirrored chain starts at the mirror image of the others.
    """

    def build(step_size: Any, num_integration_steps: Any) -> SamplingAlgorithm:
        sampler = family.make(step_size, num_integration_steps)
        return SCHEMES[scheme].build(sampler, problem.logdensity)

    begin = start if family.has_length else start_mirrored
    states = begin(build(0.1, 1), positions)
    fold = fold_pilot(problem, states, names, order)
    return Trial(scheme, family, build, states, fold)


def run_pilot(
    key: Array,
    trial: Trial,
    grid: Grid,
    num_steps: ArrayLike,
    progress: bool = True,
) -> Pilot:
    """Run a trial at every setting of a grid; ``num_steps`` may be one for each.

    A third of the steps is a warm-up. All settings have the same starts and keys.
    """
    steps = np.broadcast_to(num_steps, len(grid.step_size))
    warmup, steps = steps // 3, steps - steps // 3
    grid = Grid(jnp.asarray(grid[0], float), jnp.asarray(grid[1], int))
    leaps = np.asarray(grid.num_integration_steps)
    keys = jax.random.split(key)
    run = partial(run_grid, build=trial.build, grid=grid, fold=trial.fold)
    states = repeat(trial.states, leaps.size)
    states, _ = run(keys[0], states=states, num_steps=warmup, progress=progress)
    states, sums = run(keys[1], states=states, num_steps=steps, progress=progress)
    spent = int((trial.cost(leaps) * (warmup + steps)).sum())
    return summarize_pilot(trial.family, grid, steps, sums, spent, states)


def run_pilot_for(
    key: Array, trial: Trial, grid: Grid, gradients: float, progress: bool = True
) -> Pilot:
    """Run a trial at every setting of a grid, for the same number of gradients each.

    Settings whose trajectories are too long for a dozen steps are left out.
    """
    steps = (gradients / trial.cost(grid[1]) / len(grid[1])).astype(int)
    use = steps >= 12
    if not use.any():
        raise ValueError(
            f"{gradients:.2g} gradients are too few for pilot runs of at least "
            f"{grid[1].min()} leapfrog steps: raise the budget, or use fewer chains"
        )
    some = Grid(grid[0][use], grid[1][use])
    return run_pilot(key, trial, some, steps[use], progress)


def measured_efficiency(
    pilot: Pilot, scheme: str, weights: np.ndarray | None = None
) -> np.ndarray:
    """ESS per gradient: the plain chain's, over the variance left: (settings, dim).

    ``weights`` of the chains in the latter are for resampling.
    """
    f, g = SCHEMES[scheme].rows(pilot.chains)
    per_step = pilot.grid.num_integration_steps * pilot.family.cost * len(f)
    left = residual_variance(pilot.covariance(weights), f, g)
    return pilot.ess / left / per_step[:, None]


def fit_log_parabola(x: np.ndarray, values: np.ndarray, fine: np.ndarray) -> np.ndarray:
    """A parabola through the logs of positive values (points, dim), read at ``fine``.

    Examples
    --------
    >>> x = np.array([0.0, 1.0, 2.0, 3.0])
    >>> values, fine = np.exp(x**2)[:, None], np.array([0.0, 1.5])
    >>> fit_log_parabola(x, values, fine).round(3).tolist()
    [[1.0], [9.488]]
    """
    coefficients = np.polyfit(x, np.log(values), min(2, len(x) - 1))
    return np.exp(np.vander(fine, len(coefficients)) @ coefficients)


def trust_weights(pilot: Pilot, quantile: float) -> np.ndarray:
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
        x, steps = np.asarray(step_size), self.step_size
        inside = (x > steps[0] * (1 - 1e-5)) & (x < steps[-1] * (1 + 1e-5))
        both = (
            np.interp(x, steps, self.acceptance),
            np.interp(x, steps, self.efficiency),
        )
        return both[0] * inside, both[1] * inside

    @property
    def best(self) -> int:
        """Where the efficiency is highest."""
        return int(self.efficiency.argmax())


def predict_efficiency(
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
    from scipy.interpolate import PchipInterpolator

    sure = trust_weights(pilot, quantile)
    use = np.flatnonzero(sure)[np.argsort(pilot.grid.step_size[sure > 0])]
    if use.size < 2:
        raise ValueError(
            "fewer than two step sizes can be trusted: proposals are rejected too "
            "often, or the budget is too small"
        )
    f, g = SCHEMES[scheme].rows(pilot.chains)
    power, sizes = pilot.family.power, np.log(pilot.grid.step_size[use])
    rejection = np.clip(1 - pilot.acceptance[use], 1e-6, 1)
    bound = efficiency_bound(1 - rejection, power).sum()
    constant = measured_efficiency(pilot, "plain")[use].sum(0) / bound / len(f)
    rest = residual_variance(pilot.covariance(weights), f, g)[use]
    fine = np.linspace(sizes[0], sizes[-1], 400)
    lost = np.exp(PchipInterpolator(sizes, np.log(rejection))(fine))
    gain = np.quantile(constant / fit_log_parabola(sizes, rest, fine), quantile, axis=1)
    gain *= efficiency_bound(1 - lost, power)
    weight = np.interp(fine, sizes, sure[use])
    return Curve(np.exp(fine), 1 - lost, gain * weight, weight)


def redraw_chains(pilot: Pilot, number: int = 50) -> np.ndarray:
    """How often each chain is drawn, so many times: (number, chains)."""
    chains = pilot.sums.pair.first.value.shape[2]
    rng = np.random.default_rng(0)
    return rng.multinomial(chains, np.full(chains, 1 / chains), number)


def bootstrap_step_sizes(
    pilot: Pilot, scheme: str, quantile: float, number: int = 50
) -> np.ndarray:
    """Recommended step sizes when the chains of a pilot are drawn again: (number,)."""
    counts = redraw_chains(pilot, number)
    curves = [predict_efficiency(pilot, scheme, quantile, each) for each in counts]
    return np.array([curve.step_size[curve.best] for curve in curves])


class Adapted(NamedTuple):
    """A step size for a given acceptance.

    Parameters
    ----------
    step_size, num_integration_steps
        The settings.
    acceptance
        That of the second half of the adaptation.
    positions
        Where the chains ended.
    accepted
        How many proposals each chain accepted.
    gradients
        How many were spent, over all chains.

    Examples
    --------
    >>> from swindles.models import Model, make_problem
    >>> from swindles.transport import standard_normal
    >>> problem = make_problem(Model(standard_normal, jnp.zeros(10)))
    >>> found = adapt_step_size(jax.random.key(0), problem, num_chains=16)
    >>> found.positions.shape, found.accepted.shape
    ((16, 10), (16,))
    >>> sampler = hmc(found.step_size, found.num_integration_steps)
    """

    step_size: float
    num_integration_steps: int
    acceptance: float
    positions: Float[Array, "chains dim"]
    accepted: Float[np.ndarray, " chains"]
    gradients: int


# An adaptation takes no more leapfrog steps than this, however small they get.
MOST_LEAPS = 64


def leapfrog_steps(family: Family, length: Any, step_size: Any) -> Any:
    """How many steps make a trajectory of some length."""
    most = MOST_LEAPS if family.has_length else 1
    return jnp.clip(jnp.round(length / step_size), 1, most).astype(int)


def dual_averaging(
    key: Array,
    states: Any,
    length: Any,
    target: Any,
    family: Family,
    logdensity: Callable,
    num_steps: int,
) -> tuple[Array, Any, Array, tuple]:
    """Let all chains adapt one step size.

    Returns it with the states at the end, how often each chain accepted, and the trail:
    acceptance, leapfrog steps and positions at every step.
    """
    first, update, final = dual_averaging_adaptation(target)
    num_chains, dim = states.position.shape

    def body(carry: tuple, i: Array) -> tuple[tuple, tuple]:
        states, average, accepted = carry
        size = jnp.exp(average.log_step_size)
        leaps = leapfrog_steps(family, length, size)
        step = family.make(size, leaps)(logdensity).step
        states, infos = jax.vmap(step)(step_keys(key, i, num_chains), states)
        rate = jnp.nan_to_num(infos.acceptance_rate).mean()
        carry = states, update(average, rate), accepted + infos.is_accepted
        return carry, (rate, leaps, states.position)

    begin = states, first(0.1 * dim**-0.25), jnp.zeros(num_chains)
    carry, trail = jax.lax.scan(body, begin, jnp.arange(num_steps))
    return final(carry[1]), carry[0], carry[2], trail


def adaptation_program(
    family: Family, logdensity: Callable, num_steps: int
) -> Callable:
    """``dual_averaging`` without the positions on the way, compiled once."""

    def adapt(key: Array, states: Any, length: Array, target: Array) -> tuple:
        *found, (rates, leaps, _) = dual_averaging(
            key, states, length, target, family, logdensity, num_steps
        )
        return *found, rates, leaps

    return compiled(logdensity, (family, num_steps), lambda: jax.jit(adapt))


def check_acceptance(rate: float, target: float, relative_size: float) -> None:
    """Raise ValueError when no sensible step size gives the acceptance wanted."""
    if not rate > target / 2 or not relative_size > 1e-6:
        raise ValueError(
            "nearly all proposals are rejected unless the steps are tiny (acceptance "
            f"{rate:.0%}, steps {relative_size:.1g} of the chains' spread): the log "
            "density is not finite or not differentiable around the start, or it rises "
            "without end and is no posterior"
        )
    if rate > (1 + target) / 2 or relative_size > 1e4:
        raise ValueError(
            f"nearly all proposals are accepted, whatever the step size ({rate:.1%}): "
            "the log density is constant in some direction or has no maximum, so it is "
            "no posterior"
        )


def adapt_step_size(
    key: Key[Array, ""],
    problem: Problem,
    family: Family = HMC,
    target: float | None = None,
    trajectory_length: float = np.pi / 2,
    num_chains: int = 64,
    num_steps: int = 150,
    positions: Float[Array, "chains dim"] | None = None,
) -> Adapted:
    """Find the step size for an acceptance of ``target`` by dual averaging.

    The default target is the family's: 0.95 for HMC. Chains start at ``positions``, by
    default at draws of N(0, I).

    Examples
    --------
    >>> from swindles.models import Model, make_problem
    >>> from swindles.transport import standard_normal
    >>> problem = make_problem(Model(standard_normal, jnp.zeros(10)))
    >>> found = adapt_step_size(jax.random.key(0), problem)
    >>> 0.9 < found.acceptance < 0.99
    True
    """
    target = family.target if target is None else target
    if not 0 < target < 1:
        raise ValueError(f"the target is a rate between 0 and 1, got {target}")
    require_positive(trajectory_length=trajectory_length, num_chains=num_chains)
    keys, latent = jax.random.split(key), problem.logdensity
    if positions is None:
        positions = jax.random.normal(keys[0], (num_chains, problem.dim))
    states = start(family.make(0.1, 1)(latent), positions)
    adapt = adaptation_program(family, latent, num_steps)
    found = adapt(keys[1], states, jnp.array(trajectory_length), jnp.array(target))
    size, states, accepted, rates, leaps = found
    rate, spread = float(rates[num_steps // 2 :].mean()), states.position.std()
    check_acceptance(rate, target, float(size) / float(spread))
    number = int(leapfrog_steps(family, trajectory_length, size))
    spent = int(jnp.sum(leaps)) * family.cost * len(positions)
    moves = np.asarray(accepted)
    return Adapted(float(size), number, rate, states.position, moves, spent)


# Trajectories that `tune` compares, in units of the chains' standard deviation.
LENGTHS = np.array([0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 1.8, 2.2, 2.7])


def step_counts(middle: int) -> np.ndarray:
    """Nine whole numbers from about a third of ``middle`` to three times it.

    Examples
    --------
    >>> step_counts(5).tolist()
    [1, 2, 3, 4, 5, 7, 9, 11, 15]
    >>> step_counts(1).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    around = np.geomspace(max(middle / 3, 1), 3 * middle, len(LENGTHS))
    wanted = np.unique(around.round().astype(int))
    others = np.setdiff1d(np.arange(1, 3 * len(LENGTHS)), wanted)
    return np.sort(np.concatenate([wanted, others[: len(LENGTHS) - wanted.size]]))


def grid_of_lengths(adapted: Adapted) -> Grid:
    """Trajectories of several lengths, with steps near one size."""
    lengths = LENGTHS * np.std(adapted.positions)
    counts = np.maximum(np.round(lengths / adapted.step_size), 1).astype(int)
    return Grid(lengths / counts, counts)


def choose_length(pilot: Pilot, scheme: str, quantile: float) -> int:
    """The setting with the highest measured ESS per gradient, if it can be trusted."""
    found = np.quantile(measured_efficiency(pilot, scheme), quantile, axis=1)
    return int((found * trust_weights(pilot, quantile)).argmax())


def grid_of_step_counts(grid: Grid, at: int) -> Grid:
    """Steps of several sizes that divide the trajectory of one setting of a grid."""
    number = int(grid.num_integration_steps[at])
    counts = step_counts(number)
    return Grid(float(grid.step_size[at]) * number / counts, counts)


def grid_of_step_sizes(step_size: float) -> Grid:
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
    >>> from swindles.models import Model, make_problem
    >>> model = Model(lambda x: -jnp.sum(jnp.cosh(x)), jnp.zeros(5))
    >>> problem, key = make_problem(model), jax.random.key(0)
    >>> tuning = tune(key, "plain", problem, MALA, 16, budget=2e4)
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
        found, sizes, curve = [], self.sizes, self.curve
        rhat = np.quantile(sizes.rhat, 1 - self.quantile, axis=1).min()
        if rhat > 1.1:
            found.append(
                f"R-hat is {rhat:.2f} or more in all pilot runs: give a larger budget"
            )
        if self.lengths is not None:
            best = choose_length(self.lengths, self.scheme, self.quantile)
            if best == len(self.lengths.num_steps) - 1:
                found.append(
                    "the longest trajectory is the best: longer ones may be better"
                )
        free = curve.step_size[(curve.efficiency / curve.trust.clip(1e-9)).argmax()]
        if free < 0.9 * curve.step_size[curve.best]:
            found.append("R-hat forbids smaller steps: a larger budget may allow them")
        if curve.best == 0:
            found.append("the smallest step is the best: smaller ones may be better")
        return found

    def __str__(self) -> str:
        """The settings, and the table of the step sizes behind them."""
        pilot, (low, high) = self.sizes, self.interval
        f, g = SCHEMES[self.scheme].rows(pilot.chains)
        rest = np.median(residual_variance(pilot.covariance(), f, g), axis=1)
        rhat = np.quantile(pilot.rhat, 1 - self.quantile, axis=1)
        found = measured_efficiency(pilot, self.scheme)
        found = np.quantile(found, self.quantile, axis=1)
        _, guess = self.curve.at(pilot.grid.step_size)
        rows = zip(*pilot.grid, pilot.acceptance, rest, rhat, found, guess, strict=True)
        lines = [
            f"{pilot.family.name}, {self.scheme}: step size {self.step_size:.3g} "
            f"({low:.2g} to {high:.2g}), {self.num_integration_steps} to a trajectory",
            f"acceptance {self.acceptance:.4f}, {self.gradients:,} gradients spent",
            "   step  leaps  accept    left  R-hat  ESS/grad  predicted",
            *(
                f"{size:7.3f}{leaps:7d}{rate:8.4f}{v:8.4f}{r:7.2f}{ess:10.3g}{p:11.3g}"
                for size, leaps, rate, v, r, ess, p in rows
            ),
        ]
        return "\n".join([*lines, *self.warnings()])

    def plot(self) -> Any:
        """Draw the evidence; returns a matplotlib figure."""
        plt = need("matplotlib.pyplot", "plot")
        pilot, scheme, quantile = self.sizes, self.scheme, self.quantile
        figure, axes = plt.subplots(1, 2, figsize=(7, 3.2))
        if self.lengths is not None:
            grid = self.lengths.grid
            found, error = efficiency_and_error(self.lengths, scheme, quantile)
            length = grid.step_size * grid.num_integration_steps
            axes[0].errorbar(length, found, 2 * error, fmt="o-")
            axes[0].axvline(self.step_size * self.num_integration_steps, color="0.7")
            axes[0].set(xlabel="trajectory length", ylabel="ESS per gradient")
        else:
            axes[0].plot(pilot.grid.step_size, pilot.acceptance, "o-")
            axes[0].axvline(self.step_size, color="0.7")
            axes[0].set(xlabel="step size", ylabel="acceptance")
        found, error = efficiency_and_error(pilot, scheme, quantile)
        curve, good = self.curve, pilot.acceptance > 0.5
        bars = (x[good] for x in (1 - pilot.acceptance, found, 2 * error))
        axes[1].errorbar(*bars, fmt="o", label="measured")
        axes[1].set_xscale("log")
        use = curve.acceptance > 0.5
        shown = 1 - curve.acceptance[use], curve.efficiency[use]
        axes[1].plot(*shown, label="predicted")
        axes[1].axvline(1 - self.acceptance, color="0.7")
        axes[1].legend()
        acceptance_axis(axes[1])
        return figure


def efficiency_and_error(
    pilot: Pilot, scheme: str, quantile: float
) -> tuple[np.ndarray, np.ndarray]:
    """A quantile of the measured ESS per gradient, and its error: two (settings,)."""

    def read(weights: np.ndarray | None = None) -> np.ndarray:
        found = measured_efficiency(pilot, scheme, weights)
        return np.quantile(found, quantile, axis=1)

    return read(), np.std([read(each) for each in redraw_chains(pilot)], axis=0)


def acceptance_axis(axis: Any) -> None:
    """Label a log axis of rejection rates with acceptance rates, from left to right."""
    low, high = sorted(axis.get_xlim())
    rates = np.array([0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999])
    shown = rates[(1 - rates > low) & (1 - rates < high)]
    axis.set_xticks(1 - shown, [f"{rate:g}" for rate in shown], size="small")
    axis.minorticks_off()
    axis.set(xlim=(high, low), xlabel="acceptance")


def check_request(scheme: str, num_chains: int, quantile: float) -> None:
    """Raise ValueError for what ``tune`` cannot do."""
    if find_scheme(scheme).stein:
        raise ValueError(
            f'{scheme} is tuned as it is without Stein features: say "'
            f'{scheme.removesuffix("+stein").replace("stein", "plain")}"'
        )
    if num_chains < 16:
        raise ValueError(
            f"{num_chains} chains are too few to tune with: use 16 or more"
        )
    if not 0 <= quantile <= 1:
        raise ValueError(
            f"quantile is {quantile}: from 0 (the worst statistic) to 1 (the best)"
        )


def recommend(
    scheme: str, lengths: Pilot | None, sizes: Pilot, quantile: float, gradients: int
) -> Tuning:
    """Settings from pilot runs: the best step size, divided into the length."""
    curve = predict_efficiency(sizes, scheme, quantile)
    size, number = float(curve.step_size[curve.best]), 1
    if lengths is not None:
        length = float(sizes.grid.step_size[0] * sizes.grid.num_integration_steps[0])
        numbers = np.array([np.floor(length / size), np.ceil(length / size)]).clip(1)
        number = int(numbers[curve.at(length / numbers)[1].argmax()])
        size = length / number
    rate = float(curve.at(size)[0])
    low, high = np.quantile(bootstrap_step_sizes(sizes, scheme, quantile), [0.05, 0.95])
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
    scheme: str,
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
        "plain", "antithetic", "control" or "cva".
    budget
        How many gradients of the target to spend, over all chains.
    quantile
        Which statistic to tune for: 0 is the worst one, 0.5 the median, 1 the best.

    Examples
    --------
    >>> from swindles.models import make_problem
    >>> from swindles.targets import skewed
    >>> from swindles.transport import laplace
    >>> target = skewed(dim=5)
    >>> to_x = laplace(target.logdensity, jnp.zeros(5))
    >>> problem = make_problem(target).through(to_x)
    >>> tuning = tune(jax.random.key(0), "control", problem, num_chains=32, budget=1e5)
    >>> 0.5 < tuning.acceptance < 1
    True
    """
    check_request(scheme, num_chains, quantile)
    keys = jax.random.split(key, 3)
    adapted = adapt_step_size(keys[0], problem, family, num_chains=num_chains)
    trial = make_trial(scheme, family, problem, adapted.positions)
    rest = max(budget - adapted.gradients, budget / 2)
    share = rest / (2 if family.has_length else 1)
    lengths, grid = None, grid_of_step_sizes(adapted.step_size)
    if family.has_length:
        tried = grid_of_lengths(adapted)
        lengths = run_pilot_for(keys[1], trial, tried, share, progress)
        best = choose_length(lengths, scheme, quantile)
        grid = grid_of_step_counts(lengths.grid, best)
    sizes = run_pilot_for(keys[2], trial, grid, share, progress)
    parts = adapted, sizes, lengths
    spent = sum(part.gradients for part in parts if part is not None)
    return recommend(scheme, lengths, sizes, quantile, spent)


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
