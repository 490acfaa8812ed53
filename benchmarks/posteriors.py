"""Twelve real posteriors: `estimate` at 1 % against NumPyro's NUTS, cold processes.

    python benchmarks/posteriors.py                  # all of them, some 20 minutes
    python benchmarks/posteriors.py garch nes1972    # those whose name has one of these
    python benchmarks/posteriors.py --ours           # `estimate` alone

Each run is a process of its own. Imports are not counted, compilation is. `estimate`
is asked for all means and squares to 1 % of a standard deviation within a minute, NUTS
(4 vectorised chains, 500 steps of warm-up, double precision) runs until the least
effective sample size of a mean is 10 000, or for 200 s. *Right*: no answer is further
than five errors (its own and the reference's) from the published one.
"""

import argparse
import gzip
import json
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "posteriordb"
NAMES = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.json*"))
ENOUGH, LONGEST = 10_000, 200.0


def load(name: str) -> tuple:
    """The NumPyro model, and the published values by parameter."""
    sys.path.insert(0, str(FOLDER))
    import models

    (path,) = FOLDER.glob(f"{name}.json*")
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        content = json.load(file)
    return models.MODELS[name](content["data"]), content["reference"]


def published(reference: dict, name: str) -> list[float] | None:
    """The row of the reference for a statistic such as ``square.beta[0]``."""
    kind, site = name.split(".", 1)
    from_one = re.sub(
        r"\[(.*)\]",
        lambda found: f"[{','.join(str(int(i) + 1) for i in found[1].split(','))}]",
        site,
    )
    return reference.get(from_one, {}).get(kind)


def run_estimate(name: str) -> dict:
    """One call, and how far its answers are from the published ones."""
    import jax

    import swindles
    import swindles.estimation

    model, reference = load(name)
    sites = {entry.split("[")[0] for entry in reference}

    def statistics(draw: dict) -> dict:
        kept = {site: value for site, value in draw.items() if site in sites}
        return {"mean": kept, "square": jax.tree.map(lambda value: value**2, kept)}

    begin = time.perf_counter()
    report = swindles.estimate(
        swindles.from_numpyro(model),
        statistics=statistics,
        key=0,
        relative=0.01,
        seconds=60,
    )
    seconds = time.perf_counter() - begin
    rows = zip(report.names, report.estimate.mean, report.estimate.mcse, strict=True)
    errors, distances = [], []
    for each, mean, mcse in rows:
        truth = published(reference, each)
        if truth is not None:
            distances.append(abs(mean - truth[0]) / truth[1])
            errors.append(abs(mean - truth[0]) / np.hypot(truth[2], mcse))
    return {
        "seconds": seconds,
        "way": report.job.scheme,
        "compared": len(errors),
        "errors": max(errors),
        "relative": max(distances),
        "right": bool(max(errors) < 5),
        "trusted": bool(report.trusted),
        "reached": bool(report.reached),
        "warnings": list(report.warnings),
        "stages": {k: round(v.seconds, 1) for k, v in report.job.stages.items()},
    }


def run_nuts(name: str) -> dict:
    """NUTS until the least effective sample size is enough."""
    import jax
    import numpyro.infer
    from numpyro.diagnostics import effective_sample_size

    numpyro.enable_x64()
    model, reference = load(name)
    sites = {entry.split("[")[0] for entry in reference}
    begin = time.perf_counter()
    sampler = numpyro.infer.MCMC(
        numpyro.infer.NUTS(model),
        num_warmup=500,
        num_samples=2500,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    sampler.run(jax.random.key(0))
    kept: list[dict] = []
    while True:
        draws = sampler.get_samples(group_by_chain=True)
        kept.append({site: np.asarray(draws[site]) for site in sites})
        joined = {
            site: np.concatenate([part[site] for part in kept], 1) for site in sites
        }
        least = min(np.min(effective_sample_size(each)) for each in joined.values())
        seconds = time.perf_counter() - begin
        if least >= ENOUGH or seconds > LONGEST:
            return {"seconds": seconds, "ess": float(least)}
        sampler.post_warmup_state = sampler.last_state
        sampler.run(sampler.post_warmup_state.rng_key)


RUNS = {"estimate": run_estimate, "nuts": run_nuts}


def spawn(which: str, name: str) -> dict:
    """One run in a process of its own."""
    command = [sys.executable, __file__, name, "--run", which]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run all that is asked for; print a line for each and the mean ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all without")
    parser.add_argument("--ours", action="store_true", help="`estimate` alone")
    parser.add_argument("--run", choices=RUNS, help="one run, in this process")
    arguments = parser.parse_args()
    if arguments.run:
        warnings.simplefilter("ignore")
        print(json.dumps(RUNS[arguments.run](arguments.names[0])))
        return
    wanted = arguments.names or [""]
    ratios = {}
    for name in NAMES:
        if not any(part in name for part in wanted):
            continue
        ours = spawn("estimate", name)
        theirs = {} if arguments.ours else spawn("nuts", name)
        print(json.dumps({"name": name, "estimate": ours, "nuts": theirs}), flush=True)
        if ours.get("trusted") and theirs.get("seconds"):
            ratios[name] = ours["seconds"] / theirs["seconds"]
    if ratios:
        mean = np.exp(np.mean(np.log(list(ratios.values()))))
        print(
            f"geometric mean of the ratios {mean:.2f}, largest {max(ratios.values())}"
        )


if __name__ == "__main__":
    main()
