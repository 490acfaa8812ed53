"""Control variates: zero variance, closed forms on Gaussians, proofs, honest errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from scipy.stats import t as student_t

from swindles.antithetic import estimate_series, fold_series
from swindles.control import (
    CrossFit,
    Expectation,
    control,
    control_series,
    control_values,
    draw_expectation,
    exact_expectation,
    fit_features,
    fit_pair,
    fold_feature_products,
    fold_pair_products,
    full_beta,
    polynomial_degree,
    quadratic_expectation,
    reference_mean,
    residual_variance,
    shared_variance,
    worthwhile_draws,
)
from swindles.coupling import hmc, mala, random_walk, record, run, start, take_steps
from swindles.cva import cva
from swindles.models import Model, make_problem
from swindles.transport import Affine, identity, standard_normal

KEY = jax.random.key(20205)
SAMPLERS = {"hmc": hmc(0.4, 4), "mala": mala(0.4), "random walk": random_walk(0.4)}
ROWS = {control: ([0], [1]), cva: ([0, 1], [2, 3])}  # of PairProducts: f, and g


def normal(shape, seed=1):
    return jax.random.normal(jax.random.key(seed), shape)


def moments(x):
    return jnp.concatenate([x, x**2])


MOMENTS = exact_expectation([0, 0, 1, 1])  # of two standard normal variables


def skewed(x):
    """Log of a Gamma(2) variate, recentred near its mode."""
    return jnp.sum(2 * (x + jnp.log(2.0)) - jnp.exp(x + jnp.log(2.0)))


def average(algorithm, states, steps, statistic, expectation, beta, key=KEY):
    """A run with frozen coefficients."""
    observe = partial(control_values, statistic)
    series = control_series(statistic, observe, expectation.mean, beta)
    _, sums = run(key, algorithm, states, steps, fold_series(series, states))
    shared = shared_variance(expectation, beta)
    return estimate_series(sums, shared)._replace(beta=np.asarray(beta))


def learn(algorithm, statistic, chains=64, steps=50, dim=2):
    """Warm chains, and the products of the second half of their warm-up."""
    z = normal((chains, dim))
    states = start(algorithm, z)
    if hasattr(states, "minus"):  # mirrored from the start
        states = states._replace(minus=start(algorithm, -z).minus)
    states, _ = run(jax.random.key(7), algorithm, states, steps)
    fold = fold_pair_products(statistic, states)
    return run(jax.random.key(8), algorithm, states, steps, fold)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "name"), [(control, "mala"), (cva, "random walk")])
def test_no_variance_when_q_is_p(scheme, name):
    algorithm = scheme(SAMPLERS[name], standard_normal)
    states, learned = learn(algorithm, moments)
    beta = fit_pair(learned, *ROWS[scheme], MOMENTS).beta
    np.testing.assert_allclose(beta, 1, atol=1e-4)
    result = average(algorithm, states, 200, moments, MOMENTS, beta)
    assert np.abs(result.estimate.mean - MOMENTS.mean).max() < 2e-6
    assert result.estimate.mcse.max() < 2e-6
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


@pytest.mark.slow
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

    algorithm = control(hmc(STEP, LEAPS), density)
    expectation = exact_expectation(np.zeros(3))
    states, learned = learn(algorithm, lambda x: x, GAUSS_CHAINS, 200, 3)
    fitted = fit_pair(learned, [0], [1], expectation)
    left = residual_variance(learned.covariance(), [0], [1])
    np.testing.assert_allclose(np.sqrt(1 - left), rho, atol=RHO_TOLERANCE)
    np.testing.assert_allclose(fitted.beta, beta, atol=RHO_TOLERANCE)
    np.testing.assert_allclose(np.sqrt(fitted.variance / long_run), 1, atol=0.2)
    result = average(
        algorithm, states, GAUSS_STEPS, lambda x: x, expectation, fitted.beta
    )
    assert result.rates["acceptance"]["plus"] > 0.999
    expected = np.sqrt(long_run / (GAUSS_STEPS * GAUSS_CHAINS))
    np.testing.assert_allclose(result.estimate.mcse, expected, rtol=ERROR_TOLERANCE)
    assert np.abs(result.estimate.mean / result.estimate.mcse).max() < 4


@pytest.mark.slow
def test_beta_of_the_wrong_sign_doubles_the_error():
    """Guards the sign: with -beta the variance is larger than without control."""

    def density(x):
        return -0.5 * jnp.sum((x / 1.3) ** 2)

    algorithm = control(hmc(0.3, 4), density)
    states, learned = learn(algorithm, lambda x: x)
    beta = fit_pair(learned, [0], [1], exact_expectation(np.zeros(2))).beta
    assert (beta > 0.5).all()
    # The same statistic three times, with the coefficients of three runs.
    all_three, expectation = np.outer([0, 1, -1], beta), exact_expectation(np.zeros(6))
    result = average(
        algorithm, states, 200, lambda x: jnp.tile(x, 3), expectation, all_three.ravel()
    )
    none, right, wrong = result.estimate.mcse.reshape(3, 2)
    assert (right < 0.5 * none).all() and (wrong > 1.5 * none).all()


@pytest.fixture(scope="module")
def stored():
    """States of CVA chains on a skewed target, and f and g along their trace."""
    algorithm = cva(hmc(0.3, 4), skewed)
    states = start(algorithm, normal((32, 2)))
    _, trace = record(KEY, algorithm, states, 200)
    x = np.array([trace.plus, trace.minus], np.float64)
    y = np.array([trace.control, -trace.control], np.float64)
    f, g = (np.concatenate([part, part**2], -1) for part in (x, y))
    return algorithm, states, f, g  # f and g: (2, steps, chains, 4)


@pytest.mark.parametrize("shape", ["diagonal", "full"])
def test_run_is_the_average_of_the_stored_trace(stored, shape):
    algorithm, states, f, g = stored
    beta = np.random.default_rng(0).normal(size=(4, 4))
    beta = np.diag(beta) if shape == "diagonal" else beta
    result = average(algorithm, states, 200, moments, MOMENTS, beta)
    excess = g.mean(0) - MOMENTS.mean
    z = f.mean(0) - (excess * beta if shape == "diagonal" else excess @ beta)
    means = z.mean(0)
    np.testing.assert_allclose(result.estimate.mean, means.mean(0), atol=1e-5)
    error = means.std(0, ddof=1) / np.sqrt(32)
    np.testing.assert_allclose(result.estimate.mcse, error, rtol=1e-3)
    alone = f[0].var((0, 1), ddof=1) / error**2
    np.testing.assert_allclose(result.estimate.ess, alone, rtol=1e-3)


def test_diagonal_coefficients_are_those_of_the_stored_trace(stored):
    """Slope, variance left, and what is left of chains that were not fitted on."""
    algorithm, states, f, g = stored
    _, sums = run(KEY, algorithm, states, 200, fold_pair_products(moments, states))

    def slope(some):
        away_f, away_g = (
            part[:, :, some] - part[:, :, some].mean((1, 2), keepdims=True)
            for part in (f, g)
        )
        return (away_f * away_g).sum((0, 1, 2)) / (away_g**2).sum((0, 1, 2))

    fitted = fit_pair(sums, [0, 1], [2, 3], MOMENTS)
    every, even = np.ones(32, bool), np.arange(32) % 2 == 0
    np.testing.assert_allclose(fitted.beta, slope(every), rtol=1e-4)

    def corrected(some):
        return f.mean(0) - slope(some) * (g.mean(0) - MOMENTS.mean)

    means = corrected(every).mean(0)
    np.testing.assert_allclose(fitted.mean, means.mean(0), atol=1e-5)
    left = residual_variance(sums.covariance(), [0, 1], [2, 3])
    expected = corrected(every).var((0, 1)) / f.var((1, 2)).mean(0)
    np.testing.assert_allclose(left, expected, rtol=1e-3)
    rest = [corrected(even).mean(0)[~even], corrected(~even).mean(0)[even]]
    spread = 200 * np.mean([part.var(0, ddof=1) for part in rest], axis=0)
    np.testing.assert_allclose(fitted.variance, spread, rtol=1e-3)


def test_full_coefficients_are_those_of_the_stored_trace(stored):
    algorithm, states, f, g = stored
    observe = partial(control_values, moments)
    fold = fold_feature_products(moments, observe, MOMENTS.mean, states)
    _, sums = run(KEY, algorithm, states, 200, fold)
    trial = CrossFit(sums, np.zeros(()), 1e-7)
    f, g, even = f.mean(0), g.mean(0) - MOMENTS.mean, np.arange(32) % 2 == 0

    def slopes(some):
        x, y = (part[:, some].reshape(-1, 4) for part in (g, f))
        return np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=None)[0]

    for table, some in enumerate([even, ~even, even | True]):
        found = trial.fit(table, 4, 1e-9)
        np.testing.assert_allclose(found, slopes(some), rtol=2e-3, atol=2e-3)
    rest = [f[:, ~even] - g[:, ~even] @ slopes(even)]
    rest += [f[:, even] - g[:, even] @ slopes(~even)]
    spread = np.mean([part.mean(0).var(0, ddof=1) for part in rest], axis=0)
    np.testing.assert_allclose(trial.residual(4, 1e-9), spread, rtol=5e-3)
    fitted = fit_features(sums, [4])
    assert (fitted.variance <= 200 * spread * 1.005).all()
    means = (f - g @ fitted.beta).mean((0, 1))
    np.testing.assert_allclose(fitted.mean, means, atol=1e-4)


@pytest.mark.slow
def test_frozen_coefficients_cost_nothing():
    """Against the best ones for the run itself: at most 2 % more variance."""
    algorithm = control(hmc(0.3, 4), skewed)
    states, learned = learn(algorithm, moments, 128)
    beta = fit_pair(learned, [0], [1], MOMENTS).beta
    fold = fold_pair_products(moments, states)
    covariance = run(KEY, algorithm, states, 400, fold)[1].covariance()
    best = residual_variance(covariance, [0], [1])
    (ff, fg), (_, gg) = covariance
    frozen = (ff - 2 * beta * fg + beta**2 * gg) / ff
    assert (frozen >= best * (1 - 1e-9)).all() and (frozen < 1.02 * best).all()
    assert best.max() < 0.7  # there was something to lose


@pytest.mark.slow
def test_features_may_differ_from_the_statistic():
    algorithm = control(hmc(0.3, 4), skewed)
    states = start(algorithm, normal((64, 2)))
    states, _ = run(jax.random.key(7), algorithm, states, 50)

    def statistic(x):
        return jnp.exp(x[:1] / 2)

    observe = partial(control_values, moments)
    fold = fold_feature_products(statistic, observe, MOMENTS.mean, states)
    states, sums = run(jax.random.key(8), algorithm, states, 50, fold)
    beta = fit_features(sums, [4]).beta
    assert beta.shape == (4, 1)
    both = np.hstack([beta, 0 * beta])  # with the features, and without
    series = control_series(
        lambda x: jnp.tile(statistic(x), 2), observe, MOMENTS.mean, both
    )
    _, sums = run(KEY, algorithm, states, 200, fold_series(series, states))
    errors = estimate_series(sums).estimate.mcse
    assert errors[0] < 0.7 * errors[1]


def test_a_poorly_known_mean_is_leaned_on_less():
    """The slope minimises Var Z / N + beta^2 s^2, on a grid."""
    _, learned = learn(control(hmc(0.3, 4), skewed), moments)
    expectation = Expectation(MOMENTS.mean, np.diag([0, 1e-3, 1e-2, 1]), 100)
    draws = 1000
    beta = fit_pair(learned, [0], [1], expectation, draws).beta
    (ff, fg), (_, gg) = learned.covariance()
    grid = np.linspace(-0.5, 1.5, 20_001)[:, None]
    left = (ff - 2 * grid * fg + grid**2 * gg) / draws
    best = grid[(left + grid**2 * np.diag(expectation.covariance)).argmin(0), 0]
    np.testing.assert_allclose(beta, best, atol=2e-4)
    assert beta[0] == fit_pair(learned, [0], [1], MOMENTS).beta[0]
    assert abs(beta[3]) < 0.01


@jax.custom_jvp
def flattened(x):
    return x**2


@jax.custom_jvp
def straightened(x):
    return jnp.exp(x)


@jax.custom_vjp
def straightened_backwards(x):
    return jnp.exp(x)


flattened.defjvp(lambda x, t: (x[0] ** 2, 0 * t[0]))
straightened.defjvp(lambda x, t: (jnp.exp(x[0]), t[0]))
straightened_backwards.defvjp(lambda x: (jnp.exp(x), ()), lambda _, t: (t,))

MATRIX = jnp.array([[2.0, 0.5, 0.0], [0.5, 1.0, -1.0], [0.0, -1.0, 3.0]])
QUADRATICS = {
    "constant": lambda x: jnp.ones(2),
    "mean": lambda x: x,
    "sum": jnp.sum,
    "square": lambda x: x**2,
    "square by a float": lambda x: x**2.0,
    "jnp.square": jnp.square,
    "product": lambda x: x[0] * x[1],
    "x A x": lambda x: x @ MATRIX @ x,
    "einsum": lambda x: jnp.einsum("i,ij,j", x, MATRIX, x),
    "outer": lambda x: jnp.outer(x, x),
    "slice": lambda x: x[1:] * x[:-1],
    "several of them": lambda x: x[jnp.array([2, 0])] ** 2,
    "dictionary": lambda x: {"mean": x, "square": x**2},
    "concatenation": lambda x: jnp.concatenate([x, 2 * x**2]),
    "stack": lambda x: jnp.stack([x[0], x[1] ** 2]),
    "array": lambda x: jnp.array([x[0], 3.0, x[1] * x[2]]),
    "constant mask": lambda x: jnp.where(jnp.array([True, False, True]), x, x**2),
    "by a constant": lambda x: x**2 / 3,
    "variance": jnp.var,
    "cumulative": jnp.cumsum,
    "difference": lambda x: jnp.diff(x) ** 2,
    "compiled": jax.jit(lambda x: (x - 2) * (x + 1)),
    "vectorised": lambda x: jax.vmap(lambda one: one * x)(x),
}
OTHERS = {
    "x > 2": lambda x: x > 2,
    "1.0 * (x > 2)": lambda x: 1.0 * (x > 2),
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "sign": jnp.sign,
    "where": lambda x: jnp.where(x > 2.5, x, 0.0),
    "clip": lambda x: jnp.clip(x, -4, 4),
    "relu": lambda x: jax.nn.relu(x - 2.5),
    "maximum": lambda x: jnp.maximum(x - 2.5, 0),
    "astype(int)": lambda x: x.astype(int),
    "half precision": lambda x: x.astype(jnp.float16).astype(x.dtype),
    "brain floats": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 4),
    "searchsorted": lambda x: jnp.searchsorted(jnp.array([-1.0, 0.0, 2.0]), x),
    "sort": jnp.sort,
    "max": jnp.max,
    "argmax": jnp.argmax,
    "median": jnp.median,
    "abs": jnp.abs,
    "norm": jnp.linalg.norm,
    "huber": lambda x: jnp.where(jnp.abs(x) < 3, x**2 / 2, 3 * (jnp.abs(x) - 1.5)),
    "stop_gradient": lambda x: lax.stop_gradient(x) ** 2,
    "stop_gradient within": lambda x: x + lax.stop_gradient(jnp.exp(x) - x),
    "inner gradient": jax.grad(lambda x: jnp.sum(lax.stop_gradient(x) ** 2 * x)),
    "flat by its rule": flattened,
    "straight by its rule": straightened,
    "straight backwards": straightened_backwards,
    "cube": lambda x: x**3,
    "product of three": lambda x: x[0] * x[1] * x[2],
    "quartic": lambda x: x**4,
    "small quartic": lambda x: x + 1e-4 * x**4,
    "root": lambda x: jnp.sqrt(x**2),
    "inverse": lambda x: 1 / (1 + x**2),
    "ratio": lambda x: x[0] / (2 + x[1] ** 2),
    "exp": jnp.exp,
    "sin": jnp.sin,
    "logsumexp": lambda x: jax.scipy.special.logsumexp(x),
    "cond": lambda x: lax.cond(x[0] > 2, lambda y: y, lambda y: 2 * y, x),
    "switch": lambda x: lax.switch(jnp.int32(x[0]), [jnp.sin, jnp.cos], x),
    "scan": lambda x: lax.scan(lambda c, y: (c * y, c), 1.0, x)[0],
    "while": lambda x: lax.while_loop(lambda y: y[0] < 2, lambda y: y + 1, x),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, y: y * x, x),
    "remainder": lambda x: x % 1,
    "interpolation": lambda x: jnp.interp(x, jnp.arange(3.0), jnp.arange(3.0)),
    "table": lambda x: jnp.array([0.0, 1.0, 5.0])[x.astype(int) % 3],
    "bits": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "complex": lambda x: jnp.abs(x + 1j),
    "checkpoint": jax.checkpoint(jnp.exp),
    "callback": lambda x: jax.pure_callback(np.floor, x, x, vmap_method="sequential"),
    "one odd one": lambda x: jnp.append(x[:2], jnp.exp(x[2])),
}
MAPS = {
    "identity": identity(3),
    "diagonal": Affine(jnp.array([0.5, -1.0, 2.0]), jnp.array([1.0, 0.3, 2.0])),
    "full": Affine(
        jnp.array([0.5, -1.0, 2.0]),
        jnp.array([[1.0, 0.0, 0.0], [0.7, 0.4, 0.0], [-0.2, 0.5, 0.8]]),
    ),
}


def make(statistic, to_x):
    return make_problem(Model(standard_normal, jnp.ones(3)), statistic).through(to_x)


def quadrature(problem):
    """E_Q by a product rule that is exact up to degree seven."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(4)
    grid = np.stack(np.meshgrid(nodes, nodes, nodes), -1).reshape(-1, 3)
    weight = np.prod(np.stack(np.meshgrid(*[weights] * 3), -1).reshape(-1, 3), -1)
    values = jax.vmap(problem.statistic)(jnp.asarray(grid, jnp.float32))
    return weight @ np.asarray(values, np.float64) / weight.sum()


