"""Coupling: one key, many chains.

Mirrored from book/coupling.md: edit there, then run `make mirror`.
"""

from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.base import SamplingAlgorithm
from blackjax.mcmc import integrators
from blackjax.mcmc.random_walk import normal
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Key, Num
from tqdm import tqdm

from swindles.scale import (
    by_device,
    chain_mesh,
    fetch,
    is_first,
    joined,
    own_part,
    put_chains,
    sum_rules,
)

LogDensity = Callable[[Any], Array]
# A sampler with its settings made: give it a log density to run on.
Sampler = Callable[[LogDensity], SamplingAlgorithm]


def couple(**algorithms: SamplingAlgorithm) -> SamplingAlgorithm:
    """Several sampling algorithms driven by one key, as one sampling algorithm.

    Its states and infos are NamedTuples with the names given here as fields. ``init``
    starts all chains at one position.

    Examples
    --------
    >>> sampler = hmc(step_size=0.5, num_integration_steps=3)
    >>> algorithm = couple(one=sampler(jnp.sin), other=sampler(jnp.cos))
    >>> state = algorithm.init(jnp.array(1.0))
    >>> state, info = algorithm.step(jax.random.key(0), state)
    >>> bool(state.one.position == state.other.position), info._fields
    (False, ('one', 'other'))
    """
    chains = coupled(*algorithms)

    def init(position: Any, rng_key: Any = None) -> Any:
        return chains(*(a.init(position, rng_key) for a in algorithms.values()))

    def step(rng_key: Any, state: Any) -> tuple[Any, Any]:
        each = zip(algorithms.values(), state, strict=True)
        moved = [algorithm.step(rng_key, mine) for algorithm, mine in each]
        states, infos = zip(*moved, strict=True)
        return chains(*states), chains(*infos)

    return SamplingAlgorithm(init, step)


def rebuild_coupled(names: tuple[str, ...], values: tuple) -> Any:
    """Coupled chains from the names and the values: how they are unpickled."""
    return coupled(*names)(*values)


@cache
def coupled(*names: str) -> Any:
    """A NamedTuple with a field for each of several coupled chains.

    Examples
    --------
    >>> coupled("plus", "minus")(plus=1, minus=2)
    Coupled(plus=1, minus=2)
    """

    def reduce(self: Any) -> tuple:
        return rebuild_coupled, (names, tuple(self))

    body = {"__reduce__": reduce, "__slots__": ()}
    return type("Coupled", (namedtuple("Coupled", names),), body)


def require_positive(**numbers: float) -> None:
    """Raise ValueError unless every number is positive and finite.

    A number that JAX is tracing has no value yet, and passes.
    """
    for name, number in numbers.items():
        if isinstance(number, jax.core.Tracer):
            continue
        if not (np.isfinite(number) and number > 0):
            raise ValueError(f"{name} must be a positive number, got {number}")


def hmc(
    step_size: float,
    num_integration_steps: int,
    jitter: float = 0.0,
    integrator: Callable = integrators.velocity_verlet,
) -> Sampler:
    """BlackJAX's HMC with unit mass.

    With ``jitter`` the step size, and so the trajectory length, is multiplied at every
    step by a number drawn uniformly from 1 - jitter to 1 + jitter. The draw comes from
    the step's key, so coupled chains share it.

    Examples
    --------
    >>> algorithm = hmc(0.3, 5)(lambda x: -0.5 * jnp.sum(x**2))
    >>> algorithm.init(jnp.ones(2)).logdensity.item()
    -1.0
    """
    require_positive(step_size=step_size, num_integration_steps=num_integration_steps)
    kernel = blackjax.hmc.build_kernel(integrator)

    def stretched(key: Any) -> Any:
        draw = jax.random.uniform(jax.random.fold_in(key, 0), minval=-1.0)
        return step_size * (1 + jitter * draw)

    def sampler(logdensity: LogDensity) -> SamplingAlgorithm:
        def step(key: Any, state: Any) -> Any:
            size = stretched(key) if jitter else step_size
            unit_mass = jnp.ones_like(ravel_pytree(state.position)[0])
            return kernel(
                key, state, logdensity, size, unit_mass, num_integration_steps
            )

        return SamplingAlgorithm(
            lambda x, _=None: blackjax.hmc.init(x, logdensity), step
        )

    return sampler


