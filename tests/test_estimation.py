"""The front door: right answers, honest errors, and words when there are none.

Most tests start from a job that is made by hand, with a map and settings that are known
to be good. The slow ones go through the whole call.
"""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from scipy import stats
from scipy.special import logsumexp

import swindles
from swindles import estimation
from swindles.accuracy import summarize, trace_moments
from swindles.choice import CANDIDATES, Choice
from swindles.coupling import hmc, start, take_steps
from swindles.estimation import (
    MOST_LINES,
    ROWS,
    VERSION,
    Clock,
    Engine,
    Findings,
    Goal,
    PointJob,
    Report,
    Task,
    as_key,
    chain_warnings,
    describe_problem,
    draw_warnings,
    drop_half,
    ends_differ,
    has_bias,
    has_drift,
    is_reached,
    is_worth_bending,
    job_notes,
    load,
    make_goal,
    make_job,
    make_report,
    merge_rows,
    points_fall_short,
    read_job,
    round_to_error,
    run_until_done,
    spread_errors,
    why_not_here,
    write_job,
)
from swindles.models import Model, make_problem
from swindles.schemes import SCHEMES, Plan
from swindles.targets import skewed
from swindles.transport import Affine, unit_map

DIM, CHAINS, SEED = 3, 64, 7
TARGET = skewed(DIM)
TRUTH = np.concatenate([TARGET.truth["mean"], TARGET.truth["square"]])
TO_X = Affine(jnp.full(DIM, 0.4), jnp.full(DIM, 0.8))


def moments(x):
    return {"mean": x, "square": x**2}


def logdensity(x):
    return TARGET.logdensity(x)


PROBLEM = make_problem(Model(logdensity, jnp.zeros(DIM)), moments)
LATENT = PROBLEM.through(TO_X)
ENDLESS = Goal(None, 1e-6, None, None)
ABOUT = describe_problem(PROBLEM) | {"chains": CHAINS, "scheme": "antithetic"}
ABOUT["key"] = np.asarray(jax.random.key_data(as_key(SEED))).tolist()


FINDINGS = Findings(0.1, 0.9, 0.0, np.inf, np.zeros(6, bool))


def make_plan(scheme):
    """A plan with arbitrary coefficients, if the scheme has any."""
    rng, used = np.random.default_rng(1), SCHEMES[scheme]
    features = 6 * used.has_control + 2 * DIM * used.stein
    beta = rng.normal(size=6 if features == 6 and used.has_control else (features, 6))
    order = "diagonal" if used.stein else "none"
    mean, zero = rng.normal(size=features), np.zeros(6)
    return Plan(scheme, order, beta, mean, zero, TRUTH, np.full(6, 1e-7))


@cache
def begin(scheme="antithetic"):
    """A job before its first step, and its engine."""
    algorithm = SCHEMES[scheme].build(hmc(0.5, 3), LATENT.logdensity)
    z = jax.random.normal(jax.random.key(3), (CHAINS, DIM))
    choice = Choice(make_plan(scheme), 0.5, 3, start(algorithm, z), {}, 0)
    job = make_job(jax.random.key(5), choice, ENDLESS, TO_X, FINDINGS)
    engine = Engine(job, LATENT)
    return engine.begin(job), engine


def take(job, engine, number):
    for _ in range(number):
        job = engine.add_block(job)
    return job


@cache
def taken(number, scheme="antithetic"):
    """A job after so many blocks."""
    return take(*begin(scheme), number)


def budget(blocks):
    """So many of the first blocks, in gradients."""
    return ENDLESS._replace(gradients=blocks * 10.0 * CHAINS * 3 * 2)


def run_on(job, blocks, file=None):
    """So many blocks more of a job."""
    job = job._replace(goal=budget(blocks))
    return run_until_done(job, Task(PROBLEM, TO_X, file, ABOUT), Clock())


@pytest.fixture(scope="module")
def report():
    """A report on thirty blocks."""
    return run_on(begin()[0], 30)


@pytest.mark.slow
def test_answer_is_right(report):
    error = np.abs(report.estimate.mean - TRUTH) / report.estimate.mcse
    assert report.job.run.steps == 300 and error.max() < 4
    assert report.trusted, report.warnings
    assert not report.reached, "of a millionth nobody can dream"


def test_gradients_are_counted_over_all_chains(report):
    assert report.job.gradients == 300 * CHAINS * 2 * 3
    assert taken(2, "plain").gradients == 20 * CHAINS * 3


REPEATS, ASKED = 20, 0.004


@pytest.fixture(scope="module")
def repeats():
    """Twenty runs to the accuracy asked for."""
    begun, engine = begin()
    found, goal = [], Goal(None, ASKED, None, None)
    for seed in range(REPEATS):
        key = np.asarray(jax.random.key_data(jax.random.key(seed)))
        job = take(begun._replace(key=key, goal=goal), engine, 3)  # to forget the start
        rows = job.run._replace(rows=begun.run.rows)
        job, done = job._replace(run=rows, draws=begun.draws), False
        while not done:
            job = engine.add_block(job)
            done = is_reached(job, job.estimate())
        found.append(job.estimate())
    return found


@pytest.mark.slow
def test_stated_error_is_the_real_one(repeats):
    score = np.array([(e.mean - TRUTH) / e.mcse for e in repeats])
    assert np.abs(score).max() < 4.5
    assert 0.85 < np.sqrt((score**2).mean()) < 1.15


@pytest.mark.slow
def test_accuracy_asked_for_is_delivered_and_not_much_more(repeats):
    sd = np.sqrt([e.variance for e in repeats])
    real = np.sqrt(np.mean([(e.mean - TRUTH) ** 2 for e in repeats], axis=0))
    assert (real < 1.1 * ASKED * sd.mean(0)).all()
    too_long = (ASKED * sd / [e.mcse for e in repeats]).min(1) ** 2
    assert too_long.max() < 2 and too_long.min() >= 1


def test_sums_are_those_of_the_recorded_run():
    job, engine = begin("plain")
    values = []
    for _ in range(20):
        job = engine.add_block(job._replace(length=1))
        values.append(jax.vmap(LATENT.statistic)(job.run.states.plus.position))
    direct = summarize(trace_moments(np.asarray(values, np.float64), 2))
    found = taken(2, "plain").estimate()
    assert np.allclose(found.mean, direct.mean, rtol=1e-5)
    assert np.allclose(found.mcse, direct.mcse, rtol=1e-4)
    assert np.allclose(found.variance, direct.variance, rtol=1e-4)
    assert np.allclose(found.rhat, direct.rhat, rtol=1e-4)


def size_of(job):
    leaves = jax.tree.leaves(job._replace(history=0))
    return sum(np.asarray(leaf).nbytes for leaf in leaves)


def test_memory_does_not_grow_and_nothing_is_lost():
    job, engine = begin()
    sizes, seen = [], []
    for _ in range(3 * ROWS):
        job = engine.add_block(job)
        sizes.append(size_of(job))
        seen.append(len(job.draws))
    assert max(seen) < ROWS and seen[-1] >= ROWS // 2
    merged = sum(b < a for a, b in pairwise(seen))
    assert merged > 3 and job.length == 10 * 2**merged
    rows = job.run.rows
    for steps in (rows.plus.steps, rows.swindled.steps, rows.rates.steps):
        assert int(np.sum(steps)) == job.run.steps
    assert max(sizes) == max(sizes[:ROWS])


