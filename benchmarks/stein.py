"""What a second of sampling buys, for all schemes with all Stein features.

    python benchmarks/stein.py

For every combination: the standard error of a posterior mean and of a second moment
after one second of sampling, in posterior standard deviations of the statistic, median
over the parameters. Errors fall with the square root of the seconds. The time of a step
is the best of three short runs. Compilation, warm-up and the regression at the end are
not counted; the seconds of the latter are printed beside. It takes ten minutes on one
core. Name posteriors to have only those:

    python benchmarks/stein.py logistic sparse

And the time of a run with all 350 features of the logistic regression, over that of a
run without them, when products are summed at every step and at every third:

    python benchmarks/stein.py --cost
"""

import sys
import time
from functools import partial
from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np

from swindles import stein, targets, transport
from swindles.coupling import hmc, run, start
from swindles.latent import Problem, known_expectation

# Step size, leapfrog steps, chains, warm-up, steps, highest order.
SETTINGS = {
    "logistic": (0.3, 5, 128, 500, 500, "full"),
    "item response": (0.3, 5, 64, 100, 400, "diagonal"),
    "sparse": (0.2, 5, 128, 300, 600, "full"),
}
SHORT_RUN = 20  # steps, to be timed several times


def moments(x):
    """Means and second moments."""
    return {"mean": x, "square": x**2}


def make_problem(name):
    """A posterior with its map."""
    if name == "sparse":
        target = targets.sparse_logistic_regression()
        to_x = transport.load(files("swindles") / "data" / "sparse_flow.npz")
    else:
        make = {
            "logistic": targets.logistic_regression,
            "item response": targets.item_response,
        }
        target = make[name]()
        to_x = transport.laplace(target.logdensity, jnp.zeros(target.dim))
    return Problem(target.logdensity, to_x, target.dim, moments)


def measure(name, problem, known, scheme):
    """For every order: errors after one second, seconds of a step, of the regression.

    One run with the highest order serves all; the time of a step is that of a run with
    the order in question.
    """
    size, leaps, chains, warmup, steps, highest = SETTINGS[name]
    keys = jax.random.split(jax.random.key(0), 3)
    algorithm = stein.SCHEMES[scheme][0](hmc(size, leaps), problem.latent())
    states = start(algorithm, jax.random.normal(keys[0], (chains, problem.dim)))
    step = {}
    for order in stein.ORDERS[: stein.ORDERS.index(highest) + 1]:
        number = stein.plan_features(states, order, known)[1].size
        every = max(chains * steps // (50 * max(number, 1)), 1)
        fold = stein.fold_stein(problem.feature(), states, order, known, every)
        short = partial(run, keys[2], algorithm, states, SHORT_RUN, fold, 1, False)
        step[order] = stein.seconds(short) / SHORT_RUN
    states, _ = run(keys[1], algorithm, states, warmup, fold)
    _, sums = run(keys[2], algorithm, states, steps, fold)
    for order, seconds in step.items():
        begin = time.perf_counter()
        estimate = stein.estimate_stein(sums, known, order).estimate
        solve = time.perf_counter() - begin
        error = np.sqrt(seconds * steps / estimate.ess).reshape(2, -1)
        yield order, np.median(error, axis=1), seconds, solve


def cost(num_steps=100, rounds=2):
    """Print the ratios of wall times; runs are interleaved, the best time counts."""
    problem = make_problem("logistic")
    known = known_expectation(jax.random.key(1), problem)
    print(f"{'scheme':12}{'every step':>12}{'every third':>12}")
    for name, (scheme, _) in stein.SCHEMES.items():
        algorithm = scheme(hmc(0.3, 5), problem.latent())
        states = start(algorithm, jax.random.normal(jax.random.key(0), (128, 25)))
        runs = []
        for order, every in [("none", 1), ("full", 1), ("full", 3)]:
            fold = stein.fold_stein(problem.feature(), states, order, known, every)
            runs.append(
                partial(run, jax.random.key(2), algorithm, states, num_steps, fold)
            )
        best = np.min(
            [[stein.seconds(each) for each in runs] for _ in range(rounds)], 0
        )
        print(
            f"{name:12}{best[1] / best[0]:12.2f}{best[2] / best[0]:12.2f}", flush=True
        )


if __name__ == "__main__":
    if "--cost" in sys.argv:
        cost()
        sys.exit()
    for name in sys.argv[1:] or SETTINGS:
        problem = make_problem(name)
        known = known_expectation(jax.random.key(1), problem, 1_000_000)
        print(f"{name:24}{'mean':>9}{'square':>9}{'ms/step':>9}{'solve, s':>9}")
        for scheme in stein.SCHEMES:
            for order, error, step, solve in measure(name, problem, known, scheme):
                print(
                    f"{scheme:12}{order:12}{error[0]:9.1e}{error[1]:9.1e}"
                    f"{1000 * step:9.2f}{solve:9.2f}",
                    flush=True,
                )
        print(flush=True)
