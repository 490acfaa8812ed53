"""One registry, one loop, and kernels that a BlackJAX user recognises."""

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blackjax.util import run_inference_algorithm
from scipy.special import stdtrit

import swindles
from swindles import targets
from swindles.accuracy import block_means
from swindles.antithetic import fold_series, mirror
from swindles.control import draw_expectation, exact_expectation, reference_mean
from swindles.coupling import hmc, mala, random_walk, run, start, take_steps
from swindles.models import Model, make_problem
from swindles.schemes import SCHEMES, find_scheme, learn, plan_series, swindle
from swindles.transport import laplace, standard_normal

KEY = jax.random.key(20250)
KERNELS = {
    "antithetic": swindles.hmc_antithetic,
    "control": swindles.hmc_control,
    "cva": swindles.hmc_cva,
}


def tilted(x):
    """A skewed target: symmetric ones hide sign errors."""
    return -jnp.sum(jnp.exp(x) - 1.5 * x) - 0.1 * jnp.sum(x**2)


def moments(x):
    return {"mean": x, "square": x**2}


def latent_problem(target, statistics=moments):
    plain = target._replace(constrain=lambda x: x)
    to_x = laplace(target.logdensity, jnp.zeros(target.dim))
    return make_problem(plain, statistics).through(to_x)


@pytest.fixture(scope="module")
def skewed():
    return latent_problem(targets.skewed(dim=3))


@pytest.mark.parametrize("name", KERNELS)
def test_each_chain_is_bitwise_that_of_blackjax(name):
    """Not compiled: in another program a compiler may round differently."""
    mass, start_at = jnp.array([0.5, 1.0, 2.0]), jnp.array([0.3, -1.0, 0.7])
    kernel = KERNELS[name]
    reference = {"plus": tilted, "minus": mirror(tilted), "control": standard_normal}
    with jax.disable_jit():
        algorithm = kernel(tilted, 0.4, mass, 4)
        state = algorithm.init(start_at)
        alone = {
            chain: blackjax.hmc(reference[chain], 0.4, mass, 4)
            for chain in state._fields
        }
        sign = {"minus": -1.0}
        states = {
            chain: single.init(sign.get(chain, 1.0) * start_at)
            for chain, single in alone.items()
        }
        for rng_key in jax.random.split(KEY, 6):
            state, info = algorithm.step(rng_key, state)
            for chain, single in alone.items():
                states[chain], _ = single.step(rng_key, states[chain])
                found = sign.get(chain, 1.0) * getattr(state, chain).position
                assert np.array_equal(found, states[chain].position), chain
    if "minus" in state._fields:  # the momentum is that of plus, negated
        assert np.array_equal(info.minus.momentum, -info.plus.momentum)


def test_shape_of_blackjax():
    """Module-like access, its argument names, and its own loop."""
    kernel = swindles.hmc_cva
    state = kernel.init(jnp.zeros(2), tilted)
    assert state._fields == ("plus", "minus", "control")
    step = kernel.build_kernel()
    moved, info = step(
        KEY,
        state,
        tilted,
        step_size=0.3,
        inverse_mass_matrix=jnp.ones(2),
        num_integration_steps=3,
    )
    assert info._fields == state._fields and moved.plus.position.shape == (2,)
    algorithm = kernel.as_top_level_api(
        logdensity_fn=tilted,
        step_size=0.3,
        inverse_mass_matrix=jnp.ones(2),
        num_integration_steps=3,
    )
    _, (states, _) = run_inference_algorithm(
        KEY, algorithm, 20, algorithm.init(jnp.ones(2))
    )
    assert states.minus.position.shape == (20, 2)


def test_averaging_plus_and_minus_positions_gives_the_mean():
    """Not zero, as it would if a state held the mirror image."""

    def density(x):
        return -0.5 * jnp.sum((x - 3) ** 2)

    algorithm = swindles.hmc_antithetic(density, 0.4, jnp.ones(2), 4)
    _, (states, _) = run_inference_algorithm(
        KEY, algorithm, 200, algorithm.init(jnp.zeros(2))
    )
    average = (states.plus.position + states.minus.position)[50:] / 2
    np.testing.assert_allclose(average, 3, atol=1e-4)
    assert states.plus.position[50:].std() > 0.5


def test_window_adaptation_plugs_in():
    target = targets.logistic_regression()
    adaptation = blackjax.window_adaptation(
        blackjax.hmc, target.logdensity, num_integration_steps=5
    )
    (state, settings), _ = adaptation.run(KEY, jnp.zeros(target.dim), 300)
    assert settings["num_integration_steps"] == 5
    algorithm = swindles.hmc_antithetic(target.logdensity, **settings)
    states = algorithm.init(state.position)
    _, (states, info) = run_inference_algorithm(KEY, algorithm, 600, states)
    plus, minus = states.plus.position[100:], states.minus.position[100:]
    rho = [np.corrcoef(a, b)[0, 1] for a, b in zip(plus.T, minus.T, strict=True)]
    assert np.median(rho) < -0.8
    assert info.plus.acceptance_rate.mean() > 0.5


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_right(name, skewed):
    target = targets.skewed(dim=3)
    truth = np.concatenate([target.truth["mean"], target.truth["square"]])
    result = swindle(KEY, name, hmc(0.4, 4), skewed, 64, 300, warmup=200)
    estimate = result.estimate
    assert (np.abs(estimate.mean - truth) < 4.5 * estimate.mcse).all()
    assert set(result.rates["acceptance"]) == set(SCHEMES[name].chains)
    gain = estimate.ess / estimate.num_draws
    assert gain.min() > (0.2 if name == "plain" else 0.3)
    if SCHEMES[name].stein:
        assert gain.min() > 3


