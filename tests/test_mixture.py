"""Mixtures: densities, draws, fits, modes, and answers from their points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from swindles.importance import (
    SEQUENCES,
    beyond_reach,
    far_modes,
    fit_highest,
    weigh_points,
)
from swindles.mixture import (
    DEGREES,
    Mixture,
    begin_mixture,
    find_mixture,
    fit_parts,
    improve_mixture,
    missed_mode,
    soften,
    with_broad_part,
)
from swindles.transport import Evaluator, standard_normal, unit_map

SEED = 20301


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def generator(*more):
    return np.random.default_rng([SEED, *more])


def some_mixture(dim=3, parts=3):
    rng = generator(dim, parts)
    roots = np.tril(rng.normal(size=(parts, dim, dim))) / 2 + np.eye(dim)
    shares = rng.dirichlet(np.ones(parts))
    return Mixture(shares, 2 * rng.normal(size=(parts, dim)), roots)


def scipy_parts(mixture):
    return [
        stats.multivariate_t(center, root @ root.T, df=DEGREES)
        for center, root in zip(mixture.centers, mixture.roots, strict=True)
    ]


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_density_is_that_of_scipy(dim):
    mixture, z = some_mixture(dim), generator(7).normal(size=(20, dim)) * 3
    pairs = zip(mixture.shares, scipy_parts(mixture), strict=True)
    exact = np.log(sum(share * np.atleast_1d(part.pdf(z)) for share, part in pairs))
    exact += dim / 2 * np.log(2 * np.pi)  # up to the constant of a standard normal
    np.testing.assert_allclose(mixture.log_density(z), exact, rtol=1e-10)


@pytest.mark.parametrize("dim", [1, 3])
def test_points_are_draws_of_the_mixture(dim):
    """Along any axis: a Kolmogorov-Smirnov test of every part's share of it."""
    mixture = some_mixture(dim)
    z = mixture.pairs(generator(), 2**12)
    for axis in range(dim):

        def cdf(x, axis=axis):
            scales = np.linalg.norm(mixture.roots[:, axis], axis=1)
            parts = zip(mixture.shares, mixture.centers[:, axis], scales, strict=True)
            return sum(w * stats.t.cdf((x - c) / s, DEGREES) for w, c, s in parts)

        assert stats.kstest(z[:, axis], cdf).pvalue > 1e-3
    half = len(z) // 2
    middles = (z[:half] + z[half:]) / 2
    near = np.abs(middles[:, None] - mixture.centers).max(2).min(1)
    assert near.max() < 1e-9, "a pair is mirrored at the centre of its part"


def test_average_weight_is_the_integral():
    mixture = some_mixture(2)
    mixture = mixture._replace(centers=mixture.centers / 4)
    z = mixture.pairs(generator(), 2**14)
    weights = np.exp(np.asarray(jax.vmap(standard_normal)(z)) - mixture.log_density(z))
    assert weights.mean() == pytest.approx(1, abs=0.01)


def test_reach_is_a_quantile_of_the_radius():
    mixture = Mixture(np.ones(1), np.zeros((1, 1)), np.ones((1, 1, 1)))
    for share in (0.1, 0.01, 1e-5):
        exact = stats.t.isf(share / 2, DEGREES)
        assert mixture.reach(share) == pytest.approx(exact, rel=0.2)


def test_a_step_of_the_fit_raises_the_likelihood():
    """What the EM algorithm promises, whatever the weights."""
    rng = generator()
    z = np.concatenate([rng.normal(size=(500, 2)), 4 + 0.3 * rng.normal(size=(300, 2))])
    weights = rng.dirichlet(np.ones(800))
    mixture, before = some_mixture(2, 4), -np.inf
    for _ in range(15):
        now = weights @ mixture.log_density(z)
        assert now > before - 1e-9
        before, parts = now, len(mixture.shares)
        mixture = fit_parts(mixture, z, weights, caution=0.0)
        if len(mixture.shares) < parts:  # a part was dropped: another model
            before = -np.inf
        assert mixture.shares.sum() == pytest.approx(1)


def test_a_fit_finds_the_mixture_that_made_the_draws():
    truth = Mixture(
        np.array([0.25, 0.75]),
        np.array([[-6.0, 0.0], [4.0, 1.0]]),
        np.array([np.eye(2), [[0.5, 0.0], [1.0, 2.0]]]),
    )
    z = truth.pairs(generator(), 2**13)
    found = begin_mixture(2, [])._replace(centers=np.array([[-3.0, 0.0], [3.0, 0.0]]))
    for _ in range(100):
        found = fit_parts(found, z, np.full(len(z), 1 / len(z)), caution=0.0)
    np.testing.assert_allclose(found.shares, truth.shares, atol=0.02)
    np.testing.assert_allclose(found.centers, truth.centers, atol=0.1)
    np.testing.assert_allclose(found.roots, truth.roots, atol=0.1)