def test_merging_changes_no_estimate():
    job = taken(8)
    merged = merge_rows(job)
    before, after = job.estimate(), merged.estimate()
    assert np.allclose(before.mean, after.mean, rtol=1e-6)
    assert np.allclose(before.mcse, after.mcse, rtol=1e-4)
    assert np.allclose(before.variance, after.variance, rtol=1e-4)
    assert np.array_equal(merged.draws, job.draws[1::2]) and merged.length == 20
    rates, both = job.run.rows.rates, merged.run.rows.rates
    assert np.sum(rates.accepted["minus"]) == np.sum(both.accepted["minus"])
    assert len(both.divergent) == 4


def test_errors_that_stay_are_part_of_the_error():
    job = taken(2, "plain")
    before = job.estimate().mcse
    plan = job.plan._replace(shared_variance=np.full(6, 0.09), rounding=np.full(6, 0.4))
    after = job._replace(plan=plan).estimate().mcse
    assert np.allclose(after**2 - before**2, 0.25)


def shifted(job, rows, by):
    """The job with so much more in each step of some rows of the swindled sums."""
    sums = job.run.rows
    total = sums.swindled.total.copy()
    total[rows] += by * job.length
    changed = sums._replace(swindled=sums.swindled._replace(total=total))
    return job._replace(run=job.run._replace(rows=changed))


def test_drift_is_seen_and_dropped():
    job = taken(16)
    assert not has_drift(job) and chain_warnings(job) == []
    moved = shifted(job, slice(8), 1.0)
    assert has_drift(moved) and "moving" in chain_warnings(moved)[0]
    rest = drop_half(moved)
    assert len(rest.draws) == 8 and rest.dropped == 80 and not has_drift(rest)
    assert np.sum(rest.run.rows.rates.steps) == 80


def test_a_start_that_is_far_off_is_dropped_by_itself():
    job, engine = begin()
    states = start(engine.algorithm, jnp.full((CHAINS, DIM), -8.0))
    job = job._replace(run=job.run._replace(states=jax.device_get(states)))
    found = run_on(job, 60)
    assert found.job.dropped >= 80 and "dropped as warm-up" in str(found)
    error = np.abs(found.estimate.mean - TRUTH) / found.estimate.mcse
    assert found.trusted and error.max() < 4.5


def test_bias_is_seen():
    assert has_bias(taken(8, "cva")), "its coefficients and known mean are arbitrary"
    honest = taken(16)
    assert not has_bias(honest)
    biased = shifted(honest, slice(None), 0.2)
    assert has_bias(biased) and not has_drift(biased)
    assert "not that of the chain" in chain_warnings(biased)[0]


def test_warnings_about_chains():
    job = taken(16)
    rates = job.run.rows.rates
    idle = rates.accepted["minus"].copy()
    idle[8:, :3] = 0  # of one of two chains, in the second half
    few = {"minus": np.zeros_like(rates.decoupled["minus"])}
    few["minus"][0, :29] = 1
    cases = {
        "3 of 64 chains are stuck": {"accepted": rates.accepted | {"minus": idle}},
        "diverge": {"divergent": rates.divergent + 1},
        "only 29 decouplings": {"decoupled": few},
    }
    for words, change in cases.items():
        rows = job.run.rows._replace(rates=rates._replace(**change))
        found = chain_warnings(job._replace(run=job.run._replace(rows=rows)))
        assert len(found) == 1 and words in found[0]


def test_warnings_about_tails():
    job = taken(16)
    assert draw_warnings(job, LATENT) == []
    rng = np.random.default_rng(0)
    wild = job._replace(draws=rng.standard_cauchy(job.draws.shape).astype(np.float32))
    (words,) = draw_warnings(wild, LATENT)
    assert words == "tails of 6 statistics (mean[0]) are too heavy for an error"


def test_chains_that_stay_apart_are_not_mixed():
    """Every third one is elsewhere; and, by ranks of the distance, wider."""
    job = taken(16)
    third = (np.arange(CHAINS) % 3 == 0)[:, None]
    for away in (job.draws + 2 * third, job.draws * np.where(third, 4, 1)):
        moved = job._replace(draws=away.astype(np.float32))
        assert "not mixed: R-hat of ranks" in draw_warnings(moved, LATENT)[-1]
        assert not moved.is_settled(job.estimate())


def test_notes():
    job = taken(16)
    found = job.estimate()
    assert job_notes(job, found) == []
    plan = job.plan._replace(rounding=found.mcse, shared_variance=found.mcse**2)
    findings = FINDINGS._replace(pareto_k=1.0)
    changed = job._replace(plan=plan, findings=findings, stuck=2, dropped=80)
    notes = job_notes(changed, found)
    words = ["arithmetic", "control's mean", "Pareto k 1.0", "2 chains", "80 steps"]
    assert len(notes) == 5
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_goals():
    sd = np.array([1.0, 2.0, 0.0])
    assert Goal(None, 0.1, None, None).errors(sd).tolist() == [0.1, 0.2, np.inf]
    both = Goal(np.array([0.15, 0.15, 0.15]), 0.1, None, None)
    assert np.allclose(both.errors(sd), [0.1, 0.15, 0.15])
    assert make_goal(PROBLEM, None, None, 60, None).relative == 0.01
    each = {"mean": [1.0, 2, 3], "square": [4.0, 5, 6]}
    goal = make_goal(PROBLEM, each, None, None, 9.0)
    assert goal.mcse.tolist() == [1, 2, 3, 4, 5, 6] and goal.relative is None
    assert goal.is_spent(1e9, 9.0) and not goal.is_spent(1e9, 8.0)


BAD_GOALS = [
    {"mcse": 0.0},
    {"mcse": [1.0, 2.0]},
    {"mcse": np.nan},
    {"relative": -1.0},
    {"seconds": 0.0},
    {"gradients": np.inf},
]


@pytest.mark.parametrize("bad", BAD_GOALS)
def test_bad_goals(bad):
    goal = {"mcse": None, "relative": None, "seconds": 1.0, "gradients": None} | bad
    with pytest.raises(ValueError, match=next(iter(bad))):
        make_goal(PROBLEM, **goal)


def test_reached_needs_a_margin_rhat_rest_and_blocks(monkeypatch):
    job = taken(16)
    found = job.estimate()._replace(rhat=np.ones(6))
    margin = 1 + 1 / np.sqrt(2 * (CHAINS - 1))

    def reached(mcse, found=found, job=job):
        return is_reached(job._replace(goal=Goal(mcse, None, None, None)), found)

    just = found.mcse * margin * 1.001
    assert reached(just) and not reached(found.mcse * 1.01)
    assert not reached(just, found._replace(rhat=np.full(6, 1.2)))
    assert not reached(just, job=job._replace(draws=job.draws[:7]))
    known = job.plan._replace(shared_variance=found.mcse**2 / 2)
    assert reached(found.mcse / 9, job=job._replace(plan=known)), "as good as it can be"
    monkeypatch.setattr(estimation, "has_drift", lambda job: True)
    assert not reached(just)


# Files.


