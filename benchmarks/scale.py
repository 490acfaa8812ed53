"""How much faster is a run on several devices?

    python benchmarks/scale.py              # six minutes on two idle cores
    python benchmarks/scale.py --repeats 1  # only to see that it works

Blocks of CVA with their sums, on the cores of this machine as devices. "strong": the
same chains on one device and on two, by turns. "weak": as many chains on each of 1, 2,
4 and 8 devices; those that have no core of their own wait for one. "estimate": whole
calls on one device and on two, by points and by chains. Writes book/results/scale.csv,
which the chapter `scale` reads.
"""

import argparse
import csv
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import swindles

sys.path.insert(0, str(Path(__file__).parents[1] / "book"))
RESULTS = Path(__file__).parents[1] / "book" / "results"
# Posterior, chains and steps of a block; for "weak", chains on each device.
STRONG = [("logistic", 256, 400), ("item", 256, 20)]
WEAK = [("logistic", 64, 400)]
DEVICES = {"strong": (1, 2), "weak": (1, 2, 4, 8), "estimate": (1, 2)}
# Calls: the posterior, and what is asked for.
CALLS = [
    ("logistic", {"relative": 1e-4, "scheme": "importance"}),
    ("logistic", {"relative": 1e-3, "scheme": "cva"}),
    ("item", {"relative": 3e-3, "scheme": "importance"}),
]


def make_block(posterior: str, chains: int, steps: int):
    """What takes one block of CVA, with its sums."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from swindles import targets
    from swindles.antithetic import fold_series
    from swindles.control import control_series, control_values
    from swindles.coupling import add_block, begin_run, hmc
    from swindles.models import make_problem
    from swindles.schemes import SCHEMES, start_mirrored
    from swindles.transport import Affine, best_gaussian

    if posterior == "logistic":
        model = targets.logistic_regression()
        to_x, sampler = best_gaussian(model.logdensity, model.position), hmc(0.365, 4)
    else:  # the map does not matter for the time
        model = targets.item_response()
        to_x, sampler = Affine(jnp.zeros(501), jnp.full(501, 0.3)), hmc(0.1, 4)
    model = model._replace(constrain=lambda x: x)
    problem = make_problem(model, lambda x: {"mean": x, "square": x**2}).through(to_x)
    algorithm = SCHEMES["cva"].build(sampler, problem.logdensity)
    z = jax.random.normal(jax.random.key(1), (chains, problem.dim))
    states, blank = start_mirrored(algorithm, z), np.zeros(2 * problem.dim)
    statistic = problem.statistic
    observe = partial(control_values, statistic)
    series = control_series(statistic, observe, blank, blank)
    fold = fold_series(series, states)
    begun = begin_run(states, fold[0])
    return lambda: add_block(jax.random.key(0), begun, algorithm, fold, steps)


def measure_calls(repeats: int) -> list[dict]:
    """Seconds of calls of `estimate` on different numbers of devices, by turns."""
    from swindles import scale, targets

    rows = []
    for posterior, options in CALLS:
        make = {"logistic": "logistic_regression", "item": "item_response"}[posterior]
        model = getattr(targets, make)()
        for repeat in range(-1, min(repeats, 3)):
            for number in DEVICES["estimate"]:
                with scale.use_devices(number):
                    begin = time.perf_counter()
                    swindles.estimate(model, key=repeat + 1, seconds=None, **options)
                    seconds = time.perf_counter() - begin
                what = {"chains": 128, "steps": 0, "repeat": repeat, "seconds": seconds}
                head = {"posterior": posterior, "devices": number}
                kind = {"kind": f"estimate by {options['scheme']}"}
                rows += [kind | head | what] if repeat >= 0 else []
    return rows


def measure(kind: str, repeats: int) -> list[dict]:
    """Seconds of blocks on different numbers of devices, by turns."""
    swindles.use_cores(max(DEVICES[kind]))
    from swindles import scale

    if kind == "estimate":
        return measure_calls(repeats)
    rows = []
    for posterior, chains, steps in {"strong": STRONG, "weak": WEAK}[kind]:
        each = {
            number: chains * (number if kind == "weak" else 1)
            for number in DEVICES[kind]
        }
        blocks = {n: make_block(posterior, total, steps) for n, total in each.items()}
        for repeat in range(-1, repeats):
            for number, block in blocks.items():
                with scale.use_devices(number):
                    begin = time.perf_counter()
                    block()
                    seconds = time.perf_counter() - begin
                head = {"kind": kind, "posterior": posterior, "devices": number}
                what = {"chains": each[number], "steps": steps, "repeat": repeat}
                rows += [head | what | {"seconds": seconds}] if repeat >= 0 else []
    return rows


def main() -> None:
    """Measure each kind in a process of its own, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=DEVICES, help="only this, to the output")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.kind:
        rows = measure(arguments.kind, arguments.repeats)
        writer = csv.DictWriter(sys.stdout, rows[0])
        writer.writeheader()
        writer.writerows(rows)
        return

    import numpy as np
    from pipeline import as_table, provenance, where, write_rows

    rows = []
    for kind in DEVICES:
        command = [sys.executable, __file__, "--kind", kind]
        command += ["--repeats", str(arguments.repeats)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows += list(csv.DictReader(done.stdout.splitlines()))
    made_by = provenance()
    write_rows(RESULTS / "scale.csv", [row | made_by for row in rows])
    table = as_table(rows)
    names = zip(table["kind"], table["posterior"], strict=True)
    for kind, posterior in dict.fromkeys(names):
        here = where(table, kind=kind, posterior=posterior)
        times = {
            int(n): np.median(where(here, devices=n)["seconds"])
            for n in np.unique(here["devices"])
        }
        shown = ", ".join(f"{n}: {x:.3f} s" for n, x in times.items())
        rest = ", ".join(f"{x / times[1]:.2f}" for n, x in times.items() if n > 1)
        print(f"{kind}, {posterior}: {shown}; of one device: {rest}")


if __name__ == "__main__":
    main()
