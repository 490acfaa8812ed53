"""Neural transport: maps that bend.

Mirrored from book/neutra.md: edit there, then run `make mirror`.
"""

import json
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Key
from tqdm import tqdm

from swindles.models import need
from swindles.scale import is_first, shared_time
from swindles.transport import (
    Affine,
    Density,
    log_weight,
    log_weights,
)

try:
    import equinox as eqx
    import optax
    import paramax
    from flowjax.bijections import AbstractBijection, Chain
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
except ImportError:
    need("flowjax", "flows")  # says how to install it
    raise


class Bend(AbstractBijection):
    """Yeo and Johnson's power map on every axis, with a power of its own for each.

    Powers above 1 stretch the positive side and shorten the negative one.
    """

    raw: Array  # (dim,); zero leaves the axis as it is
    shape: tuple[int, ...]
    cond_shape: tuple[int, ...] | None

    def __init__(self, dim: int) -> None:
        """Start as the identity."""
        self.raw, self.shape, self.cond_shape = jnp.zeros(dim), (dim,), None

    def powers(self, x: Array) -> tuple[Array, Array]:
        """Side and power at every entry of a point, or of its image."""
        power = 0.01 + 1.98 * jax.nn.sigmoid(self.raw)
        return jnp.where(x < 0, -1, 1), jnp.where(x < 0, 2 - power, power)

    def transform_and_log_det(self, x: Any, condition: Any = None) -> tuple:
        """Bend, and the log-determinant of it."""
        side, power = self.powers(x)
        log = jnp.log1p(side * x)
        return side * jnp.expm1(power * log) / power, jnp.sum((power - 1) * log)

    def inverse_and_log_det(self, y: Any, condition: Any = None) -> tuple:
        """Straighten, and the log-determinant of it."""
        side, power = self.powers(y)
        log = jnp.log1p(power * side * y) / power
        return side * jnp.expm1(log), -jnp.sum((power - 1) * log)


class Design(NamedTuple):
    """The build of an autoregressive flow.

    Parameters
    ----------
    flows
        How many to chain.
    width
        Units in each hidden layer.
    depth
        Hidden layers.
    bend
        Whether to end with Yeo and Johnson's power map on every axis.

    Examples
    --------
    >>> Design(width=8, bend=True)
    Design(flows=3, width=8, depth=2, bend=True)
    """

    flows: int = 3
    width: int = 51
    depth: int = 2
    bend: bool = False


# The flow of the paper's sparse regression.
PAPER_FLOW = Design()


def build_flow(design: Design, dim: int, key: Array) -> AbstractBijection:
    """An inverse autoregressive flow that is nearly the identity, but for the order.

    Examples
    --------
    >>> build_flow(Design(), 3, jax.random.key(0)).shape
    (3,)
    """
    if dim < 2:
        raise ValueError("a flow bends some axes by others: it needs two dimensions")
    flow = masked_autoregressive_flow(
        key,
        base_dist=Normal(jnp.zeros(dim)),
        flow_layers=design.flows,
        nn_width=design.width,
        nn_depth=design.depth,
        nn_activation=jax.nn.elu,
        invert=False,
    ).bijection
    weights, rest = eqx.partition(flow, eqx.is_inexact_array)
    flow = eqx.combine(jax.tree.map(lambda weight: weight / 10, weights), rest)
    return Chain([flow, Bend(dim)]) if design.bend else flow


class Flow(NamedTuple):
    """A FlowJAX bijection, then an affine map: x = base(bijection(z)).

    Parameters
    ----------
    base
        The affine map.
    bijection
        The bijection.
    design
        How it was built; None for one of your own, which cannot be saved.

    Examples
    --------
    >>> from flowjax.bijections import Exp
    >>> to_x = Flow(Affine(jnp.ones(2), jnp.ones(2)), Exp((2,)))
    >>> to_x(jnp.zeros(2)).tolist()
    [2.0, 2.0]
    """

    base: Affine
    bijection: Any
    design: Design | None = None

    def __call__(self, z: Float[Array, " dim"]) -> Float[Array, " dim"]:
        """Map z to x."""
        return self.base(self.bijection.transform(z))

    def inverse(self, x: Float[Array, " dim"]) -> Float[Array, " dim"]:
        """Map x back to z, one coordinate after the other: slow."""
        return self.bijection.inverse(self.base.inverse(x))

    def with_log_det(
        self, z: Float[Array, " dim"]
    ) -> tuple[Float[Array, " dim"], Float[Array, ""]]:
        """Map z to x; the log-determinants of both maps add up."""
        y, first = self.bijection.transform_and_log_det(z)
        x, second = self.base.with_log_det(y)
        return x, first + second