@pytest.mark.parametrize("scheme", ["plain", "cva"])
def test_files_hold_everything(scheme, tmp_path):
    job = taken(2, scheme)
    goal = Goal(np.full(6, 0.5), 0.1, None, 1e9)
    job = job._replace(goal=goal, forecast={"cva": 3.0, "plain": np.inf})
    write_job(tmp_path / "run.npz", job, {"names": ["a"]})
    back, about = read_job(tmp_path / "run.npz")
    assert about == {"names": ["a"]}
    assert jax.tree.structure(job) == jax.tree.structure(back)
    for one, other in zip(jax.tree.leaves(job), jax.tree.leaves(back), strict=True):
        assert type(one) is type(other) or np.asarray(one).dtype == other.dtype
        assert np.array_equal(one, other)
    assert list(tmp_path.iterdir()) == [tmp_path / "run.npz"]
    engine = begin(scheme)[1]
    ahead, behind = take(job, engine, 2), take(back, engine, 2)
    assert np.array_equal(ahead.swindled.total, behind.swindled.total)
    assert (back.run.rows.swindled is None) == (scheme == "plain")


def contents(file):
    """The arrays of a file, and its head."""
    with np.load(file) as stored:
        arrays = {name: stored[name] for name in stored.files}
    return arrays, json.loads(str(arrays.pop("head")))


def test_files_go_by_name(tmp_path):
    job, file, other = taken(2, "cva"), tmp_path / "run.npz", tmp_path / "other.npz"
    write_job(file, job, {})
    arrays, head = contents(file)
    assert np.array_equal(arrays["run/states/minus/position"], job.run.states[1][0])
    assert np.array_equal(arrays["run/rows/plus/total"], job.run.rows.plus.total)
    assert np.array_equal(arrays["plan/beta"], job.plan.beta)
    assert head["others"]["plan/scheme"] == "cva" and head["swindles"] == VERSION

    head["others"] = dict(reversed(head["others"].items()))
    np.savez(other, **dict(reversed(arrays.items())), head=json.dumps(head))
    back, again = read_job(file)[0], read_job(other)[0]
    for one, two in zip(jax.tree.leaves(back), jax.tree.leaves(again), strict=True):
        assert np.array_equal(one, two)


def test_another_format_is_refused(tmp_path):
    file = tmp_path / "run.npz"
    write_job(file, taken(2, "plain"), {})
    arrays, head = contents(file)
    for version in (1, VERSION + 1):
        np.savez(file, **arrays, head=json.dumps(head | {"swindles": version}))
        with pytest.raises(ValueError, match=f"format {version}.* reads only format"):
            load(file)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no run")
    np.savez(tmp_path / "foreign.npz", x=1)
    write_job(tmp_path / "whole.npz", taken(2, "plain"), {})
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    arrays, head = contents(tmp_path / "whole.npz")
    del arrays["run/rows/plus/total"]
    np.savez(tmp_path / "less.npz", **arrays, head=json.dumps(head))
    for name in ("text", "foreign.npz", "half.npz", "less.npz"):
        with pytest.raises(ValueError, match=f"{name} is not a run"):
            load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing")


def rezipped(file, target, **options):
    """The same file, packed otherwise."""
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(target, "w", **options) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def test_damaged_files_are_refused_or_whole(tmp_path):
    """None gives another run, none fails in the words of a library."""
    file, bad = tmp_path / "run.npz", tmp_path / "bad.npz"
    job = taken(2, "plain")
    write_job(file, job, {})
    whole, rng = bytearray(file.read_bytes()), np.random.default_rng(4)
    damaged = [whole[: int(n)] for n in rng.integers(0, len(whole), 5)]
    for _ in range(25):
        part = bytearray(whole)
        place = int(rng.integers(len(whole) - 8))
        part[place : place + 8] = rng.bytes(8)
        damaged.append(part)
    central = whole.rindex(b"PK\x01\x02")
    for offset, value in ((8, 1), (10, 99), (10, 14)):  # encrypted, unknown, LZMA
        part = bytearray(whole)
        part[central + offset] = value
        damaged.append(part)
    refused = 0
    for part in damaged:
        bad.write_bytes(part)
        try:
            back = read_job(bad)[0]
        except ValueError as words:
            assert "is not a run that swindles saved" in str(words)
            refused += 1
        else:
            pairs = zip(jax.tree.leaves(job), jax.tree.leaves(back), strict=True)
            assert all(np.array_equal(one, other) for one, other in pairs)
    assert refused > 20
    rezipped(file, bad, compression=zipfile.ZIP_LZMA)
    assert np.array_equal(read_job(bad)[0].draws, job.draws)
    np.save(tmp_path / "array.npy", np.ones(3))
    with pytest.raises(ValueError, match="not a run"):
        read_job(tmp_path / "array.npy")


@pytest.mark.parametrize("where", ["arrays", "head"])
def test_files_that_were_edited_are_refused(where, tmp_path):
    file = tmp_path / "run.npz"
    write_job(file, taken(2, "plain"), {})
    arrays, head = contents(file)
    if where == "arrays":
        arrays["run/rows/plus/total"][0, 0] = np.nan
    else:
        head["others"]["dropped"] = 7
    np.savez(file, **arrays, head=json.dumps(head))
    with pytest.raises(ValueError, match="changed after it was written"):
        read_job(file)


def test_a_full_disk_ends_no_run_and_leaves_no_draft(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    task = Task(PROBLEM, TO_X, tmp_path / "run.npz", ABOUT)
    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="not saved: .*No space left"):
        task.save(taken(2, "plain"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space"):
        write_job(tmp_path / "run.npz", taken(2, "plain"), ABOUT)


def test_two_threads_write_one_file(tmp_path):
    file, jobs = tmp_path / "run.npz", [taken(2, "plain"), taken(3, "plain")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: write_job(file, jobs[n % 2], {}), range(20)))
    assert read_job(file)[0].run.steps in [job.run.steps for job in jobs]
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_call_cut_short_has_used_is_taken_off():
    goal = Goal(None, 0.1, 60.0, 1e6)
    assert goal.without(20.0, 4e5)[2:] == (40.0, 6e5)
    assert goal.without(99.0, 4e6)[2:] == (1e-3, 1.0)
    assert Goal(None, 0.1, None, None).without(99.0, 4e6)[2:] == (None, None)


def test_a_file_of_another_run_is_refused(report, tmp_path):
    file, start_at = tmp_path / "run.npz", jnp.zeros(DIM)
    report.save(file)
    options = {"file": file, "scheme": "antithetic", "dtype": "float32"}
    with pytest.raises(ValueError, match="another chains and key"):
        swindles.estimate(logdensity, start_at, moments, 1, **options)
    with pytest.raises(ValueError, match="another logdensity"):
        load(file, lambda x: 2 * logdensity(x) + 1, start_at, moments)
    with pytest.raises(ValueError, match="another names"):
        load(file, logdensity, start_at)
    write_job(file, report.job._replace(transport=None), ABOUT)
    with pytest.raises(ValueError, match="map of your own: give it again"):
        load(file, logdensity, start_at, moments)
    assert load(file, logdensity, start_at, moments, TO_X).transport is TO_X


def test_files_can_be_looked_at_without_the_model(report, tmp_path):
    report.save(tmp_path / "run.npz")
    seen = load(tmp_path / "run.npz")
    assert isinstance(seen, Report) and seen.names == PROBLEM.names
    assert np.array_equal(seen.estimate.mean, report.estimate.mean)
    assert seen.mean["mean[0]"] == report.estimate.mean[0]
    assert str(seen) == str(report), "what was asked for is in the file"
    assert len(seen.plot().axes[0].lines) == 2
    for action in (seen.resume, seen.to_arviz):
        with pytest.raises(ValueError, match="model"):
            action()


# Stopping and going on.


def assert_same(one, other):
    """To the last bit."""
    assert one.job.run.steps == other.job.run.steps
    assert np.array_equal(one.estimate.mean, other.estimate.mean)
    assert np.array_equal(one.estimate.mcse, other.estimate.mcse)
    assert np.array_equal(one.job.swindled.total, other.job.swindled.total)
    assert np.array_equal(one.job.run.states.plus.position, last_positions(other))


def last_positions(report):
    return report.job.run.states.plus.position


def test_going_on_is_the_same_as_not_stopping():
    begun = begin()[0]
    whole, half = run_on(begun, 12), run_on(begun, 7)
    rest = half.resume(gradients=budget(5).gradients, seconds=None)
    assert rest.job.run.steps == 120 and rest.job.goal.relative == ENDLESS.relative
    assert_same(rest, whole)
    with pytest.raises(ValueError, match="relative"):
        half.resume(relative=0.0)


def test_resume_reaches_what_is_asked_for(report, tmp_path):
    sd = np.sqrt(report.estimate.variance)
    target = float(0.7 * (report.estimate.mcse / sd).max())
    found = report.resume(relative=target, file=tmp_path / "run.npz")
    assert found.reached and (found.estimate.mcse <= target * sd * 1.05).all()
    assert found.job.run.steps > report.job.run.steps
    seen = load(tmp_path / "run.npz")
    assert seen.reached and seen.job.goal.relative == target


def test_ctrl_c_gives_what_there_is(monkeypatch, tmp_path):
    calls, add_block = [], Engine.add_block

    def impatient(self, job):
        calls.append(0)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return add_block(self, job)

    file, begun = tmp_path / "run.npz", begin()[0]
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "add_block", impatient)
        found = run_on(begun, 9, file)
    assert found.job.run.steps == 50 and "Not there yet" in str(found)
    rest = load(file, logdensity, jnp.zeros(DIM), moments)
    assert_same(rest, found)
    rest = rest.resume(relative=1e-6, gradients=budget(4).gradients, seconds=None)
    assert_same(rest, run_on(begun, 9))