def mala(step_size: float) -> Sampler:
    """BlackJAX's MALA; ``step_size`` is that of one leapfrog step.

    Examples
    --------
    >>> algorithm = mala(0.5)(lambda x: -0.5 * jnp.sum(x**2))
    >>> state, info = algorithm.step(jax.random.key(0), algorithm.init(jnp.ones(2)))
    >>> state.position.shape, bool(0 < info.acceptance_rate <= 1)
    ((2,), True)
    """
    require_positive(step_size=step_size)
    return lambda logdensity: blackjax.mala(logdensity, step_size**2 / 2)


def random_walk(step_size: float) -> Sampler:
    """BlackJAX's Gaussian random walk; ``step_size`` is the proposal's deviation.

    Examples
    --------
    >>> algorithm = random_walk(0.5)(lambda x: -0.5 * jnp.sum(x**2))
    >>> state, info = algorithm.step(jax.random.key(0), algorithm.init(jnp.ones(2)))
    >>> state.position.shape, bool(0 < info.acceptance_rate <= 1)
    ((2,), True)
    """
    require_positive(step_size=step_size)

    def move(rng_key: Any, position: Any) -> Any:
        deviations = jnp.full_like(ravel_pytree(position)[0], step_size)
        return normal(deviations)(rng_key, position)

    return lambda logdensity: blackjax.additive_step_random_walk(logdensity, move)


def compiled(owner: Callable, name: Any, make: Callable[[], Any]) -> Any:
    """What ``make()`` returns, kept by the function ``owner`` under a name.

    A program that is compiled for a sampler is kept as long as the sampler, and no
    longer.

    Examples
    --------
    >>> def owner():
    ...     pass
    >>> one = compiled(owner, "sine", lambda: jax.jit(jnp.sin))
    >>> one is compiled(owner, "sine", lambda: jax.jit(jnp.sin))
    True
    """
    attributes = getattr(owner, "__dict__", {})
    kept_by, programs = attributes.get("_swindles_compiled", (None, {}))
    if kept_by is not owner:  # wrappers copy the attributes of what they wrap
        programs = {}
        attributes["_swindles_compiled"] = owner, programs
    if name not in programs:
        programs[name] = make()
    return programs[name]


def start(algorithm: SamplingAlgorithm, positions: Any, key: Any = None) -> Any:
    """States of many chains; ``positions`` has the chains along its first axis.

    ``key`` is for the few samplers whose ``init`` is random.

    Examples
    --------
    >>> algorithm = couple(plus=hmc(0.3, 5)(lambda x: -0.5 * jnp.sum(x**2)))
    >>> start(algorithm, jnp.zeros((4, 2))).plus.position.shape
    (4, 2)
    """
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(positions)}
    if len(sizes) != 1 or sizes in ({()}, {(0,)}):
        raise ValueError(
            "positions need one leading axis, the chains, of the same length in every "
            f"leaf; got leading sizes {sorted(sizes)}"
        )
    keys = None if key is None else jax.random.split(key, sizes.pop()[0])
    init = compiled(algorithm.init, "all", lambda: jax.jit(jax.vmap(algorithm.init)))
    states = init(positions, keys)
    for path, leaf in jax.tree_util.tree_leaves_with_path(states):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not jnp.isfinite(leaf).all():
            bad = int((~jnp.isfinite(leaf)).reshape(len(leaf), -1).any(1).sum())
            raise ValueError(
                f"{bad} of {len(leaf)} chains start with a value that is not finite in "
                f"{jax.tree_util.keystr(path)}: move the start or mend the log density"
            )
    return states


def step_keys(key: Array, step: ArrayLike, num_chains: int, devices: int = 1) -> Array:
    """The keys of all chains at one step of a run; on a device, those of its own."""
    keys = jax.random.split(jax.random.fold_in(key, step), devices * num_chains)
    return own_part(keys, num_chains, devices)


