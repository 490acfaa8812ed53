"""The book's frame: contents, references, environment, and an off-line build."""

import ast
import html
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import jupytext
import nbformat
import offline
import pytest
import reading
import yaml

import swindles
from swindles import style

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "book" / "api.md"
CHAPTERS = sorted((ROOT / "book").glob("*.md"))


def toc_files() -> list[str]:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    parts = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    return [toc["root"], *parts]


def test_contents_list_every_chapter_once():
    files = [f"book/{chapter.stem}" for chapter in CHAPTERS]
    assert sorted(toc_files()) == files


def test_environment_takes_everything_from_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == "swindles"
    *conda, pip = environment["dependencies"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert conda == [f"python{project['requires-python']}", "pip"]
    constraints, package = pip["pip"]
    assert (ROOT / constraints.removeprefix("-c ")).exists()
    extras = re.fullmatch(r"-e \.\[(.*)\]", package).group(1).split(",")
    assert set(extras) <= set(project["optional-dependencies"])


def test_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"book", "test", "cuda12"} <= set(project["optional-dependencies"])


def top_level_names(module: Path) -> list[str]:
    """Functions, classes and constants that a module defines."""
    found = []
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign):
            found += [name.id for name in node.targets if isinstance(name, ast.Name)]
        elif isinstance(node, ast.AnnAssign):
            found.append(node.target.id)
    return found


def test_each_name_is_defined_once():
    """Two parts of one name are two parts that do one thing, or two meanings."""
    modules = sorted((ROOT / "src" / "swindles").glob("[a-z]*.py"))
    assert len(modules) > 10
    count = Counter(name for module in modules for name in top_level_names(module))
    assert [name for name, times in count.items() if times > 1] == []


def six_lines(module: Path) -> set[str]:
    """All runs of six lines of a module, without imports, blanks and comments."""
    text = module.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = ""
    kept = [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]
    return {"\n".join(kept[i : i + 6]) for i in range(len(kept) - 5)}


def test_no_two_modules_share_six_lines():
    modules = sorted((ROOT / "src" / "swindles").glob("[a-z]*.py"))
    count = Counter(run for module in modules for run in six_lines(module))
    assert len(count) > 1000
    assert [run for run, times in count.items() if times > 1] == []


HEAVY = ("arviz", "arviz_stats", "xarray", "pandas", "matplotlib", "numpyro", "pymc")
HEAVY += ("flowjax", "equinox", "paramax", "scipy.stats", "scipy.signal")