def test_a_part_that_nothing_needs_is_dropped():
    far = begin_mixture(1, [])._replace(centers=np.array([[0.0], [500.0]]))
    far = far._replace(roots=np.ones((2, 1, 1)))
    z = generator().normal(size=(1000, 1))
    assert len(fit_parts(far, z, np.full(1000, 1e-3)).shares) == 1


@pytest.mark.parametrize("least", [2.0, 50.0, 400.0])
def test_softened_weights_are_worth_what_they_must(least):
    log_weights = 30 * generator().normal(size=1000)
    weights = soften(log_weights, least)
    assert weights.sum() == pytest.approx(1)
    assert 1 / (weights**2).sum() == pytest.approx(least, rel=0.01)
    order = np.argsort(log_weights)
    assert (np.diff(weights[order]) >= 0).all()
    even = soften(np.zeros(1000), least)
    np.testing.assert_allclose(even, 1e-3)
    impossible = np.append(log_weights, -np.inf)
    assert soften(impossible, least)[-1] == 0


def bell(x):
    return -0.5 * x @ x


def apart(x):
    """Three modes, of 0.2, 0.5 and 0.3 of the mass, the last a bit narrow."""
    one = jnp.log(0.2) + bell(x)
    two = jnp.log(0.5) + bell(x - 9)
    three = jnp.log(0.3) + bell((x + 7) / 0.7) - x.size * jnp.log(0.7)
    return jnp.logaddexp(jnp.logaddexp(one, two), three)


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_all_modes_are_found_with_their_masses(dim):
    evaluate = Evaluator(apart, dim)
    found = far_modes(generator(dim), evaluate, unit_map(np.zeros(dim)))
    centers = {round(float(mode.transport.shift[0])): mode.elbo for mode in found}
    assert set(centers) == {9, -7}
    assert centers[9] == pytest.approx(np.log(0.5 / 0.2), abs=1e-3)
    assert centers[-7] == pytest.approx(np.log(0.3 / 0.2), abs=1e-3)


def test_a_mode_that_is_flat_on_top_is_a_mode():
    def two(x):
        return jnp.logaddexp(bell(x), bell(jax.nn.relu(jnp.abs(x - 12) - 2)))

    (found,) = far_modes(generator(), Evaluator(two, 2), unit_map(np.zeros(2)))
    np.testing.assert_allclose(found.transport.shift, 12, atol=2.5)


def test_the_map_goes_where_most_of_the_mass_is():
    def two(x):
        return jnp.logaddexp(bell(x), 8 + bell(x - 10))

    found = fit_highest(Evaluator(two, 3), np.zeros(3), SEED)
    np.testing.assert_allclose(found.transport.shift, 10, atol=0.2)
    assert found.efficiency > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 2, 5])
def test_three_modes_over_repeats(dim):
    """Mean and error over independent repeats; the mixture is learned anew in each."""
    evaluate = Evaluator(apart, dim, lambda x: x[:1])
    transport, z = unit_map(np.zeros(dim)), []
    for i in range(20):
        found = find_mixture(generator(dim, i), evaluate, transport)
        assert found.pareto_k < 0.7 and found.efficiency > 0.3
        run = weigh_points([SEED, i], evaluate, transport, 64, "none", found.mixture)
        level = run.peak + np.log(run.weight.sum() / run.pairs.sum() / SEQUENCES)
        inputs = evaluate, transport, found.mixture, level
        if missed_mode(generator(dim, i, 1), *inputs) == np.inf:
            each = run.estimate()
            z.append(float((each.mean[0] - (0.5 * 9 - 0.3 * 7)) / each.mcse[0]))
    assert len(z) >= 17  # where none is missed
    assert abs(np.mean(z)) < 4 / np.sqrt(len(z))
    assert 0.5 < np.std(z) < 1.9  # of a t with 15 degrees, 20 times


def test_stein_features_help_under_a_mixture_too():
    def skewed(x):
        return -jnp.sum(jnp.exp(x) - 2 * x)

    evaluate = Evaluator(skewed, 2, lambda x: x)
    transport = unit_map(np.zeros(2))
    found = find_mixture(generator(), evaluate, transport).mixture
    plain, swindled = (
        weigh_points(SEED, evaluate, transport, 512, order, found).estimate()
        for order in ("none", "full")
    )
    truth = 1 - np.euler_gamma  # of the logarithm of a Gamma(2)
    assert (np.abs(swindled.mean - truth) < 4.5 * swindled.mcse).all()
    assert (swindled.mcse < plain.mcse / 2).all()


