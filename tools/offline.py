"""Does a built book open without the network?

``python tools/offline.py _build/html`` lists everything a page would fetch from
another host when it is opened: scripts, styles, images, fonts, frames. Links that a
reader may click are fine.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

REMOTE = re.compile(r"(https?:)?//", re.IGNORECASE)
CSS_URL = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """Collects what a page fetches when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the addresses that this tag fetches from."""
        values = {name: value or "" for name, value in attrs}
        addresses = [values.get("src", ""), values.get("poster", "")]
        addresses += values.get("srcset", "").split(",")
        if tag == "object":
            addresses.append(values.get("data", ""))
        if tag in ("image", "use"):
            addresses += [values.get("href", ""), values.get("xlink:href", "")]
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            addresses.append(values.get("href", ""))
        self.fetched += [a.strip() for a in addresses if REMOTE.match(a.strip())]
        self.fetched += CSS_URL.findall(values.get("style", ""))


def remote_requests(html: Path) -> list[str]:
    """Every ``page: address`` that is fetched from another host."""
    found = []
    for path in sorted(html.rglob("*.html")):
        text = path.read_text(encoding="utf-8")
        page = Page()
        page.feed(text)
        styles = re.findall(r"<style.*?</style>", text, re.DOTALL | re.IGNORECASE)
        page.fetched += CSS_URL.findall("\n".join(styles))
        found += [f"{path.relative_to(html)}: {address}" for address in page.fetched]
    for path in sorted(html.rglob("*.css")):
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(html)}: {url}" for url in CSS_URL.findall(text)]
    return found


if __name__ == "__main__":
    requests = remote_requests(Path(sys.argv[1]))
    for request in requests:
        print(f"offline: {request}", file=sys.stderr)
    sys.exit(bool(requests))
