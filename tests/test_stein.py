"""Stein features: exact where they must be, honest elsewhere, and never a loss."""

from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from scipy.stats import binom
from scipy.stats import t as student_t

from swindles import schemes
from swindles.accuracy import summarize, trace_moments
from swindles.antithetic import antithetic, fold_series, pair_values, plain
from swindles.control import (
    draw_expectation,
    fit_features,
    fold_feature_products,
    reference_mean,
    shared_variance,
)
from swindles.coupling import (
    Total,
    hmc,
    is_total,
    mala,
    random_walk,
    record,
    run,
    start,
    take_steps,
)
from swindles.models import Model, make_problem
from swindles.neutra import load_map
from swindles.schemes import SCHEMES, make_features, plan_series, swindle
from swindles.stein import (
    ORDERS,
    affordable_order,
    feature_orders,
    scores,
    stein_features,
    stein_values,
)
from swindles.targets import (
    banana,
    gaussian,
    item_response,
    logistic_regression,
    skewed,
    sparse_logistic_regression,
)
from swindles.transport import Affine, laplace, standard_normal

KEY = jax.random.key(20208)
DTYPES = ["float32", "float64"]


def moments(x):
    return jnp.concatenate([x, x**2])


def in_x(target):
    """Statistics see the position itself, in the precision of the moment."""
    return Model(target.logdensity, jnp.zeros(target.dim))


def round_problem(target, statistic=moments):
    to_x = laplace(target.logdensity, jnp.zeros(target.dim))
    return make_problem(in_x(target), statistic).through(to_x)


def learned_and_estimated(*arguments, **options):
    """The sums from which ``swindle`` learned its coefficients, and its result."""
    kept = []

    def learn(*arguments):
        kept.append(schemes_learn(*arguments))
        return kept[-1]

    schemes_learn = schemes.learn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schemes, "learn", learn)
        result = swindle(*arguments, **options)
    return kept[0][2], result


def per_step(result):
    return result.estimate.ess / result.estimate.num_draws


# Exact oracles


def test_features_are_steins_operator_of_monomials():
    """Laplacian of phi plus gradient of phi times score, by automatic derivatives."""
    target, dim = skewed(3), 3
    pairs = zip(*np.triu_indices(dim, 1), strict=True)
    monomials = [
        *[lambda z, i=i: z[i] for i in range(dim)],
        *[lambda z, i=i: z[i] ** 2 / 2 for i in range(dim)],
        *[lambda z, i=i, j=j: z[i] * z[j] for i, j in pairs],
    ]
    z = jax.random.normal(KEY, (dim,))
    score = jax.grad(target.logdensity)(z)
    expected = [
        jnp.trace(jax.hessian(phi)(z)) + jax.grad(phi)(z) @ score for phi in monomials
    ]
    found = stein_features(z, score, "full")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for order in ORDERS:
        width = feature_orders(dim, order).size
        part = stein_features(z, score, order)
        np.testing.assert_array_equal(part, found[:width])
        outside = stein_features(np.asarray(z), np.asarray(score), order)
        np.testing.assert_allclose(outside, part, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sampler", [hmc(0.4, 4), mala(0.5)])
def test_scores_are_the_gradients_at_both_draws(sampler):
    target = skewed(2)
    algorithm = antithetic(sampler, target.logdensity)
    states = start(algorithm, jax.random.normal(KEY, (16, 2)))
    states, _ = run(KEY, algorithm, states, 20)
    slope = jax.vmap(jax.grad(target.logdensity))
    both = states.plus.position, states.minus.position
    expected = [slope(position) for position in both]
    np.testing.assert_allclose(scores(states), expected, rtol=1e-5, atol=1e-5)
    assert jnp.abs(both[0] - both[1]).max() > 0.5
    found = stein_values("full", states)
    for row, position, score in zip(found, both, expected, strict=True):
        by_hand = stein_features(position, score, "full")
        np.testing.assert_allclose(row, by_hand, rtol=1e-5, atol=1e-5)


MEAN, COVARIANCE = (
    [1.0, -2.0, 0.5],
    [[2.0, 0.6, 0.1], [0.6, 1.0, -0.3], [0.1, -0.3, 0.5]],
)
# Largest error and largest stated error, in units of the statistics, which are near 1.
EXACT = {"float32": 2e-5, "float64": 1e-7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("stein", "float32"),
        ("cva+stein", "float32"),
        ("antithetic+stein", "float64"),
    ],
)
def test_no_error_on_a_gaussian(scheme, dtype):
    """First order for linear statistics, second for quadratic ones, with a poor map."""
    with jax.enable_x64(dtype == "float64"):
        target = gaussian(MEAN, COVARIANCE)
        to_x = Affine(jnp.full(3, 0.3), jnp.array([1.5, 0.8, 1.0]))
        problem = make_problem(
            in_x(target), lambda x: jnp.append(moments(x), x[0] * x[1])
        ).through(to_x)
        truth = np.append(
            np.concatenate([target.truth["mean"], target.truth["square"]]),
            COVARIANCE[0][1] + MEAN[0] * MEAN[1],
        )
        sums, result = learned_and_estimated(
            KEY, scheme, hmc(0.3, 4), problem, 32, 100, 200, order="full"
        )
        estimate = result.estimate
        assert np.abs(estimate.mean - truth).max() < EXACT[dtype]
        assert estimate.mcse.max() < EXACT[dtype]
        if dtype == "float32":
            assert "below rounding" in " ".join(estimate.warnings())
        if scheme == "stein":  # first order alone: nothing left of linear statistics
            first = fit_features(sums, [3])
            assert np.abs(first.mean - truth)[:3].max() < EXACT[dtype]
            assert first.variance[:3].max() < 1e-9 < 1e-2 < first.variance[3:].min()


