"""The paper's experiments: what is run, and what is kept.

`test_results.py` replays a few of them against the results of the book.
"""

from itertools import pairwise

import experiments
import numpy as np
import pytest
from experiments import FAMILIES, PAPER_SCHEMES, SIZES, SamplerJob, Size
from pipeline import as_table, read_rows, table_path, write_rows

SMALL = Size(32, 60, 2)


def rows_of(sampler, scheme, size=SMALL, repeat=0):
    job = SamplerJob("logistic", sampler, scheme, "published", repeat)
    return as_table(experiments.measure_efficiency({}, size, job))


# What is run


def test_jobs_are_all_pairs():
    sizes = {"logistic": Size(8, 8, 3, 16, 1e5), "item": Size(8, 8, 2, 16, 1e5)}
    jobs = experiments.efficiency_jobs(sizes)
    assert len(jobs) == len({job.name for job in jobs}) == 16 * (3 + 2)
    tuned = [job for job in jobs if job.settings == "tuned" and job.repeat == 0]
    assert len({(j.posterior, j.sampler, j.scheme) for j in tuned}) == 2 * 12
    assert {j.sampler for j in jobs if j.settings == "published"} == {"hmc"}
    # Repeats of one pair follow each other: they share a compiled program.
    names = [job[:4] for job in jobs]
    changes = sum(a != b for a, b in pairwise(names))
    assert changes == 2 * 16 - 1
    assert len(experiments.efficiency_jobs(SIZES["wide"])) == 12


def test_only_the_smallest_scale_concludes_nothing(monkeypatch):
    for scale in ("smoke", "laptop", "paper"):
        monkeypatch.setenv("SWINDLES_SCALE", scale)
        assert experiments.is_conclusive() == (scale != "smoke")
        assert experiments.all_pairs(SIZES[scale])  # every scale of the book is there


def test_settings_come_from_the_right_place():
    job = SamplerJob("logistic", "hmc", "control", "published", 3)
    assert experiments.settings_of(job, {}) == (0.577, 3)
    tuned = {"logistic-hmc-control-tuned-0": [{"step_size": "0.2", "leaps": "7"}]}
    assert experiments.settings_of(job._replace(settings="tuned"), tuned) == (0.2, 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "scheme", "evaluations"),
    [
        ("hmc", "cva", 2 * 4),
        ("mala", "antithetic", 2),
    ],
)
def test_rows_of_a_run(sampler, scheme, evaluations):
    rows = rows_of(sampler, scheme)
    assert rows["statistic"].tolist() == ["mean"] * 25 + ["variance"] * 25
    assert rows["dimension"].tolist() == 2 * list(range(25))
    assert (rows["gradients"] == 32 * 60 * evaluations).all()
    assert np.isfinite(rows["rho_control"]).all() == (scheme == "cva")
    assert np.isfinite(rows["decoupling_antithetic"]).all() == (scheme != "plain")
    # The map is good: what Q says of means and variances is near.
    expectation = experiments.prepare("logistic")[1]
    away = np.abs(rows["estimate"] - expectation.mean) / np.sqrt(
        rows["mcse"] ** 2 + 1e-4
    )
    assert away.max() < 5
    ess = (rows["ess"] * rows["mcse"] ** 2)[:25]  # the posterior variance
    np.testing.assert_allclose(ess, rows["estimate"][25:], rtol=0.5)


@pytest.mark.slow
def test_repeats_differ_and_are_reproducible():
    first, again, other = (rows_of("hmc", "control", repeat=r) for r in (0, 0, 1))
    np.testing.assert_array_equal(first["estimate"], again["estimate"])
    assert (first["estimate"] != other["estimate"]).all()


# Predictions


def test_held_out_loss():
    loss = experiments.held_out_loss(np.array([[0.5, 0.25], [1.2, -0.1]]))
    expected = [np.log(8) / 2, np.log(1e6) / 2]
    np.testing.assert_allclose(loss, expected)


