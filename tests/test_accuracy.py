"""Error bars and effective sample sizes against processes with known answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arviz_stats.base import array_stats
from scipy.signal import lfilter
from scipy.stats import binom
from scipy.stats import t as student_t

from swindles import accuracy
from swindles.accuracy import (
    Moments,
    add_step,
    beyond_chance,
    correlation,
    decoupling_rate,
    empty_moments,
    heavy_tails,
    rank_rhat,
    split_rhat,
    summarize,
    summarize_trace,
    target_variance,
    trace_moments,
)

SEED = 20201
COEFFICIENTS = [-0.5, 0.0, 0.9]
REPEATS = 200
COVERAGE_REPEATS = 400
MANY = (200, 256)  # steps, chains
FEW = (8000, 4)
TOLERANCE = 0.05  # of the mean estimated ESS


def ar1(rng, coefficient, shape):
    """Stationary AR(1) with unit variance and ESS N (1 - c) / (1 + c)."""
    noise = rng.normal(size=shape) * np.sqrt(1 - coefficient**2)
    start = coefficient * rng.normal(size=(1, *shape[1:]))
    return lfilter([1], [1, -coefficient], noise, axis=0, zi=start)[0]


def repeats(estimate, coefficient, shape, number, seed=SEED):
    """Estimates of many independent data sets, each a component of one trace."""
    rng = np.random.default_rng(seed)
    parts = [estimate(ar1(rng, coefficient, (*shape, 20))) for _ in range(number // 20)]
    return [np.concatenate([p[i] for p in parts]) for i in range(3)] + [parts[0]]


def many_chains(trace):
    return summarize(trace_moments(trace))


@pytest.fixture
def without_rhat(monkeypatch):
    """R-hat takes most of the time of ``summarize_trace``; not all tests look at it."""
    monkeypatch.setattr(accuracy, "rank_rhat", lambda trace: np.ones(trace.shape[-1]))


@pytest.mark.usefixtures("without_rhat")
@pytest.mark.parametrize("coefficient", COEFFICIENTS)
@pytest.mark.parametrize(
    ("estimate", "shape"), [(many_chains, MANY), (summarize_trace, FEW)]
)
def test_ess_of_ar1(estimate, shape, coefficient):
    _, _, ess, _ = repeats(estimate, coefficient, shape, REPEATS)
    # A chain of finite length is a little better than the limit N (1-c)/(1+c).
    steps, chains = shape
    lags = np.arange(1, steps)
    autocorrelation = 1 + 2 * ((1 - lags / steps) * coefficient**lags).sum()
    exact = steps * chains / autocorrelation
    assert ess.mean() == pytest.approx(exact, rel=TOLERANCE)


@pytest.mark.usefixtures("without_rhat")
@pytest.mark.parametrize("coefficient", COEFFICIENTS)
@pytest.mark.parametrize(
    ("estimate", "shape"),
    [(many_chains, (200, 16)), (many_chains, (4000, 4)), (summarize_trace, (4000, 4))],
    ids=["between chains", "batch means", "autocorrelation"],
)
def test_intervals_cover(estimate, shape, coefficient):
    mean, mcse, _, first = repeats(estimate, coefficient, shape, COVERAGE_REPEATS)
    half = first.interval(0.9)[1] - first.mean
    scale = (half / first.mcse)[0]
    covered = int((np.abs(mean) < scale * mcse).sum())
    low, high = binom.interval(0.9999, COVERAGE_REPEATS, 0.9)
    # Batch means of 200 steps lose a few percent of the variance at c = 0.9.
    assert low <= covered <= high


@pytest.mark.parametrize("degrees", [1, 31, 10**6])
def test_interval_is_that_of_student(degrees):
    estimate = summarize(
        trace_moments(np.random.default_rng(SEED).normal(size=(20, 20, 2)))
    )
    low, high = estimate._replace(degrees=degrees).interval(0.99)
    half = student_t.ppf(0.995, degrees) * estimate.mcse
    np.testing.assert_allclose((high - low) / 2, half, rtol=1e-12)
    np.testing.assert_allclose((high + low) / 2, estimate.mean, rtol=1e-12)


def test_running_sums_equal_the_stored_trace():
    rng = np.random.default_rng(SEED)
    trace = rng.normal(3, 2, (60, 5, 2)).astype(np.float32)
    blocks = []
    for block in trace.reshape(3, 20, 5, 2):
        moments = empty_moments(trace.mean((0, 1)), 5)
        moments, _ = jax.lax.scan(lambda m, x: (add_step(m, x), None), moments, block)
        blocks.append(moments)
    stacked = Moments(*(np.stack(parts) for parts in zip(*blocks, strict=True)))
    running = summarize(stacked)
    stored = summarize(trace_moments(trace, num_blocks=3))
    for a, b in zip(running, stored, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4)
    np.testing.assert_allclose(stored.mean, trace.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(target_variance(stacked), 4, rtol=0.3)


def test_stuck_chains_have_no_negative_variance():
    """Rounding leaves a difference of two sums that should be equal."""
    steps, chains = 60, 3
    values = np.random.default_rng(SEED).normal(0, 1, 200).astype(np.float32)
    blank = np.zeros((1, chains, 200))
    stuck = trace_moments(np.broadcast_to(values, (steps, chains, 200)))._replace(
        steps=np.array([steps]),
        total=blank + np.float32(steps * values),
        square=blank + np.float32(steps * values**2),
    )
    assert target_variance(stuck).min() >= 0


def test_centred_sums_keep_their_digits_in_float32():
    """Mean 1e4, deviation 1: uncentred float32 sums lose the variance altogether."""
    rng = np.random.default_rng(SEED)
    trace = np.asarray(rng.normal(1e4, 1, (500, 32, 1)), np.float32)
    moments = empty_moments(jnp.array([1e4]), 32)
    moments, _ = jax.lax.scan(lambda m, x: (add_step(m, x), None), moments, trace)
    estimate = summarize(Moments(*(np.asarray(part)[None] for part in moments)))
    exact = trace.astype(np.float64)
    assert estimate.variance[0] == pytest.approx(exact.var(ddof=1), rel=1e-5)
    assert abs(estimate.mean[0] - exact.mean()) < 1e-5


def test_ess_of_a_quiet_series_exceeds_the_number_of_draws():
    """An average of mirrored chains: the usual function sees nothing of the gain."""
    rng = np.random.default_rng(SEED)
    plus = rng.normal(size=(500, 64, 1))
    average = 0.01 * rng.normal(size=plus.shape)
    estimate = summarize(
        trace_moments(plus), accuracy.block_means(trace_moments(average))
    )
    draws = plus[..., 0].size
    assert estimate.ess[0] / draws == pytest.approx(1e4, rel=0.5)
    usual = array_stats.ess(average[..., 0].T, method="mean")
    assert usual < 5 * draws  # the cap: N log10 N


def test_shared_error_is_added():
    rng = np.random.default_rng(SEED)
    moments = trace_moments(rng.normal(size=(100, 20, 1)))
    without = summarize(moments)
    with_it = summarize(moments, shared_variance=np.array([0.5]))
    assert with_it.mcse[0] ** 2 == pytest.approx(without.mcse[0] ** 2 + 0.5)


def test_rhat_sees_drift_and_disagreement():
    rng = np.random.default_rng(SEED)
    good = rng.normal(size=(1000, 8, 1))
    apart = good + np.arange(8)[None, :, None]
    drift = good + np.linspace(0, 4, 1000)[:, None, None]
    assert split_rhat(trace_moments(good))[0] < 1.01
    for bad in (apart, drift):
        estimate = summarize(trace_moments(bad))
        assert estimate.rhat[0] > 1.1
        assert "R-hat" in estimate.warnings()[0]
        assert summarize_trace(bad).rhat[0] == rank_rhat(bad)[0] > 1.1
    # ArviZ's unranked split R-hat is the same formula.
    identity = array_stats.rhat(apart[..., 0].T, method="split")
    assert split_rhat(trace_moments(apart))[0] == pytest.approx(identity, rel=1e-6)


def test_geyer_sees_chains_that_disagree():
    """Centring each chain on its own mean would miss it: the flaw we avoid."""
    rng = np.random.default_rng(SEED)
    trace = rng.normal(size=(1000, 4, 1)) + rng.normal(size=(1, 4, 1))
    assert summarize_trace(trace).ess[0] < 40


def test_correlation_and_decoupling():
    rng = np.random.default_rng(SEED)
    a, b = rng.normal(size=(2, 400, 10, 3))
    expected = np.corrcoef(a[..., 1].ravel(), (a + 2 * b)[..., 1].ravel())[0, 1]
    assert correlation(a, a + 2 * b)[1] == pytest.approx(expected)
    assert decoupling_rate(a > 0, a > 0) == 0
    assert decoupling_rate(a > 0, a <= 0) == 1


def test_chance_is_told_from_difference():
    """At a level of 5 %, 2 to 9 % of 1000 trials are false alarms."""
    rng = np.random.default_rng(5)
    alarms = [
        beyond_chance(rng.normal(size=(32, 4)), np.zeros(4), 0.05) for _ in range(1000)
    ]
    assert 0.02 < np.mean(alarms) < 0.09
    shifted = rng.normal(size=(32, 4)) + np.array([0, 0, 0, 2])
    assert beyond_chance(shifted, np.zeros(4), 1e-3)
    assert not beyond_chance(shifted, np.full(4, 1.0), 1e-3), "noise is allowed for"


def test_chance_has_the_limit_of_student():
    """One statistic: the two-sided t test, from just below its limit to just above."""
    chains, level = 12, 1e-4
    difference = np.random.default_rng(SEED).normal(size=(chains, 1))
    error = difference.std(ddof=1) / np.sqrt(chains)
    limit = student_t.isf(level / 2, chains - 1) * error
    centred = difference - difference.mean()
    for factor, found in [(0.999, False), (1.001, True), (-1.001, True)]:
        assert beyond_chance(centred + factor * limit, np.zeros(1), level) is found


def test_tails_without_a_variance_are_seen():
    rng = np.random.default_rng(SEED)
    normal, ratio = rng.normal(size=4000), rng.standard_cauchy(4000)
    columns = {
        "normal": (normal, False),
        "uniform": (rng.uniform(size=4000), False),
        "exponential": (rng.exponential(size=4000), False),
        "event": (normal > 1, False),
        "constant": (np.ones(4000), False),
        "Cauchy": (ratio, True),
        "far from zero": (1e6 + ratio, True),
        "one side only": (-np.abs(ratio), True),
        "no mean": (ratio**2, True),
    }
    values = np.stack([np.asarray(column, float) for column, _ in columns.values()], 1)
    found = dict(zip(columns, heavy_tails(values).tolist(), strict=True))
    assert found == {name: heavy for name, (_, heavy) in columns.items()}
    assert not heavy_tails(values[:400]).any(), "too few draws to tell"


def test_bad_input():
    with pytest.raises(ValueError, match="more chains"):
        summarize(trace_moments(np.zeros((10, 1, 1)), num_blocks=1))
    with pytest.raises(ValueError, match="steps, chains, dim"):
        trace_moments(np.zeros((10, 4)))
    broken = np.zeros((100, 20, 2))
    broken[3, 4, 1] = np.nan
    assert (
        "1 of 2 estimates are not finite" in summarize(trace_moments(broken)).warnings()
    )


def test_lowers_for_cuda():
    moments = empty_moments(jnp.zeros(3), 4)
    exported = jax.export.export(jax.jit(add_step), platforms=["cuda"])
    assert exported(moments, jnp.zeros((4, 3))).platforms == ("cuda",)
