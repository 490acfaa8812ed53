"""All schemes through one loop, through maps, and in BlackJAX's shape."""

import inspect
import warnings
from functools import cache, partial
from importlib.resources import files

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from scipy.stats import binom, norm

from swindles import hmc_antithetic, hmc_control, hmc_cva, schemes
from swindles.antithetic import estimate_series, fold_series, mirror, negate
from swindles.control import (
    exact_expectation,
    fold_feature_products,
    fold_pair_products,
    polynomial_degree,
    reference_mean,
    residual_variance,
)
from swindles.coupling import hmc, mala, random_walk, record, run, start, take_steps
from swindles.models import Model, make_problem
from swindles.neutra import load_map
from swindles.schemes import (
    SCHEMES,
    Plan,
    find_scheme,
    finish_run,
    fit_scheme,
    make_features,
    plan_series,
    start_mirrored,
    swindle,
)
from swindles.stein import stein_values
from swindles.targets import (
    gaussian,
    logistic_regression,
    skewed,
    sparse_logistic_regression,
)
from swindles.transport import (
    Affine,
    best_gaussian,
    laplace,
    log_weights,
    map_quality,
    standard_normal,
)
from swindles.tuning import HMC, Grid, make_trial, run_pilot

KEY = jax.random.key(20204)
FOUR = ["plain", "antithetic", "control", "cva"]


def moments(x):
    return jnp.concatenate([x, x**2])


def problem_in_x(target, statistic=lambda x: x):
    """A problem whose statistic sees the unconstrained position."""
    return make_problem(target._replace(constrain=lambda x: x), statistic)


# The registry.


def test_each_scheme_comes_with_and_without_stein_features():
    pairs = dict(
        zip(FOUR, ["stein", *(f"{name}+stein" for name in FOUR[1:])], strict=True)
    )
    assert set(SCHEMES) == {*pairs, *pairs.values()}
    for name, with_stein in pairs.items():
        assert not SCHEMES[name].stein and SCHEMES[with_stein].stein
        assert SCHEMES[name]._replace(stein=True) == SCHEMES[with_stein]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_runs_the_chains_it_names(name):
    scheme = find_scheme(name)
    algorithm = scheme.build(hmc(0.3, 2), standard_normal)
    assert algorithm.init(jnp.ones(2))._fields == scheme.chains
    assert scheme.num_targets == 1 + ("minus" in scheme.chains)
    f, g = scheme.rows(scheme.chains)
    assert len(f) == scheme.num_targets and len(g) == scheme.has_control * len(f)


def test_unknown_scheme():
    with pytest.raises(ValueError, match="'magic': say one of plain, antithetic"):
        swindle(KEY, "magic", hmc(0.3, 2), None, 8, 10, 10)


# The loop.


def bent(z):
    return 0.4 + 0.9 * z - 0.35 * (jnp.logaddexp(z, -z) - jnp.log(2.0))


class Bent:
    """A map that is wider on the left than on the right."""

    def __call__(self, z):
        return bent(z)

    def with_log_det(self, z):
        return bent(z), jnp.log(0.9 - 0.35 * jnp.tanh(z)).sum()


def skewed_through_bent(dim):
    """Alike coordinates through a map that is not theirs; the truth."""
    target = skewed(dim)
    truth = np.concatenate([target.truth["mean"], target.truth["square"]])
    return problem_in_x(target, moments).through(Bent()), truth


@pytest.fixture(scope="module")
def bent_problem():
    return skewed_through_bent(2)


