"""Estimate: the front door.

Mirrored from book/estimate.md: edit there, then run `make mirror`.
"""

import html
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from swindles.accuracy import Estimate
from swindles.blocks import (
    FIRST_BLOCK,
    SAVE_EVERY,
    Goal,
    Run,
    add_block,
    append,
    bias,
    drift,
    drop_half,
    estimate_rows,
    is_reached,
    look,
    make_flow,
    make_fold,
    make_goal,
    read_run,
    write_run,
)
from swindles.models import Flat, Model, flatten, need
from swindles.pilot import SCHEMES, Pilot, find_map, fly, tail
from swindles.transport import Affine, Transport, pareto_k


def heavy_tails(values: np.ndarray) -> np.ndarray:
    """Which statistics (draws, statistics) have tails too heavy for a reliable error.

    Examples
    --------
    >>> draws = np.random.default_rng(0).standard_cauchy((4000, 1))
    >>> heavy_tails(draws).tolist(), heavy_tails(np.arctan(draws)).tolist()
    ([True], [False])
    """

    def is_heavy(column: np.ndarray) -> bool:
        away = np.abs(column - np.median(column))
        away = away[away > 0]
        return away.size > 500 and pareto_k(np.log(away)) > 0.7

    return np.array([is_heavy(column) for column in values.T], bool)


# Fewer decouplings than this say too little about the error they make.
FEW = 30


