"""The still images of the chains at the head of the chapter on coupling.

``python tools/still.py`` draws them, with the code that draws in the browser: a browser
without JavaScript shows them instead.
"""

import json
from pathlib import Path

import quickjs

STATIC = Path(__file__).parents[1] / "book" / "_static"
STEPS = 60


def browser() -> quickjs.Context:
    """A JavaScript engine that has read the chains and their drawings."""
    context = quickjs.Context()
    for name in ("coupled-hmc.js", "coupled-hmc-page.js"):
        context.eval((STATIC / name).read_text(encoding="utf-8"))
    return context


def draw() -> dict[str, str]:
    """The contents of the files: two chains after some steps with one momentum."""
    drawings = browser().eval(f"""
        var pair = coupledHMC.start(1);
        for (let i = 0; i < {STEPS}; i++) coupledHMC.step(pair, "same", 4);
        JSON.stringify({{
            "coupled-hmc-paths.svg": coupledPicture.drawPaths(pair),
            "coupled-hmc-distance.svg": coupledPicture.drawDistance(pair),
        }})
    """)
    return json.loads(drawings)


if __name__ == "__main__":
    for name, drawing in draw().items():
        (STATIC / name).write_text(drawing + "\n", encoding="utf-8")
