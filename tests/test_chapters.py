"""Plain pytest runs the chapters, and a cell that raises fails the run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import execute
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


CHAPTERS = {
    "good": ["import pathlib\nassert pathlib.Path('good.md').exists()", "x = 1", "x"],
    "raising": ["x = 1", "assert x == 2, 'as claimed'", "x"],
    "slow": ["import time\ntime.sleep(60)"],
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Plain pytest, in two processes, on a book of three chapters: code and output."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "book").mkdir()
    (folder / "book" / "prose.md").write_text("# No notebook\n")
    shutil.copy(ROOT / "conftest.py", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, cells in CHAPTERS.items():
        code = [f"```{{code-cell}} python\n{cell}\n```\n" for cell in cells]
        (folder / "book" / f"{name}.md").write_text(HEADER + "\n".join(code))
    command = [sys.executable, "-m", "pytest", "book", "-p", "no:cacheprovider"]
    command += ["-v", "-n", "2", "--nbval-cell-timeout=5"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout


def results(output: str, chapter: str) -> list[str]:
    """What became of each cell of a chapter, in order."""
    found = re.findall(rf"\] (\w+) book/{chapter}::md::Cell (\d+)", output)
    return [word for word, _ in sorted(found, key=lambda each: int(each[1]))]


@pytest.mark.slow
def test_good_chapter_passes_in_its_own_folder(outcome):
    _, output = outcome
    assert results(output, "good") == ["PASSED"] * 3, output


@pytest.mark.slow
def test_raising_cell_fails(outcome):
    code, output = outcome
    assert code == 1, output
    assert results(output, "raising") == ["PASSED", "FAILED", "SKIPPED"], output
    assert "as claimed" in output


@pytest.mark.slow
def test_cell_over_its_time_fails(outcome):
    _, output = outcome
    assert results(output, "slow") == ["FAILED"], output
    assert "Timeout of 5 seconds" in output
    assert "2 failed, 4 passed, 1 skipped" in output


@pytest.mark.slow
def test_chapters_are_run_once_for_the_book(tmp_path, monkeypatch, capfd):
    """Those that fail are named, and run again the next time."""
    (tmp_path / "book").mkdir()
    pages = "root: book/good\nparts:\n- chapters:\n  - file: book/raising\n"
    (tmp_path / "_toc.yml").write_text(pages)
    (tmp_path / "_config.yml").write_text("execute: {timeout: 60}\n")
    for name in ("good", "raising"):
        cells = [f"```{{code-cell}} python\n{cell}\n```\n" for cell in CHAPTERS[name]]
        (tmp_path / "book" / f"{name}.md").write_text(HEADER + "\n".join(cells))
    monkeypatch.setattr(execute, "ROOT", tmp_path)
    cache = execute.get_cache(str(tmp_path / "_build/.jupyter_cache"))
    for waiting in (["good", "raising"], ["raising"]):
        assert [path.stem for path in execute.find_changed(cache)] == waiting
        assert execute.main(2) == 1
        words = capfd.readouterr().err
        assert "book/raising.md:" in words and "as claimed" in words
