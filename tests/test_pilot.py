"""The pilot: maps for awkward targets, exact coefficients, and a fair choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from scipy import stats

from swindles import pilot
from swindles.models import Model, flatten
from swindles.pilot import (
    SCHEMES,
    Candidate,
    Fitted,
    Plan,
    Prices,
    Trace,
    adapt,
    affordable,
    decide,
    find_map,
    fit_all,
    fit_control,
    fit_stein,
    fly,
    is_off,
    leaps_for,
    levels_at,
    map_from_draws,
    mean_under_normal,
    seconds_needed,
    spread_starts,
    trace,
    warm_up,
)
from swindles.stein import levels
from swindles.targets import skewed
from swindles.transport import Affine, identity, standard_normal

KEY = jax.random.key(20211)
RNG = np.random.default_rng(20211)


def flat_model(logdensity, dim, statistics=None, at=0.0):
    return flatten(Model(logdensity, jnp.full(dim, at)), statistics)


def walled(x):
    return jnp.where(x[0] < 1.5, -x @ x / 2, -jnp.inf)


def test_starts_are_wide_where_they_can_be_and_sound_everywhere():
    free = flat_model(standard_normal, 3)
    z = spread_starts(KEY, identity(3), free, 256)
    assert 0.8 < z[::2].std() < 1.2 and 2.2 < z[1::2].std() < 3.4
    cut = flat_model(walled, 3)
    z = spread_starts(KEY, identity(3), cut, 256)
    assert (z[:, 0] < 1.5).all()
    assert jnp.isfinite(levels_at(z, identity(3), walled)).all()
    assert z[1::2, 1].std() > 2, "those that stand stay where they are"


def test_map_from_draws_forgives_outliers_and_not_infinity():
    root = np.array([[2.0, 0.0], [1.0, 0.5]])
    draws = 3 + RNG.normal(size=(200, 100, 2)) @ root.T
    draws[0] = 1e6
    found = map_from_draws(jnp.asarray(draws, jnp.float32), full=True)
    assert np.allclose(found.shift, 3, atol=0.1)
    assert np.allclose(found.scale, root, atol=0.15)
    thin = map_from_draws(jnp.asarray(draws, jnp.float32), full=False)
    assert np.allclose(thin.scale, [2, np.sqrt(1.25)], atol=0.15)
    draws[0] = np.nan
    with pytest.raises(ValueError, match="proper"):
        map_from_draws(jnp.asarray(draws), full=True)


def funnel(x):
    return -(x[0] ** 2) / 18 - 2 * x[0] - 0.5 * jnp.sum(x[1:] ** 2) * jnp.exp(-x[0])


def test_map_of_a_funnel_is_as_wide_as_its_mouth():
    """Laplace's map sits in the neck, hundreds of times too narrow."""
    found, k = find_map(KEY, flat_model(funnel, 5), 128)
    assert k > pilot.GOOD_K
    assert 1 < jnp.abs(found.scale).sum(1)[0] < 5
    assert (jnp.linalg.norm(found.scale[1:], axis=1) > 1).all()


def test_without_a_maximum_there_is_still_a_map():
    """Student's t around an annulus: the curvature at the centre is not a maximum's."""
    ring = flat_model(lambda x: -2.0 * (jnp.sqrt(x @ x + 0.01) - 3) ** 2, 2, at=0.01)
    found, k = find_map(KEY, ring, 128)
    root = found.scale if found.scale.ndim == 2 else jnp.diag(found.scale)
    assert np.isfinite(k) and (jnp.linalg.norm(root, axis=1) > 0.9).all()


def test_means_under_the_normal():
    statistics = {
        "square": lambda x: x**2,
        "product": lambda x: x[0] * x[1] / 2 + x[0],
        "event": lambda x: x[0] > 1,
        "far event": lambda x: jnp.where(x[0] > 3.5, 1.0, 0.0),
        "exponential": lambda x: jnp.exp(x[0] / 2),
    }
    shift, root = jnp.array([0.5, 0.0]), jnp.array([[1.0, 0.0], [1.0, 1.0]])
    truth = {
        "square": [1.25, 2.0],
        "product": [1 / 2 + 0.5],
        "event": [stats.norm.sf(0.5)],
        "far event": [stats.norm.sf(3.0)],
        "exponential": [np.exp(0.25 + 1 / 8)],
    }
    for name, statistic in statistics.items():
        flat = flat_model(standard_normal, 2, statistic)
        mean, error = mean_under_normal(KEY, Affine(shift, root), flat)
        assert (error == 0).all() == (name in ("square", "product")), name
        allowed = np.maximum(5 * np.sqrt(error), 1e-6)
        assert (np.abs(mean - truth[name]) < allowed).all(), name


