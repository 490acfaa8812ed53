"""Replays: the code of today against the results that the book shows.

Each test does a small part of what a file of results was made by, with other random
numbers, and compares within the errors of both. A failure says that the file is not
what the code does any more: make it anew, or mend the code.
"""

import importlib.util
import time
from pathlib import Path

import experiments
import jax
import numpy as np
import pytest
from experiments import SamplerJob, Size
from pipeline import ORIGIN, as_table, by_repeat, read_rows, where

from swindles.transport import identity, log_weights
from swindles.unbiased import Moves, PairPlan

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "book" / "results"
OTHER = 100  # a repeat that no table has


def read(name):
    return as_table(read_rows(RESULTS / name))


def load_benchmark(name):
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same_means(new, new_error, old, old_error):
    """Differences of means in units of their error: as large as chance makes them."""
    score = (new - old) / np.hypot(new_error, old_error)
    assert np.abs(score).max() < 6
    assert np.sqrt(np.mean(score**2)) < 1.5


def assert_ratio(new, old, factor):
    assert 1 / factor < new / old < factor, (new, old)


def test_every_file_is_replayed_and_says_where_it_comes_from():
    text = Path(__file__).read_text()
    found = [path for path in RESULTS.rglob("*.csv*") if "smoke" not in path.parts]
    assert len(found) >= 9
    for path in found:
        assert f'"{path.relative_to(RESULTS).as_posix()}"' in text, "no replay"
        rows = read_rows(path)
        for name in ORIGIN:
            assert all({row[name] for row in rows}), (path, name)


def replay_efficiency(name, job, size):
    """Run a job; compare means, effective draws, acceptance and correlation."""
    names = ("posterior", "sampler", "scheme", "settings")
    which = dict(zip(names, job, strict=False))
    old = where(read(name), **which)
    settings = {"step_size": old["step_size"][0], "leaps": int(old["leaps"][0])}
    tuned = {job._replace(repeat=0).name: [settings]}
    new = as_table(experiments.measure_efficiency(tuned, size, job))
    for statistic in ("mean", "variance"):
        mine = where(new, statistic=statistic)
        ess, mean, mcse = (
            by_repeat(old, n, statistic=statistic) for n in ("ess", "estimate", "mcse")
        )
        error = np.sqrt((mcse**2).mean(0) / len(mcse))
        assert_same_means(mine["estimate"], mine["mcse"], mean.mean(0), error)
        draws = old["chains"][0] * old["steps"][0]
        per_draw = np.median(mine["ess"]) / size.chains / size.steps
        assert_ratio(per_draw, np.median(ess.mean(0)) / draws, 1.4)
        if "control" in job.scheme or job.scheme == "cva":
            left = [
                np.median(1 - where(t, statistic=statistic)["rho_control"] ** 2)
                for t in (new, old)
            ]
            assert_ratio(*left, 1.4)
    for name in ("acceptance", "decoupling_control", "decoupling_antithetic"):
        here, there = new[name][0], np.mean(old[name])
        assert np.isnan(here) == np.isnan(there)
        assert np.isnan(here) or abs(here - there) < 0.015
    ratio = [np.mean(t["gradients"] / t["chains"] / t["steps"]) for t in (new, old)]
    assert ratio[0] == ratio[1]
    return new


@pytest.mark.optimised
@pytest.mark.slow
def test_efficiency_of_hmc():
    job = SamplerJob("logistic", "hmc", "cva", "tuned", OTHER)
    new = replay_efficiency("laptop/efficiency.csv.bz2", job, Size(64, 200, 1))
    tuned = where(
        read("laptop/settings.csv.bz2"),
        posterior="logistic",
        sampler="hmc",
        scheme="cva",
    )
    assert abs(new["acceptance"][0] - tuned["acceptance"][0]) < 0.01
    assert_ratio(new["step_size"][0], tuned["step_size"][0], 1.001)


@pytest.mark.slow
def test_efficiency_of_mala():
    job = SamplerJob("logistic", "mala", "antithetic", "tuned", OTHER)
    replay_efficiency("laptop/efficiency.csv.bz2", job, Size(64, 400, 1))


@pytest.mark.optimised
@pytest.mark.slow
def test_efficiency_of_many_chains():
    job = SamplerJob("item", "hmc", "control", "published", OTHER)
    replay_efficiency("wide/efficiency.csv.bz2", job, Size(32, 80, 1))
    # Its map is as good as any known full-rank one, which are from long fits by Adam.
    problem, _ = experiments.prepare(job.posterior)
    unit = identity(problem.dim)
    weights = log_weights(jax.random.key(0), problem.logdensity, unit, 501, 4096)
    assert -0.05 < -weights.mean() - 15424.03 < 0.1