@pytest.mark.slow
def test_running_estimate_equals_the_stored_trace():
    """Features, averages over pairs and frozen coefficients, by hand with numpy."""
    problem = round_problem(skewed(2))
    algorithm = antithetic(hmc(0.4, 4), problem.logdensity)
    states = start(algorithm, jax.random.normal(KEY, (32, 2)))
    states, plan, sums = schemes.learn(
        KEY, algorithm, states, problem, "antithetic+stein", 200, 1, None, "full"
    )
    fold = fold_series(plan_series(plan, problem.statistic), states)
    _, rows = run(KEY, algorithm, states, 60, fold)
    result = schemes.finish_run(rows, plan, sums)
    _, trace = record(KEY, algorithm, states, 60)
    slope = jax.vmap(jax.vmap(jax.grad(problem.logdensity)))
    f, g = 0, 0
    for z in trace:
        values = jax.vmap(jax.vmap(problem.statistic))(z)
        f = f + np.asarray(values, np.float64) / 2
        g = g + np.asarray(stein_features(z, slope(z), "full"), np.float64) / 2
    corrected = f - g @ result.beta
    np.testing.assert_allclose(
        result.estimate.mean, corrected.mean((0, 1)), rtol=1e-5, atol=1e-5
    )
    spread = corrected.mean(0).std(0, ddof=1) / np.sqrt(32)
    np.testing.assert_allclose(result.estimate.mcse, spread, rtol=1e-3)
    # With many draws the penalty is small, and these are nearly least squares.
    x, y = (a.reshape(-1, a.shape[-1]) for a in (g, f))
    best = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=None)[0]
    rest = [np.var(y - x @ beta, axis=0) for beta in (result.beta, best)]
    assert (rest[0] < 1.25 * rest[1]).all(), rest


# The three posteriors

# ESS per step at the median and at the worst dimension, for means and second moments.
LEAST, WORST = (100_000, 12_000), (1_500, 150)
RESPONSE_LEAST, SPARSE_GAIN = (5_000, 80), 1.4


@pytest.fixture(scope="module")
def logistic():
    """The same run of the logistic regression in both precisions."""
    found = {}
    for dtype in DTYPES:
        with jax.enable_x64(dtype == "float64"):
            problem = round_problem(logistic_regression())
            found[dtype] = learned_and_estimated(
                KEY, "antithetic+stein", hmc(0.3, 5), problem, 128, 100, 300
            )
    return found


@pytest.mark.optimised
@pytest.mark.slow
def test_logistic_regression(logistic):
    result = logistic["float32"][1]
    ess = per_step(result).reshape(2, 25)
    assert result.beta.shape == (350, 50)
    assert (np.median(ess, axis=1) >= LEAST).all(), np.median(ess, axis=1)
    assert (ess.min(1) >= WORST).all(), ess.min(1)
    assert result.estimate.warnings() == []


@pytest.mark.optimised
@pytest.mark.slow
def test_single_precision_agrees_with_double(logistic):
    single, double = (logistic[dtype][1].estimate for dtype in DTYPES)
    distance = (single.mean - double.mean) / np.hypot(single.mcse, double.mcse)
    assert np.abs(distance).max() < 4
    assert np.sqrt(np.mean(distance**2)) < 1.5
    assert (single.rounding < single.mcse).all()
    assert (double.rounding < 1e-6 * double.mcse).all()


