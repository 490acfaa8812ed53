"""Stein features: exact where they must be, honest elsewhere, and never a loss."""

from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from scipy.stats import binom
from scipy.stats import t as student_t

from swindles import stein
from swindles.accuracy import summarize
from swindles.antithetic import antithetic, plain
from swindles.control import control, draw_expectation, exact
from swindles.coupling import (
    advance,
    hmc,
    is_total,
    mala,
    random_walk,
    record,
    run,
    start,
)
from swindles.cva import cva
from swindles.latent import Problem, known_expectation
from swindles.stein import ORDERS, SCHEMES, estimate_stein, fold_stein
from swindles.targets import (
    banana,
    gaussian,
    item_response,
    logistic_regression,
    skewed,
    sparse_logistic_regression,
)
from swindles.transport import Affine, identity, laplace, load, standard_normal

KEY = jax.random.key(20208)
DTYPES = ["float32", "float64"]


def moments(x):
    return jnp.concatenate([x, x**2])


def round_problem(target, statistic=moments):
    to_x = laplace(target.logdensity, jnp.zeros(target.dim))
    return Problem(target.logdensity, to_x, target.dim, statistic)


def sparse_problem(statistic=lambda x: x):
    target = sparse_logistic_regression()
    to_x = load(files("swindles") / "data" / "sparse_flow.npz")
    return Problem(target.logdensity, to_x, 51, statistic)


def sums_of(problem, scheme, sampler, sizes, order="full", known=None, every=1):
    """Running sums of chains x steps after a warm-up, as ``stein_swindle`` has them."""
    chains, warmup, steps = sizes
    keys = jax.random.split(KEY, 3)
    algorithm = scheme(sampler, problem.latent())
    z = jax.random.normal(keys[0], (chains, problem.dim), float)
    states = start(algorithm, z)
    fold = fold_stein(problem.feature(), states, order, known, every)
    states, _ = run(keys[1], algorithm, states, warmup, fold)
    return run(keys[2], algorithm, states, steps, fold)[1]


def per_step(result):
    return result.estimate.ess / result.estimate.num_draws


# Exact oracles


@pytest.mark.parametrize("target", [banana(), skewed(3)], ids=lambda t: t.name)
def test_features_are_steins_operator_of_monomials(target):
    """Laplacian of phi plus gradient of phi times score, by automatic derivatives."""
    dim = target.dim
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
    found = stein.stein_features(z, score, "full")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for order in ORDERS:
        width = stein.levels(dim, order).size
        part = stein.stein_features(z, score, order)
        np.testing.assert_array_equal(part, found[:width])


@pytest.mark.parametrize("sampler", [hmc(0.4, 4), mala(0.5)])
def test_scores_are_the_gradients_at_both_draws(sampler):
    target = skewed(2)
    algorithm = antithetic(sampler, target.logdensity)
    states = start(algorithm, jax.random.normal(KEY, (16, 2)))
    states, _ = run(KEY, algorithm, states, 20)
    slope = jax.vmap(jax.grad(target.logdensity))
    expected = slope(states["plus"].position), slope(-states["minus"].position)
    np.testing.assert_allclose(stein.scores(states), expected, rtol=1e-5, atol=1e-5)


MEAN, COVARIANCE = (
    [1.0, -2.0, 0.5],
    [[2.0, 0.6, 0.1], [0.6, 1.0, -0.3], [0.1, -0.3, 0.5]],
)
# Largest error and largest stated error, in units of the statistics, which are near 1.
EXACT = {"float32": 2e-5, "float64": 1e-7}


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("plain", "float32"), ("cva", "float32"), ("antithetic", "float64")],
)
def test_no_error_on_a_gaussian(scheme, dtype):
    """First order for linear statistics, second for quadratic ones, with a poor map."""
    with jax.enable_x64(dtype == "float64"):
        target = gaussian(MEAN, COVARIANCE)
        to_x = Affine(jnp.full(3, 0.3), jnp.array([1.5, 0.8, 1.0]))
        problem = Problem(
            target.logdensity, to_x, 3, lambda x: jnp.append(moments(x), x[0] * x[1])
        )
        known = known_expectation(KEY, problem)
        sums = sums_of(
            problem, SCHEMES[scheme][0], hmc(0.3, 4), (32, 20, 200), known=known
        )
        truth = np.append(
            np.concatenate([target.truth["mean"], target.truth["square"]]),
            COVARIANCE[0][1] + MEAN[0] * MEAN[1],
        )
        for order, exactly in {"first": 3, "full": 7}.items():
            estimate = estimate_stein(sums, known, order).estimate
            error = np.abs(estimate.mean - truth)[:exactly]
            assert error.max() < EXACT[dtype]
            assert estimate.mcse[:exactly].max() < EXACT[dtype]
        if dtype == "float32":
            assert "below rounding" in " ".join(estimate.warnings())
        alone = estimate_stein(sums, known, "none").estimate
        # An antithetic pair is right about means by itself.
        assert alone.mcse[3:].min() > 1e-3 and alone.warnings() == []