COVERED_DIM = 50


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_covers_the_truth_through_a_bent_map(scheme):
    """Fifty alike coordinates are fifty repeats of one loop. A wrong log-determinant or
    a statistic read in latent space would show."""
    problem, truth = skewed_through_bent(COVERED_DIM)
    result = swindle(KEY, scheme, hmc(0.25, 6), problem, 32, 200, 100, order="diagonal")
    found, parts = result.estimate, SCHEMES[scheme]
    low, high = found.interval(0.95)
    covered = ((low < truth) & (truth < high)).reshape(2, -1).sum(1)
    assert covered.min() >= binom.ppf(1e-4, COVERED_DIM, 0.95), covered
    score = ((found.mean - truth) / found.mcse).reshape(2, -1)
    assert (np.abs(score.mean(1)) < 4 / np.sqrt(COVERED_DIM)).all()  # no common bias
    assert (score.std(1) > 0.7).all() and (score.std(1) < 1.4).all()
    assert found.mcse.max() < 0.1  # of deviations near 1
    has_features = parts.has_control or parts.stein
    assert (result.beta is not None) == ("features" in result.rho) == has_features
    measured = set() if parts.stein else set(parts.chains) - {"plus"}
    assert set(result.rho) - {"features"} == measured
    for rho in result.rho.values():
        assert rho.shape == (2 * COVERED_DIM,) and (np.abs(rho) <= 1).all()
    assert set(result.rates["decoupling"]) == set(parts.chains) - {"plus"}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [mala(0.6), random_walk(0.8)])
def test_other_samplers_read_the_truth_through_a_bent_map(bent_problem, sampler):
    problem, truth = bent_problem
    estimate = swindle(KEY, "cva", sampler, problem, 64, 800, 200).estimate
    assert np.abs((estimate.mean - truth) / estimate.mcse).max() < 4
    assert estimate.mcse.max() < 0.1  # of deviations near 1


def test_mirrored_in_z_and_not_in_x():
    problem = problem_in_x(Model(standard_normal, jnp.ones(2)))
    problem = problem.through(Bent())._replace(logdensity=standard_normal)
    algorithm = SCHEMES["antithetic"].build(hmc(0.5, 3), problem.logdensity)
    states = start(algorithm, jax.random.normal(KEY, (16, 2)))
    _, trace = record(KEY, algorithm, states, 60)
    z_plus, z_minus = trace.plus[-1], trace.minus[-1]
    np.testing.assert_allclose(z_plus, -z_minus, atol=1e-5)
    pair = plan_series(
        Plan("antithetic", "none", np.zeros((0, 2)), *[np.zeros(2)] * 4),
        problem.statistic,
    )
    at_the_end = states._replace(
        plus=states.plus._replace(position=z_plus),
        minus=states.minus._replace(position=z_minus),
    )
    plus, swindled = pair(at_the_end)
    np.testing.assert_allclose(plus, bent(z_plus), rtol=1e-6)
    both = (bent(z_plus) + bent(-z_plus)) / 2
    np.testing.assert_allclose(swindled, both, atol=1e-5)
    assert both.std() > 0.1  # the sum of the two is constant in z alone


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["control", "cva", "cva+stein"])
def test_no_variance_when_q_is_p(scheme):
    """On any Gaussian, through its own map: all the error is that of rounding.

    Draws of Q would leave more: the means of polynomials are worked out.
    """
    target = gaussian(np.array([1.0, 2.0]), np.array([[2.0, 0.6], [0.6, 0.5]]))
    truth = np.concatenate([target.truth["mean"], target.truth["square"]])
    problem = problem_in_x(target, moments)
    problem = problem.through(laplace(target.logdensity, jnp.zeros(2)))
    result = swindle(KEY, scheme, hmc(0.5, 3), problem, 32, 200, 100)
    np.testing.assert_allclose(result.estimate.mean, truth, rtol=3e-5)
    assert result.estimate.mcse.max() < 1e-4 * np.sqrt(result.estimate.variance.min())
    assert result.rates["decoupling"]["control"] < 0.01


@pytest.mark.slow
def test_gaussian_with_mean_three_averages_to_three():
    """Without a map: the mirror image of a state is no position."""
    problem = make_problem(Model(lambda x: -0.5 * jnp.sum((x - 3) ** 2), jnp.zeros(2)))
    found = swindle(KEY, "antithetic", hmc(0.5, 3), problem, 16, 100, 100).estimate
    np.testing.assert_allclose(found.mean, 3, atol=1e-5)
    assert found.mcse.max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["cva", "cva+stein"])