def chain_doubts(run: Run) -> list[str]:
    """What the chains did that speaks against them, in words."""
    rows, found = run.rows, []
    steps, chains = np.sum(rows.plus.steps), rows.total.shape[1]
    late = rows.accepted[len(rows.accepted) // 2 :].sum(0)
    idle = int((late == 0).any(0).sum())
    if idle:
        found.append(f"{idle} of {chains} chains are stuck: a smaller step may help")
    astray = float(np.sum(rows.divergent) / steps / chains)
    if astray > 0.01:
        found.append(
            f"{astray:.0%} of the trajectories diverge: the log density is very steep "
            "somewhere, or not finite"
        )
    apart = int(np.sum(rows.decoupled))
    if 0 < apart < FEW:
        found.append(f"only {apart} decouplings: the error itself is not well known")
    if drift(run):
        found.append("the two halves of the run differ: the chains are still moving")
    if bias(run):
        found.append(
            "the swindled average is not that of the chain: the density is cut off, or "
            'a chain is lost; scheme="plain" is safe'
        )
    return found


def doubts(run: Run, estimate: Estimate, flat: Flat, transport: Transport) -> list[str]:
    """Reasons not to trust an answer, in words; none when there are none."""
    found = estimate.warnings() + chain_doubts(run)
    draws = run.draws.reshape(-1, flat.dim)
    values = jax.lax.map(
        lambda z: flat.statistic(transport(z)), jnp.asarray(draws), batch_size=256
    )
    heavy = heavy_tails(np.asarray(values, np.float64))
    if heavy.any():
        first = flat.names[int(heavy.argmax())]
        found.append(
            f"tails of {heavy.sum()} statistics ({first}) are too heavy for an error"
        )
    return found


def remarks(run: Run, estimate: Estimate) -> list[str]:
    """What is good to know, in words."""
    found, plan = [], run.plan
    if (estimate.mcse < 1.5 * plan.rounding).any():
        found.append("some errors are those of the arithmetic: jax_enable_x64 may help")
    if (estimate.mcse < 1.5 * np.sqrt(plan.shared)).any():
        found.append(
            "some errors are those of the control's mean, and stay as they are"
        )
    if run.pareto_k > 0.7:
        found.append(
            f"the posterior is far from the map (Pareto k {run.pareto_k:.1f}): a flow "
            "may help, see swindles.transport.fit_flow"
        )
    if run.stuck:
        found.append(f"{run.stuck} chains were stuck at their start and began anew")
    if run.dropped:
        found.append(f"the first {run.dropped} steps were dropped as warm-up")
    return found


class Outcome(NamedTuple):
    """What a run has come to."""

    estimate: Estimate
    run: Run
    goal: Goal
    names: list[str]
    reached: bool  # whether all errors are what was asked for
    warnings: list[str]  # reasons not to trust the numbers
    notes: list[str]  # good to know
    flat: Flat | None = None  # None when it was read from a file without a model
    transport: Any = None
    about: dict[str, Any] | None = None

    @property
    def trusted(self) -> bool:
        """Whether no guard speaks against the numbers."""
        return not self.warnings

    def restore(self, numbers: np.ndarray) -> Any:
        """Numbers in the shape of the statistics; by name, without a model."""
        if self.flat is not None:
            return self.flat.restore(numbers)
        return dict(zip(self.names, np.asarray(numbers).tolist(), strict=True))


class Numbers(Outcome):
    """The numbers of an outcome, in the shape of the statistics."""

    @property
    def mean(self) -> Any:
        """The expectations."""
        return self.restore(self.estimate.mean)

    @property
    def mcse(self) -> Any:
        """The standard errors of the expectations."""
        return self.restore(self.estimate.mcse)

    @property
    def sd(self) -> Any:
        """The standard deviations of the statistics under the posterior."""
        return self.restore(np.sqrt(self.estimate.variance))

    @property
    def ess(self) -> Any:
        """Independent draws that would give these errors."""
        return self.restore(self.estimate.ess)

    @property
    def rhat(self) -> Any:
        """Split R-hat."""
        return self.restore(self.estimate.rhat)


# Longer tables are cut.
MOST_LINES = 40
COLUMNS = ("", "mean", "error", "sd", "ESS", "R-hat")


def digits(value: float, error: float) -> str:
    """A number, up to the second digit of its error.

    Examples
    --------
    >>> digits(1.23456, 0.012), digits(1234.5, 150.0), digits(1.0, 0.0)
    ('1.235', '1234', '1')
    """
    if not np.isfinite(error) or error <= 0:
        return f"{value:.6g}"
    places = int(np.clip(1 - np.floor(np.log10(error)), 0, 12))
    return f"{value:.{places}f}"


def lines_of(report: Numbers) -> list[tuple[str, ...]]:
    """The lines of the table, the first MOST_LINES of them."""
    e, sd = report.estimate, np.sqrt(report.estimate.variance)
    columns = zip(report.names, e.mean, e.mcse, sd, e.ess, e.rhat, strict=True)
    return [
        (
            name,
            digits(mean, error),
            f"{error:.2g}",
            f"{sd:.3g}",
            f"{ess:.2g}",
            f"{r:.2f}",
        )
        for name, mean, error, sd, ess, r in list(columns)[:MOST_LINES]
    ]


def verdict(report: Numbers) -> list[str]:
    """Below the table: what was done, and whether to believe it."""
    run, goal = report.run, report.goal
    chains, steps = run.rows.total.shape[1], int(np.sum(run.rows.plus.steps))
    lines = [
        f"{run.plan.scheme}, {chains} chains x {steps} steps, {run.gradients:.2g} "
        f"gradients, {run.seconds:.0f} s"
    ]
    hidden = len(report.names) - MOST_LINES
    if hidden > 0:
        lines.insert(0, f"... and {hidden} more")
    ratio = report.estimate.mcse / goal.asked(np.sqrt(report.estimate.variance))
    worst = int(np.nanargmax(np.nan_to_num(ratio, nan=np.inf)))
    if not report.reached:
        lines.append(
            f"Not there yet: the error of {report.names[worst]} is {ratio[worst]:.3g} "
            "times what was asked for. Go on with report.resume()."
        )
    if report.warnings:
        lines.append("Do not trust these numbers:")
    lines += [f"- {reason}" for reason in report.warnings]
    return lines + [f"Note: {note}" for note in report.notes]


def as_text(report: Numbers) -> str:
    """The report as plain text."""
    table = [COLUMNS, *lines_of(report)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    rows = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
    return "\n".join([*rows, *verdict(report)])


def as_html(report: Numbers) -> str:
    """The report as a table for a notebook."""

    def line(cells: tuple[str, ...], tag: str) -> str:
        style = "padding: 0.1em 0.5em; text-align: right; white-space: nowrap"
        inner = [
            f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell in cells
        ]
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(line(cells, "td") for cells in lines_of(report))
    words = "<br>".join(map(html.escape, verdict(report)))
    table = f"<table>{line(COLUMNS, 'th')}{body}</table>"
    return f'<div style="overflow-x: auto">{table}</div><p>{words}</p>'


def draw(report: Numbers) -> Any:
    """A figure: the error against the cost, and the chains of the pilot."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
    gradients, _, worst, median = report.run.history.T
    axes[0].loglog(gradients, worst, label="largest")
    axes[0].loglog(gradients, median, label="median")
    axes[0].set(xlabel="gradient evaluations", ylabel="error / posterior sd")
    axes[0].xaxis.set_minor_formatter("")
    axes[0].yaxis.set_minor_formatter("")
    axes[0].legend()
    labels = {"plus": "$X^+$", "minus": "$X^-$", "control": "$Y$"}
    chains = SCHEMES[report.run.plan.scheme].chains
    for column, (name, label) in enumerate(labels.items()):
        if name in chains:
            trail = report.run.trails[-40:, column]
            axes[1].plot(trail, ".-", linewidth=0.8, label=label)
    axes[1].set(xlabel="step", ylabel="one latent coordinate")
    axes[1].legend()
    return figure


def as_dict(report: Numbers) -> dict[str, Any]:
    """Everything that the table shows, as plain lists, and the verdict."""
    e = report.estimate
    columns = {
        "mean": e.mean,
        "mcse": e.mcse,
        "sd": np.sqrt(e.variance),
        "ess": e.ess,
        "rhat": e.rhat,
    }
    return {
        "name": report.names,
        **{name: np.asarray(x).tolist() for name, x in columns.items()},
        "scheme": report.run.plan.scheme,
        "reached": report.reached,
        "warnings": report.warnings,
        "notes": report.notes,
    }


def as_frame(report: Numbers) -> Any:
    """The table as a pandas DataFrame, with a row for each statistic."""
    table = as_dict(report)
    columns = {name: table[name] for name in ("mean", "mcse", "sd", "ess", "rhat")}
    return need("pandas", "pandas").DataFrame(columns, index=report.names)


def as_arviz(report: Numbers) -> Any:
    """Draws of the constrained values, evenly spaced over the run, for ArviZ.

    They are few: 32 at most from each chain. The report's own numbers, which use every
    step, are in the group's attributes.
    """
    if report.flat is None:
        raise ValueError("a report without a model has no names for its draws")
    flat, transport = report.flat, report.transport
    see = jax.vmap(jax.vmap(lambda z: flat.constrain(transport(z))))
    values = jax.device_get(jax.jit(see)(jnp.asarray(report.run.draws)))
    leaves = jax.tree_util.tree_leaves_with_path(values)
    posterior = {
        jax.tree_util.keystr(path, simple=True, separator=".") or "x": leaf.swapaxes(
            0, 1
        )
        for path, leaf in leaves
    }
    table = as_dict(report)
    attributes = {name: table[name] for name in ("name", "mean", "mcse", "scheme")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more chains than draws: that is so
        return need("arviz", "arviz").from_dict(posterior, posterior_attrs=attributes)


class Report(Numbers):
    """Expectations with their errors, and how they came about.

    It prints as a table. ``mean``, ``mcse``, ``sd``, ``ess`` and ``rhat`` have the
    shape of the statistics; ``names`` are theirs. ``reached`` says whether the errors
    are what was asked for, ``trusted`` whether no guard speaks against them,
    ``warnings`` and ``notes`` why, in words. ``plot()`` draws the error against the
    work and the coupled chains. ``to_dict()``, ``to_pandas()`` and ``to_arviz()``
    export it; the last one has draws, evenly spaced over the run.

    Examples
    --------
    >>> report = estimate(lambda x: -x @ x / 2, jnp.zeros(2), relative=0.1)
    >>> report.trusted, sorted(report.to_dict())[:3]
    (True, ['ess', 'mcse', 'mean'])
    """

    __str__, _repr_html_, plot = as_text, as_html, draw
    to_dict, to_pandas, to_arviz = as_dict, as_frame, as_arviz

    def __repr__(self) -> str:
        """The same as ``str``."""
        return as_text(self)

    def save(self, path: str | Path) -> None:
        """Write the run to a file, to be read by ``load``."""
        write_run(path, self.run, self.about or {})

    def resume(
        self,
        mcse: Any = None,
        relative: float | None = None,
        seconds: float | None = 60.0,
        gradients: float | None = None,
        file: str | Path | None = None,
    ) -> "Report":
        """Go on to the same errors, or others, for so much time or work more."""
        if self.flat is None:
            raise ValueError("to go on, give `load` the model and its statistics")
        goal = make_goal(self.flat, mcse, relative, seconds, gradients)
        if mcse is None and relative is None:
            goal = self.goal._replace(seconds=seconds, gradients=gradients)
        return sail(self.run, self.flat, self.transport, goal, file, self.about or {})


def finish(
    run: Run, flat: Flat, transport: Transport, goal: Goal, about: dict
) -> Report:
    """The report on a run."""
    estimate = estimate_rows(run)
    found = doubts(run, estimate, flat, transport)
    asked = goal.asked(np.sqrt(estimate.variance))
    reached = bool((estimate.mcse <= asked).all())
    return Report(
        estimate,
        run,
        goal,
        flat.names,
        reached,
        found,
        remarks(run, estimate),
        flat,
        transport,
        about,
    )


def empty_run(
    key: Array, pilot: Pilot, flat: Flat, transport: Transport, k: float
) -> Run:
    """A run before its first step."""
    chains = len(pilot.states["plus"].position)
    zero = make_fold(pilot.plan, lambda z: flat.statistic(transport(z)), chains)[0]
    return Run(
        pilot.plan,
        transport if isinstance(transport, Affine) else None,
        np.asarray(jax.random.key_data(key)),
        pilot.states,
        jax.tree.map(lambda x: np.zeros((0, *x.shape), x.dtype), zero),
        np.zeros((0, chains, flat.dim), flat.position.dtype),
        FIRST_BLOCK,
        *(0, 0, 0.0, 0.0),
        np.zeros((0, 4)),
        pilot.trails,
        float(k),
        pilot.stuck,
        dict.fromkeys(SCHEMES, np.inf) | pilot.forecast,
    )


LAUNCHES = count(1)


def tidy() -> None:
    """Forget what was compiled for other models, at every twentieth call."""
    if next(LAUNCHES) % 20 == 0:
        jax.clear_caches()


def launch(
    key: Array,
    flat: Flat,
    transport: Transport | None,
    goal: Goal,
    names: list[str],
    num_chains: int,
) -> tuple[Run, Transport]:
    """Fit a map unless there is one, fly the pilot, and make an empty run."""
    tidy()
    begin, keys = time.perf_counter(), jax.random.split(key, 3)
    bar = tqdm(total=2, desc="fitting a map", delay=2, leave=False)
    to_x, k = transport, np.nan
    if to_x is None:
        to_x, k = find_map(keys[0], flat, num_chains)
    else:
        k = tail(keys[0], to_x, flat)[0]
    bar.update()
    bar.set_description("trying all schemes")
    pilot = fly(keys[1], flat, to_x, goal.asked, names, num_chains)
    bar.close()
    run = empty_run(keys[2], pilot, flat, to_x, k)
    return run._replace(seconds=time.perf_counter() - begin), to_x


def advance_run(run: Run, flow: Callable) -> tuple[Run, Estimate]:
    """One more block, a look at the error, and a look at the start."""
    run = add_block(run, flow)
    if len(run.draws) >= 16 and drift(run):
        run = drop_half(run)
    estimate = estimate_rows(run)
    return run._replace(history=append(run.history, look(run, estimate))), estimate


def sail(
    run: Run, flat: Flat, transport: Transport, goal: Goal, file: Any, about: dict
) -> Report:
    """Take blocks until the goal is reached or the budget is spent."""
    save: Callable = partial(write_run, file, about=about) if file else bool
    save(run)
    begin, spent, saved = time.perf_counter(), run.gradients, -np.inf
    flow = make_flow(run, flat, transport)
    done = len(run.draws) > 1 and is_reached(run, estimate_rows(run), goal)
    bar = tqdm(total=100, desc=run.plan.scheme, delay=2, leave=False)
    try:
        while not done:
            run, estimate = advance_run(run, flow)
            now = time.perf_counter()
            over = goal.is_spent(now - begin, run.gradients - spent)
            done = is_reached(run, estimate, goal) or (over and len(run.draws) > 3)
            if done or now - saved > SAVE_EVERY:
                save(run)
                saved = now
            show(bar, estimate, goal)
    except KeyboardInterrupt:
        if len(run.draws) < 2:
            raise
        save(run)
    bar.close()
    return finish(run, flat, transport, goal, about)


def show(bar: Any, estimate: Estimate, goal: Goal) -> None:
    """Move the progress bar: how much of the way to the goal, and the error now."""
    ratio = estimate.mcse / goal.asked(np.sqrt(estimate.variance))
    worst = float(np.nanmax(ratio, initial=1e-9))
    bar.n = int(100 * min(1.0, worst**-2))
    bar.set_postfix_str(f"error {worst:.2g} x asked, R-hat {estimate.rhat.max():.2f}")


def check_options(scheme: str | None, num_chains: int, dim: int) -> list[str]:
    """The names of the schemes to try; or a ValueError."""
    if scheme is not None and scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}: say one of {', '.join(SCHEMES)}")
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
    return list(SCHEMES) if scheme is None else [scheme]


def as_model(model: Any, position: Any) -> Model:
    """A model from a log density and a position, unless it is one already."""
    if isinstance(model, Model):
        return model
    if position is None:
        raise ValueError("give a position to start from, or a Model that has one")
    return Model(model, position)


def as_key(key: Any) -> Array:
    """A random key from a seed, or from a key of the old kind."""
    if isinstance(key, int):
        return jax.random.key(key)
    old = jnp.issubdtype(jnp.asarray(key).dtype, jnp.unsignedinteger)
    return jax.random.wrap_key_data(key) if old else key


def describe_model(flat: Flat) -> dict:
    """What a saved run must agree on with the model that goes on with it."""
    value = float(jax.jit(flat.logdensity)(flat.position))
    kind = str(flat.position.dtype)
    return {"names": flat.names, "logdensity": value, "dtype": kind}


def take_up(path: Path, about: dict, transport: Any) -> tuple[Run, Any]:
    """Read a run that is about the same thing, and its map."""
    run, before = read_run(path)
    other = [name for name in about if before.get(name) != about[name]]
    if other:
        raise ValueError(
            f"{path} holds another run, with another {' and '.join(other)}: name "
            "another file, or delete it"
        )
    if run.transport is None and transport is None:
        raise ValueError(f"{path} was run with a map of your own: give it again")
    return run, run.transport if transport is None else transport


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
    file: str | Path | None = None,
) -> Report:
    """Estimate posterior expectations to a given accuracy.

    Fits a map, lets a pilot choose step size and swindle, and runs in blocks until
    every error is small enough or the budget is spent.

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
        Sample no longer than this, reached or not; the map and the pilot come on top.
        None: no limit.
    gradients
        Sample with no more gradients of the log density than this.
    scheme
        "plain", "antithetic", "control", "cva", "stein" or "antithetic+stein". By
        default, what wins in a pilot run.
    transport
        A map of your own, a flow for instance.
    chains
        How many chains (or pairs of chains) to run.
    file
        Where to save the run. If the file exists, the run in it goes on.

    Examples
    --------
    >>> def logdensity(x):
    ...     return -jnp.sum(jnp.cosh(x["a"])) - x["b"] ** 2
    >>> start = {"a": jnp.zeros(2), "b": 1.0}
    >>> report = estimate(logdensity, start, relative=0.01)
    >>> report.reached, report.trusted, sorted(report.mean)
    (True, True, ['a', 'b'])
    """
    flat = flatten(as_model(model, position), statistics)
    goal = make_goal(flat, mcse, relative, seconds, gradients)
    names, key = check_options(scheme, chains, flat.dim), as_key(key)
    about = describe_model(flat) | {"chains": chains, "scheme": scheme}
    about["key"] = np.asarray(jax.random.key_data(key)).tolist()
    if file and Path(file).exists():
        run, transport = take_up(Path(file), about, transport)
    else:
        run, transport = launch(key, flat, transport, goal, names, chains)
    return sail(run, flat, transport, goal, file, about)


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
    ...     report = estimate(lambda x: -(x**2) / 2, 0.0, relative=0.1)
    ...     report.save(folder + "/run.npz")
    ...     load(folder + "/run.npz").names
    ['x']
    """
    run, about = read_run(Path(path))
    goal, names = Goal(None, 0.01, None, None), about["names"]
    if model is None:
        now = estimate_rows(run)
        found = now.warnings() + chain_doubts(run)
        notes = remarks(run, now)
        return Report(now, run, goal, names, False, found, notes, about=about)
    flat = flatten(as_model(model, position), statistics)
    run, to_x = take_up(Path(path), describe_model(flat), transport)
    return finish(run, flat, to_x, goal, about)
