"""The mirror writes what a chapter exports, and refuses what it should."""

from pathlib import Path

import mirror
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

# Walks

"""
FIRST = "from __future__ import annotations\n\nimport math"
SECOND = 'def step(x: float) -> float:\n    """One step."""\n    return math.sin(x)'
THIRD = "START = step(1.0)"


def cell(source: str, tags: str = "export") -> str:
    return (
        f"```{{code-cell}} python\n:tags: [{tags}]\n\n{source}\n```\n\nSome prose.\n\n"
    )


@pytest.fixture
def write(tmp_path):
    """A function that writes the chapter ``walks`` of a small tree."""
    (tmp_path / "book").mkdir()
    (tmp_path / "src" / "swindles").mkdir(parents=True)
    (tmp_path / "src" / "swindles" / "__init__.py").touch()

    def write_chapter(*cells: str) -> Path:
        text = HEADER + "".join(cells)
        (tmp_path / "book" / "walks.md").write_text(text, encoding="utf-8")
        return tmp_path

    return write_chapter


def test_exported_cells_keep_their_order(write):
    root = write(cell(FIRST), cell("print(1)", "demo"), cell(SECOND), cell(THIRD))
    assert mirror.mirror(root) == []
    origin = "Mirrored from book/walks.md: edit there, then run `make mirror`."
    assert (root / "src/swindles/walks.py").read_text() == (
        f'"""Walks.\n\n{origin}\n"""\n\n{FIRST}\n\n\n{SECOND}\n\n\n{THIRD}\n'
    )
    assert mirror.mirror(root, check=True) == []


def test_written_module_is_formatted(write):
    root = write(cell(FIRST), cell(THIRD.replace("step", "abs")), cell(SECOND))
    assert mirror.mirror(root) == []
    module = (root / "src/swindles/walks.py").read_text()
    assert mirror.faults({"the module": module.rstrip("\n")}) == []


def test_up_to_date_module_is_not_touched(write):
    root = write(cell(SECOND))
    mirror.mirror(root)
    before = (root / "src/swindles/walks.py").stat().st_mtime_ns
    mirror.mirror(root)
    assert (root / "src/swindles/walks.py").stat().st_mtime_ns == before


def test_stale_module(write):
    root = write(cell(SECOND))
    mirror.mirror(root)
    module = root / "src/swindles/walks.py"
    module.write_text(module.read_text().replace("sin", "cos"))
    (fault,) = mirror.mirror(root, check=True)
    assert "src/swindles/walks.py is stale" in fault
    assert "cos" in module.read_text(), "--check writes nothing"


def test_missing_module(write):
    root = write(cell(SECOND))
    (fault,) = mirror.mirror(root, check=True)
    assert "src/swindles/walks.py is missing" in fault


def test_chapter_without_exports_has_no_module(write):
    root = write(cell(SECOND, "demo"))
    assert mirror.mirror(root) == []
    assert not (root / "src/swindles/walks.py").exists()


@pytest.mark.parametrize("orphan", ["src/swindles/runs.py", "book/runs.py"])
def test_orphaned_module(write, orphan):
    root = write(cell(SECOND))
    mirror.mirror(root)
    (root / orphan).touch()
    (fault,) = mirror.mirror(root, check=True)
    assert f"{orphan} has no chapter" in fault


@pytest.mark.parametrize("name", sorted(mirror.NOT_PACKAGED))
def test_modules_that_make_results_lie_beside_their_chapters(write, name):
    root = write(cell(SECOND))
    (root / f"book/{name}.md").write_text(HEADER + cell(SECOND))
    (fault,) = [f for f in mirror.mirror(root, check=True) if name in f]
    assert f"book/{name}.py is missing" in fault
    assert mirror.mirror(root) == []
    assert f"Mirrored from book/{name}.md" in (root / f"book/{name}.py").read_text()
    assert not (root / f"src/swindles/{name}.py").exists()
    # What was packaged before is an orphan now.
    (root / f"src/swindles/{name}.py").touch()
    (fault,) = mirror.mirror(root, check=True)
    assert f"src/swindles/{name}.py has no chapter" in fault


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = {  'a':1 }", "is not formatted"),
        ("def step(x:\n    return x", "is not Python"),
        ("%timeit step(1.0)", "is not Python"),
        ("\n".join(f"x{i} = {i}" for i in range(31)), "31 lines of code"),
    ],
)
def test_refused_cell(write, source, complaint):
    root = write(cell(SECOND), cell(source))
    for check in (False, True):
        (fault,) = mirror.mirror(root, check)
        assert "book/walks.md, exported cell 2" in fault
        assert complaint in fault
    assert not (root / "src/swindles/walks.py").exists()


def test_future_import_must_come_first(write):
    root = write(cell(SECOND), cell(FIRST))
    (fault,) = mirror.mirror(root)
    assert "book/walks.md" in fault
    assert "__future__" in fault


def test_fault_in_one_chapter_leaves_the_others_alone(write):
    root = write(cell("x = {  'a':1 }"))
    (root / "book/runs.md").write_text(HEADER + cell(SECOND))
    (fault,) = mirror.mirror(root)
    assert "book/walks.md" in fault
    assert (root / "src/swindles/runs.py").exists()


def test_docstrings_and_imports_do_not_count_as_code():
    docstring = '    """Long.\n\n' + "    More.\n" * 40 + '    """\n'
    body = f"def f():\n{docstring}    # why\n\n    return 1"
    assert (
        mirror.code_lines(f"import math\nfrom os import (\n    path,\n)\n{body}") == 2
    )


def test_classes_are_as_long_as_they_have_to_be():
    fields = "".join(f"    x{i}: int = {i}\n" for i in range(40))
    long_class = f"class Point:\n{fields}"
    assert mirror.code_lines(long_class) == 0
    assert mirror.code_lines(f"{long_class}\n\ndef f():\n    return 1") == 2


def test_real_tree_is_in_sync():
    assert mirror.mirror(ROOT, check=True) == []