def check_means(sums, number):
    """No feature's mean is further from zero than chance allows."""
    average = sums.total.value[:, :number] / sums.steps.value
    chains = len(average)
    error = average.std(0, ddof=1) / np.sqrt(chains)
    limit = student_t.ppf(1 - 0.001 / (2 * number), chains - 1)
    ratio = np.abs(average.mean(0) / error)
    assert ratio.max() < limit, (ratio.max(), limit)
    assert (error > 0).all() and ratio.size == number


@pytest.mark.optimised
@pytest.mark.slow
def test_features_of_the_logistic_regression_have_mean_zero(logistic):
    for sums, _ in logistic.values():
        check_means(sums, 350)


@pytest.mark.optimised
@pytest.mark.slow
def test_item_response():
    """501 dimensions: a table of all products is refused, a diagonal one pays."""
    problem = round_problem(item_response())
    sums, result = learned_and_estimated(
        KEY, "antithetic+stein", hmc(0.3, 5), problem, 64, 40, 400
    )
    assert len(result.beta) == 1002
    ess = per_step(result).reshape(2, 501)
    assert (np.median(ess, axis=1) >= RESPONSE_LEAST).all(), np.median(ess, axis=1)
    check_means(sums, 1002)


@pytest.mark.optimised
@pytest.mark.slow
def test_sparse_regression():
    """Through its flow: features help a little, beside the control chain too."""
    target = in_x(sparse_logistic_regression())
    to_x = load_map(files("swindles") / "data" / "sparse_flow.npz")
    problem = make_problem(target).through(to_x)
    expectation = reference_mean(KEY, problem, 1_000_000)
    sums, result = learned_and_estimated(
        KEY,
        "cva+stein",
        hmc(0.2, 5),
        problem,
        64,
        200,
        400,
        expectation,
        order="full",
    )
    draws, both = result.estimate.num_draws, 51 + feature_orders(51, "full").size
    noise = np.zeros((both, both))
    noise[:51, :51] = draws * expectation.covariance
    cva_alone = fit_features(sums, [51], noise).variance  # by cross-fitting
    gain = cva_alone / (draws * result.estimate.mcse**2)
    assert np.median(gain) >= SPARSE_GAIN, np.median(gain)
    features = sums._replace(total=Total(sums.total.value[:, 51:]))
    check_means(features, feature_orders(51, "full").size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype"), [(skewed(3), "float32"), (banana(), "float64")]
)
def test_features_of_skewed_toys_have_mean_zero(target, dtype):
    with jax.enable_x64(dtype == "float64"):
        algorithm = antithetic(hmc(0.3, 5), target.logdensity)
        states = start(algorithm, jax.random.normal(KEY, (256, target.dim)))
        observe, number = (
            partial(stein_values, "full"),
            feature_orders(target.dim, "full").size,
        )
        fold = fold_feature_products(jnp.sum, observe, np.zeros(number), states)
        states, _ = run(KEY, algorithm, states, 200, fold)
        _, sums = run(jax.random.key(1), algorithm, states, 400, fold)
        check_means(sums, number)


# Repeats

REPEATS, CHAINS, LEVEL, CHANCE = 200, 16, 0.95, 1e-4
WORSE = 1.05  # the most that features may add to the error


class Kept(NamedTuple):
    position: Any
    logdensity_grad: Any


def keep(states, infos):
    return type(states)(*(Kept(s.position, s.logdensity_grad) for s in states))