def test_ctrl_c_before_the_first_block_is_ctrl_c(monkeypatch, tmp_path):
    def now(self, job):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "add_block", now)
    with pytest.raises(KeyboardInterrupt):
        run_on(begin()[0], 9, tmp_path / "run.npz")
    assert read_job(tmp_path / "run.npz")[0].run.steps == 0, "the set-up is not lost"


CALL = f"""
import sys
import jax.numpy as jnp
import swindles
from swindles import estimation
from swindles.targets import skewed

estimation.SAVE_EVERY = 0.0
swindles.estimate(
    skewed({DIM}).logdensity, jnp.zeros({DIM}), lambda x: {{"mean": x, "square": x**2}},
    key={SEED}, relative=1e-7, seconds=None, gradients=1e12, scheme="antithetic",
    chains={CHAINS}, dtype="float32", file=sys.argv[1]
)
"""


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_bits(tmp_path):
    file, seen = tmp_path / "run.npz", set()
    write_job(file, begin()[0], ABOUT)  # as the call leaves it after its set-up
    # Bits are those of one compiler with the same settings.
    fast = str(int(jax.config.read("jax_disable_most_optimizations")))
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": fast}
    command = [sys.executable, "-c", CALL, str(file)]
    victim = subprocess.Popen(command, env=environment)
    while len(seen) < 6:  # the job as it was, and some blocks
        seen.add(file.stat().st_mtime_ns)
        assert victim.poll() is None
        time.sleep(0.002)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    before = load(file).job
    assert before.run.steps > 0
    rest = swindles.estimate(
        logdensity,
        jnp.zeros(DIM),
        moments,
        SEED,
        relative=1e-7,
        seconds=None,
        gradients=(before.run.steps + 7 * before.length) * CHAINS * 6,
        scheme="antithetic",
        chains=CHAINS,
        dtype="float32",
        file=file,
    )
    assert rest.job.run.steps == before.run.steps + 7 * before.length
    assert load(file).job.run.steps == rest.job.run.steps
    whole, engine = begin()
    while whole.run.steps < rest.job.run.steps:
        whole = engine.add_block(whole)
    assert_same(rest, make_report(whole, Task(PROBLEM, TO_X, None, {})))


# The report.


def test_names_and_shapes_survive(report):
    assert sorted(report.mean) == ["mean", "square"]
    assert report.mean["square"].shape == report.mcse["mean"].shape == (3,)
    assert report.rhat["mean"].shape == report.ess["mean"].shape == (3,)
    assert np.allclose(report.sd["mean"] ** 2, np.pi**2 / 6 - 1, rtol=0.1)


def test_text_and_html_say_it_all(report):
    text = str(report)
    assert repr(report) == text
    for name in [*PROBLEM.names, "error", "R-hat", "antithetic", "Not there yet"]:
        assert name in text
    assert "Do not trust" not in text
    names = ["<i>", *PROBLEM.names[1:]]
    doubtful = replace(report, warnings=["a < b"], names=names)
    assert not doubtful.trusted
    assert "Do not trust" in str(doubtful) and "- a < b" in str(doubtful)
    page = doubtful._repr_html_()
    assert "&lt;i&gt;" in page and "a &lt; b" in page and page.count("<tr>") == 7


def test_long_tables_are_cut(report):
    times = 20
    parts = {
        name: np.tile(getattr(report.estimate, name), times)
        for name in ("mean", "mcse", "ess", "rhat", "variance")
    }
    estimate = report.estimate._replace(**parts)
    long = replace(report, estimate=estimate, names=PROBLEM.names * times)
    lines = str(long).splitlines()
    assert len(lines) < MOST_LINES + 7
    assert f"... and {6 * times - MOST_LINES} more" in lines


def test_digits_are_those_that_are_known():
    cases = [(0.123456, 0.0012), (-5.0, 1.5), (1e6, 2e4), (2.0, np.nan)]
    found = [round_to_error(*case) for case in cases]
    assert found == ["0.1235", "-5.0", "1000000", "2"]


def test_exports(report):
    table = report.to_dict()
    assert table["mean"] == report.estimate.mean.tolist()
    assert table["scheme"] == "antithetic" and table["warnings"] == []
    frame = report.to_pandas()
    assert list(frame.index) == PROBLEM.names
    assert np.allclose(frame["mcse"], report.estimate.mcse)
    data = report.to_arviz()
    draws = data.posterior["x"]
    assert draws.shape == (CHAINS, len(report.job.draws), 3)
    assert np.allclose(draws.mean(("chain", "draw")), TRUTH[:3], atol=0.1)
    assert np.allclose(data.posterior.attrs["mean"], report.estimate.mean)


@pytest.mark.parametrize(
    ("module", "export", "words"),
    [
        ("pandas", "to_pandas", r"pandas.*swindles\[pandas\]"),
        ("arviz", "to_arviz", r"arviz.*swindles\[arviz\]"),
        ("matplotlib.pyplot", "plot", r"matplotlib.*swindles\[plot\]"),
    ],
)
def test_a_missing_library_is_named(report, monkeypatch, module, export, words):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=words):
        getattr(report, export)()


def test_plot_shows_errors_that_fall_and_where_the_time_went(report):
    errors, stages = report.plot().axes
    x, y = errors.lines[0].get_data()
    assert len(x) == len(report.job.history) and y[-1] < y[0] and (np.diff(x) > 0).all()
    widths = [bar.get_width() for bar in stages.patches]
    assert widths == [stage.seconds for stage in report.job.stages.values()]
    assert max(widths) > 0


# What is compiled.


