"""Weighted points: exact where they must be, honest errors, guards that see.

Seeds, sizes and thresholds were fixed before the first run. All in double precision.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import digamma, gammainccinv

from swindles.importance import (
    SEQUENCES,
    RoundProposal,
    beyond_reach,
    climb_from_afar,
    draw_points,
    heavy_statistics,
    largest_jump,
    look_again,
    other_mode,
    resample,
    segment_errors,
    sobol_normal,
    weigh_more,
    weigh_pairs,
    weigh_points,
)
from swindles.targets import logistic_regression
from swindles.transport import (
    Affine,
    Evaluator,
    fit_gaussian,
    identity,
    standard_normal,
    unit_map,
)

SEED = 20216


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def generator(*more):
    return np.random.default_rng([SEED, *more])


def moments(x):
    return jnp.concatenate([x, x**2])


def crooked(x):
    """A Gaussian with means (1, 1) and squares (2, 2.3)."""
    return -0.5 * (x[0] - 1) ** 2 - 0.5 * (x[1] - x[0]) ** 2 / 0.3


WRONG = Affine(np.array([0.3, 0.2]), np.array([[1.3, 0.0], [0.2, 0.9]]))


def test_on_a_gaussian_features_leave_nothing():
    """Whatever the map and the weights, linear and quadratic statistics are exact."""
    evaluate = Evaluator(crooked, 2, moments)
    found = weigh_points(SEED, evaluate, WRONG, 64, "full")
    assert found.efficiency[0] < 0.9
    np.testing.assert_allclose(found.estimate().mean, [1, 1, 2, 2.3], atol=1e-5)
    first = weigh_points(SEED, evaluate, WRONG, 64, "first").estimate()
    np.testing.assert_allclose(first.mean[:2], 1, atol=1e-5)
    assert (first.mcse[:2] < 5e-6).all() and (first.mcse[2:] > 1e-4).all()


def test_without_features_it_is_the_weighted_average():
    evaluate = Evaluator(crooked, 2, moments)
    found = weigh_points(SEED, evaluate, WRONG, 32, "none")
    points = draw_points(np.random.default_rng(SEED), evaluate, WRONG, 32)
    weights = np.exp(points.log_weights)
    x = points.z @ WRONG.scale.T + WRONG.shift
    direct = np.exp(
        [float(crooked(each)) for each in x[:50]] + 0.5 * (points.z[:50] ** 2).sum(1)
    )
    np.testing.assert_allclose(weights[:50], direct, rtol=1e-9)
    mean = weights @ points.values / weights.sum()
    np.testing.assert_allclose(found.estimate().mean, mean, rtol=1e-10)
    variance = weights @ (points.values - mean) ** 2 / weights.sum()
    np.testing.assert_allclose(found.estimate().variance, variance, rtol=1e-8)
    assert found.gradients == len(points.z) == 2 * 32 * SEQUENCES
    # The error bar, from the formula: a sequence is some rows and their mirror images.
    away = (weights[:, None] * (points.values - mean)).reshape(2, SEQUENCES, 32, -1)
    stray = away.sum((0, 2)) / weights.sum()
    mcse = np.sqrt((stray**2).sum(0) * SEQUENCES / (SEQUENCES - 1))
    np.testing.assert_allclose(found.estimate().mcse, mcse, rtol=1e-8)


def test_what_is_odd_is_no_feature():
    """On a symmetric target the first-order features average to their rounding."""
    evaluate = Evaluator(lambda x: -jnp.sum(jnp.cosh(x)), 2, jnp.square)
    points = draw_points(generator(), evaluate, identity(2), 64)
    rows = weigh_pairs(points, "full", np.zeros(2), 0.0)
    assert (rows.features[:, :2] == 0).all() and (rows.features[:, 2:] != 0).any(
        0
    ).all()
    found = weigh_points(SEED, evaluate, identity(2), 64, "full")
    assert (found.beta[:2] == 0).all()


def test_sobol_points_are_normal_even_and_new_each_time():
    rng = generator()
    sets = [sobol_normal(rng, 256, 5) for _ in range(40)]
    assert all(np.isfinite(z).all() for z in sets)
    means = np.stack([z.mean(0) for z in sets])
    assert np.abs(means).max() < 0.05  # independent draws: up to 0.2
    assert (sets[0] != sets[1]).all()
    every = np.concatenate(sets)[:, 0]
    assert stats.kstest(every[::7], "norm").pvalue > 1e-4
    cells = np.floor(256 * stats.norm.cdf(sets[0])).astype(int)
    assert all(np.unique(column).size == 256 for column in cells.T)  # one in each


SHAPE = 8.0


def log_gamma(x):
    """Logarithms of Gamma draws, less their mean: skewed, with a tail to the left."""
    y = x + digamma(SHAPE)
    return jnp.sum(SHAPE * y - jnp.exp(y))


def student(x):
    """A tail heavier than any Gaussian's: twelve degrees of freedom."""
    return -6.5 * jnp.sum(jnp.log1p(x**2 / 12))