@pytest.mark.parametrize("place", MAPS)
def test_polynomials_have_the_right_expectation(place):
    problem = make(lambda x: {n: f(x) for n, f in QUADRATICS.items()}, MAPS[place])
    expectation = reference_mean(KEY, problem)
    assert expectation.num_draws == 0 and not expectation.covariance.any()
    np.testing.assert_allclose(
        expectation.mean, quadrature(problem), rtol=1e-5, atol=1e-5
    )


@pytest.fixture
def how(monkeypatch):
    """A function that says how ``reference_mean`` goes about a problem."""
    for name in ("quadratic_expectation", "draw_expectation"):
        monkeypatch.setattr(f"swindles.control.{name}", lambda *_, name=name: name)
    return partial(reference_mean, KEY)


@pytest.mark.parametrize("name", QUADRATICS)
def test_polynomials_are_exact(name, how):
    for to_x in MAPS.values():
        problem = make(QUADRATICS[name], to_x)
        assert polynomial_degree(problem.statistic, jnp.zeros(3)) <= 2
        assert how(problem) == "quadratic_expectation"


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_exact(name, how):
    for to_x in MAPS.values():
        problem = make(OTHERS[name], to_x)
        assert polynomial_degree(problem.statistic, jnp.zeros(3)) > 2
        assert how(problem) == "draw_expectation"


