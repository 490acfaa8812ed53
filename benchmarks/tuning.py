"""Does `tune` find good settings? Against an exhaustive grid, on all three posteriors.

    python benchmarks/tuning.py

writes book/results/tuning.csv, which the chapter on tuning reads: about 40 minutes on
two cores. Name one or more of logistic, item, sparse to do only these; rows of the
others stay. With --keep-grid the rows of the grid stay, too, and only the others are
measured again; with --path only those of the path. Every row is one setting, measured
by running all chains at it:

path    step sizes that divide the tuned trajectory of HMC-CONTROL, in five repeats
grid    the exhaustive grid, for HMC-CONTROL and HMC-CVA
best    the best setting of that grid, measured again with another key
tuned   what `tune` recommends, measured with the same key and size as `best`
quick   what `adapt_step_size` recommends (acceptance 0.95, length pi / 2), likewise

``spent`` is what finding the setting cost, in gradients over all chains: the grid, or
the pilot runs. ``ess`` and ``hmc`` are effective draws per gradient, of the scheme and
of its plain chain; ``left`` is what the control chain leaves of the variance of f(X+),
1 - rho^2. All are medians: over the means, over the variances (squared deviations from
the mean of the map), and over both.
"""

import argparse
import sys
import time
from importlib.resources import files
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from swindles import targets, tuning
from swindles.control import (
    fit_pair,
    reference_mean,
    residual_variance,
    shared_variance,
)
from swindles.models import make_problem
from swindles.neutra import load_map
from swindles.schemes import SCHEMES
from swindles.transport import best_gaussian
from swindles.tuning import (
    HMC,
    INTEGRATORS,
    Grid,
    make_trial,
    repeat,
    run_grid,
    summarize_pilot,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "book"))
from pipeline import provenance, read_rows, write_rows

RESULTS = Path(__file__).parents[1] / "book" / "results" / "tuning.csv"
CHAINS = {"logistic": 64, "item": 16, "sparse": 64}  # of the pilot runs
BUDGET = {"logistic": 1e6, "item": 3.1e5, "sparse": 4.5e5}  # gradients for them
# Chains, warm-up and steps of the grid. CVA costs twice as much a step.
GRID_SIZE = {
    ("logistic", "control"): (128, 200, 400),
    ("logistic", "cva"): (128, 200, 400),
    ("item", "control"): (32, 80, 240),
    ("item", "cva"): (32, 40, 120),
    ("sparse", "control"): (64, 150, 350),
    ("sparse", "cva"): (64, 75, 175),
}
LAST_SIZE = {  # of the measurements of `best`, `tuned` and `quick`
    "logistic": (256, 200, 800),
    "item": (128, 80, 400),
    "sparse": (128, 200, 600),
}
STEPS = {
    "logistic": 0.57 * 2 ** (-np.arange(8) / 3),
    "item": 0.32 * 2 ** (-np.arange(7) / 3),
    "sparse": 0.55 * 2 ** (-np.arange(7) / 3),
}
LEAPS = {
    "logistic": [2, 3, 4, 5, 6, 8, 10, 12, 16],
    "item": [4, 6, 8, 10, 13, 16, 20, 25],
    "sparse": [2, 3, 4, 5, 6, 8, 10],
}
PARTS = ("mean", "variance", "all")
REPEATS = 5  # of the path


def load_problem(name):
    """A posterior in the latent space of its map."""
    if name == "sparse":
        target = targets.sparse_logistic_regression()
        to_x = load_map(files("swindles") / "data" / "sparse_flow.npz")
        return with_statistics(target, to_x)
    make = {"logistic": targets.logistic_regression, "item": targets.item_response}
    target = make[name]()
    to_x = best_gaussian(target.logdensity, jnp.zeros(target.dim))
    return with_statistics(target, to_x)


