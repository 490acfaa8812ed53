"""Coupling: one key, many chains.

Mirrored from book/coupling.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable, Iterator
from functools import partial
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

LogDensity = Callable[[Any], Array]
# A sampler with its settings made: give it a log density to run on.
Sampler = Callable[[LogDensity], SamplingAlgorithm]


def couple(**algorithms: SamplingAlgorithm) -> SamplingAlgorithm:
    """Several sampling algorithms driven by one key, as one sampling algorithm.

    Its states and infos are dictionaries under the names given here. ``init`` starts
    all chains at one position.

    Examples
    --------
    >>> sampler = hmc(step_size=0.5, num_integration_steps=3)
    >>> algorithm = couple(one=sampler(jnp.sin), other=sampler(jnp.cos))
    >>> state = algorithm.init(jnp.array(1.0))
    >>> state, info = algorithm.step(jax.random.key(0), state)
    >>> sorted(state)
    ['one', 'other']
    """

    def init(position: Any, rng_key: Any = None) -> dict[str, Any]:
        return {name: a.init(position, rng_key) for name, a in algorithms.items()}

    def step(rng_key: Any, states: dict) -> tuple[dict[str, Any], dict[str, Any]]:
        moved = {name: a.step(rng_key, states[name]) for name, a in algorithms.items()}
        states = {name: state for name, (state, _) in moved.items()}
        return states, {name: info for name, (_, info) in moved.items()}

    return SamplingAlgorithm(init, step)


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


@partial(jax.jit, static_argnames=("init",))
def init_all(positions: Any, keys: Any, init: Callable) -> Any:
    """The states of all chains, compiled once for each algorithm and shape."""
    return jax.vmap(init)(positions, keys)


def start(algorithm: SamplingAlgorithm, positions: Any, key: Any = None) -> Any:
    """States of many chains; ``positions`` has the chains along its first axis.

    ``key`` is for the few samplers whose ``init`` is random.

    Examples
    --------
    >>> algorithm = couple(plus=hmc(0.3, 5)(lambda x: -0.5 * jnp.sum(x**2)))
    >>> start(algorithm, jnp.zeros((4, 2)))["plus"].position.shape
    (4, 2)
    """
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(positions)}
    if len(sizes) != 1 or sizes in ({()}, {(0,)}):
        raise ValueError(
            "positions need one leading axis, the chains, of the same length in every "
            f"leaf; got leading sizes {sorted(sizes)}"
        )
    keys = None if key is None else jax.random.split(key, sizes.pop()[0])
    states = init_all(positions, keys, algorithm.init)
    for path, leaf in jax.tree_util.tree_leaves_with_path(states):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not jnp.isfinite(leaf).all():
            bad = int((~jnp.isfinite(leaf)).reshape(len(leaf), -1).any(1).sum())
            raise ValueError(
                f"{bad} of {len(leaf)} chains start with a value that is not finite in "
                f"{jax.tree_util.keystr(path)}: move the start or mend the log density"
            )
    return states


def step_keys(key: Array, step: ArrayLike, num_chains: int) -> Array:
    """The keys of all chains at one step of a run."""
    return jax.random.split(jax.random.fold_in(key, step), num_chains)


@partial(
    jax.jit,
    static_argnames=("step", "update", "store"),
    donate_argnames=("carry",),
)
def advance(
    key: Array,
    states: Any,
    carry: Any,
    first: int,
    last: int,
    step: Callable,
    update: Callable,
    store: bool,
) -> tuple[Any, Any]:
    """Take the steps from ``first`` up to ``last`` with all chains."""
    num_chains = len(jax.tree.leaves(states)[0])

    def body(i: Array, carried: tuple[Any, Any]) -> tuple[Any, Any]:
        states, carry = carried
        states, infos = jax.vmap(step)(step_keys(key, i, num_chains), states)
        if not store:
            return states, update(carry, states, infos)
        row = update(states, infos)
        return states, jax.tree.map(lambda rows, new: rows.at[i].set(new), carry, row)

    return jax.lax.fori_loop(first, last, body, (states, carry))


def blocks(num_steps: int, num_blocks: int, progress: bool) -> Iterator[tuple]:
    """First and last step of every block, moving a progress bar along."""
    edges = np.linspace(0, num_steps, min(num_blocks, num_steps) + 1).astype(int)
    hidden = {} if progress else {"disable": True}
    with tqdm(total=num_steps, delay=2, leave=False, **hidden) as bar:
        for first, last in pairwise(edges.tolist()):
            yield first, last
            bar.update(last - first)


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


def room(zero: Any, num_blocks: int) -> Any:
    """Where to gather the sums of all blocks."""

    def empty(x: Any) -> Any:
        if is_total(x):
            return Total(np.zeros(x.value.shape, np.float64))
        return np.empty((num_blocks, *x.shape), x.dtype)

    return jax.tree.map(empty, zero, is_leaf=is_total)


def gather(kept: Any, sums: Any, row: int) -> None:
    """Put the sums of one block into their row, and add up those in a ``Total``."""

    def put(rows: Any, new: Any) -> None:
        if is_total(rows):
            np.add(rows.value, new.value, out=rows.value)
        else:
            rows[row] = new

    jax.tree.map(put, kept, sums, is_leaf=is_total)


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
    zero, update = fold
    kept = room(zero, min(num_blocks, num_steps))
    for row, (first, last) in enumerate(blocks(num_steps, num_blocks, progress)):
        sums = jax.tree.map(jnp.array, zero)
        states, sums = advance(
            key, states, sums, first, last, algorithm.step, update, store=False
        )
        gather(kept, sums, row)
    return states, kept


def positions(states: dict[str, Any], infos: Any = None) -> dict[str, Any]:
    """Where each coupled chain is: the observer that ``record`` uses by default."""
    return {name: state.position for name, state in states.items()}


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
    >>> trace["plus"].shape
    (10, 4, 2)
    """
    require_positive(num_steps=num_steps)
    keys = step_keys(key, 0, len(jax.tree.leaves(states)[0]))
    row = jax.eval_shape(lambda s: observe(*jax.vmap(algorithm.step)(keys, s)), states)
    rows = jax.tree.map(lambda x: jnp.zeros((num_steps, *x.shape), x.dtype), row)
    for first, last in blocks(num_steps, 20, progress):
        states, rows = advance(
            key, states, rows, first, last, algorithm.step, observe, store=True
        )
    return states, jax.device_get(rows)