@pytest.mark.slow
def test_drawn_expectations_are_right():
    """Those of all awkward statistics at once, against as many draws by numpy."""
    quick = {name: f for name, f in OTHERS.items() if name != "callback"}
    problem = make(lambda x: {n: f(x) for n, f in quick.items()}, MAPS["full"])
    expectation = reference_mean(KEY, problem, 100_000)
    assert expectation.num_draws >= 100_000
    z = np.random.default_rng(0).normal(size=(100_000, 3)).astype(np.float32)
    values = np.asarray(jax.lax.map(problem.statistic, z, batch_size=1000), float)
    error = np.sqrt(values.var(0) / len(values) + np.diag(expectation.covariance))
    assert np.abs((values.mean(0) - expectation.mean) / error).max() < 4.5


def test_bent_map_is_not_exact():
    class Sinh:
        def __call__(self, z):
            return jnp.sinh(z)

        def with_log_det(self, z):
            return jnp.sinh(z), jnp.log(jnp.cosh(z)).sum()

    problem = make(lambda x: x, Sinh())
    assert reference_mean(KEY, problem, 4096).num_draws == 4096


def test_degrees():
    x = jnp.ones(3)
    assert polynomial_degree(lambda x: (x @ x) ** 2 * x[0], x) == 5
    assert polynomial_degree(lambda x: {"a": x["b"] * x["c"]}, {"b": x, "c": x}) == 2
    assert polynomial_degree(lambda x: 3.0, x) == 0
    assert polynomial_degree(lambda x: x**-1, x) == np.inf


