"""The mirror chain: exact cancellation where it must be, honesty where it cannot."""

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swindles.antithetic import (
    antithetic,
    estimate_series,
    fold_series,
    mirror,
    mirrored,
    pair_series,
    pair_values,
    plain,
    reflect,
)
from swindles.coupling import hmc, mala, random_walk, record, run, start, take_steps
from swindles.targets import gaussian

KEY = jax.random.key(20204)
SAMPLERS = {"hmc": hmc(0.4, 4), "mala": mala(0.4), "random walk": random_walk(0.4)}
CENTER = jnp.array([3.0, -2.0])
TARGET_COVARIANCE = jnp.array([[1.0, 0.4], [0.4, 0.8]])
TARGET = gaussian(CENTER, TARGET_COVARIANCE)
PAIR = antithetic(hmc(0.4, 4), TARGET.logdensity)
SINGLE = plain(hmc(0.4, 4), TARGET.logdensity)


def normal(shape, seed=1):
    return jax.random.normal(jax.random.key(seed), shape)


def skewed(x):
    """Symmetric targets hide sign errors."""
    return jnp.sum(1.5 * x - jnp.exp(x))


def deviation_from_symmetry(trace):
    """X+ + X- - 2 mu."""
    return np.abs(trace.plus + trace.minus - 2 * np.asarray(CENTER))


def started(algorithm, plus, minus):
    """States with X+ at ``plus`` and X- at ``minus``."""
    return start(algorithm, plus)._replace(minus=start(algorithm, minus).minus)


@pytest.mark.parametrize("name", SAMPLERS)
def test_symmetric_target_and_mirrored_starts_cancel_at_every_step(name):
    algorithm = antithetic(SAMPLERS[name], TARGET.logdensity)
    x = CENTER + normal((16, 2))
    states = started(algorithm, x, 2 * CENTER - x)
    _, trace = record(KEY, algorithm, states, 100)
    assert deviation_from_symmetry(trace).max() < 5e-5  # float32 rounding of 100 steps
    assert np.abs(trace.plus - np.asarray(CENTER)).max() > 1  # and it did move


@pytest.mark.parametrize("name", SAMPLERS)
def test_odd_statistic_has_no_error_at_all(name):
    """Around zero not even rounding is left."""
    density = gaussian(jnp.zeros(2), TARGET_COVARIANCE).logdensity
    algorithm = antithetic(SAMPLERS[name], density)
    x = normal((16, 2))
    states = started(algorithm, x, -x)
    fold = fold_series(pair_series(lambda x: x**3 - x), states, center=jnp.zeros(2))
    states, sums = run(KEY, algorithm, states, 100, fold)
    estimate = estimate_series(sums).estimate
    assert (estimate.mean == 0).all() and (estimate.mcse == 0).all()
    assert (estimate.variance > 1).all()
    assert not np.array_equal(states.plus.position, x)


def test_average_of_the_positions_is_the_mean():
    """Both chains start at one point of a Gaussian with mean 3."""
    target = gaussian(jnp.full(2, 3.0), TARGET_COVARIANCE)
    algorithm = antithetic(hmc(0.4, 4), target.logdensity)
    _, trace = record(KEY, algorithm, start(algorithm, normal((16, 2))), 80)
    average = (trace.plus + trace.minus) / 2
    assert np.abs(average[60:] - 3).max() < 1e-4
    assert trace.plus[60:].std() > 0.5


def test_without_mirrored_starts_the_deviation_decays_geometrically():
    algorithm = antithetic(hmc(0.3, 4), TARGET.logdensity)
    states = started(
        algorithm, CENTER + normal((64, 2)), CENTER + 2 * normal((64, 2), 5)
    )
    _, trace = record(KEY, algorithm, states, 60)
    gap = deviation_from_symmetry(trace).mean((1, 2))
    rate = np.exp(np.polyfit(np.arange(15), np.log(gap[:15]), 1)[0])
    assert 0.1 < rate < 0.75
    line = gap[0] * rate ** np.arange(15)
    assert np.abs(np.log(gap[:15] / line)).max() < 1.5  # straight on a log axis
    assert gap[-10:].max() < 1e-4


