"""Blocks: until it is accurate.

Mirrored from book/blocks.md: edit there, then run `make mirror`.
"""

import json
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.mcmc.hmc import HMCState
from jax import Array
from scipy.stats import t as student_t

from swindles.accuracy import Estimate, Moments, add_step, empty_moments, summarize
from swindles.antithetic import mirror, pair_values
from swindles.control import feature_values
from swindles.coupling import advance, couple, hmc
from swindles.models import Flat
from swindles.pilot import SCHEMES, Plan
from swindles.stein import scores, stein_features
from swindles.transport import Affine, Transport, pull_back, standard_normal


class Goal(NamedTuple):
    """What is asked for."""

    mcse: np.ndarray | None  # (statistics,)
    relative: float | None  # in units of the posterior's standard deviation
    seconds: float | None
    gradients: float | None

    def asked(self, sd: np.ndarray) -> np.ndarray:
        """The errors asked for, from the posterior's standard deviations."""
        asked = np.full(sd.size, np.inf) if self.mcse is None else self.mcse
        if self.relative is not None:
            asked = np.minimum(asked, self.relative * np.where(sd > 0, sd, np.inf))
        return asked

    def is_spent(self, seconds: float, gradients: float) -> bool:
        """Whether the budget is used up."""
        return seconds >= (self.seconds or np.inf) or gradients >= (
            self.gradients or np.inf
        )


def make_goal(
    flat: Flat,
    mcse: Any,
    relative: float | None,
    seconds: float | None,
    gradients: float | None,
) -> Goal:
    """Check what is asked for; by default 1 % of the posterior's deviation."""
    numbers = {"relative": relative, "seconds": seconds, "gradients": gradients}
    for name, value in numbers.items():
        if value is not None and not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value}")
    if mcse is None:
        return Goal(None, 0.01 if relative is None else relative, seconds, gradients)
    size, leaves = len(flat.names), [np.ravel(x) for x in jax.tree.leaves(mcse)]
    each = np.concatenate(leaves).astype(np.float64)
    if each.size not in (1, size):
        raise ValueError(f"mcse has {each.size} entries for {size} statistics")
    if not (np.isfinite(each) & (each > 0)).all():
        raise ValueError(f"mcse must be positive, got {mcse}")
    return Goal(np.broadcast_to(each, size), relative, seconds, gradients)


def make_series(plan: Plan, feature: Callable) -> Callable[[dict], tuple[Array, Array]]:
    """From states to f(X+) and Z, each (chains, statistics)."""
    scheme = SCHEMES[plan.scheme]

    def series(states: dict[str, Any]) -> tuple[Array, Array]:
        values = pair_values(feature, states)
        result = values.mean(0)
        if "control" in scheme.chains:
            known = feature_values(feature, states).mean(0) - plan.known
            result = result - (plan.slope * known).astype(result.dtype)
        if len(plan.beta):
            z, slopes = pair_values(lambda z: z, states), scores(states)
            use = stein_features(z, slopes, plan.order)[..., : len(plan.beta)].mean(0)
            beta = jnp.asarray(plan.beta, use.dtype)
            result = result - jnp.matmul(use, beta, precision="highest")
        return values[0], result

    return series


class Sums(NamedTuple):
    """Running sums of a block of steps."""

    plus: Moments  # of f(X+)
    total: Any  # (chains, statistics): Z, less a center
    accepted: Any  # (coupled, chains): proposals
    divergent: Any  # (): trajectories that went astray
    decoupled: Any  # (): decisions that "plus" and another chain took differently


def make_fold(plan: Plan, feature: Callable, num_chains: int) -> tuple[Sums, Callable]:
    """Empty sums, and how to add a step to them."""
    series, center = make_series(plan, feature), jnp.asarray(plan.center, float)
    moments = empty_moments(center, num_chains)
    coupled = len(SCHEMES[plan.scheme].chains)
    zeros = jnp.zeros((coupled, num_chains)), *jnp.zeros((2,))
    zero = Sums(moments, moments.total, *zeros)

    def update(sums: Sums, states: dict, infos: dict) -> Sums:
        plus, result = series(states)
        accepted = jnp.stack([info.is_accepted for info in infos.values()])
        astray = jnp.stack([info.is_divergent for info in infos.values()])
        return Sums(
            add_step(sums.plus, plus),
            sums.total + (result - center),
            sums.accepted + accepted,
            sums.divergent + astray.any(0).sum(),
            sums.decoupled + (accepted.any(0) & ~accepted.all(0)).sum(),
        )

    return zero, update


