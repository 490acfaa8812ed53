"""What the book's pages have around their text.

An extension of Sphinx: MathJax, but only the files that a page asks for; a description
and a footer for each page; each chapter as a notebook to download; and no Thebe, which
runs cells on another host, where this book goes nowhere.
"""

import html
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import jupytext
import yaml
from docutils import nodes

ROOT = Path(__file__).parents[1]
MATHJAX = ("tex-chtml.js", "input/tex/extensions", "output/chtml/fonts")
FIRST_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="description" content="{description}">
<meta http-equiv="refresh" content="0; url={page}"></head>
<body><a href="{page}">{title}</a></body></html>
"""


def citation() -> dict[str, Any]:
    """Version, licence and paper, as the repository states them."""
    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def footer() -> str:
    """One line for the foot of every page; SOURCE_DATE_EPOCH fixes its date."""
    about = citation()
    paper = about["preferred-citation"]
    names = [author["family-names"] for author in paper["authors"]]
    authors = f"{', '.join(names[:-1])} and {names[-1]}"
    now = time.gmtime(float(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    return (
        f"{about['title']} {about['version']}, {time.strftime('%Y-%m-%d', now)}, "
        f"{about['license']} licence. After {html.escape(authors)}, "
        f'<a href="{paper["url"]}">{html.escape(paper["title"])}</a>, {paper["year"]}.'
    )


def paragraphs(doctree: Any) -> Iterator[str]:
    """The text of a page, without cells and notes."""
    for node in doctree.findall(nodes.paragraph):
        if isinstance(node.parent, nodes.section | nodes.document):
            yield " ".join(node.astext().split())


def description(doctree: Any, most: int = 160) -> str:
    """What a search engine shows: the page's first words, most of them at most."""
    text = next(paragraphs(doctree), "") if doctree else ""
    if not text:
        text = citation()["abstract"]
    return text if len(text) <= most else text[: most - 1].rsplit(" ", 1)[0] + "…"


def write_notebook(source: Path, target: Path) -> None:
    """A chapter as a notebook without outputs."""
    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    target.parent.mkdir(parents=True, exist_ok=True)
    jupytext.write(notebook, target)


def without_repeats(scripts: list[Any]) -> list[Any]:
    """Each script once.

    An inline script that an extension adds while the builder starts is kept by Sphinx
    twice, with no file name and with an empty one.
    """
    kept = {
        (script.filename or "", repr(script.attributes)): script for script in scripts
    }
    return list(kept.values())


def add_to_page(app: Any, page: str, _: str, context: Any, doctree: Any) -> None:
    """Give a page its description, its footer and its notebook."""
    context["script_files"][:] = without_repeats(context["script_files"])
    words = html.escape(description(doctree))
    tag = f'<meta name="description" content="{words}" />'
    context["metatags"] = context.get("metatags", "") + tag
    context["theme_extra_footer"] = footer()
    source = ROOT / f"{page}.md"
    if source.exists() and "jupytext:" in source.read_text(encoding="utf-8")[:100]:
        write_notebook(source, Path(app.outdir) / "_sources" / f"{page}.ipynb")
        context["ipynb_source"] = f"{page}.ipynb"  # the theme's button offers it


def finish(app: Any, exception: Exception | None) -> None:
    """Copy what pages need of MathJax, and leave out what they do not need."""
    if exception is not None:
        return
    out = Path(app.outdir)
    shutil.rmtree(out / "_static/mathjax", ignore_errors=True)
    package = distribution("sphinx-mathjax-offline")
    mathjax = Path(str(package.locate_file("sphinx-mathjax-offline/static/mathjax")))
    for name in MATHJAX:
        source, target = mathjax / name, out / "_static/mathjax" / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for path in out.rglob("*.map"):  # for those who debug the theme
        path.unlink()
    about = {"title": app.config.html_title, "description": citation()["abstract"]}
    first = f"{app.config.root_doc}.html"
    (out / "index.html").write_text(FIRST_PAGE.format(page=first, **about), "utf-8")


def remove_thebe(app: Any) -> None:
    """Undo what Jupyter Book did: its pages name Thebe's host."""
    for listeners in app.events.listeners.values():
        listeners[:] = [x for x in listeners if x.handler.__module__ != "sphinx_thebe"]
    styles = app.registry.css_files
    styles[:] = [style for style in styles if style[0] != "sphinx-thebe.css"]


def setup(app: Any) -> dict[str, bool]:
    """What Sphinx calls."""
    remove_thebe(app)
    app.config.mathjax_path = "mathjax/tex-chtml.js"
    checksum = zlib.crc32(Path(__file__).read_bytes() + str(citation()).encode())
    app.add_config_value("pages_checksum", checksum, "html")  # another: write all pages
    app.connect("html-page-context", add_to_page, priority=100)  # before the theme
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
