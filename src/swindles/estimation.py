"""Estimate: the front door.

Mirrored from book/estimation.md: edit there, then run `make mirror`.
"""

import hashlib
import html
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.mcmc.hmc import HMCState
from jax import Array
from jaxtyping import Bool, Float, Int
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from swindles.accuracy import (
    Estimate,
    Moments,
    beyond_chance,
    block_means,
    heavy_tails,
    rank_rhat,
    summarize,
)
from swindles.antithetic import Sums, fold_series
from swindles.choice import (
    CANDIDATES,
    GOOD_K,
    LEAST_EFFICIENCY,
    Choice,
    choose_scheme,
    count_work,
    find_map,
    key_seed,
)
from swindles.coupling import (
    Rates,
    Run,
    add_block,
    begin_run,
    coupled,
    hmc,
    take_steps,
)
from swindles.importance import (
    FARTHEST,
    SEQUENCES,
    RoundProposal,
    SecondLook,
    Weighted,
    beyond_reach,
    fit_highest,
    heavy_statistics,
    largest_jump,
    look_again,
    other_mode,
    weigh_more,
    weigh_points,
)
from swindles.mixture import LARGEST_MIXTURE, Mixture, find_mixture, missed_mode
from swindles.models import Model, Problem, as_floats, make_problem, need
from swindles.schemes import SCHEMES, Plan, plan_series
from swindles.stein import affordable_order
from swindles.transport import (
    Affine,
    Evaluator,
    Gaussian,
    Transport,
    assess_map,
    mirrored_normal,
    pareto_k,
    unit_map,
    weight_efficiency,
)


class Goal(NamedTuple):
    """What is asked for."""

    mcse: np.ndarray | None  # (statistics,)
    relative: float | None  # in units of the posterior's standard deviation
    seconds: float | None
    gradients: float | None

    def errors(self, sd: np.ndarray) -> np.ndarray:
        """The errors asked for, from the posterior's standard deviations."""
        found = np.full(sd.size, np.inf) if self.mcse is None else self.mcse
        if self.relative is not None:
            moving = np.where(sd > 0, np.where(np.isfinite(sd), sd, 0.0), np.inf)
            found = np.minimum(found, self.relative * moving)
        return found

    def without(self, seconds: float, gradients: float) -> "Goal":
        """The same, when so much of the budget is used up."""
        time = self.seconds and max(self.seconds - seconds, 1e-3)
        work = self.gradients and max(self.gradients - gradients, 1.0)
        return self._replace(seconds=time, gradients=work)

    def is_spent(self, seconds: float, gradients: float) -> bool:
        """Whether the budget is used up."""
        return seconds >= (self.seconds or np.inf) or gradients >= (
            self.gradients or np.inf
        )


def positive(name: str, value: Any) -> float | None:
    """A positive number, or None; or a ValueError.

    Examples
    --------
    >>> positive("seconds", np.int64(3)), positive("seconds", None)
    (3.0, None)
    """
    if value is None:
        return None
    try:
        number = np.nan if isinstance(value, str) or np.ndim(value) else float(value)
    except (TypeError, ValueError):
        number = np.nan
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be one positive number, got {value!r}")
    return number


def spread_errors(problem: Problem, mcse: Any) -> Float[np.ndarray, " statistics"]:
    """The standard error asked for of each statistic; or a ValueError.

    ``mcse`` is one number, or as many as there are statistics; in the shape of the
    statistics, or by their names.

    Examples
    --------
    >>> problem = make_problem(Model(lambda x: -x["a"] @ x["a"], {"a": jnp.ones(2)}))
    >>> for mcse in (0.1, [0.1, 0.2], {"a": 0.1}, {"a[1]": 0.2, "a[0]": 0.1}):
    ...     print(spread_errors(problem, mcse))
    [0.1 0.1]
    [0.1 0.2]
    [0.1 0.1]
    [0.1 0.2]
    """
    names, parts, shapes = problem.names, [mcse], [(len(problem.names),)]
    leaves, form = jax.tree.flatten(mcse, is_leaf=lambda x: isinstance(x, list))
    if str(form) == str(jax.tree.structure(problem.shapes)):
        parts, shapes = leaves, [leaf.shape for leaf in jax.tree.leaves(problem.shapes)]
    elif isinstance(mcse, dict):
        if set(mcse) != set(names):
            raise ValueError(f"mcse has {list(mcse)}, and the statistics are {names}")
        parts = [[mcse[name] for name in names]]
    try:
        pairs = zip(parts, shapes, strict=True)
        each = [np.broadcast_to(np.asarray(x, float), at).ravel() for x, at in pairs]
    except (TypeError, ValueError) as error:
        entries = sum(np.size(x) for x in leaves)
        raise ValueError(
            f"mcse must be positive numbers, for {len(names)} statistics; it has "
            f"{entries} entries: {mcse!r}"
        ) from error
    found = np.concatenate(each)
    if not (np.isfinite(found) & (found > 0)).all():
        raise ValueError(f"mcse must be positive, got {mcse}")
    return found


def make_goal(
    problem: Problem, mcse: Any, relative: Any, seconds: Any, gradients: Any
) -> Goal:
    """Check what is asked for; by default 1 % of the posterior's deviation."""
    relative = positive("relative", relative)
    budget = positive("seconds", seconds), positive("gradients", gradients)
    if mcse is None:
        return Goal(None, 0.01 if relative is None else relative, *budget)
    return Goal(spread_errors(problem, mcse), relative, *budget)


class Stage(NamedTuple):
    """What a stage of a call has cost."""

    seconds: float
    gradients: float


class Clock:
    """Seconds and gradients of a call, stage by stage; and its line of progress."""

    def __init__(self) -> None:
        """Start it."""
        self.begin = time.perf_counter()
        self.stages: dict[str, Stage] = {}
        self.bar = tqdm(total=100, delay=2, leave=False)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.begin

    def all_stages(self) -> dict[str, Stage]:
        """The stages, and what is left of the time: they add up."""
        rest = self.seconds - sum(stage.seconds for stage in self.stages.values())
        return self.stages | {"other": Stage(rest, 0.0)}

    def __enter__(self) -> "Clock":
        """Nothing: it is running."""
        return self

    def __exit__(self, *problem: Any) -> None:
        """Close the line of progress."""
        self.bar.close()

    @contextmanager
    def stage(self, name: str, count: Callable[[], float] = lambda: 0) -> Iterator:
        """Add what is done inside to a stage; ``count`` tells the gradients so far."""
        self.bar.set_description(name, refresh=False)
        begin, before = time.perf_counter(), count()
        try:
            yield
        finally:
            old = self.stages.get(name, Stage(0.0, 0.0))
            seconds = old.seconds + time.perf_counter() - begin
            self.stages[name] = Stage(seconds, old.gradients + count() - before)


class Findings(NamedTuple):
    """What is known of the posterior before anything is run on it.

    Parameters
    ----------
    pareto_k, efficiency
        Of the map's weights.
    jump
        The largest jump of the log density; infinite if it is cut off.
    other_mode
        How far off another mode is; infinite if none was found.
    heavy
        Which statistics have tails too heavy for an error.
    noise
        What rounding may change in the log density, in nats.

    Examples
    --------
    >>> Findings(0.3, 0.9, jump=0.0, other_mode=np.inf, heavy=np.zeros(2, bool)).jump
    0.0
    """

    pareto_k: float
    efficiency: float
    jump: float
    other_mode: float
    heavy: Bool[np.ndarray, " statistics"]
    noise: float = 0.0


def inspect_posterior(key: Array, evaluate: Evaluator, found: Gaussian) -> Findings:
    """Look at a posterior through a map: is the map good, and what does it not see?"""
    rng = np.random.default_rng(key_seed(key, 2))
    jump = largest_jump(rng, evaluate, found.transport)
    away = other_mode(rng, evaluate, found.transport)
    heavy = heavy_statistics(rng, evaluate, found.transport)
    here = evaluate(found.transport, np.zeros((1, evaluate.dim))).logdensity[0]
    noise = evaluate.eps * abs(float(here))
    return Findings(found.pareto_k, found.efficiency, jump, away, heavy, noise)


class PointJob(NamedTuple):
    """Weighted points on their way to an accuracy: enough to go on with it."""

    goal: Goal
    transport: Any  # None when it is not ours to save
    key: Any  # as plain numbers
    run: Weighted
    beyond: Any  # (statistics,): what lies beyond the reach of the points
    history: Any  # (blocks, 4): gradients, seconds, largest and median mcse / sd
    findings: Findings
    stages: dict[str, Stage]
    mixture: Mixture | None = None  # what points are drawn from, if not from the map
    reason: str = ""  # why the map itself would not do
    whitened: bool = False  # whether its coordinates are standard normal a priori
    second: SecondLook | None = None  # what other points say
    used: Stage = Stage(0.0, 0.0)  # by a call that was cut short

    @property
    def scheme(self) -> str:
        """What it is called."""
        return "importance"

    @property
    def gradients(self) -> float:
        """Of the log density, at the points."""
        return float(self.run.gradients)

    @property
    def draws(self) -> Float[np.ndarray, "rows chains dim"]:
        """A few draws, in latent space."""
        return self.run.draws

    @property
    def least_error(self) -> Float[np.ndarray, " statistics"]:
        """What more points do not make smaller."""
        return self.run.rounding

    def estimate(self) -> Estimate:
        """What the points have come to."""
        found = self.run.estimate()
        squared = found.mcse**2 + self.beyond**2 + self.run.rounding**2
        with np.errstate(divide="ignore", invalid="ignore"):
            ess = found.variance / squared
        return found._replace(mcse=np.sqrt(squared), ess=ess)

    def is_settled(self, estimate: Estimate) -> bool:
        """Whether nothing but the error decides when to stop."""
        return True

    def headline(self) -> str:
        """What was done, in a line."""
        quality = f"Pareto k {self.run.pareto_k.max():.2f}"
        worth = f"weights worth {self.run.efficiency.mean():.0%}"
        line = f"importance, {self.run.gradients} points, {quality}, {worth}: no chain"
        if self.mixture is not None:
            line += f"\na mixture of {len(self.mixture.shares)}, since {self.reason}"
        if self.second is not None and self.second.apart <= 1:
            line += (
                "\nother points, with heavy tails, agree to "
                f"{self.second.digits:.1f} digits of a deviation"
            )
        return line