def with_statistics(target, to_x):
    """The problem of estimating all means and variances."""
    target = target._replace(constrain=lambda x: x)
    means = make_problem(target).through(to_x)
    center = jnp.asarray(reference_mean(jax.random.key(4), means).mean, float)

    def statistics(x):
        return {"mean": x, "variance": (x - center) ** 2}

    return make_problem(target, statistics).through(to_x)


def exhaustive(name):
    """All settings of the grid whose trajectories are neither tiny nor too long."""
    size, leaps = (
        part.ravel() for part in np.meshgrid(STEPS[name], LEAPS[name], indexing="ij")
    )
    use = (size * leaps > 0.6) & (size * leaps < 2.4)
    return Grid(size[use], leaps[use])


def by_part(values):
    """Medians over the means, over the variances, and over both."""
    means, variances = np.reshape(values, (2, -1))
    return [np.median(part) for part in (means, variances, values)]


def measure(seed, scheme, problem, expectation, grid, size, family=HMC):
    """One dictionary for each setting of a grid."""
    chains, warmup, steps = size
    keys = jax.random.split(jax.random.key(seed), 3)
    z = jax.random.normal(keys[0], (chains, problem.dim))
    trial = make_trial(scheme, family, problem, z)
    grid = Grid(jnp.asarray(grid[0], float), jnp.asarray(grid[1], int))
    states = repeat(trial.states, len(grid[0]))
    states, _ = run_grid(keys[1], trial.build, grid, states, warmup, trial.fold)
    _, sums = run_grid(keys[2], trial.build, grid, states, steps, trial.fold, 10)
    counts = np.full(len(grid[0]), steps)
    pilot = summarize_pilot(family, grid, counts, sums, 0)
    f, g = SCHEMES[scheme].rows(pilot.chains)
    covariance = pilot.covariance()
    left = residual_variance(covariance, *SCHEMES["control"].rows(pilot.chains))
    rows = []
    for i, (step_size, leaps) in enumerate(zip(*pilot.grid, strict=True)):
        fitted = fit_pair(pilot.setting(i)[0], f, g, expectation)
        # The error of the known mean does not shrink with the draws.
        noise = chains * steps * shared_variance(expectation, fitted.beta)
        ess = covariance[0, 0, i] / (fitted.variance + noise)
        row = {
            "integrator": next(k for k, v in INTEGRATORS.items() if v is family),
            "scheme": scheme,
            "step_size": float(step_size),
            "leaps": int(leaps),
            "acceptance": float(pilot.acceptance[i]),
            "decoupling": float(max(rate[i] for rate in pilot.decoupling.values())),
            "rhat": np.median(pilot.rhat[i]),
        }
        gradients = int(leaps) * family.cost
        for label, values in {
            "left": left[i],
            "hmc": pilot.ess[i] / gradients,
            "ess": ess / gradients / len(f),
        }.items():
            row |= {
                f"{label}_{p}": v for p, v in zip(PARTS, by_part(values), strict=True)
            }
        rows.append(row)
    return rows


def cost(grid, size, scheme, family=HMC):
    """Gradients that ``measure`` takes."""
    chains, warmup, steps = size
    each = family.cost * SCHEMES[scheme].num_targets
    return chains * (warmup + steps) * int(np.sum(grid[1])) * each


def settings(row):
    """The settings of a row or of a ``Tuning``."""
    if isinstance(row, dict):
        return float(row["step_size"]), int(row["leaps"])
    return row.step_size, row.num_integration_steps


