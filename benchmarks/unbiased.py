"""What it costs to be unbiased: pairs of chains against one that is warmed up.

    python benchmarks/unbiased.py

writes book/results/unbiased.csv, which the chapter reads: about ten minutes on one
core. Name logistic or item to do only that posterior; rows of the other stay.

All schemes of a posterior share one plan, as ``plan_pairs`` recommends it. ``ess_mean``
and ``ess_square`` are effective draws per gradient of the posterior, of the unbiased
averages: medians over the parameters. ``long_mean`` and ``long_square`` are the same
for chains with the same step and the same coefficients that run on after a warm-up,
which is not counted. ``median`` and ``late`` are the median and the 99 % quantile of
the meeting times, counted from when the second chain starts.
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from swindles import targets
from swindles.antithetic import estimate_series, fold_series
from swindles.coupling import hmc, run
from swindles.models import make_problem
from swindles.schemes import SCHEMES, Plan, plan_series, start_mirrored
from swindles.transport import laplace
from swindles.unbiased import average_pairs, plan_pairs

sys.path.insert(0, str(Path(__file__).parents[1] / "book"))
from pipeline import provenance, read_rows, write_rows

RESULTS = Path(__file__).parents[1] / "book" / "results" / "unbiased.csv"
TARGETS = {"logistic": targets.logistic_regression, "item": targets.item_response}
REPEATS = {"logistic": 512, "item": 48}  # pairs, or mirrored pairs of pairs
LONG = {"logistic": (128, 100, 400), "item": (32, 60, 200)}  # chains, warm-up, steps
NAMES = ("plain", "antithetic", "antithetic+stein")


def load_problem(name):
    """Means and second moments of a posterior, in the space of its Laplace map."""
    target = TARGETS[name]()
    to_x = laplace(target.logdensity, jnp.zeros(target.dim))
    target = target._replace(constrain=lambda x: x)
    return make_problem(target, lambda x: {"mean": x, "square": x**2}).through(to_x)


def with_scheme(plan, scheme):
    """The plan for another scheme, without features where that has none."""
    if "stein" in scheme:
        return plan
    return plan._replace(scheme=scheme, order="none", beta=plan.beta[:0])


def run_long(key, problem, plan, size):
    """Variance of the statistics, and effective draws per gradient, after a warm-up."""
    chains, warmup, steps = size
    moves, leaps = plan.moves, plan.num_integration_steps
    scheme, keys = SCHEMES[plan.scheme], jax.random.split(key, 3)
    algorithm = scheme.build(hmc(moves.step_size, leaps), problem.logdensity)
    z = jax.random.normal(keys[0], (chains, problem.dim), problem.position.dtype)
    states, _ = run(keys[1], algorithm, start_mirrored(algorithm, z), warmup)
    blank = np.zeros(plan.beta.shape[1])
    fixed = Plan(
        plan.scheme, plan.order, plan.beta, np.zeros(len(plan.beta)), *[blank] * 3
    )
    fold = fold_series(plan_series(fixed, problem.statistic), states)
    _, sums = run(keys[2], algorithm, states, steps, fold)
    found = estimate_series(sums).estimate
    return found.variance, found.ess / (chains * steps * leaps * scheme.num_targets)


def measure(name, problem, plan, repeats, size, seed):
    """One row: a scheme on a posterior."""
    keys = jax.random.split(jax.random.key(seed))
    begin = time.perf_counter()
    report = average_pairs(keys[0], problem, plan, repeats, patience=1000)
    seconds = time.perf_counter() - begin
    variance, long = run_long(keys[1], problem, plan, size)
    ess = variance / report.mcse**2 / report.gradients
    waits = report.meeting - plan.moves.lag
    both = [np.median(np.reshape(x, (2, -1)), axis=1) for x in (ess, long)]
    names = ("ess_mean", "ess_square", "long_mean", "long_square")
    moves = plan.moves
    return {
        "posterior": name,
        "scheme": plan.scheme,
        "step_size": moves.step_size,
        "leaps": plan.num_integration_steps,
        "walk": moves.walk,
        "share": moves.share,
        "k": moves.k,
        "m": moves.m,
        "repeats": repeats,
        "median": np.median(waits),
        "late": np.quantile(waits, 0.99),
        **dict(zip(names, np.ravel(both), strict=True)),
        "job": report.gradients // repeats,
        "pilot": plan.gradients,
        "seconds": seconds,
        **provenance(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("posterior", nargs="*", help=f"of {', '.join(TARGETS)}")
    wanted = parser.parse_args().posterior or list(TARGETS)
    if not set(wanted) <= set(TARGETS):
        parser.error(f"a posterior is one of {', '.join(TARGETS)}")
    for name in wanted:
        rows = [row for row in read_rows(RESULTS) if row["posterior"] != name]
        problem, begin = load_problem(name), time.perf_counter()
        plan = plan_pairs(jax.random.key(0), problem)
        print(f"{name}: plan after {time.perf_counter() - begin:.0f} s", flush=True)
        for seed, scheme in enumerate(NAMES, 1):
            mine = with_scheme(plan, scheme)
            sizes = REPEATS[name], LONG[name]
            rows.append(measure(name, problem, mine, *sizes, seed))
            write_rows(RESULTS, rows)
            shown = {k: v for k, v in rows[-1].items() if k not in provenance()}
            print(shown, flush=True)