TARGETS = {
    "skewed": (log_gamma, 2, lambda x: jnp.append(x, jnp.exp(x[0]))),
    "heavy": (student, 2, lambda x: jnp.concatenate([x, jnp.abs(x)])),
}
MEANS = {
    "skewed": [0, 0, SHAPE * np.exp(-digamma(SHAPE))],
    "heavy": [0, 0] + 2 * [stats.t(12).expect(abs)],
}


def repeat(evaluate, transport, pairs, order, repeats=200):
    """Means and errors of many runs, the reach of the points in the errors."""
    found = []
    for i in range(repeats):
        run = weigh_points([SEED, i], evaluate, transport, pairs, order)
        beyond = beyond_reach(generator(i), evaluate, transport, run)
        each = run.estimate()
        mcse = np.sqrt(each.mcse**2 + beyond**2 + run.rounding**2)
        found.append((each.mean, mcse, run.pareto_k.max()))
    return (np.array(part) for part in zip(*found, strict=True))


def check_coverage(mean, mcse, truth, truth_error=0.0):
    """95 % intervals cover at the nominal rate, and there is no bias."""
    half = stats.t(SEQUENCES - 1).ppf(0.975) * np.hypot(mcse, truth_error)
    covered = (np.abs(mean - truth) <= half).mean(0)
    slack = 4 * np.sqrt(0.95 * 0.05 / len(mean))
    assert (covered > 0.95 - slack).all(), covered
    spread = np.hypot(mean.std(0, ddof=1) / np.sqrt(len(mean)), truth_error)
    assert (np.abs(mean.mean(0) - truth) < 4 * spread + 1e-12).all()
    return covered


@pytest.mark.slow
@pytest.mark.parametrize("order", ["none", "full"])
@pytest.mark.parametrize("name", TARGETS)
def test_intervals_cover(name, order):
    logdensity, dim, statistic = TARGETS[name]
    evaluate = Evaluator(logdensity, dim, statistic)
    transport = fit_gaussian(evaluate, np.zeros(dim), SEED).transport
    mean, mcse, k = repeat(evaluate, transport, 64, order)
    trusted = k <= 0.7
    assert trusted.mean() > 0.5
    check_coverage(mean[trusted], mcse[trusted], np.array(MEANS[name]))


@cache
def credit():
    """The German-credit regression, its map, and its answers from many points."""
    with jax.enable_x64(True):
        model = logistic_regression()
        evaluate = Evaluator(model.logdensity, model.dim, moments)
        transport = fit_gaussian(evaluate, model.position, SEED).transport
        run = weigh_points([SEED, 10**6], evaluate, transport, 512, "full")
        return evaluate, transport, run


@pytest.mark.slow
def test_intervals_cover_on_a_real_posterior():
    evaluate, transport, run = credit()
    answer = run.estimate()
    mean, mcse, k = repeat(evaluate, transport, 32, "diagonal")
    assert (k <= 0.7).all()
    covered = check_coverage(mean, mcse, answer.mean, answer.mcse)
    assert covered.mean() > 0.93
    ratio = mean.var(0, ddof=1) / ((mcse**2).mean(0) + answer.mcse**2)
    assert 0.5 < np.median(ratio) < 1.2


@pytest.mark.slow
def test_efficiency_on_a_real_posterior():
    """ESS per gradient, over three maps: means 20 000, squared deviations 700."""
    _, _, run = credit()
    middle = run.estimate().mean[:25]

    def deviations(x):
        return jnp.concatenate([x, (x - middle) ** 2])

    model, found = logistic_regression(), []
    again = Evaluator(model.logdensity, model.dim, deviations)
    for i in range(3):
        to_x = fit_gaussian(again, model.position, [SEED, i]).transport
        each = weigh_points([SEED, i], again, to_x, 512, "full")
        found.append(each.estimate().ess / each.gradients)
    rates = np.median(np.median(found, 0).reshape(2, 25), axis=1)
    assert rates[0] > 20_000 and rates[1] > 700