def go_on_with_a_copy(folder, number):
    """One more call on a model of its own, from a file; weak references to it."""
    file = folder / f"{number}.npz"
    shutil.copy(folder / "begun.npz", file)

    def own_density(x):
        return TARGET.logdensity(x)

    def own_moments(x):
        return {"mean": x, "square": x**2}

    found = swindles.estimate(
        own_density,
        jnp.zeros(DIM),
        own_moments,
        SEED,
        gradients=budget(4).gradients,
        scheme="antithetic",
        chains=CHAINS,
        dtype="float32",
        file=file,
    )
    assert found.job.run.steps == 40
    return weakref.ref(own_density), weakref.ref(own_moments), weakref.ref(found)


@pytest.mark.slow
def test_what_is_compiled_for_a_call_goes_with_it(tmp_path):
    write_job(tmp_path / "begun.npz", begin()[0], ABOUT)
    client, programs = jax.devices()[0].client, []
    for number in range(4):
        left = go_on_with_a_copy(tmp_path, number)
        gc.collect()
        assert [reference() for reference in left] == [None] * 3
        programs.append(len(client.live_executables()))
    assert programs[-1] == programs[1], "the first call also compiles small things"


def test_kernel_lowers_for_cuda():
    job, engine = begin("antithetic+stein")
    zero, update = engine.fold

    def kernel(key, states, sums):
        return take_steps(key, states, sums, 0, 10, engine.algorithm.step, update)

    lowered = export.export(jax.jit(kernel), platforms=["cuda"])
    module = lowered(jax.random.key(0), job.run.states, zero).mlir_module()
    assert "xla_python" not in module


# What is asked of the call.


def test_keys_of_all_kinds():
    new = as_key(3)
    assert jnp.array_equal(jax.random.key_data(new), jax.random.PRNGKey(3))
    for key in (jax.random.PRNGKey(3), jax.random.key(3), np.int64(3), jnp.array(3)):
        assert jnp.array_equal(
            jax.random.key_data(as_key(key)), jax.random.key_data(new)
        )
    other = as_key(jax.random.key(3, impl="rbg"))
    assert other.dtype == new.dtype and other != as_key(jax.random.key(4, impl="rbg"))
    assert other == as_key(jax.random.key_data(jax.random.key(3, impl="rbg")))


def test_errors_are_asked_for_by_name():
    problem = make_problem(Model(bell, TWO), lambda x: {"a": x[0], "b": x})
    names = {"b[1]": 3.0, "a": 1.0, "b[0]": 2.0}
    for mcse in ([1, 2, 3], {"b": [2, 3], "a": 1}, names, np.array([1.0, 2, 3])):
        assert spread_errors(problem, mcse).tolist() == [1, 2, 3]
    assert spread_errors(problem, {"b": 2, "a": 1}).tolist() == [1, 2, 2]
    assert spread_errors(problem, 0.1).tolist() == [0.1] * 3


def test_a_call_inside_of_jit_is_refused():
    def call(x):
        return swindles.estimate(bell, x).estimate.mean

    with pytest.raises(ValueError, match="outside"):
        jax.jit(call)(TWO)
    with pytest.raises(ValueError, match="outside"):
        jax.grad(lambda x: call(x)[0])(TWO)


def bell(x):
    return -jnp.sum(x**2) / 2


def pair(x):
    return {"a": x[0], "b": x[1]}


TWO = jnp.zeros(2)
REFUSED = {
    "improper": ((jnp.sum, TWO), {}, "no posterior|proper"),
    "constant": ((lambda x: 0 * jnp.sum(x), TWO), {}, "posterior"),
    "zero chains": ((bell, TWO), {"chains": 0}, "chains are too few"),
    "one chain": ((bell, TWO), {"chains": 1}, "16 or more"),
    "huge": ((bell, jnp.zeros(100_000)), {}, "use 20 chains"),
    "scheme": ((bell, TWO), {"scheme": "best"}, "say one of"),
    "no position": ((bell,), {}, "position"),
    "mcse": ((bell, TWO), {"mcse": -1.0}, "mcse"),
    "mcse shape": ((bell, TWO), {"mcse": jnp.ones(3)}, "3 entries"),
    "seconds": ((bell, TWO), {"seconds": -1}, "seconds"),
    "wrong shape": ((lambda x: x**2, TWO), {}, "take a sum"),
    "numpy": ((lambda x: np.sum(np.asarray(x)), TWO), {}, "jax.numpy"),
    "statistic": ((bell, TWO, lambda x: jnp.log(x[0] + 2)), {}, "is not finite"),
    "not finite": ((lambda x: jnp.log(x[0]), -1 - TWO), {}, "start elsewhere"),
    "mcse text": ((bell, TWO), {"mcse": "small"}, "positive numbers"),
    "mcse names": ((bell, TWO, pair), {"mcse": {"a": 1, "c": 1}}, "statistics are"),
    "mcse missing": ((bell, TWO, pair), {"mcse": {"a": 1}}, "statistics are"),
    "relative text": ((bell, TWO), {"relative": "x"}, "one positive number"),
    "relative list": ((bell, TWO), {"relative": [0.1]}, "one positive number"),
    "gradients": ((bell, TWO), {"gradients": [1]}, "one positive number"),
    "chains text": ((bell, TWO), {"chains": "x"}, "whole number"),
    "schemes": ((bell, TWO), {"scheme": np.array(["cva", "b"])}, "say one of"),
    "dtype": ((bell, TWO), {"dtype": int}, "say .float32"),
    "file": ((bell, TWO), {"file": 3}, "name of a file"),
    "no directory": ((bell, TWO), {"file": "/no/such/run.npz"}, "does not exist"),
    "directory": ((bell, TWO), {"file": os.curdir}, "is a directory"),
    "no map": ((bell, TWO), {"transport": 3}, "must be a map"),
    "map of three": ((bell, TWO), {"transport": unit_map(np.ones(3))}, "2 dimensions"),
    "key": ((bell, TWO), {"key": 3.5}, "whole number or one key"),
    "keys": ((bell, TWO), {"key": jax.random.split(jax.random.key(0))}, "one key"),
    "large key": ((bell, TWO), {"key": 2**70}, "whole number"),
}


SEEN_LATE = ("improper", "constant", "statistic")  # when there is a map, or chains


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SEEN_LATE else ())
        for name in REFUSED
    ],
)
def test_what_cannot_be_done_is_refused_in_words(name):
    arguments, options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        swindles.estimate(*arguments, **options)


def test_all_schemes_are_named_in_the_docstring():
    for name in CANDIDATES:
        assert f'"{name}"' in swindles.estimate.__doc__


# The whole call.


@pytest.mark.slow
def test_whole_call_is_right_and_leaves_nothing_behind():
    """Nothing but the model is given; the user's own programs stay compiled."""
    traced = []

    @jax.jit
    def mine(x):
        traced.append(0)
        return x + 1

    def own_density(x):
        return TARGET.logdensity(x)

    mine(1.0)
    left = weakref.ref(own_density)
    found = swindles.estimate(own_density, jnp.zeros(3), moments, 11, relative=0.003)
    assert found.trusted and found.reached, str(found)
    assert found.estimate.mcse.max() <= 0.003 * np.sqrt(found.estimate.variance.max())
    assert (np.abs(found.estimate.mean - TRUTH) < 4.5 * found.estimate.mcse).all()
    stages = found.job.stages
    assert list(stages)[:2] == ["compiling", "map"]
    assert sum(stage.seconds for stage in stages.values()) > found.job.history[0, 1] > 0
    if found.job.scheme != "importance":
        forecast = found.job.forecast
        assert set(forecast) == set(CANDIDATES)
        assert forecast[found.job.scheme] <= 1.1 * min(forecast.values())
    del found, own_density
    gc.collect()
    assert left() is None
    mine(1.0)
    assert len(traced) == 1