def test_the_loop_is_the_average_of_its_trace(bent_problem, scheme):
    """Z by numpy, from a replay with the same keys and the coefficients it reports."""
    problem, _ = bent_problem
    expectation = reference_mean(KEY, problem, 8192)
    order, chains, steps = "full", 32, 100
    result = swindle(
        KEY,
        scheme,
        hmc(0.4, 4),
        problem,
        chains,
        steps,
        2 * steps,
        expectation,
        order=order,
    )
    parts, keys = SCHEMES[scheme], jax.random.split(KEY, 4)
    algorithm = parts.build(hmc(0.4, 4), problem.logdensity)
    states = start_mirrored(algorithm, jax.random.normal(keys[0], (chains, 2)))

    def observe(states, infos):
        return states, stein_values(order, states).mean(0)

    # One program takes all the steps: both halves of the warm-up, and the run.
    warm = jax.random.split(keys[1])
    states, _ = record(warm[0], algorithm, states, steps, observe)
    if scheme == "cva":  # what it learned in the second half, and not in the run
        fold = fold_pair_products(problem.statistic, states)
        _, learned = run(warm[1], algorithm, states, steps, fold)
        features = make_features(parts, problem.statistic, 2, expectation)
        fitted = fit_scheme(parts, learned, features, chains * steps)
        np.testing.assert_allclose(result.beta, fitted.beta, rtol=1e-4)
        assert result.beta.shape == (4,) and (result.beta > 0).all()
    states, _ = record(warm[1], algorithm, states, steps, observe)
    _, (seen, stein) = record(keys[2], algorithm, states, steps, observe)
    f = np.mean([moments_along(chain) for chain in (seen.plus, seen.minus)], 0)
    if parts.has_control:
        y = seen.control.position
        g = np.mean([moments_along_z(z) for z in (y, -y)], 0)
        excess = g - expectation.mean
        if parts.stein:
            excess = np.concatenate([excess, stein], -1)[..., : len(result.beta)]
            f = f - excess @ result.beta
        else:
            f = f - excess * result.beta
    chain_means = f.mean(0)
    spread = chain_means.var(0, ddof=1) / chains
    if parts.has_control and parts.stein:
        beta = result.beta[:4]
        spread = spread + np.einsum("kd,kl,ld->d", beta, expectation.covariance, beta)
    elif parts.has_control:
        spread = spread + result.beta**2 * np.diag(expectation.covariance)
    np.testing.assert_allclose(result.estimate.mean, chain_means.mean(0), atol=2e-5)
    np.testing.assert_allclose(result.estimate.mcse, np.sqrt(spread), rtol=2e-3)


def moments_along_z(z):
    x = np.asarray(bent(z), np.float64)
    return np.concatenate([x, x**2], -1)


def moments_along(chain):
    return moments_along_z(chain.position)


SETTINGS = {  # of the authors' code: step size, leapfrog steps; ESS per step
    "plain": (0.920, 1, (0.19, 0.33)),
    "antithetic": (1.000, 1, (2.1, 0.35)),
    "control": (0.577, 3, (16.8, 12.7)),
    "cva": (0.365, 4, (72.3, 80.0)),
}


def run_with_plain(*arguments):
    """A run, and what the first of its chains says alone: plain HMC."""
    kept = []

    def finish(sums, *rest):
        kept.append(estimate_series(sums._replace(swindled=None), rho={}))
        return finish_run(sums, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schemes, "finish_run", finish)
        result = swindle(*arguments)
    return result, kept[0]