@pytest.mark.slow
def test_coefficients_are_not_fitted_to_what_they_are_used_on():
    """A statistic that features know nothing of, and half as many features as pairs."""
    dim, repeats = 14, 60  # 119 features, 256 pairs

    def noise(x):
        return jnp.sin(1e3 * x[:3] * x[1:4])

    evaluate, to_x = Evaluator(standard_normal, dim, noise), identity(dim, full=True)
    runs = [
        weigh_points([SEED, i], evaluate, to_x, 16, "full").estimate()
        for i in range(repeats)
    ]
    spread = np.std([run.mean for run in runs], axis=0)
    stated = np.sqrt(np.mean([run.mcse**2 for run in runs], axis=0))
    plain = np.sqrt(0.5 / 512)  # the sine squared averages one half
    np.testing.assert_allclose(spread / stated, 1, atol=4 / np.sqrt(2 * repeats))
    assert (stated > 0.8 * plain).all()


def test_more_points_under_the_same_coefficients():
    evaluate, to_x = Evaluator(log_gamma, 2, moments), unit_map(np.zeros(2))
    to_x = to_x._replace(scale=0.4 * to_x.scale)
    first = weigh_points([SEED, 0], evaluate, to_x, 32, "full")
    run = first
    for block in range(1, 5):
        run = weigh_more([SEED, block], evaluate, to_x, run, 64)
    assert run.gradients == evaluate.gradients == 2 * SEQUENCES * (32 + 4 * 64)
    assert run.beta is first.beta and len(run.pareto_k) == 5
    np.testing.assert_array_equal(run.weight[0], first.weight[0])
    before, after = first.estimate(), run.estimate()
    assert (np.abs(before.mean - after.mean) < 5 * before.mcse).all()
    assert np.median(after.mcse / before.mcse) < 0.6
    truth = np.array([0, 0])
    assert (np.abs(after.mean[:2] - truth) < 4 * after.mcse[:2]).all()


def test_resampled_draws_are_of_the_posterior():
    evaluate = Evaluator(crooked, 2)
    points = draw_points(generator(), evaluate, WRONG, 512)
    draws = resample(generator(1), points).reshape(-1, 2) @ WRONG.scale.T + WRONG.shift
    assert draws.shape == (1024, 2)
    np.testing.assert_allclose(draws.mean(0), 1, atol=4 * np.sqrt(1.3 / 1024))
    np.testing.assert_allclose((draws**2).mean(0), [2, 2.3], atol=0.4)


def test_where_the_density_is_zero_nothing_is_asked_of_the_statistic():
    def half(x):
        return jnp.where(x[0] > 0, standard_normal(x), -jnp.inf)

    evaluate = Evaluator(half, 1, jnp.sqrt)
    found = weigh_points(SEED, evaluate, unit_map([0.0]), 128, "none").estimate()
    truth = stats.halfnorm.expect(np.sqrt)
    assert abs(found.mean[0] - truth) < 4 * found.mcse[0]


def test_a_statistic_that_is_not_finite_spoils_no_other():
    both = Evaluator(log_gamma, 1, lambda x: jnp.stack([jnp.log(x[0]), x[0]]))
    found = weigh_points(SEED, both, unit_map([0.0]), 128, "full").estimate()
    alone = Evaluator(log_gamma, 1, lambda x: x)
    other = weigh_points(SEED, alone, unit_map([0.0]), 128, "full").estimate()
    assert np.isnan(found.mean[0]) and found.mean[1] == pytest.approx(other.mean[0])
    assert found.mcse[1] == pytest.approx(other.mcse[0], rel=1e-3)


# Guards


def two_modes(x, away):
    far = away * jnp.eye(x.size)[0]
    return jnp.logaddexp(
        jnp.log(0.7) + standard_normal(x), jnp.log(0.3) + standard_normal(x - far)
    )


@pytest.mark.parametrize("dim", [1, 3, 10])
@pytest.mark.parametrize("away", [8.0, 12.0, 20.0])
def test_another_mode_is_found(dim, away):
    evaluate = Evaluator(partial(two_modes, away=away), dim)
    for key in range(5):
        found = other_mode(generator(key), evaluate, unit_map(np.zeros(dim)))
        assert found == pytest.approx(away, abs=0.1)