ROWS = 32
# Steps in the first blocks.
FIRST_BLOCK = 10


class Run(NamedTuple):
    """The state of a run: enough to go on."""

    plan: Plan
    transport: Any  # None when it is not ours to save
    key: Any  # as plain numbers
    states: dict[str, Any]
    rows: Sums  # one row for each block that counts
    draws: Any  # (rows, chains, dim): latent positions at the ends of the rows
    length: int  # steps in a row
    steps: int  # taken so far
    dropped: int  # of those, taken before the rows begin
    gradients: float  # of the log density, in the blocks
    seconds: float  # spent
    history: Any  # (looks, 4): gradients, seconds, largest and median mcse / sd
    trails: Any  # (steps, 3): chains of the pilot along one axis
    pareto_k: float
    stuck: int
    forecast: dict[str, float]  # seconds to the goal, by scheme


def merge(rows: Sums, draws: np.ndarray) -> tuple[Sums, np.ndarray]:
    """Neighbouring rows as one."""
    center = rows.plus.center[::2]
    both = jax.tree.map(lambda x: x[::2] + x[1::2], rows)
    return both._replace(plus=both.plus._replace(center=center)), draws[1::2]


def append(old: Any, new: Any) -> Any:
    """Rows with one more row."""
    return jax.tree.map(lambda a, b: np.concatenate([a, np.asarray(b)[None]]), old, new)


def estimate_rows(run: Run) -> Estimate:
    """The estimate of the rows of a run."""
    rows, plan = run.rows, run.plan
    steps = np.asarray(rows.plus.steps, np.float64)[:, None, None]
    means = plan.center + np.asarray(rows.total, np.float64) / steps
    return summarize(rows.plus, means, plan.shared + plan.rounding**2)


def beyond_chance(difference: np.ndarray, noise: np.ndarray, level: float) -> bool:
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
    limit = student_t.isf(level / 2 / number, chains - 1)
    return bool((np.abs(difference.mean(0)) > limit * error).any())


def drift(run: Run) -> bool:
    """Whether the two halves of a run differ beyond chance, in any statistic."""
    steps, total = run.rows.plus.steps, np.asarray(run.rows.total, np.float64)
    half = len(steps) // 2
    if not half:
        return False
    first, second = (
        total[part].sum(0) / steps[part].sum()
        for part in (slice(half), slice(half, None))
    )
    return beyond_chance(second - first, run.plan.rounding, 1e-3)


def drop_half(run: Run) -> Run:
    """The run without the first half of its rows."""
    half = len(run.draws) // 2
    rows, draws = jax.tree.map(lambda x: x[half:], (run.rows, run.draws))
    return run._replace(rows=rows, draws=draws, dropped=run.dropped + half * run.length)


def bias(run: Run) -> bool:
    """Whether the swindled average differs from the plain one beyond chance."""
    rows, steps = run.rows, float(np.sum(run.rows.plus.steps))
    total = np.asarray(rows.total, np.float64) - np.asarray(rows.plus.total, np.float64)
    noise = np.sqrt(run.plan.shared + run.plan.rounding**2)
    return beyond_chance(total.sum(0) / steps, noise, 1e-4)


LEAST_ROWS = 8


def is_reached(run: Run, estimate: Estimate, goal: Goal) -> bool:
    """Whether the run is as accurate as was asked for, or as it can be."""
    asked = goal.asked(np.sqrt(estimate.variance))
    asked = np.maximum(asked, 2 * np.sqrt(run.plan.shared + run.plan.rounding**2))
    margin = 1 + 1 / np.sqrt(2 * estimate.degrees)
    if not np.isfinite(estimate.mean).all():
        return True
    return (
        len(run.draws) >= LEAST_ROWS
        and bool((margin * estimate.mcse <= asked).all())
        and np.nanmax(estimate.rhat, initial=0) <= 1.05
        and not drift(run)
    )


