"""Maps: round trips, volumes, Laplace's approximation, variational fits, files."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flowjax.bijections import RationalQuadraticSpline, Vmap
from jax import export

from swindles import transport
from swindles.targets import gaussian, item_response, logistic_regression
from swindles.transport import (
    Affine,
    Bend,
    Design,
    Flow,
    Schedule,
    fit_affine,
    fit_flow,
    gaussian_start,
    identity,
    laplace,
    load,
    log_weight,
    log_weights,
    pareto_k,
    path_log_weight,
    pull_back,
    save,
    standard_normal,
)

SEED = 20203
DIM = 6
POINTS = 100
SMALL = Design(flows=2, width=8, depth=1)


def some_affine(full=True):
    rng = np.random.default_rng(SEED)
    scale = np.tril(rng.normal(size=(DIM, DIM))) / 3 + np.eye(DIM)
    scale = scale if full else np.abs(np.diagonal(scale))
    return Affine(jnp.asarray(rng.normal(size=DIM)), jnp.asarray(scale))


def some_flow(base, design):
    """A flow far from the identity: every weight is drawn anew."""
    bijection = transport.build(design, DIM, jax.random.key(SEED))
    weights, rest = eqx.partition(bijection, eqx.is_inexact_array)
    leaves, tree = jax.tree.flatten(weights)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [
        jax.random.normal(k, leaf.shape) / np.sqrt(leaf.shape[-1])
        for k, leaf in zip(keys, leaves, strict=True)
    ]
    bijection = eqx.combine(jax.tree.unflatten(tree, drawn), rest)
    return Flow(base, transport.paramax.unwrap(bijection), design)


MAPS = {
    "identity": lambda: identity(DIM),
    "full identity": lambda: identity(DIM, full=True),
    "diagonal": lambda: some_affine(full=False),
    "full rank": some_affine,
    "flow": lambda: some_flow(identity(DIM), Design()),
    "flow, affine": lambda: some_flow(some_affine(), SMALL),
    "bent flow, diagonal": lambda: some_flow(
        some_affine(full=False), SMALL._replace(bend=True)
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *((name, "float32", 1e-3) for name in MAPS if name != "flow, affine"),
        *((name, "float64", 1e-9) for name in MAPS),
    ],
)
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


def test_one_layer_is_triangular_up_to_its_permutation():
    flow = some_flow(identity(DIM), SMALL._replace(flows=1))
    jacobian = jax.jacobian(flow)(jnp.linspace(-1, 1, DIM))
    (permute,) = (
        leaf
        for leaf in jax.tree.leaves(
            flow.bijection, is_leaf=lambda node: hasattr(node, "permutation")
        )
        if hasattr(leaf, "permutation")
    )
    order = np.asarray(permute.inverse_permutation[0]).ravel()
    triangular = np.asarray(jacobian)[order]
    assert (np.triu(triangular, 1) == 0).all()
    assert (np.diagonal(triangular) > 0).all()
    assert (np.abs(np.tril(triangular, -1)) > 0).sum() > DIM


@pytest.mark.parametrize("name", MAPS)
def test_pulled_back_density_is_density_plus_volume(name):
    to_x = MAPS[name]()
    target = gaussian(jnp.ones(DIM), jnp.eye(DIM) * 2)
    latent = pull_back(target.logdensity, to_x)
    for z in jax.random.normal(jax.random.key(SEED), (2, DIM)):
        x, log_det = to_x.with_log_det(z)
        assert latent(z) == target.logdensity(x) + log_det


def test_any_flowjax_bijection_is_a_transport():
    spline = eqx.filter_vmap(lambda _: RationalQuadraticSpline(knots=4, interval=3))(
        jnp.arange(DIM)
    )
    to_x = Flow(identity(DIM), Vmap(spline, in_axes=eqx.if_array(0)))
    z = jnp.linspace(-2, 2, DIM)
    np.testing.assert_allclose(to_x.inverse(to_x(z)), z, atol=1e-5)


def test_log_determinants_of_a_bend_and_its_inverse_cancel():
    bend = eqx.tree_at(lambda b: b.raw, Bend(3), jnp.array([-2.0, 0.0, 2.0]))
    image, there = bend.transform_and_log_det(jnp.array([-1.5, 0.7, 2.0]))
    back = bend.inverse_and_log_det(image)[1]
    assert abs(there) > 0.1
    np.testing.assert_allclose(there + back, 0, atol=1e-5)


def test_bend_is_smooth_where_its_sides_meet():
    with jax.enable_x64(True):
        bend = eqx.tree_at(lambda b: b.raw, Bend(1), jnp.array([2.0]))

        def function(t):
            return bend.transform(jnp.array([t]))[0]

        slope, curvature = jax.grad(function), jax.grad(jax.grad(function))
        for g in (slope, curvature):
            np.testing.assert_allclose(g(-1e-9), g(1e-9), atol=1e-7)
        assert slope(0.0) == 1
        assert curvature(0.0) > 0.5


def test_laplace_of_a_gaussian_is_that_gaussian():
    rng = np.random.default_rng(SEED)
    root = np.tril(rng.normal(size=(DIM, DIM))) + 2 * np.eye(DIM)
    target = gaussian(jnp.arange(DIM) * 1.0, jnp.asarray(root @ root.T))
    to_x = laplace(target.logdensity, jnp.zeros(DIM))
    np.testing.assert_allclose(to_x.shift, np.arange(DIM), atol=1e-3)
    covariance = to_x.scale @ to_x.scale.T
    np.testing.assert_allclose(covariance, root @ root.T, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("make", [logistic_regression, item_response])
def test_latent_posterior_is_round_at_its_mode(make):
    target = make()
    latent = pull_back(
        target.logdensity, laplace(target.logdensity, jnp.zeros(target.dim))
    )
    origin = jnp.zeros(target.dim)
    assert jnp.abs(jax.grad(latent)(origin)).max() < 0.02
    curvature = jax.hessian(latent)(origin)
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


def test_pathfinder_when_there_is_no_curvature():
    def kinked(x):
        return -jnp.abs(x - 3).sum()

    with pytest.warns(UserWarning, match="Using Pathfinder instead"):
        start = gaussian_start(jax.random.key(SEED), kinked, jnp.zeros(2))
    fit = fit_affine(jax.random.key(1), kinked, start, Schedule(3000, 128, 1e-2))
    # The best Gaussian for a Laplace density, by its stationarity conditions.
    np.testing.assert_allclose(fit.transport.shift, 3, atol=0.1)
    spread = np.sqrt(np.diagonal(fit.transport.scale @ fit.transport.scale.T))
    np.testing.assert_allclose(spread, np.sqrt(np.pi / 2), rtol=0.05)
    with pytest.raises(ValueError, match="starting position"):
        gaussian_start(jax.random.key(0), lambda x: jnp.nan * x.sum(), jnp.zeros(2))


@pytest.mark.parametrize("full", [True, False])
def test_affine_fit_finds_a_gaussian(full):
    """KL(q || p) is zero at the Gaussian itself, or at its inverse precisions."""
    rng = np.random.default_rng(SEED)
    root = np.tril(rng.normal(size=(3, 3))) / 2 + np.eye(3)
    target = gaussian(np.array([1.0, -2.0, 0.5]), root @ root.T)
    start = identity(3, full)
    schedule = Schedule(num_steps=4000, batch=32, learning_rate=1e-2)
    fit = fit_affine(jax.random.key(1), target.logdensity, start, schedule)
    np.testing.assert_allclose(fit.transport.shift, [1, -2, 0.5], atol=0.02)
    if full:
        covariance = fit.transport.scale @ fit.transport.scale.T
        np.testing.assert_allclose(covariance, root @ root.T, atol=0.05)
        log_z = 1.5 * np.log(2 * np.pi) + np.linalg.slogdet(root)[1]
        assert abs(fit.elbo - log_z) < 1e-3
        assert fit.log_weights.std() < 0.05
    else:
        precision = np.diagonal(np.linalg.inv(root @ root.T))
        np.testing.assert_allclose(fit.transport.scale**-2, precision, rtol=0.03)


def test_path_gradient_has_the_same_value_and_mean_and_less_noise():
    target = logistic_regression()
    start = laplace(target.logdensity, jnp.zeros(target.dim))
    latent = pull_back(target.logdensity, start)
    inner = identity(target.dim, full=True)
    inner = inner._replace(shift=jnp.full(target.dim, 0.3))
    z = jax.random.normal(jax.random.key(SEED), (20_000, target.dim))
    slopes = {}
    for weight in (log_weight, path_log_weight):

        def value(shift, z, weight=weight):
            return weight(latent, inner._replace(shift=shift), z)

        values, slope = jax.vmap(jax.value_and_grad(value), (None, 0))(inner.shift, z)
        slopes[weight] = np.asarray(slope), np.asarray(values)
    (plain, a), (path, b) = slopes[log_weight], slopes[path_log_weight]
    np.testing.assert_allclose(a, b, atol=2e-3)
    gap = (plain - path).mean(0) / ((plain - path).std(0) / np.sqrt(len(z)))
    assert np.abs(gap).max() < 4
    assert (path.std(0) < 0.5 * plain.std(0)).all()


def test_flow_fits_what_affine_maps_cannot():
    def curved(x):
        return -0.5 * (x[0] ** 2 + ((x[1] - x[0] ** 2) / 0.3) ** 2)

    schedule = Schedule(num_steps=3000, batch=128, learning_rate=1e-2)
    design = Design(flows=3, width=16)
    flow = fit_flow(jax.random.key(0), curved, identity(2), design, schedule, 1)
    affine = fit_affine(jax.random.key(0), curved, identity(2, True), schedule)
    log_z = np.log(2 * np.pi * 0.3)
    assert log_z - affine.elbo > 0.3
    assert -4 * flow.elbo_error < log_z - flow.elbo < 0.1


def test_fit_is_reproducible_and_stops_when_settled():
    target = gaussian(np.zeros(2), np.eye(2))
    schedule = Schedule(num_steps=1000, batch=16, learning_rate=1e-3)
    fits = [
        fit_affine(jax.random.key(5), target.logdensity, identity(2, True), schedule)
        for _ in range(2)
    ]
    assert (fits[0].loss == fits[1].loss).all()
    assert (fits[0].transport.scale == fits[1].transport.scale).all()
    assert fits[0].loss.size == 600  # two blocks to see it, four to slow down
    far = Affine(jnp.full(2, 30.0), jnp.ones(2))
    assert fit_affine(jax.random.key(5), target.logdensity, far).loss.size == 1000


def test_loss_that_is_not_finite_names_the_step():
    def cliff(x):
        return jnp.where(x[0] < 0.5, -0.5 * x @ x + 5 * x[0], jnp.nan)

    start = Affine(jnp.array([-8.0, 0.0]), 0.01 * jnp.ones(2))
    with pytest.raises(ValueError, match=r"loss is nan at step \d+") as caught:
        fit_affine(jax.random.key(0), cliff, start, Schedule(2000, 16, 1.0))
    step = int(re.search(r"step (\d+)", str(caught.value))[1])
    # The map moves by at most a start's deviation a step: it cannot be there before.
    assert step >= 8
    with pytest.raises(ValueError, match="at step 0"):
        fit_affine(jax.random.key(0), lambda x: jnp.nan * x[0], identity(2))


def test_a_fit_that_makes_it_worse_returns_its_start():
    def heavy(x):
        return -jnp.cosh(x).sum()

    start = laplace(heavy, jnp.zeros(DIM))
    wild = Schedule(num_steps=10, batch=2, learning_rate=0.5)
    with pytest.warns(UserWarning, match="made the map worse by"):
        fit = fit_affine(jax.random.key(0), heavy, start, wild)
    assert fit.transport is start


@pytest.mark.parametrize(
    "schedule",
    [Schedule(0, 64, 1e-3), Schedule(100, 1, 1e-3), Schedule(100, 64, 0.0)],
)
def test_schedule_without_sense(schedule):
    with pytest.raises(ValueError, match="at least 10 steps, 2 draws"):
        fit_affine(jax.random.key(0), standard_normal, identity(2), schedule)


def test_a_flow_needs_two_dimensions():
    with pytest.raises(ValueError, match="two dimensions"):
        fit_flow(jax.random.key(0), standard_normal, identity(1))


@pytest.mark.parametrize("name", MAPS)
def test_saved_and_loaded(name, tmp_path):
    to_x = MAPS[name]()
    save(tmp_path / "a map", to_x)
    again = load(tmp_path / "a map")
    assert type(again) is type(to_x)
    z = jax.random.normal(jax.random.key(SEED), (10, DIM))
    for old, new in zip(
        jax.vmap(to_x.with_log_det)(z), jax.vmap(again.with_log_det)(z), strict=True
    ):
        assert (old == new).all()
    assert [p.name for p in tmp_path.iterdir()] == ["a map"]


def test_what_cannot_be_saved_or_loaded(tmp_path):
    with pytest.raises(ValueError, match="fit_flow"):
        save(tmp_path / "map", Flow(identity(2), Bend(2)))
    (tmp_path / "other").write_text("something else")
    with pytest.raises(ValueError, match="is not a file that `save` wrote"):
        load(tmp_path / "other")
    np.savez(tmp_path / "arrays.npz", np.ones(3), np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="is not a file that `save` wrote"):
        load(tmp_path / "arrays.npz")


@pytest.mark.parametrize(("degrees", "low", "high"), [(2, 0.35, 0.65), (50, -0.3, 0.2)])
def test_pareto_k_of_known_tails(degrees, low, high):
    """The tail of |t| with nu degrees of freedom has the exponent 1 / nu."""
    draws = np.random.default_rng(SEED).standard_t(degrees, 100_000)
    assert low < pareto_k(np.log(np.abs(draws))) < high


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


def lowers_for_cuda(function, *arguments):
    exported = export.export(function, platforms=["cuda"])(*arguments)
    return exported.platforms == ("cuda",) and "callback" not in exported.mlir_module()


@pytest.mark.parametrize("name", ["full rank", "bent flow, diagonal"])
def test_maps_lower_for_cuda(name):
    to_x = MAPS[name]()
    latent = jax.value_and_grad(pull_back(standard_normal, to_x))
    z = jax.ShapeDtypeStruct((8, DIM), jnp.float32)
    for function in (latent, to_x, to_x.inverse):
        assert lowers_for_cuda(jax.jit(jax.vmap(function)), z)


def test_fits_lower_for_cuda():
    slope = jax.grad(standard_normal)
    hessian = jax.jit(lambda x: transport.hessian(x, slope))
    assert lowers_for_cuda(hessian, jax.ShapeDtypeStruct((DIM,), jnp.float32))
    bijection = transport.build(SMALL._replace(bend=True), DIM, jax.random.key(0))
    flow, rest = eqx.partition(bijection, eqx.is_inexact_array)

    def weigh_affine(params, z):
        return path_log_weight(standard_normal, params, z)

    def weigh_flow(params, z):
        to_x = Flow(identity(DIM), eqx.combine(params, rest))
        return log_weight(standard_normal, to_x, z)

    for params, weigh in ((some_affine(), weigh_affine), (flow, weigh_flow)):
        training = transport.Training(params, transport.adam(DIM).init(params), params)
        arguments = jax.random.key(0), training, jnp.ones((10, 3)), weigh, DIM, 8
        assert lowers_for_cuda(transport.train, *arguments)
