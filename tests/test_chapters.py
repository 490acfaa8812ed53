"""Plain pytest runs the chapters, and a cell that raises fails the run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADER = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  name: python3
  display_name: Python 3
---

# Sample

"""


@pytest.fixture
def run(tmp_path):
    """A function that runs plain pytest on a book of one chapter."""
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "prose.md").write_text("# No notebook\n")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def run_pytest(*cells: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
        code = [f"```{{code-cell}} python\n{cell}\n```\n" for cell in cells]
        (tmp_path / "book" / "sample.md").write_text(HEADER + "\n".join(code))
        command = [sys.executable, "-m", "pytest", "book", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True
        )
        return done.returncode, done.stdout

    return run_pytest


@pytest.mark.slow
def test_good_chapter_passes_in_its_own_folder(run):
    where = "import pathlib\nassert pathlib.Path('sample.md').exists()"
    code, output = run(where, "x = 1", "assert x == 1", options=("-n", "2"))
    assert code == 0, output
    assert "3 passed" in output


@pytest.mark.slow
def test_raising_cell_fails(run):
    code, output = run("x = 1", "assert x == 2, 'as claimed'", "x")
    assert code == 1, output
    assert "1 failed, 1 passed, 1 skipped" in output
    assert "as claimed" in output


@pytest.mark.slow
def test_cell_over_its_time_fails(run):
    slow = "import time\ntime.sleep(60)"
    code, output = run(slow, options=("--nbval-cell-timeout=1",))
    assert code == 1, output
    assert "Timeout of 1 seconds" in output