@pytest.mark.slow
def test_scheme_that_is_named_is_used(tmp_path):
    found = swindles.estimate(
        logdensity,
        jnp.zeros(3),
        moments,
        11,
        relative=0.003,
        scheme="cva",
        chains=CHAINS,
        transport=TO_X,
        file=tmp_path / "run.npz",
    )
    assert found.job.plan.scheme == "cva" and found.trusted and found.reached
    assert (np.abs(found.estimate.mean - TRUTH) < 4.5 * found.estimate.mcse).all()
    assert found.estimate.ess.max() > 1.5 * found.estimate.num_draws
    assert_same(load(tmp_path / "run.npz", logdensity, jnp.zeros(3), moments), found)


class Bent:
    """A map that is wider on the left than on the right."""

    def __call__(self, z):
        return TO_X(z) - 0.2 * (jnp.logaddexp(z, -z) - jnp.log(2.0))

    def with_log_det(self, z):
        return self(z), jnp.log(0.8 - 0.2 * jnp.tanh(z)).sum()


@pytest.mark.slow
def test_a_map_of_ones_own_is_used(tmp_path):
    bent = Bent()
    options = {
        "transport": bent,
        "relative": 0.02,
        "chains": 32,
        "scheme": "antithetic",
    }
    file = tmp_path / "run.npz"
    found = swindles.estimate(logdensity, jnp.zeros(3), key=3, file=file, **options)
    assert found.transport is bent and found.job.transport is None
    assert (np.abs(found.estimate.mean - TRUTH[:3]) < 4.5 * found.estimate.mcse).all()
    with pytest.raises(ValueError, match="map of your own"):
        load(file, logdensity, jnp.zeros(3))


def crescent(x):
    """Its expectations are 0, 9 and 0."""
    """Far from any Gaussian; its truth: means 0, 9, 0."""
    return -0.5 * (x[0] / 3) ** 2 - 0.5 * (x[1] - x[0] ** 2) ** 2 - 0.5 * x[2] ** 2


def arc(number, reach):
    """Draws of ``crescent`` of which the first coordinate is within the reach."""
    draws = np.random.default_rng(5).normal(size=(number, 3)) * [3, 1, 1]
    draws[:, 1] += draws[:, 0] ** 2
    return draws[np.abs(draws[:, 0]) < reach]


def job_of(draws, pareto_k=0.6, mixture=None):
    run = SimpleNamespace(pareto_k=np.array([pareto_k]))
    return SimpleNamespace(draws=draws, key=(1, 2), run=run, mixture=mixture)


@pytest.mark.slow
def test_points_that_end_too_early_are_seen_by_chains_that_go_on(monkeypatch):
    """A twentieth lies beyond; the mean is 23 % too small without."""
    problem = make_problem(Model(crescent, jnp.zeros(3)))
    assert points_fall_short(job_of(arc(1100, 6)[:1024]), problem)
    assert not points_fall_short(job_of(arc(1024, 99)), problem)
    monkeypatch.setattr(estimation, "WALK_WORK", 1.0)
    assert not points_fall_short(job_of(arc(1100, 6)[:1024]), problem)


def test_the_ends_of_draws_are_compared():
    """Alarms are as rare as promised where both are the same, whatever the law."""
    rng = np.random.default_rng(6)
    before, after = rng.exponential(size=(2, 500, 400))
    assert not ends_differ(before, after).any()
    assert not ends_differ(*rng.standard_cauchy((2, 500, 400))).any()
    alarms = [ends_differ(*rng.normal(size=(2, 200, 1))).any() for _ in range(500)]
    assert np.mean(alarms) < 0.01
    after[:, 0] += 5
    assert np.flatnonzero(ends_differ(before, after)).tolist() == [0]
    assert ends_differ(before, 3 * after).all()
    normal = rng.normal(size=(2, 500, 400))
    assert not ends_differ(
        3 * normal[0], normal[1]
    ).any()  # only what is missing counts


def test_which_points_are_followed_by_chains(monkeypatch):
    looked = []
    monkeypatch.setattr(estimation, "why_not_points", lambda job, clock: job.doubt)
    monkeypatch.setattr(
        estimation, "points_fall_short", lambda job, problem: looked.append(1) or True
    )
    task = Task(PROBLEM, TO_X, None, ABOUT)

    def why(doubt="", **change):
        job = job_of(None, **change)
        job.doubt = doubt
        return why_not_here(job, task, Clock())

    assert why(pareto_k=0.4) == "" and why("poor") == "poor" and not looked
    assert "farther" in why() and "farther" in why(pareto_k=0.1, mixture=1)
    assert len(looked) == 2


@pytest.mark.slow
def test_a_flow_is_fitted_where_the_map_is_far_from_right(tmp_path, monkeypatch):
    """Chains run through it, and it is in the run's file."""
    monkeypatch.setattr(estimation, "LARGEST_MIXTURE", 0)
    monkeypatch.setattr(estimation, "LITTLE_WORTH", 1.0)
    monkeypatch.setattr(estimation, "FLOW_STEPS", 200)
    monkeypatch.setattr(estimation, "FLOW_WIDTH", 8)
    file = tmp_path / "run.npz"
    found = swindles.estimate(
        crescent, jnp.zeros(3), key=1, relative=0.1, chains=32, file=file
    )
    assert "flow" in found.job.stages and "a flow was fitted: keep it" in str(found)
    error = np.abs(found.estimate.mean - [0, 9, 0]) / found.estimate.mcse
    assert found.job.scheme in SCHEMES and (not found.trusted or (error < 4.5).all())
    again = load(file, crescent, jnp.zeros(3))
    z = jnp.ones(3)
    assert np.allclose(again.transport(z), found.transport(z), rtol=1e-6)
    more = again.resume(relative=0.08)
    assert more.job.gradients >= found.job.gradients and more.job.flow is not None


def test_when_a_flow_is_fitted():
    def wanted(seconds=60.0, own=False, **change):
        goal, task = ENDLESS._replace(seconds=seconds), Task(PROBLEM, TO_X, None, ABOUT)
        poor = FINDINGS._replace(**{"efficiency": 0.1} | change)
        return is_worth_bending(goal, task._replace(own=own), poor, Clock())

    assert wanted() and wanted(seconds=None)
    assert not wanted(own=True) and not wanted(efficiency=0.5)
    assert not wanted(seconds=10.0)
    assert not wanted(jump=np.inf) and not wanted(other_mode=9.0)
    assert not wanted(heavy=np.ones(6, bool))


@pytest.mark.parametrize("dtype", [None, "float64", "float32"])
def test_precision_is_double_unless_asked_otherwise(dtype):
    """And the user's own setting is left alone."""
    mode = 1e4

    def narrow(x):
        return -jnp.sum(((x - mode) / 0.01) ** 2) / 2

    found = swindles.estimate(narrow, jnp.full(2, mode), dtype=dtype, relative=1e-3)
    kind = np.float32 if dtype == "float32" else np.float64
    assert found.problem.position.dtype == kind
    assert jnp.zeros(1).dtype == np.float32
    error = np.abs(found.estimate.mean - mode)
    assert (error < 4 * found.estimate.mcse).all()
    assert found.reached == (kind == np.float64)


