"""Pipeline: runs that survive.

Mirrored from book/pipeline.md: edit there, then run `make mirror`.
"""

import ast
import csv
import gzip
import hashlib
import io
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Shaped
from tqdm import tqdm

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


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows as CSV, compressed if the name ends in .gz; all of them or none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, every value a string; none when it does not exist."""
    if not path.exists():
        return []
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return list(csv.DictReader(io.StringIO(text.decode())))


FIELD = ast.Constant(None)  # what stands for the type of any field


class Unannotated(ast.NodeTransformer):
    """Drops type annotations, and the import that only they need."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """An argument without its type."""
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A function without the type of what it returns."""
        node.returns = None
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """A class whose fields are still fields, but all of one type."""
        for part in node.body:
            if isinstance(part, ast.AnnAssign):
                part.annotation = FIELD
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        """``x: T = v`` as ``x = v``, and nothing for ``x: T``, unless it is a field."""
        if node.annotation is FIELD:
            return node
        return node.value and ast.Assign([node.target], node.value)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        """Nothing for ``from jaxtyping import ...``."""
        return None if node.module == "jaxtyping" else node

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        """Nothing for ``import jaxtyping``."""
        return None if [each.name for each in node.names] == ["jaxtyping"] else node


def skeleton(source: str) -> str:
    """The syntax of a module, without comments, docstrings and type annotations.

    Examples
    --------
    >>> skeleton("x: int = 1  # one") == skeleton("x  =  1")
    True
    >>> skeleton("x = 1") == skeleton("x = 2")
    False
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
    return ast.dump(Unannotated().visit(tree))


def fingerprint(modules: Sequence[str]) -> str:
    """Twelve characters that change when the code of some of our modules does.

    Examples
    --------
    >>> fingerprint(["cva"]) == fingerprint(["control"])
    False
    """
    sources = [(files("swindles") / f"{name}.py").read_text() for name in modules]
    text = "".join(map(skeleton, sources))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def processor() -> str:
    """What the machine computes with."""
    device = jax.devices()[0]
    name = device.device_kind if device.platform != "cpu" else platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if device.platform == "cpu" and cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        models = [line.split(":")[1] for line in lines if line.startswith("model name")]
        name = models[0].strip() if models else name
    may_use = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return f"{name}, {len(may_use(0))} cores"


def revision() -> str:
    """The revision of the source, with a plus if it was changed since; or nothing."""
    command = ["git", "-C", str(files("swindles")), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def provenance(modules: Sequence[str]) -> Row:
    """What every row says about its origin."""
    versions = [f"{name} {version(name)}" for name in ("jax", "blackjax", "swindles")]
    return {
        "code": fingerprint(modules),
        "revision": revision(),
        "versions": ", ".join(versions),
        "hardware": processor(),
    }


def peak_memory() -> float:
    """The most memory this process has had, in megabytes; NaN where it is unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return np.nan
    return next(int(x.split()[1]) / 1000 for x in lines if x.startswith("VmHWM"))


def table_path(folder: Path, name: str) -> Path:
    """Where the table of an experiment is."""
    return folder / f"{name}.csv.gz"


def collect(paths: Sequence[Path], code: str) -> dict[str, list[Row]]:
    """The rows that this code has made, by the name of their job."""
    found: dict[str, list[Row]] = {}
    for path in paths:
        mine: dict[str, list[Row]] = {}
        for row in read_rows(path):
            if row["code"] == code:
                mine.setdefault(row["job"], []).append(row)
        found |= mine
    return found


def finish(
    experiment: Experiment, folder: Path, modules: Sequence[str]
) -> dict[str, list[Row]]:
    """Do the jobs that are not done yet, and write the table. Returns all rows.

    They come by the name of the job, every value a string.

    Parameters
    ----------
    experiment
        What to do.
    folder
        Where the table is, or will be.
    modules
        Modules of this package. Results of another state of their code are made anew.

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
    ...     rows = finish(squares, Path(folder), ["pipeline"])
    >>> rows["square-3"][0]["square"]
    '9'
    """
    origin, parts = provenance(modules), folder / "parts" / experiment.name
    table = table_path(folder, experiment.name)
    done = collect([*parts.glob("*.csv"), table], origin["code"])
    left = [job for job in experiment.jobs if job.name not in done]
    for job in (bar := tqdm(left, experiment.name, leave=False)):
        bar.set_postfix_str(job.name)
        which = {"job": job.name} | job._asdict()
        path = parts / f"{job.name}.csv"
        write_rows(path, [which | row | origin for row in experiment.measure(job)])
        done |= collect([path], origin["code"])
    if experiment.jobs and (left or parts.exists()):
        write_rows(table, [row for job in experiment.jobs for row in done[job.name]])
        shutil.rmtree(parts, ignore_errors=True)
    return {job.name: done[job.name] for job in experiment.jobs}


Table = dict[str, Shaped[np.ndarray, " rows"]]


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
            table[name] = column.astype(float)
        except ValueError:
            table[name] = column
    return table


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
