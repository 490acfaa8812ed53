"""The machine behind the experiments: nothing is lost, doubled or mistaken."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from swindles import pipeline
from swindles.pipeline import Experiment, finish, read_rows, table_path, where

MODULES = ["pipeline"]


class Square(NamedTuple):
    number: int

    @property
    def name(self):
        return f"square-{self.number}"


def squares(count, log=None):
    def measure(job):
        if log is not None:
            log.append(job.number)
        return [{"row": i, "square": job.number**2} for i in range(3)]

    return Experiment("squares", [Square(n) for n in range(count)], measure)


def test_table_has_every_row_and_its_origin(tmp_path):
    rows = finish(squares(4), tmp_path, MODULES)
    table = pipeline.as_table(read_rows(table_path(tmp_path, "squares")))
    assert table["number"].tolist() == np.repeat(range(4), 3).tolist()
    assert table["square"].tolist() == np.repeat([0, 1, 4, 9], 3).tolist()
    assert [len(found) for found in rows.values()] == [3] * 4
    assert set(table["code"]) == {pipeline.fingerprint(MODULES)}
    assert "jax" in table["versions"][0] and "cores" in table["hardware"][0]
    assert not (tmp_path / "parts" / "squares").exists()
    assert where(table, number=2, row=1)["square"].tolist() == [4]


def test_finished_jobs_are_not_done_again(tmp_path):
    log = []
    finish(squares(2, log), tmp_path, MODULES)
    before = table_path(tmp_path, "squares").read_bytes()
    finish(squares(2, log), tmp_path, MODULES)
    assert log == [0, 1] and table_path(tmp_path, "squares").read_bytes() == before
    finish(squares(4, log), tmp_path, MODULES)
    assert log == [0, 1, 2, 3]


def test_a_failure_keeps_what_was_done(tmp_path):
    log = []
    whole = squares(3, log)

    def fail(job):
        if job.number == 2:
            raise RuntimeError
        return whole.measure(job)

    with pytest.raises(RuntimeError):
        finish(whole._replace(measure=fail), tmp_path, MODULES)
    assert not table_path(tmp_path, "squares").exists()
    finish(whole, tmp_path, MODULES)
    assert log == [0, 1, 2]


def test_a_kill_before_the_files_are_gone_doubles_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.shutil, "rmtree", lambda *_, **__: None)
        finish(squares(2), tmp_path, MODULES)
    assert len(list((tmp_path / "parts" / "squares").glob("*.csv"))) == 2
    rows = finish(squares(2), tmp_path, MODULES)
    assert [len(found) for found in rows.values()] == [3, 3]
    assert len(read_rows(table_path(tmp_path, "squares"))) == 6
    assert not (tmp_path / "parts" / "squares").exists()


def test_results_of_other_code_are_made_anew(tmp_path, monkeypatch):
    log = []
    finish(squares(2, log), tmp_path, MODULES)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "fingerprint", lambda modules: "another")
        finish(squares(2, log), tmp_path, MODULES)
    assert log == [0, 1, 0, 1]
    table = read_rows(table_path(tmp_path, "squares"))
    assert len(table) == 6 and {row["code"] for row in table} == {"another"}


def test_fingerprint_sees_code_and_nothing_else():
    source = 'def f(x):\n    """Say."""\n    return x + 1\n'
    same = 'def f(x):  # a comment\n    """Tell."""\n    return x  + 1\n'
    other = source.replace("+", "-")
    assert pipeline.skeleton(source) == pipeline.skeleton(same)
    assert pipeline.skeleton(source) != pipeline.skeleton(other)
    text = source.replace('"""Say."""', 'y = """Say."""')
    assert pipeline.skeleton(text) != pipeline.skeleton(text.replace("Say", "Tell"))


ANNOTATED = """
from jaxtyping import Float
import jaxtyping
import numpy as np

x: int = 1

class Pair(NamedTuple):
    first: int
    second: int = 2

    def sum(self, *more: int, scale: int = 1) -> int:
        total: int = self.first + self.second
        return scale * total
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (": int", ": float"),
        ("x: int", "x"),
        ("total: int", "total"),
        ("more: int, scale: int = 1) -> int:", "more, scale=1):"),
        ("from jaxtyping import Float\n", ""),
        ("import jaxtyping\n", ""),
        ("import Float", "import Float, Int"),
        ("x: int = 1", "x: int = 1\ny: int"),
    ],
)
def test_a_changed_annotation_does_not_count(old, new):
    assert old in ANNOTATED
    changed = ANNOTATED.replace(old, new)
    assert pipeline.skeleton(ANNOTATED) == pipeline.skeleton(changed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("first: int", "front: int"),
        ("second: int = 2", "second: int = 3"),
        ("second: int = 2", "second: int"),
        ("second: int = 2", "second = 2"),
        ("    first: int\n", ""),
        ("first: int\n    second: int = 2", "second: int = 2\n    first: int"),
        ("x: int = 1", "x: int = 2"),
        ("more: int", "others: int"),
        ("scale: int = 1", "scale: int = 2"),
        ("import numpy as np\n", ""),
        ("import jaxtyping\n", "import jax\n"),
    ],
)
def test_a_changed_field_default_or_import_counts(old, new):
    assert old in ANNOTATED
    changed = ANNOTATED.replace(old, new)
    assert pipeline.skeleton(ANNOTATED) != pipeline.skeleton(changed)


def test_half_a_draft_is_no_file(tmp_path, monkeypatch):
    """Killed while writing: what was there before stays."""
    path = tmp_path / "a.csv"
    pipeline.write_rows(path, [{"n": 1}])

    def cut(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", cut)
    with pytest.raises(KeyboardInterrupt):
        pipeline.write_rows(path, [{"n": 2}])
    assert read_rows(path) == [{"n": "1"}]


DRIVER = """
import os
import random
import signal
import time
from pathlib import Path

from test_pipeline import squares
from swindles.pipeline import finish

whole = squares(60)

def slow(job):
    time.sleep(0.02)
    return whole.measure(job)

def work():
    finish(whole._replace(measure=slow), Path("results"), ["pipeline"])

chance = random.Random(0)
for _ in range(10):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    time.sleep(chance.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
work()
"""


def test_ten_kills_lose_and_double_nothing(tmp_path):
    command = [sys.executable, "-c", DRIVER]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, env=environment
    )
    assert done.stdout.split() == [b"-9"] * 10
    table = pipeline.as_table(read_rows(table_path(tmp_path / "results", "squares")))
    assert table["number"].tolist() == np.repeat(range(60), 3).tolist()
    assert (table["square"] == table["number"] ** 2).all()
    assert list((tmp_path / "results").rglob("*.draft")) == []
