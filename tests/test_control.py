"""Control variates: zero variance, closed forms on Gaussians, honest intervals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import t as student_t

from swindles.control import (
    control,
    draw_expectation,
    estimate_controls,
    exact,
    fold_controls,
    solve_beta,
    worthwhile_draws,
)
from swindles.coupling import hmc, mala, random_walk, record, run, start
from swindles.cva import cva
from swindles.transport import standard_normal

KEY = jax.random.key(20205)
SAMPLERS = {"hmc": hmc(0.4, 4), "mala": mala(0.4), "random walk": random_walk(0.4)}


def normal(shape, seed=1):
    return jax.random.normal(jax.random.key(seed), shape)


def moments(x):
    return jnp.concatenate([x, x**2])


def estimate(
    algorithm, known, beta, chains=64, steps=200, statistic=moments, dim=2, **options
):
    states = start(algorithm, normal((chains, dim)))
    states, _ = run(jax.random.key(7), algorithm, states, 50)
    fold = fold_controls(statistic, states, known, **options)
    _, sums = run(KEY, algorithm, states, steps, fold)
    return estimate_controls(sums, known, beta)


@pytest.mark.parametrize("scheme", [control, cva])
@pytest.mark.parametrize("name", SAMPLERS)
def test_no_variance_when_q_is_p(scheme, name):
    algorithm = scheme(SAMPLERS[name], standard_normal)
    known = exact([0, 0, 1, 1])
    result = estimate(algorithm, known, np.eye(4))
    assert np.abs(result.estimate.mean - known.mean).max() < 2e-6
    assert result.estimate.mcse.max() < 2e-6
    fitted = estimate(algorithm, known, "full").estimate
    assert np.abs(fitted.mean - known.mean).max() < 1e-4
    assert result.rates["decoupling"]["control"] == 0


STEP, LEAPS, DEVIATIONS = 0.05, 24, np.array([0.8, 1.1, 1.4])
GAUSS_CHAINS, GAUSS_STEPS = 512, 600
RHO_TOLERANCE = 0.003  # of rho and beta: noise, and the 0.1 % of rejections
ERROR_TOLERANCE = 0.15  # of a standard error from 512 chains


def leapfrog_line(deviation):
    """(a, b) of X' = a X + b p for LEAPS leapfrog steps on N(0, deviation^2)."""
    x, p = np.array([1.0, 0.0]), np.array([0.0, 1.0])  # coefficients of (X, p)
    for _ in range(LEAPS):
        p = p - STEP / 2 * x / deviation**2
        x = x + STEP * p
        p = p - STEP / 2 * x / deviation**2
    return x


def test_gaussian_closed_forms():
    """Leapfrog on a Gaussian is linear: both chains are AR(1) with one noise."""
    a, b = np.array([leapfrog_line(s) for s in DEVIATIONS]).T
    c, d = leapfrog_line(1.0)
    var_x, var_y, cov = b**2 / (1 - a**2), d**2 / (1 - c**2), b * d / (1 - a * c)
    rho, beta = cov / np.sqrt(var_x * var_y), cov / var_y
    long_run = (b / (1 - a) - beta * d / (1 - c)) ** 2  # steps x Var of the mean of Z
    assert rho.max() < 0.9999  # the chains are not the same

    def density(x):
        return -0.5 * jnp.sum((x / jnp.asarray(DEVIATIONS, x.dtype)) ** 2)

    result = estimate(
        control(hmc(STEP, LEAPS), density),
        exact(np.zeros(3)),
        "diagonal",
        chains=GAUSS_CHAINS,
        steps=GAUSS_STEPS,
        statistic=lambda x: x,
        dim=3,
    )
    assert result.rates["acceptance"]["plus"] > 0.999
    np.testing.assert_allclose(result.rho["control"], rho, atol=RHO_TOLERANCE)
    np.testing.assert_allclose(np.diag(result.beta), beta, atol=RHO_TOLERANCE)
    expected = np.sqrt(long_run / (GAUSS_STEPS * GAUSS_CHAINS))
    np.testing.assert_allclose(result.estimate.mcse, expected, rtol=ERROR_TOLERANCE)
    z_score = result.estimate.mean / result.estimate.mcse
    assert np.abs(z_score).max() < 4