class PointEngine:
    """What takes the next block of points."""

    stage = "importance"

    def __init__(self, job: PointJob, problem: Problem) -> None:
        """Prepare a job; ``problem`` is in x, or in the space of a map of one's own."""
        self.evaluate = problem.evaluator()
        own = job.transport is None
        self.inner = unit_map(np.zeros(problem.dim)) if own else job.transport

    @property
    def gradients(self) -> float:
        """So far, over all blocks and guards."""
        return self.evaluate.gradients

    def add_block(self, job: PointJob) -> PointJob:
        """The job with one more block, of about as many points as it needs."""
        seed, last = [*job.key, len(job.run.pairs)], float(job.run.pairs[-1])
        needed = 1.2 * error_ratio(job, job.estimate()) ** 2 - 1
        needed = np.sum(job.run.pairs) * (needed if needed > 0 else 1)
        pairs = 2 ** int(np.ceil(np.log2(np.clip(needed, last / 2, 2 * last))))
        parts, pairs = (self.evaluate, self.inner), min(pairs, MOST_PAIRS)
        run = weigh_more(seed, *parts, job.run, pairs, job.mixture)
        rng = np.random.default_rng([*seed, 1])
        beyond = beyond_reach(rng, *parts, run, job.mixture)
        return mark_heavy(job._replace(run=run, beyond=beyond))


# Pairs of points in a sequence of one block, at the most.
MOST_PAIRS = 2**13


def first_points(
    request: Any,
    evaluate: Evaluator,
    transport: Affine,
    findings: Findings,
    mixture: Mixture | None = None,
    reason: str = "",
) -> PointJob:
    """A job with a first block of points, of the map or of a mixture."""
    dim, goal = evaluate.dim, request.goal
    seed = key_seed(request.key, 3 if mixture is None else 4)
    wanted = min(5e6 / dim, goal.gradients or np.inf) / (2 * SEQUENCES)
    pairs = int(2 ** np.clip(np.floor(np.log2(wanted)), 6, 9))
    order = affordable_order(dim, 3 * SEQUENCES * pairs)
    order = "none" if findings.jump else order
    run = weigh_points([*seed, 0], evaluate, transport, pairs, order, mixture)
    rng = np.random.default_rng([*seed, 0, 1])
    beyond = beyond_reach(rng, evaluate, transport, run, mixture)
    history = np.zeros((0, 4))
    first = goal, transport, seed, run, beyond, history
    return PointJob(*first, findings, {}, mixture, reason)


def mixture_points(
    request: Any,
    evaluate: Evaluator,
    transport: Affine,
    findings: Findings,
    reason: str,
) -> PointJob | None:
    """The same, of a mixture that is fitted for it; None if that is no better."""
    rng = np.random.default_rng(key_seed(request.key, 5))
    best = find_mixture(rng, evaluate, transport)
    if best is None or is_poor(best):
        return None
    k, efficiency = best.pareto_k, best.efficiency
    findings = findings._replace(pareto_k=k, efficiency=efficiency, other_mode=np.inf)
    inputs = evaluate, transport
    job = first_points(request, *inputs, findings, best.mixture, reason)
    weight = job.run.weight.sum() / np.sum(job.run.pairs) / SEQUENCES
    level = job.run.peak + np.log(weight)
    away = missed_mode(rng, *inputs, best.mixture, level)
    return mark_heavy(job._replace(findings=findings._replace(other_mode=away)))


def mark_heavy(job: PointJob) -> PointJob:
    """A job that knows for which statistics the tails of its mixture are too thin.

    The parts have heavy tails: what they do not reach, no number of points will.
    """
    lost = job.beyond > np.sqrt(job.run.estimate().variance)
    if job.mixture is None or not lost.any():
        return job
    heavy = job.findings.heavy | lost
    return job._replace(findings=job.findings._replace(heavy=heavy))


def is_poor(found: Any) -> bool:
    """Whether weights are hopeless, by their Pareto k and their worth."""
    return not (found.pareto_k <= 1 and found.efficiency > 0.01)


def why_not_points(job: PointJob, clock: Clock) -> str:
    """Why weighted points will not do, in words; empty if they will."""
    run, findings, goal = job.run, job.findings, job.goal
    estimate = job.estimate()
    errors = goal.errors(np.sqrt(estimate.variance))
    errors = np.where(findings.heavy, np.inf, errors)  # hopeless, and flagged
    spent = clock.stages.get("importance", Stage(1e-3, 0.0)).seconds
    with np.errstate(divide="ignore", invalid="ignore"):
        longer = np.nanmax((estimate.mcse / errors) ** 2, initial=0.0) * spent
    if findings.other_mode < np.inf:
        return f"another mode is {findings.other_mode:.0f} standard deviations away"
    if not run.pareto_k.max() <= GOOD_K:
        return f"the map's tails are too thin: Pareto k is {run.pareto_k.max():.2f}"
    if run.efficiency.min() < LEAST_EFFICIENCY:
        return f"the map's weights are worth only {run.efficiency.min():.1%}"
    if run.is_biased():
        return "the Stein features do not average to zero"
    if not np.isfinite(estimate.mcse).all():
        return "an estimate from the points is not finite"
    if job.mixture is None and (job.beyond > np.sqrt(estimate.variance)).any():
        return "the tails decide, and a Gaussian's points do not reach them"
    if longer > (goal.seconds or np.inf) and run.efficiency.min() < 0.3:
        return "weighted points would take too long"
    return ""


# Rows of sums that are kept; more are merged.
ROWS = 32
# Steps in the first blocks.
FIRST_BLOCK = 10
# Blocks before a run may end.
LEAST_ROWS = 8
# R-hat of the ranks of the draws that are kept; with few of them it has noise.
MOST_RHAT = 1.1


class Job(NamedTuple):
    """A run on its way to an accuracy: enough to go on with it."""

    plan: Plan
    goal: Goal
    step_size: float
    num_integration_steps: int
    transport: Any  # None when it is not ours to save
    key: Any  # as plain numbers
    run: Run
    draws: Any  # (rows, chains, dim): latent positions at the ends of the rows
    length: int  # steps in a row
    dropped: int  # steps taken before the rows begin
    gradients: float  # of the log density, in the blocks
    history: Any  # (blocks, 4): gradients, seconds, largest and median mcse / sd
    findings: Findings
    stages: dict[str, Stage]
    stuck: int
    forecast: dict[str, float]  # operations to the goal, by scheme
    reason: str  # why chains were run
    whitened: bool = False  # whether its coordinates are standard normal a priori
    further: str = ""  # a statistic of which finer chains find other extremes
    flow: dict | None = None  # the map, when it is a flow that was fitted on the way
    used: Stage = Stage(0.0, 0.0)  # by a call that was cut short

    @property
    def swindled(self) -> Moments:
        """The sums of Z."""
        rows = self.run.rows
        return rows.plus if rows.swindled is None else rows.swindled

    @property
    def gradients_per_step(self) -> int:
        """Of the log density, for one chain or pair of chains."""
        return self.num_integration_steps * SCHEMES[self.plan.scheme].num_targets

    @property
    def scheme(self) -> str:
        """The name of the scheme."""
        return self.plan.scheme

    @property
    def least_error(self) -> Float[np.ndarray, " statistics"]:
        """What more steps do not make smaller."""
        return np.sqrt(self.plan.shared_variance + self.plan.rounding**2)

    def estimate(self) -> Estimate:
        """What the run has come to."""
        noise = self.least_error**2
        return summarize(self.run.rows.plus, block_means(self.swindled), noise)

    def is_settled(self, estimate: Estimate) -> bool:
        """Whether nothing but the error decides when to stop."""
        mixed = np.nanmax(estimate.rhat, initial=0) <= 1.05
        mixed = mixed and len(self.draws) >= LEAST_ROWS and not has_drift(self)
        return mixed and np.nanmax(rank_rhat(self.draws), initial=0) <= MOST_RHAT

    def headline(self) -> str:
        """What was done, in a line."""
        rates, why = self.run.rows.rates, f": {self.reason}" if self.reason else ""
        chains, steps = rates.divergent.shape[1], int(np.sum(rates.steps))
        return f"{self.scheme}, {chains} chains x {steps} steps{why}"