@pytest.fixture(scope="module")
def authors_runs():
    """Logistic regression: 25 means and 25 squared deviations, with every scheme."""
    target = logistic_regression()
    to_x = laplace(target.logdensity, jnp.zeros(25))

    def statistic(x):
        return jnp.concatenate([x, (x - to_x.shift) ** 2])

    problem = problem_in_x(target, statistic).through(to_x)
    return np.asarray(to_x.shift), {
        scheme: run_with_plain(KEY, scheme, hmc(size, leaps), problem, 128, 200, 100)
        for scheme, (size, leaps, _) in SETTINGS.items()
    }


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.parametrize("scheme", SETTINGS)
def test_efficiency_is_that_of_the_authors_code(authors_runs, scheme):
    """The median over means and over squared deviations."""
    found = authors_runs[1][scheme][0].estimate
    # The ESS of 128 chains has an error of an eighth, and the median less.
    per_step = np.median(found.ess.reshape(2, 25), axis=1) / found.num_draws
    ratio = per_step / np.array(SETTINGS[scheme][2])
    assert (ratio > 0.7).all() and (ratio < 1.4).all()
    assert found.warnings() == []


@pytest.mark.optimised
@pytest.mark.slow
def test_formulas_of_the_paper(authors_runs):
    """ESS / (1 - rho^2) and 2 ESS / (1 + rho), at the median over statistics."""
    result, alone = authors_runs[1]["antithetic"]
    expected = 2 * alone.estimate.ess / (1 + result.rho["minus"])
    assert 0.75 < np.median(result.estimate.ess / expected) < 1.33
    result, alone = authors_runs[1]["control"]
    for name in ("control", "features"):  # from the warm-up, and from the run
        expected = alone.estimate.ess / (1 - result.rho[name] ** 2)
        assert 0.75 < np.median(result.estimate.ess / expected) < 1.33


@pytest.mark.optimised
@pytest.mark.slow
def test_logistic_regression_has_the_published_moments(authors_runs, logistic_truth):
    """German credit against inference-gym's long run."""
    mode, runs = authors_runs
    reference, error = (
        logistic_truth.IDENTITY_MEAN,
        logistic_truth.IDENTITY_MEAN_STANDARD_ERROR,
    )
    for scheme, (result, _) in runs.items():
        mean, mcse = result.estimate.mean[:25], result.estimate.mcse[:25]
        assert np.abs((mean - reference) / np.hypot(mcse, error)).max() < 4, scheme
        square, its_error = result.estimate.mean[25:], result.estimate.mcse[25:]
        deviation = np.sqrt(square - (mean - mode) ** 2)
        # The error of a Gaussian's standard deviation is that of its mean over sqrt(2).
        error_here = np.hypot(its_error / (2 * deviation), error / np.sqrt(2))
        z = (deviation - logistic_truth.IDENTITY_STANDARD_DEVIATION) / error_here
        assert np.abs(z).max() < 4, scheme


def test_bad_input(bent_problem):
    problem, _ = bent_problem
    with pytest.raises(ValueError, match="1 entries but there are 4"):
        swindle(KEY, "cva", hmc(0.4, 4), problem, 16, 9, 9, exact_expectation([0.0]))
    expectation = exact_expectation(np.zeros(4))
    for scheme in ("control", "stein"):
        with pytest.raises(ValueError, match="use at least 8"):
            swindle(
                KEY, scheme, hmc(0.4, 4), problem, 4, 9, 9, expectation, order="first"
            )
    with pytest.raises(ValueError, match="say one of none, first"):
        swindle(KEY, "stein", hmc(0.4, 4), problem, 16, 9, 9, order="second")
    with pytest.raises(ValueError, match="expectation under Q"):
        make_features(SCHEMES["control"], problem.statistic, 2)


@pytest.mark.slow
def test_one_plain_chain_is_enough(bent_problem):
    problem, truth = bent_problem
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = swindle(KEY, "plain", hmc(0.4, 4), problem, 1, 2000, 100).estimate
    assert np.abs((found.mean - truth) / found.mcse).max() < 4


# E_Q through the loop.


