"""Experiments: the paper's, as jobs.

Mirrored from book/experiments.md: edit there, then run `make mirror`.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swindles import style, targets, transport, tuning
from swindles.antithetic import (
    Result,
    antithetic,
    estimate_pairs,
    fold_pairs,
    pair_values,
    plain,
)
from swindles.control import (
    Expectation,
    control,
    draw_expectation,
    estimate_controls,
    feature_values,
    fold_controls,
)
from swindles.coupling import Sampler, record, run, start
from swindles.cva import cva
from swindles.latent import Problem, known_expectation
from swindles.pipeline import (
    Experiment,
    Row,
    Table,
    as_table,
    fingerprint,
    finish,
    peak_memory,
    read_rows,
    table_path,
)
from swindles.tuning import HMC, MALA, RANDOM_WALK

FAMILIES = {"hmc": HMC, "mala": MALA, "rwm": RANDOM_WALK}


SCHEMES: dict[str, Callable] = {
    "plain": plain,
    "antithetic": antithetic,
    "control": control,
    "cva": cva,
}


class Job(NamedTuple):
    """One run of one sampler."""

    posterior: str
    sampler: str  # of ``FAMILIES``
    scheme: str  # of ``SCHEMES``
    settings: str  # where step size and trajectory length come from
    repeat: int

    @property
    def name(self) -> str:
        """The job in one word, different for different jobs."""
        return "-".join(map(str, self))


class Size(NamedTuple):
    """How large the runs on one posterior are."""

    chains: int
    steps: int  # counted; as many are discarded before
    repeats: int
    pilot_chains: int = 0
    budget: float = 0  # gradients to tune one scheme; 0 for the published settings


SIZES: dict[str, dict[str, Size]] = {
    "laptop": {
        "logistic": Size(256, 500, 10, 64, 1e6),
        "sparse": Size(128, 500, 5, 64, 4.5e5),
        "item": Size(32, 500, 5, 32, 3e5),
    },
    "paper": {
        "logistic": Size(4096, 500, 10, 256, 1e7),
        "sparse": Size(4096, 500, 10, 256, 1e7),
        "item": Size(2048, 500, 10, 256, 1e7),
    },
    "wide": {"item": Size(256, 500, 1)},
    "test": {"logistic": Size(16, 20, 2, 16, 2e5)},
}


# Step sizes for plain, antithetic, control and CVA, from the paper's code; for HMC with
# the number of leapfrog steps.
PUBLISHED: dict[tuple[str, str], list[tuple[float, int]]] = {
    ("logistic", "hmc"): [(0.920, 1), (1.000, 1), (0.577, 3), (0.365, 4)],
    ("logistic", "mala"): [(0.902, 1), (0.945, 1), (0.738, 1), (0.545, 1)],
    ("logistic", "rwm"): [(0.464, 1), (0.432, 1), (0.383, 1), (0.439, 1)],
    ("item", "hmc"): [(0.321, 4), (0.315, 4), (0.269, 5), (0.293, 3)],
    ("item", "mala"): [(0.581, 1), (0.589, 1), (0.378, 1), (0.396, 1)],
    ("item", "rwm"): [(0.0869, 1), (0.0890, 1), (0.0939, 1), (0.0787, 1)],
    ("sparse", "hmc"): [(0.350, 4), (0.462, 3), (0.263, 5), (0.371, 3)],
    ("sparse", "mala"): [(0.646, 1), (0.630, 1), (0.557, 1), (0.505, 1)],
    ("sparse", "rwm"): [(0.205, 1), (0.256, 1), (0.245, 1), (0.267, 1)],
}


FLOW = Path(str(files("swindles"))) / "data" / "sparse_flow.npz"


@lru_cache(maxsize=1)
def prepare(posterior: str) -> tuple[Problem, Expectation]:
    """A posterior with its map and statistics, and what is known under Q."""
    if posterior == "sparse":
        target = targets.sparse_logistic_regression()
        to_x: Any = transport.load(FLOW)
    else:
        target = {
            "logistic": targets.logistic_regression,
            "item": targets.item_response,
        }[posterior]()
        begin = transport.laplace(target.logdensity, jnp.zeros(target.dim))
        plan = transport.Schedule(num_steps=500, batch=32, learning_rate=1e-3)
        key = jax.random.key(1)
        fit = transport.fit_affine(key, target.logdensity, begin, plan)
        to_x = fit.transport
    problem = Problem(target.logdensity, to_x, target.dim)
    center = jnp.asarray(known_expectation(jax.random.key(4), problem).mean, float)
    problem = problem._replace(statistic=partial(mean_and_variance, center))
    return problem, known_expectation(jax.random.key(5), problem, 1_000_000)


def mean_and_variance(center: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
    """The statistics of all experiments."""
    return {"mean": x, "variance": (x - center) ** 2}


Fold = tuple[Any, Callable]


@lru_cache(maxsize=1)
def build(
    posterior: str, sampler: Sampler, scheme: str, chains: int
) -> tuple[Any, Fold]:
    """The coupled algorithm and its running sums, once for all repeats."""
    problem, known = prepare(posterior)
    algorithm = SCHEMES[scheme](sampler, problem.latent())
    states = start(
        algorithm, jax.random.normal(jax.random.key(0), (chains, problem.dim))
    )
    if "control" in states:
        return algorithm, fold_controls(problem.feature(), states, known, full=False)
    return algorithm, fold_pairs(problem.feature(), states)


@lru_cache(maxsize=1)
def make_sampler(family: str, step_size: float, leaps: int) -> Sampler:
    """The same function for the same settings, so that it is compiled once."""
    return FAMILIES[family].make(step_size, leaps)


def sample(job: Job, step_size: float, leaps: int, size: Size) -> tuple[Result, float]:
    """Do the run of a job: the result, and the seconds of its second half."""
    problem, known = prepare(job.posterior)
    sampler = make_sampler(job.sampler, step_size, leaps)
    algorithm, fold = build(job.posterior, sampler, job.scheme, size.chains)
    keys = jax.random.split(jax.random.key(1000 + job.repeat), 3)
    states = start(algorithm, jax.random.normal(keys[0], (size.chains, problem.dim)))
    states, _ = run(keys[1], algorithm, states, size.steps, fold, progress=False)
    begin = time.perf_counter()
    _, sums = run(keys[2], algorithm, states, size.steps, fold, progress=False)
    seconds = time.perf_counter() - begin
    if "control" in states:
        return estimate_controls(sums, known), seconds
    return estimate_pairs(sums), seconds


Settings = dict[str, list[Row]]  # what was tuned, by the name of the job


def settings_of(job: Job, tuned: Settings) -> tuple[float, int]:
    """Step size and leapfrog steps of a job."""
    if job.settings == "published":
        at = list(SCHEMES).index(job.scheme)
        return PUBLISHED[job.posterior, job.sampler][at]
    found = tuned[job._replace(repeat=0).name][0]
    return float(found["step_size"]), int(found["leaps"])


def measure_efficiency(tuned: Settings, size: Size, job: Job) -> list[Row]:
    """Run a job; one row for each statistic and dimension."""
    step_size, leaps = settings_of(job, tuned)
    result, seconds = sample(job, step_size, leaps, size)
    pairs = 1 + ("minus" in result.rates["acceptance"])
    rates = result.rates["decoupling"]
    common = {
        "step_size": step_size,
        "leaps": leaps,
        "chains": size.chains,
        "steps": size.steps,
        "seconds": short(seconds),
        "gradients": pairs * size.chains * size.steps * leaps,
        "acceptance": result.rates["acceptance"]["plus"],
        "decoupling_control": rates.get("control", np.nan),
        "decoupling_antithetic": rates.get("minus", np.nan),
        "peak_mb": peak_memory(),
    }
    return [common | row for row in by_dimension(result)]


def short(number: float) -> str:
    """Four digits are enough."""
    return f"{number:.4g}"


def by_dimension(result: Result) -> Iterator[Row]:
    """The rows of a result whose statistics are ``mean_and_variance``."""
    estimate = result.estimate
    dim = estimate.mean.size // 2
    missing = np.full(2 * dim, np.nan)
    columns = {
        "mcse": estimate.mcse,
        "ess": estimate.ess,
        "rhat": estimate.rhat,
        "rho_control": result.rho.get("control", missing),
        "rho_antithetic": result.rho.get("minus", missing),
    }
    for i in range(2 * dim):
        which = {"statistic": ("mean", "variance")[i // dim], "dimension": i % dim}
        which["estimate"] = f"{estimate.mean[i]:.9g}"
        yield which | {name: short(values[i]) for name, values in columns.items()}


def measure_settings(size: Size, job: Job) -> list[Row]:
    """Tune a scheme; one row."""
    problem, family = prepare(job.posterior)[0], FAMILIES[job.sampler]
    found = tuning.tune(
        jax.random.key(0),
        SCHEMES[job.scheme],
        problem,
        family,
        size.pilot_chains,
        size.budget / (1 if family.has_length else 2),
        quantile=0.25,
        progress=False,
    )
    row = {
        "step_size": found.step_size,
        "leaps": found.num_integration_steps,
        "lowest": found.interval[0],
        "highest": found.interval[1],
        "acceptance": found.acceptance,
        "gradients": found.gradients,
        "doubts": "; ".join(found.warnings()),
    }
    return [row]


MODELS = {"plain": 1, "antithetic": 2, "control": 2, "cva": 4}


@lru_cache(maxsize=1)
def prepare_prediction() -> tuple[Problem, Any, Expectation]:
    """The posterior of nine tenths of the data, its mode, and what Q predicts."""
    target = targets.logistic_regression(held_out=0.1)
    assert target.held_out is not None
    score = target.held_out
    to_x = transport.laplace(target.logdensity, jnp.zeros(target.dim))
    problem = Problem(target.logdensity, to_x, target.dim, lambda x: jnp.exp(score(x)))
    origin = jnp.zeros(target.dim)
    known = draw_expectation(jax.random.key(6), problem.feature(), origin, 1_000_000)
    return problem, problem.feature()(origin), known


def swindled(f: Any, g: Any | None, known: np.ndarray) -> np.ndarray:
    """f, less what g predicts with coefficients from the other half of the chains.

    Both have shape (steps, chains, points).
    """
    if g is None:
        return np.asarray(f, np.float64)
    f, g = np.asarray(f, np.float64), np.asarray(g, np.float64) - known
    half = f.shape[1] // 2
    parts = [(slice(half), slice(half, None)), (slice(half, None), slice(half))]
    rest = np.empty_like(f)
    for here, other in parts:
        x = g[:, other] - g[:, other].mean((0, 1))
        beta = (x * f[:, other]).sum((0, 1)) / (x**2).sum((0, 1))
        rest[:, here] = f[:, here] - beta * g[:, here]
    return rest


def held_out_loss(prediction: np.ndarray) -> np.ndarray:
    """Mean negative log likelihood of predictions, cut off at one in a million."""
    return -np.log(np.clip(prediction, 1e-6, 1)).mean(-1)


def measure_prediction(tuned: Settings, size: Size, job: Job) -> list[Row]:
    """Held-out losses of averages over 1, 2, 4, ... steps; one row for each."""
    problem, mode, known = prepare_prediction()
    alike = job._replace(posterior="logistic")
    sampler = make_sampler(job.sampler, *settings_of(alike, tuned))
    algorithm, observe = predictor(sampler, job.scheme)
    keys = jax.random.split(jax.random.key(2000 + job.repeat), 3)
    states = start(algorithm, jax.random.normal(keys[0], (size.chains, problem.dim)))
    states, _ = run(keys[1], algorithm, states, size.steps, progress=False)
    _, (f, g) = record(keys[2], algorithm, states, 256, observe, progress=False)
    rest = swindled(f, g, known.mean)
    rows = []
    for steps in 2 ** np.arange(9):
        loss = held_out_loss(rest[:steps].mean(0))
        low, middle, high = np.quantile(loss, [0.25, 0.5, 0.75])
        models = steps * MODELS[job.scheme] + (g is not None)
        rows.append({"models": models, "loss": middle, "low": low, "high": high})
    best, everything = held_out_loss(np.asarray(mode)), held_out_loss(rest.mean((0, 1)))
    return [row | {"map": best, "everything": everything} for row in rows]


def predictions(feature: Callable, states: dict, infos: dict) -> tuple[Any, Any]:
    """Averages over X+ and X-, and over Y and -Y; None without a control chain."""
    f = pair_values(feature, states).mean(0)
    if "control" not in states:
        return f, None
    return f, feature_values(feature, states).mean(0)


@lru_cache(maxsize=1)
def predictor(sampler: Sampler, scheme: str) -> tuple[Any, Callable]:
    """The algorithm and what to observe, once for all repeats."""
    problem = prepare_prediction()[0]
    observe = partial(predictions, problem.feature())
    return SCHEMES[scheme](sampler, problem.latent()), observe


def four_ends(feature: Callable, place: int, states: dict, infos: dict) -> Row:
    """One statistic at X+, X-, Y and -Y, and which proposals were accepted."""
    x, y = pair_values(feature, states), feature_values(feature, states)
    ends = {"plus": x[0], "minus": x[1], "control": y[0], "mirrored": y[1]}
    moves = {f"accepted_{name}": info.is_accepted for name, info in infos.items()}
    return {name: values[:, place] for name, values in ends.items()} | moves


def measure_traces(tuned: Settings, size: Size, job: Job) -> list[Row]:
    """Thirty steps of sixteen sets of coupled chains; one row for each step and set."""
    problem, known = prepare(job.posterior)
    sampler = make_sampler(job.sampler, *settings_of(job, tuned))
    algorithm = SCHEMES[job.scheme](sampler, problem.latent())
    keys = jax.random.split(jax.random.key(3000 + job.repeat), 3)
    states = start(algorithm, jax.random.normal(keys[0], (16, problem.dim)))
    states, _ = run(keys[1], algorithm, states, size.steps, progress=False)
    observe = partial(four_ends, problem.feature(), problem.dim)  # a variance
    _, trace = record(keys[2], algorithm, states, 30, observe, progress=False)
    expected = {"expected": float(known.mean[problem.dim])}
    return [
        {"step": step, "chain": chain}
        | {name: short(values[step, chain]) for name, values in trace.items()}
        | expected
        for step in range(30)
        for chain in range(16)
    ]


def all_pairs(sizes: dict[str, Size]) -> list[Job]:
    """Every sampler with every scheme, where there is a budget to tune it."""
    return [
        Job(posterior, sampler, scheme, "tuned", 0)
        for posterior, size in sizes.items()
        for sampler in FAMILIES
        for scheme in SCHEMES
        if size.budget
    ]


def efficiency_jobs(sizes: dict[str, Size]) -> list[Job]:
    """All pairs, repeated; and with published settings HMC, or all if none is tuned."""
    pairs = all_pairs(sizes) + [
        Job(posterior, sampler, scheme, "published", 0)
        for posterior, size in sizes.items()
        for sampler in FAMILIES
        for scheme in SCHEMES
        if sampler == "hmc" or not size.budget
    ]
    pairs.sort(key=lambda job: list(sizes).index(job.posterior))
    return [
        job._replace(repeat=repeat)
        for job in pairs
        for repeat in range(sizes[job.posterior].repeats)
    ]


# The code whose change makes old results worthless.
MODULES = (
    *("targets", "accuracy", "transport", "coupling", "antithetic", "control"),
    *("cva", "latent", "tuning", "experiments"),
)


def place(folder: Path, scale: str) -> Path:
    """Where the tables of a scale are."""
    return folder / scale


def perform(scale: str, folder: Path) -> None:
    """Do all experiments that are not done yet, and write their tables."""
    sizes, where = SIZES[scale], place(folder, scale)

    def done(name: str, jobs: list[Job], measure: Callable) -> Settings:
        def one(job: Job) -> list[Row]:
            return measure(sizes.get(job.posterior, logistic), job)

        return finish(Experiment(name, jobs, one), where, MODULES)

    logistic = sizes.get("logistic")
    tuned = done("settings", all_pairs(sizes), measure_settings)
    done("efficiency", efficiency_jobs(sizes), partial(measure_efficiency, tuned))
    if logistic is not None:
        held_out = [
            Job("held-out", "hmc", scheme, "tuned", repeat)
            for scheme in SCHEMES
            for repeat in range(logistic.repeats)
        ]
        done("prediction", held_out, partial(measure_prediction, tuned))
        one = [Job("logistic", "hmc", "cva", "published", 0)]
        done("traces", one, partial(measure_traces, tuned))


def results(name: str, scale: str | None = None, folder: Path | None = None) -> Table:
    """A table of results, by columns.

    ``name`` is "settings", "efficiency", "prediction" or "traces"; the default scale is
    the book's, the default folder that of the book seen from a chapter.
    """
    scale, folder = scale or style.scale(), folder or Path("results")
    if os.environ.get("SWINDLES_RECOMPUTE", "0") not in ("", "0"):
        perform(scale, folder)
    path = table_path(place(folder, scale), name)
    rows = read_rows(path)
    if not rows:
        raise ValueError(
            f"{path} does not exist: make experiments makes it, or set "
            "SWINDLES_RECOMPUTE=1"
        )
    if rows[0]["code"] != fingerprint(MODULES):
        print(f"These results are of revision {rows[0]['revision']}, not of this code.")
    return as_table(rows)


def main(arguments: list[str] | None = None) -> None:
    """The command ``make experiments``."""
    parser = argparse.ArgumentParser("make experiments")
    parser.add_argument(
        "--scale", choices=list(SIZES), default=style.scale(), help="how large"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("book", "results"), help="for the tables"
    )
    given = parser.parse_args(arguments)
    perform(given.scale, given.folder)
