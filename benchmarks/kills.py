"""Does a run that is killed, again and again, end in the bits of one that is not?

    python benchmarks/kills.py              # 15 kills, 5 interruptions
    python benchmarks/kills.py --kills 3 --interruptions 1

Every call is a process of its own that saves to one file. It is stopped at a random
moment, and called again until it ends. Its estimates are compared, bit for bit, with
those of a call that nobody stopped; and no draft of the file may be left.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CALL = """
import sys
import jax.numpy as jnp
import swindles
from swindles.targets import skewed

found = swindles.estimate(
    skewed(5).logdensity, jnp.zeros(5), lambda x: {"mean": x, "square": x**2}, key=3,
    relative=1e-7, seconds=None, gradients=float(sys.argv[2]), scheme="antithetic",
    chains=64, file=sys.argv[1],
)
"""


def call(file: Path, gradients: float) -> subprocess.Popen:
    """A call in a process of its own."""
    command = [sys.executable, "-c", CALL, str(file), str(gradients)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def answer(file: Path) -> tuple[np.ndarray, int]:
    """What a file's run has come to, and its steps."""
    from swindles.estimation import load

    report = load(file)
    return np.stack([report.estimate.mean, report.estimate.mcse]), report.job.run.steps


def stopped(how: int, moment: float, file: Path, gradients: float) -> int:
    """Stop a call once, call again until it ends; 1 if it was stopped in time."""
    process = call(file, gradients)
    try:
        process.wait(timeout=moment)
    except subprocess.TimeoutExpired:
        process.send_signal(how)
    early = process.wait() != 0 or how == signal.SIGINT
    if call(file, gradients).wait():
        raise RuntimeError("the call that goes on has failed")
    return int(early)


def main() -> None:
    """Stop calls, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--interruptions", type=int, default=5)
    parser.add_argument("--gradients", type=float, default=1e7)
    options = parser.parse_args()
    rng, same, early = np.random.default_rng(0), 0, 0
    hows = [signal.SIGKILL] * options.kills + [signal.SIGINT] * options.interruptions
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        if call(Path(folder) / "whole.npz", options.gradients).wait():
            raise RuntimeError("the call has failed")
        length = time.perf_counter() - begin
        whole, steps = answer(Path(folder) / "whole.npz")
        print(f"a call that nobody stops: {length:.1f} s, {steps} steps", flush=True)
        for number, how in enumerate(hows):
            file, moment = Path(folder) / f"{number}.npz", rng.uniform(0.1, 1) * length
            early += stopped(how, moment, file, options.gradients)
            found, taken = answer(file)
            equal = taken == steps and np.array_equal(found, whole)
            same += equal
            word = "the same bits" if equal else f"OTHER BITS, {taken} steps"
            print(f"{how.name} after {moment:.1f} s: {word}", flush=True)
        left = list(Path(folder).glob("*.draft"))
    print(
        f"{early} stopped in time, {same} of {len(hows)} the same, {len(left)} drafts"
    )


if __name__ == "__main__":
    main()
