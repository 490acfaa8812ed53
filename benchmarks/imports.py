"""How long ``import swindles`` takes, over ``import jax, blackjax``, in one run.

Both are timed in fresh processes, in turn; the middle one of each counts.
"""

import argparse
import subprocess
import sys
import time
from statistics import median

WHAT = {
    "jax, blackjax": "import jax, blackjax",
    "swindles": "import swindles",
    "swindles.estimate": "import swindles; swindles.estimate",
}


def seconds(code: str) -> float:
    """Wall time of a Python process that runs the code."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Print seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    rounds = [
        {name: seconds(code) for name, code in WHAT.items()} for _ in range(repeats)
    ]
    base = median(each["jax, blackjax"] for each in rounds)
    for name in WHAT:
        middle = median(each[name] for each in rounds)
        print(f"{name:18} {middle:6.2f} s  {middle / base:5.2f}")


if __name__ == "__main__":
    main()
