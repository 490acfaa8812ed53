"""Experiments: the paper's, as jobs.

Mirrored from book/experiments.md: edit there, then run `make mirror`.
"""

import argparse
import math
import shutil
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pipeline import (
    Experiment,
    Row,
    Table,
    as_table,
    find_done,
    finish,
    peak_memory,
    read_rows,
    table_path,
)

from swindles import style, targets
from swindles.antithetic import Result, fold_series, pair_series, pair_values
from swindles.control import Expectation, control_values, reference_mean
from swindles.coupling import block_program, record, run
from swindles.models import Model, Problem, make_problem
from swindles.neutra import load_map
from swindles.scale import chain_mesh, is_first, put_chains, shared_time, sum_rules
from swindles.schemes import (
    SCHEMES,
    Plan,
    finish_run,
    learn,
    plan_series,
    start_mirrored,
)
from swindles.transport import Transport, best_gaussian, laplace
from swindles.tuning import HMC, MALA, RANDOM_WALK, tune

FAMILIES = {"hmc": HMC, "mala": MALA, "rwm": RANDOM_WALK}
PAPER_SCHEMES = ("plain", "antithetic", "control", "cva")


class SamplerJob(NamedTuple):
    """One run of one sampler."""

    posterior: str
    sampler: str  # of ``FAMILIES``
    scheme: str  # of ``PAPER_SCHEMES``
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
    "smoke": {"logistic": Size(32, 50, 3, 16, 1e5)},
    "wide": {"item": Size(256, 500, 1)},
}


def is_conclusive() -> bool:
    """Whether the book's runs are large enough to find anything out."""
    return style.scale() != "smoke"


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


def load_model(posterior: str) -> Model:
    """A posterior whose statistics see the position as it is."""
    make: dict[str, Callable[[], Model]] = {
        "logistic": targets.logistic_regression,
        "item": targets.item_response,
        "sparse": targets.sparse_logistic_regression,
        "held-out": partial(targets.logistic_regression, held_out=0.1),
    }
    return make[posterior]()._replace(constrain=lambda x: x)


def fit_transport(posterior: str, model: Model) -> Transport:
    """The map of a posterior: a flow, or an affine map that is fitted here."""
    if posterior == "sparse":
        return load_map(FLOW)
    if posterior == "held-out":  # centered at the mode, whose predictions we compare
        return laplace(model.logdensity, jnp.zeros(model.dim))
    return best_gaussian(model.logdensity, jnp.zeros(model.dim))


def mean_and_variance(center: Any, x: Any) -> dict[str, Any]:
    """The statistics of all experiments."""
    return {"mean": x, "variance": (x - center) ** 2}


@lru_cache(maxsize=1)
def prepare(posterior: str) -> tuple[Problem, Expectation]:
    """A posterior with its statistics in latent space, and what is known under Q."""
    model = load_model(posterior)
    to_x, held_out = fit_transport(posterior, model), model.held_out
    means = make_problem(model).through(to_x)
    center = jnp.asarray(reference_mean(jax.random.key(4), means).mean, float)

    def statistics(x: Any) -> Any:
        return jnp.exp(held_out(x)) if held_out else mean_and_variance(center, x)

    problem = make_problem(model, statistics).through(to_x)
    return problem, reference_mean(jax.random.key(5), problem, 1_000_000)


class Prepared(NamedTuple):
    """What the repeats of a pair have in common."""

    algorithm: Any
    plan: Plan
    learned: Any  # the sums that the coefficients come from
    fold: tuple[Any, Callable]
    observe: Callable[[Any, Any], Any]  # from states and infos to Z: (chains, dim)


@lru_cache(maxsize=1)
def prepare_scheme(
    job: SamplerJob, step_size: float, leaps: int, size: Size
) -> Prepared:
    """Build the algorithm of a job and learn its coefficients; repeats share them."""
    problem, expectation = prepare(job.posterior)
    sampler = FAMILIES[job.sampler].make(step_size, leaps)
    algorithm = SCHEMES[job.scheme].build(sampler, problem.logdensity)
    states, draws = start_chains(7, algorithm, problem, size), size.chains * size.steps
    key, warmup = jax.random.key(8), size.steps
    states, plan, learned = learn(
        key, algorithm, states, problem, job.scheme, warmup, draws, expectation, "none"
    )
    series = plan_series(plan, problem.statistic)

    def observe(states: Any, infos: Any) -> Any:
        plain, swindled = series(states)
        return plain if swindled is None else swindled

    return Prepared(algorithm, plan, learned, fold_series(series, states), observe)


def start_chains(seed: int, algorithm: Any, problem: Problem, size: Size) -> Any:
    """States of all chains at draws of Q, "minus" at their mirror images."""
    z = jax.random.normal(jax.random.key(seed), (size.chains, problem.dim))
    return start_mirrored(algorithm, z)


