"""Flows: round trips, volumes, fits that bend, files."""

import gc
import json
import re
import subprocess
import sys
import weakref
from functools import cache
from importlib.resources import files

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import paramax
import pytest
from flowjax.bijections import RationalQuadraticSpline, Vmap
from jax import export

from swindles import neutra
from swindles.neutra import (
    Bend,
    Design,
    Flow,
    Schedule,
    Training,
    adam,
    build_flow,
    fit_flow,
    keep_better,
    load_map,
    make_trainer,
    minimize_loss,
    save_map,
)
from swindles.targets import gaussian, sparse_logistic_regression
from swindles.transport import (
    Affine,
    best_gaussian,
    identity,
    log_weight,
    log_weights,
    pareto_k,
    pull_back,
    standard_normal,
)

SEED = 20203
DIM = 6
POINTS = 100
SMALL = Design(flows=2, width=8, depth=2)
# FlowJAX draws its weights with many keys at once: this kind compiles quickly.
QUICK_KEY = jax.random.key(SEED, impl="unsafe_rbg")
SHIPPED = files("swindles") / "data" / "sparse_flow.npz"


def some_affine(full=True):
    rng = np.random.default_rng(SEED)
    scale = np.tril(rng.normal(size=(DIM, DIM))) / 3 + np.eye(DIM)
    scale = scale if full else np.abs(np.diagonal(scale))
    return Affine(jnp.asarray(rng.normal(size=DIM)), jnp.asarray(scale))


def some_flow(base, design):
    """A flow far from the identity: every weight is drawn anew."""
    rng = np.random.default_rng(SEED)

    def draw(leaf):
        drawn = rng.normal(size=leaf.shape) / np.sqrt(leaf.shape[-1])
        return jnp.asarray(drawn, leaf.dtype)

    bijection = build_flow(design, DIM, QUICK_KEY)
    weights, rest = eqx.partition(bijection, eqx.is_inexact_array)
    bijection = eqx.combine(jax.tree.map(draw, weights), rest)
    return Flow(base, paramax.unwrap(bijection), design)


FLOWS = {
    "flow, full rank": lambda: some_flow(some_affine(), SMALL),
    "bent flow, diagonal": lambda: some_flow(
        some_affine(full=False), SMALL._replace(bend=True)
    ),
}


