"""What a swindle costs: CVA on logistic regression against its bare gradients.

    python benchmarks/schemes.py

A CVA step of 256 chains with five leapfrog steps needs 5 x 512 values and gradients of
the log density. The table gives the time of a whole run, with statistics and sums, as a
multiple of the time of those evaluations alone, in batches of the same size. The row
"learning" is a warm-up of CVA, with the products that the coefficients come from. Runs
are interleaved; each time is the best of several. The last two rows compare an
antithetic pair of two chains with one batch of both.

    python benchmarks/schemes.py --memory 10000

prints the peak memory of a long run on the item-response posterior (several minutes,
Linux only).
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.base import SamplingAlgorithm

from swindles.antithetic import antithetic, fold_series
from swindles.control import fold_pair_products, reference_mean
from swindles.coupling import hmc, run, start
from swindles.models import make_problem
from swindles.schemes import CHAINS as SCHEME_CHAINS
from swindles.schemes import SCHEMES, learn, plan_series
from swindles.targets import item_response, logistic_regression
from swindles.transport import laplace

CHAINS, LEAPS, STEPS, REPEATS = 256, 5, 100, 7


def bare_gradients(logdensity, z, num_batches):
    """Time of evaluating value and gradient; each evaluation depends on the last."""
    evaluate = jax.vmap(jax.value_and_grad(logdensity))

    @jax.jit
    def loop(z):
        def body(_, z):
            value, slope = evaluate(z)
            return z + 1e-6 * slope + 1e-9 * value[:, None]

        return jax.lax.fori_loop(0, num_batches, body, z)

    return lambda: loop(z).block_until_ready()


def batched_pair(sampler, logdensity):
    """An antithetic pair whose two chains are one batch: a rival to ``antithetic``."""
    signs = jnp.array([1.0, -1.0])

    def side(sign):
        return sampler(lambda z: logdensity(sign * z))

    def init(position, _=None):
        return jax.vmap(lambda sign: side(sign).init(position))(signs)

    def step(key, pair):
        return jax.vmap(lambda sign, state: side(sign).step(key, state))(signs, pair)

    return SamplingAlgorithm(init, step)


def latent_problem(target, statistics=None):
    """A posterior in the latent space of its Laplace map."""
    target = target._replace(constrain=lambda x: x)
    to_x = laplace(target.logdensity, target.position)
    return make_problem(target, statistics).through(to_x)


def make_fold(problem, scheme, algorithm, z):
    """What a run of a scheme sums, and the states after its warm-up."""
    expectation = reference_mean(jax.random.key(2), problem)
    states, plan, _ = learn(
        jax.random.key(3),
        algorithm,
        start(algorithm, z),
        problem,
        scheme,
        STEPS,
        STEPS * CHAINS,
        expectation,
        "none",
    )
    return fold_series(plan_series(plan, problem.statistic), states), states


def cost():
    """Print the table of ratios."""
    problem = latent_problem(
        logistic_regression(), lambda x: {"mean": x, "square": x**2}
    )
    latent = problem.logdensity
    z = jax.random.normal(jax.random.key(0), (CHAINS, problem.dim))
    work = {}
    for scheme in SCHEME_CHAINS:
        algorithm = SCHEMES[scheme].build(hmc(0.3, LEAPS), latent)
        fold, states = make_fold(problem, scheme, algorithm, z)
        gradients = STEPS * LEAPS * SCHEMES[scheme].num_targets
        work[scheme] = (
            lambda a=algorithm, s=states, f=fold: run(
                jax.random.key(1), a, s, STEPS, f, 4, progress=False
            ),
            bare_gradients(latent, z, gradients),
        )
    products = fold_pair_products(problem.statistic, states)  # of CVA, the last scheme
    work["learning"] = (
        lambda a=algorithm, s=states: run(
            jax.random.key(1), a, s, STEPS, products, 4, progress=False
        ),
        work["cva"][1],
    )
    # The same pair with and without a batch of its own, no statistics.
    for name, scheme in {"two chains": antithetic, "one batch": batched_pair}.items():
        algorithm = scheme(hmc(0.3, LEAPS), latent)
        states = start(algorithm, z)
        work[name] = (
            lambda a=algorithm, s=states: jax.block_until_ready(
                run(jax.random.key(1), a, s, STEPS, num_blocks=4, progress=False)
            ),
            bare_gradients(latent, z, STEPS * 2 * LEAPS),
        )
    best = {name: [np.inf, np.inf] for name in work}
    for round_number in range(REPEATS + 1):
        for name, pair in work.items():
            for i, action in enumerate(pair):
                begin = time.perf_counter()
                action()
                elapsed = time.perf_counter() - begin
                if round_number:
                    best[name][i] = min(best[name][i], elapsed)
    print(f"{'scheme':12}{'ms per step':>12}{'gradients':>12}{'ratio':>8}")
    for name, (whole, bare) in best.items():
        per = 1000 / STEPS
        print(f"{name:12}{whole * per:12.2f}{bare * per:12.2f}{whole / bare:8.2f}")


def memory(num_steps):
    """Print the peak memory of a long CVA run on the item-response posterior."""
    problem = latent_problem(item_response())
    algorithm = SCHEMES["cva"].build(hmc(0.3, 1), problem.logdensity)
    z = jax.random.normal(jax.random.key(0), (CHAINS, problem.dim))
    fold, states = make_fold(problem, "cva", algorithm, z)
    begin = time.perf_counter()
    run(jax.random.key(1), algorithm, states, num_steps, fold)
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    seconds = time.perf_counter() - begin
    print(
        f"{CHAINS} chains x {num_steps} steps x {problem.dim}: peak {peak:.0f} MB, "
        f"{seconds:.0f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=int, metavar="STEPS", default=0)
    arguments = parser.parse_args()
    if arguments.memory:
        memory(arguments.memory)
    else:
        cost()
