"""The fitted maps of all three posteriors: how close they come, and how quickly.

    python benchmarks/maps.py

One row for each map: minus its ELBO (in nats, for densities without their normalising
constants), the standard error of that, Pareto k, and the seconds of the fit with
compilation. Below each map of the sparse posterior: what HMC and CVA give with step
size 0.2 and 5 leapfrog steps, for posterior means, at the worst, the median and the
best parameter. It takes half a dozen minutes.

    python benchmarks/maps.py --save

fits the flow of the sparse posterior that comes with the package, three times as long,
and writes it.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from swindles import neutra, targets, transport
from swindles.coupling import hmc
from swindles.models import make_problem
from swindles.neutra import FLOW_SCHEDULE, PAPER_FLOW, Design
from swindles.schemes import swindle

# What the trials of `fit_flow` choose for jax.random.key(0).
FLOW_KEY = jax.random.split(jax.random.key(0))[1]
SAVED = Path(__file__).parent.parent / "src" / "swindles" / "data" / "sparse_flow.npz"


def row(name, weights, seconds):
    """Print one row of the table, from log weights of fresh draws."""
    k, error = transport.pareto_k(weights), weights.std() / np.sqrt(weights.size)
    print(
        f"{name:34}{-weights.mean():12.3f}{error:8.3f}{k:8.2f}{seconds:8.1f}",
        flush=True,
    )


def fit_affine_maps(make):
    """Laplace's map and the best Gaussian."""
    target = make()
    for fit in (transport.laplace, transport.best_gaussian):
        begin = time.perf_counter()
        to_x = fit(target.logdensity, jnp.zeros(target.dim))
        seconds = time.perf_counter() - begin
        key = jax.random.key(0)
        weights = transport.log_weights(
            key, target.logdensity, to_x, target.dim, 32_768
        )
        row(f"{target.name}, {fit.__name__}", weights, seconds)


def fit_bent(design, **options):
    """A flow on the sparse posterior."""
    target = targets.sparse_logistic_regression()
    begin = time.perf_counter()
    start = transport.identity(target.dim)
    key = options.pop("key", jax.random.key(0))
    fit = neutra.fit_flow(key, target.logdensity, start, design, **options)
    name = "bent flow" if design.bend else "the paper's flow"
    row(f"sparse, {name}", fit.log_weights, time.perf_counter() - begin)
    return fit


def run_chains(fit):
    """Print what HMC and CVA give per step with the map of the sparse posterior."""
    target = targets.sparse_logistic_regression()._replace(constrain=lambda x: x)
    problem = make_problem(target).through(fit.transport)
    for scheme in ("plain", "cva"):
        result = swindle(jax.random.key(1), scheme, hmc(0.2, 5), problem, 256, 800, 400)
        ess = result.estimate.ess / result.estimate.num_draws
        acceptance = result.rates["acceptance"]["plus"]
        print(
            f"  {scheme:6} acceptance {acceptance:.3f}, "
            f"ESS per step {ess.min():.2f} / {np.median(ess):.2f} / {ess.max():.2f}, "
            f"R-hat {result.estimate.rhat.max():.2f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="save the flow")
    arguments = parser.parse_args()
    print(f"{'map':34}{'-ELBO':>12}{'error':>8}{'k':>8}{'seconds':>8}")
    if arguments.save:
        longer = FLOW_SCHEDULE._replace(num_steps=60_000, tolerance=-np.inf)
        fit = fit_bent(PAPER_FLOW, key=FLOW_KEY, schedule=longer, trials=1)
        neutra.save_map(SAVED, fit.transport)
    else:
        for make in (targets.logistic_regression, targets.item_response):
            fit_affine_maps(make)
        for bend in (False, True):
            run_chains(fit_bent(Design(bend=bend)))