def sample(
    job: SamplerJob, step_size: float, leaps: int, size: Size
) -> tuple[Result, float]:
    """Do the run of a job: the result, and the seconds of its second half."""
    prepared = prepare_scheme(job._replace(repeat=0), step_size, leaps, size)
    algorithm, fold = prepared.algorithm, prepared.fold
    states = start_chains(1000 + job.repeat, algorithm, prepare(job.posterior)[0], size)
    keys = jax.random.split(jax.random.key(5000 + job.repeat))
    states, _ = run(keys[0], algorithm, states, size.steps, fold, progress=False)
    clock = time.perf_counter()
    _, sums = run(keys[1], algorithm, states, size.steps, fold, progress=False)
    seconds = time.perf_counter() - clock
    return finish_run(sums, prepared.plan, prepared.learned), seconds


Settings = dict[str, list[Row]]  # what was tuned, by the name of the job


def settings_of(job: SamplerJob, tuned: Settings) -> tuple[float, int]:
    """Step size and leapfrog steps of a job."""
    if job.settings == "published":
        at = PAPER_SCHEMES.index(job.scheme)
        return PUBLISHED[job.posterior, job.sampler][at]
    found = tuned[job._replace(repeat=0).name][0]
    return float(found["step_size"]), int(found["leaps"])


def measure_efficiency(tuned: Settings, size: Size, job: SamplerJob) -> list[Row]:
    """Run a job; one row for each statistic and dimension."""
    step_size, leaps = settings_of(job, tuned)
    result, seconds = sample(job, step_size, leaps, size)
    pairs = SCHEMES[job.scheme].num_targets
    rates = result.rates["decoupling"]
    common = {
        "step_size": step_size,
        "leaps": leaps,
        "chains": size.chains,
        "steps": size.steps,
        "seconds": seconds,
        "gradients": pairs * size.chains * size.steps * leaps,
        "acceptance": result.rates["acceptance"]["plus"],
        "decoupling_control": rates.get("control", np.nan),
        "decoupling_antithetic": rates.get("minus", np.nan),
        "peak_mb": peak_memory(),
    }
    return [common | row for row in by_dimension(result)]


def to_error(number: float, error: float) -> str:
    """A number with as many decimals as two digits of its error have.

    Examples
    --------
    >>> to_error(-0.7351626, 0.00034), to_error(12.3456, 25.0)
    ('-0.73516', '12')
    """
    if not 0 < error < math.inf:
        return f"{number:.9g}"
    return f"{number:.{max(1 - math.floor(math.log10(error)), 0)}f}"


