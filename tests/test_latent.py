"""All schemes through a map, on all three posteriors of the paper."""

from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from swindles.antithetic import antithetic, plain
from swindles.control import control, draw_expectation
from swindles.coupling import advance, hmc, mala, random_walk, start
from swindles.cva import cva
from swindles.latent import (
    Problem,
    Quality,
    assess,
    fold_quality,
    is_quadratic,
    known_expectation,
    second_derivatives,
    swindle,
    through,
)
from swindles.targets import (
    gaussian,
    item_response,
    logistic_regression,
    skewed,
    sparse_logistic_regression,
)
from swindles.transport import (
    Affine,
    Design,
    Flow,
    Schedule,
    fit_affine,
    fit_flow,
    identity,
    laplace,
    load,
    log_weights,
)

KEY = jax.random.key(20204)
SCHEMES = {"plain": plain, "antithetic": antithetic, "control": control, "cva": cva}
# The best known values of -ELBO of full-rank maps: `benchmarks/maps.py --best`.
BEST = {"logistic regression": 506.229, "item response": 15424.03}


def sparse_flow():
    return load(files("swindles") / "data" / "sparse_flow.npz")


QUADRATICS = {
    "mean": lambda x: x,
    "square": lambda x: x**2,
    "product": lambda x: x[0] * x[1],
    "cube": lambda x: x**3,
    "constant": lambda x: jnp.ones(2) + 0 * x,
}
OTHERS = {
    "exponential": jnp.exp,
    "step": lambda x: 1.0 * (x > 0),
    "kink": jnp.abs,
    "quartic": lambda x: x**4,
    "small quartic": lambda x: x + 1e-4 * x**4,
    "sine": jnp.sin,
}


@pytest.mark.parametrize("name", QUADRATICS | OTHERS)
def test_expectations_are_exact_where_they_can_be(name):
    to_x = Affine(jnp.array([0.5, -1.0]), jnp.array([[1.0, 0.0], [0.7, 0.4]]))
    problem = Problem(jnp.sum, to_x, 2, (QUADRATICS | OTHERS)[name])
    known = known_expectation(KEY, problem, 100_000)
    assert (known.num_draws == 0) == (name in QUADRATICS)
    drawn = draw_expectation(
        jax.random.key(1), problem.feature(), jnp.zeros(2), 400_000
    )
    error = np.sqrt(np.diagonal(drawn.covariance + known.covariance)) + 1e-6
    assert np.abs((known.mean - drawn.mean) / error).max() < 4


def test_a_bent_map_is_never_exact():
    problem = Problem(jnp.sum, sparse_flow(), 51)
    assert known_expectation(KEY, problem, 2048).num_draws == 2048


def test_one_odd_statistic_among_many_is_seen():
    feature = through(identity(3), lambda x: x.at[2].set(jnp.exp(x[2])))
    assert not is_quadratic(feature, jnp.ones((2, 3)))


@pytest.fixture(scope="module")
def bent_problem():
    target = skewed(dim=2)
    to_x = fit_flow(
        KEY,
        target.logdensity,
        identity(2),
        Design(flows=1, width=4, depth=1, bend=True),
        Schedule(500, 32, 1e-2),
        trials=1,
    ).transport
    moments = Problem(target.logdensity, to_x, 2, lambda x: {"mean": x, "square": x**2})
    return moments, np.concatenate([target.truth["mean"], target.truth["square"]])


@pytest.mark.parametrize(
    ("scheme", "sampler"),
    [
        *((scheme, hmc(0.4, 4)) for scheme in SCHEMES),
        *(("cva", sampler) for sampler in (mala(0.6), random_walk(0.8))),
    ],
)
def test_every_scheme_and_sampler_reads_the_truth_through_a_bent_map(
    bent_problem, scheme, sampler
):
    """A wrong log-determinant or a statistic read in latent space would show."""
    problem, truth = bent_problem
    estimate = swindle(KEY, SCHEMES[scheme], sampler, problem, 64, 800, 200).estimate
    assert np.abs((estimate.mean - truth) / estimate.mcse).max() < 4


def test_perfect_map_has_perfect_quality():
    target = gaussian(np.array([1.0, 2.0]), np.array([[2.0, 0.6], [0.6, 0.5]]))
    to_x = laplace(target.logdensity, jnp.zeros(2))
    quality = assess(KEY, Problem(target.logdensity, to_x, 2))
    assert quality.rho["control"].min() > 0.999
    assert quality.rho["minus"].max() < -0.999
    np.testing.assert_allclose(quality.covariance, np.eye(2), atol=0.1)
    np.testing.assert_allclose(quality.mean, 0, atol=0.01)
    assert "control pays" in str(quality)


def test_quality_sees_what_is_wrong_with_a_map():
    """A map that is too narrow in one direction and off by one in the other."""
    target = gaussian(np.array([1.0, 0.0]), np.diag([1.0, 4.0]))
    problem = Problem(target.logdensity, identity(2), 2)
    quality = assess(KEY, problem, num_steps=1000)
    np.testing.assert_allclose(quality.mean, [1, 0], atol=0.1)
    np.testing.assert_allclose(quality.covariance, np.diag([1, 4]), atol=0.4)
    assert quality.pareto_k > 0.4
    wide = assess(
        KEY, problem._replace(transport=Affine(jnp.zeros(2), 4 * jnp.ones(2)))
    )
    assert wide.pareto_k < 0.2