AWKWARD = {
    "x > 2": lambda x: 1.0 * (x > 2),
    "floor": jnp.floor,
    "round": jnp.round,
    "sign": jnp.sign,
    "where": lambda x: jnp.where(x > 1.5, x, 0.0),
    "clip": lambda x: jnp.clip(x, -1, 1),
    "relu": lambda x: jax.nn.relu(x - 1.5),
    "astype": lambda x: x.astype(int).astype(x.dtype),
    "searchsorted": lambda x: 1.0 * jnp.searchsorted(jnp.array([-1.0, 0.3]), x),
    "abs": jnp.abs,
    "huber": lambda x: jnp.where(jnp.abs(x) < 1, x**2 / 2, jnp.abs(x) - 0.5),
    "stop": lambda x: jax.lax.stop_gradient(jnp.abs(x)) + x,
    "exp": jnp.exp,
    "cosine": jnp.cos,
    "remainder": lambda x: x % 1,
    "interpolation": lambda x: jnp.interp(
        x, jnp.array([-1.0, 0.0, 2.0]), jnp.array([1.0, 0.0, 1.0])
    ),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * jnp.cos(x), x),
    "cond": lambda x: jax.lax.cond(x[0] > 0.5, lambda y: y, lambda y: 2 * y, x),
    "quartic": lambda x: x**4,
    "half": lambda x: jnp.round(8 * x).astype(jnp.float16).astype(x.dtype),
    "maximum": lambda x: jnp.maximum(x, 0.2),
}


@pytest.mark.slow
def test_awkward_statistics_are_not_exact_in_the_loop():
    """Q = P: the answer is E_Q, and its error bar is that of E_Q alone."""
    to_x = Affine(jnp.array([0.4]), jnp.array([0.9]))
    target = gaussian(np.array([0.4]), np.array([[0.81]]))

    def statistic(x):
        return jnp.concatenate([f(x) for f in AWKWARD.values()])

    problem = problem_in_x(target, statistic).through(to_x)
    assert polynomial_degree(problem.statistic, jnp.zeros(1)) == np.inf
    x = np.linspace(0.4 - 7, 0.4 + 7, 200_001)[:, None]
    weight = norm.pdf(x[:, 0], 0.4, 0.9)
    values = np.asarray(jax.lax.map(statistic, jnp.asarray(x, jnp.float32)), float)
    truth = weight @ values / weight.sum()
    found = swindle(KEY, "cva", hmc(0.5, 3), problem, 32, 200, 100).estimate
    score = (found.mean - truth) / found.mcse
    assert np.abs(score).max() < 4.5, dict(zip(AWKWARD, score, strict=True))
    # 400 000 draws of Q leave an error.
    assert (found.mcse / np.sqrt(found.variance) > 1e-5).all()


# How good a map is.


def gains(problem, step_size=0.4, leaps=4, chains=64, steps=150):
    """A pilot run, and the gain it promises to each scheme."""
    z = jax.random.normal(KEY, (chains, problem.dim))
    trial = make_trial("cva", HMC, problem, z)
    pilot = run_pilot(KEY, trial, Grid([step_size], [leaps]), steps)
    covariance = pilot.covariance()
    left = {
        name: residual_variance(covariance, *SCHEMES[name].rows())[0]
        for name in FOUR[1:]
    }
    return pilot, {n: 1 / (SCHEMES[n].num_targets * v) for n, v in left.items()}


@pytest.mark.slow
def test_pilot_tells_a_perfect_map_from_a_poor_one():
    target = gaussian(np.array([1.0, 2.0]), np.array([[2.0, 0.6], [0.6, 0.5]]))
    perfect = laplace(target.logdensity, jnp.zeros(2))
    narrow = perfect._replace(scale=0.5 * perfect.scale)
    pilot, good = gains(problem_in_x(target).through(perfect))
    assert pilot.decoupling["control"][0] == 0
    assert all(gain.min() > 1e4 for gain in good.values())
    pilot, poor = gains(problem_in_x(target).through(narrow))
    assert poor["control"].max() < 10
    assert map_quality(KEY, target, perfect)[0] < 0
    assert map_quality(KEY, target, narrow)[0] > 0.5