@pytest.mark.slow
def test_marginal_chains_are_bitwise_plain_blackjax():
    """X+ is the chain on P, X- that on the mirrored density, negated."""
    algorithm, x = antithetic(hmc(0.9, 2), skewed), normal((8, 2))
    with jax.disable_jit():
        _, trace = record(KEY, algorithm, start(algorithm, x), 4)
        for chain, density, sign in (
            (trace.plus, skewed, 1),
            (trace.minus, lambda x: skewed(-x), -1),
        ):
            single = blackjax.hmc(density, 0.9, jnp.ones(2), 2)
            states = jax.vmap(single.init)(sign * x)
            for i in range(4):
                keys = jax.random.split(jax.random.fold_in(KEY, i), 8)
                states, _ = jax.vmap(single.step)(keys, states)
                assert np.array_equal(chain[i], sign * states.position)
    assert not np.array_equal(trace.plus, trace.minus)


def test_minus_is_the_chain_with_flipped_momentum():
    """X- on P with p' = -p, against a leapfrog written out by hand."""
    algorithm = antithetic(hmc(0.3, 3), skewed)
    x = normal((2,))
    state, info = algorithm.step(KEY, algorithm.init(x))
    assert np.array_equal(info.minus.momentum, -info.plus.momentum)
    momentum = -info.plus.momentum
    for _ in range(3):
        momentum = momentum + 0.15 * jax.grad(skewed)(x)
        x = x + 0.3 * momentum
        momentum = momentum + 0.15 * jax.grad(skewed)(x)
    np.testing.assert_allclose(info.minus.proposal.position, x, rtol=1e-5)
    assert info.minus.is_accepted
    np.testing.assert_allclose(state.minus.position, x, rtol=1e-5)