@cache
def make(name, dtype="float32"):
    """One of the flows, in single or double precision."""
    with jax.enable_x64(dtype == "float64"):
        return FLOWS[name]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *((name, "float64", 1e-9) for name in FLOWS),
        ("bent flow, diagonal", "float32", 1e-3),
    ],
)
def test_round_trip_and_volume(name, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        to_x = make(name, dtype)
        z = jnp.asarray(np.random.default_rng(1).normal(size=(POINTS, DIM)), dtype)

        @jax.jit
        @jax.vmap
        def there_and_back(z):
            x = to_x(z)
            return x, to_x.inverse(x), *to_x.with_log_det(z), jax.jacobian(to_x)(z)

        x, back, again, log_det, jacobians = there_and_back(z)
        assert np.abs(x - z).max() > 1
        np.testing.assert_allclose(back, z, atol=tolerance)
        np.testing.assert_allclose(again, x, atol=tolerance)
        exact = np.linalg.slogdet(np.asarray(jacobians, np.float64))[1]
        np.testing.assert_allclose(log_det, exact, atol=tolerance)
        assert back.dtype == log_det.dtype == dtype


@pytest.mark.slow
def test_one_layer_is_triangular_up_to_its_permutation():
    flow = some_flow(identity(DIM), SMALL._replace(flows=1))
    jacobian = jax.jit(lambda z: jax.jacobian(flow)(z))(jnp.linspace(-1, 1, DIM))
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


@pytest.mark.parametrize("name", FLOWS)
def test_pulled_back_density_is_density_plus_volume(name):
    to_x = make(name)
    target = gaussian(jnp.ones(DIM), jnp.eye(DIM) * 2)
    z = jax.random.normal(jax.random.key(SEED), (2, DIM))
    latent = jax.jit(jax.vmap(pull_back(target.logdensity, to_x)))(z)
    x, log_det = jax.jit(jax.vmap(to_x.with_log_det))(z)
    expected = jax.vmap(target.logdensity)(x) + log_det
    np.testing.assert_allclose(latent, expected, rtol=1e-6)


def test_any_flowjax_bijection_is_a_transport():
    spline = eqx.filter_vmap(lambda _: RationalQuadraticSpline(knots=4, interval=3))(
        jnp.arange(DIM)
    )
    to_x = Flow(identity(DIM), Vmap(spline, in_axes=eqx.if_array(0)))
    z = jnp.linspace(-2, 2, DIM)
    back = jax.jit(lambda z: to_x.inverse(to_x(z)))(z)
    np.testing.assert_allclose(back, z, atol=1e-5)


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

        slope = jax.jit(jax.grad(function))
        curvature = jax.jit(jax.grad(jax.grad(function)))
        for g in (slope, curvature):
            np.testing.assert_allclose(g(-1e-9), g(1e-9), atol=1e-7)
        assert slope(0.0) == 1
        assert curvature(0.0) > 0.5


def curved(x):
    """A banana; its normaliser is 0.6 pi."""
    return -0.5 * (x[0] ** 2 + ((x[1] - x[0] ** 2) / 0.3) ** 2)


@pytest.mark.optimised
@pytest.mark.slow
def test_flow_fits_what_affine_maps_cannot():
    schedule = Schedule(num_steps=3000, batch=128, learning_rate=1e-2)
    design = Design(flows=3, width=16)
    flow = fit_flow(QUICK_KEY, curved, identity(2), design, schedule, 1)
    affine = best_gaussian(curved, jnp.zeros(2))
    weights = log_weights(jax.random.key(0), curved, affine, 2, 4096)
    log_z = np.log(2 * np.pi * 0.3)
    assert log_z - weights.mean() > 0.3
    assert -4 * flow.elbo_error < log_z - flow.elbo < 0.1


def train_scales(density, start, schedule, key=5):
    """A fit without a flow: of shift and scales."""

    def weigh(params, z):
        return log_weight(density, params, z)

    dim = start.shift.size
    return minimize_loss(jax.random.key(key), weigh, start, dim, schedule)


def test_a_fit_finds_the_inverse_precisions():
    """KL(q || p) of a diagonal q is least there."""
    rng = np.random.default_rng(SEED)
    root = np.tril(rng.normal(size=(3, 3))) / 2 + np.eye(3)
    target = gaussian(np.array([1.0, -2.0, 0.5]), root @ root.T)
    schedule = Schedule(num_steps=4000, batch=32, learning_rate=1e-2)
    found, _ = train_scales(target.logdensity, identity(3), schedule)
    np.testing.assert_allclose(found.shift, [1, -2, 0.5], atol=0.02)
    precision = np.diagonal(np.linalg.inv(root @ root.T))
    np.testing.assert_allclose(found.scale**-2, precision, rtol=0.03)


def test_fit_is_reproducible_and_stops_when_settled():
    schedule = Schedule(num_steps=1000, batch=16, learning_rate=1e-3)
    (one, losses), (other, again) = (
        train_scales(standard_normal, identity(2), schedule) for _ in range(2)
    )
    assert (losses == again).all() and (one.scale == other.scale).all()
    assert losses.size == 600  # two blocks to see it, four to slow down
    far = Affine(jnp.full(2, 30.0), jnp.ones(2))
    assert train_scales(standard_normal, far, schedule)[1].size == 1000


def test_loss_that_is_not_finite_names_the_step():
    def cliff(x):
        return jnp.where(x[0] < 0.5, -0.5 * x @ x + 5 * x[0], jnp.nan)

    start = Affine(jnp.array([-8.0, 0.0]), 0.01 * jnp.ones(2))
    with pytest.raises(ValueError, match=r"loss is nan at step \d+") as caught:
        train_scales(cliff, start, Schedule(2000, 16, 1.0))
    step = int(re.search(r"step (\d+)", str(caught.value))[1])
    assert step >= 3  # shift and scale move by about the learning rate at each
    with pytest.raises(ValueError, match="at step 0"):
        train_scales(lambda x: jnp.nan * x[0], identity(2), Schedule(10, 2, 1e-3))


def test_a_fit_that_makes_it_worse_returns_its_start():
    start, worse = identity(DIM), some_affine(full=False)
    with pytest.warns(UserWarning, match="made the map worse by"):
        fit = keep_better(jax.random.key(0), standard_normal, start, worse, np.ones(1))
    assert fit.transport is start
    fit = keep_better(jax.random.key(0), standard_normal, worse, start, np.ones(1))
    assert fit.transport is start and fit.elbo_error < 1e-6


@pytest.mark.parametrize(
    "schedule",
    [Schedule(0, 64, 1e-3), Schedule(100, 1, 1e-3), Schedule(100, 64, 0.0)],
)
def test_schedule_without_sense(schedule):
    with pytest.raises(ValueError, match="at least 10 steps, 2 draws"):
        train_scales(standard_normal, identity(2), schedule)


def test_the_shipped_map_is_close_to_its_posterior():
    to_x, target = load_map(SHIPPED), sparse_logistic_regression()
    assert to_x.design == Design()
    weights = log_weights(jax.random.key(0), target.logdensity, to_x, target.dim, 8192)
    # KL(q || p): the mean of the weights estimates the normaliser.
    divergence = np.log(np.exp(weights - weights.max()).mean()) + weights.max()
    assert 0 < divergence - weights.mean() < 1
    assert pareto_k(weights) < 0.8


def test_trials_keep_the_best_order_of_the_coordinates(monkeypatch):
    """Of the brief fits, the one with the lowest loss is fitted in full."""
    tried = []

    def train(key, logdensity, start, design, schedule):
        loss = float(jax.random.uniform(key))
        tried.append((schedule.num_steps, loss, key))
        return start, np.full(schedule.num_steps, loss)

    monkeypatch.setattr(neutra, "train_flow", train)
    schedule = Schedule(num_steps=100, batch=16, learning_rate=1e-3)
    neutra.fit_flow(
        jax.random.key(0), standard_normal, identity(2), SMALL, schedule, trials=5
    )
    *brief, (steps, loss, _) = tried
    assert [steps for steps, *_ in brief] == [10] * 5
    assert steps == 100
    assert loss == min(loss for _, loss, _ in brief)


def test_a_flow_needs_two_dimensions():
    with pytest.raises(ValueError, match="two dimensions"):
        fit_flow(jax.random.key(0), standard_normal, identity(1))


class Quadratic:
    """A log density that can be watched: a function of its own for each use."""

    def __call__(self, x):
        return -0.5 * (x - 1) @ (x - 1)


@pytest.mark.slow
def test_what_was_compiled_for_a_density_dies_with_it():
    def fit():
        """The density dies with this frame, and not by ``del``.

        When Equinox looks for the frame of its own jit, it reads the local variables of
        every frame; and up to Python 3.12 a frame keeps what was read.
        """
        density = Quadratic()
        schedule = Schedule(10, 2, 1e-3)
        fit_flow(QUICK_KEY, density, identity(DIM), SMALL, schedule, trials=1)
        return weakref.ref(density)

    gone = fit()
    gc.collect()
    assert gone() is None


MAPS = {"diagonal": lambda: some_affine(full=False), "full rank": some_affine} | {
    name: lambda name=name: make(name) for name in FLOWS
}


@pytest.mark.parametrize("name", MAPS)
def test_saved_and_loaded(name, tmp_path):
    to_x = MAPS[name]()
    save_map(tmp_path / "a map", to_x)
    again = load_map(tmp_path / "a map")
    assert type(again) is type(to_x)
    assert getattr(again, "design", None) == getattr(to_x, "design", None)
    z = jax.random.normal(jax.random.key(SEED), (10, DIM))
    pairs = [jax.jit(jax.vmap(each.with_log_det))(z) for each in (to_x, again)]
    for old, new in zip(*pairs, strict=True):
        assert (old == new).all()
    assert [p.name for p in tmp_path.iterdir()] == ["a map"]


def test_a_file_goes_by_names_and_not_by_order(tmp_path):
    to_x = make("bent flow, diagonal")
    save_map(tmp_path / "map", to_x)
    with np.load(tmp_path / "map") as file:
        fields = dict(file)
    assert {"format", "design", "shift", "scale"} < fields.keys()
    assert fields["format"] == 1
    assert json.loads(str(fields["design"])) == to_x.design._asdict()
    np.savez(tmp_path / "turned.npz", **dict(reversed(fields.items())))
    again = load_map(tmp_path / "turned.npz")
    for old, new in zip(*map(jax.tree.leaves, (to_x, again)), strict=True):
        if eqx.is_array(old):
            assert (old == new).all()


def test_a_file_with_other_fields_is_no_map(tmp_path):
    save_map(tmp_path / "map", make("bent flow, diagonal"))
    with np.load(tmp_path / "map") as file:
        fields = dict(file)
    name = max(fields, key=len)
    for number, (change, message) in enumerate(
        [
            ({"format": 2}, "has format 2, not 1"),
            ({"scale": None}, "is not a file that `save_map` wrote"),
            ({"format": None}, "is not a file that `save_map` wrote"),
            ({"design": "{"}, "is not a file that `save_map` wrote"),
            ({name: None}, "are not those of a flow"),
            ({name: fields[name][..., :-1]}, "are not those of a flow"),
            ({"more": np.ones(3)}, "are not those of a flow"),
        ]
    ):
        changed = {k: v for k, v in (fields | change).items() if v is not None}
        path = tmp_path / f"{number}.npz"
        np.savez(path, **changed)
        with pytest.raises(ValueError, match=message):
            load_map(path)


def test_what_cannot_be_saved_or_loaded(tmp_path):
    for to_x in (Flow(identity(2), Bend(2)), Bend(2)):
        with pytest.raises(ValueError, match="fit_flow"):
            save_map(tmp_path / "map", to_x)
    assert not list(tmp_path.iterdir())
    (tmp_path / "text").write_text("something else")
    np.save(tmp_path / "array.npy", np.ones(3))
    # The positional format of earlier files.
    np.savez(tmp_path / "old.npz", json.dumps(None), np.ones(2), np.ones(2))
    for name in ("text", "array.npy", "old.npz"):
        with pytest.raises(ValueError, match="is not a file that `save_map` wrote"):
            load_map(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load_map(tmp_path / "nothing")


@pytest.mark.slow
def test_without_flowjax_it_says_what_to_install():
    code = """
import sys
sys.modules["flowjax"] = None  # as if it were not there
import swindles.neutra"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and "pip install 'swindles[flows]'" in last


def lowers_for_cuda(function, *arguments):
    exported = export.export(function, platforms=["cuda"])(*arguments)
    return exported.platforms == ("cuda",) and "callback" not in exported.mlir_module()


def test_flows_lower_for_cuda():
    to_x = make("bent flow, diagonal")
    latent = jax.value_and_grad(pull_back(standard_normal, to_x))
    z = jax.ShapeDtypeStruct((8, DIM), jnp.float32)
    for function in (latent, to_x, to_x.inverse):
        assert lowers_for_cuda(jax.jit(jax.vmap(function)), z)


def test_the_fit_of_a_flow_lowers_for_cuda():
    bijection = build_flow(SMALL._replace(bend=True), DIM, QUICK_KEY)
    params, rest = eqx.partition(bijection, eqx.is_inexact_array)

    def weigh(params, z):
        to_x = Flow(identity(DIM), eqx.combine(params, rest))
        return log_weight(standard_normal, to_x, z)

    training = Training(params, adam(DIM).init(params), params)
    train = jax.jit(make_trainer(weigh, DIM, batch=8))
    assert lowers_for_cuda(train, jax.random.key(0), training, jnp.ones((10, 3)))