@pytest.mark.slow
def test_predictions_of_a_short_run():
    tuned = {
        f"logistic-hmc-{s}-tuned-0": [{"step_size": 0.3, "leaps": 5}]
        for s in PAPER_SCHEMES
    }
    found = {}
    for scheme in ("plain", "cva"):
        job = SamplerJob("held-out", "hmc", scheme, "tuned", 0)
        found[scheme] = as_table(experiments.measure_prediction(tuned, SMALL, job))
    assert found["plain"]["models"].tolist() == [2**k for k in range(9)]
    assert found["cva"]["models"].tolist() == [4 * 2**k + 1 for k in range(9)]
    plain, cva = found["plain"], found["cva"]
    assert plain["loss"][0] - cva["everything"][0] > 10 * abs(
        cva["loss"][0] - cva["everything"][0]
    )
    np.testing.assert_allclose(plain["everything"], cva["everything"], atol=1e-3)
    assert (cva["low"] <= cva["loss"]).all() and (cva["loss"] <= cva["high"]).all()


@pytest.mark.slow
def test_traces_are_coupled():
    job = SamplerJob("logistic", "hmc", "cva", "published", 0)
    rows = as_table(experiments.measure_traces({}, SMALL, job))
    assert len(rows["step"]) == 30 * 16
    assert np.corrcoef(rows["plus"], rows["control"])[0, 1] > 0.9
    np.testing.assert_allclose(rows["control"], rows["mirrored"], rtol=0.2, atol=1e-3)


# From end to end


@pytest.mark.slow
def test_the_command_makes_tables_once(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "FAMILIES", {"mala": FAMILIES["mala"]})
    monkeypatch.setattr(experiments, "PAPER_SCHEMES", ("plain", "control"))
    sizes = {"test": {"logistic": Size(16, 20, 2, 16, 1e5)}}
    monkeypatch.setattr(experiments, "SIZES", sizes)
    monkeypatch.setattr(experiments, "measure_prediction", lambda *_: [{"loss": 1}])
    monkeypatch.setattr(experiments, "measure_traces", lambda *_: [{"step": 1}])
    with pytest.raises(ValueError, match="SWINDLES_SCALE=test make experiments"):
        experiments.results("efficiency", "test", tmp_path)
    command = ["--scale", "test", "--folder", str(tmp_path)]
    experiments.main(command)
    table = experiments.results("efficiency", "test", tmp_path)
    assert len(table["ess"]) == 2 * 2 * 50 and np.isfinite(table["ess"]).all()
    tuned = as_table(read_rows(table_path(tmp_path / "test", "settings")))
    assert set(table["step_size"]) == set(tuned["step_size"])

    def fail(*_):
        raise RuntimeError("done again")

    for name in ("settings", "efficiency", "prediction", "traces"):
        monkeypatch.setattr(experiments, f"measure_{name}", fail)
    experiments.main(command)  # does nothing
    with pytest.raises(RuntimeError, match="done again"):
        experiments.main([*command, "--fresh"])


# What it will cost


def test_gradients_are_counted():
    size = Size(chains=10, steps=5, repeats=2)
    first = SamplerJob("logistic", "hmc", "cva", "published", 0)  # four leapfrog steps
    other = first._replace(repeat=1)
    assert experiments.count_gradients(other, size) == 2 * 10 * (5 + 5) * 4
    assert experiments.count_gradients(first, size) == 2 * 10 * (5 + 5 + 5) * 4
    plain = other._replace(scheme="plain", posterior="held-out")
    assert experiments.count_gradients(plain, size) == 10 * (5 + 5) * 1


def test_cost_counts_what_is_not_done(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiments, "FAMILIES", {"hmc": FAMILIES["hmc"]})
    monkeypatch.setattr(experiments, "PAPER_SCHEMES", ("plain",))
    sizes = {"test": {"item": Size(10, 5, 2)}}  # published settings: four steps
    monkeypatch.setattr(experiments, "SIZES", sizes)
    speed = experiments.Speed(gradients=1.0, gigabytes=2.0)
    monkeypatch.setattr(experiments, "measure_speed", lambda *_: speed)
    monkeypatch.setattr(experiments, "perform", None)  # --cost does nothing
    command = ["--scale", "test", "--folder", str(tmp_path), "--cost"]
    experiments.main(command)
    words = capsys.readouterr().out
    assert "1e+03 gradients" in words and "2.00 GB" in words
    assert f"altogether {1000 / 3600:.1f} hours" in words
    done = [{"job": "item-hmc-plain-published-0", "ess": 1}]
    write_rows(table_path(tmp_path / "test", "efficiency"), done)
    assert experiments.gradients_left("test", tmp_path) == {"item": 400.0}


@pytest.mark.slow
def test_speed_is_measured():
    speed = experiments.measure_speed("logistic", Size(16, 5, 1), seconds=0.1)
    assert 1e2 < speed.gradients < 1e9 and 1e-5 < speed.gigabytes < 1
