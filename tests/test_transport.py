"""Affine maps: round trips, volumes, Laplace's approximation, fits, weights."""

import gc
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from swindles import transport
from swindles.models import Model, make_problem
from swindles.targets import gaussian, item_response, logistic_regression
from swindles.transport import (
    BATCH,
    Affine,
    Evaluator,
    assess_map,
    best_gaussian,
    curvature,
    fit_gaussian,
    identity,
    improve_map,
    laplace,
    log_weights,
    map_from_draws,
    map_quality,
    mirrored_normal,
    pareto_k,
    points_program,
    pull_back,
    standard_normal,
    unit_map,
)

SEED = 20203
DIM = 6
POINTS = 100


def some_affine(full=True):
    rng = np.random.default_rng(SEED)
    scale = np.tril(rng.normal(size=(DIM, DIM))) / 3 + np.eye(DIM)
    scale = scale if full else np.abs(np.diagonal(scale))
    return Affine(jnp.asarray(rng.normal(size=DIM)), jnp.asarray(scale))


MAPS = {
    "identity": lambda: identity(DIM),
    "full identity": lambda: identity(DIM, full=True),
    "diagonal": lambda: some_affine(full=False),
    "full rank": some_affine,
}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float64", 1e-9)])
@pytest.mark.parametrize("name", MAPS)
def test_round_trip_and_volume(name, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        to_x = MAPS[name]()
        z = jnp.asarray(np.random.default_rng(1).normal(size=(POINTS, DIM)), dtype)
        x = jax.jit(jax.vmap(to_x))(z)
        back = jax.jit(jax.vmap(to_x.inverse))(x)
        np.testing.assert_allclose(back, z, atol=tolerance)
        again, log_det = jax.jit(jax.vmap(to_x.with_log_det))(z)
        np.testing.assert_allclose(again, x, atol=tolerance)
        jacobians = jax.jit(jax.vmap(jax.jacobian(to_x)))(z)
        exact = np.linalg.slogdet(np.asarray(jacobians, np.float64))[1]
        np.testing.assert_allclose(log_det, exact, atol=tolerance)
        assert back.dtype == log_det.dtype == dtype


@pytest.mark.parametrize("name", MAPS)
def test_pulled_back_density_is_density_plus_volume(name):
    to_x = MAPS[name]()
    target = gaussian(jnp.ones(DIM), jnp.eye(DIM) * 2)
    latent = pull_back(target.logdensity, to_x)
    for z in jax.random.normal(jax.random.key(SEED), (2, DIM)):
        x, log_det = to_x.with_log_det(z)
        assert latent(z) == target.logdensity(x) + log_det


def test_laplace_of_a_gaussian_is_that_gaussian():
    rng = np.random.default_rng(SEED)
    root = np.tril(rng.normal(size=(DIM, DIM))) + 2 * np.eye(DIM)
    target = gaussian(jnp.arange(DIM) * 1.0, jnp.asarray(root @ root.T))
    to_x = laplace(target.logdensity, jnp.zeros(DIM))
    np.testing.assert_allclose(to_x.shift, np.arange(DIM), atol=1e-3)
    covariance = to_x.scale @ to_x.scale.T
    np.testing.assert_allclose(covariance, root @ root.T, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("make", [logistic_regression, item_response])
def test_latent_posterior_is_round_at_its_mode(make):
    target = make()
    latent = pull_back(
        target.logdensity, laplace(target.logdensity, jnp.zeros(target.dim))
    )
    origin = jnp.zeros(target.dim)
    assert jnp.abs(jax.jit(jax.grad(latent))(origin)).max() < 0.02
    curvature = jax.jit(jax.hessian(latent))(origin)
    np.testing.assert_allclose(curvature, -np.eye(target.dim), atol=5e-3)


def test_standard_normal_on_pytrees():
    tree = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
    assert standard_normal(tree) == standard_normal(jnp.array([1.0, 2.0, 3.0])) == -7


@pytest.mark.parametrize(
    ("density", "message"),
    [
        (lambda x: jnp.log(x - 1).sum(), "not finite at the starting position"),
        (lambda x: jnp.nan * x.sum(), "not finite at the starting position"),
        (lambda x: -(x[0] ** 2) + x[1] ** 2 * 0, "no Gaussian fits"),
        (lambda x: -((x**2).sum() - 1) * 0 + x.sum(), "no Gaussian fits"),
    ],
)
def test_no_laplace_approximation(density, message):
    with pytest.raises(ValueError, match=message):
        laplace(density, jnp.zeros(2))


def test_the_best_gaussian_of_a_density_without_curvature():
    """That of a Laplace density, by its stationarity conditions, or a bit wider."""

    def kinked(x):
        return -jnp.abs(x - 3).sum()

    with jax.enable_x64(True):
        evaluate = Evaluator(kinked, 2)
        start = unit_map(np.zeros(2))
        best, _ = transport.improve_gaussian(evaluate, start, SEED)
        wide = fit_gaussian(evaluate, np.zeros(2), SEED)
    np.testing.assert_allclose(best.transport.shift, 3, atol=0.1)
    spread = np.linalg.norm(best.transport.scale, axis=1)
    np.testing.assert_allclose(spread, np.sqrt(np.pi / 2), rtol=0.2)
    exact = 2 * (np.log(np.sqrt(np.pi / 2)) + 0.5 * np.log(2 * np.pi * np.e) - 1)
    assert best.elbo == pytest.approx(exact, abs=0.06)
    wider = np.linalg.norm(wide.transport.scale, axis=1)
    assert (wider > np.sqrt(np.pi / 2)).all() and wide.pareto_k < 0.7


def test_best_gaussian_finds_a_gaussian():
    rng = np.random.default_rng(SEED)
    root = np.tril(rng.normal(size=(3, 3))) / 2 + np.eye(3)
    target = gaussian(np.array([1.0, -2.0, 0.5]), root @ root.T)
    found = best_gaussian(target.logdensity, jnp.zeros(3))
    np.testing.assert_allclose(found.shift, [1, -2, 0.5], atol=1e-4)
    np.testing.assert_allclose(found.scale @ found.scale.T, root @ root.T, atol=1e-4)
    weights = log_weights(jax.random.key(1), target.logdensity, found, 3, 4096)
    log_z = 1.5 * np.log(2 * np.pi) + np.linalg.slogdet(root)[1]
    np.testing.assert_allclose(weights, log_z, atol=1e-3)


@pytest.mark.parametrize(("degrees", "low", "high"), [(2, 0.35, 0.65), (50, -0.3, 0.2)])
def test_pareto_k_of_known_tails(degrees, low, high):
    """The tail of |t| with nu degrees of freedom has the exponent 1 / nu."""
    draws = np.random.default_rng(SEED).standard_t(degrees, 100_000)
    assert low < pareto_k(np.log(np.abs(draws))) < high


@pytest.mark.parametrize("spread", [1e3, 1e4, 1e6, 1e10])
def test_pareto_k_of_hopeless_weights(spread):
    """ArviZ alone underflows and calls some of them good."""
    rng = np.random.default_rng(SEED)
    for draws in (rng.normal(size=4096), rng.uniform(size=4096), -rng.gamma(1, 1, 100)):
        assert pareto_k(spread * draws) > 0.7
    assert pareto_k(spread * rng.normal(size=4096)) == np.inf


def test_pareto_k_sees_the_upper_tail_alone():
    weights = np.random.default_rng(SEED).normal(size=4096)
    usual = pareto_k(weights)
    assert 0 < usual < 0.7
    hopeless_below = np.where(weights < 0, 1e6 * weights, weights)
    assert pareto_k(hopeless_below) == usual
    assert pareto_k(weights + 1e8) == pytest.approx(usual, abs=1e-5)
    assert pareto_k(weights + 100) == pytest.approx(usual, abs=1e-12)


def test_pareto_k_without_a_tail_or_without_a_number():
    weights = np.random.default_rng(SEED).normal(size=4096)
    assert pareto_k(np.minimum(weights, 0)) == -np.inf
    assert pareto_k(1e8 + np.zeros(4096)) == -np.inf
    usual = pareto_k(weights)
    weights[weights.argmin()] = -np.inf  # a weight of zero
    assert pareto_k(weights) == usual
    for bad in (np.nan, np.inf):
        weights[7] = bad
        assert pareto_k(weights) == np.inf
    assert pareto_k(np.full(4096, -np.inf)) == np.inf


@pytest.mark.parametrize("number", [100, 400, 4000, 16384])
@pytest.mark.parametrize("spread", [0.1, 1.0, 2.0, 5.0])
def test_pareto_k_is_that_of_arviz(number, spread):
    from arviz_stats.base import array_stats

    weights = spread * np.random.default_rng(SEED).normal(size=number)
    theirs = float(array_stats.psislw(-weights)[1])
    assert pareto_k(weights) == pytest.approx(theirs, abs=1e-8)


def test_log_weights_of_a_perfect_map_are_the_constant():
    weights = log_weights(
        jax.random.key(0),
        lambda x: -0.5 * x @ x / 4,
        Affine(jnp.zeros(2), 2 * jnp.eye(2)),
        2,
        1000,
    )
    np.testing.assert_allclose(weights, np.log(8 * np.pi), atol=1e-5)
    assert pareto_k(weights) == -np.inf


# Points


def skewed_density(x):
    return jnp.sum(x - jnp.exp(x)) - 0.1 * x[0] * x[1]


@pytest.mark.parametrize("number", [1, BATCH, BATCH + 1, 3 * BATCH])
def test_points_are_what_the_functions_say(number):
    z = np.random.default_rng(SEED).normal(size=(number, DIM))
    to_x = some_affine()
    with jax.enable_x64(True):
        evaluate = Evaluator(skewed_density, DIM, jnp.square)
        found = evaluate(to_x, z)
        latent = jax.vmap(jax.value_and_grad(lambda z: skewed_density(to_x(z))))
        values, scores = latent(jnp.asarray(z))
        x = jax.vmap(to_x)(jnp.asarray(z))
    np.testing.assert_allclose(found.logdensity, values, rtol=1e-9)
    np.testing.assert_allclose(found.score, scores, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(found.values, x**2, rtol=1e-9)
    assert evaluate.gradients == number


def test_another_map_and_another_evaluator_compile_nothing():
    traced = []

    def density(x):
        traced.append(1)
        return -x @ x

    for scale in (1.0, 2.0):
        Evaluator(density, 2)(identity(2, full=True), np.ones((100, 2)))
        Evaluator(density, 2)(Affine(jnp.ones(2), scale * jnp.eye(2)), np.ones((3, 2)))
    assert len(traced) == 1


def test_curvature_is_the_hessian():
    to_x = some_affine()
    with jax.enable_x64(True):
        found = curvature(Evaluator(skewed_density, DIM), to_x)
        latent = lambda z: skewed_density(to_x(z))  # noqa: E731
        exact = jax.hessian(latent)(jnp.zeros(DIM))
    np.testing.assert_allclose(found, -exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 1e5])
def test_mode_is_found_in_any_units(scale):
    """From a thousand standard deviations out, in units that differ by 10^11."""
    mode = scale * np.array([3.0, -2.0])

    def density(x):
        u = (x - mode) / scale
        return -jnp.sum(jnp.cosh(u[:1]) - 1) - 0.5 * (u[1] - 0.3 * u[0]) ** 2

    start = mode + scale * np.array([20.0, -1000.0])
    found = laplace(density, start)
    np.testing.assert_allclose(found.shift, mode, rtol=1e-4, atol=1e-5 * scale)
    covariance = np.asarray(found.scale, np.float64) @ np.asarray(found.scale).T
    exact = scale**2 * np.array([[1, 0.3], [0.3, 1.09]])
    np.testing.assert_allclose(covariance, exact, rtol=1e-2)


def test_one_round_finds_a_gaussian():
    """From the averages of the score alone, to the noise of the points."""
    root = np.array([[1.5, 0.0], [0.4, 0.8]])
    target = gaussian(jnp.array([0.5, -0.3]), root @ root.T)
    start = unit_map(np.zeros(2))
    z = mirrored_normal(np.random.default_rng(SEED), 40_000, 2)
    with jax.enable_x64(True):
        found = improve_map(start, Evaluator(target.logdensity, 2)(start, z))
    np.testing.assert_allclose(found.shift, [0.5, -0.3], atol=0.03)
    np.testing.assert_allclose(found.scale @ found.scale.T, root @ root.T, atol=0.08)


def test_fit_in_any_pytree():
    def logdensity(position):
        return -0.5 * (jnp.sum((position["a"] - 3) ** 2) / 4 + position["b"] ** 2)

    model = Model(logdensity, {"a": jnp.zeros(2), "b": jnp.zeros(())})
    with jax.enable_x64(True):
        problem = make_problem(model)
        found = fit_gaussian(problem.evaluator(), problem.position, SEED)
    np.testing.assert_allclose(found.transport.shift, [3, 3, 0], atol=0.2)
    deviations = np.linalg.norm(found.transport.scale, axis=1)
    np.testing.assert_allclose(deviations, [2, 2, 1], rtol=0.15)  # or a bit wider
    assert (deviations > [1.98, 1.98, 0.99]).all()
    assert found.pareto_k < 0.7 and found.efficiency > 0.9
    assert found.elbo == pytest.approx(1.5 * np.log(2 * np.pi) + np.log(4), abs=0.05)


@pytest.mark.parametrize(
    "logdensity",
    [
        lambda x: x.sum() + 0 * x @ x,  # no mode
        lambda x: jnp.where(jnp.abs(x).max() < 2.5, -0.5 * x @ x, jnp.nan),  # an edge
        lambda x: jnp.where(jnp.abs(x).max() < 1, 0.0, -jnp.inf),  # flat and cut off
    ],
)
def test_where_there_is_no_gaussian_there_is_still_a_map(logdensity):
    with jax.enable_x64(True):
        problem = make_problem(Model(lambda x: logdensity(x) + 0.0, jnp.zeros(2)))
        found = fit_gaussian(problem.evaluator(), problem.position, 0)
    assert np.isfinite(found.transport.scale).all()
    assert (np.diagonal(found.transport.scale) > 0).all()


def test_fit_of_a_large_problem_needs_no_matrix(monkeypatch):
    monkeypatch.setattr(transport, "LARGEST_LAPLACE", 2)
    target = gaussian(jnp.ones(3), 4 * jnp.eye(3))
    found = fit_gaussian(Evaluator(target.logdensity, 3), np.zeros(3), 0)
    assert found.transport.scale.tolist() == [1, 1, 1]


def test_assessment_orders_maps():
    target = gaussian(jnp.zeros(3), jnp.eye(3))
    z = mirrored_normal(np.random.default_rng(SEED), 4096, 3)
    evaluate = Evaluator(target.logdensity, 3)
    maps = [Affine(np.zeros(3), s * np.eye(3)) for s in (1.0, 0.8, 0.3)]
    found = [assess_map(each, evaluate(each, z)) for each in maps]
    assert found[0].pareto_k < found[1].pareto_k < 0.7
    assert found[0].efficiency > found[1].efficiency > 10 * found[2].efficiency
    assert found[0].elbo > found[1].elbo > found[2].elbo
    exact = [
        1.5 * np.log(2 * np.pi) + 3 * (0.5 + np.log(s) - s**2 / 2) for s in (1, 0.8)
    ]
    assert [each.elbo for each in found[:2]] == pytest.approx(exact, abs=0.03)


def test_map_quality_orders_maps_and_knows_no_weights():
    target = gaussian(jnp.zeros(3), jnp.eye(3))
    k, elbo = zip(
        *(
            map_quality(
                jax.random.key(0), target, Affine(jnp.zeros(3), s * jnp.ones(3))
            )
            for s in (1.0, 0.8, 0.3)
        ),
        strict=True,
    )
    assert k[0] < k[1] < 0.7 < k[2]
    assert elbo[0] > elbo[1] > elbo[2]
    cut = make_problem(Model(lambda x: jnp.log(x).sum(), jnp.ones(3)))
    assert map_quality(jax.random.key(0), cut, identity(3)) == (np.inf, -np.inf)


def test_map_from_draws_forgives_outliers_and_not_infinity():
    root = np.array([[2.0, 0.0], [1.0, 0.5]])
    draws = 3 + np.random.default_rng(SEED).normal(size=(200, 100, 2)) @ root.T
    draws[0] = 1e6
    found = map_from_draws(jnp.asarray(draws, jnp.float32), full=True)
    np.testing.assert_allclose(found.shift, 3, atol=0.1)
    np.testing.assert_allclose(found.scale, root, atol=0.15)
    thin = map_from_draws(jnp.asarray(draws, jnp.float32), full=False)
    np.testing.assert_allclose(thin.scale, [2, np.sqrt(1.25)], atol=0.15)
    draws[0] = np.nan
    with pytest.raises(ValueError, match="proper"):
        map_from_draws(jnp.asarray(draws), full=True)


def lowers_for_cuda(function, *arguments):
    exported = export.export(function, platforms=["cuda"])(*arguments)
    return exported.platforms == ("cuda",) and "callback" not in exported.mlir_module()


def test_maps_lower_for_cuda():
    to_x = some_affine()
    latent = jax.value_and_grad(pull_back(standard_normal, to_x))
    z = jax.ShapeDtypeStruct((8, DIM), jnp.float32)
    for function in (latent, to_x, to_x.inverse):
        assert lowers_for_cuda(jax.jit(jax.vmap(function)), z)


def test_points_lower_for_cuda():
    points = points_program(standard_normal, jnp.square)
    z = jax.ShapeDtypeStruct((BATCH, DIM), jnp.float32)
    assert lowers_for_cuda(points, some_affine(), z)


class Quadratic:
    """A log density that can be watched: a function of its own for each use."""

    def __call__(self, x):
        return -0.5 * x @ x


def test_what_was_compiled_for_a_density_dies_with_it():
    density = Quadratic()
    gone = weakref.ref(density)
    best_gaussian(density, jnp.ones(2))
    del density
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_importing_maps_imports_no_heavy_library():
    heavy = "arviz_stats", "flowjax", "equinox", "paramax", "scipy.optimize"
    code = f"""
import sys, swindles.transport
print([name for name in {(*heavy, "scipy.stats")} if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