class Engine:
    """What takes the next block of a job; programs compiled for it die with it."""

    stage = "sampling"

    def __init__(self, job: Job, problem: Problem) -> None:
        """Prepare a job on a problem in latent space."""
        sampler = hmc(job.step_size, job.num_integration_steps)
        scheme = SCHEMES[job.plan.scheme]
        self.algorithm = scheme.build(sampler, problem.logdensity)
        series = plan_series(job.plan, problem.statistic)
        self.fold = fold_series(series, job.run.states, job.plan.center)
        self.gradients = 0.0

    def begin(self, job: Job) -> Job:
        """The job with empty rows."""
        return job._replace(run=begin_run(job.run.states, self.fold[0]))

    def add_block(self, job: Job) -> Job:
        """The job with one more block; rows are merged, when there are too many."""
        key = jax.random.wrap_key_data(jnp.asarray(job.key))
        run = add_block(key, job.run, self.algorithm, self.fold, job.length)
        run = run._replace(states=jax.device_get(run.states))
        position = run.states.plus.position
        work = job.length * len(position) * job.gradients_per_step
        self.gradients += work
        job = job._replace(
            run=run,
            draws=np.concatenate([job.draws, position[None]]),
            gradients=job.gradients + work,
        )
        if len(job.draws) == ROWS:
            job = merge_rows(job)
        return drop_half(job) if len(job.draws) >= 16 and has_drift(job) else job


def merge_rows(job: Job) -> Job:
    """The job with neighbouring rows as one, and blocks of twice the length."""

    def merge(moments: Any) -> Any:
        if moments is None:
            return None
        both = Moments(*(x[::2] + x[1::2] for x in moments))
        return both._replace(center=moments.center[::2])

    rows = job.run.rows
    rates = jax.tree.map(lambda x: x[::2] + x[1::2], rows.rates)
    merged = Sums(merge(rows.plus), merge(rows.swindled), rates)
    run = job.run._replace(rows=merged)
    return job._replace(run=run, draws=job.draws[1::2], length=2 * job.length)


def has_drift(job: Job) -> bool:
    """Whether the two halves of a run differ beyond chance, in any statistic."""
    steps, total = job.swindled.steps, np.asarray(job.swindled.total, np.float64)
    half = len(steps) // 2
    if not half:
        return False
    first, second = (
        total[part].sum(0) / steps[part].sum()
        for part in (slice(half), slice(half, None))
    )
    return beyond_chance(second - first, job.plan.rounding, 1e-3)


def drop_half(job: Job) -> Job:
    """The job without the first half of its rows."""
    half = len(job.draws) // 2
    rows = jax.tree.map(lambda x: x[half:], job.run.rows)
    return job._replace(
        run=job.run._replace(rows=rows),
        draws=job.draws[half:],
        dropped=job.dropped + half * job.length,
    )


def has_bias(job: Job) -> bool:
    """Whether the swindled average differs from the plain one beyond chance."""
    plus, swindled = job.run.rows.plus, job.swindled
    apart = np.asarray(swindled.total, np.float64) - np.asarray(plus.total, np.float64)
    noise = np.sqrt(job.plan.shared_variance + job.plan.rounding**2)
    return beyond_chance(apart.sum(0) / float(np.sum(plus.steps)), noise, 1e-4)


def error_ratio(job: Job | PointJob, estimate: Estimate) -> float:
    """The largest error, with a margin, in units of what is small enough."""
    errors = job.goal.errors(np.sqrt(estimate.variance))
    errors = np.where(job.findings.heavy, np.inf, errors)  # hopeless, and flagged
    margin = 1 + 1 / np.sqrt(2 * estimate.degrees)
    enough = np.maximum(errors, 2 * job.least_error)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = margin * estimate.mcse / enough
    return float(np.where(estimate.mcse == 0, 0.0, ratio).max())


def is_reached(job: Job | PointJob, estimate: Estimate) -> bool:
    """Whether the run is as accurate as was asked for, or as it can be."""
    if not np.isfinite(estimate.mean).all():
        return True
    return error_ratio(job, estimate) <= 1 and job.is_settled(estimate)


def add_history(job: Any, estimate: Estimate, seconds: float) -> Any:
    """The job with one more line in its history."""
    varies = estimate.variance > 0
    error = estimate.mcse[varies] / np.sqrt(estimate.variance[varies])
    worst, median = (error.max(), np.median(error)) if error.size else (np.nan, np.nan)
    line = np.array([job.gradients, seconds, worst, median])
    return job._replace(history=np.concatenate([job.history, line[None]]))


# Fewer decouplings than this say too little about the error they make.
FEW_DECOUPLINGS = 30


def chain_warnings(job: Job) -> list[str]:
    """What the chains did that speaks against them, in words."""
    rates, found = job.run.rows.rates, []
    steps, chains = np.sum(rates.steps), rates.divergent.shape[1]
    late = [x[len(x) // 2 :].sum(0) == 0 for x in rates.accepted.values()]
    idle = int(np.any(late, axis=0).sum())
    if idle:
        found.append(f"{idle} of {chains} chains are stuck: a smaller step may help")
    astray = float(np.sum(rates.divergent) / steps / chains)
    if astray > 0.01:
        found.append(
            f"{astray:.0%} of the trajectories diverge: the log density is very steep "
            "somewhere, or not finite"
        )
    apart = int(sum(np.sum(x) for x in rates.decoupled.values()))
    if 0 < apart < FEW_DECOUPLINGS:
        found.append(f"only {apart} decouplings: the error itself is not well known")
    if has_drift(job):
        found.append("the two halves of the run differ: the chains are still moving")
    if has_bias(job):
        found.append(
            "the swindled average is not that of the chain: the density is cut off, or "
            'a chain is lost; scheme="plain" is safe'
        )
    return found


# Nats that rounding may change in the log density.
MOST_NOISE = 0.1


def posterior_warnings(job: Any) -> list[str]:
    """What speaks against any answer on this posterior, in words."""
    findings, found = job.findings, finer_warnings(job)
    if findings.noise > MOST_NOISE:
        found.append(
            f"rounding changes the log density by {findings.noise:.1g}: subtract a "
            'constant from it, or compute in double precision, dtype="float64"'
        )
    if findings.other_mode < np.inf:
        found.append(
            f"another mode was found, {findings.other_mode:.0f} standard deviations "
            "away, and its share of the posterior is not known: start there, too"
        )
    if findings.heavy.any():
        found.append(
            f"the density's tails are too heavy for {findings.heavy.sum()} of the "
            "statistics: they have no variance, or hardly one, and so no error"
        )
    return found


# Share of points that may be left out without a word.
MOST_UNDEFINED = 1e-3


def point_warnings(job: PointJob) -> list[str]:
    """What speaks against weighted points, in words."""
    run, found = job.run, []
    if not run.pareto_k.max() <= GOOD_K:
        found.append(
            f"Pareto k of the weights is {run.pareto_k.max():.2f}: the map's tails are "
            "too thin; leave the scheme to `estimate`"
        )
    if run.undefined.max() > MOST_UNDEFINED:
        found.append(
            f"the log density is NaN at {run.undefined.max():.1%} of the points: those "
            "places were left out; mend the density, or let it say minus infinity"
        )
    if run.efficiency.min() * run.gradients < 200:
        found.append("a few points have most of the weight: leave the scheme open")
    if run.is_biased():
        found.append(
            "the Stein features do not average to zero: the density is cut off, or the "
            'weights miss a part of it; scheme="plain" is safe'
        )
    if job.second is not None and job.second.apart > 1:
        found.append(
            "other points, with heavy tails, give another answer, "
            f"{job.second.apart:.1f} times as far off as chance allows: the weights "
            'miss a part; try scheme="plain"'
        )
    return found


def draw_warnings(job: Job, problem: Problem) -> list[str]:
    """What the draws that were kept say against the chains, in words."""
    draws = jnp.asarray(job.draws.reshape(-1, problem.dim))
    see = jax.jit(lambda z: jax.lax.map(problem.statistic, z, batch_size=256))
    values, found = np.asarray(see(draws), np.float64), []
    heavy = heavy_tails(values)
    if heavy.any():
        first = problem.names[int(heavy.argmax())]
        found.append(
            f"tails of {heavy.sum()} statistics ({first}) are too heavy for an error"
        )
    if len(job.draws) < LEAST_ROWS:
        return found
    rhat = np.nan_to_num(rank_rhat(values.reshape(*job.draws.shape[:2], -1)))
    slow = rhat > MOST_RHAT
    if slow.any():
        found.append(
            f"{slow.sum()} statistics ({problem.names[int(rhat.argmax())]}) are not "
            f"mixed: R-hat of ranks is up to {rhat.max():.2f}; a longer run may help"
        )
    return found


# Ends to look at, of all statistics: those where the draws go farthest.
MOST_ENDS = 4


def far_ends(
    values: Float[np.ndarray, "draws statistics"],
) -> tuple[Int[np.ndarray, " ends"], Float[np.ndarray, " ends"]]:
    """Where draws go farthest, in standard deviations: statistics, and signs.

    Examples
    --------
    >>> draws = np.array([[0.0, 0, 1], [0, 1, 0], [0, 0, -9], [9, 0, 0], [0, 0, 0]])
    >>> [part.tolist() for part in far_ends(draws)]
    [[0, 1, 2, 2], [1.0, 1.0, -1.0, 1.0]]
    """
    deviation = values.std(0)
    away = (values - values.mean(0)) / np.where(deviation > 0, deviation, np.inf)
    reach = np.concatenate([away.max(0), -away.min(0)])
    best = np.argsort(-reach, kind="stable")[:MOST_ENDS]
    number = values.shape[1]
    return best % number, np.where(best < number, 1.0, -1.0)


def range_program(problem: Problem) -> Callable:
    """From a key, places, settings and a number of steps to how far HMC gets.

    The largest and the smallest values of the statistics: (chains, statistics) each.
    """

    def ranges(key: Array, z: Array, size: float, leaps: int, steps: int) -> Any:
        algorithm = hmc(size, leaps)(problem.logdensity)
        see = jax.vmap(problem.statistic)

        def update(sums: Any, states: Any, infos: Any) -> Any:
            now = see(states.position)
            return jnp.maximum(sums[0], now), jnp.minimum(sums[1], now)

        states, here = jax.vmap(algorithm.init)(z), see(z)
        end = take_steps(key, states, (here, here), 0, steps, algorithm.step, update)
        return end[1]

    return jax.jit(ranges)


# Parts of a step that the smaller ones are, and the probability of a false alarm.
FINER, FALSE_ALARM = 8, 1e-4


def further_with_finer_steps(job: Job, problem: Problem, share: float = 1.0) -> str:
    """The statistic of which smaller steps find farther extremes; empty if none.

    For a ``share`` of the gradients that one chain of the run has taken.
    """
    from scipy.stats import hypergeom  # slow to import

    draws = np.asarray(job.draws).reshape(-1, problem.dim)
    see = jax.jit(lambda z: jax.lax.map(problem.statistic, z, batch_size=256))
    values = np.asarray(see(jnp.asarray(draws)))
    which, sign = far_ends(values)
    size = job.draws.shape[1] // len(which)
    ends = np.argsort(-sign * values[:, which], axis=0, kind="stable")[:size]
    far = (sign * values[:, which]).max(0)
    steps = max(int(share * len(job.draws) * job.length / (1 + FINER)), 20)
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(job.key)), 1)
    program, gone = range_program(problem), []
    for parts in (1, FINER):
        settings = job.step_size / parts, job.num_integration_steps * parts
        found = program(key, jnp.asarray(draws[ends.T.ravel()]), *settings, steps)
        high, low = (np.asarray(x).reshape(len(which), size, -1) for x in found)
        reached = np.where(sign[:, None, None] > 0, high, -low)
        mine = np.take_along_axis(reached, which[:, None, None], 2)[..., 0]
        gone.append((mine > far[:, None]).sum(1))
    coarse, fine = gone
    chance = hypergeom.sf(fine - 1, 2 * size, coarse + fine, size)
    least = int(chance.argmin())
    return problem.names[which[least]] if chance[least] < FALSE_ALARM else ""


