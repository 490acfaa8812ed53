"""Scale: all your cores, all your GPUs, all your hosts.

Mirrored from book/scale.md: edit there, then run `make mirror`.
"""

import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array
from jax.experimental.multihost_utils import broadcast_one_to_all
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

# The one axis along which anything is spread.
AXIS = "chains"
# How sums are put together: one rule for each leaf, as ``joined`` takes them.
Rules = list[int | str]


# Fewer chains than this on a device are not worth another one, unless one asks for it.
LEAST_CHAINS = 16
CHOSEN: ContextVar[int | None] = ContextVar("CHOSEN", default=None)


@contextmanager
def use_devices(number: int) -> Iterator[None]:
    """Spread chains over the first so many devices, here and in all that is called.

    Without it they are spread over all devices that there are.

    Examples
    --------
    >>> with use_devices(1):
    ...     chain_mesh(4096) is None
    True
    """
    there = jax.device_count()
    if not 1 <= number <= there:
        raise ValueError(
            f"there are {there} devices, not {number}: on a CPU, call "
            f"swindles.use_cores({number}) first"
        )
    if jax.process_count() > 1 and number not in (1, there):
        raise ValueError(f"many processes use all {there} devices, or one each")
    token = CHOSEN.set(number)
    try:
        yield
    finally:
        CHOSEN.reset(token)


@cache
def make_mesh(number: int) -> Mesh:
    """A mesh of the first so many devices, of one axis."""
    return Mesh(np.array(jax.devices()[:number]), (AXIS,))


def chain_mesh(num_chains: int) -> Mesh | None:
    """The devices that so many chains are spread over; None for the usual one.

    Examples
    --------
    >>> chain_mesh(4) is None  # too few to be spread
    True
    """
    asked = CHOSEN.get()
    number = asked or jax.device_count()
    if number == 1 or (asked is None and num_chains < LEAST_CHAINS * number):
        return None
    if num_chains % (2 * number):
        less = num_chains - num_chains % (2 * number)
        raise ValueError(
            f"{num_chains} chains cannot be spread evenly over {number} devices, an "
            f"even number on each: take {f'{less} or ' * (less > 0)}{less + 2 * number}"
            ", or run on one device with swindles.scale.use_devices(1)"
        )
    return make_mesh(number)


