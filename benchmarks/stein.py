"""What a second of sampling buys, for all schemes with all Stein features.

    python benchmarks/stein.py

For every combination: the standard error of a posterior mean and of a second moment
after one second of sampling, in posterior standard deviations of the statistic, median
over the parameters. Errors fall with the square root of the seconds. The time of a step
is the best of several short runs. Compilation, warm-up and the regression at the end
are not counted; the seconds of the latter are printed beside. Below each table is what
``stein.choose`` says after a short pilot run. It takes a quarter of an hour on one
core. Name posteriors to have only those:

    python benchmarks/stein.py logistic sparse
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


def measure(name, problem, known, scheme, order):
    """Errors after one second, and the seconds of a step and of the regression."""
    size, leaps, chains, warmup, steps, _ = SETTINGS[name]
    keys = jax.random.split(jax.random.key(0), 3)
    algorithm = stein.SCHEMES[scheme][0](hmc(size, leaps), problem.latent())
    states = start(algorithm, jax.random.normal(keys[0], (chains, problem.dim)))
    states, _ = run(keys[1], algorithm, states, warmup)
    number = stein.plan_features(states, order, known)[1].size
    every = max(chains * steps // (50 * max(number, 1)), 1)
    fold = stein.fold_stein(problem.feature(), states, order, known, every)
    short = partial(run, keys[2], algorithm, states, SHORT_RUN, fold, 1, False)
    step = min(stein.seconds(short) for _ in range(2)) / SHORT_RUN
    _, sums = run(keys[2], algorithm, states, steps, fold)
    begin = time.perf_counter()
    estimate = stein.estimate_stein(sums, known, order).estimate
    solve = time.perf_counter() - begin
    error = np.sqrt(step * steps / estimate.ess).reshape(2, -1)
    return np.median(error, axis=1), step, solve


if __name__ == "__main__":
    for name in sys.argv[1:] or SETTINGS:
        problem = make_problem(name)
        known = known_expectation(jax.random.key(1), problem, 1_000_000)
        print(f"{name:24}{'mean':>9}{'square':>9}{'ms/step':>9}{'solve, s':>9}")
        size, leaps, chains, *_, highest = SETTINGS[name]
        for scheme in stein.SCHEMES:
            for order in stein.ORDERS[: stein.ORDERS.index(highest) + 1]:
                error, step, solve = measure(name, problem, known, scheme, order)
                print(
                    f"{scheme:12}{order:12}{error[0]:9.1e}{error[1]:9.1e}"
                    f"{1000 * step:9.2f}{solve:9.2f}",
                    flush=True,
                )
        key = jax.random.key(2)
        stein.choose(key, hmc(size, leaps), problem, chains, expectation=known)
        print(flush=True)