STATEFUL = SAMPLERS | {
    "NUTS": lambda density: blackjax.nuts(density, 0.4, jnp.ones(2)),
    "MCLMC": lambda density: blackjax.mclmc(density, L=2.0, step_size=0.5),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_mirrored_states_are_states_on_the_density_itself(name):
    """Position, log density and gradient belong together."""
    algorithm = mirrored(STATEFUL[name])(skewed)
    state = algorithm.init(normal((2,)), jax.random.key(3))
    assert np.array_equal(state.position, normal((2,)))
    for key in jax.random.split(KEY, 3):
        state, _ = jax.jit(algorithm.step)(key, state)
        value, slope = jax.value_and_grad(skewed)(state.position)
        np.testing.assert_allclose(state.logdensity, value, rtol=1e-4)
        if hasattr(state, "logdensity_grad"):
            np.testing.assert_allclose(state.logdensity_grad, slope, rtol=1e-4)
    assert not np.array_equal(state.position, normal((2,)))


def test_reflect_twice_is_nothing():
    """Also inside an info, whose proposal is itself a state."""
    algorithm = hmc(0.3, 3)(skewed)
    state, info = algorithm.step(KEY, algorithm.init(normal((2,))))
    for one in (state, info):
        once = reflect(one)
        for a, b in zip(*map(jax.tree.leaves, (one, reflect(once))), strict=True):
            assert np.array_equal(a, b)
    assert np.array_equal(once.proposal.position, -info.proposal.position)
    assert np.array_equal(once.proposal.logdensity_grad, -info.proposal.logdensity_grad)
    assert once.energy == info.energy and once.is_accepted == info.is_accepted


def test_mirror():
    density = mirror(lambda tree: 2 * tree["a"] + tree["b"] ** 3)
    assert density({"a": 1.0, "b": 2.0}) == -2 - 8


def test_pair_values_read_both_ends():
    states = started(PAIR, CENTER + normal((4, 2)), CENTER + normal((4, 2), 9))
    values = pair_values(lambda x: {"first": x[0], "cube": x**3}, states)
    expected = np.stack([states.plus.position, states.minus.position])
    np.testing.assert_allclose(values[..., :2], expected**3, rtol=1e-5)
    np.testing.assert_allclose(values[..., 2], expected[..., 0])


@pytest.mark.slow
def test_running_estimate_equals_the_stored_trace():
    """Whatever is subtracted before summing."""
    states = start(PAIR, CENTER + normal((32, 2)))
    _, trace = record(KEY, PAIR, states, 100)
    plus, minus = (np.exp(chain, dtype=float) for chain in trace)
    average = (plus + minus) / 2
    spread = average.mean(0).std(0, ddof=1) / np.sqrt(32)
    variance = plus.var((0, 1), ddof=1)
    rho = 2 * average.var((0, 1), ddof=1) / variance - 1
    series = pair_series(jnp.exp)
    zero, update = fold_series(series, states)
    for begin in (zero, fold_series(series, states, CENTER - 10)[0]):
        _, sums = run(KEY, PAIR, states, 100, (begin, update))
        result = estimate_series(sums)
        found = result.estimate
        np.testing.assert_allclose(found.mean, average.mean((0, 1)), rtol=1e-5)
        np.testing.assert_allclose(found.mcse, spread, rtol=1e-3)
        np.testing.assert_allclose(found.variance, variance, rtol=1e-3)
        np.testing.assert_allclose(result.rho["minus"], rho, atol=1e-3)
    assert not np.array_equal(begin.plus.center, zero.plus.center)


def even_and_linear(x):
    return {"even": (x - CENTER) ** 2, "linear": x}


@pytest.mark.slow
def test_even_statistic_gains_nothing_and_linear_everything():
    results = []
    for algorithm in (SINGLE, PAIR):
        states = start(algorithm, CENTER + normal((64, 2)))
        states, _ = run(jax.random.key(7), algorithm, states, 50)
        fold = fold_series(pair_series(even_and_linear), states)
        results.append(estimate_series(run(KEY, algorithm, states, 400, fold)[1]))
    alone, pair = results
    assert alone.rho == {}
    assert (pair.rho["minus"][:2] > 0.999).all()
    assert (pair.rho["minus"][2:] < -0.999).all()
    ratio = pair.estimate.ess / alone.estimate.ess
    assert ((ratio[:2] > 0.6) & (ratio[:2] < 1.6)).all()
    assert (ratio[2:] > 1e6).all()
    assert np.abs(pair.estimate.mean[2:] - CENTER).max() < 1e-5


def test_plain_run_in_unequal_blocks():
    """23 steps in 20 blocks: every step counts once."""
    states = start(SINGLE, CENTER + normal((32, 2)))
    _, trace = record(KEY, SINGLE, states, 23)
    fold = fold_series(pair_series(lambda x: x), states)
    _, sums = run(KEY, SINGLE, states, 23, fold)
    assert sums.swindled is None  # Z is f(X+)
    estimate = estimate_series(sums).estimate
    np.testing.assert_allclose(estimate.mean, trace.plus.mean((0, 1)), rtol=1e-5)
    assert estimate.num_draws == 23 * 32
    grown = (
        estimate_series(sums, shared_variance=0.25).estimate.mcse ** 2
        - estimate.mcse**2
    )
    np.testing.assert_allclose(grown, 0.25, rtol=1e-6)


@pytest.mark.parametrize(
    ("statistic", "message"),
    [
        (lambda x: x > 0, "floating point"),
        (lambda x: x[:0], "at least one"),
        (lambda x: jnp.log(x - 100), "not finite at the start"),
    ],
)
@pytest.mark.parametrize("algorithm", [SINGLE, PAIR], ids=["plain", "antithetic"])
def test_bad_statistics(algorithm, statistic, message):
    with pytest.raises(ValueError, match=message):
        fold_series(pair_series(statistic), start(algorithm, CENTER + normal((4, 2))))


def test_statistic_that_breaks_later_is_flagged():
    states = start(SINGLE, jnp.broadcast_to(CENTER, (32, 2)))
    fold = fold_series(pair_series(lambda x: jnp.sqrt(x - CENTER + 0.5)), states)
    result = estimate_series(run(KEY, SINGLE, states, 200, fold)[1])
    assert "2 of 2 estimates are not finite" in result.estimate.warnings()


def test_lowers_for_cuda():
    states = start(PAIR, CENTER + normal((4, 2)))
    zero, update = fold_series(pair_series(lambda x: x**2), states)

    def kernel(key, states, sums):
        return take_steps(key, states, sums, 0, 10, PAIR.step, update)

    exported = jax.export.export(jax.jit(kernel), platforms=["cuda"])
    assert exported(KEY, states, zero).platforms == ("cuda",)