class Repeats:
    """Many short runs at once, all chains of all repeats side by side.

    In each the first half of the steps teaches the coefficients, as in ``learn``, and
    the second half uses them.
    """

    def __init__(self, problem, sampler, scheme, steps, repeats=REPEATS):
        parts = SCHEMES[scheme]
        algorithm = parts.build(sampler, problem.logdensity)
        z = jax.random.normal(KEY, (repeats * CHAINS, problem.dim))
        states, _ = run(jax.random.key(1), algorithm, start(algorithm, z), 40)
        _, trace = record(jax.random.key(2), algorithm, states, 2 * steps, keep)
        # From (steps, repeats x chains, ...) to (repeats, steps, chains, ...).
        self.trace = jax.tree.map(
            lambda x: np.moveaxis(x.reshape(2 * steps, repeats, CHAINS, -1), 1, 0),
            trace,
        )
        self.features = make_features(
            parts, problem.statistic, problem.dim, order="full"
        )
        self.steps, self.repeats, observe = steps, repeats, self.features.observe
        mean, first = self.features.expectation.mean, self.part(0, 0)
        fold = fold_feature_products(problem.statistic, observe, mean, first)
        zero, update = fold

        def values(states):
            f = pair_values(problem.statistic, states)
            return f.mean(0), observe(states).mean(0)

        def learn(states):
            return jax.lax.scan(lambda s, x: (update(s, x, None), None), zero, states)

        self.learn = jax.jit(learn)
        self.values = jax.jit(jax.vmap(values))

    def part(self, repeat, steps):
        return jax.tree.map(lambda x: x[repeat, steps], self.trace)

    def estimates(self):
        """With and without features: means, errors, ends: each (repeats, dim)."""
        found = {"none": [], "full": []}
        for repeat in range(self.repeats):
            sums = jax.device_get(self.learn(self.part(repeat, slice(self.steps)))[0])
            sums = jax.tree.map(
                lambda t: Total(np.asarray(t.value, float)) if is_total(t) else t,
                sums,
                is_leaf=is_total,
            )
            f, g = jax.device_get(
                self.values(self.part(repeat, slice(self.steps, None)))
            )
            for name, widths in {"none": [], "full": self.features.widths}.items():
                beta = fit_features(sums, widths).beta
                z = np.asarray(f, float) - np.asarray(g[..., : len(beta)], float) @ beta
                e = summarize(trace_moments(z))
                found[name].append((e.mean, e.mcse, *e.interval(LEVEL)))
        return {name: np.array(rows).swapaxes(0, 1) for name, rows in found.items()}


def check_repeats(estimates, truth):
    """Coverage and bias; and features do not make an error larger."""
    squares = {}
    for name, (mean, mcse, lower, upper) in estimates.items():
        repeats = len(mean)
        covered = ((lower < truth) & (truth < upper)).sum(0)
        least, most = binom.ppf([CHANCE, 1 - CHANCE], repeats, LEVEL)
        assert covered.min() >= least, (name, covered)
        assert np.median(covered) <= most, (name, covered)
        deviation = mean.std(0, ddof=1)
        bias = (mean.mean(0) - truth) / deviation * np.sqrt(repeats)
        assert np.abs(bias).max() < 4, (name, bias)
        stated = np.sqrt(np.mean(mcse**2, axis=0))
        assert 0.85 < np.median(stated / deviation) < 1.15, name
        square = (mean - truth) ** 2
        squares[name] = square / square.mean(0), np.log(square.mean(0)) / 2
    # For each statistic as far as the repeats can tell, and on average.
    change = squares["full"][1] - squares["none"][1]
    error = np.std(squares["full"][0] - squares["none"][0], axis=0) / 2 / repeats**0.5
    assert (change - 4 * error < np.log(WORSE)).all(), (change, error)
    assert np.exp(change.mean()) < WORSE, change
    return np.exp(change)


@pytest.mark.slow
def test_repeats_on_a_skewed_target():
    target = skewed(2)
    truth = np.concatenate([target.truth["mean"], target.truth["square"]])
    repeats = Repeats(round_problem(target), hmc(0.4, 4), "antithetic+stein", 240)
    ratio = check_repeats(repeats.estimates(), truth)
    assert (ratio < 0.7).all(), ratio


@pytest.mark.slow
def test_useless_features_do_no_harm():
    """Waves too short for polynomials: 65 features have nothing to say about them."""

    def waves(x):
        return jnp.concatenate([jnp.sin(6 * x), jnp.cos(6 * x)])

    problem = make_problem(Model(standard_normal, jnp.zeros(10)), waves)
    repeats = Repeats(problem, hmc(0.5, 3), "stein", 60)
    ratio = check_repeats(repeats.estimates(), np.repeat([0, np.exp(-18)], 10))
    assert ratio.min() > 0.9, ratio


@pytest.mark.optimised
@pytest.mark.slow
def test_fewer_draws_than_features_do_no_harm(logistic):
    """350 features of the logistic regression, and 320 draws to fit them."""
    problem = round_problem(logistic_regression())
    repeats = Repeats(problem, hmc(0.3, 5), "stein", 20, repeats=12)
    found = repeats.estimates()
    truth = logistic["float64"][1].estimate.mean
    error = {n: np.sqrt(np.mean((e[0] - truth) ** 2, 0)) for n, e in found.items()}
    ratio = (error["full"] / error["none"]).reshape(2, 25)
    assert np.median(ratio[0]) < 0.5 and ratio.max() < 1.3, ratio


