"""The front door: right answers, honest errors, and words when there are none."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swindles
from swindles import transport
from swindles.blocks import add_block, estimate_rows, is_reached, make_flow, make_goal
from swindles.estimate import (
    MOST_LINES,
    Report,
    as_key,
    chain_doubts,
    describe_model,
    digits,
    launch,
    load,
    remarks,
    sail,
)
from swindles.models import Model, flatten
from swindles.pilot import SCHEMES
from swindles.targets import skewed

door = sys.modules["swindles.estimate"]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "book" / "results"
TARGET = skewed(3)
TRUTH = np.concatenate([TARGET.truth["mean"], TARGET.truth["square"]])
CHAINS = 64


def moments(x):
    return {"mean": x, "square": x**2}


def logdensity(x):
    return TARGET.logdensity(x)


FLAT = flatten(Model(logdensity, jnp.zeros(3)), moments)


@pytest.fixture(scope="module")
def launched():
    """A run before its first step, and its map."""
    goal = make_goal(FLAT, None, 0.001, 60.0, None)
    return launch(as_key(5), FLAT, None, goal, ["antithetic"], CHAINS)


def sailed(launched, **budget):
    """So many gradients of a run."""
    goal = make_goal(FLAT, None, 1e-6, None, None)._replace(**budget)
    about = describe_model(FLAT)
    return sail(launched[0], FLAT, launched[1], goal, None, about)


@pytest.fixture(scope="module")
def report(launched):
    """A report on thirty blocks."""
    return sailed(launched, gradients=blocks_of(launched, 30))


def blocks_of(launched, number):
    """The gradients in so many of the first blocks."""
    return 10 * number * CHAINS * launched[0].plan.gradients


def test_answer_is_right(report):
    error = np.abs(report.estimate.mean - TRUTH) / report.estimate.mcse
    assert error.max() < 4
    assert report.trusted, report.warnings
    assert not report.reached, "of a millionth nobody can dream"


@pytest.mark.parametrize("scheme", ["cva", "antithetic+stein"])
def test_answer_is_right_whatever_the_scheme(scheme, launched):
    found = swindles.estimate(
        logdensity,
        jnp.zeros(3),
        moments,
        11,
        relative=0.001,
        scheme=scheme,
        chains=CHAINS,
        transport=launched[1],
    )
    assert found.run.plan.scheme == scheme and found.trusted and found.reached
    assert (np.abs(found.estimate.mean - TRUTH) < 4 * found.estimate.mcse).all()
    assert found.estimate.ess.max() > 1.5 * found.estimate.num_draws


REPEATS, ASKED = 20, 0.002


@pytest.fixture(scope="module")
def repeats(launched):
    """Twenty runs of one plan to the accuracy asked for: (estimates, runs, goal)."""
    run, to_x = launched
    goal = make_goal(FLAT, None, ASKED, None, None)
    flow, found = make_flow(run, FLAT, to_x), []
    for seed in range(REPEATS):
        key = np.asarray(jax.random.key_data(jax.random.key(seed)))
        now = run._replace(key=key)
        for _ in range(3):  # to forget the common start
            now = add_block(now, flow)
        now = now._replace(rows=run.rows, draws=run.draws)
        done = False
        while not done:
            now = add_block(now, flow)
            estimate = estimate_rows(now)
            done = is_reached(now, estimate, goal)
        found.append(estimate)
    return found, goal


def test_stated_error_is_the_real_one(repeats):
    estimates, _ = repeats
    score = np.array([(e.mean - TRUTH) / e.mcse for e in estimates])
    assert np.abs(score).max() < 4.5
    assert 0.85 < np.sqrt((score**2).mean()) < 1.15


def test_accuracy_asked_for_is_delivered_and_not_much_more(repeats):
    estimates, goal = repeats
    sd = np.sqrt(estimates[0].variance)
    error = np.array([e.mean - TRUTH for e in estimates])
    real = np.sqrt((error**2).mean(0))
    assert (real < 1.1 * goal.asked(sd)).all()
    stated = [e.mcse / goal.asked(np.sqrt(e.variance)) for e in estimates]
    too_long = [1 / each.max() ** 2 for each in stated]
    assert max(too_long) < 2 and min(too_long) >= 1


def test_going_on_is_the_same_as_not_stopping(launched):
    whole = sailed(launched, gradients=blocks_of(launched, 12))
    half = sailed(launched, gradients=blocks_of(launched, 7))
    rest = half.resume(gradients=blocks_of(launched, 5), seconds=None)
    assert rest.run.steps == whole.run.steps == 120
    assert np.array_equal(rest.estimate.mean, whole.estimate.mean)
    assert np.array_equal(rest.estimate.mcse, whole.estimate.mcse)
    assert np.array_equal(rest.run.rows.total, whole.run.rows.total)
    with pytest.raises(ValueError, match="relative"):
        half.resume(relative=0.0)


def test_ctrl_c_gives_what_there_is(launched, monkeypatch, tmp_path):
    calls = []

    def impatient(run, flow):
        calls.append(0)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return add_block(run, flow)

    monkeypatch.setattr(door, "add_block", impatient)
    run, to_x = launched
    goal = make_goal(FLAT, None, 1e-6, None, blocks_of(launched, 9))
    file = tmp_path / "run.npz"
    found = sail(run, FLAT, to_x, goal, file, describe_model(FLAT))
    assert found.run.steps == 50
    monkeypatch.undo()
    rest = load(file, logdensity, jnp.zeros(3), moments).resume(
        relative=1e-6, gradients=blocks_of(launched, 4), seconds=None
    )
    whole = sailed(launched, gradients=blocks_of(launched, 9))
    assert np.array_equal(rest.estimate.mean, whole.estimate.mean)


def test_ctrl_c_before_the_first_block_is_ctrl_c(launched, monkeypatch):
    def now(run, flow):
        raise KeyboardInterrupt

    monkeypatch.setattr(door, "add_block", now)
    with pytest.raises(KeyboardInterrupt):
        sailed(launched, gradients=1e9)


CALL = """
import sys
import jax.numpy as jnp
import swindles
sys.modules["swindles.estimate"].SAVE_EVERY = 0.0
report = swindles.estimate(
    lambda x: jnp.sum(2 * x - jnp.exp(x)), jnp.zeros(2), key=7, relative=1e-7,
    seconds=None, gradients=4e6, scheme="antithetic", chains=32, file=sys.argv[1]
)
print(report.estimate.mean.tobytes().hex(), report.estimate.mcse.tobytes().hex())
"""


def call(file):
    return subprocess.Popen(
        [sys.executable, "-c", CALL, str(file)], stdout=subprocess.PIPE, text=True
    )


def test_a_killed_run_ends_in_the_same_bits(tmp_path):
    whole = call(tmp_path / "whole.npz").communicate()[0]
    file, seen, victim = tmp_path / "killed.npz", set(), call(tmp_path / "killed.npz")
    while len(seen) < 4:  # the pilot, and three blocks at least
        if file.exists():
            seen.add(file.stat().st_mtime_ns)
        assert victim.poll() is None
        time.sleep(0.002)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    before = load(file).run.steps
    rest = call(file).communicate()[0]
    assert len(whole) > 20 and rest == whole
    assert 0 < before < load(file).run.steps


def test_a_file_of_another_run_is_refused(launched, tmp_path):
    file = tmp_path / "run.npz"
    found = sailed(launched, gradients=blocks_of(launched, 4))
    found.save(file)
    with pytest.raises(ValueError, match="another chains and key"):
        swindles.estimate(logdensity, jnp.zeros(3), moments, 1, file=file)
    with pytest.raises(ValueError, match="another logdensity"):
        load(file, lambda x: 2 * logdensity(x), jnp.zeros(3), moments)
    with pytest.raises(ValueError, match="another names"):
        load(file, logdensity, jnp.zeros(3))


def test_files_can_be_looked_at_without_the_model(report, tmp_path):
    file = tmp_path / "run.npz"
    report.save(file)
    seen = load(file)
    assert isinstance(seen, Report) and seen.names == FLAT.names
    assert np.array_equal(seen.estimate.mean, report.estimate.mean)
    assert seen.mean["mean[0]"] == report.estimate.mean[0]
    for action in (seen.resume, seen.to_arviz):
        with pytest.raises(ValueError, match="model"):
            action()


def test_names_and_shapes_survive(report):
    assert sorted(report.mean) == ["mean", "square"]
    assert report.mean["square"].shape == report.mcse["mean"].shape == (3,)
    assert report.rhat["mean"].shape == report.ess["mean"].shape == (3,)
    assert np.allclose(report.sd["mean"] ** 2, np.pi**2 / 6 - 1, rtol=0.1)


def test_text_and_html_say_it_all(report):
    text = str(report)
    assert repr(report) == text
    for name in [*FLAT.names, "error", "R-hat", "antithetic", "Not there yet"]:
        assert name in text
    assert "Do not trust" not in text
    doubtful = report._replace(warnings=["a < b"], names=["<i>", *FLAT.names[1:]])
    assert "Do not trust" in str(doubtful) and "- a < b" in str(doubtful)
    page = doubtful._repr_html_()
    assert "&lt;i&gt;" in page and "a &lt; b" in page and page.count("<tr>") == 7


def test_long_tables_are_cut(report):
    times = 20
    parts = {
        name: np.tile(getattr(report.estimate, name), times)
        for name in ("mean", "mcse", "ess", "rhat", "variance")
    }
    long = report._replace(
        estimate=report.estimate._replace(**parts), names=FLAT.names * times
    )
    lines = str(long).splitlines()
    assert len(lines) < MOST_LINES + 6
    assert f"... and {6 * times - MOST_LINES} more" in lines


def test_digits_are_those_that_are_known():
    cases = [(0.123456, 0.0012), (-5.0, 1.5), (1e6, 2e4), (2.0, np.nan)]
    assert [digits(*case) for case in cases] == ["0.1235", "-5.0", "1000000", "2"]


def test_exports(report):
    table = report.to_dict()
    assert table["mean"] == report.estimate.mean.tolist()
    assert table["scheme"] == "antithetic" and table["warnings"] == []
    frame = report.to_pandas()
    assert list(frame.index) == FLAT.names
    assert np.allclose(frame["mcse"], report.estimate.mcse)
    data = report.to_arviz()
    draws = data.posterior["x"]
    assert draws.shape == (CHAINS, len(report.run.draws), 3)
    assert np.allclose(draws.mean(("chain", "draw")), TRUTH[:3], atol=0.1)
    assert np.allclose(data.posterior.attrs["mean"], report.estimate.mean)


def test_a_missing_library_is_named(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"swindles\[pandas\]"):
        report.to_pandas()


def test_plot_shows_errors_that_fall_and_coupled_chains(report):
    figure = report.plot()
    errors, chains = figure.axes
    x, y = errors.lines[0].get_data()
    assert len(x) == len(report.run.history) and y[-1] < y[0] and (np.diff(x) > 0).all()
    shown = [line.get_ydata() for line in chains.lines]
    assert len(shown) == 2 and np.corrcoef(*shown)[0, 1] < -0.5


def test_a_map_of_ones_own_is_used(launched):
    _, to_x = launched
    design = transport.Design(flows=1, width=4, depth=1)
    flow = transport.Flow(to_x, transport.build(design, 3, jax.random.key(0)))
    found = swindles.estimate(
        logdensity, jnp.zeros(3), key=3, transport=flow, relative=0.01, chains=CHAINS
    )
    assert found.transport is flow and found.run.transport is None
    assert (np.abs(found.estimate.mean - TRUTH[:3]) < 4 * found.estimate.mcse).all()


def test_double_precision():
    with jax.enable_x64(True):
        found = swindles.estimate(
            lambda x: -jnp.sum(x**4), jnp.zeros(2), moments, mcse=0.002
        )
        assert found.reached and found.estimate.mcse.max() <= 0.002
        assert found.run.states["plus"].position.dtype == np.float64
        assert found.trusted and (found.run.plan.rounding < 1e-14).all()
    from scipy.special import gamma

    truth = gamma(3 / 4) / gamma(1 / 4)
    error = np.abs(found.mean["square"] - truth) / found.mcse["square"]
    assert (error < 4).all()


def bell(x):
    return -jnp.sum(x**2) / 2


def two_modes(x):
    return jnp.logaddexp(bell(x - 4), bell(x + 4))


def cut(x):
    return jnp.where(jnp.sum(x) > 1.5, jnp.nan, bell(x))


def late(x):
    return jnp.log(x[0] + 2)


# A log density, its statistic, and a word of the doubt it raises.
HOSTILE = {
    "flat direction": (lambda x: -(x[0] ** 2), None, "R-hat|tails|moving"),
    "two modes": (two_modes, None, "R-hat"),
    "Cauchy tails": (lambda x: -jnp.sum(jnp.log1p(x**2)), None, "tails|R-hat"),
    "NaN later": (cut, None, "diverge"),
    "NaN statistic later": (bell, late, "not finite"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_targets_are_flagged(name):
    target, statistic, words = HOSTILE[name]
    found = swindles.estimate(
        target, jnp.full(2, 0.5), statistic, 2, relative=0.05, seconds=3
    )
    assert not found.trusted
    text = " ".join(found.warnings)
    assert any(word in text for word in words.split("|")), text


REFUSED = {
    "improper": ((jnp.sum, jnp.zeros(2)), {}, "no posterior|proper"),
    "constant": ((lambda x: 0 * jnp.sum(x), jnp.zeros(2)), {}, "posterior"),
    "zero chains": ((bell, jnp.zeros(2)), {"chains": 0}, "chains are too few"),
    "one chain": ((bell, jnp.zeros(2)), {"chains": 1}, "16 or more"),
    "huge": ((bell, jnp.zeros(100_000)), {}, "use 20 chains"),
    "scheme": ((bell, jnp.zeros(2)), {"scheme": "best"}, "say one of"),
    "no position": ((bell,), {}, "position"),
    "mcse": ((bell, jnp.zeros(2)), {"mcse": -1.0}, "mcse"),
    "mcse shape": ((bell, jnp.zeros(2)), {"mcse": jnp.ones(3)}, "3 entries"),
    "seconds": ((bell, jnp.zeros(2)), {"seconds": -1}, "seconds"),
    "wrong shape": ((lambda x: x**2, jnp.zeros(2)), {}, "take a sum"),
    "numpy": ((lambda x: np.sum(np.asarray(x)), jnp.zeros(2)), {}, "jax.numpy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_in_words(name):
    arguments, options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        swindles.estimate(*arguments, **options)


def test_compiled_programs_are_let_go_now_and_then(monkeypatch):
    calls = []
    monkeypatch.setattr(jax, "clear_caches", lambda: calls.append(0))
    for _ in range(40):
        door.tidy()
    assert len(calls) == 2


def test_keys_of_all_kinds():
    new = as_key(3)
    assert jnp.array_equal(jax.random.key_data(new), jax.random.PRNGKey(3))
    for key in (jax.random.PRNGKey(3), jax.random.key(3)):
        assert jnp.array_equal(
            jax.random.key_data(as_key(key)), jax.random.key_data(new)
        )


def test_doubts_about_chains(report):
    run = report.run
    assert chain_doubts(run) == []
    rows = run.rows
    accepted = rows.accepted.copy()
    accepted[len(accepted) // 2 :, 1, :3] = 0  # of the second of two chains
    cases = {
        "3 of 64 chains are stuck": {"accepted": accepted},
        "diverge": {"divergent": rows.divergent + 10},
        "only 29 decouplings": {
            "decoupled": rows.decoupled * 0 + np.eye(1, 30)[0] * 29
        },
    }
    for words, change in cases.items():
        if "decouplings" in words:
            change = {"decoupled": np.zeros_like(rows.decoupled)}
            change["decoupled"][0] = 29
        found = chain_doubts(run._replace(rows=rows._replace(**change)))
        assert len(found) == 1 and words in found[0]


def test_remarks(report):
    run, estimate = report.run._replace(pareto_k=0.1), report.estimate
    assert remarks(run, estimate) == []
    plan = run.plan._replace(rounding=estimate.mcse, shared=estimate.mcse**2)
    changed = run._replace(plan=plan, pareto_k=1.0, stuck=2, dropped=80)
    assert len(remarks(changed, estimate)) == 5


# What `python benchmarks/estimate.py` found.


def table(name):
    with (RESULTS / f"estimate_{name}.csv").open() as file:
        return list(csv.DictReader(file))


def column(rows, name):
    return np.array([float(row[name]) for row in rows])


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("eight schools", 10), ("Poisson regression", 7), ("logistic regression", 25)],
)
def test_models_of_others_over_twenty_repeats(model, parameters):
    rows = [row for row in table("repeats") if row["model"] == model]
    assert len(rows) == 20 * parameters
    assert all(row["reached"] == "1" and row["trusted"] == "1" for row in rows)
    mean, mcse, truth = (column(rows, n) for n in ("mean", "mcse", "truth"))
    error = np.hypot(mcse, column(rows, "truth_error"))
    assert (np.abs(mean - truth) < 4 * error).all()
    mean, mcse, asked = (
        x.reshape(20, parameters) for x in (mean, mcse, column(rows, "asked"))
    )
    spread = mean.std(0, ddof=1)
    ratio = np.sqrt((spread**2 / (mcse**2).mean(0)).mean())
    assert 0.85 < ratio < 1.15
    assert np.sqrt((spread**2 / asked.mean(0) ** 2).mean()) < 1.1
    too_long = 1 / (mcse / asked).max(1) ** 2
    assert np.median(column(rows, "steps")) == 80 or np.median(too_long) < 2


def test_never_much_worse_than_plain_hmc():
    rows = table("plain")
    names = {row["posterior"] for row in rows}
    assert len(names) == 8
    for name in names:
        mine = [row for row in rows if row["posterior"] == name]
        best, plain = (
            [row for row in mine if row["asked"] == asked] for asked in ("", "plain")
        )
        assert len(best) == len(plain) >= 3
        # Error times the root of the seconds: the less, the better.
        cost = [
            np.exp(
                np.mean(
                    2 * np.log(column(part, "worst")) + np.log(column(part, "seconds"))
                )
            )
            for part in (best, plain)
        ]
        assert np.sqrt(cost[0] / cost[1]) < 1.2, name


def test_all_schemes_have_been_named_in_the_docstring():
    for name in SCHEMES:
        assert f'"{name}"' in swindles.estimate.__doc__