def test_a_density_that_is_single_stays_single():
    def typed(x):
        carry, _ = jax.lax.scan(lambda c, y: (c - y**2, None), jnp.float32(0), x)
        return carry / 2

    found = swindles.estimate(typed, jnp.ones(2), relative=0.05)
    assert found.problem.position.dtype == np.float32
    assert found.trusted and (np.abs(found.estimate.mean) < 0.2).all()


def two_modes(x):
    return jnp.logaddexp(bell(x - 4), bell(x + 4))


def cut(x):
    return jnp.where(jnp.sum(x) > 1.5, jnp.nan, bell(x))


def late(x):
    """Not finite at one of 2000 draws."""
    return jnp.log(x[0] + 3.3)


# A log density, its statistic, and a word of the warning it raises.
HOSTILE = {
    "flat direction": (lambda x: -(x[0] ** 2), None, "R-hat|tails|moving"),
    "NaN later": (cut, None, "NaN at"),
    "NaN statistic later": (bell, late, "not finite"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_targets_are_flagged(name):
    target, statistic, words = HOSTILE[name]
    found = swindles.estimate(
        target, jnp.full(2, 0.5), statistic, 2, relative=0.05, seconds=2
    )
    assert not found.trusted
    text = " ".join(found.warnings)
    assert any(word in text for word in words.split("|")), text


# Without a chain.


def nearly_normal(x):
    """A posterior that a Gaussian is close to: logistic regression in small."""
    rows = jnp.asarray(np.random.default_rng(5).normal(size=(40, 3)))
    return -jnp.sum(jnp.logaddexp(0.0, rows @ x)) - 0.5 * x @ x + rows.sum(0) @ x / 2


@cache
def normal_truth():
    """Means and squares by brute force on a grid."""
    axis = np.linspace(-3, 3, 61)
    grid = np.stack(np.meshgrid(*[axis] * 3, indexing="ij"), -1).reshape(-1, 3)
    with jax.enable_x64(True):
        log_p = np.asarray(jax.jit(jax.vmap(nearly_normal))(jnp.asarray(grid)))
    weights = np.exp(log_p - logsumexp(log_p))
    return np.concatenate([weights @ grid, weights @ grid**2])


@cache
def points_report():
    return swindles.estimate(nearly_normal, jnp.zeros(3), moments, 1, relative=1e-4)


def test_no_chain_is_run_where_none_is_needed():
    found = points_report()
    assert isinstance(found.job, PointJob) and found.job.scheme == "importance"
    assert found.trusted and found.reached, str(found)
    apart = np.abs(found.estimate.mean - normal_truth())  # which has its own rounding
    assert (apart < 4.5 * found.estimate.mcse + 1e-13).all()
    assert found.estimate.ess.min() > 20 * found.job.gradients
    stages = ["compiling", "map", "importance", "check", "other"]
    assert list(found.job.stages) == stages
    assert "other points, with heavy tails, agree to" in str(found)
    assert "no chain" in str(found) and "compiling" in str(found)
    counted = sum(stage.gradients for stage in found.job.stages.values())
    assert counted > found.job.gradients > 0
    assert np.isnan(found.estimate.rhat).all()
    draws = found.to_arviz().posterior
    assert abs(float(draws["x"].mean()) - normal_truth()[:3].mean()) < 0.1
    assert len(found.plot().axes) == 2


def test_a_call_compiles_little_and_a_second_one_nothing():
    traced, compiled = [], []

    def density(x):
        traced.append(1)
        return nearly_normal(x)

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        counts = []
        for key, relative in ((0, 1e-3), (1, 1e-4), (jax.random.key(2), 1e-3)):
            swindles.estimate(density, jnp.ones(3), moments, key, relative=relative)
            counts.append((len(compiled), len(traced)))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert 0 < counts[0][0] <= 20 and 0 < counts[0][1] <= 6
    assert counts[1] == counts[0], "another key and goal"
    assert counts[2][1] == counts[0][1]


@pytest.mark.slow
def test_points_go_on_to_the_same_bits(tmp_path):
    """A run that is saved and taken up again ends as one that never stopped."""
    file, options = tmp_path / "run.npz", {"scheme": "importance", "seconds": None}
    goal = {"relative": 5e-5, **options}
    whole = swindles.estimate(nearly_normal, jnp.zeros(3), moments, 3, **goal)
    assert len(whole.job.run.pairs) > 1
    first = {"relative": 0.5, **options}
    begun = swindles.estimate(
        nearly_normal, jnp.zeros(3), moments, 3, file=file, **first
    )
    assert len(begun.job.run.pairs) == 1 and load(file).names == begun.names
    rest = swindles.estimate(nearly_normal, jnp.zeros(3), moments, 3, file=file, **goal)
    np.testing.assert_array_equal(rest.estimate.mean, whole.estimate.mean)
    np.testing.assert_array_equal(rest.estimate.mcse, whole.estimate.mcse)
    again = load(file, nearly_normal, jnp.zeros(3), moments)
    np.testing.assert_array_equal(again.estimate.mcse, whole.estimate.mcse)
    further = again.resume(relative=3e-5, seconds=5.0)
    assert len(further.job.run.pairs) >= len(whole.job.run.pairs)
    with pytest.raises(ValueError, match=r"another.*statistics"):
        other = lambda x: {"mean": x, "square": x**4}  # noqa: E731
        swindles.estimate(nearly_normal, jnp.zeros(3), other, 3, file=file, **goal)


@pytest.mark.slow
def test_seconds_bound_the_whole_call():
    begin = time.perf_counter()
    found = swindles.estimate(
        nearly_normal,
        jnp.zeros(3),
        moments,
        5,
        relative=1e-9,
        seconds=3,
        dtype="float64",
    )
    assert not found.reached and time.perf_counter() - begin < 20


def quadrature(log_p, statistic, low, high):
    x = np.linspace(low, high, 400_001)
    weights = np.exp(log_p(x) - log_p(x).max())
    return (weights * statistic(x)).sum() / weights.sum()


def square(x):
    return -(x**2) / 2


# A log density, where to start, a statistic, its mean, and the least that must be said.
AWKWARD = {
    "jump": (
        lambda x: bell(x) - 0.5 * (x[0] > 2),
        jnp.zeros(1),
        lambda x: x,
        quadrature(lambda x: square(x) - 0.5 * (x > 2), lambda x: x, -9, 9),
        "jumps by 0.5",
    ),
    "box": (
        lambda x: jnp.where(jnp.abs(x).max() < 3.9, bell(x), -jnp.inf),
        jnp.zeros(5),
        lambda x: x**2,
        quadrature(square, lambda x: x**2, -3.9, 3.9),
        "cut off",
    ),
    "cut": (
        lambda x: jnp.where(x[0] < 3.2, bell(x), -jnp.inf),
        jnp.zeros(1),
        lambda x: x,
        quadrature(square, lambda x: x, -9, 3.2),
        "cut off",
    ),
    "uniform": (
        lambda x: jnp.where(jnp.abs(x).max() < 1, 0.0 * x.sum(), -jnp.inf),
        jnp.zeros(2),
        lambda x: x**2,
        1 / 3,
        "cut off",
    ),
    "rare": (bell, jnp.zeros(1), lambda x: x > 4.5, stats.norm.sf(4.5), ""),
    "steps": (
        bell,
        jnp.zeros(1),
        lambda x: (x / 4.2).astype(int) ** 2,
        2 * stats.norm.sf(4.2),
        "",
    ),
    "large constant": (lambda x: 1e8 + bell(x - 1), jnp.zeros(2), None, 1.0, ""),
    "far start": (lambda x: bell((x - 1e3) / 0.01), jnp.zeros(2), None, 1e3, ""),
    "two modes": (two_modes, jnp.full(2, 0.5), None, 0.0, "mixture"),
    "far modes": (
        lambda x: jnp.logaddexp(jnp.log(0.7) + bell(x), jnp.log(0.3) + bell(x - 20)),
        jnp.zeros(1),
        None,
        6.0,
        "mixture",
    ),
    "ten dimensions": (
        lambda x: jnp.logaddexp(jnp.log(0.7) + bell(x), jnp.log(0.3) + bell(x - 4)),
        jnp.zeros(10),
        lambda x: x[:2],
        1.2,
        "mixture",
    ),
    "kink": (lambda x: -jnp.abs(x[0] - 3) + bell(x), jnp.zeros(1), None, None, ""),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_targets_are_right_and_trusted(name):
    density, position, statistic, truth, words = AWKWARD[name]
    for key in range(3):
        found = swindles.estimate(density, position, statistic, key)
        assert found.trusted, str(found)
        assert words in str(found)
        if truth is not None:
            error = np.abs(found.estimate.mean - truth)
            assert (error < 4 * found.estimate.mcse).all(), (key, str(found))


@pytest.mark.slow
def test_what_nobody_can_know_is_flagged():
    """The root of a Cauchy variable has a mean, but no variance."""

    def cauchy(x):
        return -jnp.log1p(x[0] ** 2)

    def root(x):
        return jnp.sqrt(jnp.abs(x))

    found = swindles.estimate(cauchy, jnp.zeros(1), root, 1, seconds=10)
    assert not found.trusted and "too heavy" in " ".join(found.warnings)


# Other coordinates.


EFFECT = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
ERROR = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])


def centred_schools():
    """Eight schools, as everybody writes them at first: a funnel."""
    numpyro = pytest.importorskip("numpyro")
    dist = numpyro.distributions
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, ERROR), obs=EFFECT)