@pytest.mark.slow
def test_settings():
    """A tenth of the budget finds about the same step size."""
    job = SamplerJob("logistic", "mala", "plain", "tuned", 0)
    (new,) = experiments.measure_settings(Size(0, 0, 1, 32, 1e5), job)
    (old,) = [
        row
        for row in read_rows(RESULTS / "laptop/settings.csv.bz2")
        if row["job"] == job.name
    ]
    assert_ratio(new["step_size"], float(old["step_size"]), 1.15)
    assert abs(new["acceptance"] - float(old["acceptance"])) < 0.08
    assert new["leaps"] == int(old["leaps"]) == 1


@pytest.mark.slow
def test_prediction():
    job = SamplerJob("held-out", "hmc", "control", "tuned", OTHER)
    tuned = read_rows(RESULTS / "laptop/settings.csv.bz2")
    tuned = {row["job"]: [row] for row in tuned}
    new = as_table(experiments.measure_prediction(tuned, Size(64, 60, 1), job))
    old = where(read("laptop/prediction.csv.bz2"), scheme="control")
    assert abs(new["map"][0] - old["map"][0]) < 1e-5
    assert abs(new["everything"][0] - old["everything"].mean()) < 2e-5
    assert new["models"].tolist() == np.unique(old["models"]).tolist()
    low, middle, high = (by_repeat(old, n).mean(0) for n in ("low", "loss", "high"))
    # The median of 64 chains, in units of the spread of one.
    assert (np.abs(new["loss"] - middle) < 0.6 * (high - low)).all()
    assert np.exp(np.abs(np.log((new["high"] - new["low"]) / (high - low)))).max() < 2


@pytest.mark.slow
def test_traces():
    job = SamplerJob("logistic", "hmc", "cva", "published", OTHER)
    new = as_table(experiments.measure_traces({}, Size(0, 100, 1), job))
    old = read("laptop/traces.csv.bz2")
    # A variance of the map itself, and the map was fitted with noise.
    assert_ratio(new["expected"][0], old["expected"][0], 1.02)
    for name in ("plus", "minus", "control", "mirrored"):
        by_chain = [t[name].reshape(30, 16).mean(0) for t in (new, old)]
        error = [x.std(ddof=1) / 4 for x in by_chain]
        assert abs(np.diff([x.mean() for x in by_chain])[0]) < 5 * np.hypot(*error)
    for name in ("accepted_plus", "accepted_minus", "accepted_control"):
        assert abs(new[name].mean() - old[name].mean()) < 0.04
    for one, other in (("plus", "control"), ("minus", "mirrored")):
        rho = [np.corrcoef(t[one], t[other])[0, 1] for t in (new, old)]
        assert min(rho) > 0.9 and abs(rho[0] - rho[1]) < 0.05


@pytest.mark.optimised
@pytest.mark.slow
def test_tuning():
    """Two settings of the grid, one of them what `tune` recommends."""
    tuning = load_benchmark("tuning")
    rows = [
        next(
            row
            for row in read_rows(RESULTS / "tuning.csv")
            if (row["posterior"], row["scheme"], row["kind"]) == which
        )
        for which in [("logistic", "control", "tuned"), ("logistic", "control", "grid")]
    ]
    problem = tuning.load_problem("logistic")
    expectation = tuning.reference_mean(tuning.jax.random.key(5), problem)
    grid = tuning.Grid(*np.transpose([tuning.settings(row) for row in rows]))
    found = tuning.measure(OTHER, "control", problem, expectation, grid, (64, 100, 300))
    for new, old in zip(found, rows, strict=True):
        assert tuning.settings(new) == pytest.approx(tuning.settings(old))
        for name in ("acceptance", "decoupling"):
            assert abs(new[name] - float(old[name])) < 0.02
        for part in ("mean", "variance", "all"):
            assert_ratio(new[f"left_{part}"], float(old[f"left_{part}"]), 1.3)
            for kind in ("hmc", "ess"):
                name = f"{kind}_{part}"
                assert_ratio(new[name], float(old[name]), 1.5)


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.parametrize("method", ["zv-first", "antithetic-stein"])
def test_rivals(method):
    rivals = load_benchmark("rivals")
    posterior = rivals.POSTERIORS["logistic"]
    center = rivals.find_center(posterior)
    found, *parts = rivals.measure(posterior, method, 0.5, center, seed=OTHER)
    new = rivals.make_rows("logistic", method, 0.5, found, *parts)
    rows = read_rows(RESULTS / "rivals.csv")
    old = [r for r in rows if (r["posterior"], r["method"]) == ("logistic", method)]
    for mine, row in zip(new, old, strict=True):
        assert list(mine) == list(row)
        assert mine["statistic"] == row["statistic"]
        for name in ("ess_median", "gradients"):
            theirs = float(row[name]) / float(row["draws"])
            assert_ratio(mine[name] / mine["draws"], theirs, 1.6)
        assert abs(mine["acceptance"] - float(row["acceptance"])) < 0.03
        step, there = (
            float(r["settings"].split(",")[0].removeprefix("step "))
            for r in (mine, row)
        )
        assert_ratio(step, there, 1.15)