def take_steps(
    key: Array,
    states: Any,
    carry: Any,
    first: int,
    last: int,
    step: Callable,
    update: Callable,
    store: bool = False,
    devices: int = 1,
) -> tuple[Any, Any]:
    """Take the steps from ``first`` up to ``last`` with all chains of a device."""
    num_chains = len(jax.tree.leaves(states)[0])

    def body(i: Array, carried: tuple[Any, Any]) -> tuple[Any, Any]:
        states, carry = carried
        states, infos = jax.vmap(step)(step_keys(key, i, num_chains, devices), states)
        if not store:
            return states, update(carry, states, infos)
        row = update(states, infos)
        return states, jax.tree.map(lambda rows, new: rows.at[i].set(new), carry, row)

    return jax.lax.fori_loop(first, last, body, (states, carry))


def block_program(
    algorithm: SamplingAlgorithm,
    update: Callable,
    store: bool = False,
    mesh: Any = None,
) -> Callable:
    """``take_steps`` for an algorithm and an update, compiled once."""

    # No ``partial``: JAX remembers its signature, and with it the step, for ever.
    def program(key: Array, states: Any, carry: Any, first: int, last: int) -> Any:
        def steps(states: Any, carry: Any, devices: int) -> Any:
            fixed = algorithm.step, update, store, devices
            return take_steps(key, states, carry, first, last, *fixed)

        if mesh is None:
            return steps(states, carry, 1)
        rows = [1 - leaf.ndim for leaf in jax.tree.leaves(carry)]
        rules = rows if store else sum_rules(carry)
        return by_device(mesh, steps, states, carry, rules)

    name = update, store, mesh
    return compiled(algorithm.step, name, lambda: jax.jit(program, donate_argnums=2))


def block_edges(num_steps: int, num_blocks: int, progress: bool) -> Iterator[tuple]:
    """First and last step of every block, moving a progress bar along."""
    edges = np.linspace(0, num_steps, min(num_blocks, num_steps) + 1).astype(int)
    hidden = {} if progress and is_first() else {"disable": True}
    with tqdm(total=num_steps, delay=2, leave=False, **hidden) as bar:
        for first, last in pairwise(edges.tolist()):
            yield first, last
            bar.update(last - first)


class Run(NamedTuple):
    """Chains that have taken some steps, and what was summed on the way.

    Parameters
    ----------
    states
        Of all chains, now.
    rows
        The sums of each block, along a new first axis. A ``Total`` has no such axis.
    steps
        Taken so far. They number the random numbers, so a run that goes on is the run
        that never stopped.

    Examples
    --------
    >>> algorithm = couple(plus=hmc(0.3, 5)(lambda x: -0.5 * jnp.sum(x**2)))
    >>> count = jnp.zeros(()), lambda sums, *_: sums + 1
    >>> begun = begin_run(start(algorithm, jnp.zeros((4, 2))), count[0])
    >>> later = add_block(jax.random.key(0), begun, algorithm, count, 5)
    >>> later.steps, add_block(jax.random.key(0), later, algorithm, count, 3).rows
    (5, array([5., 3.], dtype=float32))
    """

    states: Any
    rows: Any
    steps: int


class Total(NamedTuple):
    """Sums of which ``run`` returns the total over all blocks, in double precision.

    Parameters
    ----------
    value
        The sums.

    Examples
    --------
    >>> algorithm = couple(plus=hmc(0.3, 5)(lambda x: -0.5 * jnp.sum(x**2)))
    >>> states = start(algorithm, jnp.zeros((4, 2)))
    >>> count = Total(jnp.zeros(())), lambda sums, *_: Total(sums.value + 1)
    >>> states, counts = run(jax.random.key(0), algorithm, states, 10, count)
    >>> counts.value.item()
    10.0
    """

    value: Num[Array | np.ndarray, "..."]


def is_total(node: Any) -> bool:
    """Whether a node of a pytree is a ``Total``."""
    return isinstance(node, Total)


