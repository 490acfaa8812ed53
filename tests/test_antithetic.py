"""The mirror chain: exact cancellation where it must be, honesty where it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swindles.antithetic import (
    antithetic,
    estimate_pairs,
    fold_pairs,
    mirror,
    pair_values,
    plain,
)
from swindles.coupling import hmc, mala, random_walk, record, run, start
from swindles.targets import gaussian

KEY = jax.random.key(20204)
SAMPLERS = {"hmc": hmc(0.4, 4), "mala": mala(0.4), "random walk": random_walk(0.4)}
CENTER = jnp.array([3.0, -2.0])
TARGET = gaussian(CENTER, jnp.array([[1.0, 0.4], [0.4, 0.8]]))


def normal(shape, seed=1):
    return jax.random.normal(jax.random.key(seed), shape)


def deviation_from_symmetry(trace):
    """X+ + X- - 2 mu; the trace holds -X-."""
    return np.abs(trace["plus"] - trace["minus"] - 2 * np.asarray(CENTER)).max((1, 2))


def started(algorithm, plus, minus):
    """States with X+ at ``plus`` and X- at ``minus``."""
    return {
        "plus": start(algorithm, plus)["plus"],
        "minus": start(algorithm, -minus)["minus"],
    }


@pytest.mark.parametrize("name", SAMPLERS)
def test_symmetric_target_and_mirrored_starts_cancel_at_every_step(name):
    algorithm = antithetic(SAMPLERS[name], TARGET.logdensity)
    x = CENTER + normal((16, 2))
    states = started(algorithm, x, 2 * CENTER - x)
    _, trace = record(KEY, algorithm, states, 100)
    assert deviation_from_symmetry(trace).max() < 5e-5  # float32 rounding of 100 steps
    assert np.abs(trace["plus"] - np.asarray(CENTER)).max() > 1  # and it did move


def test_without_mirrored_starts_the_deviation_decays_geometrically():
    algorithm = antithetic(hmc(0.3, 4), TARGET.logdensity)
    states = started(
        algorithm, CENTER + normal((64, 2)), CENTER + 2 * normal((64, 2), 5)
    )
    _, trace = record(KEY, algorithm, states, 60)
    total = np.abs(trace["plus"] - trace["minus"] - 2 * np.asarray(CENTER))
    gap = total.mean((1, 2))
    rate = np.exp(np.polyfit(np.arange(15), np.log(gap[:15]), 1)[0])
    assert 0.1 < rate < 0.75
    line = gap[0] * rate ** np.arange(15)
    assert np.abs(np.log(gap[:15] / line)).max() < 1.5  # straight on a log axis
    assert gap[-10:].max() < 1e-4


def test_minus_is_the_chain_with_flipped_momentum():
    """X- on P with -p, against a leapfrog written out by hand."""

    def skewed(x):
        return jnp.sum(1.5 * x - jnp.exp(x))

    algorithm = antithetic(hmc(0.3, 3), skewed)
    x = normal((2,))
    state = {
        "plus": algorithm.init(x)["plus"],
        "minus": algorithm.init(-x)["minus"],
    }
    _, info = algorithm.step(KEY, state)
    momentum = -info["plus"].momentum
    for _ in range(3):
        momentum = momentum + 0.15 * jax.grad(skewed)(x)
        x = x + 0.3 * momentum
        momentum = momentum + 0.15 * jax.grad(skewed)(x)
    np.testing.assert_allclose(-info["minus"].proposal.position, x, rtol=1e-5)


def test_mirror():
    density = mirror(lambda tree: 2 * tree["a"] + tree["b"] ** 3)
    assert density({"a": 1.0, "b": 2.0}) == -2 - 8


def test_pair_values_read_both_ends():
    algorithm = antithetic(hmc(0.4, 3), TARGET.logdensity)
    states = started(algorithm, CENTER + normal((4, 2)), CENTER + normal((4, 2), 9))
    values = pair_values(lambda x: {"first": x[0], "cube": x**3}, states)
    expected = np.stack([states["plus"].position, -states["minus"].position])
    np.testing.assert_allclose(values[..., :2], expected**3, rtol=1e-5)
    np.testing.assert_allclose(values[..., 2], expected[..., 0])


def run_pairs(scheme, statistic, steps=400, chains=64):
    algorithm = scheme(hmc(0.4, 4), TARGET.logdensity)
    states = start(algorithm, CENTER + normal((chains, 2)))
    states, _ = run(jax.random.key(7), algorithm, states, 50)
    fold = fold_pairs(statistic, states)
    return estimate_pairs(run(KEY, algorithm, states, steps, fold)[1])


def test_running_estimate_equals_the_stored_trace():
    algorithm = antithetic(hmc(0.6, 3), TARGET.logdensity)
    states = start(algorithm, CENTER + normal((32, 2)))
    _, trace = record(KEY, algorithm, states, 100)
    _, sums = run(KEY, algorithm, states, 100, fold_pairs(jnp.exp, states))
    result = estimate_pairs(sums)
    plus, minus = (
        np.exp(trace["plus"], dtype=float),
        np.exp(-trace["minus"], dtype=float),
    )
    average = (plus + minus) / 2
    np.testing.assert_allclose(result.estimate.mean, average.mean((0, 1)), rtol=1e-5)
    spread = average.mean(0).std(0, ddof=1) / np.sqrt(32)
    np.testing.assert_allclose(result.estimate.mcse, spread, rtol=1e-3)
    np.testing.assert_allclose(
        result.estimate.variance, plus.var((0, 1), ddof=1), rtol=1e-3
    )


def test_even_statistic_gains_nothing_and_linear_everything():
    even = run_pairs(antithetic, lambda x: (x - CENTER) ** 2)
    assert (even.rho["minus"] > 0.999).all()
    alone = run_pairs(plain, lambda x: (x - CENTER) ** 2)
    ratio = even.estimate.ess / alone.estimate.ess
    assert ((ratio > 0.6) & (ratio < 1.6)).all()
    linear = run_pairs(antithetic, lambda x: x)
    assert (linear.rho["minus"] < -0.999).all()
    assert (linear.estimate.ess > 1e6 * alone.estimate.ess).all()
    assert np.abs(linear.estimate.mean - CENTER).max() < 1e-5


def test_unequal_blocks():
    """23 steps in 20 blocks: every step counts once."""
    algorithm = plain(hmc(0.4, 4), TARGET.logdensity)
    states = start(algorithm, CENTER + normal((32, 2)))
    _, trace = record(KEY, algorithm, states, 23)
    _, sums = run(KEY, algorithm, states, 23, fold_pairs(lambda x: x, states))
    estimate = estimate_pairs(sums).estimate
    np.testing.assert_allclose(estimate.mean, trace["plus"].mean((0, 1)), rtol=1e-5)
    assert estimate.num_draws == 23 * 32


@pytest.mark.parametrize(
    ("statistic", "message"),
    [
        (lambda x: x > 0, "floating point"),
        (lambda x: x[:0], "at least one"),
        (lambda x: jnp.log(x - 100), "not finite at the start"),
    ],
)
def test_bad_statistics(statistic, message):
    algorithm = plain(hmc(0.4, 4), TARGET.logdensity)
    with pytest.raises(ValueError, match=message):
        fold_pairs(statistic, start(algorithm, CENTER + normal((4, 2))))


def test_statistic_that_breaks_later_is_flagged():
    algorithm = plain(hmc(0.4, 4), TARGET.logdensity)
    states = start(algorithm, jnp.broadcast_to(CENTER, (32, 2)))
    fold = fold_pairs(lambda x: jnp.sqrt(x - CENTER + 0.5), states)
    result = estimate_pairs(run(KEY, algorithm, states, 200, fold)[1])
    assert "2 of 2 estimates are not finite" in result.estimate.warnings()


def test_lowers_for_cuda():
    algorithm = antithetic(hmc(0.4, 4), TARGET.logdensity)
    states = start(algorithm, CENTER + normal((4, 2)))
    zero, update = fold_pairs(lambda x: x**2, states)

    def one_step(key, states, sums):
        states, infos = jax.vmap(algorithm.step)(jax.random.split(key, 4), states)
        return update(sums, states, infos)

    exported = jax.export.export(jax.jit(one_step), platforms=["cuda"])
    assert exported(KEY, states, zero).platforms == ("cuda",)
