"""Unbiased: chains that meet.

Mirrored from book/unbiased.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.mcmc.integrators import IntegratorState
from blackjax.mcmc.metrics import gaussian_euclidean
from jax import Array
from jaxtyping import Float, Int, Key
from scipy.special import stdtrit

from swindles.coupling import LogDensity, compiled, hmc
from swindles.models import Problem
from swindles.schemes import find_scheme, learn, start_mirrored
from swindles.stein import Order, affordable_order, stein_features
from swindles.tuning import adapt_step_size


def correction_weight(time: Any, lag: Any, k: Any, m: Any) -> Any:
    """How often f(X_t) - f(Y_{t-L}) is counted in the correction of steps k to m.

    Examples
    --------
    >>> correction_weight(jnp.arange(1, 12), lag=3, k=2, m=4).tolist()
    [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    """
    last = (time - k) // lag
    first = -(-jnp.maximum(lag, time - m) // lag)
    return jnp.maximum(last - first + 1, 0)


def follow(
    key: Array, momentum: Array, x: Array, leader: Array, walk: Any
) -> tuple[Array, Array]:
    """Couple two random walks: the momentum of the one that follows a leader.

    Returns whether both propose the same place, as often as that is possible, and
    otherwise the leader's momentum in a mirror between them.

    Examples
    --------
    >>> x, leader, momentum = jnp.zeros(2), jnp.array([9.0, 0.0]), jnp.ones(2)
    >>> same, mirrored = follow(jax.random.key(0), momentum, x, leader, walk=1.0)
    >>> bool(same), mirrored.tolist()
    (False, [-1.0, 1.0])
    """
    away = (leader - x) / walk
    log_ratio = -away @ (momentum + 0.5 * away)
    same = jnp.log(jax.random.uniform(key)) < log_ratio
    axis = away / jnp.maximum(jnp.linalg.norm(away), 1e-30)
    return same, momentum - 2 * (axis @ momentum) * axis


def switched_leapfrog(force: Any) -> Callable:
    """A leapfrog step for BlackJAX's HMC, its kicks multiplied by ``force``.

    Without force the flight is straight, and HMC is a random walk.

    Examples
    --------
    >>> fly = switched_leapfrog(0.0)(lambda x: -0.5 * x @ x, None)
    >>> state = IntegratorState(jnp.zeros(1), jnp.ones(1), jnp.zeros(()), -jnp.ones(1))
    >>> fly(state, 0.5).position.tolist(), fly(state, 0.5).momentum.tolist()
    ([0.5], [1.0])
    """

    def integrator(logdensity: LogDensity, kinetic_energy: Any) -> Callable:
        slope = jax.value_and_grad(logdensity)

        def one_step(state: IntegratorState, step_size: Any) -> IntegratorState:
            kick = 0.5 * step_size * force
            momentum = state.momentum + kick * state.logdensity_grad
            position = state.position + step_size * momentum
            value, gradient = slope(position)
            momentum = momentum + kick * gradient
            return IntegratorState(position, momentum, value, gradient)

        return one_step

    return integrator


class Moves(NamedTuple):
    """How a pair of chains moves, and what is averaged. Every entry may be an array.

    Parameters
    ----------
    step_size
        Of a leapfrog step.
    walk
        Deviation of a random walk's proposal, in each coordinate.
    share
        Probability that a step is a random walk.
    lag
        Steps by which one chain is ahead of the other.
    k, m
        First and last step of the average.
    sign
        1, or -1 for chains whose starts and momenta are negated.

    Examples
    --------
    >>> Moves(step_size=0.3, walk=0.1, share=0.05).lag
    1
    """

    step_size: Any
    walk: Any
    share: Any
    lag: Any = 1
    k: Any = 0
    m: Any = 0
    sign: Any = 1.0


def select(flag: Any, yes: Any, no: Any) -> Any:
    """One of two pytrees."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), yes, no)


class PairKernel(NamedTuple):
    """What moves the chains of a pair.

    Parameters
    ----------
    start
        From a key to a position: where both chains come from.
    init
        From a position to a state, which has a ``position``.
    step
        From a key, a state, the position of the chain ahead and ``Moves`` to the next
        state. The chain ahead follows itself.

    Examples
    --------
    >>> kernel = pair_kernel(lambda x: -0.5 * x @ x, 3, lambda key: jnp.ones(2))
    >>> kernel.init(kernel.start(jax.random.key(0))).logdensity.item()
    -1.0
    """

    start: Callable
    init: Callable
    step: Callable


def pair_kernel(
    logdensity: LogDensity, num_integration_steps: int, start: Callable
) -> PairKernel:
    """HMC under one key, mixed with random walks whose proposals meet.

    Examples
    --------
    >>> kernel = pair_kernel(lambda x: -0.5 * x @ x, 3, lambda key: jnp.zeros(2))
    >>> moves = Moves(step_size=0.5, walk=0.5, share=1.0)
    >>> one, other = kernel.init(jnp.zeros(2)), kernel.init(jnp.full(2, 1e-3))
    >>> key = jax.random.key(1)
    >>> moved = [kernel.step(key, x, one.position, moves) for x in (one, other)]
    >>> bool((moved[0].position == moved[1].position).all())
    True
    """

    def step(key: Array, state: Any, leader: Array, moves: Moves) -> Any:
        x, keys = state.position, jax.random.split(key, 4)
        walks = jax.random.uniform(keys[0]) < moves.share
        momentum = moves.sign * jax.random.normal(keys[1], x.shape, x.dtype)
        same, mirrored = follow(keys[2], momentum, x, leader, moves.walk)
        mine = jnp.where(walks & ~same, mirrored, momentum)
        begin = state._replace(position=jnp.where(walks & same, leader, x))

        metric = gaussian_euclidean(jnp.ones_like(x))
        metric = metric._replace(sample_momentum=lambda *_: mine)
        size = jnp.where(walks, moves.walk / num_integration_steps, moves.step_size)
        fly = blackjax.hmc.build_kernel(switched_leapfrog(1.0 - walks))
        inputs = logdensity, size, metric, num_integration_steps
        moved, info = fly(keys[3], begin, *inputs)
        return select(info.is_accepted, moved, state)

    return PairKernel(start, lambda x: blackjax.hmc.init(x, logdensity), step)


# The meeting time of chains that have not met.
NEVER = 2**30


class Lane(NamedTuple):
    """A pair on its way."""

    pair: Array  # its number
    time: Array  # steps of the chain ahead
    ahead: Any
    behind: Any
    waits: Array  # whether the chain behind has taken its step, and the other has not
    meeting: Array
    average: Array  # (statistics,): what a chain alone would say
    correction: Array  # (statistics,)
    distance: Array  # (times,): the sums whose means bound the Wasserstein distance
    moves: Array  # steps of both chains together


class PairJob(NamedTuple):
    """What all lanes share."""

    key: Array
    kernel: PairKernel
    value: Callable  # from a state to the statistics
    variants: Moves  # of each repeat: one row for each
    times: Array
    most_steps: Any

    def of(self, pair: Array) -> tuple[Array, Moves]:
        """Key and moves of a pair: those of one repeat have one key."""
        repeat, variant = jnp.divmod(pair, len(self.variants.lag))
        moves = jax.tree.map(lambda rows: rows[variant], self.variants)
        return jax.random.fold_in(self.key, repeat), moves

    def is_done(self, lane: Lane) -> Array:
        """Whether a pair needs no more steps."""
        met = (lane.meeting < NEVER) & (lane.time >= self.of(lane.pair)[1].m)
        return met | (lane.time >= self.most_steps)


def move_pair(job: PairJob, lane: Lane) -> Lane:
    """One step of one chain of a pair: of the chain behind, if it is its turn."""
    key, moves = job.of(lane.pair)
    hunted, time = lane.meeting == NEVER, lane.time + 1
    turn = hunted & (lane.time >= moves.lag) & ~lane.waits
    leader = lane.ahead.position
    state = select(turn, lane.behind, lane.ahead)
    moved = job.kernel.step(jax.random.fold_in(key, lane.time), state, leader, moves)
    ahead = select(turn, lane.ahead, moved)
    behind = select(turn, moved, lane.behind)

    f = job.value(moved) / (moves.m - moves.k + 1)
    paired = hunted & (time >= moves.lag)
    weight = correction_weight(time, moves.lag, moves.k, moves.m) * paired
    counts = ~turn & (time >= moves.k) & (time <= moves.m)
    arrived = paired & ~turn
    gap = jnp.linalg.norm(ahead.position - behind.position)
    after = time - job.times
    on_grid = arrived & (after >= moves.lag) & (after % moves.lag == 0)
    met = arrived & (ahead.position == behind.position).all()
    return Lane(
        lane.pair,
        jnp.where(turn, lane.time, time),
        ahead,
        behind,
        turn,
        jnp.where(met, time, lane.meeting),
        lane.average + counts * f,
        lane.correction + jnp.where(turn, -weight, weight) * f,
        lane.distance + jnp.where(on_grid, gap, 0),
        lane.moves + 1,
    )


def begin_pair(job: PairJob, pair: Array) -> Lane:
    """A pair before its first step."""
    key, moves = job.of(pair)
    keys = jax.random.split(jax.random.fold_in(key, NEVER))
    states = [job.kernel.init(moves.sign * job.kernel.start(each)) for each in keys]
    f, g = (job.value(state) for state in states)
    share = jnp.where(moves.k == 0, 1 / (moves.m - moves.k + 1), 0)
    zero = jnp.zeros((), jnp.int32)
    numbers = {"pair": jnp.int32(pair), "time": zero, "moves": zero}
    return Lane(
        ahead=states[0],
        behind=states[1],
        waits=jnp.zeros((), bool),
        meeting=zero + NEVER,
        average=share * f,
        correction=-share * g,
        distance=jnp.zeros(job.times.shape, f.dtype),
        **numbers,
    )


class Pairs(NamedTuple):
    """What pairs of chains leave: for each repeat, and each row of its ``Moves``.

    Parameters
    ----------
    meeting
        The step of the chain ahead from which on they are equal; ``NEVER`` if none is.
    average
        What the chain ahead alone would say.
    correction
        What is added to that.
    distance
        Terms of the bound on the Wasserstein distance.
    moves
        Steps of both chains together.

    Examples
    --------
    >>> one = np.ones((1, 1, 2))
    >>> Pairs(np.array([[9]]), one, one / 2, one, np.array([[20]])).estimates.tolist()
    [[1.5, 1.5]]
    """

    meeting: Int[np.ndarray, "repeats variants"]
    average: Float[np.ndarray, "repeats variants statistics"]
    correction: Float[np.ndarray, "repeats variants statistics"]
    distance: Float[np.ndarray, "repeats variants times"]
    moves: Int[np.ndarray, "repeats variants"]

    @property
    def estimates(self) -> Float[np.ndarray, "repeats statistics"]:
        """Unbiased estimates, variants averaged; NaN where chains have not met."""
        total = np.asarray(self.average + self.correction, np.float64)
        return np.where((self.meeting < NEVER)[..., None], total, np.nan).mean(1)


def left(lanes: Any) -> Any:
    """What lanes have to say, as ``Pairs``."""
    return Pairs(*(getattr(lanes, name) for name in Pairs._fields))


def run_lanes(job: PairJob, num_rows: int, num_lanes: int) -> Pairs:
    """Run so many pairs; a lane whose pair is done takes the next one."""
    begin = jax.vmap(lambda pair: begin_pair(job, pair))
    done = jax.vmap(job.is_done)
    block = jnp.clip(job.variants.m.max() // 32, 4, 32)

    def move(_: Any, lanes: Lane) -> Lane:
        moved = jax.vmap(lambda lane: move_pair(job, lane))(lanes)
        return jax.vmap(select)(done(lanes), lanes, moved)

    def refill(queue: tuple) -> tuple:
        lanes, rows, fresh = queue
        finished = done(lanes) & (lanes.pair < num_rows)
        where = jnp.where(finished, lanes.pair, num_rows)
        rows = jax.tree.map(
            lambda r, x: r.at[where].set(x, mode="drop"), rows, left(lanes)
        )
        order = fresh + jnp.cumsum(finished, dtype=jnp.int32) - 1
        pairs = jnp.where(finished, order, lanes.pair)
        lanes = jax.vmap(select)(finished, begin(pairs), lanes)
        return lanes, rows, fresh + finished.sum(dtype=jnp.int32)

    def go_on(queue: tuple) -> tuple:
        lanes = jax.lax.fori_loop(0, block, move, queue[0])
        ready = (done(lanes) & (lanes.pair < num_rows)).any()
        return jax.lax.cond(ready, refill, lambda queue: queue, (lanes, *queue[1:]))

    lanes = begin(jnp.arange(num_lanes, dtype=jnp.int32))
    rows = jax.tree.map(
        lambda x: jnp.zeros((num_rows, *x.shape[1:]), x.dtype), left(lanes)
    )
    queue = lanes, rows, jnp.int32(num_lanes)
    queue = jax.lax.while_loop(lambda q: (q[0].pair < num_rows).any(), go_on, queue)
    return queue[1]


def as_variants(moves: Moves, kind: Any = float) -> Moves:
    """Moves whose entries are arrays of one length, or a ValueError."""
    rows = Moves(*map(np.asarray, moves))
    if (rows.walk <= 0).any() or (rows.share < 0).any() or (rows.share > 1).any():
        raise ValueError("the walk must be positive, and its share between 0 and 1")
    if (rows.lag < 1).any() or (rows.k < 0).any():
        raise ValueError("the lag must be at least 1, and k at least 0")
    if (rows.k > rows.m).any():
        raise ValueError("the average ends before it begins: m must be at least k")
    shape = np.broadcast_shapes((1,), *(np.shape(x) for x in rows))
    kinds = {name: jnp.int32 for name in ("lag", "k", "m")}
    return Moves(
        *(
            jnp.asarray(np.broadcast_to(x, shape), kinds.get(name, kind))
            for name, x in rows._asdict().items()
        )
    )


def run_pairs(
    key: Key[Array, ""],
    kernel: PairKernel,
    value: Callable,
    moves: Moves,
    num_pairs: int,
    extra: Any = (),
    times: Sequence[int] | Int[np.ndarray, " times"] = (0,),
    num_lanes: int = 256,
    most_steps: int = 1_000_000,
) -> Pairs:
    """Run independent pairs of chains until they have met and reached step m.

    Parameters
    ----------
    value
        From a state, and ``extra``, to the statistics: (statistics,).
    moves
        Where its entries are arrays, each pair is run in so many variants with one key.
    times
        At which to bound the Wasserstein distance.
    num_lanes
        Pairs that move at a time.
    most_steps
        A pair that has not met by then is given up.

    Examples
    --------
    >>> def start(key):
    ...     return 9 + jax.random.normal(key, (2,))
    >>> kernel = pair_kernel(lambda x: -0.5 * x @ x, 3, start)
    >>> moves = Moves(step_size=0.5, walk=0.5, share=0.2, k=5, m=20)
    >>> key, value = jax.random.key(0), lambda state, _: state.position
    >>> z = run_pairs(key, kernel, value, moves, num_pairs=1000).estimates
    >>> bool((abs(z.mean(0)) < 4 * z.std(0) / 1000**0.5).all())
    True
    """
    variants = as_variants(moves, jax.eval_shape(kernel.start, key).dtype)
    number = num_pairs * len(variants.lag)
    lanes = min(num_lanes, number)

    def program(key: Array, variants: Moves, extra: Any, *limits: Any) -> Pairs:
        job = PairJob(key, kernel, lambda state: value(state, extra), variants, *limits)
        return run_lanes(job, number, lanes)

    name = value, number, lanes
    compiled_program = compiled(kernel.step, name, lambda: jax.jit(program))
    limits = jnp.asarray(times, jnp.int32), jnp.int32(most_steps)
    found = jax.device_get(compiled_program(key, variants, extra, *limits))
    return jax.tree.map(lambda x: x.reshape(num_pairs, -1, *x.shape[1:]), found)


def recommend_window(
    meeting: Int[np.ndarray, " repeats"], quantile: float = 0.99, length: float = 10.0
) -> dict[str, int]:
    """Lag, k and m from meeting times of a pilot with lag 1.

    Examples
    --------
    >>> recommend_window(np.arange(1, 102), quantile=0.9)
    {'lag': 90, 'k': 90, 'm': 900}
    """
    if not 0 < quantile <= 1 or not length >= 1:
        raise ValueError("give a quantile up to 1, and a length of at least 1")
    enough = np.quantile(np.asarray(meeting) - 1, quantile, method="higher")
    k = max(1, int(enough))
    return {"lag": k, "k": k, "m": int(length * k)}


def problem_kernel(problem: Problem, num_integration_steps: int) -> PairKernel:
    """Pairs in the latent space of a map: they come from N(0, I)."""
    density, like = problem.logdensity, problem.position

    def start(key: Array) -> Array:
        return jax.random.normal(key, like.shape, like.dtype)

    def make() -> PairKernel:
        return pair_kernel(density, num_integration_steps, start)

    return compiled(density, ("pairs", num_integration_steps), make)


class PairPlan(NamedTuple):
    """All that a job needs to know, apart from the problem. It can be pickled.

    Parameters
    ----------
    scheme, order
        "plain", "antithetic", "stein" or "antithetic+stein", and the features of the
        latter two.
    beta
        Coefficients of the Stein features.
    num_integration_steps
        Leapfrog steps in a trajectory, or in a straight flight.
    moves
        The other settings.
    meeting
        Meeting times of the pilot, with lag 1.
    gradients
        What the pilot cost.

    Examples
    --------
    >>> moves = Moves(step_size=0.4, walk=0.2, share=0.1, lag=20, k=20, m=200)
    >>> plan = PairPlan("plain", "none", np.zeros((0, 1)), 4, moves, np.zeros(9), 0)
    >>> plan.variants.sign
    (1.0,)
    """

    scheme: str
    order: Order
    beta: Float[np.ndarray, "features statistics"]
    num_integration_steps: int
    moves: Moves
    meeting: Int[np.ndarray, " repeats"]
    gradients: int

    @property
    def variants(self) -> Moves:
        """A pair, or a pair and its mirror image under the same key."""
        both = self.scheme.startswith("antithetic")
        return self.moves._replace(sign=(1.0, -1.0) if both else (1.0,))


def pilot_pairs(
    key: Array, problem: Problem, leaps: int, moves: Moves, num_pairs: int, most: int
) -> tuple[np.ndarray, int]:
    """Meeting times with lag 1, (repeats, variants), and what they cost."""
    kernel = problem_kernel(problem, leaps)
    value = compiled(kernel.step, "energy", lambda: lambda x, _: x.logdensity[None])
    found = run_pairs(key, kernel, value, moves, num_pairs, most_steps=most)
    return found.meeting, leaps * int(found.moves.sum())


# Random walks that a pilot tries: their deviation times the root of the dimension, and
# their share of all steps.
WALKS, SHARES = (2.0, 0.5, 0.1), (0.03, 0.1, 0.3)
# Steps after which a pilot gives up.
PILOT_STEPS = 2000


def choose_walk(
    key: Array, problem: Problem, step_size: float, leaps: int, length: float
) -> tuple[Moves, int]:
    """The random walk that costs least, and what it cost to find it.

    Jobs of one length m are compared: what is lost to steps before k, and to steps that
    are random walks. These get nowhere.
    """
    walk, share = (x.ravel() for x in np.meshgrid(WALKS, SHARES))
    walk = walk / np.sqrt(problem.dim)
    grid = Moves(np.full(walk.size, step_size), walk, share)
    meeting, cost = pilot_pairs(key, problem, leaps, grid, 64, PILOT_STEPS)
    late = np.quantile(meeting, 0.9, axis=0, method="higher").astype(float)
    worth = (1 - share) * (1 - late / (length * late.min()))
    best = int(worth.argmax())
    if late[best] == NEVER:
        raise ValueError(
            f"chains do not meet within {PILOT_STEPS} steps: a better map would make "
            "the posterior rounder; with modes far apart, chains are no way to it"
        )
    return Moves(step_size, float(walk[best]), float(share[best])), cost


def pair_value(problem: Problem, order: Order) -> Callable:
    """From a state, and coefficients, to f less Stein features."""

    def value(state: Any, beta: Array) -> Array:
        f = problem.statistic(state.position)
        if order == "none":
            return f
        features = stein_features(state.position, state.logdensity_grad, order)
        return f - features[: len(beta)] @ beta

    return compiled(problem.statistic, ("pair value", order), lambda: value)


def fit_pair_beta(
    key: Array, problem: Problem, scheme: str, order: Order, sampler: Any
) -> tuple[np.ndarray, int]:
    """Coefficients of the Stein features, and how many steps of a chain they cost."""
    if order == "none":
        return np.zeros((0, problem.statistic(problem.position).size)), 0
    keys = jax.random.split(key)
    algorithm = find_scheme(scheme).build(sampler, problem.logdensity)
    like = problem.position
    z = jax.random.normal(keys[0], (BETA_CHAINS, *like.shape), like.dtype)
    states, draws = start_mirrored(algorithm, z), BETA_CHAINS * BETA_STEPS
    options = scheme, BETA_STEPS, draws, None, order
    _, plan, _ = learn(keys[1], algorithm, states, problem, *options)
    return plan.beta, draws * find_scheme(scheme).num_targets


# Chains that learn the coefficients of Stein features, and their steps.
BETA_CHAINS, BETA_STEPS = 128, 300


def plan_pairs(
    key: Key[Array, ""],
    problem: Problem,
    scheme: str = "antithetic+stein",
    order: Order | None = None,
    quantile: float = 0.99,
    length: float = 10.0,
) -> PairPlan:
    """Find out, once, how pairs should move; every job then uses the same plan.

    Parameters
    ----------
    problem
        Usually in the latent space of a map, as ``Problem.through`` makes it.
    scheme
        "plain", "antithetic", "stein" or "antithetic+stein".
    order
        Of the Stein features; by default the highest that the pilot can fit.
    quantile
        Of the meeting times: k, and the lag.
    length
        m, in units of k.

    Examples
    --------
    >>> from swindles.models import Model, make_problem
    >>> problem = make_problem(Model(lambda x: -jnp.sum(jnp.cosh(x)), jnp.zeros(2)))
    >>> plan = plan_pairs(jax.random.key(0), problem, "plain")
    >>> plan.moves.lag == plan.moves.k < plan.moves.m
    True
    """
    parts, keys = find_scheme(scheme), jax.random.split(key, 4)
    if parts.has_control:
        raise ValueError(f"pairs have no control chain: {scheme!r} is not for them")
    draws = BETA_CHAINS * BETA_STEPS // 2
    order = (order or affordable_order(problem.dim, draws)) if parts.stein else "none"
    adapted = adapt_step_size(keys[0], problem)
    size, leaps = adapted.step_size, adapted.num_integration_steps
    moves, tried = choose_walk(keys[1], problem, size, leaps, max(length, 2))
    meeting, watched = pilot_pairs(keys[2], problem, leaps, moves, 256, most=100_000)
    moves = moves._replace(**recommend_window(meeting.ravel(), quantile, length))
    beta, steps = fit_pair_beta(keys[3], problem, scheme, order, hmc(size, leaps))
    spent = adapted.gradients + tried + watched + leaps * steps
    return PairPlan(scheme, order, beta, leaps, moves, meeting.ravel(), spent)


class Tally(NamedTuple):
    """Mean and scatter of independent rows.

    Parameters
    ----------
    number
        How many.
    mean
        Their mean.
    scatter
        Sum of squared deviations from it.

    Examples
    --------
    >>> both = tally(np.array([[1.0], [2.0]])) + tally(np.array([[6.0]]))
    >>> both.number, both.mean.tolist(), both.scatter.tolist()
    (3, [3.0], [14.0])
    """

    number: int
    mean: Float[np.ndarray, " entries"]
    scatter: Float[np.ndarray, " entries"]

    @property
    def error(self) -> Float[np.ndarray, " entries"]:
        """Standard error of the mean."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.sqrt(self.scatter / np.float64(self.number - 1) / self.number)

    def __add__(self, other: Any) -> "Tally":
        """The tally of all rows together."""
        number = self.number + other.number
        step = other.mean - self.mean
        between = step**2 * self.number * other.number / number
        mean = self.mean + step * other.number / number
        return Tally(number, mean, self.scatter + other.scatter + between)


def tally(rows: Float[np.ndarray, "rows entries"]) -> Tally:
    """Number, mean and scatter of rows."""
    values = np.asarray(rows, np.float64)
    return Tally(len(values), values.mean(0), ((values - values.mean(0)) ** 2).sum(0))


class PairReport(NamedTuple):
    """What a job has found, or several that were merged.

    Parameters
    ----------
    names
        Of the statistics.
    estimate
        The unbiased estimates, one for each repeat, as a ``Tally``.
    alone
        What the chains say without the correction: biased.
    meeting
        Meeting times.
    times, distance
        Terms of the bound on the Wasserstein distance at these times, in z.
    moves
        The settings of the plan.
    gradients
        What it cost.
    keys
        Of all jobs in it.
    fingerprint
        Numbers that tell one problem from another.

    Examples
    --------
    >>> one = Tally(2, np.zeros(1), np.ones(1))
    >>> moves, meeting = Moves(0.3, 0.1, 0.1, 9, 9, 90), np.array([[12], [15]])
    >>> rest = np.zeros(1, int), one, moves, 10, ((0, 1),), (1.0,)
    >>> report = PairReport(["x"], one, one, meeting, *rest)
    >>> report.mcse.round(3).tolist(), report.total_variation([0])[0].tolist()
    ([0.707], [1.0])
    """

    names: list[str]
    estimate: Tally
    alone: Tally
    meeting: Int[np.ndarray, "repeats variants"]
    times: Int[np.ndarray, " times"]
    distance: Tally
    moves: Moves
    gradients: int
    keys: tuple[tuple[int, ...], ...]
    fingerprint: tuple[float, ...]

    @property
    def mean(self) -> Float[np.ndarray, " statistics"]:
        """The answer."""
        return self.estimate.mean

    @property
    def mcse(self) -> Float[np.ndarray, " statistics"]:
        """Its standard error."""
        return self.estimate.error

    def interval(
        self, level: float = 0.95
    ) -> tuple[Float[np.ndarray, " statistics"], Float[np.ndarray, " statistics"]]:
        """Lower and upper ends of a confidence interval (Student's t)."""
        half = stdtrit(self.estimate.number - 1, (1 + level) / 2) * self.mcse
        return self.mean - half, self.mean + half

    def total_variation(
        self, times: Sequence[int] | Int[np.ndarray, " times"]
    ) -> tuple[Float[np.ndarray, " times"], Float[np.ndarray, " times"]]:
        """Bounds on a chain's distance from its target after some steps; errors."""
        return bound_total_variation(self.meeting, self.moves.lag, times)

    def warnings(self) -> list[str]:
        """Reasons not to trust these numbers, in words; empty when there are none."""
        found, lost = [], int((self.meeting == NEVER).sum())
        if lost:
            found.append(
                f"{lost} of {self.meeting.size} pairs have not met in the time they "
                "were given: without them the answer would be biased, so there is none"
            )
        late = (self.meeting > self.moves.k + self.moves.lag).mean()
        if late > 0.1:
            found.append(
                f"{late:.0%} of the pairs met later than the plan expected: the error "
                "may have heavy tails. Plan anew, with larger k"
            )
        if self.estimate.number < 20:
            found.append(f"{self.estimate.number} repeats are few for an error bar")
        return found


def fingerprint(problem: Problem) -> tuple[float, ...]:
    """Numbers that tell problems apart: log densities and statistics at some places."""
    z = jnp.asarray(np.random.default_rng(0).normal(size=(3, problem.dim)) / 2, float)

    def look() -> tuple[float, ...]:
        level = np.asarray(jax.vmap(problem.logdensity)(z), float)
        statistics = np.asarray(jax.vmap(problem.statistic)(z), float).mean(1)
        return tuple(np.append(level[1:] - level[0], statistics).tolist())

    return compiled(problem.logdensity, ("fingerprint", problem.statistic), look)


def average_pairs(
    key: Key[Array, ""],
    problem: Problem,
    plan: PairPlan,
    num_pairs: int = 64,
    num_lanes: int = 256,
    patience: int = 100,
) -> PairReport:
    """One job: independent pairs of chains, and the average of what they say.

    Parameters
    ----------
    key
        Every job needs its own.
    plan
        From ``plan_pairs``, the same for all jobs.
    num_pairs
        Repeats; in an antithetic scheme each has two pairs.
    num_lanes
        Pairs that move at a time.
    patience
        A pair that has not met after so many times m steps is given up.

    Examples
    --------
    >>> from swindles.models import Model, make_problem
    >>> problem = make_problem(Model(lambda x: -jnp.sum(jnp.cosh(x)), jnp.zeros(2)))
    >>> moves = Moves(0.9, 0.5, 0.1, lag=10, k=10, m=100)
    >>> plan = PairPlan("antithetic", "none", np.zeros((0, 2)), 2, moves, np.ones(9), 0)
    >>> jobs = [average_pairs(jax.random.key(i), problem, plan, 32) for i in (1, 2)]
    >>> report = merge(jobs)
    >>> bool((abs(report.mean) <= 4 * report.mcse + 1e-6).all()), report.estimate.number
    (True, 64)
    """
    moves, leaps = plan.moves, plan.num_integration_steps
    times = np.unique(np.linspace(0, moves.k, 33).astype(int))
    kernel, value = problem_kernel(problem, leaps), pair_value(problem, plan.order)
    beta = jnp.asarray(plan.beta, problem.position.dtype)
    most, inputs = patience * moves.m, (key, kernel, value, plan.variants)
    pairs = run_pairs(*inputs, num_pairs, beta, times, num_lanes, most)
    gaps = np.where(pairs.meeting[..., None] < NEVER, pairs.distance, np.nan)
    return PairReport(
        problem.names,
        tally(pairs.estimates),
        tally(pairs.average.mean(1)),
        pairs.meeting,
        times,
        tally(gaps.mean(1)),
        moves,
        int(pairs.moves.sum() * leaps + 2 * pairs.moves.size),
        (tuple(np.ravel(jax.random.key_data(key)).tolist()),),
        fingerprint(problem),
    )


def merge(reports: Sequence[PairReport]) -> PairReport:
    """The report of all repeats of several jobs: whatever they say is averaged.

    Raises ValueError when they are of different problems or plans, or share a key.

    Examples
    --------
    >>> one = Tally(2, np.zeros(1), np.ones(1))
    >>> moves, meeting = Moves(0.3, 0.1, 0.1, 9, 9, 90), np.array([[12], [15]])
    >>> rest = np.zeros(1, int), one, moves, 10
    >>> jobs = [
    ...     PairReport(["x"], one, one, meeting, *rest, ((0, i),), (1.0,))
    ...     for i in range(3)
    ... ]
    >>> merge(jobs).estimate.number, merge(jobs).gradients
    (6, 30)
    """
    first, *others = reports
    merged = first
    for each in others:
        check_mergeable(merged, each)
        merged = merged._replace(
            estimate=merged.estimate + each.estimate,
            alone=merged.alone + each.alone,
            meeting=np.concatenate([merged.meeting, each.meeting]),
            distance=merged.distance + each.distance,
            gradients=merged.gradients + each.gradients,
            keys=merged.keys + each.keys,
        )
    return merged


def check_mergeable(one: PairReport, other: PairReport) -> None:
    """Raise ValueError unless two reports may be averaged."""
    same_names = one.names == other.names
    if not same_names or not np.allclose(
        one.fingerprint, other.fingerprint, 1e-3, 1e-2
    ):
        raise ValueError(
            "these reports are of different problems: the log density, the map or the "
            "statistics differ"
        )
    if one.moves != other.moves or one.meeting.shape[1] != other.meeting.shape[1]:
        raise ValueError("these reports are of different plans: use one for all jobs")
    if set(one.keys) & set(other.keys):
        raise ValueError(
            "two of these reports have the same key, so the same random numbers: an "
            "average over both would look better than it is. Give each job its own"
        )


def bound_total_variation(
    meeting: Int[np.ndarray, "repeats variants"],
    lag: int,
    times: Sequence[int] | Int[np.ndarray, " times"],
) -> tuple[Float[np.ndarray, " times"], Float[np.ndarray, " times"]]:
    """Upper bounds on the total variation distance from the target, and their errors.

    Examples
    --------
    >>> meeting = np.array([[11], [13], [16], [32]])
    >>> bound_total_variation(meeting, 10, [0, 5, 30])[0].tolist()
    [1.0, 0.75, 0.0]
    """
    after = np.asarray(meeting)[..., None] - lag - np.asarray(times)
    terms = np.maximum(np.ceil(after / lag), 0)
    terms = np.where(np.asarray(meeting)[..., None] < NEVER, terms, np.inf)
    each = terms.mean(1)
    with np.errstate(invalid="ignore"):
        error = each.std(0, ddof=1) / np.sqrt(len(each))
    return np.minimum(each.mean(0), 1), error