def banana(x):
    return -0.5 * (x[0] ** 2 + ((x[1] - x[0] ** 2) / 0.3) ** 2)


@pytest.mark.parametrize(
    ("logdensity", "dim"),
    [
        (standard_normal, 1),
        (standard_normal, 100),
        (log_gamma, 5),
        (student, 3),
        (banana, 2),
        (lambda x: -jnp.sum(jnp.cosh(x)), 4),
        (lambda x: jnp.where(jnp.abs(x).max() < 3, standard_normal(x), -jnp.inf), 3),
        (lambda x: partial(two_modes, away=12.0)(x) - 40.0 * (x[0] > 6), 2),  # low
    ],
)
def test_no_mode_is_found_where_there_is_none(logdensity, dim):
    evaluate = Evaluator(logdensity, dim)
    best = fit_gaussian(evaluate, np.full(dim, 0.1), SEED).transport
    for key in range(5):
        assert other_mode(generator(key), evaluate, best) == np.inf


def test_climbers_arrive():
    found = climb_from_afar(generator(), Evaluator(log_gamma, 3), unit_map(np.zeros(3)))
    assert len(found.z) > 50
    mode = np.log(SHAPE) - digamma(SHAPE)
    assert np.abs(found.z - mode).max() < 0.5


SMOOTH = {
    "normal": standard_normal,
    "skewed": log_gamma,
    "heavy": student,
    "kink": lambda x: -jnp.sum(jnp.abs(x)),
    "relu": lambda x: standard_normal(x) - jnp.sum(jnp.maximum(x - 1, 0)),
}


@pytest.mark.parametrize("dim", [1, 4])
@pytest.mark.parametrize("name", SMOOTH)
def test_no_jump_in_a_density_without(name, dim):
    for key in range(5):
        evaluate = Evaluator(SMOOTH[name], dim)
        assert largest_jump(generator(key), evaluate, unit_map(np.zeros(dim))) == 0