def test_derivatives_are_those_of_the_program_that_was_read():
    """A function that knows when it is differentiated does not mislead."""

    def two_faced(x):
        return x**2 if not isinstance(x, jax.interpreters.ad.JVPTracer) else 7 * x**2

    expectation = quadratic_expectation(two_faced, jnp.zeros(2))
    assert expectation.mean.tolist() == [1, 1]


@pytest.mark.slow
def test_drawn_expectation_states_its_error():
    """Mean and covariance over independent repeats."""
    means, covariances = [], []
    for key in jax.random.split(KEY, 40):
        expectation = draw_expectation(key, moments, jnp.zeros(2), 2048, batch=128)
        assert expectation.num_draws == 2048
        means.append(expectation.mean[2:])
        covariances.append(expectation.covariance[2:, 2:])
        assert np.abs(expectation.mean[:2]).max() < 1e-6  # odd: pairs cancel
    covariance = np.mean(covariances, 0)
    errors = (np.array(means) - 1) / np.sqrt(np.diag(covariance))
    assert 0.75 < errors.std() < 1.25
    assert abs(errors.mean()) < 4 / np.sqrt(errors.size)
    # A pair of draws has the variance of one z^2, which is 2, and no correlation.
    np.testing.assert_allclose(np.diag(covariance), 2 / 1024, rtol=0.15)
    assert abs(covariance[0, 1]) < 0.15 * covariance[0, 0]