def test_control_coefficients_are_those_of_least_squares():
    g = RNG.normal(size=(50, 20, 3))
    f = 2 * g + [0.1, 1, 3] * RNG.normal(size=g.shape) + 5
    found = fit_control(f, g, np.zeros(3))
    for j in range(3):
        slope = np.polyfit(g[..., j].ravel(), f[..., j].ravel(), 1)[0]
        assert np.isclose(found.slope[j], slope)
    assert np.allclose(found.variance, [0.01, 1, 9], rtol=0.6)
    assert np.allclose(found.mean, 5, atol=0.4)
    none = fit_control(f, 0 * g, np.zeros(3))
    assert (none.slope == 0).all() and np.isfinite(none.variance).all()


def test_stein_coefficients_remove_what_they_explain():
    features = RNG.normal(size=(60, 32, 6))
    beta = RNG.normal(size=(6, 2))
    f = features @ beta + [0, 0.5] * RNG.normal(size=(60, 32, 2)) + 1
    found = fit_stein(f, features, [3, 6])
    assert np.allclose(found.beta[:, 0], beta[:, 0], atol=1e-4)
    assert found.variance[0] < 1e-6 and 0.1 < found.variance[1] < 0.5
    assert np.allclose(found.mean, 1, atol=0.05)


def test_features_of_no_use_are_not_used():
    features, f = RNG.normal(size=(5, 32, 100)), RNG.normal(size=(5, 32, 4))
    found = fit_stein(f, features, [100])
    plain = fit_control(f, 0 * f, np.zeros(4))
    assert (found.variance <= 1.0001 * plain.variance).all()
    assert (found.variance > 0.5 * plain.variance).all(), "no more than chance allows"


def test_corrections_off_zero_rule_a_scheme_out():
    chance = RNG.normal(size=(64, 2))
    assert is_off(chance + np.array([0, 5])).tolist() == [False, True]
    features = RNG.normal(size=(60, 32, 1)) + 1.0  # a mean that is not zero
    f = 3 * features + 0.1 * RNG.normal(size=(60, 32, 1))
    assert np.isinf(fit_stein(f, features, [1]).variance).all()


def gaussian_trace():
    """What the pilot sees on N(0, I): X- is -X+, Y is X+."""
    z = np.random.default_rng(4).normal(size=(60, 32, 2))
    pair = np.stack([z, -z], 1)
    places = np.stack([z, -z, z, -z], 1)
    return Trace(pair, -pair, z, np.concatenate([places, places**2], -1))


def test_every_scheme_removes_on_a_gaussian_what_theory_says():
    fits = fit_all(gaussian_trace(), np.array([0.0, 0, 1, 1]), list(SCHEMES))
    left = {name: fit.variance for name, fit in fits.items()}
    assert (left["plain"] > 0.5).all()
    assert (left["antithetic"][:2] < 1e-20).all(), "odd"
    assert (left["antithetic"][2:] > 0.5).all(), "even: nothing gained"
    for name in ("control", "cva", "stein", "antithetic+stein"):
        assert (left[name] < 1e-5).all(), name
    assert len(fits["stein"].beta) >= levels(2, "diagonal").size


def test_rounding_is_no_feature():
    """X- is -X+ but for rounding; a slope on that would be without bounds."""
    seen = gaussian_trace()
    noise = 1e-7 * np.random.default_rng(6).normal(size=seen.values.shape)
    seen = jax.tree.map(lambda x: x.astype(np.float32), seen)
    seen = seen._replace(values=(seen.values + noise).astype(np.float32))
    fits = fit_all(seen, np.array([0.0, 0, 1, 1]), ["cva", "antithetic+stein"])
    assert (fits["cva"].slope[:2] == 0).all()
    assert np.abs(fits["cva"].slope).max() < 2
    assert np.abs(fits["antithetic+stein"].beta).max() < 2


def test_few_draws_afford_few_features():
    assert [affordable(10, n) for n in (50, 100, 200, 650)] == [
        "none",
        "first",
        "diagonal",
        "full",
    ]


def candidate(scheme, seconds):
    return Candidate(scheme, 0, None, 1.0, seconds)


def test_a_swindle_must_beat_the_plain_chain_by_a_tenth():
    plain = candidate("plain", 1.0)
    assert decide([plain, candidate("cva", 0.95)]) is plain
    better = candidate("cva", 0.8)
    assert decide([plain, candidate("stein", 0.9), better]) is better
    alone = candidate("cva", np.inf)
    assert decide([alone]) is alone


def test_time_is_that_of_the_slowest_statistic():
    fitted = Fitted(np.array([0.0, 2.0]), None, np.array([1.0, 4.0]), None, None)
    asked, shared = np.array([0.1, 0.1]), np.array([9.0, 0.0])
    assert np.isclose(seconds_needed(fitted, asked, shared, 100, 0.5), 4 / 0.01 * 0.005)
    assert seconds_needed(fitted, asked, np.array([0, 0.003]), 100, 0.5) == np.inf