@pytest.mark.optimised
@pytest.mark.slow
def test_unbiased():
    """A fourth of the pairs, and of the long chains, of one row."""
    unbiased = load_benchmark("unbiased")
    old = read_rows(RESULTS / "unbiased.csv")[0]
    assert (old["posterior"], old["scheme"]) == ("logistic", "plain")
    k, m = int(old["k"]), int(old["m"])
    sizes = (float(old[name]) for name in ("step_size", "walk", "share"))
    plan = PairPlan(
        "plain",
        "none",
        np.zeros((0, 50)),
        int(old["leaps"]),
        Moves(*sizes, lag=k, k=k, m=m),
        np.zeros(0),
        int(old["pilot"]),
    )
    problem = unbiased.load_problem("logistic")
    new = unbiased.measure("logistic", problem, plan, 128, (64, 60, 200), OTHER)
    assert list(new) == list(old)
    for name in ("ess_mean", "ess_square", "long_mean", "long_square"):
        assert_ratio(new[name], float(old[name]), 1.3)
    assert_ratio(new["median"], float(old["median"]), 1.3)
    assert_ratio(new["late"], float(old["late"]), 1.8)
    assert_ratio(new["job"], int(old["job"]), 1.05)


@pytest.mark.optimised
@pytest.mark.slow
def test_estimate_against_plain_hmc():
    """Errors times the root of the steps: free of what else the machine does."""
    benchmark, name = load_benchmark("estimate"), "logistic"
    old = where(read("estimate_plain.csv"), posterior=name)
    chosen = str(
        where(old, asked="")["scheme"][0]
    )  # the scheme that won when it was made
    new = as_table(benchmark.race(name, OTHER, 12.0, (chosen, "plain")))
    assert list(new) == list(old)
    for asked, label in ((chosen, ""), ("plain", "plain")):
        mine, theirs = where(new, asked=asked), where(old, asked=label)
        cost = [np.log(t["median"]) + np.log(t["steps"]) / 2 for t in (mine, theirs)]
        assert_ratio(*np.exp([np.mean(part) for part in cost]), 2.5)


@pytest.mark.slow
def test_repeats_of_estimate(monkeypatch):
    """One more call, content with ten times the error."""
    benchmark, name = load_benchmark("estimate"), "Poisson regression"
    old = where(read("estimate_repeats.csv"), model=name)
    repeats = len(np.unique(old["repeat"]))
    mean, mcse, sd, truth, error = (
        old[n].reshape(repeats, -1)
        for n in ("mean", "mcse", "sd", "truth", "truth_error")
    )
    case = benchmark.CASES[name]
    case = case._replace(relative=10 * case.relative)
    monkeypatch.setitem(benchmark.CASES, name, case)
    new = as_table(benchmark.repeat(name, OTHER, (truth[0], error[0])))
    assert list(new) == list(old)
    assert new["statistic"].tolist() == old["statistic"][: len(truth[0])].tolist()
    assert new["reached"].all() and new["trusted"].all()
    theirs = np.sqrt((mcse**2).mean(0) / repeats)
    assert_same_means(new["mean"], new["mcse"], mean.mean(0), theirs)
    np.testing.assert_allclose(new["sd"], sd.mean(0), rtol=0.2)


def test_blocks_on_several_devices():
    """The time of a step on one device, which two were faster than."""
    table = read("scale.csv")
    make_block = load_benchmark("scale").make_block
    for posterior, steps in (("logistic", 20), ("item", 1)):
        here = where(table, kind="strong", posterior=posterior)
        before = where(here, devices=1)
        block = make_block(posterior, int(before["chains"][0]), steps)
        block()
        begin = time.perf_counter()
        block()
        now = (time.perf_counter() - begin) / steps
        assert_ratio(now, np.median(before["seconds"] / before["steps"]), 10)
        other = where(here, devices=2)["seconds"]
        assert np.median(other) < np.median(before["seconds"])
