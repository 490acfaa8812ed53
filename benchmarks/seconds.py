"""How long until an answer: `estimate` against NumPyro's NUTS, cold processes.

    python benchmarks/seconds.py             # three repeats, alternating

Each run is a process of its own. Imports are not counted, compilation is. NUTS runs
4 vectorised chains of 500 + 2500 steps; `estimate` is asked for 1e-4 of a standard
deviation, and called a second time with another key.
"""

import argparse
import json
import subprocess
import sys
import time

import numpy as np


def credit() -> tuple:
    """The log density of the README, and its statistics."""
    import jax.numpy as jnp

    from swindles.targets import german_credit

    covariates, bad = german_credit()

    def logdensity(weights):
        logits = covariates @ weights
        log_likelihood = jnp.sum(bad * logits - jnp.logaddexp(0, logits))
        return log_likelihood - 0.5 * weights @ weights

    def statistics(weights):
        return {
            "intercept": weights[-1],
            "risk": 1 / (1 + jnp.exp(-weights[-1])),
            "first": weights[:3],
        }

    return logdensity, statistics, jnp.zeros(25)


def run_estimate() -> dict:
    """Two calls of `estimate`, with what they compiled."""
    import jax

    import swindles
    import swindles.estimation  # an import, not a part of the call

    logdensity, statistics, position = credit()
    compiled, traced = [], []

    def watched(weights):
        traced.append(1)
        return logdensity(weights)

    def listen(event: str, seconds: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    found = {}
    for name, key in (("first", 0), ("second", 1)):
        begin, before = time.perf_counter(), len(compiled)
        report = swindles.estimate(watched, position, statistics, key, relative=1e-4)
        found[name] = time.perf_counter() - begin
        found[f"{name} compilations"] = len(compiled) - before
        found[f"{name} errors"] = [
            report.estimate.mcse.min(),
            report.estimate.mcse.max(),
        ]
        found[f"{name} way"] = report.job.scheme
    return found | {"traces": len(traced)}


def run_nuts() -> dict:
    """NumPyro's NUTS on the same posterior."""
    import jax
    import numpyro.infer

    logdensity, _, position = credit()
    begin = time.perf_counter()
    kernel = numpyro.infer.NUTS(potential_fn=lambda weights: -logdensity(weights))
    mcmc = numpyro.infer.MCMC(
        kernel,
        num_warmup=500,
        num_samples=2500,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    starts = jax.random.normal(jax.random.key(1), (4, position.size))
    mcmc.run(jax.random.key(0), init_params=starts)
    jax.block_until_ready(mcmc.get_samples())
    return {"first": time.perf_counter() - begin}


RUNS = {"estimate": run_estimate, "nuts": run_nuts}


def spawn(which: str) -> dict:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--run", which]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run both by turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=RUNS, help="one run, in this process")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(RUNS[arguments.run]()))
        return
    ratios = []
    for _ in range(arguments.repeats):
        ours, theirs = spawn("estimate"), spawn("nuts")
        ratios.append((ours["first"] / theirs["first"], ours["second"] / ours["first"]))
        print(json.dumps({"estimate": ours, "nuts": theirs}), flush=True)
    first, second = np.median(ratios, axis=0)
    print(f"first call / NUTS {first:.2f}, second call / first {second:.2f}")


if __name__ == "__main__":
    main()