def test_beta_of_the_wrong_sign_doubles_the_error():
    """Guards the sign: with -beta the variance is larger than without control."""

    def density(x):
        return -0.5 * jnp.sum((x / 1.3) ** 2)

    algorithm = control(hmc(0.3, 4), density)
    known = exact(np.zeros(2))
    right = estimate(algorithm, known, "full", statistic=lambda x: x)
    wrong = estimate(algorithm, known, -right.beta, statistic=lambda x: x)
    none = estimate(algorithm, known, 0 * right.beta, statistic=lambda x: x)
    assert (np.diag(right.beta) > 0.5).all()
    assert (right.estimate.mcse < 0.5 * none.estimate.mcse).all()
    assert (wrong.estimate.mcse > 1.5 * none.estimate.mcse).all()


def skewed(x):
    """Log of a Gamma(2) variate, recentred near its mode."""
    return jnp.sum(2 * (x + jnp.log(2.0)) - jnp.exp(x + jnp.log(2.0)))


def test_running_estimate_equals_the_stored_trace():
    """Cross-fitted by hand with numpy's least squares."""
    algorithm = control(hmc(0.3, 4), skewed)
    states = start(algorithm, normal((32, 2)))
    _, trace = record(KEY, algorithm, states, 200)
    known = exact([0, 0, 1, 1])
    _, sums = run(KEY, algorithm, states, 200, fold_controls(moments, states, known))
    result = estimate_controls(sums, known, "full")
    f, g = (
        np.concatenate([trace[name], trace[name] ** 2], -1).astype(np.float64)
        for name in ("plus", "control")
    )
    corrected = np.empty_like(f)
    for group in range(4):
        mine = np.arange(32) // 8 == group
        x = (g[:, ~mine]).reshape(-1, 4)
        y = (f[:, ~mine]).reshape(-1, 4)
        beta = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=None)[0]
        corrected[:, mine] = f[:, mine] - (g[:, mine] - known.mean) @ beta
    means = corrected.mean(0)
    np.testing.assert_allclose(result.estimate.mean, means.mean(0), atol=1e-5)
    spread = means.std(0, ddof=1) / np.sqrt(32)
    np.testing.assert_allclose(result.estimate.mcse, spread, rtol=1e-3)
    remaining = corrected.var((0, 1)) / f.var((0, 1))
    np.testing.assert_allclose(result.rho["control"], np.sqrt(1 - remaining), atol=5e-3)