def by_dimension(result: Result) -> Iterator[Row]:
    """The rows of a result whose statistics are ``mean_and_variance``."""
    estimate = result.estimate
    dim = estimate.mean.size // 2
    missing = np.full(2 * dim, np.nan)
    rho = [result.rho.get(name, missing) for name in ("control", "minus")]
    for i in range(2 * dim):
        yield {
            "statistic": ("mean", "variance")[i // dim],
            "dimension": i % dim,
            "estimate": to_error(estimate.mean[i], estimate.mcse[i]),
            "mcse": f"{estimate.mcse[i]:.3g}",
            "ess": f"{estimate.ess[i]:.3g}",
            "rhat": estimate.rhat[i],
            "rho_control": rho[0][i],
            "rho_antithetic": rho[1][i],
        }


def measure_settings(size: Size, job: SamplerJob) -> list[Row]:
    """Tune a scheme; one row."""
    problem, family = prepare(job.posterior)[0], FAMILIES[job.sampler]
    found = tune(
        jax.random.key(0),
        job.scheme,
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


def held_out_loss(prediction: np.ndarray) -> np.ndarray:
    """Mean negative log likelihood of predictions, cut off at one in a million."""
    return -np.log(np.clip(prediction, 1e-6, 1)).mean(-1)


def measure_prediction(tuned: Settings, size: Size, job: SamplerJob) -> list[Row]:
    """Held-out losses of averages over 1, 2, 4, ... steps; one row for each."""
    settings = settings_of(job._replace(posterior="logistic"), tuned)
    prepared = prepare_scheme(job._replace(repeat=0), *settings, size)
    problem = prepare(job.posterior)[0]
    states = start_chains(2000 + job.repeat, prepared.algorithm, problem, size)
    keys = jax.random.split(jax.random.key(6000 + job.repeat))
    states, _ = run(keys[0], prepared.algorithm, states, size.steps, progress=False)
    _, found = record(keys[1], prepared.algorithm, states, 256, prepared.observe, False)
    rest, rows = found.astype(np.float64), []
    for steps in 2 ** np.arange(9):
        loss = held_out_loss(rest[:steps].mean(0))
        low, middle, high = np.quantile(loss, [0.25, 0.5, 0.75])
        models = steps * MODELS[job.scheme] + SCHEMES[job.scheme].has_control
        rows.append({"models": models, "loss": middle, "low": low, "high": high})
    mode = held_out_loss(np.asarray(problem.statistic(problem.position)))
    everything = held_out_loss(rest.mean((0, 1)))
    rows = [row | {"map": mode, "everything": everything} for row in rows]
    return [{name: f"{x:.7g}" for name, x in row.items()} for row in rows]


def four_ends(statistic: Callable, place: int, states: Any, infos: Any) -> Row:
    """One statistic at X+, X-, Y and -Y, and which proposals were accepted."""
    x, y = pair_values(statistic, states), control_values(statistic, states)
    ends = {"plus": x[0], "minus": x[1], "control": y[0], "mirrored": y[1]}
    by_chain = infos._asdict().items()
    moves = {f"accepted_{name}": info.is_accepted for name, info in by_chain}
    return {name: values[:, place] for name, values in ends.items()} | moves


def measure_traces(tuned: Settings, size: Size, job: SamplerJob) -> list[Row]:
    """Thirty steps of sixteen sets of coupled chains; one row for each step and set."""
    problem, expectation = prepare(job.posterior)
    sampler = FAMILIES[job.sampler].make(*settings_of(job, tuned))
    algorithm = SCHEMES[job.scheme].build(sampler, problem.logdensity)
    states = start_chains(
        3000 + job.repeat, algorithm, problem, size._replace(chains=16)
    )
    keys = jax.random.split(jax.random.key(7000 + job.repeat))
    states, _ = run(keys[0], algorithm, states, size.steps, progress=False)
    observe = partial(four_ends, problem.statistic, problem.dim)  # a variance
    _, trace = record(keys[1], algorithm, states, 30, observe, progress=False)
    expected = {"expected": float(expectation.mean[problem.dim])}
    return [
        {"step": step, "chain": chain}
        | {name: float(values[step, chain]) for name, values in trace.items()}
        | expected
        for step in range(30)
        for chain in range(16)
    ]


def all_pairs(sizes: dict[str, Size]) -> list[SamplerJob]:
    """Every sampler with every scheme, where there is a budget to tune it."""
    return [
        SamplerJob(posterior, sampler, scheme, "tuned", 0)
        for posterior, size in sizes.items()
        for sampler in FAMILIES
        for scheme in PAPER_SCHEMES
        if size.budget
    ]


def efficiency_jobs(sizes: dict[str, Size]) -> list[SamplerJob]:
    """All pairs, repeated; and with published settings HMC, or all if none is tuned."""
    pairs = all_pairs(sizes) + [
        SamplerJob(posterior, sampler, scheme, "published", 0)
        for posterior, size in sizes.items()
        for sampler in FAMILIES
        for scheme in PAPER_SCHEMES
        if sampler == "hmc" or not size.budget
    ]
    pairs.sort(key=lambda job: list(sizes).index(job.posterior))
    return [
        job._replace(repeat=repeat)
        for job in pairs
        for repeat in range(sizes[job.posterior].repeats)
    ]


def held_out_jobs(repeats: int) -> list[SamplerJob]:
    """Every scheme on the regression with a part of the data left out, repeated."""
    return [
        SamplerJob("held-out", "hmc", scheme, "tuned", repeat)
        for scheme in PAPER_SCHEMES
        for repeat in range(repeats)
    ]


def perform(scale: str, folder: Path) -> None:
    """Do all experiments that are not done yet, and write their tables."""
    sizes = SIZES[scale]
    logistic = sizes.get("logistic")

    def done(name: str, jobs: list[SamplerJob], measure: Callable) -> Settings:
        def one(job: SamplerJob) -> list[Row]:
            return measure(sizes.get(job.posterior, logistic), job)

        return finish(Experiment(name, jobs, one), folder / scale)

    tuned = done("settings", all_pairs(sizes), measure_settings)
    done("efficiency", efficiency_jobs(sizes), partial(measure_efficiency, tuned))
    if logistic is not None:
        one = [SamplerJob("logistic", "hmc", "cva", "published", 0)]
        done("traces", one, partial(measure_traces, tuned))
        held_out = held_out_jobs(logistic.repeats)
        done("prediction", held_out, partial(measure_prediction, tuned))


def results(name: str, scale: str | None = None, folder: Path | None = None) -> Table:
    """A table of results, by columns.

    ``name`` is "settings", "efficiency", "prediction" or "traces"; the default scale is
    the book's, the default folder that of the book seen from a chapter.
    """
    scale, folder = scale or style.scale(), folder or Path("results")
    path = table_path(folder / scale, name)
    rows = read_rows(path)
    if not rows:
        raise ValueError(
            f"{path} does not exist: `SWINDLES_SCALE={scale} make experiments` makes it"
        )
    return as_table(rows)


def count_gradients(job: SamplerJob, size: Size) -> float:
    """How many gradients a run takes: warm-up, run, and coefficients once for all."""
    posterior = "logistic" if job.posterior == "held-out" else job.posterior
    at = PAPER_SCHEMES.index(job.scheme)
    leaps = PUBLISHED[posterior, job.sampler][at][1]
    steps = 2 * size.steps + (size.steps if job.repeat == 0 else 0)
    return float(SCHEMES[job.scheme].num_targets * size.chains * steps * leaps)


def gradients_left(scale: str, folder: Path) -> dict[str, float]:
    """Gradients of what is not done yet, by posterior."""
    sizes, left = SIZES[scale], dict.fromkeys(SIZES[scale], 0.0)
    tuned = find_done("settings", folder / scale)
    for job in all_pairs(sizes):
        if job.name not in tuned:
            left[job.posterior] += sizes[job.posterior].budget
    jobs = efficiency_jobs(sizes)
    done = find_done("efficiency", folder / scale)
    if "logistic" in sizes:
        jobs += held_out_jobs(sizes["logistic"].repeats)
        done |= find_done("prediction", folder / scale)
    for job in jobs:
        if job.name not in done:
            posterior = "logistic" if job.posterior == "held-out" else job.posterior
            left[posterior] += count_gradients(job, sizes[posterior])
    return left


class Speed(NamedTuple):
    """How fast the chains of a posterior are, all together, and how large."""

    gradients: float  # in a second
    gigabytes: float  # on each device


def measure_speed(posterior: str, size: Size, seconds: float = 20.0) -> Speed:
    """Take steps of CVA with all chains, for about so many seconds."""
    problem, leaps = prepare(posterior)[0], 4
    algorithm = SCHEMES["cva"].build(HMC.make(1e-3, leaps), problem.logdensity)
    states = start_chains(0, algorithm, problem, size)
    zero, update = fold_series(pair_series(problem.statistic), states)
    mesh, key = chain_mesh(size.chains), jax.random.key(0)
    program: Any = block_program(algorithm, update, mesh=mesh)
    states = put_chains(mesh, states)

    def sums() -> Any:
        return put_chains(mesh, jax.tree.map(jnp.array, zero), sum_rules(zero))

    steps, spent = 1, 0.0
    compiled = program.lower(key, states, sums(), 0, steps).compile()
    while spent < seconds / 3:
        steps, begin = 2 * steps, shared_time()
        jax.block_until_ready(compiled(key, states, sums(), 0, steps))
        spent = shared_time() - begin
    memory = compiled.memory_analysis()
    parts = "argument_size", "output_size", "temp_size"
    size_in_bytes = sum(getattr(memory, f"{part}_in_bytes") for part in parts)
    targets = SCHEMES["cva"].num_targets
    return Speed(targets * leaps * size.chains * steps / spent, size_in_bytes / 1e9)


def tell_cost(scale: str, folder: Path, seconds: float = 20.0) -> list[str]:
    """What the jobs that are not done yet will take, in lines of words."""
    devices, kind = jax.device_count(), jax.devices()[0].device_kind
    lines = [f"{scale}, on {devices} x {kind}:"]
    total = 0.0
    for posterior, gradients in gradients_left(scale, folder).items():
        if not gradients:
            lines.append(f"{posterior:10} done")
            continue
        speed = measure_speed(posterior, SIZES[scale][posterior], seconds)
        hours = gradients / speed.gradients / 3600
        total += hours
        lines.append(
            f"{posterior:10} {gradients:8.2g} gradients, {speed.gradients:8.2g} in a "
            f"second, {speed.gigabytes:6.2f} GB on each device, {hours:8.2f} hours"
        )
    return [*lines, f"altogether {total:.1f} hours"]


def main(arguments: list[str] | None = None) -> None:
    """The command ``make experiments``."""
    parser = argparse.ArgumentParser("make experiments")
    parser.add_argument(
        "--scale", choices=list(SIZES), default=style.scale(), help="how large"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("book", "results"), help="for the tables"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="delete the tables of that scale first"
    )
    parser.add_argument(
        "--cost", action="store_true", help="only say what it will cost"
    )
    given = parser.parse_args(arguments)
    if given.fresh and is_first():
        shutil.rmtree(given.folder / given.scale, ignore_errors=True)
    if given.cost or given.scale == "paper":
        lines = tell_cost(given.scale, given.folder)
        if is_first():
            print(*lines, sep="\n", flush=True)
    if not given.cost:
        perform(given.scale, given.folder)


if __name__ == "__main__" and "__file__" in globals():
    main()