@pytest.mark.slow
def test_a_poorly_known_mean_is_not_leaned_on():
    """The noise of E_Q, from 64 draws, would swamp what the control chain gains."""
    problem, draws = round_problem(skewed(2)), 64 * 400
    noisy = draw_expectation(KEY, problem.statistic, jnp.zeros(2), 64, 2)
    exactly = reference_mean(KEY, problem)
    parts = SCHEMES["control+stein"]
    algorithm = parts.build(hmc(0.4, 4), problem.logdensity)
    states = start(algorithm, jax.random.normal(KEY, (64, 2)))
    _, _, sums = schemes.learn(
        KEY, algorithm, states, problem, "control+stein", 800, draws, exactly, "none"
    )
    alone = np.sqrt(fit_features(sums, []).variance / draws)
    error = {}
    for name, expectation in {"noisy": noisy, "exact": exactly}.items():
        features = make_features(parts, problem.statistic, 2, expectation)
        fitted = schemes.fit_scheme(parts, sums, features, draws)
        shared = shared_variance(expectation, fitted.beta)
        error[name] = np.sqrt(fitted.variance / draws + shared) / alone
    assert (error["exact"] < 0.7)[:2].all(), error["exact"]  # means
    assert (error["noisy"] < 1.1).all(), error["noisy"]
    # Who takes the noisy mean for exact pays for it.
    trusting = fit_features(sums, [4]).beta
    assert (np.sqrt(shared_variance(noisy, trusting)) > 2 * alone)[2:].all()


# Bad input, other machines


def test_few_draws_afford_few_features():
    found = [affordable_order(10, n) for n in (50, 100, 200, 650)]
    assert found == ["none", "first", "diagonal", "full"]
    assert affordable_order(10, 650, others=1) == "diagonal"
    assert affordable_order(10, 650, others=100) == "none"
    assert affordable_order(501, 10**9) == "diagonal", "126 252 products are too many"


def test_a_scheme_that_affords_no_features_is_a_plain_chain():
    problem = make_problem(Model(standard_normal, jnp.zeros(2)))
    algorithm = plain(hmc(0.5, 3), problem.logdensity)
    states = start(algorithm, jax.random.normal(KEY, (16, 2)))
    states, plan, _ = schemes.learn(
        KEY, algorithm, states, problem, "stein", 20, 320, None, "none"
    )
    assert plan.beta.shape == (0, 2) and (plan.shared_variance == 0).all()
    f, z = plan_series(plan, problem.statistic)(states)
    np.testing.assert_array_equal(f, states.plus.position)
    assert z is None, "nothing but f"


def test_bad_input():
    density = skewed(2).logdensity
    states = start(plain(random_walk(0.5), density), jnp.zeros((16, 2)))
    with pytest.raises(ValueError, match="logdensity_grad"):
        stein_values("first", states)
    assert stein_values("none", states).shape == (1, 16, 0)
    with pytest.raises(ValueError, match="say one of none, first"):
        feature_orders(2, "third")
    with pytest.raises(ValueError, match="5150 Stein features are more than 3000"):
        feature_orders(100, "full")
    problem = make_problem(Model(standard_normal, jnp.zeros(100)))
    with pytest.raises(ValueError, match="use a lower order"):
        swindle(KEY, "stein", hmc(0.3, 1), problem, 16, 10, 10, order="full")
    with pytest.raises(ValueError, match="use at least 8"):
        swindle(KEY, "stein", hmc(0.3, 1), problem, 4, 10, 10, order="first")


def test_kernels_lower_for_cuda():
    """Steps with the sums of a warm-up, and with those of a run."""
    problem = make_problem(in_x(skewed(3)), moments)
    parts, expectation = SCHEMES["cva+stein"], reference_mean(KEY, problem)
    algorithm = parts.build(hmc(0.3, 3), problem.logdensity)
    states = start(algorithm, jnp.ones((8, 3)))
    features = make_features(parts, problem.statistic, 3, expectation, "full")
    mean, number = features.expectation.mean, features.widths[-1]
    blank = np.zeros(6)
    plan = schemes.Plan(
        "cva+stein", "full", np.ones((number, 6)), mean, blank, blank, blank
    )
    series = plan_series(plan, problem.statistic)
    for zero, update in (
        fold_feature_products(problem.statistic, features.observe, mean, states),
        fold_series(series, states),
    ):
        steps = partial(take_steps, step=algorithm.step, update=update)
        exported = export.export(jax.jit(steps), platforms=["cuda"])(
            KEY, states, zero, 0, 10
        )
        assert exported.platforms == ("cuda",)
        assert "callback" not in exported.mlir_module()