class Rates(NamedTuple):
    """Sums over steps of two rates, each a mean over chains, by the chain's name."""

    steps: Array
    acceptance: dict[str, Array]  # mean acceptance probability
    decoupling: dict[str, Array]  # fraction of decisions unlike those of "plus"

    def means(self) -> dict[str, dict[str, float]]:
        """The rates over all steps (and blocks), as plain numbers."""
        steps = np.sum(self.steps)
        return {
            field: {name: float(np.sum(x) / steps) for name, x in sums.items()}
            for field, sums in zip(self._fields[1:], self[1:], strict=True)
        }


def empty_rates(states: dict[str, Any]) -> Rates:
    """Rates over no steps yet, for these coupled chains."""
    zero = {name: jnp.zeros(()) for name in states}
    others = {name: jnp.zeros(()) for name in states if name != "plus"}
    return Rates(jnp.zeros(()), zero, others)


def add_rates(rates: Rates, infos: dict[str, Any]) -> Rates:
    """Add one step of all chains. A sampler that never rejects counts as accepting."""

    def rate(name: str) -> Array:
        return jnp.mean(getattr(infos[name], "acceptance_rate", 1.0))

    def differs(name: str) -> Array:
        mine, plus = (
            getattr(infos[n], "is_accepted", jnp.array(True)) for n in (name, "plus")
        )
        return jnp.mean(mine != plus, dtype=float)

    return Rates(
        rates.steps + 1,
        {name: total + rate(name) for name, total in rates.acceptance.items()},
        {name: total + differs(name) for name, total in rates.decoupling.items()},
    )
