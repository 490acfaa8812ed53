"""How long the book takes to read, and how much open code is in the way.

``python tools/reading.py`` prints both for each chapter. The contents page says the
minutes of each part.
"""

import re
from pathlib import Path

import jupytext
import yaml

ROOT = Path(__file__).parents[1]
WORDS_PER_MINUTE = 230
# Cells that show no code, or only after a click.
FOLDED = {"hide-input", "hide-cell", "remove-cell", "remove-input"}


def prose(text: str) -> int:
    """The words of a page in Markdown, without code, formulas and what is folded."""
    text = re.sub(r"\A---\n.*?\n---\n", " ", text, flags=re.S)
    text = re.sub(r"^(```+|:::+).*?^\1$", " ", text, flags=re.S | re.M)
    text = re.sub(r"\$\$.*?\$\$", " ", text, flags=re.S)
    return len(re.findall(r"[^\s|]*[A-Za-z0-9][^\s|]*", text))


def parts() -> dict[str, list[Path]]:
    """The chapters of each part of the book, by its caption."""
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    return {
        part["caption"]: [ROOT / f"{page['file']}.md" for page in part["chapters"]]
        for part in contents["parts"]
    }


def minutes(pages: list[Path]) -> int:
    """Minutes of prose on some pages."""
    words = sum(prose(page.read_text(encoding="utf-8")) for page in pages)
    return round(words / WORDS_PER_MINUTE)


def open_code(page: Path) -> list[int]:
    """Lines of open code in a row, between any two pieces of prose of a chapter.

    A cell counts as one line more than it has, for its frame.
    """
    runs = [0]
    for cell in jupytext.read(page).cells:
        if cell.cell_type == "markdown" and cell.source.strip():
            runs.append(0)
        elif not FOLDED & set(cell.metadata.get("tags", [])) and cell.source.strip():
            runs[-1] += len(cell.source.splitlines()) + 1
    return runs


if __name__ == "__main__":
    for caption, pages in parts().items():
        print(f"{caption}: {minutes(pages)} minutes")
        for page in pages:
            lines = max(open_code(page))
            print(f"  {page.stem:12} {minutes([page]):3} minutes, {lines:3} lines open")