def finer_warnings(job: Any) -> list[str]:
    """What chains with smaller steps have shown, in words."""
    if not getattr(job, "further", ""):
        return []
    return [
        f"chains with smaller steps find other extremes of {job.further}: the ends of "
        "the posterior are missing; other coordinates or a flow may help"
    ]


def density_notes(job: Job | PointJob) -> list[str]:
    """What the density has led to, in words."""
    jump, found = job.findings.jump, []
    if jump:
        how = "is cut off" if jump == np.inf else f"jumps by {jump:.2g}"
        found.append(f"the log density {how}: no Stein features were used")
    if job.whitened:
        found.append("in coordinates that are standard normal under the prior")
    return found


def point_notes(job: PointJob, estimate: Estimate) -> list[str]:
    """What is good to know of weighted points, in words."""
    found = density_notes(job)
    if (estimate.mcse < 1.5 * job.run.rounding).any():
        found.append('some errors are of the arithmetic: dtype="float64" may help')
    if (job.beyond > 0.7 * estimate.mcse).any():
        found.append("some errors are those of tails that no point has reached")
    return found


def job_notes(job: Job, estimate: Estimate) -> list[str]:
    """What is good to know, in words."""
    found, plan = density_notes(job), job.plan
    if (estimate.mcse < 1.5 * plan.rounding).any():
        found.append('some errors are of the arithmetic: dtype="float64" may help')
    if (estimate.mcse < 1.5 * np.sqrt(plan.shared_variance)).any():
        found.append(
            "some errors are those of the control's mean, and stay as they are"
        )
    k = job.findings.pareto_k
    if job.flow is not None:
        found.append(
            "a flow was fitted: keep it with swindles.neutra.save_map(path, "
            "report.transport), and give it as transport= the next time"
        )
    if k > GOOD_K and job.flow is None:
        found.append(
            f"the posterior is far from the map (Pareto k {k:.1f}): a flow may help, "
            "see swindles.neutra.fit_flow"
        )
    if job.stuck:
        found.append(f"{job.stuck} chains were stuck at their start and began anew")
    if job.dropped:
        found.append(f"the first {job.dropped} steps were dropped as warm-up")
    return found


# Longer tables are cut.
MOST_LINES = 40


COLUMNS = ("", "mean", "error", "sd", "ESS", "R-hat")


def round_to_error(value: float, error: float) -> str:
    """A number, up to the second digit of its error.

    Examples
    --------
    >>> round_to_error(1.23456, 0.012), round_to_error(1.0, 0.0)
    ('1.235', '1')
    """
    if not np.isfinite(error) or error <= 0:
        return f"{value:.6g}"
    places = int(np.clip(1 - np.floor(np.log10(error)), 0, 12))
    return f"{value:.{places}f}"


