"""The machine behind the experiments: nothing is lost, doubled or mistaken."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pipeline
import pytest
from pipeline import (
    ORIGIN,
    Experiment,
    as_table,
    finish,
    origin,
    read_rows,
    table_path,
    where,
)

BOOK = Path(__file__).parents[1] / "book"


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
    rows = finish(squares(4), tmp_path)
    table = as_table(read_rows(table_path(tmp_path, "squares")))
    assert table["number"].tolist() == np.repeat(range(4), 3).tolist()
    assert table["square"].tolist() == np.repeat([0, 1, 4, 9], 3).tolist()
    assert [len(found) for found in rows.values()] == [3] * 4
    assert list(table)[-4:] == list(ORIGIN)
    assert "jax" in table["versions"][0] and " core" in table["hardware"][0]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", table["date"][0])
    assert not (tmp_path / "parts" / "squares").exists()
    assert where(table, number=2, row=1)["square"].tolist() == [4]


def test_finished_jobs_are_not_done_again(tmp_path):
    log = []
    finish(squares(2, log), tmp_path)
    before = table_path(tmp_path, "squares").read_bytes()
    finish(squares(2, log), tmp_path)
    assert log == [0, 1] and table_path(tmp_path, "squares").read_bytes() == before
    finish(squares(4, log), tmp_path)
    assert log == [0, 1, 2, 3]


def test_a_failure_keeps_what_was_done(tmp_path):
    log = []
    whole = squares(3, log)

    def fail(job):
        if job.number == 2:
            raise RuntimeError
        return whole.measure(job)

    with pytest.raises(RuntimeError):
        finish(whole._replace(measure=fail), tmp_path)
    assert not table_path(tmp_path, "squares").exists()
    finish(whole, tmp_path)
    assert log == [0, 1, 2]


def test_a_kill_before_the_files_are_gone_doubles_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.shutil, "rmtree", lambda *_, **__: None)
        finish(squares(2), tmp_path)
    assert len(list((tmp_path / "parts" / "squares").glob("*.csv"))) == 2
    rows = finish(squares(2), tmp_path)
    assert [len(found) for found in rows.values()] == [3, 3]
    assert len(read_rows(table_path(tmp_path, "squares"))) == 6
    assert not (tmp_path / "parts" / "squares").exists()


def test_a_run_goes_on_whatever_has_happened_to_the_code(tmp_path, monkeypatch):
    """Rows keep the revision that made them; a deleted table is made anew."""
    log = []

    def at(revision, count):
        monkeypatch.setattr(pipeline, "revision", lambda: revision)
        finish(squares(count, log), tmp_path)
        return read_rows(table_path(tmp_path, "squares"))

    at("first", 2)
    rows = at("second", 3)
    assert log == [0, 1, 2]
    assert [row["revision"] for row in rows] == ["first"] * 6 + ["second"] * 3
    assert "revision first; second," in origin(as_table(rows))
    table_path(tmp_path, "squares").unlink()
    assert {row["revision"] for row in at("third", 2)} == {"third"}
    assert log == [0, 1, 2, 0, 1]


def test_what_was_left_by_a_kill_is_newer_than_the_table(tmp_path):
    finish(squares(2), tmp_path)
    rows = [{"job": "square-1", "square": 7}]
    pipeline.write_rows(tmp_path / "parts" / "squares" / "square-1.csv", rows)
    assert [row["square"] for row in finish(squares(2), tmp_path)["square-1"]] == ["7"]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A function that runs git where the source is said to be."""
    monkeypatch.setattr(pipeline, "files", lambda package: tmp_path / "src")

    def git(*arguments):
        name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", tmp_path, *name, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True)

    return git


def test_revision_sees_the_source_but_not_the_results(tmp_path, repository):
    for name in ("src/a.py", "book/results/a.csv"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1")
    assert pipeline.revision() == ""
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        repository(*command)
    name = repository("rev-parse", "--short", "HEAD").stdout.strip()
    assert pipeline.revision() == name
    (tmp_path / "book/results/a.csv").write_text("2")
    assert pipeline.revision() == name
    (tmp_path / "src/a.py").write_text("2")
    assert pipeline.revision() == name + "+"


def test_a_revision_of_digits_is_no_number():
    row = {"n": "1", "revision": "1234567", "versions": "", "hardware": "", "date": ""}
    table = as_table([row])
    assert table["revision"].tolist() == ["1234567"] and table["n"].tolist() == [1.0]


def test_numbers_have_four_digits(tmp_path):
    row = {
        "single": np.float32(1 / 3),
        "double": 123456.0,
        "whole": 123456,
        "text": "0.123456",
        "missing": np.nan,
    }
    for name in ("a.csv", "a.csv.bz2"):
        pipeline.write_rows(tmp_path / name, [row])
        (found,) = read_rows(tmp_path / name)
        assert list(found.values()) == [
            *("0.3333", "1.235e+05", "123456", "0.123456", "nan")
        ]


def test_peak_memory_is_that_of_the_process(monkeypatch):
    resource = pytest.importorskip("resource")
    np.ones(40_000_000)  # 320 MB, gone at once: the peak remembers
    unit = 2**20 if sys.platform == "darwin" else 2**10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    assert pipeline.peak_memory() == pytest.approx(most, rel=0.05)
    nowhere = SimpleNamespace(exists=lambda: False)
    monkeypatch.setattr(pipeline, "Path", lambda path: nowhere)
    assert pipeline.peak_memory() == pytest.approx(most, rel=0.05)


def test_pages_show_where_their_results_come_from():
    """Every chapter that reads a file of results prints its origin."""
    text = {path.name: path.read_text(encoding="utf-8") for path in BOOK.glob("*.md")}
    reading = {name for name in text if re.search('results(/|\\(")', text[name])}
    assert {"efficiency.md", "rivals.md"} <= reading
    assert {name for name in reading if "origin(" not in text[name]} == set()


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

import pipeline
from test_pipeline import squares

pipeline.provenance = lambda: {"revision": "one"}  # time for kills at work
whole = squares(60)

def slow(job):
    time.sleep(0.02)
    return whole.measure(job)

def work():
    pipeline.finish(whole._replace(measure=slow), Path("results"))

chance = random.Random(0)
for _ in range(10):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    time.sleep(chance.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(killed, len(list(Path("results").rglob("square-*.csv"))))
work()
"""


def test_ten_kills_lose_and_double_nothing(tmp_path):
    command = [sys.executable, "-c", DRIVER]
    paths = [str(Path(__file__).parent), str(BOOK), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, env=environment
    )
    killed, left = np.array(done.stdout.split(), int).reshape(10, 2).T
    assert (killed == -9).all() and 0 < left[3] < left[9] < 60
    table = as_table(read_rows(table_path(tmp_path / "results", "squares")))
    assert table["number"].tolist() == np.repeat(range(60), 3).tolist()
    assert (table["square"] == table["number"] ** 2).all()
    assert list((tmp_path / "results").rglob("*.draft")) == []
