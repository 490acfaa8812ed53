"""The fitted maps of all three posteriors: how close they come, and in how many seconds.

    python benchmarks/maps.py

One row for each map: minus its ELBO (in nats, for densities without their normalising
constants), the standard error of that, Pareto k, and the seconds of the fit with
compilation. Take half a dozen minutes for it.

    python benchmarks/maps.py --best

does the affine fits with far more work, to tell how much the usual ones leave.

    python benchmarks/maps.py --save

writes the flow of the sparse posterior that comes with the package.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from swindles import targets, transport
from swindles.transport import FLOW_SCHEDULE, Design, Schedule

SAVED = Path(__file__).parent.parent / "src" / "swindles" / "data" / "sparse_flow.npz"
QUICK = Schedule(num_steps=2000, batch=128, learning_rate=1e-2)


def row(name, fit, seconds):
    """Print one row of the table."""
    k = transport.pareto_k(fit.log_weights)
    print(
        f"{name:46}{-fit.elbo:12.3f}{fit.elbo_error:8.3f}{k:8.2f}{seconds:8.1f}",
        flush=True,
    )


def fit_round(make, schedule):
    """Laplace's map and the full-rank fit that starts from it."""
    target = make()
    begin = time.perf_counter()
    start = transport.laplace(target.logdensity, jnp.zeros(target.dim))
    key = jax.random.key(0)
    fit = transport.fit_affine(key, target.logdensity, start, schedule)
    row(f"{target.name}, full rank", fit, time.perf_counter() - begin)


def fit_bent(design):
    """A diagonal fit to the sparse posterior, and a flow that starts from it."""
    target = targets.sparse_logistic_regression()
    keys = jax.random.split(jax.random.key(0))
    begin = time.perf_counter()
    start = transport.identity(target.dim)
    diagonal = transport.fit_affine(keys[0], target.logdensity, start, QUICK)
    fit = transport.fit_flow(
        keys[1], target.logdensity, diagonal.transport, design, FLOW_SCHEDULE
    )
    name = "bent flow" if design.bend else "the paper's flow"
    row(f"{target.name}, {name}", fit, time.perf_counter() - begin)
    return fit


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--best", action="store_true", help="affine maps, more work")
    parser.add_argument("--save", action="store_true", help="save the bent flow")
    arguments = parser.parse_args()
    print(f"{'map':46}{'-ELBO':>12}{'error':>8}{'k':>8}{'seconds':>8}")
    if arguments.save:
        transport.save(SAVED, fit_bent(Design(bend=True)).transport)
    else:
        affine = transport.AFFINE_SCHEDULE
        if arguments.best:
            affine = Schedule(5000, 512, 1e-3, tolerance=-1.0)
        for make in (targets.logistic_regression, targets.item_response):
            fit_round(make, affine)
        if not arguments.best:
            for bend in (False, True):
                fit_bent(Design(bend=bend))