@dataclass(frozen=True, repr=False, eq=False)
class Report:
    """Expectations with their errors, and how they came about.

    It prints as a table. ``mean``, ``mcse``, ``sd``, ``ess`` and ``rhat`` have the
    shape of the statistics; ``names`` are theirs. ``reached`` says whether the errors
    are what was asked for, ``trusted`` whether no guard speaks against them,
    ``warnings`` and ``notes`` why, in words. ``plot()`` draws the error against the
    work and the coupled chains. ``to_dict()``, ``to_pandas()`` and ``to_arviz()``
    export it; the last one has draws, evenly spaced over the run.

    Examples
    --------
    >>> report = estimate(lambda x: -jnp.sum(jnp.cosh(x)), jnp.zeros(2), relative=0.1)
    >>> report.trusted, sorted(report.to_dict())[:3]
    (True, ['ess', 'mcse', 'mean'])
    """

    estimate: Estimate
    job: Job | PointJob
    names: list[str]
    reached: bool
    warnings: list[str]
    notes: list[str]
    about: dict[str, Any] = field(default_factory=dict)
    problem: Problem | None = None  # in x; None when read from a file without a model
    transport: Any = None

    @property
    def trusted(self) -> bool:
        """Whether no guard speaks against the numbers."""
        return not self.warnings

    def shaped(self, numbers: Float[np.ndarray, " statistics"]) -> Any:
        """Numbers in the shape of the statistics; by name, without a model."""
        if self.problem is not None:
            return self.problem.restore(numbers)
        return dict(zip(self.names, np.asarray(numbers).tolist(), strict=True))

    @property
    def mean(self) -> Any:
        """The expectations."""
        return self.shaped(self.estimate.mean)

    @property
    def mcse(self) -> Any:
        """The standard errors of the expectations."""
        return self.shaped(self.estimate.mcse)

    @property
    def sd(self) -> Any:
        """The standard deviations of the statistics under the posterior."""
        return self.shaped(np.sqrt(self.estimate.variance))

    @property
    def ess(self) -> Any:
        """Independent draws that would give these errors."""
        return self.shaped(self.estimate.ess)

    @property
    def rhat(self) -> Any:
        """Split R-hat."""
        return self.shaped(self.estimate.rhat)

    def columns(self) -> dict[str, Float[np.ndarray, " statistics"]]:
        """What the table shows of each statistic."""
        e = self.estimate
        sd = np.sqrt(e.variance)
        return {"mean": e.mean, "mcse": e.mcse, "sd": sd, "ess": e.ess, "rhat": e.rhat}

    def lines(self) -> list[tuple[str, ...]]:
        """The lines of the table, the first MOST_LINES of them."""
        rows = zip(self.names, *self.columns().values(), strict=True)
        return [
            (
                name,
                round_to_error(mean, error),
                f"{error:.2g}",
                f"{sd:.3g}",
                f"{ess:.2g}",
                "-" if np.isnan(rhat) else f"{rhat:.2f}",
            )
            for name, mean, error, sd, ess, rhat in list(rows)[:MOST_LINES]
        ]

    def verdict(self) -> list[str]:
        """Below the table: what was done, and whether to believe it."""
        job = self.job
        seconds = sum(stage.seconds for stage in job.stages.values())
        work = sum(stage.gradients for stage in job.stages.values())
        parts = [f"{name} {x.seconds:.1f}" for name, x in job.stages.items()]
        lines = [
            job.headline(),
            f"{work:.2g} gradients, {seconds:.1f} s ({', '.join(parts)})",
        ]
        if job.findings.other_mode == np.inf:
            far = f"from up to {FARTHEST:.0f} standard deviations out"
            kind = "other" if getattr(job, "mixture", None) is None else "further"
            lines.insert(1, f"climbers {far} found no {kind} mode")
        hidden = len(self.names) - MOST_LINES
        if hidden > 0:
            lines.insert(0, f"... and {hidden} more")
        errors = job.goal.errors(np.sqrt(self.estimate.variance))
        ratio = self.estimate.mcse / errors
        worst = int(np.nanargmax(np.nan_to_num(ratio, nan=np.inf)))
        if not self.reached:
            lines.append(
                f"Not there yet: the error of {self.names[worst]} is "
                f"{ratio[worst]:.3g} times what was asked for. "
                "Go on with report.resume()."
            )
        if self.warnings:
            lines.append("Do not trust these numbers:")
        lines += [f"- {reason}" for reason in self.warnings]
        return lines + [f"Note: {note}" for note in self.notes]

    def __str__(self) -> str:
        """The report as plain text."""
        table = [COLUMNS, *self.lines()]
        widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
        rows = [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in table
        ]
        return "\n".join([*rows, *self.verdict()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The report as a table for a notebook."""

        def line(cells: tuple[str, ...], tag: str) -> str:
            style = "padding: 0.1em 0.5em; text-align: right; white-space: nowrap"
            inner = [
                f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell in cells
            ]
            return f"<tr>{''.join(inner)}</tr>"

        body = "".join(line(cells, "td") for cells in self.lines())
        words = "<br>".join(map(html.escape, self.verdict()))
        table = f"<table>{line(COLUMNS, 'th')}{body}</table>"
        return f'<div style="overflow-x: auto">{table}</div><p>{words}</p>'

    def plot(self) -> Any:
        """A figure: the error against the work, and where the time went."""
        plt = need("matplotlib.pyplot", "plot")
        figure, axes = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
        gradients, _, worst, median = self.job.history.T
        mark = "o-" if len(gradients) < 5 else "-"
        axes[0].loglog(gradients, worst, mark, label="largest")
        axes[0].loglog(gradients, median, mark, label="median")
        axes[0].set(xlabel="gradient evaluations", ylabel="error / posterior sd")
        axes[0].xaxis.set_minor_formatter("")
        axes[0].yaxis.set_minor_formatter("")
        axes[0].legend()
        stages = self.job.stages
        seconds = [stage.seconds for stage in stages.values()]
        bars = axes[1].barh(list(stages), seconds, color="0.7")
        work = [f" {stage.gradients:.2g} gradients" for stage in stages.values()]
        axes[1].bar_label(bars, work)
        axes[1].margins(x=0.8)
        axes[1].invert_yaxis()
        axes[1].set(xlabel="seconds")
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Everything that the table shows, as plain lists, and the verdict."""
        return {
            "name": self.names,
            **{name: np.asarray(x).tolist() for name, x in self.columns().items()},
            "scheme": self.job.scheme,
            "reached": self.reached,
            "warnings": self.warnings,
            "notes": self.notes,
        }

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame, with a row for each statistic."""
        return need("pandas", "pandas").DataFrame(self.columns(), index=self.names)

    def to_arviz(self) -> Any:
        """Draws of the constrained values, for ArviZ.

        They are few: 32 at most from each chain, or a thousand weighted points. The
        report's own numbers are in the group's attributes.
        """
        if self.problem is None:
            raise ValueError("a report without a model has no names for its draws")
        see = jax.vmap(jax.vmap(self.problem.through(self.transport).constrain))
        with precision_of(self.problem):
            values = jax.device_get(jax.jit(see)(jnp.asarray(self.job.draws)))
        posterior = {
            jax.tree_util.keystr(path, simple=True, separator=".")
            or "x": leaf.swapaxes(0, 1)
            for path, leaf in jax.tree_util.tree_leaves_with_path(values)
        }
        table = self.to_dict()
        attributes = {name: table[name] for name in ("name", "mean", "mcse", "scheme")}
        arviz = need("arviz", "arviz")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more chains than draws: that is so
            return arviz.from_dict(posterior, posterior_attrs=attributes)

    def save(self, path: str | Path) -> None:
        """Write the run to a file, to be read by ``load``."""
        write_job(path, self.job, self.about)

    def resume(
        self,
        mcse: Any = None,
        relative: float | None = None,
        seconds: float | None = 60.0,
        gradients: float | None = None,
        file: str | Path | None = None,
    ) -> "Report":
        """Go on to the same errors, or others, for so much time or work more."""
        if self.problem is None:
            raise ValueError("to go on, give `load` the model and its statistics")
        goal = make_goal(self.problem, mcse, relative, seconds, gradients)
        if mcse is None and relative is None:
            goal = self.job.goal._replace(seconds=seconds, gradients=gradients)
        task = Task(self.problem, self.transport, file, self.about)
        task = task._replace(whitened=self.job.whitened)
        calm = calm_numbers(self.problem.dim)
        with precision_of(self.problem), calm, Clock() as clock:
            return run_until_done(self.job._replace(goal=goal), task, clock)


# The format of the files.
VERSION = 7


# A run is saved when this many seconds have passed since it was saved last.
SAVE_EVERY = 5.0


def named_parts(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested NamedTuples and dictionaries, with their names."""
    parts = tree._asdict() if hasattr(tree, "_asdict") else tree
    if not isinstance(parts, dict):
        yield name, parts
        return
    for key, value in parts.items():
        yield from named_parts(value, f"{name}/{key}" if name else key)


def nested(named: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries from names with slashes.

    Examples
    --------
    >>> nested({"a": 1, "b/c": 2, "b/d": 3})
    {'a': 1, 'b': {'c': 2, 'd': 3}}
    """
    tree: dict[str, Any] = {}
    for name, value in named.items():
        *path, last = name.split("/")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def digest_of(head: dict, arrays: dict[str, np.ndarray]) -> str:
    """A number that changes when anything in a file does, but for the order.

    Examples
    --------
    >>> digest_of({}, {"a": np.zeros(2)}) == digest_of({}, {"a": np.array([0, np.nan])})
    False
    """
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def write_job(path: str | Path, job: Job | PointJob, about: dict) -> None:
    """Write a job to a file, all of it or nothing, every number under its name."""
    parts = dict(named_parts(job))
    arrays = {
        name: np.asarray(x)
        for name, x in parts.items()
        if isinstance(x, np.ndarray | np.generic | Array)
    }
    others = {name: x for name, x in parts.items() if name not in arrays}
    head = {"swindles": VERSION, "about": about, "others": others}
    words: dict[str, Any] = {"head": json.dumps(head)}
    words["digest"] = digest_of(head, arrays)
    path, writer = Path(path), f"{os.getpid()}.{threading.get_ident()}"
    draft = path.with_name(f"{path.name}.{writer}.draft")
    try:
        with draft.open("wb") as file:
            np.savez(file, **(arrays | words))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def rebuild_job(tree: dict[str, Any]) -> Job | PointJob:
    """A job from nested dictionaries."""
    tree = tree | {
        "goal": Goal(**tree["goal"]),
        "transport": Affine(**tree["transport"]) if tree["transport"] else None,
        "findings": Findings(**tree["findings"]),
        "used": Stage(**tree["used"]),
        "stages": {name: Stage(**x) for name, x in tree.get("stages", {}).items()},
    }
    if "plan" not in tree:
        parts, second = tree.get("mixture"), tree.get("second")
        changed: dict[str, Any] = {
            "run": Weighted(**tree["run"]),
            "mixture": Mixture(**parts) if parts else None,
            "second": SecondLook(**second) if second else None,
        }
        return PointJob(**tree | changed)
    rows, chains = tree["run"]["rows"], SCHEMES[tree["plan"]["scheme"]].chains
    swindled = rows["swindled"]
    sums = Sums(
        Moments(**rows["plus"]),
        None if swindled is None else Moments(**swindled),
        Rates(**{"decoupled": {}} | rows["rates"]),
    )
    states = coupled(*chains)(*(HMCState(**tree["run"]["states"][n]) for n in chains))
    changed = {
        "plan": Plan(**tree["plan"]),
        "run": Run(states, sums, tree["run"]["steps"]),
    }
    return Job(**tree | changed)


def read_job(path: str | Path) -> tuple[Job | PointJob, dict]:
    """Read what ``write_job`` wrote, and what it is about; or a ValueError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        head, digest = json.loads(str(arrays.pop("head"))), arrays.pop("digest", None)
        version = head["swindles"]
        if version == VERSION:
            if digest != digest_of(head, arrays):
                raise ValueError("it was changed after it was written")
            return rebuild_job(nested(arrays | head["others"])), head["about"]
    except FileNotFoundError:
        raise
    except Exception as reason:  # whatever a damaged file makes its readers do
        raise ValueError(
            f"{path} is not a run that swindles saved, or it is damaged: {reason}"
        ) from reason
    raise ValueError(
        f"{path} has format {version}, and this version of swindles reads only format "
        f"{VERSION}: run it anew, under another name"
    )


class Task(NamedTuple):
    """Whose job it is, and where it is saved."""

    problem: Problem  # in x
    transport: Any  # the map; None when there is none yet
    file: str | Path | None
    about: dict
    whiten: Callable[[], Problem] | None = None  # the same, in other coordinates
    whitened: bool = False  # whether the problem is the one in other coordinates
    own: bool = False  # whether the map is not ours to improve

    def in_other_coordinates(self) -> "Task":
        """The task in the coordinates that are standard normal under the prior."""
        assert self.whiten is not None
        return self._replace(problem=self.whiten(), transport=None, whitened=True)

    def owned(self, job: PointJob) -> PointJob:
        """The job without its map, if that is not ours to save."""
        return job._replace(transport=None) if self.own else job

    def save(self, job: Job | PointJob) -> None:
        """Write the job to the file, if there is one; a full disk does not end it."""
        try:
            if self.file:
                write_job(self.file, job, self.about)
        except OSError as reason:
            warnings.warn(f"the run is not saved: {reason}", stacklevel=2)


def all_warnings(job: Job | PointJob, found: Estimate) -> list[str]:
    """What speaks against a job, as far as it can be told without the model."""
    own = chain_warnings(job) if isinstance(job, Job) else point_warnings(job)
    return found.warnings() + own + posterior_warnings(job)


def all_notes(job: Job | PointJob, found: Estimate) -> list[str]:
    """What is good to know of a job."""
    if isinstance(job, Job):
        return job_notes(job, found)
    return point_notes(job, found)


def make_report(job: Job | PointJob, task: Task) -> Report:
    """The report on a job."""
    found = job.estimate()
    errors = job.goal.errors(np.sqrt(found.variance))
    reasons = all_warnings(job, found)
    if isinstance(job, Job):
        reasons += draw_warnings(job, task.problem.through(task.transport))
    return Report(
        found,
        job,
        task.problem.names,
        bool((found.mcse <= errors).all()),
        reasons,
        all_notes(job, found),
        task.about,
        task.problem,
        task.transport,
    )


def make_job(
    key: Array,
    choice: Choice,
    goal: Goal,
    transport: Transport,
    findings: Findings,
    reason: str = "",
) -> Job:
    """A job before its first step; it has no rows until its engine begins it."""
    position = choice.states.plus.position
    return Job(
        plan=choice.plan,
        goal=goal,
        step_size=choice.step_size,
        num_integration_steps=choice.num_integration_steps,
        transport=transport if isinstance(transport, Affine) else None,
        key=np.asarray(jax.random.key_data(key)),
        run=Run(jax.device_get(choice.states), None, 0),
        draws=np.zeros((0, *position.shape), position.dtype),
        length=FIRST_BLOCK,
        dropped=0,
        gradients=0.0,
        history=np.zeros((0, 4)),
        findings=findings,
        stages={},
        stuck=choice.stuck,
        forecast=dict.fromkeys(CANDIDATES, np.inf) | choice.forecast,
        reason=reason,
    )


class Request(NamedTuple):
    """How a user wants it done."""

    key: Any
    goal: Goal
    scheme: str | None
    num_chains: int


def map_stage(request: Request, evaluate: Evaluator, task: Task) -> Gaussian:
    """A map for the task, or how good its own one is."""
    if task.transport is None:
        return fit_highest(evaluate, task.problem.position, key_seed(request.key))
    unit = unit_map(np.zeros(evaluate.dim))
    rng = np.random.default_rng(key_seed(request.key))
    return assess_map(unit, evaluate(unit, mirrored_normal(rng, 4096, evaluate.dim)))


def point_space(request: Request, task: Task) -> tuple[Evaluator, Affine]:
    """What looks at points, and the affine map that they are drawn through."""
    if task.own:
        space = task.problem.through(task.transport)
        return space.evaluator(), unit_map(np.zeros(space.dim))
    return task.problem.evaluator(), task.transport


def walk_program(problem: Problem) -> Callable:
    """From a key, places, a step size and a number of steps to where HMC gets.

    And how often it accepts.
    """

    def walk(key: Array, z: Array, size: float, leaps: int, steps: int) -> Any:
        algorithm = hmc(size, leaps)(problem.logdensity)

        def update(total: Array, states: Any, infos: Any) -> Array:
            return total + infos.is_accepted.mean()

        states, none = jax.vmap(algorithm.init)(z), jnp.zeros((), z.dtype)
        end = take_steps(key, states, none, 0, steps, algorithm.step, update)
        return end[0].position, end[1] / steps

    return jax.jit(walk)


# How many ends to compare.
ENDS = 32


def ends_differ(
    before: Float[np.ndarray, "draws statistics"],
    after: Float[np.ndarray, "draws statistics"],
) -> Bool[np.ndarray, " statistics"]:
    """Of which statistics the farthest values are ``after``, beyond chance.

    Examples
    --------
    >>> draws = np.random.default_rng(0).normal(size=(2, 1000, 1))
    >>> [ends_differ(draws[0], scale * draws[1]).tolist() for scale in (1, 2)]
    [[False], [True]]
    """
    from scipy.stats import binom  # slow to import

    both, number = np.concatenate([before, after]), before.shape[1]
    order = np.argsort(both, axis=0, kind="stable")
    late = np.stack([order[:ENDS], order[-ENDS:]]) >= len(before)
    most = binom.isf(FALSE_ALARM / 2 / number, ENDS, 0.5)
    return (late.sum(1) > most).any(0)


# Leapfrog steps of the chains that go on, operations that they may take, most steps.
WALK_LEAPS, WALK_WORK, LONGEST_WALK = 32, 1e10, 512


def points_fall_short(job: PointJob, problem: Problem) -> bool:
    """Whether chains that go on from the points of a job get farther than they do."""
    z = jnp.asarray(job.draws.reshape(-1, problem.dim), problem.position.dtype)
    work = count_work(problem).target * len(z) * WALK_LEAPS
    steps = min(int(WALK_WORK / work), LONGEST_WALK)
    if steps < 8:  # too few to get anywhere
        return False
    key = jax.random.key(int(np.random.default_rng([*job.key, 7]).integers(2**31)))
    program, size, accepted = walk_program(problem), 1.0, 0.0
    while accepted < 0.98 and size > 1e-4:
        size /= 2
        accepted = float(program(key, z, size, 1, 1)[1])
    moved, _ = program(jax.random.fold_in(key, 1), z, size, WALK_LEAPS, steps)
    see = jax.jit(lambda z: jax.lax.map(problem.statistic, z, batch_size=256))
    return bool(ends_differ(np.asarray(see(z)), np.asarray(see(moved))).any())


# Pareto k above which points of a map are looked at so.
SAFE_K = 0.5


def why_not_here(job: PointJob, task: Task, clock: Clock) -> str:
    """Why weighted points will not do, chains that go on from them included."""
    reason = why_not_points(job, clock)
    if reason or (job.mixture is None and job.run.pareto_k.max() <= SAFE_K):
        return reason
    with clock.stage("check"):
        short = points_fall_short(job, task.problem.through(task.transport))
    return "chains that go on from its points get farther than they" if short else ""


def map_points(
    request: Request, task: Task, findings: Findings, clock: Clock
) -> tuple[PointJob | None, str]:
    """Points of the map, if it is not hopeless, and why they will not do."""
    if request.scheme not in (None, "importance"):
        poor = not findings.pareto_k <= GOOD_K
        return None, f"{request.scheme} was asked for" if poor else ""
    evaluate, inner = point_space(request, task)
    if request.scheme is None and is_poor(findings):
        return None, f"the map is poor, its weights are worth {findings.efficiency:.1%}"
    with clock.stage("importance", lambda: evaluate.gradients):
        job = first_points(request, evaluate, inner, findings)
    return task.owned(job), why_not_here(job, task, clock)


def try_mixture(
    request: Request, task: Task, findings: Findings, reason: str, clock: Clock
) -> PointJob | None:
    """Points of a mixture, if they will do."""
    evaluate, inner = point_space(request, task)
    if evaluate.dim > LARGEST_MIXTURE:
        return None
    with clock.stage("mixture", lambda: evaluate.gradients):
        job = mixture_points(request, evaluate, inner, findings, reason)
    return None if job is None or why_not_here(job, task, clock) else task.owned(job)


def map_task(
    request: Request, task: Task, clock: Clock
) -> tuple[Task, Findings, float]:
    """The task with a map, what that shows of the posterior, and the map's ELBO."""
    evaluate, _ = point_space(request, task)
    with clock.stage("map", lambda: evaluate.gradients):
        found = map_stage(request, evaluate, task)
        findings = inspect_posterior(request.key, evaluate, found)
    inner = Affine(*(jnp.asarray(x, evaluate.dtype) for x in found.transport))
    task = task if task.own else task._replace(transport=inner)
    return task, findings, found.elbo


def set_up(request: Request, task: Task, clock: Clock) -> tuple[Job | PointJob, Task]:
    """Find a map, and weigh points; if that will not do, choose a scheme."""
    task, findings, elbo = map_task(request, task, clock)
    job, reason = map_points(request, task, findings, clock)
    if reason and task.whiten and not task.own:
        with clock.stage("compiling"):
            turned = task.in_other_coordinates()
        other, news, gain = map_task(request, turned, clock)
        if gain > elbo:
            task, findings = other, news
            job, reason = map_points(request, task, findings, clock)
    if request.scheme in (None, "importance"):
        if reason:
            mixed = try_mixture(request, task, findings, reason, clock)
            job = mixed or (job if request.scheme else None)
        if job is not None:
            return job, task
    reason = f"{request.scheme} was asked for" if request.scheme else reason
    return chain_job(request, task, findings, reason, clock)


def chain_map(
    request: Request, task: Task, findings: Findings, clock: Clock
) -> tuple[Task, Findings]:
    """A map that chains have learned, where the one that there is is poor."""
    if task.own:
        return task, findings
    evaluate, inner = point_space(request, task)
    with clock.stage("map", lambda: evaluate.gradients):
        inputs = task.problem, request.num_chains, evaluate, inner
        found = find_map(request.key, *inputs)
    inner = Affine(*(jnp.asarray(x, evaluate.dtype) for x in found.transport))
    k, efficiency = found.pareto_k, found.efficiency
    findings = findings._replace(pareto_k=k, efficiency=efficiency)
    return task._replace(transport=inner), findings


# The worth of weights, below which a map is far from right; seconds for a flow.
LITTLE_WORTH, FLOW_SECONDS = 0.2, 20.0
# Dimensions of a flow at the most; steps and draws to fit it, width of its layers.
LARGEST_FLOW, FLOW_STEPS, FLOW_BATCH, FLOW_WIDTH = 100, 4000, 256, 32


def is_worth_bending(goal: Goal, task: Task, findings: Findings, clock: Clock) -> bool:
    """Whether the map is far from right, and there is time to fit a flow."""
    odd = findings.jump or findings.other_mode < np.inf or findings.heavy.any()
    fits = 2 <= task.problem.dim <= LARGEST_FLOW and find_spec("flowjax") is not None
    remaining = (goal.seconds or np.inf) - clock.seconds
    enough = remaining > FLOW_SECONDS and findings.efficiency < LITTLE_WORTH
    return enough and fits and not (task.own or odd)


def bend_map(
    request: Request, task: Task, findings: Findings, clock: Clock
) -> tuple[Task, Findings]:
    """The task with a flow for its map, if that is better, and how good it is."""
    spent = 0
    with clock.stage("flow", lambda: spent):
        neutra = import_module("swindles.neutra")
        remaining = ((request.goal.seconds or np.inf) - clock.seconds) / 2
        design = neutra.Design(width=FLOW_WIDTH, depth=1)
        schedule = neutra.Schedule(FLOW_STEPS, FLOW_BATCH, 1e-2, seconds=remaining)
        inputs = task.problem.logdensity, task.transport, design, schedule
        key = jax.random.fold_in(request.key, 6)
        try:
            with warnings.catch_warnings(action="ignore"):
                fit = neutra.fit_flow(key, *inputs, trials=1)
        except ValueError:  # the loss is not finite
            return task, findings
        spent = fit.loss.size * FLOW_BATCH + 2 * fit.log_weights.size
    k, efficiency = pareto_k(fit.log_weights), weight_efficiency(fit.log_weights)
    findings = findings._replace(pareto_k=k, efficiency=efficiency)
    bent = isinstance(fit.transport, neutra.Flow)
    return task._replace(transport=fit.transport, own=bent), findings


def flow_fields(task: Task) -> dict | None:
    """The task's map as arrays with names, if it is a flow that was fitted for it."""
    if isinstance(task.transport, Affine):
        return None
    return jax.device_get(import_module("swindles.neutra").map_fields(task.transport))


def chain_job(
    request: Request, task: Task, findings: Findings, reason: str, clock: Clock
) -> tuple[Job, Task]:
    """Choose among schemes in a pilot run, and make an empty job."""
    (key, goal, scheme, num_chains), flow = request, None
    if scheme is None and is_worth_bending(goal, task, findings, clock):
        task, findings = bend_map(request, task, findings, clock)
        flow = flow_fields(task)
    task, findings = chain_map(request, task, findings, clock)
    names = list(CANDIDATES) if scheme is None else [scheme]
    if findings.jump:
        names = [name for name in names if not SCHEMES[name].stein] or ["plain"]
    keys, latent = jax.random.split(key, 3), task.problem.through(task.transport)
    with clock.stage("pilot"):
        choice = choose_scheme(keys[1], latent, goal.errors, num_chains, names)
    job = make_job(keys[2], choice, goal, task.transport, findings, reason)
    return Engine(job, latent).begin(job._replace(flow=flow)), task


def begin_blocks(job: Any, clock: Clock) -> tuple[float, bool, Any]:
    """Gradients spent in an earlier call, whether all is done, and the job."""
    if len(job.draws) < 2:
        return 0.0, False, job
    found = job.estimate()
    if len(job.history):
        return job.gradients, is_reached(job, found), job
    return 0.0, is_reached(job, found), add_history(job, found, clock.seconds)


def make_engine(job: Job | PointJob, task: Task) -> Engine | PointEngine:
    """What takes the next block of a job."""
    if isinstance(job, Job):
        return Engine(job, task.problem.through(task.transport))
    return PointEngine(job, point_problem(job, task))


def point_problem(job: PointJob, task: Task) -> Problem:
    """What points are looked at in: x, or the space of a map of one's own."""
    own = job.transport is None
    return task.problem.through(task.transport) if own else task.problem


def another_way(
    job: Any, task: Task, clock: Clock, request: Request | None
) -> tuple[Any, Task] | None:
    """What to do instead, where weighted points turn out not to do."""
    if request is None or request.scheme or not isinstance(job, PointJob):
        return None
    reason = why_not_points(job, clock)
    if not reason:
        return None
    if job.mixture is None:
        other = try_mixture(request, task, job.findings, reason, clock)
        if other is not None:
            return other, task
    return chain_job(request, task, job.findings, reason, clock)


def with_costs(job: Any, earlier: Any, clock: Clock, gradients: float) -> Any:
    """The job with what it has cost, and what a call that is cut short has used."""
    stages = add_stages(earlier.stages, clock.all_stages())
    seconds, before = earlier.used
    used = Stage(seconds + clock.seconds, before + gradients)
    return job._replace(stages=stages, used=used, whitened=earlier.whitened)


def run_until_done(
    job: Any, task: Task, clock: Clock, request: Request | None = None
) -> Report:
    """Take blocks until the goal is reached or the budget is spent.

    Where weighted points turn out not to do, a request leaves room for chains.
    """
    engine, earlier = make_engine(job, task), job._replace(whitened=task.whitened)
    (spent, done, job), saved = begin_blocks(job, clock), -np.inf

    def now() -> Any:
        return with_costs(job, earlier, clock, job.gradients - spent)

    task.save(now())
    try:
        while not done:
            with clock.stage(engine.stage, lambda: engine.gradients):
                job = engine.add_block(job)
                found = job.estimate()
            other = another_way(job, task, clock, request)
            if other is not None:
                return run_until_done(*other, clock, request)
            job = add_history(job, found, clock.seconds)
            over = job.goal.is_spent(clock.seconds, job.gradients - spent)
            done = is_reached(job, found) or (over and len(job.draws) > 3)
            if not done and clock.seconds - saved > SAVE_EVERY:
                task.save(now())
                saved = clock.seconds
            show_progress(clock.bar, found, job.goal)
        job = check_job(job, task, clock)
        task.save(now()._replace(used=Stage(0.0, 0.0)))
    except KeyboardInterrupt:
        if len(job.draws) < 2:
            raise
        task.save(now())
    return make_report(now(), task)


def check_job(job: Any, task: Task, clock: Clock) -> Any:
    """The job with what a second way says: other points, or smaller steps."""
    if isinstance(job, PointJob):
        return check_with_other_points(job, task, clock)
    return check_with_finer_steps(job, task, clock)


def check_with_other_points(job: PointJob, task: Task, clock: Clock) -> PointJob:
    """The job with what a second set of points says."""
    engine = PointEngine(job, point_problem(job, task))
    evaluate, seed = engine.evaluate, [*job.key, len(job.run.pairs), 2]
    with clock.stage("check", lambda: evaluate.gradients):
        proposal = job.mixture or RoundProposal(evaluate.dim)
        second = look_again(seed, evaluate, engine.inner, job.run, proposal)
    return job._replace(second=second)


def check_with_finer_steps(job: Job, task: Task, clock: Clock) -> Job:
    """The job, if it is done, with what smaller steps have shown."""
    found, sampled = job.estimate(), clock.stages.get(Engine.stage)
    if sampled is None or not np.isfinite(found.mean).all():
        return job
    if not is_reached(job, found):
        return job
    remaining = (job.goal.seconds or np.inf) - clock.seconds
    share = float(np.clip(remaining / sampled.seconds, 0, 1))
    with clock.stage("check"):
        latent = task.problem.through(task.transport)
        return job._replace(further=further_with_finer_steps(job, latent, share))


def add_stages(earlier: dict[str, Stage], later: dict[str, Stage]) -> dict[str, Stage]:
    """The stages of two calls, added up."""
    both = {name: Stage(0.0, 0.0) for name in (*earlier, *later)}
    for stages in (earlier, later):
        for name, stage in stages.items():
            both[name] = Stage(*map(sum, zip(both[name], stage, strict=True)))
    return both


def show_progress(bar: Any, estimate: Estimate, goal: Goal) -> None:
    """Move the progress bar: how much of the way to the goal, and the error now."""
    ratio = estimate.mcse / goal.errors(np.sqrt(estimate.variance))
    worst = float(np.nanmax(ratio, initial=1e-9))
    bar.n = int(100 * min(1.0, worst**-2))
    bar.set_postfix_str(f"error {worst:.2g} x asked")


def check_options(scheme: str | None, num_chains: int, dim: int) -> None:
    """Raise ValueError for a scheme that there is not, or chains that do not fit."""
    names = ("importance", *CANDIDATES)
    if scheme is not None and not (isinstance(scheme, str) and scheme in names):
        raise ValueError(f"scheme is {scheme!r}: say one of {', '.join(names)}")
    if not isinstance(num_chains, int | np.integer):
        raise ValueError(f"chains must be a whole number, got {num_chains!r}")
    if num_chains < 16:
        raise ValueError(
            f"{num_chains} chains are too few: the spread between chains measures the "
            "error, so use 16 or more"
        )
    if num_chains * dim > 2e6:
        raise ValueError(
            f"{num_chains} chains in {dim} dimensions do not fit into memory: use "
            f"{int(2e6 / dim)} chains, or fewer dimensions if that is less than 16"
        )


def as_file(file: Any) -> str | Path | None:
    """The name of a file where a run can be saved, or None; or a ValueError."""
    if file is None:
        return None
    if not isinstance(file, str | os.PathLike):
        raise ValueError(f"file must be the name of a file, got {file!r}")
    if Path(file).is_dir():
        raise ValueError(f"{file} is a directory: name a file in it")
    if not Path(file).absolute().parent.is_dir():
        raise ValueError(f"{file} is in a directory that does not exist: make it")
    return Path(file)


def as_map(transport: Any, problem: Problem) -> Transport | None:
    """A map to the space of the position, or None; or a ValueError."""
    if transport is None:
        return None
    if not callable(transport) or not hasattr(transport, "with_log_det"):
        raise ValueError(f"transport must be a map, such as Affine, got {transport!r}")
    where = f"in the {problem.dim} dimensions of the position"
    try:
        found = jax.eval_shape(transport.with_log_det, problem.position)
    except Exception as error:
        raise ValueError(f"the transport fails {where}: {error}") from error
    if jax.tree.map(lambda x: x.shape, found) != ((problem.dim,), ()):
        raise ValueError(
            f"the transport returns {found} {where}: it must return a point there, and "
            "the log-determinant"
        )
    return transport


def as_model(model: Any, position: Any) -> Model:
    """A model from a log density and a position, unless it is one already."""
    if isinstance(model, Model):
        return model
    if position is None:
        raise ValueError("give a position to start from, or a Model that has one")
    return Model(model, position)


def as_key(key: Any) -> Array:
    """A random key of JAX's default kind, from a seed or a key of any kind."""
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise ValueError("estimate cannot run inside of jit or grad: call it outside")
    key = key if isinstance(key, Array) else np.asarray(key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
        usual = key.dtype == jax.random.key(0).dtype
        return key if usual else jax.random.key(jax.random.bits(key))
    if key.ndim == 0 and key.dtype.kind in "iu":
        return jax.random.key(int(key))
    if key.dtype == np.uint32 and key.shape in ((2,), (4,)):
        kind = "threefry2x32" if key.size == 2 else "rbg"
        return as_key(jax.random.wrap_key_data(key, impl=kind))
    raise ValueError(f"key must be a whole number or one key of jax.random, got {key}")


def describe_problem(problem: Problem) -> dict:
    """What a saved run must agree on with the model that goes on with it.

    Density and statistics are compared at a few points around the position.
    """
    rng = np.random.default_rng(0)
    position = np.asarray(problem.position, np.float64)
    away = 0.1 * rng.normal(size=(3, problem.dim)) * [[0], [1], [1]]
    found = problem.evaluator()(unit_map(position), away)
    mix = np.nan_to_num(found.values) @ rng.normal(size=found.values.shape[1])
    return {
        "names": problem.names,
        "logdensity": np.nan_to_num(found.logdensity).tolist(),
        "statistics": mix.tolist(),
        "dtype": str(problem.position.dtype),
    }


def is_same(one: Any, other: Any) -> bool:
    """Whether two descriptions agree, numbers up to rounding."""
    numbers = isinstance(one, list) and all(isinstance(x, float) for x in one)
    if numbers and isinstance(other, list) and len(one) == len(other):
        return np.allclose(one, other, rtol=1e-5, atol=1e-8)
    return one == other


def read_same_job(path: str | Path, about: dict, transport: Any) -> tuple[Any, Any]:
    """Read a job that is about the same thing, and its map; or a ValueError."""
    job, before = read_job(path)
    other = [name for name in about if not is_same(before.get(name), about[name])]
    if other:
        raise ValueError(
            f"{path} holds another run, with another {' and '.join(other)}: name "
            "another file, or delete it"
        )
    if isinstance(job, Job) and job.flow is not None:
        transport = import_module("swindles.neutra").restore_map(job.flow, path)
    if job.transport is None and transport is None:
        raise ValueError(f"{path} was run with a map of your own: give it again")
    return job, job.transport if transport is None else transport


@contextmanager
def calm_numbers(dim: int) -> Iterator[None]:
    """No threads for small matrices, no words when something overflows far out."""
    threads = threadpool_limits(None if dim > 300 else 1, "blas")
    with threads, np.errstate(over="ignore", invalid="ignore"):
        yield


def take_up_or_set_up(request: Request, task: Task, clock: Clock) -> tuple[Any, Task]:
    """The job in the task's file, or a new one; and the task with its map."""
    if not (task.file and Path(task.file).exists()):
        return set_up(request, task, clock)
    job, to_x = read_same_job(task.file, task.about, task.transport)
    task = task.in_other_coordinates() if job.whitened and task.whiten else task
    goal = request.goal.without(*job.used)
    return job._replace(goal=goal), task._replace(transport=to_x)


def other_problem(model: Model, statistics: Any) -> Callable[[], Problem] | None:
    """What makes the problem in whitened coordinates, if the model can tell."""
    whitened = model.whitened
    return None if whitened is None else lambda: make_problem(whitened(), statistics)


def import_early(name: str) -> None:
    """Import a module beside what is going on: the compiler leaves time for it."""
    threading.Thread(target=import_module, args=(name,), daemon=True).start()


def precision_of(problem: Problem) -> Any:
    """A context in which JAX computes as it did for a problem."""
    return jax.enable_x64(problem.position.dtype == np.float64)


def wants_double(model: Model, dtype: str | None) -> bool:
    """Whether to compute in double precision; or a ValueError."""
    dtype = getattr(dtype, "__name__", dtype)  # np.float64, say
    if dtype not in (None, "float32", "float64"):
        raise ValueError(f'dtype is {dtype!r}: say "float32" or "float64"')
    if dtype is not None or jax.default_backend() != "cpu":
        return dtype == "float64" or (
            dtype is None and bool(jax.config.read("jax_enable_x64"))
        )
    try:
        with jax.enable_x64(True):
            kind = jax.eval_shape(model.logdensity, as_floats(model.position)).dtype
        return kind == np.float64
    except Exception:  # types that do not go together, say; make_problem tells
        return bool(jax.config.read("jax_enable_x64"))


def estimate(
    model: Model | Callable[[Any], Array],
    position: Any = None,
    statistics: Callable[[Any], Any] | None = None,
    key: Any = 0,
    *,
    mcse: Any = None,
    relative: float | None = None,
    seconds: float | None = 60.0,
    gradients: float | None = None,
    scheme: str | None = None,
    transport: Transport | None = None,
    chains: int = 128,
    dtype: str | None = None,
    file: str | Path | None = None,
) -> Report:
    """Estimate posterior expectations to a given accuracy.

    Finds a map and weighs points of it. If that will not do, a pilot run chooses step
    size and swindle, and chains run in blocks until every error is small enough or the
    budget is spent.

    Parameters
    ----------
    model
        A log density, as a function of ``position``; or a ``Model``, as
        ``from_numpyro`` and ``from_pymc`` make them, which has its own position.
    position
        Where to start: any pytree of numbers.
    statistics
        A function of the (constrained) position; any pytree. Its expectations are
        estimated. By default, the position itself.
    key
        A seed, or a random key.
    mcse
        The standard error to reach: one number, or one for each statistic.
    relative
        The same, in units of the posterior's standard deviation. When neither is
        given: 0.01.
    seconds
        Stop after this time, reached or not, set-up included; a block that has begun is
        finished. None: no limit.
    gradients
        Sample with no more gradients of the log density than this.
    scheme
        "importance" for weighted points of the map; or "plain", "antithetic",
        "control", "cva", "stein" or "antithetic+stein" for chains. By default points,
        if they will do; else the chains that win in a pilot run.
    transport
        A map of your own, a flow for instance.
    chains
        How many chains (or pairs of chains) to run.
    dtype
        "float64" or "float32" to compute in. By default double precision on a CPU, and
        what JAX is set to elsewhere.
    file
        Where to save the run. If the file exists, the run in it goes on.

    Examples
    --------
    >>> report = estimate(lambda x: -jnp.sum(jnp.cosh(x)), jnp.zeros(2), relative=0.1)
    >>> report.reached, report.trusted, report.names
    (True, True, ['x[0]', 'x[1]'])
    """
    clock, key, file = Clock(), as_key(key), as_file(file)
    import_early("scipy.stats.qmc")
    given = as_model(model, position)
    with jax.enable_x64(wants_double(given, dtype)), clock, calm_numbers(given.dim):
        with clock.stage("compiling"):
            problem = make_problem(given, statistics)
        goal = make_goal(problem, mcse, relative, seconds, gradients)
        check_options(scheme, chains, problem.dim)
        options = {"chains": chains, "scheme": scheme, "key": key_seed(key)}
        parts = as_map(transport, problem), file, describe_problem(problem) | options
        task = Task(problem, *parts, other_problem(given, statistics))
        task = task._replace(own=transport is not None)
        request = Request(key, goal, scheme, chains)
        return run_until_done(*take_up_or_set_up(request, task, clock), clock, request)


def load(
    path: str | Path,
    model: Model | Callable[[Any], Array] | None = None,
    position: Any = None,
    statistics: Callable[[Any], Any] | None = None,
    transport: Transport | None = None,
) -> Report:
    """Read a run that ``estimate`` or ``Report.save`` wrote.

    With the model, its position and its statistics the report can ``resume``; without,
    it can be looked at.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = folder + "/run.npz"
    ...     report = estimate(
    ...         lambda x: -jnp.sum(jnp.cosh(x)), jnp.zeros(2), relative=0.1, file=file
    ...     )
    ...     load(file).names
    ['x[0]', 'x[1]']
    """
    job, about = read_job(path)
    if model is not None:
        with jax.enable_x64(about.get("dtype") == "float64"):
            given = as_model(model, position)
            problem = make_problem(given, statistics)
            job, to_x = read_same_job(path, describe_problem(problem), transport)
            whiten = other_problem(given, statistics) if job.whitened else None
            problem = whiten() if whiten else problem
            return make_report(job, Task(problem, to_x, None, about))
    found = job.estimate()
    errors = job.goal.errors(np.sqrt(found.variance))
    reached = bool((found.mcse <= errors).all())
    reasons, notes = all_warnings(job, found), all_notes(job, found)
    return Report(found, job, about["names"], reached, reasons, notes, about)
