"""Makes plain ``pytest`` run the chapters: nbval, reading them with Jupytext."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jupytext
import pytest
from nbval.plugin import (
    IPyNbCell,
    IPyNbFile,
    find_comment_markers,
    find_metadata_tags,
)
from xdist.scheduler import LoadFileScheduling


class Cell(IPyNbCell):
    """One code cell; after a cell that failed, the rest of its chapter is skipped."""

    def runtest(self) -> None:
        if self.parent.broken:
            pytest.skip("an earlier cell of this chapter failed")
        try:
            super().runtest()
        except Exception:
            self.parent.broken = True
            raise


class Chapter(IPyNbFile):
    """A chapter: every code cell is a test, run in order in one kernel."""

    broken = False

    def collect(self) -> Iterator[Cell]:
        self.nb = jupytext.read(self.path)
        code = [cell for cell in self.nb.cells if cell.cell_type == "code"]
        for number, cell in enumerate(code):
            options = defaultdict(bool, find_metadata_tags(cell.metadata))
            options.update(find_comment_markers(cell.source))
            yield Cell.from_parent(
                self, name=f"Cell {number}", cell_num=number, cell=cell, options=options
            )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Chapter | None:
    """Collect Markdown files in book/ that carry a Jupytext header."""
    if file_path.suffix == ".md" and file_path.parent.name == "book":
        if "jupytext" in jupytext.read(file_path).metadata:
            return Chapter.from_parent(parent, path=file_path)
    return None


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Keep the cells of a chapter in one process, in order, under ``pytest -n``."""
    return LoadFileScheduling(config, log)