def make_step(plan: Plan, latent: Callable) -> Callable:
    """One step of the chains of a plan."""
    sampler = hmc(plan.step_size, plan.leaps)
    densities = {"plus": latent, "minus": mirror(latent), "control": standard_normal}
    chains = SCHEMES[plan.scheme].chains
    return couple(**{name: sampler(densities[name]) for name in chains}).step


def look(run: Run, estimate: Estimate) -> np.ndarray:
    """A line for the history of a run."""
    varies = estimate.variance > 0
    error = estimate.mcse[varies] / np.sqrt(estimate.variance[varies])
    worst, median = (error.max(), np.median(error)) if error.size else (np.nan, np.nan)
    return np.array([run.gradients, run.seconds, worst, median])


def add_block(run: Run, flow: Callable[[Run], tuple[dict, Sums]]) -> Run:
    """The run with one more block; merged, when there are too many."""
    begin = time.perf_counter()
    states, sums = jax.device_get(flow(run))
    rows = append(run.rows, sums)
    draws = append(run.draws, states["plus"].position)
    length, steps = run.length, run.steps + run.length
    if len(draws) == ROWS:
        (rows, draws), length = merge(rows, draws), 2 * length
    number = states["plus"].position.shape[0]
    return run._replace(
        states=states,
        rows=rows,
        draws=draws,
        length=length,
        steps=steps,
        gradients=run.gradients + run.length * number * run.plan.gradients,
        seconds=run.seconds + time.perf_counter() - begin,
    )


def make_flow(run: Run, flat: Flat, transport: Transport) -> Callable:
    """What takes the next block of steps of a run; compiled at the first call."""
    latent = pull_back(flat.logdensity, transport)
    step = make_step(run.plan, latent)
    number = len(run.states["plus"].position)
    zero, update = make_fold(run.plan, lambda z: flat.statistic(transport(z)), number)

    def flow(run: Run) -> tuple[dict, Sums]:
        key = jax.random.wrap_key_data(jnp.asarray(run.key))
        first, last = run.steps, run.steps + run.length
        sums = jax.tree.map(jnp.array, zero)
        return advance(key, run.states, sums, first, last, step, update, store=False)

    return flow


# A run is saved when this many seconds have passed since it was saved last.
SAVE_EVERY = 5.0


def write_run(path: str | Path, run: Run, about: dict) -> None:
    """Write a run to a file, all of it or nothing."""
    leaves = jax.tree.leaves(run)
    is_array = [isinstance(leaf, np.ndarray | np.generic | Array) for leaf in leaves]
    arrays = {str(i): x for i, x in enumerate(leaves) if is_array[i]}
    others = {str(i): x for i, x in enumerate(leaves) if not is_array[i]}
    ours = isinstance(run.transport, Affine)
    head = {"swindles": 1, "scheme": run.plan.scheme, "ours": ours, "about": about}
    path = Path(path)
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    with draft.open("wb") as file:
        np.savez(file, head=json.dumps(head | {"others": others}), **arrays)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def blank(scheme: str, ours: bool) -> Any:
    """The structure of a run."""
    zero: Any = 0
    plan, moments = Plan(*[zero] * len(Plan._fields)), Moments(*[zero] * 4)
    states = {name: HMCState(*[zero] * 3) for name in SCHEMES[scheme].chains}
    rows = Sums(moments, *[zero] * 4)
    transport = Affine(zero, zero) if ours else None
    rest: Any = [zero] * (len(Run._fields) - 6) + [dict.fromkeys(SCHEMES, 0.0)]
    return jax.tree.structure(Run(plan, transport, 0, states, rows, *rest))


def read_run(path: str | Path) -> tuple[Run, dict]:
    """Read what ``write_run`` wrote, and what it is about."""
    try:
        with np.load(path, allow_pickle=False) as file:
            head = json.loads(str(file["head"]))
            arrays = {int(k): file[k] for k in file.files if k != "head"}
        leaves = arrays | {int(k): x for k, x in head["others"].items()}
        structure = blank(head["scheme"], head["ours"])
        ordered = [leaves[i] for i in range(len(leaves))]
        return jax.tree.unflatten(structure, ordered), head["about"]
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as problem:
        raise ValueError(f"{path} is not a run that was saved by swindles") from problem