@pytest.mark.parametrize("size", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("place", [0.5, 2.0])
def test_a_jump_is_found_and_measured(size, place):
    evaluate = Evaluator(lambda x: standard_normal(x) - size * (x[0] > place), 2)
    for key in range(5):
        found = largest_jump(generator(key), evaluate, unit_map(np.zeros(2)))
        assert found == pytest.approx(size, rel=1e-6)


def test_a_cut_is_found():
    def box(x):
        return jnp.where(jnp.abs(x).max() < 3.9, standard_normal(x), -jnp.inf)

    for key in range(5):
        evaluate = Evaluator(box, 5)
        assert largest_jump(generator(key), evaluate, unit_map(np.zeros(5))) == np.inf


def test_segments_integrate_the_score():
    ends = generator().normal(size=(20, 3))
    left = segment_errors(Evaluator(log_gamma, 3), unit_map(np.zeros(3)), ends, 16)
    assert left.max() < 1e-9


@pytest.mark.parametrize("dim", [1, 3, 10])
def test_what_is_beyond_reach_is_the_integral(dim):
    """For a standard normal it is that of a chi distribution."""
    evaluate = Evaluator(standard_normal, dim, lambda x: jnp.sum(x**2)[None])
    to_x = unit_map(np.zeros(dim))
    run = weigh_points(SEED, evaluate, to_x, 64, "none")
    found = beyond_reach(generator(), evaluate, to_x, run)
    reach = np.sqrt(2 * gammainccinv(dim / 2, 10 / run.gradients))
    exact = stats.chi(dim).expect(lambda r: abs(r**2 - dim), lb=reach)
    assert found[0] == pytest.approx(exact, rel=0.3)
    assert found[0] > exact  # no place is left out


def test_heavy_tails_are_in_the_error():
    """Three degrees of freedom: most of a point's error lies where no point was."""
    evaluate = Evaluator(lambda x: -2 * jnp.log1p(x @ x / 3), 1, jnp.abs)
    truth, off = stats.t(3).expect(abs), []
    for i in range(40):
        run = weigh_points([SEED, i], evaluate, unit_map([0.0]), 64, "none")
        beyond = beyond_reach(generator(i), evaluate, unit_map([0.0]), run)
        found = run.estimate()
        error, mcse = abs(found.mean - truth)[0], found.mcse[0]
        off.append((error > 3 * mcse, error > 3 * np.hypot(mcse, beyond[0])))
    alone, both = np.mean(off, axis=0)
    assert alone > 0.1 and both < 0.05


@pytest.mark.parametrize(
    ("degrees", "heavy"),
    [(1, [1, 1, 1]), (3, [0, 1, 1]), (7, [0, 0, 0]), (30, [0, 0, 0])],
)
def test_statistics_without_a_variance(degrees, heavy):
    """|x|^a has one only if 2 a is less than the degrees of freedom."""

    def density(x):
        return -0.5 * (degrees + x.size) * jnp.log1p(x @ x / degrees)

    def statistic(x):
        size = jnp.abs(x[0])
        return jnp.stack([jnp.sqrt(size), size**1.5, size**2])

    for dim in (1, 3):
        evaluate = Evaluator(density, dim, statistic)
        found = heavy_statistics(generator(), evaluate, unit_map(np.zeros(dim)))
        assert found.tolist() == [bool(each) for each in heavy]
    for logdensity in (standard_normal, log_gamma, lambda x: -jnp.abs(x).sum()):
        evaluate = Evaluator(logdensity, 2, jnp.square)
        assert not heavy_statistics(generator(), evaluate, unit_map(np.zeros(2))).any()


def test_features_that_do_not_average_to_zero_are_noticed():
    """A jump at 1: Stein's identity is off by a tenth of a standard deviation."""
    evaluate = Evaluator(
        lambda x: standard_normal(x) - 0.8 * (x[0] > 1), 1, lambda x: x
    )
    to_x = unit_map([0.0])
    assert weigh_points(SEED, evaluate, to_x, 512, "full").is_biased()
    sound = Evaluator(log_gamma, 2, lambda x: x)
    assert not weigh_points(SEED, sound, unit_map([0.0, 0.0]), 512, "full").is_biased()


# A second look


def second_look(logdensity, seed):
    """An estimate from the unit map's points, what others say of it, and of others."""
    evaluate, unit = Evaluator(logdensity, 2, moments), unit_map(np.zeros(2))
    run = weigh_points([SEED, seed], evaluate, unit, 256, "full")

    def look(run):
        return look_again([SEED, seed, 1], evaluate, unit, run, RoundProposal(2))

    return run, look(run), look


@pytest.mark.parametrize("dim", [1, 3, 30])
def test_points_with_heavy_tails_are_of_their_density(dim):
    heavy = RoundProposal(dim).widened()
    z = heavy.pairs(generator(dim), 4096)
    radius = (z**2).sum(1) / dim
    found = stats.kstest(radius, stats.f(dim, heavy.degrees).cdf)
    assert found.statistic < 1.6 / np.sqrt(len(z) / 2)  # pairs have one radius
    exact = stats.multivariate_t(np.zeros(dim), np.eye(dim), heavy.degrees)
    constant = 0.5 * dim * np.log(2 * np.pi)
    np.testing.assert_allclose(heavy.log_density(z[:9]), exact.logpdf(z[:9]) + constant)


def test_a_second_look_agrees_where_the_first_is_right():
    """Forty looks at a skewed and a bent density: differences as large as chance."""
    densities = [
        lambda x: jnp.sum(1.5 * x - jnp.exp(x) - x**2 / 8),
        lambda x: -0.5 * x[0] ** 2 - 0.5 * (x[1] - 0.3 * x[0] ** 2) ** 2,
    ]
    found = [second_look(each, seed)[1] for each in densities for seed in range(20)]
    apart = np.array([each.apart for each in found])
    assert apart.max() < 1 and np.median(apart) > 0.05
    assert min(each.digits for each in found) > 1


@pytest.mark.parametrize("seed", range(5))
def test_a_second_look_sees_an_error_of_the_first(seed):
    """A hundredth of a deviation, where it can tell two digits."""
    run, right, look = second_look(lambda x: jnp.sum(1.5 * x - jnp.exp(x)), seed)
    away = 5 * 10**-right.digits * np.sqrt(run.estimate().variance)
    moved = run._replace(swindled=run.swindled + run.weight[..., None] * away)
    np.testing.assert_allclose(moved.estimate().mean - run.estimate().mean, away)
    assert right.apart < 1 < look(moved).apart