def test_few_draws_are_enough_batches_to_tell_an_error():
    assert draw_expectation(KEY, moments, jnp.zeros(2), 1, batch=64).num_draws == 1024


COVER_REPEATS, COVER_CHAINS, COVER_STEPS, FEW_DRAWS = 80, 16, 100, 512


@pytest.mark.slow
def test_noise_of_the_expectation_is_in_the_error_bar():
    """Q = P: all the error comes from E_Q. Without it the interval has no width."""
    algorithm, ones = control(hmc(0.5, 3), standard_normal), exact_expectation([1, 1])
    states = start(algorithm, normal((COVER_CHAINS, 2)))
    observe = partial(control_values, jnp.square)
    series = control_series(jnp.square, observe, ones.mean, np.ones(2))
    _, sums = run(KEY, algorithm, states, COVER_STEPS, fold_series(series, states))
    errors = []
    for key in jax.random.split(KEY, COVER_REPEATS):
        drawn = draw_expectation(key, jnp.square, jnp.zeros(2), FEW_DRAWS, batch=32)
        found = estimate_series(sums, shared_variance(drawn, np.ones(2))).estimate
        mean = found.mean + drawn.mean - ones.mean  # that of Z with the other E_Q
        errors.append((mean - 1) / found.mcse)
    assert 0.85 < np.std(errors) < 1.15
    covered = (np.abs(errors) < student_t.ppf(0.975, COVER_CHAINS - 1)).mean()
    assert covered > 0.93