@pytest.mark.slow
def test_gains_are_those_of_the_formulas(bent_problem):
    """1 / (1 + rho) and 1 / (1 - rho^2), from the correlations of the pilot run."""
    pilot, found = gains(bent_problem[0])
    covariance = pilot.covariance()[:, :, 0]
    deviation = np.sqrt(np.einsum("iid->id", covariance))
    rho = covariance / (deviation[:, None] * deviation)
    middle = np.median(found["antithetic"] * (1 + rho[0, 1]))
    np.testing.assert_allclose(middle, 1, rtol=0.05)
    np.testing.assert_allclose(found["control"], 1 / (1 - rho[0, 2] ** 2), rtol=1e-6)
    assert np.median(found["control"]) > 3


@pytest.fixture(scope="module")
def round_map():
    target = logistic_regression()
    return target, best_gaussian(target.logdensity, jnp.zeros(target.dim))


@pytest.mark.optimised
@pytest.mark.slow
def test_best_gaussian_is_within_a_tenth_of_a_nat_of_the_best(round_map):
    """The best -ELBO known is from long fits by Adam; `test_results.py` has another."""
    target, to_x = round_map
    weights = log_weights(KEY, target.logdensity, to_x, target.dim, 4096)
    assert -0.05 < -weights.mean() - 506.229 < 0.1


@pytest.mark.optimised
@pytest.mark.slow
def test_control_correlates_after_a_full_rank_fit(round_map):
    """On the item response it is replayed in `test_results.py`."""
    target, to_x = round_map
    problem = problem_in_x(target).through(to_x)
    result = swindle(KEY, "control", hmc(0.3, 5), problem, 64, 100, 100)
    assert 0.935 < result.rates["acceptance"]["plus"] < 0.97
    assert np.median(result.rho["control"]) >= 0.99


def sparse_flow():
    return load_map(files("swindles") / "data" / "sparse_flow.npz")


def published_sparse(truth):
    """Published means and their errors, in the order of a flattened parameter dict."""
    names = ("global_scale", "local_scales", "unscaled_weights")
    mean, error = (
        np.concatenate(
            [
                np.ravel(getattr(truth, f"IDENTITY_{n.upper()}_MEAN{ending}"))
                for n in names
            ]
        )
        for ending in ("", "_STANDARD_ERROR")
    )
    return mean, error


@pytest.fixture(scope="module")
def sparse_runs():
    """CVA; and plain HMC, which is the first of its chains."""
    problem = make_problem(sparse_logistic_regression()).through(sparse_flow())
    mean = reference_mean(KEY, problem, 100_000)  # bounds the ESS of CVA
    cva, plain = run_with_plain(KEY, "cva", hmc(0.2, 5), problem, 64, 250, 100, mean)
    return {"plain": plain, "cva": cva}


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["plain", "cva"])
def test_sparse_regression_has_the_published_moments(sparse_runs, scheme, sparse_truth):
    estimate = sparse_runs[scheme].estimate
    mean, error = published_sparse(sparse_truth)
    z = (estimate.mean - mean) / np.hypot(estimate.mcse, error)
    assert np.abs(z).max() < 4
    assert np.median(np.abs(z)) < 1.5


@pytest.mark.optimised
@pytest.mark.slow
def test_the_papers_flow_on_the_sparse_regression(sparse_runs):
    """-ELBO, and what CVA gains over HMC with the same settings, per step."""
    _, elbo = map_quality(KEY, sparse_logistic_regression(), sparse_flow())
    assert -elbo < 470.8
    for result in sparse_runs.values():
        assert result.rates["acceptance"]["plus"] >= 0.9
    ess = {name: np.median(r.estimate.ess) for name, r in sparse_runs.items()}
    assert ess["cva"] > 6 * ess["plain"], ess


# In BlackJAX's shape.


COUPLED = {"antithetic": hmc_antithetic, "control": hmc_control, "cva": hmc_cva}
LEAPS = 4


def lopsided(x):
    """A log density without symmetry."""
    return -jnp.sum(jnp.exp(x) - 1.5 * x) - 0.1 * x[0] * x[1]


def wide(x):
    return -0.1 * jnp.sum(x**2)