class Schedule(NamedTuple):
    """How to fit a map by variational inference.

    Parameters
    ----------
    num_steps
        The most steps to take.
    batch
        Draws in each step.
    learning_rate
        The rate at first.
    tolerance
        Nats to gain in a tenth of the steps, to go on at that rate.
    seconds
        After which the fit should be done.

    Examples
    --------
    >>> Schedule(num_steps=50, batch=8, learning_rate=1e-3).tolerance
    0.02
    """

    num_steps: int
    batch: int
    learning_rate: float
    tolerance: float = 0.02
    seconds: float = np.inf


def check_schedule(schedule: Schedule) -> None:
    """Raise ValueError when a schedule makes no sense."""
    for name, least in {"num_steps": 10, "batch": 2, "learning_rate": 0}.items():
        value = getattr(schedule, name)
        if not (np.isfinite(value) and value >= least and value > 0):
            raise ValueError(
                f"{name} is {value}: give at least 10 steps, 2 draws and a positive "
                "learning rate"
            )


def adam(dim: int) -> optax.GradientTransformation:
    """Adam's direction, from gradients of a length of at most twice the dimension."""
    clip = optax.clip_by_global_norm(2.0 * dim)
    return optax.chain(clip, optax.scale_by_adam())


class Training(NamedTuple):
    """The state of a fit."""

    params: Any
    optimizer: Any
    average: Any  # of the params over the last steps


