"""The paper's experiments: what is run, what is kept, and the committed results."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student_t

from swindles import experiments
from swindles.experiments import FAMILIES, SCHEMES, SIZES, Job, Size
from swindles.pipeline import as_table, by_repeat, fingerprint, read_rows, table_path

BOOK = Path(__file__).parents[1] / "book" / "results"
SMALL = Size(32, 60, 2)
STATISTICS = ("mean", "variance")


def rows_of(sampler, scheme, size=SMALL, repeat=0):
    job = Job("logistic", sampler, scheme, "published", repeat)
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


def test_settings_come_from_the_right_place():
    job = Job("logistic", "hmc", "control", "published", 3)
    assert experiments.settings_of(job, {}) == (0.577, 3)
    tuned = {"logistic-hmc-control-tuned-0": [{"step_size": "0.2", "leaps": "7"}]}
    assert experiments.settings_of(job._replace(settings="tuned"), tuned) == (0.2, 7)


@pytest.mark.parametrize(
    ("sampler", "scheme", "evaluations"),
    [("hmc", "plain", 1), ("hmc", "cva", 2 * 4), ("mala", "antithetic", 2)],
)
def test_rows_of_a_run(sampler, scheme, evaluations):
    rows = rows_of(sampler, scheme)
    assert rows["statistic"].tolist() == ["mean"] * 25 + ["variance"] * 25
    assert rows["dimension"].tolist() == 2 * list(range(25))
    assert (rows["gradients"] == 32 * 60 * evaluations).all()
    assert np.isfinite(rows["rho_control"]).all() == (scheme == "cva")
    assert np.isfinite(rows["decoupling_antithetic"]).all() == (scheme != "plain")
    # The map is good: what Q says of means and variances is near.
    known = experiments.prepare("logistic")[1]
    away = np.abs(rows["estimate"] - known.mean) / np.sqrt(rows["mcse"] ** 2 + 1e-4)
    assert away.max() < 5
    ess = (rows["ess"] * rows["mcse"] ** 2)[:25]  # the posterior variance
    np.testing.assert_allclose(ess, rows["estimate"][25:], rtol=0.5)


def test_repeats_differ_and_are_reproducible():
    first, again, other = (rows_of("hmc", "control", repeat=r) for r in (0, 0, 1))
    np.testing.assert_array_equal(first["estimate"], again["estimate"])
    assert (first["estimate"] != other["estimate"]).all()


# Predictions


def test_swindled_predictions_keep_their_mean_and_lose_what_g_explains():
    rng = np.random.default_rng(0)
    g = rng.normal(3, 1, (20, 10, 4))
    known = np.full(4, 2.5)
    exact = experiments.swindled(1 + 2 * g, g, known)
    np.testing.assert_allclose(exact, 1 + 2 * 2.5)
    noise = rng.normal(size=g.shape)
    rest = experiments.swindled(1 + 2 * g + noise, g, known)
    assert np.abs(rest.mean((0, 1)) - 6).max() < 0.5 and rest.std() < 1.3
    np.testing.assert_array_equal(experiments.swindled(g, None, known), g)
    # Coefficients come from the other half: an outlier does not explain itself.
    f = np.zeros((20, 10, 4))
    f[:, 0] = g[:, 0] - 3
    half = experiments.swindled(f, g, known)[:, :5]
    np.testing.assert_array_equal(half, f[:, :5])


def test_held_out_loss():
    loss = experiments.held_out_loss(np.array([[0.5, 0.25], [1.2, -0.1]]))
    expected = [np.log(8) / 2, np.log(1e6) / 2]
    np.testing.assert_allclose(loss, expected)


def test_predictions_of_a_short_run():
    tuned = {
        f"logistic-hmc-{s}-tuned-0": [{"step_size": 0.3, "leaps": 5}] for s in SCHEMES
    }
    found = {}
    for scheme in ("plain", "cva"):
        job = Job("held-out", "hmc", scheme, "tuned", 0)
        found[scheme] = as_table(experiments.measure_prediction(tuned, SMALL, job))
    assert found["plain"]["models"].tolist() == [2**k for k in range(9)]
    assert found["cva"]["models"].tolist() == [4 * 2**k + 1 for k in range(9)]
    plain, cva = found["plain"], found["cva"]
    assert plain["loss"][0] - cva["everything"][0] > 10 * abs(
        cva["loss"][0] - cva["everything"][0]
    )
    np.testing.assert_allclose(plain["everything"], cva["everything"], atol=1e-3)
    assert (cva["low"] <= cva["loss"]).all() and (cva["loss"] <= cva["high"]).all()


def test_traces_are_coupled():
    job = Job("logistic", "hmc", "cva", "published", 0)
    rows = as_table(experiments.measure_traces({}, SMALL, job))
    assert len(rows["step"]) == 30 * 16
    assert np.corrcoef(rows["plus"], rows["control"])[0, 1] > 0.9
    np.testing.assert_allclose(rows["control"], rows["mirrored"], rtol=0.2, atol=1e-3)


# From end to end


def test_perform_and_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiments, "FAMILIES", {"mala": FAMILIES["mala"]})
    few = {name: SCHEMES[name] for name in ("plain", "control")}
    monkeypatch.setattr(experiments, "SCHEMES", few)
    monkeypatch.setattr(
        experiments, "SIZES", {"test": {"logistic": Size(16, 20, 2, 16, 1e5)}}
    )
    monkeypatch.setattr(experiments, "measure_prediction", lambda *_: [{"loss": 1}])
    monkeypatch.setattr(experiments, "measure_traces", lambda *_: [{"step": 1}])
    with pytest.raises(ValueError, match="SWINDLES_RECOMPUTE=1"):
        experiments.results("efficiency", "test", tmp_path)
    monkeypatch.setenv("SWINDLES_RECOMPUTE", "1")
    table = experiments.results("efficiency", "test", tmp_path)
    assert len(table["ess"]) == 2 * 2 * 50 and np.isfinite(table["ess"]).all()
    tuned = as_table(read_rows(table_path(tmp_path / "test", "settings")))
    assert set(table["step_size"]) == set(tuned["step_size"])
    monkeypatch.delenv("SWINDLES_RECOMPUTE")
    capsys.readouterr()
    experiments.results("efficiency", "test", tmp_path)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(experiments, "fingerprint", lambda _: "other")
    experiments.results("efficiency", "test", tmp_path)
    assert "not of this code" in capsys.readouterr().out


# The committed results


@pytest.fixture(scope="module")
def laptop():
    return as_table(read_rows(table_path(BOOK / "laptop", "efficiency")))


def test_committed_results_are_complete_and_of_this_code(laptop):
    jobs = experiments.efficiency_jobs(SIZES["laptop"])
    dims = {"logistic": 25, "item": 501, "sparse": 51}
    expected = [job.name for job in jobs for _ in range(2 * dims[job.posterior])]
    assert laptop["job"].tolist() == expected
    assert min(size.repeats for size in SIZES["laptop"].values()) >= 5
    for name in ("settings", "efficiency", "prediction", "traces"):
        rows = read_rows(table_path(BOOK / "laptop", name))
        assert {row["code"] for row in rows} == {fingerprint(experiments.MODULES)}
    for column in ("estimate", "mcse", "ess", "rhat", "seconds", "gradients"):
        assert np.isfinite(laptop[column]).all(), column
    for column in ("ess", "mcse", "seconds"):
        assert (laptop[column] > 0).all(), column


def pairs(table):
    names = ("posterior", "sampler", "scheme", "settings", "statistic")
    keys = sorted(set(zip(*(table[name].tolist() for name in names), strict=True)))
    return [dict(zip(names, key, strict=True)) for key in keys]


def test_stated_errors_are_the_real_ones(laptop):
    """The spread over repeats, against what each repeat says of its error."""
    scores, limits, ratios = [], [], []
    for pair in pairs(laptop):
        estimate, stated = (by_repeat(laptop, n, **pair) for n in ("estimate", "mcse"))
        repeats = len(estimate)
        square = (estimate - estimate.mean(0)) ** 2 * repeats / (repeats - 1)
        each = (square / (stated**2).mean(0)).mean(1)
        error = each.std(ddof=1) / np.sqrt(repeats)
        ratios.append(each.mean())
        scores.append((each.mean() - 1) / error)
        limits.append(student_t.ppf(1 - 0.01 / 2 / 96, repeats - 1))
    assert len(ratios) == 3 * 16 * 2
    assert (np.abs(scores) < limits).all()
    assert 0.8 < np.exp(np.log(ratios).mean()) < 1.25


# ESS per step that the authors' program gives at their step sizes, medians.
THEIRS = {
    ("logistic", "mean"): (0.19, 2.1, 16.8, 72.3),
    ("logistic", "variance"): (0.33, 0.35, 12.7, 80.0),
    ("item", "mean"): (0.39, 15.3, 14.5, 12.7),
    ("item", "variance"): (0.55, 0.58, 14.7, 13.0),
}


@pytest.mark.parametrize(("posterior", "statistic"), THEIRS)
def test_efficiency_at_the_published_settings_is_the_authors(
    laptop, posterior, statistic
):
    for scheme, theirs in zip(SCHEMES, THEIRS[posterior, statistic], strict=True):
        which = {
            "posterior": posterior,
            "sampler": "hmc",
            "scheme": scheme,
            "settings": "published",
            "statistic": statistic,
        }
        size = SIZES["laptop"][posterior]
        ess = by_repeat(laptop, "ess", **which).mean(0) / size.chains / size.steps
        assert 1 / 1.15 < np.median(ess) / theirs < 1.15, (scheme, np.median(ess))
    if posterior == "logistic":
        seconds = by_repeat(laptop, "seconds", **which)
        assert 1000 / size.steps * seconds.min() < 17 / 2  # CVA, 256 x 1000


def test_posteriors_agree_between_samplers(laptop):
    """Whatever the sampler and the scheme, the same posterior."""
    for posterior in ("logistic", "item"):
        for statistic in STATISTICS:
            best = by_repeat(
                laptop,
                "estimate",
                posterior=posterior,
                sampler="hmc",
                scheme="cva",
                settings="tuned",
                statistic=statistic,
            ).mean(0)
            for pair in pairs(laptop):
                if (pair["posterior"], pair["statistic"]) == (posterior, statistic):
                    mean, mcse = (
                        by_repeat(laptop, n, **pair) for n in ("estimate", "mcse")
                    )
                    if pair["sampler"] != "rwm":
                        score = (mean.mean(0) - best) / np.sqrt(
                            (mcse**2).mean(0) / len(mcse)
                        )
                        assert np.sqrt(np.mean(score**2)) < 2, pair