@pytest.mark.slow
def test_import_is_light():
    """Libraries that most calls do not need are imported where they are needed."""
    code = (
        "import sys, jax, blackjax; before = set(sys.modules); import swindles; "
        "swindles.estimate; print(*(set(sys.modules) - before))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "swindles.estimation" in imported
    assert imported.isdisjoint(HEAVY)


def test_lock_names_no_host():
    assert "://" not in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("name", ["CITATION.cff", "_config.yml", "_toc.yml"])
def test_yaml(name):
    assert isinstance(yaml.safe_load((ROOT / name).read_text()), dict)


def test_cited_works_are_in_the_bibliography():
    known = re.findall(
        r"^@\w+\{(.+),", (ROOT / "book/references.bib").read_text(), re.M
    )
    assert len(known) == len(set(known))
    for chapter in CHAPTERS:
        text = chapter.read_text(encoding="utf-8")
        cited = {
            key.strip()
            for keys in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", text)
            for key in keys.split(",")
        }
        assert cited <= set(known), chapter.name


def test_bibliography_is_cited():
    works = re.findall(
        r"^@\w+\{(.+),", (ROOT / "book/references.bib").read_text(), re.M
    )
    text = "".join(chapter.read_text(encoding="utf-8") for chapter in CHAPTERS)
    cited = ",".join(re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", text)).split(",")
    assert [work for work in works if work not in map(str.strip, cited)] == []


# At 1300 pixels of width a line of code is 15.4 pixels high, so a screen of 900 pixels
# would have room for 55.
MOST_OPEN_LINES = 40


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_open_code_in_a_row_is_less_than_a_screen(chapter):
    """What is not the method itself is folded."""
    assert max(reading.open_code(chapter)) <= MOST_OPEN_LINES


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_folded_parts_of_the_package_say_what_is_inside(chapter):
    found = [
        cell.metadata.get("mystnb", {}).get("code_prompt_show", "")
        for cell in jupytext.read(chapter).cells
        if {"export", "hide-input"} <= set(cell.metadata.get("tags", []))
    ]
    assert len(found) == len(set(found))
    assert all(re.fullmatch("Show .{3,70}", words) for words in found), found


def test_what_counts_as_prose_and_as_open_code(tmp_path):
    page = tmp_path / "page.md"
    cells = [("", "a = 1\nb = 2"), ("[export]", "c = 3"), ("[hide-input]", "d = 4")]
    cells = [
        "```{code-cell} python\n"
        + (f":tags: {tags}\n\n" if tags else "")
        + f"{code}\n```"
        for tags, code in cells
    ]
    text = "Five words, and a [link](x).\n\n$$\nx + y\n$$"
    page.write_text("\n\n".join([*cells, text, cells[0]]))
    assert reading.open_code(page) == [5, 3]  # each cell has a frame
    assert reading.prose(page.read_text()) == 5


def test_scale(monkeypatch):
    monkeypatch.delenv("SWINDLES_SCALE", raising=False)
    assert style.scale() == "laptop"
    for scale in ("smoke", "paper"):
        monkeypatch.setenv("SWINDLES_SCALE", scale)
        assert style.scale() == scale
    monkeypatch.setenv("SWINDLES_SCALE", "huge")
    with pytest.raises(ValueError, match="huge"):
        style.scale()


@pytest.mark.parametrize(
    ("page", "fetched"),
    [
        ('<a href="https://a.org">x</a><script src="_static/x.js"></script>', 0),
        ('<script src="https://a.org/x.js"></script>', 1),
        ('<link rel="stylesheet" href="//a.org/x.css">', 1),
        ('<img src="HTTPS://a.org/x.png"><img src="data:image/png;base64,aa">', 1),
        ("<style>@import url('https://a.org/x.css');</style>", 1),
    ],
)
def test_remote_requests_are_found(tmp_path, page, fetched):
    (tmp_path / "page.html").write_text(page)
    assert len(offline.remote_requests(tmp_path)) == fetched


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The book, built without executing it, warnings being errors."""
    out = tmp_path_factory.mktemp("book")
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    config["execute"]["execute_notebooks"] = "off"
    local = config["sphinx"]["local_extensions"]
    config["sphinx"]["local_extensions"] = {k: str(ROOT / v) for k, v in local.items()}
    # A figure that a cell draws has no label until it is drawn.
    config["sphinx"]["config"]["suppress_warnings"] = ["ref.ref", "ref.numref"]
    (out / "config.yml").write_text(yaml.safe_dump(config))
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    command = [jupyter_book, "build", ROOT, "-W", "--keep-going", "-q"]
    command += ["--path-output", out, "--config", out / "config.yml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "_build" / "html"


@pytest.mark.slow
def test_book_has_every_page(built):
    for file in toc_files():
        assert (built / f"{file}.html").exists()


@pytest.mark.slow
def test_book_asks_no_other_host(built):
    assert offline.remote_requests(built) == []


@pytest.mark.slow
def test_maths_is_in_the_book(built):
    page = (built / "book" / "notation.html").read_text(encoding="utf-8")
    script = built / "book" / re.search(r'src="([^"]*mathjax/[^"?]*)', page).group(1)
    assert script.exists()
    fonts = script.parent / "output/chtml/fonts/woff-v2"
    assert {font.suffix for font in fonts.iterdir()} == {".woff"}
    files = [path for path in script.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3e6  # of 24e6
    assert "enableMenu" in page  # it would ask for the rest


@pytest.fixture(scope="module")
def pages(built):
    """The text of every page of the book's contents."""
    texts = {f"{file}.html": built / f"{file}.html" for file in toc_files()}
    return {name: path.read_text(encoding="utf-8") for name, path in texts.items()}


@pytest.mark.slow
def test_pages_say_what_they_are(built, pages):
    pages = pages | {"index.html": (built / "index.html").read_text(encoding="utf-8")}
    titles = [re.findall(r"<title>([^<]+)</title>", page) for page in pages.values()]
    assert {len(found) for found in titles} == {1}
    assert len({title for (title,) in titles}) == len(titles)
    for name, page in pages.items():
        (words,) = re.findall(r'<meta name="description" content="([^"]+)"', page)
        assert 20 < len(html.unescape(words)) <= 160, name


def test_contents_say_how_long_each_part_takes():
    page = (ROOT / "book" / "intro.md").read_text(encoding="utf-8")
    said = dict(re.findall(r"^\| (I[IV]*\. [^|]*) \| (\d+) \|", page, re.M))
    for caption, chapters in list(reading.parts().items())[:4]:
        assert abs(int(said.pop(caption)) - reading.minutes(chapters)) <= 4, caption
    assert not said


@pytest.mark.slow
def test_pages_have_a_footer(pages):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, page in pages.items():
        foot = page.partition('<footer class="bd-footer-content">')[2]
        for part in ("version", "license"):
            assert project[part] in foot, name
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", foot), name
        assert "piponi20a.html" in foot, name


@pytest.mark.slow
def test_pages_have_no_script_twice(pages):
    for name, page in pages.items():
        scripts = re.findall(r"<script[^>]*>.*?</script>", page, re.S)
        assert len(scripts) == len(set(scripts)) > 5, name
        assert "thebe" not in page.lower(), name


@pytest.mark.slow
def test_links_within_the_book_lead_somewhere(built, pages):
    known = {(built / name).resolve(): page for name, page in pages.items()}
    ids = {
        path: set(re.findall(r'\bid="([^"]+)"', page)) for path, page in known.items()
    }
    links = 0
    for path, page in known.items():
        for link in re.findall(r'\b(?:href|src)="([^"]+)"', page):
            if re.match(r"\w+:", link):
                continue
            file, _, anchor = html.unescape(link).partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            assert target.exists(), (path.name, link)
            if anchor and target in ids:
                assert unquote(anchor) in ids[target], (path.name, link)
            links += 1
    assert links > 1000


@pytest.mark.slow
def test_chapters_can_be_downloaded_as_notebooks(built, pages):
    offered = 0
    for name, page in pages.items():
        source = ROOT / name.replace(".html", ".md")
        if "jupytext:" not in source.read_text(encoding="utf-8")[:100]:
            continue
        (link,) = re.findall(r'<a href="([^"]+\.ipynb)"', page)
        notebook = nbformat.read(built / Path(name).parent / link, as_version=4)
        nbformat.validate(notebook)
        cells = jupytext.read(source).cells
        assert [c.source for c in notebook.cells] == [c.source for c in cells]
        assert notebook.metadata["kernelspec"]["name"] == "python3"
        offered += 1
    assert offered > 20


@pytest.mark.slow
def test_chains_to_play_with_are_on_their_page(built, pages):
    page = pages["book/coupling.html"]
    assert page.count('id="coupled-hmc"') == 1
    fallback = re.search(r"<noscript><div.*?</noscript>", page, re.S).group(0)
    stills = re.findall(r'<img src="([^"]+)" alt="[^"]+"', fallback)
    scripts = re.findall(r'<script src="([^"]+coupled-hmc[^"]*)"', page)
    assert len(stills) == 2 and len(scripts) == 2
    for file in stills + scripts:
        assert (built / "book" / file).exists()


@pytest.mark.slow
def test_public_names_are_in_the_book(built):
    names = re.findall(r"^\.\. auto\w+:: (\w+)$", PAGE.read_text(), re.M)
    page = (built / "book" / "api.html").read_text(encoding="utf-8")
    shown = re.findall(r'id="swindles\.\w+\.(\w+)"', page)
    assert sorted(shown) == sorted(names)
    _, _, rest = page.partition('id="swindles.coupling.mala">')
    signature = re.sub(r"<.*?>", "", rest.partition("<a class")[0]).strip()
    assert signature == "mala(step_size: float) &#x2192; Sampler"  # as in the source
    assert "Alias for field" not in page and " at 0x" not in page


@pytest.mark.slow
def test_readme_example_gives_what_the_readme_shows():
    """Same numbers up to a few of their own standard errors."""
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    shown = re.search(r"```text\n(.*?)```", text, re.S).group(1)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    def table(output: str) -> dict[str, tuple[float, float]]:
        lines = [line.split() for line in output.splitlines()[1:6]]
        return {name: (float(mean), float(error)) for name, mean, error, *_ in lines}

    here, there = table(done.stdout), table(shown)
    assert list(here) == list(there) and len(here) == 5
    for name, (mean, error) in here.items():
        assert abs(mean - there[name][0]) < 6 * error < 6e-4
    said, told = (re.findall("[a-zA-Z_]{2,}", text) for text in (done.stdout, shown))
    assert said == told, "paste it anew"


def test_one_version():
    """In the package, its citation and its list of changes."""
    (citation,) = re.findall(
        r"^version: (.*)", (ROOT / "CITATION.cff").read_text(), re.M
    )
    changes = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert swindles.__version__ == citation == changes[0]


def test_workflows_run_targets_that_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        steps = re.findall(r"run: make (\w+)", file.read_text())
        assert steps and set(steps) <= targets, file