def test_prices_count_chains_and_coefficients():
    prices = Prices(3.0, 1.0, 0.01)
    none, some = np.zeros((0, 5)), np.zeros((4, 5))
    steps = {
        n: prices.step(s, 2, some if s.stein else none) for n, s in SCHEMES.items()
    }
    assert steps == pytest.approx(
        {
            "plain": 6,
            "antithetic": 12,
            "control": 8,
            "cva": 14,
            "stein": 6.2,
            "antithetic+stein": 12.2,
        }
    )


def test_leaps_make_a_quarter_of_a_turn_and_not_too_many():
    assert [int(leaps_for(size)) for size in (10.0, 0.5, 1e-3)] == [1, 3, 64]


@pytest.fixture(scope="module")
def flight():
    """A pilot on a skewed target, for means and for squares."""
    target = skewed(3)
    flat = flat_model(target.logdensity, 3, lambda x: {"mean": x, "square": x**2})
    to_x, _ = find_map(KEY, flat, 64)
    return flat, to_x, fly(KEY, flat, to_x, lambda sd: 1e-3 * sd, list(SCHEMES), 64)


def test_pilot_hands_over_a_plan_that_fits(flight):
    _, _, found = flight
    plan = found.plan
    assert isinstance(plan, Plan) and plan.scheme in SCHEMES
    assert set(found.states) == set(SCHEMES[plan.scheme].chains)
    assert found.states["plus"].position.shape == (64, 3)
    assert set(found.forecast) == set(SCHEMES)
    assert min(found.forecast.values()) < 0.5 * found.forecast["plain"]
    truth = np.concatenate(list(skewed(3).truth.values()))
    assert np.allclose(plan.center, truth, atol=0.1)
    assert plan.leaps == int(leaps_for(plan.step_size))


def test_named_scheme_is_the_scheme(flight):
    flat, to_x, _ = flight
    found = fly(KEY, flat, to_x, lambda sd: 1e-3 * sd, ["antithetic"], 64)
    assert found.plan.scheme == "antithetic" and set(found.forecast) == {"antithetic"}


def test_stuck_chains_begin_anew(monkeypatch):
    """Half of the chains start on a needle, from which no proposal is accepted."""

    def needle(x):
        return jnp.where(x[0] > 50, -1e4 * (x[0] - 60) ** 2 * 1e4, -x @ x / 2)

    flat = flat_model(needle, 2)
    begin = jnp.where(jnp.arange(64)[:, None] % 2, jnp.array([60.0, 0.0]), 0.0)
    monkeypatch.setattr(pilot, "spread_starts", lambda *_: begin)
    monkeypatch.setattr(pilot, "ACCEPTANCE", (0.3, 0.3))
    warm = warm_up(KEY, identity(2), flat, 64)
    assert warm.stuck == 32
    assert (warm.z[:, 0] < 50).all()


@pytest.mark.parametrize(
    ("logdensity", "words"),
    [
        (lambda x: 0.0 * x[0], "constant"),
        (lambda x: jnp.where(x[0] == 0, 0.0, -jnp.inf), "nowhere"),
        (lambda x: 1e12 * jnp.cos(1e6 * x[0]), "rejected"),
    ],
)
def test_targets_without_a_step_size(logdensity, words):
    flat = flat_model(logdensity, 2)
    with pytest.raises(ValueError, match=words):
        warm_up(KEY, Affine(jnp.zeros(2), jnp.zeros(2) + 1.0), flat, 32)


def test_no_chain_begins_at_the_mirror_image(flight):
    """A draw from the long left tail of a skewed density has an impossible mirror."""
    flat, to_x, _ = flight
    z = jnp.full((32, 3), -8.0)
    states, seen = trace(KEY, z, jnp.array(0.5), to_x, flat, 45)
    assert (jnp.ptp(seen.z[:, 1], axis=0) > 0).all(), "X- moves"
    assert jnp.isfinite(states["minus"].logdensity).all()


def test_kernels_lower_for_cuda():
    flat = flat_model(skewed(3).logdensity, 3)
    z, size, to_x = jnp.zeros((8, 3)), jnp.array(0.5), identity(3, full=True)

    def adapting(key, z, size, to_x):
        return adapt(key, z, size, to_x, flat.logdensity, 20)

    def tracing(key, z, size, to_x):
        return trace(key, z, size, to_x, flat, 20)

    for kernel in (adapting, tracing):
        lowered = export.export(jax.jit(kernel), platforms=["cuda"])(KEY, z, size, to_x)
        assert "custom_call @xla_python" not in lowered.mlir_module()