def make_trainer(weigh: Callable, dim: int, batch: int) -> Callable:
    """A function that takes training steps; ``weigh(params, z)`` is a log weight.

    Its arguments are a key, a ``Training`` and rows (step, learning rate, weight in the
    average), one for each step. It returns the new ``Training`` and the losses.
    """

    def loss(params: Any, key: Array) -> Array:
        half = jax.random.normal(key, (batch // 2, dim))
        return -jax.vmap(partial(weigh, params))(jnp.concatenate([half, -half])).mean()

    def train(key: Array, training: Training, rows: Array) -> tuple[Training, Array]:
        def body(now: Training, row: Array) -> tuple[Training, Array]:
            step, rate, weight = row
            here = jax.random.fold_in(key, step.astype(int))
            value, slope = jax.value_and_grad(loss)(now.params, here)
            way, optimizer = adam(dim).update(slope, now.optimizer)
            params = jax.tree.map(lambda p, w: p - rate * w, now.params, way)
            mean = jax.tree.map(lambda a, p: a + weight * (p - a), now.average, params)
            return Training(params, optimizer, mean), value

        return jax.lax.scan(body, training, rows)

    return train


def training_rows(first: int, size: int, decay: int | None, rate: float) -> Array:
    """Rows for a trainer: a constant learning rate, or one that falls to zero.

    The rate falls from step ``decay`` on, for four times ``size`` steps. The average is
    over the last of those blocks.
    """
    steps = np.arange(first, first + size)
    if decay is None:
        return jnp.stack([steps, np.full(size, rate), np.ones(size)], 1)
    remaining = 1 - (steps - decay) / (4 * size)
    weights = 1 / np.maximum(steps - decay - 3 * size + 1, 1)
    return jnp.stack([steps, rate * remaining, weights], 1)


def has_settled(losses: list[np.ndarray], tolerance: float) -> bool:
    """Whether the last block of losses improves on the one before by too little.

    Too little is ``tolerance`` (in nats) plus two standard errors.
    """
    if len(losses) < 2:
        return False
    before, now = losses[-2:]
    noise = np.sqrt(before.var() / before.size + now.var() / now.size)
    return bool(before.mean() - now.mean() < tolerance + 2 * noise)


def check_loss(losses: np.ndarray, first: int) -> np.ndarray:
    """Raise ValueError at the first loss that is not finite; ``first`` is its step."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if bad.size:
        raise ValueError(
            f"the loss is {losses[bad[0]]} at step {first + bad[0]}: the log density "
            "is not finite at a draw of the map, or the learning rate is too large"
        )
    return losses


def minimize_loss(
    key: Array, weigh: Callable, params: Any, dim: int, schedule: Schedule
) -> tuple[Any, np.ndarray]:
    """Train in up to ten blocks: at a constant rate until settled, then four more.

    Or until there is time for no more than four. Returns the averaged parameters and
    the losses of all steps.
    """
    check_schedule(schedule)
    num_steps, batch, rate, tolerance, seconds = schedule
    size, begin, last = num_steps // 10, shared_time(), 0.0
    train = jax.jit(make_trainer(weigh, dim, batch))
    training = Training(params, adam(dim).init(params), params)
    losses: list[np.ndarray] = []
    decay = None
    hidden = {} if is_first() else {"disable": True}
    with tqdm(total=10 * size, delay=2, leave=False, **hidden) as bar:
        while decay is None or len(losses) * size < decay + 4 * size:
            first, now = len(losses) * size, shared_time() - begin
            late = now + 5 * (now - last) > seconds
            settled = late or len(losses) == 6 or has_settled(losses, tolerance)
            decay, last = first if decay is None and settled else decay, now
            rows = training_rows(first, size, decay, rate)
            training, loss = train(key, training, rows)
            losses.append(check_loss(np.asarray(loss, np.float64), first))
            bar.update(size)
            bar.set_postfix(loss=f"{losses[-1].mean():.2f}")
    return training.average, np.concatenate(losses)


class Fit(NamedTuple):
    """A fitted map and how good it is.

    Parameters
    ----------
    transport
        The map.
    loss
        Minus the ELBO, estimated at every step.
    log_weights
        Those of fresh draws.

    Examples
    --------
    >>> fit = Fit(None, loss=np.ones(10), log_weights=np.array([1.0, 3.0]))
    >>> fit.elbo, round(fit.elbo_error, 3)
    (2.0, 0.707)
    """

    transport: Any
    loss: Float[np.ndarray, " steps"]
    log_weights: Float[np.ndarray, " draws"]

    @property
    def elbo(self) -> float:
        """The evidence lower bound of the map."""
        return float(self.log_weights.mean())

    @property
    def elbo_error(self) -> float:
        """The standard error of ``elbo``."""
        return float(self.log_weights.std() / np.sqrt(self.log_weights.size))


def keep_better(
    key: Array, logdensity: Density, start: Affine, fitted: Any, loss: np.ndarray
) -> Fit:
    """Compare the fitted map with its start on the same fresh draws; keep the better.

    It warns when that is the start.
    """
    dim = start.shift.size
    before, after = (
        log_weights(key, logdensity, transport, dim, 4096)
        for transport in (start, fitted)
    )
    gain = after - before
    if gain.mean() < -2 * gain.std() / np.sqrt(gain.size):
        warnings.warn(
            f"the fit made the map worse by {-gain.mean():.3g} nats, so this is the "
            "one it started from: try a smaller learning rate or more steps",
            stacklevel=3,
        )
        fitted, after = start, before
    return Fit(fitted, loss, after)


FLOW_SCHEDULE = Schedule(num_steps=20_000, batch=256, learning_rate=1e-2)


def train_flow(
    key: Array, logdensity: Density, start: Affine, design: Design, schedule: Schedule
) -> tuple[Flow, np.ndarray]:
    """A flow followed by ``start``, trained; and the losses of all steps."""
    build_key, fit_key, _ = jax.random.split(key, 3)
    dim = start.shift.size
    bijection = build_flow(design, dim, build_key)
    params, rest = eqx.partition(bijection, eqx.is_inexact_array)

    def weigh(params: Any, z: Array) -> Array:
        return log_weight(logdensity, Flow(start, eqx.combine(params, rest)), z)

    params, loss = minimize_loss(fit_key, weigh, params, dim, schedule)
    return Flow(start, paramax.unwrap(eqx.combine(params, rest)), design), loss


def fit_flow(
    key: Key[Array, ""],
    logdensity: Density,
    start: Affine,
    design: Design = PAPER_FLOW,
    schedule: Schedule = FLOW_SCHEDULE,
    trials: int = 4,
) -> Fit:
    """Fit a flow followed by the affine map ``start``, by variational inference.

    Of ``trials`` flows, each with another order of the coordinates, the one that is
    best after a brief fit is fitted in full.

    Examples
    --------
    >>> from swindles.transport import identity, standard_normal
    >>> schedule = Schedule(num_steps=100, batch=16, learning_rate=1e-3)
    >>> design, start = Design(flows=1, width=4, depth=1), identity(2)
    >>> fit = fit_flow(jax.random.key(0), standard_normal, start, design, schedule, 1)
    >>> fit.transport(jnp.zeros(2)).shape
    (2,)
    """
    check_schedule(schedule)
    steps, batch = max(schedule.num_steps // 10, 10), max(schedule.batch // 2, 2)
    brief = schedule._replace(num_steps=steps, batch=batch, tolerance=-np.inf)

    def loss_after_trial(key: Array) -> float:
        return train_flow(key, logdensity, start, design, brief)[1][
            -steps // 10 :
        ].mean()

    keys = jax.random.split(key, trials)
    best = min(keys, key=loss_after_trial) if trials > 1 else key
    fitted, loss = train_flow(best, logdensity, start, design, schedule)
    return keep_better(jax.random.fold_in(key, 1), logdensity, start, fitted, loss)


def named_arrays(bijection: Any) -> dict[str, Array]:
    """The arrays of a bijection, each by the path to it."""
    arrays = eqx.filter(bijection, eqx.is_array)
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {"bijection" + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


# The format of the files, to be counted up when it changes.
MAP_FORMAT = 1


def map_fields(transport: Affine | Flow) -> dict[str, Any]:
    """A map as arrays with names, and the design of a flow as text."""
    fields: dict[str, Any] = {"format": MAP_FORMAT, "design": "null"}
    if isinstance(transport, Affine):
        return fields | transport._asdict()
    if isinstance(transport, Flow) and transport.design is not None:
        fields["design"] = json.dumps(transport.design._asdict())
        return fields | transport.base._asdict() | named_arrays(transport.bijection)
    raise ValueError("only an affine map or a flow of `fit_flow` can be saved")


def save_map(path: str | Path, transport: Affine | Flow) -> None:
    """Write a map to one file, to be read by ``load_map``.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> from swindles.transport import identity
    >>> with TemporaryDirectory() as folder:
    ...     save_map(folder + "/map.npz", identity(2))
    ...     sorted(np.load(folder + "/map.npz"))
    ['design', 'format', 'scale', 'shift']
    """
    fields = map_fields(transport)
    with open(path, "wb") as file:
        np.savez(file, **fields)


def restore_map(fields: dict[str, Any], path: Any) -> Affine | Flow:
    """The map that ``map_fields`` has taken apart; ``path`` is where that was found."""
    fields = dict(fields)
    try:
        version = int(fields.pop("format"))
        options = json.loads(str(fields.pop("design")))
        base = Affine(*(jnp.asarray(fields.pop(name)) for name in Affine._fields))
    except (ValueError, TypeError, KeyError) as problem:
        raise ValueError(f"{path} is not a file that `save_map` wrote") from problem
    if version != MAP_FORMAT:
        raise ValueError(f"{path} has format {version}, not {MAP_FORMAT}: fit it anew")
    if options is None:
        return base
    design = Design(**options)
    key = jax.random.key(0, impl="unsafe_rbg")  # quick to compile; no draw is kept
    blank = paramax.unwrap(build_flow(design, base.shift.size, key))
    shapes = {name: array.shape for name, array in named_arrays(blank).items()}
    if shapes != {name: array.shape for name, array in fields.items()}:
        raise ValueError(f"the arrays of {path} are not those of a flow of {design}")
    arrays, rest = eqx.partition(blank, eqx.is_array)
    leaves = [jnp.asarray(fields[name]) for name in shapes]
    arrays = jax.tree.unflatten(jax.tree.structure(arrays), leaves)
    return Flow(base, eqx.combine(arrays, rest), design)


def load_map(path: str | Path) -> Affine | Flow:
    """Read a map that ``save_map`` wrote.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> from swindles.transport import identity
    >>> with TemporaryDirectory() as folder:
    ...     save_map(folder + "/map.npz", identity(2))
    ...     load_map(folder + "/map.npz").scale.tolist()
    [1.0, 1.0]
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            fields = dict(file)
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as problem:
        raise ValueError(f"{path} is not a file that `save_map` wrote") from problem
    return restore_map(fields, path)