def test_ridge_is_ridge_and_the_path_is_scored_right():
    rng = np.random.default_rng(0)
    g, f = rng.normal(size=(50, 6)), rng.normal(size=(50, 2))
    gram, cross = np.cov(g.T), np.cov(g.T, f.T)[:6, 6:]
    scale = np.sqrt(np.diag(gram))
    fit = stein.ridge(gram, cross)
    test_gram, test_cross = np.cov(g[:20].T), np.cov(g[:20].T, f[:20].T)[:6, 6:]
    left = fit.left(test_gram, test_cross)
    for penalty, score in zip(stein.PENALTIES, left, strict=True):
        beta = np.linalg.solve(gram + penalty * np.diag(scale**2), cross)
        np.testing.assert_allclose(fit.beta(penalty), beta, atol=1e-8)
        remains = np.var(f[:20] - g[:20] @ beta, axis=0, ddof=1)
        np.testing.assert_allclose(score, remains - f[:20].var(0, ddof=1), atol=1e-8)


def test_running_estimate_equals_the_stored_trace():
    """Features, groups, averages over pairs and coefficients, by hand with numpy."""
    problem = round_problem(skewed(2))
    algorithm = antithetic(hmc(0.4, 4), problem.latent())
    states = start(algorithm, jax.random.normal(KEY, (32, 2)))
    fold = fold_stein(problem.feature(), states)
    _, sums = run(KEY, algorithm, states, 60, fold)
    _, longer = run(KEY, algorithm, states, 600, fold)
    bytes_kept = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(kept)) for kept in (sums, longer)
    ]
    assert bytes_kept[0] == bytes_kept[1]
    _, trace = record(KEY, algorithm, states, 60)
    slope = jax.vmap(jax.vmap(jax.grad(problem.latent())))
    f, g = 0, 0
    for z in (trace["plus"], -trace["minus"]):
        values = jax.vmap(jax.vmap(problem.feature()))(z)
        f = f + np.asarray(values, np.float64) / 2
        g = g + np.asarray(stein.stein_features(z, slope(z), "full"), np.float64) / 2
    known = stein.known_means(None, 5)
    betas = stein.fit_stein(sums, known)
    result = estimate_stein(sums)
    corrected = np.concatenate(
        [
            f[:, 8 * k : 8 * k + 8] - g[:, 8 * k : 8 * k + 8] @ betas[k]
            for k in range(4)
        ],
        axis=1,
    )
    np.testing.assert_allclose(
        result.estimate.mean, corrected.mean((0, 1)), rtol=1e-5, atol=1e-5
    )
    spread = corrected.mean(0).std(0, ddof=1) / np.sqrt(32)
    np.testing.assert_allclose(result.estimate.mcse, spread, rtol=1e-3)
    # With many draws the penalty is small, and these are nearly least squares.
    x, y = (a[:, 8:].reshape(-1, a.shape[-1]) for a in (g, f))
    least = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=None)[0]
    np.testing.assert_allclose(betas[0], least, atol=0.02 * np.abs(least).max())
    lower = fold_stein(problem.feature(), states, "diagonal")
    _, few = run(KEY, algorithm, states, 60, lower)
    np.testing.assert_allclose(
        estimate_stein(few).estimate.mean,
        estimate_stein(sums, order="diagonal").estimate.mean,
        atol=1e-5,
    )


# The three posteriors

# Chains, warm-up, steps. ESS per step at the median and at the worst dimension, for
# means and for second moments.
LOGISTIC, LEAST, WORST = (128, 500, 500), (120_000, 15_000), (1_500, 150)
RESPONSE, RESPONSE_LEAST = (64, 100, 400), (6_000, 90)
SPARSE, SPARSE_GAIN = (128, 300, 400), 1.4