def compare(name, kept):
    """Yield all rows of one posterior, part by part; runs that are kept as they are."""
    problem = load_problem(name)
    expectation = reference_mean(jax.random.key(5), problem)
    grid, size = exhaustive(name), LAST_SIZE[name]

    def tuned(scheme, family=HMC, budget=BUDGET[name]):
        key = jax.random.key(0)
        found = tuning.tune(key, scheme, problem, family, CHAINS[name], budget)
        print(found, flush=True)
        return found

    for scheme in ("control", "cva"):
        found, part = tuned(scheme), GRID_SIZE[name, scheme]
        tried = [row for row in kept if row["scheme"] == scheme]
        tried = tried or label(
            name, "grid", measure(1, scheme, problem, expectation, grid, part)
        )
        yield tried
        best = max(tried, key=lambda row: float(row["ess_all"]))
        first = tuning.adapt_step_size(
            jax.random.key(0), problem, num_chains=CHAINS[name]
        )
        three = {
            "best": (settings(best), cost(grid, part, scheme)),
            "tuned": (settings(found), found.gradients),
            "quick": (settings(first), first.gradients),
        }
        again = Grid(*np.transpose([setting for setting, _ in three.values()]))
        last = measure(2, scheme, problem, expectation, again, size)
        for (kind, (_, spent)), row in zip(three.items(), last, strict=True):
            yield label(name, kind, [row], spent)
    for family in list(INTEGRATORS.values())[1:] if name != "item" else []:
        found = tuned("control", family, 1e6)
        one = Grid(*np.transpose([settings(found)]))
        last = measure(2, "control", problem, expectation, one, size, family)
        yield label(name, "tuned", last, found.gradients)


def label(name, kind, found, spent=0, repeat=0):
    """The rows of a measurement, with what else there is to say."""
    first = {"posterior": name, "kind": kind, "repeat": repeat}
    last = {"spent": spent} | provenance()
    return [first | row | last for row in found]


def measure_path(name, rows):
    """Yield the rows along the trajectory that ``tune`` has found, repeat by repeat."""
    problem, size = load_problem(name), GRID_SIZE[name, "control"]
    expectation = reference_mean(jax.random.key(5), problem)
    mine = name, "control", "velocity Verlet"
    size_of = {
        row["kind"]: settings(row)
        for row in rows
        if (row["posterior"], row["scheme"], row["integrator"]) == mine
    }
    length = np.prod(size_of["tuned"])
    counts = tuning.step_counts(round(length / size_of["quick"][0]))
    path = Grid(length / counts, counts)
    for number in range(REPEATS):
        found = measure(10 + number, "control", problem, expectation, path, size)
        yield label(name, "path", found, repeat=number)


def warn(rows):
    """Print where `tune` has not found what a grid finds, or not cheaply."""
    found = {
        (row["posterior"], row["scheme"], row["kind"]): row
        for row in rows
        if row["integrator"] == "velocity Verlet"
    }
    for (name, scheme, kind), best in found.items():
        tuned = found.get((name, scheme, "tuned"))
        if kind != "best" or tuned is None:
            continue
        ess, spent = (float(tuned[n]) / float(best[n]) for n in ("ess_all", "spent"))
        if ess < 0.8 or spent > 0.1:
            print(
                f"WARNING: {name} {scheme}: `tune` has {ess:.2f} of the grid's ESS "
                f"for {spent:.2f} of its gradients"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("posterior", nargs="*", help=f"of {', '.join(CHAINS)}")
    parser.add_argument(
        "--keep-grid", action="store_true", help="take the rows of the grid as they are"
    )
    parser.add_argument("--path", action="store_true", help="only the rows of the path")
    arguments = parser.parse_args()
    wanted = arguments.posterior or list(CHAINS)
    if not set(wanted) <= set(CHAINS):
        parser.error(f"a posterior is one of {', '.join(CHAINS)}")
    for name in wanted:
        begin, rows = time.perf_counter(), read_rows(RESULTS)
        mine = [row for row in rows if row["posterior"] == name]
        if arguments.path:
            rows = [row for row in rows if row not in mine or row["kind"] != "path"]
            parts = measure_path(name, mine)
        else:
            kept = [r for r in mine if arguments.keep_grid and r["kind"] == "grid"]
            rows = [row for row in rows if row not in mine]
            parts = chain(compare(name, kept), measure_path(name, rows))
        for part in parts:
            rows += part
            write_rows(RESULTS, rows)
            kind, seconds = part[0]["kind"], time.perf_counter() - begin
            print(f"{name} {kind}: {seconds:.0f} s", flush=True)
    warn(read_rows(RESULTS))
