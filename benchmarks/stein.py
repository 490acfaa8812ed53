"""What a gradient buys, for all chains with all Stein features.

    python benchmarks/stein.py

For every combination: the effective draws of a posterior mean and of a second moment
for one gradient of the posterior (median over the parameters; the warm-up is not
counted), and the CPU time of a step of all chains, the best of several short runs. It
takes a quarter of an hour on one core. Name posteriors to have only those:

    python benchmarks/stein.py logistic sparse
"""

import sys
import time
from importlib.resources import files

import jax
import numpy as np

from swindles import targets
from swindles.antithetic import fold_series
from swindles.control import reference_mean
from swindles.coupling import hmc, run, start
from swindles.models import make_problem
from swindles.neutra import load_map
from swindles.schemes import CHAINS, SCHEMES, finish_run, learn, plan_series
from swindles.stein import ORDERS
from swindles.transport import laplace

# Step size, leapfrog steps, chains, warm-up, steps, highest order; and whether features
# of a control chain, one for each statistic, are few enough to stand beside Stein's.
SETTINGS = {
    "logistic": (0.3, 5, 128, 1000, 500, "full", True),
    "item response": (0.3, 5, 64, 600, 300, "diagonal", False),
    "sparse": (0.2, 5, 128, 1200, 600, "full", True),
}
SHORT_RUN = 20  # steps, to be timed several times


def build_problem(name):
    """A posterior in the latent space of its map, with means and second moments."""
    if name == "sparse":
        target = targets.sparse_logistic_regression()
        to_x = load_map(files("swindles") / "data" / "sparse_flow.npz")
    else:
        make = {
            "logistic": targets.logistic_regression,
            "item response": targets.item_response,
        }
        target = make[name]()
        to_x = laplace(target.logdensity, target.position)
    plain = target._replace(constrain=lambda x: x)
    return make_problem(plain, lambda x: {"mean": x, "square": x**2}).through(to_x)


def seconds(action):
    """The shortest of four CPU times, after a call that compiles."""
    times = []
    for _ in range(5):
        begin = time.process_time()
        jax.block_until_ready(action())
        times.append(time.process_time() - begin)
    return min(times[1:])


def measure(name, problem, expectation, scheme, order):
    """Effective draws for a gradient, of means and of squares; CPU time of a step."""
    size, leaps, chains, warmup, steps, *_ = SETTINGS[name]
    keys = jax.random.split(jax.random.key(0), 3)
    algorithm = SCHEMES[scheme].build(hmc(size, leaps), problem.logdensity)
    states = start(algorithm, jax.random.normal(keys[0], (chains, problem.dim)))
    draws = chains * steps
    states, plan, learned = learn(
        keys[1], algorithm, states, problem, scheme, warmup, draws, expectation, order
    )
    fold = fold_series(plan_series(plan, problem.statistic), states)
    _, sums = run(keys[2], algorithm, states, steps, fold)
    found = finish_run(sums, plan, learned).estimate
    each = found.ess / draws / leaps / SCHEMES[scheme].num_targets
    step = seconds(lambda: run(keys[2], algorithm, states, SHORT_RUN, fold, 1, False))
    return np.median(each.reshape(2, -1), axis=1), step / SHORT_RUN


def combinations(highest, beside):
    """Names of schemes, and orders: all that make sense."""
    for chains in CHAINS:
        yield chains, "none"
        if "control" in CHAINS[chains][1] and not beside:
            continue
        for order in ORDERS[1 : ORDERS.index(highest) + 1]:
            yield f"{chains}+stein".replace("plain+", ""), order


if __name__ == "__main__":
    for name in sys.argv[1:] or SETTINGS:
        problem = build_problem(name)
        expectation = reference_mean(jax.random.key(1), problem, 1_000_000)
        print(f"{name:30}{'mean':>9}{'square':>9}{'ms/step':>9}", flush=True)
        for scheme, order in combinations(*SETTINGS[name][5:]):
            (mean, square), step = measure(name, problem, expectation, scheme, order)
            print(
                f"{scheme:18}{order:12}{mean:9.3g}{square:9.3g}{1000 * step:9.2f}",
                flush=True,
            )
        print(flush=True)