@pytest.fixture(scope="module")
def logistic():
    """Sums of the same run of the logistic regression in both precisions."""
    found = {}
    for dtype in DTYPES:
        with jax.enable_x64(dtype == "float64"):
            problem = round_problem(logistic_regression())
            found[dtype] = sums_of(problem, antithetic, hmc(0.3, 5), LOGISTIC)
    return found


@pytest.fixture(scope="module")
def responses():
    problem = round_problem(item_response())
    return sums_of(problem, antithetic, hmc(0.3, 5), RESPONSE, "diagonal")


@pytest.fixture(scope="module")
def sparse():
    problem = sparse_problem()
    known = known_expectation(KEY, problem, 1_000_000)
    return known, sums_of(problem, cva, hmc(0.2, 5), SPARSE, "full", known)


def test_logistic_regression(logistic):
    result = estimate_stein(logistic["float32"])
    ess = per_step(result).reshape(2, 25)
    assert result.estimate.num_draws == 128 * 500
    assert (np.median(ess, axis=1) >= LEAST).all(), np.median(ess, axis=1)
    assert (ess.min(1) >= WORST).all(), ess.min(1)
    assert result.estimate.warnings() == []


def test_single_precision_agrees_with_double(logistic):
    single, double = (estimate_stein(logistic[dtype]).estimate for dtype in DTYPES)
    distance = (single.mean - double.mean) / np.hypot(single.mcse, double.mcse)
    assert np.abs(distance).max() < 4
    assert np.sqrt(np.mean(distance**2)) < 1.5
    assert (single.rounding < single.mcse).all()
    assert (double.rounding < 1e-6 * double.mcse).all()


def test_item_response(responses):
    ess = per_step(estimate_stein(responses, order="diagonal")).reshape(2, 501)
    assert (np.median(ess, axis=1) >= RESPONSE_LEAST).all(), np.median(ess, axis=1)


def test_sparse_regression(sparse):
    known, sums = sparse
    ess = {
        order: np.median(per_step(estimate_stein(sums, known, order)))
        for order in ("none", "full")
    }
    assert ess["full"] >= SPARSE_GAIN * ess["none"], ess


def check_means(sums):
    """No feature's mean is further from zero than chance allows."""
    estimate = summarize(sums.controls.feature)
    own = sums.level[0] > 0
    limit = student_t.ppf(1 - 0.001 / (2 * own.sum()), estimate.degrees)
    ratio = np.abs(estimate.mean / estimate.mcse)[own]
    assert ratio.max() < limit, (ratio.max(), limit)
    assert (estimate.mcse[own] > 0).all()


def test_features_of_the_logistic_regression_have_mean_zero(logistic):
    for sums in logistic.values():
        check_means(sums)


def test_features_of_the_item_response_have_mean_zero(responses):
    check_means(responses)


def test_features_of_the_sparse_regression_have_mean_zero(sparse):
    check_means(sparse[1])


BRIEF = {"item response": (32, 40, 40), "sparse": (128, 300, 200)}


@pytest.mark.parametrize("name", BRIEF)
def test_features_have_mean_zero_in_double_precision(name):
    with jax.enable_x64(True):
        if name == "sparse":
            problem, order, step = sparse_problem(), "full", (0.2, 5)
        else:
            problem = round_problem(item_response(), lambda x: x[:1])
            order, step = "diagonal", (0.3, 5)
        sums = sums_of(problem, plain, hmc(*step), BRIEF[name], order, every=1000)
        assert sums.controls.feature.total.dtype == np.float64
        check_means(sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [skewed(3), banana()], ids=lambda t: t.name)
def test_features_of_skewed_toys_have_mean_zero(target, dtype):
    with jax.enable_x64(dtype == "float64"):
        problem = Problem(target.logdensity, identity(target.dim), target.dim, moments)
        sizes = 256, 200, 400
        check_means(sums_of(problem, antithetic, hmc(0.3, 5), sizes, every=1000))


# Repeats

REPEATS, CHAINS, WARMUP, STEPS, BLOCKS = 200, 16, 40, 60, 20
LEVEL, CHANCE = 0.95, 1e-4  # the chance is two-sided, for each statistic
WORSE = 1.05  # the most that more features may add to the error


