"""Run the book's chapters, several at a time.

``python tools/execute.py 2`` runs the chapters that have changed, two at a time, and
puts what they show where the build of the book looks for it.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn, JupyterCacheAbstract
from jupyter_cache.executors.utils import ExecutionResult, single_nb_execution
from myst_nb.core.read import read_myst_markdown_notebook
from tqdm import tqdm

ROOT = Path(__file__).parents[1]


def chapters() -> list[Path]:
    """The pages of the book that are notebooks, in the order of its contents."""
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text())
    pages = [contents["root"]]
    pages += [page["file"] for part in contents["parts"] for page in part["chapters"]]
    paths = [ROOT / f"{page}.md" for page in pages]
    return [path for path in paths if "jupytext:" in path.read_text()[:100]]


def find_changed(cache: JupyterCacheAbstract) -> dict[Path, CacheBundleIn]:
    """The chapters that the cache does not know as they are, ready to be run."""
    found = {}
    for path in chapters():
        notebook = read_myst_markdown_notebook(path.read_text(), path=path)
        try:
            cache.match_cache_notebook(notebook)
        except KeyError:
            found[path] = CacheBundleIn(notebook, str(path))
    return found


def run_chapter(item: tuple[Path, CacheBundleIn]) -> ExecutionResult:
    """Run one chapter in its own folder."""
    path, bundle = item
    settings = yaml.safe_load((ROOT / "_config.yml").read_text())["execute"]
    return single_nb_execution(
        bundle.nb, str(path.parent), settings["timeout"], allow_errors=False
    )


def main(workers: int) -> int:
    """Run what has changed; the number of chapters that failed."""
    cache, failed = get_cache(str(ROOT / "_build/.jupyter_cache")), 0
    changed = find_changed(cache)
    with ThreadPoolExecutor(workers) as pool:
        results = pool.map(run_chapter, changed.items())
        shown = {"leave": False, "disable": None, "file": sys.stdout}
        bar = tqdm(results, "chapters", len(changed), **shown)
        for path, found in zip(changed, bar, strict=True):
            if found.err:
                failed += 1
                print(f"{path.relative_to(ROOT)}:\n{found.exc_string}", file=sys.stderr)
                continue
            bundle = changed[path]
            bundle.data["execution_seconds"] = found.time
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
    return failed


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"  # in chapters; here it has been read already
    sys.exit(min(main(int(sys.argv[1])), 1))