def begin_run(states: Any, zero: Any) -> Run:
    """A run before its first block."""

    def empty(x: Any) -> Any:
        if is_total(x):
            return Total(np.zeros(np.shape(x.value), np.float64))
        return np.empty((0, *np.shape(x)), x.dtype)

    return Run(states, jax.tree.map(empty, zero, is_leaf=is_total), 0)


def append_row(rows: Any, sums: Any) -> Any:
    """The rows with those of one more block; in a ``Total`` they are added."""

    def put(old: Any, new: Any) -> Any:
        if is_total(old):
            return Total(old.value + np.asarray(new.value, np.float64))
        return np.concatenate([old, np.asarray(new)[None]])

    return jax.tree.map(put, rows, sums, is_leaf=is_total)


def add_block(
    key: Key[Array, ""],
    run: Run,
    algorithm: SamplingAlgorithm,
    fold: tuple[Any, Callable],
    num_steps: int,
) -> Run:
    """The run with one more block of steps. ``fold`` is as in ``run``.

    Examples
    --------
    >>> algorithm = couple(plus=hmc(0.3, 5)(lambda x: -0.5 * jnp.sum(x**2)))
    >>> count = jnp.zeros(()), lambda sums, *_: sums + 1
    >>> begun = begin_run(start(algorithm, jnp.zeros((4, 2))), count[0])
    >>> add_block(jax.random.key(0), begun, algorithm, count, 5).steps
    5
    """
    zero, update = fold
    mesh = chain_mesh(len(jax.tree.leaves(run.states)[0]))
    program = block_program(algorithm, update, mesh=mesh)
    first, last = run.steps, run.steps + num_steps
    sums = put_chains(mesh, jax.tree.map(jnp.array, zero), sum_rules(zero))
    states, sums = program(key, put_chains(mesh, run.states), sums, first, last)
    return Run(states, append_row(run.rows, fetch(sums)), last)


def keep_nothing(sums: Any, states: Any, infos: Any) -> Any:
    """Update of a run whose only purpose is to move the chains."""
    return sums


def run(
    key: Key[Array, ""],
    algorithm: SamplingAlgorithm,
    states: Any,
    num_steps: int,
    fold: tuple[Any, Callable] = ((), keep_nothing),
    num_blocks: int = 20,
    progress: bool = True,
) -> tuple[Any, Any]:
    """Run all chains and keep running sums.

    Parameters
    ----------
    states
        As ``start`` or an earlier run returned them.
    fold
        Pair (zero, update). The sums begin as ``zero`` and become, after every step,
        ``update(sums, states, infos)``, where states and infos are those of all chains.
        They begin anew in every block. The default keeps nothing: a warm-up.

    Returns
    -------
    states
        After the last step.
    sums
        With the blocks along a new first axis. A ``Total`` has no such axis.

    Examples
    --------
    >>> algorithm = couple(plus=hmc(0.3, 5)(lambda x: -0.5 * jnp.sum(x**2)))
    >>> states = start(algorithm, jnp.zeros((4, 2)))
    >>> count = (jnp.zeros(()), lambda sums, states, infos: sums + 1)
    >>> states, counts = run(jax.random.key(0), algorithm, states, 10, count, 2)
    >>> counts.tolist()
    [5.0, 5.0]
    """
    require_positive(num_steps=num_steps, num_blocks=num_blocks)
    now = begin_run(states, fold[0])
    for first, last in block_edges(num_steps, num_blocks, progress):
        now = add_block(key, now, algorithm, fold, last - first)
    return now.states, now.rows


def positions(states: Any, infos: Any = None) -> Any:
    """Where each coupled chain is: the observer that ``record`` uses by default."""
    return type(states)(*(state.position for state in states))