def test_shared_variance_of_a_full_matrix():
    beta = np.random.default_rng(0).normal(size=(4, 3))
    root = np.random.default_rng(1).normal(size=(6, 6))
    expectation = Expectation(
        np.zeros(6), root @ root.T, 10
    )  # two features are not used
    expected = np.diag(beta.T @ expectation.covariance[:4, :4] @ beta)
    np.testing.assert_allclose(shared_variance(expectation, beta), expected)


def test_worthwhile_draws():
    """At the recommended number both levels cost what they are worth."""
    algorithm = control(hmc(0.3, 4), skewed)
    states, learned = learn(algorithm, moments)
    drawn = draw_expectation(KEY, moments, jnp.zeros(2), 4096)
    beta = fit_pair(learned, [0], [1]).beta
    result = average(algorithm, states, 200, moments, drawn, beta)
    few, many = (worthwhile_draws(result, drawn, ratio) for ratio in (1, 100))
    np.testing.assert_allclose(many[2:], 10 * few[2:], rtol=1e-6)
    shared = (beta**2 * np.diag(drawn.covariance))[2:]
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
        worthwhile_draws(result, MOMENTS, 1.0)


def test_full_beta_survives_copies_and_constants():
    gram = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    beta = full_beta(gram, np.array([[1.0], [1.0], [0.0]]))
    np.testing.assert_allclose(beta, [[0.5], [0.5], [0]], atol=1e-5)