def test_rounds_make_it_better_and_stop():
    def bent(x):
        return bell(x[:1] / 2) + bell(x[1:] - x[:1] ** 2 / 2)

    evaluate = Evaluator(bent, 3)
    begin = begin_mixture(3, [])
    rounds = list(improve_mixture(generator(), evaluate, unit_map(np.zeros(3)), begin))
    worth = [each.efficiency for each in rounds]
    assert 1 < len(rounds) <= 8 and max(worth) > 2 * worth[0]
    assert rounds[0].mixture is begin


def test_a_density_that_is_zero_everywhere_has_no_mixture():
    evaluate = Evaluator(lambda x: -jnp.inf * jnp.ones_like(x[0]), 2)
    transport, begin = unit_map(np.zeros(2)), begin_mixture(2, [])
    assert not list(improve_mixture(generator(), evaluate, transport, begin))


def test_a_mode_is_missed_or_covered():
    def two(x):
        return jnp.logaddexp(bell(x), bell(x - 15))

    evaluate, transport = Evaluator(two, 2), unit_map(np.zeros(2))
    alone = begin_mixture(2, [])
    level = np.log(2.0)
    assert missed_mode(generator(), evaluate, transport, alone, level) == (
        pytest.approx(15 * np.sqrt(2), rel=0.01)
    )
    both = begin_mixture(2, far_modes(generator(), evaluate, transport))
    assert missed_mode(generator(), evaluate, transport, both, level) == np.inf


def test_tails_that_no_part_reaches_are_in_the_error():
    def heavy(x):  # the third moment does not exist
        return -2 * jnp.log1p(x @ x)

    evaluate = Evaluator(heavy, 1, lambda x: jnp.abs(x) ** 2.9)
    transport, mixture = unit_map(np.zeros(1)), begin_mixture(1, [])
    run = weigh_points(SEED, evaluate, transport, 256, "none", mixture)
    beyond = beyond_reach(generator(), evaluate, transport, run, mixture)
    light = Evaluator(standard_normal, 1, lambda x: x**2)
    other = weigh_points(SEED, light, transport, 256, "none", mixture)
    little = beyond_reach(generator(), light, transport, other, mixture)
    assert beyond[0] > 0.2 * run.estimate().mean[0] and little[0] < 1e-6


def crescent(x):
    """A standard normal x[0], and x[1] around x[0] ** 2 / 2 with deviation 1/2."""
    return -0.5 * x[0] ** 2 - 2 * (x[1] - x[0] ** 2 / 2) ** 2


@pytest.mark.slow
def test_a_broad_part_bounds_the_weights():
    """Over a million draws of the posterior; a mixture's own points do not show it."""
    draws = generator(9).normal(size=(1_000_000, 2)) * [1, 0.5]
    draws[:, 1] += draws[:, 0] ** 2 / 2
    log = np.log(2) + crescent(draws.T)
    evaluate, to_x = Evaluator(crescent, 2), unit_map(np.zeros(2))
    largest = []
    for seed in range(8):
        mixture = find_mixture(generator(seed), evaluate, to_x).mixture
        assert np.isclose(mixture.shares[-1], 0.1)
        parts = [part[:-1] for part in mixture]
        narrow = Mixture(parts[0] / 0.9, *parts[1:])
        both = [np.exp(log - m.log_density(draws)).max() for m in (mixture, narrow)]
        largest.append(both)  # the mean over a mixture's points is 1
    broad, narrow = np.mean(largest, axis=0)
    assert broad < narrow / 2 and np.max(largest, axis=0)[0] < 30


def test_a_broad_part_is_as_wide_as_all_others_and_more():
    mixture = some_mixture()
    both, rng = with_broad_part(mixture), generator(10)
    assert np.isclose(both.shares.sum(), 1) and both.shares[-1] == 0.1
    parts = rng.choice(3, 400_000, p=mixture.shares)
    scale = np.sqrt(DEGREES / rng.chisquare(DEGREES, size=(400_000, 1)))
    noise = rng.normal(size=(400_000, 3)) * scale
    z = mixture.centers[parts] + np.einsum("nij,nj->ni", mixture.roots[parts], noise)
    assert np.allclose(both.centers[-1], z.mean(0), atol=0.05)
    width = both.roots[-1] @ both.roots[-1].T
    assert np.allclose(width, 4 * np.cov(z.T), rtol=0.1, atol=0.3)