MASSES = {
    "diagonal": jnp.array([0.5, 1.0, 2.0]),
    "dense": jnp.array([[0.5, 0.1, 0.0], [0.1, 1.0, -0.2], [0.0, -0.2, 2.0]]),
}
BEGIN = jnp.array([0.3, -0.2, 0.5])


def history(algorithm, position, steps=100):
    """What BlackJAX's own loop stores."""
    return blackjax.util.run_inference_algorithm(
        rng_key=KEY,
        inference_algorithm=algorithm,
        num_steps=steps,
        initial_position=position,
    )[1]


@cache
def blackjax_history(name, mass):
    """One of the chains that a scheme couples, by BlackJAX alone."""
    density = {"plus": lopsided, "minus": mirror(lopsided), "control": wide}[name]
    algorithm = blackjax.hmc(density, 0.2, MASSES[mass], LEAPS)
    return history(algorithm, -BEGIN if name == "minus" else BEGIN)


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("mass", MASSES)
@pytest.mark.parametrize("name", COUPLED)
def test_marginal_chains_are_bitwise_those_of_blackjax(name, mass):
    settings = 0.2, MASSES[mass], LEAPS
    states, infos = history(
        COUPLED[name](lopsided, *settings, reference_fn=wide), BEGIN
    )
    assert states._fields == infos._fields == SCHEMES[name].chains
    plus, info = blackjax_history("plus", mass)
    assert_same((states.plus, infos.plus), (plus, info))
    assert 0.3 < info.is_accepted.mean() < 1  # both decisions are made
    if hasattr(states, "control"):
        control, info = blackjax_history("control", mass)
        assert_same((states.control, infos.control), (control, info))
    if hasattr(states, "minus"):
        image, info = blackjax_history("minus", mass)
        assert_same(states.minus.position, negate(image.position))
        assert_same(states.minus.logdensity, image.logdensity)
        assert_same(states.minus.logdensity_grad, negate(image.logdensity_grad))
        assert_same(infos.minus.is_accepted, info.is_accepted)
        assert_same(infos.minus.momentum, negate(info.momentum))
        assert (infos.minus.momentum == -infos.plus.momentum).all()


