"""Mirror the exported cells of book/<name>.md into src/swindles/<name>.py.

A chapter's code cells tagged ``export`` make up, in order, the module of the same
name. The modules that only produce the book's results are no part of the package:
they are written beside their chapters, as book/<name>.py. ``python tools/mirror.py``
writes the modules; with ``--check`` it writes nothing and fails when one is not what
its chapter says.
"""

import argparse
import ast
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

import jupytext

HAND_WRITTEN = {"__init__", "style"}
NOT_PACKAGED = {"experiments", "pipeline"}  # their modules lie beside their chapters
MAX_LINES = 30  # of code in a cell, classes apart


def title_and_cells(chapter: Path) -> tuple[str, list[str]]:
    """The chapter's title and its exported cells, in order."""
    cells = jupytext.read(chapter).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    titles = [line[2:] for line in prose.splitlines() if line.startswith("# ")]
    exported = [
        cell.source.strip("\n")
        for cell in cells
        if cell.cell_type == "code" and "export" in cell.metadata.get("tags", [])
    ]
    return (titles or [chapter.stem])[0].strip(), exported


def module_text(name: str, title: str, cells: list[str]) -> str:
    """The module that mirrors these cells."""
    raw = "r" if "\\" in title else ""
    head = f'{raw}"""{title}' + ("" if title[-1] in ".?!" else ".")
    origin = f"Mirrored from book/{name}.md: edit there, then run `make mirror`."
    return f'{head}\n\n{origin}\n"""\n\n' + "\n\n\n".join(cells) + "\n"


def code_lines(cell: str) -> int:
    """Lines of code in a cell: no blank lines, comments, docstrings, imports, classes.

    A class cannot be cut into cells, so it is as long as it has to be.
    """
    lines = cell.splitlines()
    counted = {i for i, s in enumerate(lines, 1) if s.strip() and s.strip()[0] != "#"}
    for node in ast.walk(ast.parse(cell)):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
            skipped: ast.stmt = node
        elif isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            skipped = node.body[0]
        else:
            continue
        counted -= set(range(skipped.lineno, (skipped.end_lineno or 0) + 1))
    return len(counted)


def formatted(cells: list[str]) -> list[str]:
    """The cells as ``ruff format`` would write them."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.py" for number in range(len(cells))]
        for file, cell in zip(files, cells, strict=True):
            file.write_text(cell + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "ruff", "format", "--quiet", "--isolated"]
        subprocess.run([*command, folder], check=True)
        return [file.read_text(encoding="utf-8").rstrip("\n") for file in files]


def faults(where: dict[str, str]) -> list[str]:
    """What is wrong with exported cells, given as ``{place in the book: source}``."""
    found, parsed = [], {}
    for place, cell in where.items():
        try:
            lines = code_lines(cell)
        except SyntaxError as error:
            found.append(
                f"{place} is not Python: {error.msg} in its line {error.lineno}"
            )
            continue
        parsed[place] = cell
        if lines > MAX_LINES:
            found.append(f"{place} has {lines} lines of code; the most is {MAX_LINES}")
    rewritten = formatted(list(parsed.values()))
    for (place, cell), better in zip(parsed.items(), rewritten, strict=True):
        if cell != better:
            changes = difflib.unified_diff(
                cell.splitlines(), better.splitlines(), lineterm="", n=0
            )
            shown = "\n".join([*changes][2:])
            found.append(f"{place} is not formatted (`ruff format`):\n{shown}")
    return found


def module_path(name: str) -> Path:
    """Where the module of a chapter is, seen from the root."""
    folder = Path("book") if name in NOT_PACKAGED else Path("src", "swindles")
    return folder / f"{name}.py"


def mirror(root: Path, check: bool = False) -> list[str]:
    """Write (or only check) every module under ``root``; returns what is wrong."""
    modules, places = {}, {}
    for chapter in sorted((root / "book").glob("*.md")):
        title, cells = title_and_cells(chapter)
        if not cells:
            continue
        modules[chapter.stem] = module_text(chapter.stem, title, cells)
        for number, cell in enumerate(cells, 1):
            places[f"book/{chapter.name}, exported cell {number}"] = cell
    found = faults(places)
    for name, text in modules.items():
        if any(fault.startswith(f"book/{name}.md,") for fault in found):
            continue
        try:
            compile(text, name, "exec", dont_inherit=True)
        except SyntaxError as error:
            found.append(f"book/{name}.md, as a module: {error.msg}")
            continue
        module = root / module_path(name)
        if module.exists() and module.read_text(encoding="utf-8") == text:
            continue
        if check:
            state = "is stale" if module.exists() else "is missing"
            found.append(f"{module_path(name)} {state}: run `make mirror`")
        else:
            module.write_text(text, encoding="utf-8")
    expected = {root / module_path(name) for name in {*modules, *HAND_WRITTEN}}
    for folder in (root / "src" / "swindles", root / "book"):
        for module in sorted({*folder.glob("*.py")} - expected):
            where = module.relative_to(root)
            found.append(f"{where} has no chapter that exports it")
    return found


def main() -> int:
    """Command line: 0 when all is well, else 1 with one line per fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    found = mirror(Path(__file__).resolve().parents[1], arguments.check)
    for fault in found:
        print(f"mirror: {fault}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