def school_statistics(values):
    return {"mu": values["mu"], "log tau": jnp.log(values["tau"]), **values}


@cache
def schools_by_quadrature():
    """Means of log tau, mu and theta: theta is integrated out, the rest is a grid."""
    mu = np.linspace(-30, 40, 701)[:, None, None]
    log_tau = np.linspace(-14, 7, 1401)[None, :, None]
    variance = np.exp(2 * log_tau)
    log_likelihood = stats.norm.logpdf(EFFECT, mu, np.sqrt(variance + ERROR**2)).sum(2)
    prior = stats.norm.logpdf(mu, 0, 5) + log_tau
    prior = prior + stats.halfcauchy.logpdf(np.exp(log_tau), 0, 5)
    weight = np.exp(log_likelihood + prior[..., 0] - np.max(log_likelihood))
    weight /= weight.sum()
    pull = variance / (variance + ERROR**2)
    theta = (weight[..., None] * (mu + pull * (EFFECT - mu))).sum((0, 1))
    return {
        "log tau": (weight * log_tau[..., 0]).sum(),
        "mu": (weight * mu[..., 0]).sum(),
        "theta": theta,
    }


@pytest.mark.slow
def test_a_funnel_is_right_and_trusted_in_other_coordinates(tmp_path):
    """Over three keys; and a run in other coordinates goes on from its file."""
    model, truth = swindles.from_numpyro(centred_schools), schools_by_quadrature()
    for key in range(3):
        options = {"statistics": school_statistics, "key": key, "relative": 0.01}
        file = tmp_path / f"{key}.npz"
        report = swindles.estimate(model, **options, file=file)
        assert report.trusted and report.reached and report.job.whitened
        for name, value in truth.items():
            score = (np.asarray(report.mean[name]) - value) / report.mcse[name]
            assert np.abs(score).max() < 4.5
    again = load(file, model, statistics=school_statistics)
    np.testing.assert_array_equal(again.estimate.mean, report.estimate.mean)
    further, same = (each.resume(relative=0.004) for each in (again, report))
    assert further.estimate.num_draws > report.estimate.num_draws
    np.testing.assert_array_equal(further.estimate.mean, same.estimate.mean)
    called = swindles.estimate(model, **options | {"relative": 0.004}, file=file)
    np.testing.assert_array_equal(called.estimate.mean, same.estimate.mean)
    assert further.trusted and set(again.to_arviz().posterior) == {"mu", "tau", "theta"}


# Steps that are too large for the tails.


def test_finer_steps_find_nothing_new_where_the_run_is_right(plain_report):
    job, latent = plain_report.job, plain_report.problem.through(plain_report.transport)
    with estimation.precision_of(plain_report.problem):
        assert estimation.further_with_finer_steps(job, latent) == ""


def rosenbrock(x):
    """x[0] is normal; the farther out, the steeper the valley around its square."""
    return -5.0 * (x[1] - x[0] ** 2) ** 2 - 0.05 * (x[0] - 1) ** 2


def plain_job(step_size, leaps, start_at):
    """A run of plain HMC on Rosenbrock's valley, of 300 steps."""
    problem = make_problem(Model(rosenbrock, jnp.zeros(2)))
    algorithm = SCHEMES["plain"].build(hmc(step_size, leaps), problem.logdensity)
    plan = make_plan("plain")._replace(beta=np.zeros((0, 2)), center=np.zeros(2))
    plan = plan._replace(shared_variance=np.zeros(2), rounding=np.full(2, 1e-7))
    states = start(algorithm, jnp.asarray(start_at, jnp.float32))
    choice = Choice(plan, step_size, leaps, states, {}, 0)
    unit = Affine(jnp.zeros(2), jnp.ones(2))
    job = make_job(jax.random.key(5), choice, ENDLESS, unit, FINDINGS)
    engine = Engine(job, problem)
    return take(engine.begin(job), engine, 30), problem


@pytest.mark.slow
def test_steps_too_large_for_the_ends_are_seen():
    """With steps of 0.06 the valley is too steep beyond x[0] = 5.2."""
    rng = np.random.default_rng(2)
    x = 1 + np.sqrt(10) * rng.normal(size=128)
    everywhere = np.stack([x, x**2 + np.sqrt(0.1) * rng.normal(size=128)], -1)
    job, problem = plain_job(0.06, 40, np.zeros((128, 2)))
    assert job.draws[..., 0].max() < 8, "of 3840 independent draws: 11"
    assert estimation.further_with_finer_steps(job, problem) != ""
    job, problem = plain_job(0.015, 160, everywhere)
    assert job.draws[..., 0].max() > 9
    assert estimation.further_with_finer_steps(job, problem) == ""


@pytest.mark.slow
def test_a_log_density_without_digits_is_flagged():
    def density(x):
        return 1e8 - 0.5 * x @ x

    single, double = (
        swindles.estimate(
            density, jnp.full(1, 0.3), jnp.square, scheme="importance", dtype=kind
        )
        for kind in ("float32", "float64")
    )
    assert any("rounding changes the log density" in w for w in single.warnings)
    assert double.trusted and abs(double.mean[0] - 1) < 1e-6


@pytest.fixture(scope="module")
def plain_report():
    return swindles.estimate(
        lambda x: -jnp.sum(jnp.cosh(x)), jnp.zeros(1), scheme="plain", relative=0.02
    )