def test_states_of_the_mirrored_chain_hold_positions():
    """Log density and gradient are those at the position, on the target itself."""
    states, _ = history(hmc_antithetic(lopsided, 0.2, MASSES["diagonal"], LEAPS), BEGIN)
    minus = states.minus
    value, slope = jax.vmap(jax.value_and_grad(lopsided))(minus.position)
    np.testing.assert_allclose(minus.logdensity, value, rtol=1e-5)
    np.testing.assert_allclose(minus.logdensity_grad, slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", COUPLED)
def test_a_gaussian_with_mean_three_averages_to_three(name):
    def density(x):
        return -0.5 * jnp.sum((x - 3) ** 2)

    settings = 0.5, jnp.ones(2), LEAPS
    algorithm = COUPLED[name](density, *settings, reference_fn=density)
    states, _ = history(algorithm, jnp.zeros(2), 200)
    if hasattr(states, "minus"):
        middle = (states.plus.position + states.minus.position)[50:] / 2
        np.testing.assert_allclose(middle, 3, atol=1e-4)
    if hasattr(states, "control"):
        assert_same(states.plus, states.control)


def test_kernels_have_the_arguments_of_blackjax():
    theirs, ours = blackjax.hmc.build_kernel(), hmc_cva.build_kernel()
    names = list(inspect.signature(theirs).parameters)
    assert list(inspect.signature(ours).parameters) == names
    call = dict(inspect.signature(blackjax.mcmc.hmc.as_top_level_api).parameters)
    call.pop("build_proposal", None)  # since 1.7
    mine = inspect.signature(hmc_cva.as_top_level_api).parameters
    assert list(mine) == [*call, "reference_fn"]
    assert all(mine[name].kind == call[name].kind for name in call)
    assert all(mine[name].default == call[name].default for name in call)


def test_kernel_and_init_are_the_algorithm():
    settings = 0.2, MASSES["dense"], LEAPS
    state = hmc_cva.init(BEGIN, lopsided, wide)
    kernel = hmc_cva.build_kernel(reference_fn=wide)
    algorithm = hmc_cva(lopsided, *settings, reference_fn=wide)
    assert_same(state, algorithm.init(BEGIN))
    step = jax.jit(lambda key, state: kernel(key, state, lopsided, *settings))
    assert_same(step(KEY, state), jax.jit(algorithm.step)(KEY, state))
    default = hmc_cva.init(BEGIN, lopsided).control.logdensity
    np.testing.assert_allclose(default, standard_normal(BEGIN), rtol=1e-6)


def test_positions_may_be_pytrees():
    def density(x):
        return -0.5 * ((x["a"] - 3) ** 2 + jnp.sum((x["b"] + 1) ** 2))

    begin = {"a": jnp.zeros(()), "b": jnp.zeros(2)}
    algorithm = hmc_antithetic(density, 0.5, jnp.ones(3), LEAPS)
    states, _ = history(algorithm, begin)
    middle = jax.tree.map(
        lambda x, y: (x + y)[-1] / 2, states.plus.position, states.minus.position
    )
    np.testing.assert_allclose(middle["a"], 3, atol=1e-4)
    np.testing.assert_allclose(middle["b"], -1, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", COUPLED)
def test_window_adaptation_plugs_in(name):
    def density(x):
        return -0.5 * jnp.sum(((x - 3) / jnp.array([0.5, 1.0, 2.0])) ** 2)

    # About a quarter of a turn. Half a turn, which four leaps may come to, would
    # move mirrored chains past each other and never together.
    adaptation = blackjax.window_adaptation(
        blackjax.hmc, density, target_acceptance_rate=0.95, num_integration_steps=2
    )
    (state, parameters), _ = adaptation.run(KEY, BEGIN, 300)
    states, infos = history(COUPLED[name](density, **parameters), state.position, 500)
    assert 0.8 < infos.plus.acceptance_rate.mean() < 1
    if hasattr(states, "minus"):
        middle = (states.plus.position + states.minus.position)[100:] / 2
        np.testing.assert_allclose(middle, 3, atol=1e-4)


# Without a GPU at hand.


def lowers(program, *arguments):
    exported = export.export(jax.jit(program), platforms=["cuda"])(*arguments)
    text = exported.mlir_module()
    return exported.platforms == ("cuda",) and "callback" not in text


@pytest.mark.parametrize("name", COUPLED)
def test_kernels_lower_for_cuda(name):
    algorithm = COUPLED[name](lopsided, 0.2, MASSES["dense"], LEAPS)
    assert lowers(algorithm.step, KEY, algorithm.init(BEGIN))


@pytest.mark.parametrize("name", SCHEMES)
def test_both_parts_of_the_loop_lower_for_cuda(name, bent_problem):
    problem, _ = bent_problem
    check_lowering(name, problem)


@pytest.mark.slow
def test_the_loop_lowers_for_cuda_through_a_flow():
    problem = problem_in_x(sparse_logistic_regression()).through(sparse_flow())
    check_lowering("cva", problem)


def check_lowering(name, problem):
    parts, order = SCHEMES[name], "first"
    algorithm = parts.build(hmc(0.2, 2), problem.logdensity)
    states = start(algorithm, jnp.zeros((8, problem.dim)))
    number = problem.statistic(problem.position).size
    expectation = exact_expectation(np.zeros(number))
    features = make_features(parts, problem.statistic, problem.dim, expectation, order)
    mean = features.expectation.mean
    if parts.stein:
        learn = fold_feature_products(problem.statistic, features.observe, mean, states)
        beta = np.ones((mean.size, number))
    else:
        learn = fold_pair_products(problem.statistic, states)
        beta = np.ones(number) if parts.has_control else np.zeros((0, number))
    blank = [np.zeros(number)] * 3
    series = plan_series(Plan(name, order, beta, mean, *blank), problem.statistic)
    for zero, update in (learn, fold_series(series, states)):
        program = partial(take_steps, step=algorithm.step, update=update)
        assert lowers(program, KEY, states, zero, 0, 10)