def test_diagonal_sums_equal_the_diagonal_of_the_full_ones():
    algorithm = cva(hmc(0.3, 4), skewed)
    known = exact([0, 0, 1, 1])
    full = estimate(algorithm, known, "diagonal")
    short = estimate(algorithm, known, "diagonal", full=False)
    np.testing.assert_allclose(full.beta, short.beta, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(full.estimate.mean, short.estimate.mean, atol=1e-5)
    np.testing.assert_allclose(full.rho["control"], short.rho["control"], atol=1e-3)


def test_features_may_differ_from_the_statistic():
    algorithm = control(hmc(0.3, 4), skewed)
    known = exact([0, 0, 1, 1])
    options = {"statistic": lambda x: jnp.exp(x[:1] / 2), "feature": moments}
    with_two = estimate(algorithm, known, "full", **options)
    none = estimate(algorithm, known, 0 * with_two.beta, **options)
    assert with_two.beta.shape == (4, 1)
    assert with_two.estimate.mcse[0] < 0.7 * none.estimate.mcse[0]


def test_drawn_expectation_states_its_error():
    """Mean and covariance over 100 independent repeats."""
    means, variances = [], []
    for key in jax.random.split(KEY, 100):
        known = draw_expectation(key, moments, jnp.zeros(2), 256, batch=128)
        means.append(known.mean[2:])
        variances.append(np.diag(known.covariance)[2:])
        assert np.abs(known.mean[:2]).max() < 1e-6  # odd: pairs cancel
    errors = (np.array(means) - 1) / np.sqrt(np.array(variances).mean(0))
    assert 0.75 < errors.std() < 1.25
    assert abs(errors.mean()) < 4 / np.sqrt(errors.size)


COVER_REPEATS, COVER_CHAINS, COVER_STEPS, FEW_DRAWS = 200, 16, 100, 512


def test_noise_of_the_expectation_is_in_the_error_bar():
    """Q = P: all the error comes from E_Q. Without it the interval has no width."""
    algorithm = control(hmc(0.5, 3), standard_normal)
    states = start(algorithm, normal((COVER_CHAINS, 2)))
    fold = fold_controls(jnp.square, states, exact([1, 1]))
    states, sums = run(KEY, algorithm, states, COVER_STEPS, fold)
    errors = []
    for key in jax.random.split(KEY, COVER_REPEATS):
        drawn = draw_expectation(key, jnp.square, jnp.zeros(2), FEW_DRAWS, batch=256)
        result = estimate_controls(sums, drawn, np.eye(2)).estimate
        errors.append((result.mean - 1) / result.mcse)
    assert 0.85 < np.std(errors) < 1.15
    covered = (np.abs(errors) < student_t.ppf(0.975, COVER_CHAINS - 1)).mean()
    assert covered > 0.93


def test_worthwhile_draws():
    """At the recommended number both levels cost what they are worth."""
    algorithm = control(hmc(0.3, 4), skewed)
    drawn = draw_expectation(KEY, moments, jnp.zeros(2), 4096)
    result = estimate(algorithm, drawn, "full")
    few, many = (worthwhile_draws(result, drawn, ratio) for ratio in (1, 100))
    np.testing.assert_allclose(many[2:], 10 * few[2:], rtol=1e-6)
    beta = result.beta
    shared = np.einsum("kd,kl,ld->d", beta, drawn.covariance, beta)[2:]
    chains = result.estimate.mcse[2:] ** 2 - shared
    # Minimise chains * N0 / N + shared * n0 / n with 100 N + n = budget, on a grid.
    n0, big_n0 = drawn.num_draws, result.estimate.num_draws
    budget = 100 * big_n0 + many[2:]
    n = budget[:, None] * np.linspace(1e-4, 0.9999, 20_000)
    cost = (
        chains[:, None] * big_n0 / ((budget[:, None] - n) / 100)
        + shared[:, None] * n0 / n
    )
    best = n[np.arange(2), cost.argmin(1)]
    np.testing.assert_allclose(many[2:], best, rtol=0.02)
    with pytest.raises(ValueError, match="needs no draws"):
        worthwhile_draws(result, exact([0, 0, 1, 1]), 1.0)


def test_solve_beta_survives_copies_and_constants():
    gram = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    beta = solve_beta(gram, np.array([[1.0], [1.0], [0.0]]))
    np.testing.assert_allclose(beta, [[0.5], [0.5], [0]], atol=1e-5)


def test_bad_input():
    algorithm = control(hmc(0.3, 4), skewed)
    states = start(algorithm, normal((16, 2)))
    with pytest.raises(ValueError, match="3 entries but there are 4"):
        fold_controls(moments, states, exact([0, 0, 1]))
    with pytest.raises(ValueError, match="use full=True"):
        fold_controls(lambda x: x, states, exact([0, 0, 1, 1]), moments, full=False)
    with pytest.raises(ValueError, match="not finite"):
        fold_controls(moments, states, exact([0, 0, 1, np.nan]))
    with pytest.raises(ValueError, match="use at least 8"):
        fold_controls(moments, start(algorithm, normal((4, 2))), exact([0, 0, 1, 1]))
    known = exact([0, 0, 1, 1])
    fold = fold_controls(moments, states, known, full=False)
    _, sums = run(KEY, algorithm, states, 20, fold)
    for wrong in ("full", "diag"):
        with pytest.raises(ValueError, match="diagonal"):
            estimate_controls(sums, known, wrong)


def test_lowers_for_cuda():
    algorithm = cva(hmc(0.3, 4), skewed)
    states = start(algorithm, normal((8, 2)))
    zero, update = fold_controls(moments, states, exact([0, 0, 1, 1]))

    def one_step(key, states, sums):
        states, infos = jax.vmap(algorithm.step)(jax.random.split(key, 8), states)
        return update(sums, states, infos)

    exported = jax.export.export(jax.jit(one_step), platforms=["cuda"])
    assert exported(KEY, states, zero).platforms == ("cuda",)
