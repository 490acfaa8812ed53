"""Pipeline: runs that survive.

Mirrored from book/pipeline.md: edit there, then run `make mirror`.
"""

import bz2
import csv
import io
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Shaped
from tqdm import tqdm

from swindles.scale import agree, is_first, require_same

Row = dict[str, Any]


class Job(Protocol):
    """Anything with a name that no other job has, and fields for a table."""

    @property
    def name(self) -> str:
        """The job in one word, good for a file."""

    def _asdict(self) -> Row:
        """The columns that say which job it is; named tuples have this."""


class Experiment(NamedTuple):
    """A table of results, made by jobs that can be done one by one.

    Parameters
    ----------
    name
        The name of the table.
    jobs
        Anything with a ``name`` that no other job has, and an ``_asdict``.
    measure
        From a job to its rows.

    Examples
    --------
    >>> class Square(NamedTuple):
    ...     number: int
    ...
    ...     @property
    ...     def name(self):
    ...         return f"square-{self.number}"
    >>> jobs = [Square(2), Square(3)]
    >>> squares = Experiment("squares", jobs, lambda job: [{"square": job.number**2}])
    >>> squares.measure(squares.jobs[1])
    [{'square': 9}]
    """

    name: str
    jobs: Sequence[Job]
    measure: Callable[[Any], list[Row]]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV, all of them or none; compressed if the name ends in .bz2.

    Of floating-point numbers four significant digits are kept.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "thirds.csv"
    ...     write_rows(path, [{"n": 1, "third": 1 / 3}, {"n": 2, "third": "2/3"}])
    ...     read_rows(path)
    [{'n': '1', 'third': '0.3333'}, {'n': '2', 'third': '2/3'}]
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        floats = {k: x for k, x in row.items() if isinstance(x, float | np.floating)}
        writer.writerow(row | {k: f"{x:.4g}" for k, x in floats.items()})
    data = text.getvalue().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    with draft.open("wb") as file:
        file.write(bz2.compress(data) if path.suffix == ".bz2" else data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, every value a string; none when it does not exist."""
    if not path.exists():
        return []
    data = path.read_bytes()
    text = bz2.decompress(data) if path.suffix == ".bz2" else data
    return list(csv.DictReader(io.StringIO(text.decode())))


def processor() -> str:
    """What the machine computes with."""
    import jax

    device = jax.devices()[0]
    name = device.device_kind if device.platform != "cpu" else platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if device.platform == "cpu" and cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        models = [line.split(":")[1] for line in lines if line.startswith("model name")]
        name = models[0].strip() if models else name
    may_use = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    number = len(may_use(0))
    return f"{name}, {number} core{'s' if number > 1 else ''}"


def revision() -> str:
    """The revision of the source, with a plus if it was changed since; or nothing.

    Results are no source: the first table that is written does not change it.
    """
    git = ["git", "-C", str(files("swindles"))]
    source = [":(top)", ":(top,exclude)book/results"]
    commands = [
        [*git, "rev-parse", "--short", "HEAD"],
        [*git, "status", "--porcelain", "--untracked-files=no", "--", *source],
    ]
    try:
        name, changes = (
            subprocess.run(each, capture_output=True, text=True, check=True).stdout
            for each in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name.strip() + ("+" if changes else "")


def provenance(*packages: str) -> Row:
    """What every row says about its origin.

    Parameters
    ----------
    packages
        Those whose versions matter beside JAX, BlackJAX and our own.

    Examples
    --------
    >>> list(provenance())
    ['revision', 'versions', 'hardware', 'date']
    """
    names = ("jax", "blackjax", *packages, "swindles")
    return {
        "revision": revision(),
        "versions": ", ".join(f"{name} {version(name)}" for name in names),
        "hardware": processor(),
        "date": date.today().isoformat(),
    }


def peak_memory() -> float:
    """The most memory this process has had, in megabytes; NaN where it is unknown."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "VmHWM" in lines:
            return int(lines["VmHWM"].split()[0]) / 1024
    try:
        import resource
    except ImportError:
        return np.nan
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def table_path(folder: Path, name: str) -> Path:
    """Where the table of an experiment is."""
    return folder / f"{name}.csv.bz2"


def collect(paths: Sequence[Path]) -> dict[str, list[Row]]:
    """The rows of all files, by the name of their job; the last file that has it."""
    found: dict[str, list[Row]] = {}
    for path in paths:
        mine: dict[str, list[Row]] = {}
        for row in read_rows(path):
            mine.setdefault(row["job"], []).append(row)
        found |= mine
    return found


def find_done(name: str, folder: Path) -> dict[str, list[Row]]:
    """The rows of an experiment that are there, by the name of their job."""
    parts = folder / "parts" / name
    return collect([table_path(folder, name), *parts.glob("*.csv")])


def finish(experiment: Experiment, folder: Path) -> dict[str, list[Row]]:
    """Do the jobs that are not done yet, and write the table. Returns all rows.

    They come by the name of the job, every value a string.

    Parameters
    ----------
    experiment
        What to do.
    folder
        Where the table is, or will be.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> class Square(NamedTuple):
    ...     number: int
    ...
    ...     @property
    ...     def name(self):
    ...         return f"square-{self.number}"
    >>> jobs = [Square(2), Square(3)]
    >>> squares = Experiment("squares", jobs, lambda job: [{"square": job.number**2}])
    >>> with TemporaryDirectory() as folder:
    ...     rows = finish(squares, Path(folder))
    >>> rows["square-3"][0]["square"]
    '9'
    """
    parts = folder / "parts" / experiment.name
    table, made_by = table_path(folder, experiment.name), provenance()
    done, first = find_done(experiment.name, folder), is_first()
    waiting = [job for job in experiment.jobs if job.name not in done]
    require_same(f"what is done of {experiment.name}", sorted(done))
    hidden = {} if first else {"disable": True}
    for job in (bar := tqdm(waiting, experiment.name, leave=False, **hidden)):
        bar.set_postfix_str(job.name)
        which = {"job": job.name} | job._asdict()
        path, rows = parts / f"{job.name}.csv", experiment.measure(job)
        if first:
            write_rows(path, [which | row | made_by for row in rows])
        agree(0)  # the others wait until it is written
        done |= collect([path])
    require_same(f"what was done of {experiment.name}", sorted(done))
    if first and experiment.jobs and (waiting or parts.exists()):
        write_rows(table, [row for job in experiment.jobs for row in done[job.name]])
        shutil.rmtree(parts, ignore_errors=True)
    return {job.name: done[job.name] for job in experiment.jobs}


Table = dict[str, Shaped[np.ndarray, " rows"]]
ORIGIN = ("revision", "versions", "hardware", "date")


def as_table(rows: Sequence[Row]) -> Table:
    """Rows as columns: numbers where all values are numbers, else strings.

    Examples
    --------
    >>> table = as_table([{"n": "1", "who": "a"}, {"n": "2", "who": "b"}])
    >>> table["n"].tolist(), table["who"].tolist()
    ([1.0, 2.0], ['a', 'b'])
    """
    table = {}
    for name in rows[0] if rows else []:
        column = np.array([row[name] for row in rows])
        try:
            table[name] = column if name in ORIGIN else column.astype(float)
        except ValueError:
            table[name] = column
    return table


def origin(table: Table) -> str:
    """Where a table comes from, in a line to print below it.

    Examples
    --------
    >>> made_by = {"revision": "1a2b3c4", "versions": "jax 1.0"}
    >>> made_by |= {"hardware": "a processor, 2 cores", "date": "2026-01-31"}
    >>> print(origin(as_table([{"square": "9"} | made_by])))
    Results of 2026-01-31: revision 1a2b3c4, jax 1.0, a processor, 2 cores.
    """
    when, at, using, on = (
        "; ".join(dict.fromkeys(table[name].tolist()))
        for name in ("date", "revision", "versions", "hardware")
    )
    return f"Results of {when}: revision {at}, {using}, {on}."


def rows_with(table: Table, wanted: dict[str, Any]) -> np.ndarray:
    """Numbers of the rows in which some columns have the values given."""
    found = np.arange(len(next(iter(table.values()))))
    for name, value in wanted.items():
        found = found[table[name][found] == value]
    return found


def where(table: Table, **wanted: Any) -> Table:
    """The rows in which some columns have the values given.

    Examples
    --------
    >>> where({"n": np.array([1, 2]), "who": np.array(["a", "b"])}, who="b")["n"]
    array([2])
    """
    use = rows_with(table, wanted)
    return {name: column[use] for name, column in table.items()}


def by_repeat(table: Table, column: str, **wanted: Any) -> np.ndarray:
    """One column of the rows wanted, a line for each repeat: (repeats, others).

    Examples
    --------
    >>> table = {"repeat": np.array([0, 0, 1, 1]), "ess": np.array([1, 2, 3, 4])}
    >>> by_repeat(table, "ess").tolist()
    [[1, 2], [3, 4]]
    """
    use = rows_with(table, wanted)
    return table[column][use].reshape(np.unique(table["repeat"][use]).size, -1)