class Kept(NamedTuple):
    position: Any
    logdensity_grad: Any


class Decision(NamedTuple):
    acceptance_rate: Any
    is_accepted: Any


def keep(states, infos):
    return (
        {name: Kept(s.position, s.logdensity_grad) for name, s in states.items()},
        {name: Decision(i.acceptance_rate, i.is_accepted) for name, i in infos.items()},
    )


class Repeats:
    """Many short runs at once, all chains of all repeats side by side.

    The fold sees all steps of one repeat as one step of more chains; then its sums by
    chain are added up over the steps.
    """

    def __init__(self, problem, sampler, scheme, known, steps=STEPS):
        self.known, self.steps = known, steps
        algorithm = SCHEMES[scheme][0](sampler, problem.latent())
        z = jax.random.normal(KEY, (REPEATS * CHAINS, problem.dim))
        states, _ = run(jax.random.key(1), algorithm, start(algorithm, z), WARMUP)
        _, trace = record(jax.random.key(2), algorithm, states, steps, keep)
        # From (steps, repeats x chains, ...) to (repeats, chains x steps, ...).
        self.trace = jax.tree.map(
            lambda x: (
                x.reshape(steps, REPEATS, CHAINS, *x.shape[2:])
                .transpose(1, 2, 0, *range(3, x.ndim + 1))
                .reshape(REPEATS, CHAINS * steps, *x.shape[2:])
            ),
            trace,
        )
        first = jax.tree.map(lambda x: x[0], self.trace[0])
        self.zero, update = fold_stein(problem.feature(), first, "full", known)
        self.update = jax.jit(update)

    def sums(self, repeat):
        states, infos = jax.tree.map(lambda x: x[repeat], self.trace)
        sums = jax.device_get(self.update(self.zero, states, infos))

        def moments(m):
            total, square = (
                a.reshape(CHAINS, BLOCKS, self.steps // BLOCKS, -1)
                .sum(2)
                .swapaxes(0, 1)
                for a in (m.total, m.square)
            )
            center = np.stack([m.center] * BLOCKS)
            return type(m)(center, np.full(BLOCKS, self.steps / BLOCKS), total, square)

        controls, level, size = sums
        pairs = controls.pairs
        rates = jax.tree.map(lambda x: np.asarray(x)[None], pairs.rates)
        controls = jax.tree.map(
            lambda t: (
                t._replace(value=np.asarray(t.value, np.float64)) if is_total(t) else t
            ),
            controls,
            is_leaf=is_total,
        )._replace(
            pairs=pairs._replace(
                plus=moments(pairs.plus), average=moments(pairs.average), rates=rates
            ),
            feature=moments(controls.feature),
        )
        size = size._replace(value=np.asarray(size.value, np.float64) * self.steps)
        return stein.SteinSums(controls, level[None], size)

    def estimates(self):
        """By order: means, errors and interval ends, each of shape (repeats, dim)."""
        found = {order: [] for order in ORDERS}
        for repeat in range(REPEATS):
            sums = self.sums(repeat)
            for order in ORDERS:
                e = estimate_stein(sums, self.known, order).estimate
                found[order].append((e.mean, e.mcse, *e.interval(LEVEL)))
        return {order: np.array(rows).swapaxes(0, 1) for order, rows in found.items()}


def check_repeats(estimates, truth, truth_error=0.0):
    """Coverage and bias of every order; and none is worse than the one before."""
    squares = {}
    for order, (mean, mcse, lower, upper) in estimates.items():
        covered = ((lower < truth) & (truth < upper)).sum(0)
        least, most = binom.ppf([CHANCE, 1 - CHANCE], REPEATS, LEVEL)
        assert covered.min() >= least, (order, covered)
        assert np.median(covered) <= most, (order, covered)
        deviation = mean.std(0, ddof=1)
        bias = (mean.mean(0) - truth) / np.hypot(
            deviation / np.sqrt(REPEATS), truth_error
        )
        assert np.abs(bias).max() < 4, (order, bias)
        stated = np.sqrt(np.mean(mcse**2, axis=0))
        assert 0.85 < np.median(stated / deviation) < 1.15, order
        square = (mean - mean.mean(0)) ** 2
        squares[order] = square / square.mean(0), np.log(square.mean(0)) / 2
    for low, high in pairwise(ORDERS):
        # For each statistic as far as the repeats can tell, and on average.
        change = squares[high][1] - squares[low][1]
        error = np.std(squares[high][0] - squares[low][0], axis=0) / 2 / REPEATS**0.5
        assert (change - 4 * error < np.log(WORSE)).all(), (low, high, change, error)
        ratio = np.exp(change.reshape(2, -1).mean(1))
        assert (ratio < WORSE).all(), (low, high, ratio)


@pytest.mark.parametrize("scheme", ["plain", "cva"])
def test_repeats_on_logistic_regression(logistic, scheme):
    problem = round_problem(logistic_regression())
    known = known_expectation(KEY, problem)
    truth = estimate_stein(logistic["float64"]).estimate
    estimates = Repeats(problem, hmc(0.3, 5), scheme, known).estimates()
    check_repeats(estimates, truth.mean, truth.mcse)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_repeats_on_a_skewed_target(scheme):
    target = skewed(2)
    problem = round_problem(target)
    known = known_expectation(KEY, problem)
    truth = np.concatenate([target.truth["mean"], target.truth["square"]])
    # Squares have a long tail here: 60 steps of 16 chains are too few for Student's t.
    estimates = Repeats(problem, hmc(0.4, 4), scheme, known, 240).estimates()
    check_repeats(estimates, truth)


def test_useless_features_do_no_harm():
    """Waves too short for polynomials: 65 features have nothing to say about them."""
    statistic = lambda x: jnp.concatenate([jnp.sin(6 * x), jnp.cos(6 * x)])  # noqa: E731
    problem = Problem(standard_normal, identity(10), 10, statistic)
    estimates = Repeats(problem, hmc(0.5, 3), "plain", None).estimates()
    truth = np.repeat([0, np.exp(-18)], 10)
    check_repeats(estimates, truth)


def test_shrinking_helps_when_draws_are_fewer_than_features(monkeypatch):
    """350 features, 240 draws to fit them: stated errors with and without a ridge."""
    monkeypatch.setitem(globals(), "REPEATS", 12)
    problem = round_problem(logistic_regression())
    repeats = Repeats(problem, hmc(0.3, 5), "plain", None, steps=20)
    shrunk = repeats.estimates()["full"][1]
    monkeypatch.setattr(stein, "PENALTIES", np.array([1e-9]))
    free = repeats.estimates()["full"][1]
    ratio = np.sqrt((free**2).mean(0) / (shrunk**2).mean(0))
    assert ratio.max() > 1.3 and ratio.min() > 0.95, ratio


def test_a_poorly_known_mean_is_not_leaned_on():
    """The noise of E_Q, from 64 draws, would swamp what the control chain gains."""
    problem = round_problem(skewed(2))
    noisy = draw_expectation(KEY, problem.feature(), jnp.zeros(2), 64)
    exactly = known_expectation(KEY, problem)
    error = {}
    for name, known in {"noisy": noisy, "exact": exactly}.items():
        sums = sums_of(problem, control, hmc(0.4, 4), (64, 50, 400), "none", known)
        error[name] = estimate_stein(sums, known, "none").estimate.mcse
        alone = summarize(sums.controls.pairs.plus).mcse
    assert (error["exact"] < 0.7 * alone)[:2].all(), error["exact"] / alone  # means
    assert (error["noisy"] < 1.1 * alone).all(), error["noisy"] / alone
    certain = noisy._replace(covariance=np.zeros((4, 4)))
    for table in (
        lambda known: stein.tables(sums, known, [0, 1, 2])[0],
        lambda known: stein.block_tables(sums, known, 3)[0],
    ):
        noise = table(noisy) - table(certain)
        np.testing.assert_allclose(noise, 64 * 400 * noisy.covariance, atol=1e-6)


# Cost


def test_thinned_products_cost_little_accuracy(logistic):
    """Coefficients from every third step: 60 draws for each of the 350 features."""
    problem = round_problem(logistic_regression())
    thinned = sums_of(problem, antithetic, hmc(0.3, 5), LOGISTIC, every=3)
    count = thinned.controls.total.value[:, 0].sum()
    assert count == 128 * 20 * -(-25 // 3)
    few, all_of_them = (
        np.median(estimate_stein(sums).estimate.ess)
        for sums in (thinned, logistic["float32"])
    )
    assert few > 0.9 * all_of_them


# The choice


def test_choice_on_logistic_regression(capsys):
    problem = round_problem(logistic_regression())
    choice = stein.choose(KEY, hmc(0.3, 5), problem)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "full Stein features" in printed
    assert choice.scheme in (antithetic, cva) and choice.order == "full"
    assert len(choice.forecast) == 16
    assert (
        choice.forecast["antithetic", "full"] > 100 * choice.forecast["plain", "none"]
    )
    # The forecast is of the right size: against a run of its own.
    sums = sums_of(problem, antithetic, hmc(0.3, 5), (64, 100, 200), "first")
    ess = estimate_stein(sums, order="first").estimate.ess
    own = np.exp(np.log(ess).mean()) / 200
    other = choice.forecast["antithetic", "first"] / choice.forecast["plain", "none"]
    alone = estimate_stein(
        sums_of(problem, plain, hmc(0.3, 5), (64, 100, 200), "none"), order="none"
    ).estimate.ess
    ratio = own / (np.exp(np.log(alone).mean()) / 200) / 2
    assert 0.5 < other / ratio < 2


def test_choice_without_gradients(capsys):
    problem = round_problem(skewed(2))
    choice = stein.choose(KEY, random_walk(0.8), problem, num_steps=60)
    assert choice.order == "none" and len(choice.forecast) == 4


def test_prices_add_up():
    prices = stein.Prices(target=10.0, reference=1.0, product=0.01)
    assert prices.step("plain", 0, 5) == 10
    assert prices.step("antithetic", 10, 5) == 20 + 0.01 * 150
    assert prices.step("control", 0, 5) == 11
    assert prices.step("cva", 0, 5) == 21


def test_forecasts_count_the_time_of_a_step():
    sums = sums_of(
        round_problem(skewed(2)), antithetic, hmc(0.4, 4), (16, 10, 40), "first"
    )
    ess = estimate_stein(sums, order="first").estimate.ess
    prices = stein.Prices(target=0.5, reference=7.0, product=0.01)
    found = stein.draws_per_second(sums, None, "antithetic", "first", prices)
    time = 40 * (2 * 0.5 + 2 * (2 + 4) * 0.01)
    assert found == pytest.approx(np.exp(np.log(ess).mean()) / time)


# Bad input, other machines


def test_bad_input():
    density = skewed(2).logdensity
    walk = plain(random_walk(0.5), density)
    states = start(walk, jnp.zeros((16, 2)))
    with pytest.raises(ValueError, match="logdensity_grad"):
        fold_stein(lambda z: z, states)
    fold_stein(lambda z: z, states, "none")
    states = start(plain(hmc(0.3, 3), density), jnp.zeros((16, 2)))
    with pytest.raises(ValueError, match="say one of none, first"):
        fold_stein(lambda z: z, states, "third")
    with pytest.raises(ValueError, match="use at least 8"):
        fold_stein(lambda z: z, start(plain(hmc(0.3, 3), density), jnp.zeros((4, 2))))
    controlled = start(control(hmc(0.3, 3), density), jnp.zeros((16, 2)))
    with pytest.raises(ValueError, match="expectation under Q"):
        fold_stein(lambda z: z, controlled)
    with pytest.raises(ValueError, match="entries but there are"):
        fold_stein(lambda z: z, controlled, "full", exact(np.zeros(3)))
    wide = start(plain(hmc(0.3, 1), standard_normal), jnp.zeros((8, 100)))
    with pytest.raises(ValueError, match="5150 features are more than 3000"):
        fold_stein(lambda z: z, wide)
    with pytest.raises(ValueError, match="must be a positive number"):
        fold_stein(lambda z: z, states, every=0)


def test_kernels_lower_for_cuda():
    problem = round_problem(skewed(3))
    known = known_expectation(KEY, problem)
    algorithm = cva(hmc(0.3, 3), problem.latent())
    states = start(algorithm, jnp.ones((8, 3)))
    zero, update = stein.fold_schemes(problem.feature(), states, "full", known)
    exported = export.export(advance, platforms=["cuda"])(
        KEY, states, zero, 0, 10, algorithm.step, update, False
    )
    assert exported.platforms == ("cuda",)
    assert "callback" not in exported.mlir_module()