def even_chains(wanted: int) -> int:
    """So many chains, or as many more as the devices need to share them.

    Examples
    --------
    >>> with use_devices(1):
    ...     even_chains(128)
    128
    """
    number = CHOSEN.get() or jax.device_count()
    share = 1 if number == 1 else LEAST_CHAINS * number
    return -(-wanted // share) * share


def by_device(
    mesh: Mesh | AbstractMesh | None,
    function: Callable[[Any, Any, int], tuple[Any, Any]],
    states: Any,
    sums: Any,
    rules: Rules | None,
    axis: int = 0,
) -> tuple[Any, Any]:
    """Let each device take the steps of its own chains, with sums of its own.

    ``function`` goes from states, sums and the number of devices to states and sums.
    The sums are put together once, at the end, by their ``rules``. Without rules all is
    left to the compiler, which may have to add over devices at every step.
    """
    if mesh is None or rules is None:
        return function(states, sums, 1)
    leaves, tree = jax.tree.flatten(sums)
    each = [chain_axis(x.ndim, rule) for x, rule in zip(leaves, rules, strict=True)]
    places = chain_axis(axis + 1, axis), jax.tree.unflatten(tree, each)
    join = {"sum": jax.lax.psum, "mean": jax.lax.pmean}

    def on_device(states: Any, sums: Any) -> tuple[Any, Any]:
        states, sums = function(states, sums, mesh.size)
        parts = zip(jax.tree.leaves(sums), rules, strict=True)
        whole = [join[r](x, AXIS) if r in join else x for x, r in parts]
        return states, jax.tree.unflatten(tree, whole)

    return jax.shard_map(
        on_device, mesh=mesh, in_specs=places, out_specs=places, check_vma=False
    )(states, sums)


Kind = TypeVar("Kind", bound=type)
JOINED: dict[type, dict[str, int | str]] = {}


def joined(**rules: int | str) -> Callable[[Kind], Kind]:
    """How the fields of some sums are put together that devices have made.

    A number is the axis of the chains, counted from the end; "sum" and "mean" are over
    devices. Other fields are the same on all devices.

    Examples
    --------
    >>> from typing import NamedTuple
    >>> @joined(total=-1, most="mean")
    ... class Mine(NamedTuple):
    ...     total: Array  # (chains,)
    ...     most: Array  # ()
    >>> sum_rules(Mine(np.zeros(4), np.zeros(())))
    [-1, 'mean']
    """

    def remember(kind: Kind) -> Kind:
        JOINED[kind] = rules
        return kind

    return remember


def sum_rules(sums: Any) -> Rules | None:
    """The rule of every leaf of some sums; None where one is of a kind not known."""

    def is_known(node: Any) -> bool:
        return type(node) in JOINED

    rules: Rules = []
    for node in jax.tree.leaves(sums, is_leaf=is_known):
        if not is_known(node):
            return None
        for name, part in node._asdict().items():
            rule = JOINED[type(node)].get(name, "same")
            rules += [rule] * len(jax.tree.leaves(part))
    return rules


def chain_axis(ndim: int, axis: int | str) -> PartitionSpec:
    """Where the chains of an array are; nowhere, for a rule that is no axis."""
    if isinstance(axis, str):
        return PartitionSpec()
    return PartitionSpec(*[None] * (axis % ndim), AXIS)


def row_mesh(number: int, batch: int) -> Mesh | None:
    """The devices that so many rows are spread over, by batches; None for the usual."""
    devices = CHOSEN.get() or jax.device_count()
    return make_mesh(devices) if devices > 1 and number > batch else None


def spread_rows(mesh: Mesh | None, function: Callable) -> Callable:
    """A function of something and of rows, each device with rows of its own."""
    if mesh is None:
        return function
    rows = PartitionSpec(AXIS)
    places = PartitionSpec(), rows
    return jax.shard_map(
        function, mesh=mesh, in_specs=places, out_specs=rows, check_vma=False
    )


def own_part(array: Array, number: int, devices: int) -> Array:
    """Of an array with an entry for every chain, those of this device's chains."""
    if devices == 1:
        return array
    first = jax.lax.axis_index(AXIS) * number
    return jax.lax.dynamic_slice_in_dim(array, first, number)


def put_chains(mesh: Mesh | None, tree: Any, axes: int | Rules | None = 0) -> Any:
    """A pytree with its chains on their devices; ``axes`` are as in ``joined``."""
    if mesh is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    same: Rules = ["same" if axes is None or isinstance(axes, list) else axes]
    rules = axes if isinstance(axes, list) else same * len(leaves)

    def put(leaf: Any, rule: int | str) -> Array:
        there = NamedSharding(mesh, chain_axis(np.ndim(leaf), rule))
        if jax.process_count() == 1 or getattr(leaf, "sharding", None) == there:
            return jax.device_put(leaf, there)
        value = np.asarray(fetch(leaf))
        return jax.make_array_from_callback(value.shape, there, value.__getitem__)

    put_leaves = [put(x, rule) for x, rule in zip(leaves, rules, strict=True)]
    return jax.tree.unflatten(structure, put_leaves)


@cache
def gather_program(mesh: Mesh) -> Callable:
    """What makes every device hold all of some arrays."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def fetch(tree: Any) -> Any:
    """A pytree of which every process has all. On one process it has already."""

    def is_elsewhere(leaf: Any) -> bool:
        return not (leaf.is_fully_addressable or leaf.is_fully_replicated)

    leaves, structure = jax.tree.flatten(tree)
    away = [i for i, x in enumerate(leaves) if isinstance(x, Array) and is_elsewhere(x)]
    if away:
        mesh = leaves[away[0]].sharding.mesh
        parts = gather_program(mesh)([leaves[i] for i in away])
        for i, part in zip(away, parts, strict=True):
            leaves[i] = np.asarray(part)
    return jax.tree.unflatten(structure, leaves)


def use_cores(number: int | None = None) -> int:
    """Make devices of the cores of a CPU, before JAX computes anything.

    By default of all cores that this process may use. Returns how many there are. Call
    it right after ``import swindles``: importing BlackJAX makes JAX start.

    Examples
    --------
    >>> import swindles
    >>> swindles.use_cores(jax.device_count()) == jax.device_count()
    True
    """
    may_use = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    number = number or len(may_use(0))
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as reason:
        there = len(jax.devices("cpu"))
        if there == number:
            return there
        raise RuntimeError(
            f"JAX has already started with {there} device{'s' * (there > 1)}: call "
            "swindles.use_cores() right after `import swindles`, before other imports "
            "(that of blackjax starts JAX) and before anything is computed; or set "
            f"JAX_NUM_CPU_DEVICES={number} in the environment"
        ) from reason
    return number


def is_alone() -> bool:
    """Whether this process has not joined others."""
    return not jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this is the process that prints, shows progress and writes files.

    Examples
    --------
    >>> is_first()
    True
    """
    return is_alone() or jax.process_index() == 0


def agree(number: float) -> float:
    """The number that the first process has, for all of them."""
    if is_alone():
        return number
    with jax.enable_x64(True):
        return float(broadcast_one_to_all(np.float64(number)))


def require_same(what: str, value: Any) -> None:
    """Raise ValueError in a process where something is not as in the first one."""
    code = float(zlib.crc32(repr(value).encode()))
    if agree(code) != code:
        raise ValueError(
            f"{what} is not the same in process {jax.process_index()} as in the first: "
            "start all processes with the same script and the same arguments"
        )


def shared_time() -> float:
    """Seconds on the clock of the first process: all decide by the same one."""
    return agree(time.perf_counter())


def use_hosts(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    timeout: int = 30,
) -> None:
    """Be one of several processes that run the same script, and share their devices.

    Call it in each, before JAX computes anything. Under Slurm, Open MPI and in the
    cloud JAX finds out who is who; else say it.

    Parameters
    ----------
    coordinator
        Address and port of the first process: "10.0.0.1:1234".
    processes, process
        How many there are, and which one this is, from 0 on.
    timeout
        Seconds until a process that says nothing is given up, and all end.

    Examples
    --------
    >>> import swindles
    >>> swindles.use_hosts("localhost:1234", 2, 0)  # doctest: +SKIP
    """
    jax.distributed.initialize(
        coordinator, processes, process, heartbeat_timeout_seconds=timeout
    )
    sys.excepthook = end_with_words


def end_with_words(kind: Any, error: Any, trace: Any) -> None:
    """What one of several processes does with an error that nobody catches.

    It does not wait for the others: when it is gone, they end, too.
    """
    who = f"process {jax.process_index()} of {jax.process_count()}"
    traceback.print_exception(kind, error, trace)
    lost = isinstance(error, jax.errors.JaxRuntimeError)
    if lost and "RESOURCE_EXHAUSTED" not in str(error):
        print(
            f"swindles: {who} has lost another one, or its network, and ends. Start "
            "all again, with the same file and as many as you like: the run goes on.",
            file=sys.stderr,
        )
    else:
        print(f"swindles: {who} ends, and the others with it.", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)