def test_bad_features():
    algorithm = control(hmc(0.3, 4), skewed)
    states = start(algorithm, normal((16, 2)))
    observe = partial(control_values, moments)
    with pytest.raises(ValueError, match="3 entries but there are 4"):
        fold_feature_products(moments, observe, [0, 0, 1], states)
    with pytest.raises(ValueError, match="not finite"):
        fold_feature_products(moments, observe, [0, 0, 1, np.nan], states)
    with pytest.raises(ValueError, match="use at least 8"):
        few = start(algorithm, normal((4, 2)))
        fold_feature_products(moments, observe, MOMENTS.mean, few)


@pytest.mark.parametrize("scheme", ROWS)
def test_all_sums_lower_for_cuda(scheme):
    algorithm = scheme(hmc(0.3, 4), skewed)
    states, observe = start(algorithm, normal((8, 2))), partial(control_values, moments)
    series = control_series(moments, observe, MOMENTS.mean, np.ones(4))
    for zero, update in (
        fold_pair_products(moments, states),
        fold_feature_products(moments, observe, MOMENTS.mean, states),
        fold_series(series, states),
    ):
        program = jax.jit(partial(take_steps, step=algorithm.step, update=update))
        exported = export.export(program, platforms=["cuda"])(KEY, states, zero, 0, 9)
        assert exported.platforms == ("cuda",)
        assert "callback" not in exported.mlir_module()