def observed_row(
    key: Array, algorithm: SamplingAlgorithm, observe: Callable, states: Any
) -> tuple[Any, Any]:
    """What is stored of a step, and the devices that can store it for their chains."""
    num_chains = len(jax.tree.leaves(states)[0])

    def row(states: Any) -> Any:
        keys = step_keys(key, 0, len(jax.tree.leaves(states)[0]))
        return observe(*jax.vmap(algorithm.step)(keys, states))

    mesh, whole = chain_mesh(num_chains), jax.eval_shape(row, states)
    if mesh is None:
        return whole, None
    share = num_chains // mesh.size
    part = jax.eval_shape(row, jax.tree.map(lambda x: x[:share], states))
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True)
    apart = all(
        (one.shape[:1], other.shape[:1]) == ((num_chains,), (share,))
        for one, other in pairs
    )
    return whole, mesh if apart else None  # else left to the compiler


def record(
    key: Key[Array, ""],
    algorithm: SamplingAlgorithm,
    states: Any,
    num_steps: int,
    observe: Callable[[Any, Any], Any] = positions,
    progress: bool = True,
) -> tuple[Any, Any]:
    """Run all chains and store ``observe(states, infos)`` at every step.

    Returns the states after the last step, and what was stored with the steps along a
    new first axis.

    Examples
    --------
    >>> algorithm = couple(plus=hmc(0.3, 5)(lambda x: -0.5 * jnp.sum(x**2)))
    >>> states = start(algorithm, jnp.zeros((4, 2)))
    >>> states, trace = record(jax.random.key(0), algorithm, states, 10)
    >>> trace.plus.shape
    (10, 4, 2)
    """
    require_positive(num_steps=num_steps)
    row, mesh = observed_row(key, algorithm, observe, states)
    rows = jax.tree.map(lambda x: jnp.zeros((num_steps, *x.shape), x.dtype), row)
    program = block_program(algorithm, observe, True, mesh)
    states, rows = put_chains(mesh, states), put_chains(mesh, rows, 1)
    for first, last in block_edges(num_steps, 20, progress):
        states, rows = program(key, states, rows, first, last)
    return states, jax.device_get(fetch(rows))


@joined(acceptance=-1, accepted=-1, decoupled=-1, divergent=-1)
class Rates(NamedTuple):
    """How often coupled chains accept, and how often they disagree.

    Each is a sum over steps, by the chain's name, of shape (chains,).
    """

    steps: Any  # ()
    acceptance: dict[str, Any]  # acceptance probabilities
    accepted: dict[str, Any]  # proposals accepted
    decoupled: dict[str, Any]  # decisions unlike those of "plus"
    divergent: Any  # (chains,): steps at which a trajectory diverged

    def means(self) -> dict[str, dict[str, float]]:
        """Acceptance and decoupling over all steps, as plain numbers."""
        steps = np.sum(self.steps)
        found = {"acceptance": self.acceptance, "decoupling": self.decoupled}
        return {
            rate: {
                name: float(np.sum(total) / steps / np.shape(total)[-1])
                for name, total in by_chain.items()
            }
            for rate, by_chain in found.items()
        }


def empty_rates(states: Any) -> Rates:
    """Rates over no steps yet, for these coupled chains."""
    none = jnp.zeros(len(jax.tree.leaves(states)[0]))
    every = {name: none for name in states._fields}
    others = {name: none for name in states._fields if name != "plus"}
    return Rates(jnp.zeros(()), every, every, others, none)


def add_rates(rates: Rates, infos: Any) -> Rates:
    """Add one step of all chains. A sampler that never rejects counts as accepting."""
    by_chain, none = infos._asdict(), jnp.zeros_like(rates.divergent)
    accepted = {
        name: getattr(info, "is_accepted", none == 0) for name, info in by_chain.items()
    }
    probability = {
        name: getattr(info, "acceptance_rate", 1 + none)
        for name, info in by_chain.items()
    }
    apart = {name: accepted[name] != accepted["plus"] for name in rates.decoupled}
    astray = [getattr(info, "is_divergent", none != 0) for info in by_chain.values()]
    return Rates(
        rates.steps + 1,
        *jax.tree.map(
            jnp.add,
            (rates.acceptance, rates.accepted, rates.decoupled, rates.divergent),
            (probability, accepted, apart, jnp.stack(astray).any(0)),
        ),
    )
