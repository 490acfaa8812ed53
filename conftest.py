"""Makes plain ``pytest`` run the chapters: nbval, reading them with Jupytext."""

import ctypes
import gc
import os
import sys
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


# What XLA compiles for a CPU at this level takes half the time, and is as fast. Last
# bits differ, so the tests that compare bits do without, and so does a GPU.
CHAPTER_FLAGS = "--xla_backend_optimization_level=1"


class Chapter(IPyNbFile):
    """A chapter: every code cell is a test, run in order in one kernel."""

    broken = False

    def setup(self) -> None:
        """Start the kernel, which takes its flags from the environment."""
        with pytest.MonkeyPatch.context() as environment:
            if os.environ.get("SWINDLES_SCALE") != "paper":
                environment.setenv("XLA_FLAGS", CHAPTER_FLAGS, prepend=" ")
            super().setup()

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


# Bytes in use above which the programs of earlier tests are forgotten.
MOST_MEMORY = 1.2e9


def memory_in_use() -> float:
    """Bytes of this process, where Linux tells them."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096.0 if status.exists() else 0.0


def forget_compiled_programs() -> None:
    """XLA fails when a process holds too many of them; and they fill the memory."""
    if "jax" in sys.modules:  # not where there are only chapters
        sys.modules["jax"].clear_caches()
    gc.collect()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back:  # what is free stays with the process otherwise
        give_back(0)


@pytest.fixture(autouse=True, scope="module")
def no_programs_of_other_modules() -> Iterator[None]:
    """Start every module of tests afresh."""
    yield
    forget_compiled_programs()


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Start afresh within a module, too, when it is a large one."""
    yield
    if memory_in_use() > MOST_MEMORY:
        forget_compiled_programs()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compile fast, but for the tests that are marked ``optimised``.

    Most programs of the tests take longer to optimise than to run. Those of chapters do
    not: their kernels are processes of their own, which this does not reach. With
    JAX_DISABLE_MOST_OPTIMIZATIONS=0 all tests are optimised.
    """
    if isinstance(item, Cell):
        return
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
        import jax

        fast = item.get_closest_marker("optimised") is None
        jax.config.update("jax_disable_most_optimizations", fast)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: what is left at the end is short, and no worker waits."""
    weights: dict[Path, int] = defaultdict(int)
    for item in items:
        slow = item.get_closest_marker("slow") is not None
        if isinstance(item, Cell):  # exported cells only define
            slow = "export" not in item.cell.metadata.get("tags", [])
        weights[item.path] += 10 if slow else 1
    items.sort(key=lambda item: -weights[item.path])


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Keep the cells of a chapter in one process, in order, under ``pytest -n``."""
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)