def test_gain_is_that_of_the_formulas():
    rho = {"minus": np.array([-0.9, 0.5]), "control": np.array([0.9, 0.0])}
    rates = {"acceptance": {"plus": 0.9}, "decoupling": {"minus": 0.1, "control": 0.1}}
    quality = Quality(0.1, np.zeros(2), np.eye(2), rates, rho)
    np.testing.assert_allclose(quality.gain["antithetic"], [10, 1 / 1.5])
    np.testing.assert_allclose(quality.gain["control"], [1 / 0.19, 1])
    even = quality._replace(rho={name: np.full(2, 0.5) for name in rho})
    assert "antithetic does not pay" in str(even)


@pytest.fixture(scope="module")
def round_maps():
    fits = {}
    for make in (logistic_regression, item_response):
        target = make()
        begin = laplace(target.logdensity, jnp.zeros(target.dim))
        fits[target.name] = target, fit_affine(KEY, target.logdensity, begin)
    return fits


@pytest.mark.parametrize("name", BEST)
def test_full_rank_fit_is_within_a_third_of_a_nat_of_the_best(round_maps, name):
    _, fit = round_maps[name]
    assert -0.05 < -fit.elbo - BEST[name] < 0.3


@pytest.mark.parametrize(
    ("name", "sampler", "chains", "steps", "least"),
    [
        ("logistic regression", hmc(0.3, 5), 128, 300, 0.99),
        ("item response", hmc(0.16, 9), 16, 100, 0.985),
    ],
)
def test_control_correlates_after_a_full_rank_fit(
    round_maps, name, sampler, chains, steps, least
):
    target, fit = round_maps[name]
    problem = Problem(target.logdensity, fit.transport, target.dim)
    result = swindle(KEY, control, sampler, problem, chains, steps, 100)
    assert 0.935 < result.rates["acceptance"]["plus"] < 0.97
    assert np.median(result.rho["control"]) >= least


def test_logistic_regression_has_the_published_moments(round_maps, logistic_truth):
    truth = logistic_truth
    target, fit = round_maps["logistic regression"]
    problem = Problem(
        target.logdensity, fit.transport, 25, lambda x: {"mean": x, "square": x**2}
    )
    mean, mcse, *_ = swindle(KEY, plain, hmc(0.5, 3), problem, 256, 1000, 200).estimate
    z = (mean[:25] - truth.IDENTITY_MEAN) / np.hypot(
        mcse[:25], truth.IDENTITY_MEAN_STANDARD_ERROR
    )
    assert np.abs(z).max() < 4
    # The error of a Gaussian's standard deviation is that of its mean over sqrt(2).
    deviation = np.sqrt(mean[25:] - mean[:25] ** 2)
    error = np.hypot(mcse[:25], truth.IDENTITY_MEAN_STANDARD_ERROR) / np.sqrt(2)
    z = (deviation - truth.IDENTITY_STANDARD_DEVIATION) / error
    assert np.abs(z).max() < 4


def published_sparse(truth):
    """Published means and their errors, in the order of a flattened parameter dict."""
    names = ("global_scale", "local_scales", "unscaled_weights")
    mean, error = (
        np.concatenate(
            [
                np.ravel(getattr(truth, f"IDENTITY_{n.upper()}_MEAN{tail}"))
                for n in names
            ]
        )
        for tail in ("", "_STANDARD_ERROR")
    )
    return mean, error


@pytest.mark.parametrize("scheme", ["plain", "cva"])
def test_sparse_regression_has_the_published_moments(scheme, sparse_truth):
    target = sparse_logistic_regression()
    mean, error = published_sparse(sparse_truth)
    problem = Problem(target.logdensity, sparse_flow(), 51, target.parameters)
    result = swindle(KEY, SCHEMES[scheme], hmc(0.25, 6), problem, 128, 600, 300)
    z = (result.estimate.mean - mean) / np.hypot(result.estimate.mcse, error)
    assert np.abs(z).max() < 4
    assert np.median(np.abs(z)) < 1.5


@pytest.mark.slow
def test_the_papers_flow_on_the_sparse_regression():
    """-ELBO, and what CVA gains over HMC with the same settings, per step."""
    target = sparse_logistic_regression()
    fit = fit_flow(KEY, target.logdensity, identity(51))
    assert -fit.elbo < 470.8
    problem = Problem(target.logdensity, fit.transport, 51)
    per_step = {}
    for name in ("plain", "cva"):
        result = swindle(KEY, SCHEMES[name], hmc(0.18, 5), problem, 128, 800, 400)
        assert result.rates["acceptance"]["plus"] >= 0.93
        per_step[name] = np.median(result.estimate.ess)
    assert per_step["cva"] > 6 * per_step["plain"]


def test_the_flow_of_the_package_is_as_good_as_it_was():
    target = sparse_logistic_regression()
    to_x = sparse_flow()
    assert isinstance(to_x, Flow) and to_x.design == Design()
    weights = log_weights(KEY, target.logdensity, to_x, 51, 4096)
    assert -weights.mean() < 470.0


def test_all_kernels_lower_for_cuda():
    target = sparse_logistic_regression()
    problem = Problem(target.logdensity, sparse_flow(), 51)
    algorithm = cva(hmc(0.2, 2), problem.latent())
    states = start(algorithm, jnp.zeros((8, 51)))
    known = draw_expectation(KEY, problem.feature(), jnp.zeros(51), 2048)
    zero, update = fold_quality(problem.feature(), states, known)
    points = jnp.ones((3, 51))
    for function, arguments in {
        advance: (KEY, states, zero, 0, 10, algorithm.step, update, False),
        second_derivatives: (problem.feature(), points[0]),
        is_quadratic: (problem.feature(), points),
    }.items():
        exported = export.export(function, platforms=["cuda"])(*arguments)
        assert exported.platforms == ("cuda",)
        assert "callback" not in exported.mlir_module()