@pytest.mark.parametrize("sampler", [hmc(0.5, 3), mala(0.5), random_walk(0.5)])
@pytest.mark.parametrize("name", ["control", "cva"])
def test_no_variance_when_q_is_p(name, sampler):
    model = Model(standard_normal, jnp.zeros(2))
    problem = make_problem(model, lambda x: jnp.append(x, x**2))
    result = swindle(KEY, name, sampler, problem, 32, 100, warmup=60)
    np.testing.assert_allclose(result.estimate.mean, [0, 0, 1, 1], atol=1e-5)
    assert result.estimate.mcse.max() < 1e-5
    assert result.rates["decoupling"]["control"] == 0


GROUPS, GROUP = 200, 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["antithetic", "cva", "antithetic+stein"])
def test_intervals_cover(name, skewed):
    """Many groups of chains, each with its own error bar, under frozen coefficients."""
    target = targets.skewed(dim=3)
    truth = np.concatenate([target.truth["mean"], target.truth["square"]])
    scheme = SCHEMES[name]
    algorithm = scheme.build(hmc(0.4, 4), skewed.logdensity)
    z = jax.random.normal(KEY, (GROUPS * GROUP, skewed.dim))
    known = reference_mean(KEY, skewed)
    states, plan, _ = learn(
        KEY, algorithm, start(algorithm, z), skewed, name, 60, 1e5, known, "full"
    )
    fold = fold_series(plan_series(plan, skewed.statistic), states)
    _, sums = run(jax.random.key(3), algorithm, states, 60, fold)
    means = block_means(sums.swindled).mean(0).reshape(GROUPS, GROUP, -1)
    error = means.std(1, ddof=1) / np.sqrt(GROUP)
    score = (means.mean(1) - truth) / error
    covered = (np.abs(score) < stdtrit(GROUP - 1, 0.975)).mean(0)
    # 95 % of 200 intervals, and four standard deviations of that.
    assert covered.min() > 0.95 - 4 * np.sqrt(0.95 * 0.05 / GROUPS)
    assert covered.max() <= 1
    pooled = means.mean((0, 1)) - truth
    spread = means.std((0, 1), ddof=1) / np.sqrt(GROUPS * GROUP)
    assert (np.abs(pooled) < 4.5 * spread).all()


@pytest.mark.slow
def test_efficiency_at_the_published_settings():
    """Median ESS per step of the authors' code: 72.3 for means, 80.0 for variances."""
    target = targets.logistic_regression()
    plain = target._replace(constrain=lambda x: x)
    to_x = laplace(target.logdensity, jnp.zeros(target.dim))

    def statistics(x):
        return {"mean": x, "variance": (x - to_x.shift) ** 2}

    problem = make_problem(plain, statistics).through(to_x)
    result = swindle(KEY, "cva", hmc(0.365, 4), problem, 128, 500, warmup=400)
    per_step = result.estimate.ess / result.estimate.num_draws
    mean, variance = np.median(per_step.reshape(2, -1), axis=1)
    assert 72.3 / 1.5 < mean < 72.3 * 1.5
    assert 80.0 / 1.5 < variance < 80.0 * 1.5
    assert 0.92 < result.rates["acceptance"]["plus"] < 0.95


def test_poorly_known_mean_is_not_leaned_on(skewed):
    """Few draws of Q: coefficients shrink, and the answer stays as good as plain."""
    few = draw_expectation(KEY, skewed.statistic, jnp.zeros(3), 64, batch=16)
    alone = swindle(KEY, "plain", hmc(0.4, 4), skewed, 64, 400, 100)
    poor = swindle(KEY, "control", hmc(0.4, 4), skewed, 64, 400, 100, few)
    rich = swindle(KEY, "control", hmc(0.4, 4), skewed, 64, 400, 100)
    assert (np.abs(poor.beta) < 0.5 * np.abs(rich.beta))[3:].all()
    assert (poor.estimate.mcse < 1.5 * alone.estimate.mcse).all()


@pytest.mark.parametrize("name", ["antithetic", "cva", "cva+stein"])
def test_lowers_for_cuda(name, skewed):
    scheme = SCHEMES[name]
    algorithm = scheme.build(hmc(0.3, 2), skewed.logdensity)
    states = start(algorithm, jax.random.normal(KEY, (16, skewed.dim)))
    known = exact_expectation(np.zeros(6))
    _, plan, _ = learn(KEY, algorithm, states, skewed, name, 8, 10, known, "first")
    zero, update = fold_series(plan_series(plan, skewed.statistic), states)

    def kernel(key, states, sums, first, last):
        return take_steps(key, states, sums, first, last, algorithm.step, update)

    exported = jax.export.export(jax.jit(kernel), platforms=["cuda"])
    assert exported(KEY, states, zero, 0, 10).platforms == ("cuda",)


def test_rows_of_schemes():
    """Each scheme finds its f and its controls among the chains of a pilot run."""
    assert SCHEMES["plain"].rows() == ([0], [])
    assert SCHEMES["antithetic"].rows() == ([0, 1], [])
    assert SCHEMES["control"].rows() == ([0], [2])
    assert SCHEMES["control"].rows(("plus", "control")) == ([0], [1])
    assert SCHEMES["cva"].rows() == ([0, 1], [2, 3])


def test_bad_input(skewed):
    with pytest.raises(ValueError, match="scheme is 'cv': say one of plain"):
        find_scheme("cv")
    with pytest.raises(ValueError, match="need gradients"):
        swindle(KEY, "stein", random_walk(0.3), skewed, 16, 10, 10)
