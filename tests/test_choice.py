"""The choice: maps for awkward targets, honest candidates, and a fair decision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from swindles import choice
from swindles.choice import (
    CANDIDATES,
    Candidate,
    Work,
    choose,
    choose_scheme,
    compare,
    count_work,
    find_map,
    fit_candidate,
    is_biased,
    make_choice,
    settle,
    short_chains,
    sound_values,
    spread_starts,
    work_needed,
)
from swindles.control import FeatureProducts, Fitted, exact_expectation
from swindles.coupling import Total, run, start
from swindles.models import Model, make_problem
from swindles.schemes import SCHEMES
from swindles.stein import feature_orders
from swindles.targets import skewed
from swindles.transport import Affine, identity, standard_normal
from swindles.tuning import (
    HMC,
    Grid,
    adaptation_program,
    grid_program,
    make_trial,
    repeat,
    run_pilot,
)

KEY = jax.random.key(20211)
RNG = np.random.default_rng(20211)


def moments(x):
    return jnp.concatenate([x, x**2])


def problem_of(logdensity, dim, statistics=None, at=0.0):
    return make_problem(Model(logdensity, jnp.full(dim, at)), statistics)


# A place to begin


def walled(x):
    return jnp.where(x[0] < 1.5, -x @ x / 2, -jnp.inf)


def test_starts_are_wide_where_they_can_be_and_sound_everywhere():
    z = spread_starts(KEY, problem_of(standard_normal, 3), 256)
    assert 0.8 < z[::2].std() < 1.2 and 2.2 < z[1::2].std() < 3.4
    cut = problem_of(walled, 3)
    z = spread_starts(KEY, cut, 256)
    assert (z[:, 0] < 1.5).all()
    assert jnp.isfinite(sound_values(z, cut)).all()
    assert z[1::2, 1].std() > 2, "those that stand stay where they are"


# A map


def funnel(x):
    return -(x[0] ** 2) / 18 - 2 * x[0] - 0.5 * jnp.sum(x[1:] ** 2) * jnp.exp(-x[0])


@pytest.mark.slow
def test_map_of_a_funnel_is_as_wide_as_its_mouth():
    """Laplace's map sits in the neck, hundreds of times too narrow."""
    fitted = find_map(KEY, problem_of(funnel, 5), 128)
    assert fitted.pareto_k > choice.GOOD_K
    found = fitted.transport
    assert 1 < jnp.linalg.norm(found.scale[0]) < 5
    assert (jnp.linalg.norm(found.scale[1:], axis=1) > 1).all()


@pytest.mark.slow
def test_without_a_maximum_there_is_still_a_map(monkeypatch):
    """A ring: the curvature at the centre is not a maximum's. Its radius is 10."""
    monkeypatch.setattr(choice, "FULL_MAP", 1)  # as in many dimensions
    ring = problem_of(lambda x: -2.0 * (jnp.sqrt(x @ x + 0.01) - 10) ** 2, 2, at=0.01)
    start = Affine(jnp.full(2, 0.01), jnp.eye(2))
    fitted = find_map(KEY, ring, 128, start=start)
    found = fitted.transport
    assert np.isfinite(fitted.pareto_k) and found.scale.shape == (2,)
    np.testing.assert_allclose(found.shift, 0, atol=2)
    np.testing.assert_allclose(found.scale, 10 / np.sqrt(2), rtol=0.2)


def test_good_map_is_kept(monkeypatch):
    """Where Laplace's map is good, no chain is run."""
    monkeypatch.setattr(choice, "short_chains", None)
    scale = jnp.array([[2.0, 0.0], [1.0, 0.5]])
    to_x = Affine(jnp.array([3.0, -1.0]), scale)

    def bell(x):
        return standard_normal(to_x.inverse(x))

    fitted = find_map(KEY, problem_of(bell, 2), 64)
    assert fitted.pareto_k <= choice.GOOD_K and fitted.efficiency > 0.9
    np.testing.assert_allclose(fitted.transport.shift, to_x.shift, atol=0.15)
    np.testing.assert_allclose(fitted.transport.scale, scale, rtol=0.15, atol=0.15)


# Chains that settle


@pytest.mark.slow
def test_settled_chains_have_two_step_sizes():
    settled = settle(KEY, problem_of(standard_normal, 10), 64)
    plain, careful = settled.grid.step_size
    assert careful < 0.8 * plain
    assert (
        settled.grid.num_integration_steps
        == np.round(np.pi / 2 / np.array([plain, careful]))
    ).all()
    assert settled.stuck == 0
    assert 0.8 < settled.positions.std() < 1.2, "wide starts have come in"


def test_stuck_chains_begin_anew(monkeypatch):
    """Half of the chains start on a needle, from which no proposal is accepted."""

    def needle(x):
        return jnp.where(x[0] > 50, -1e8 * (x[0] - 60) ** 2, -x @ x / 2)

    begin = jnp.where(jnp.arange(64)[:, None] % 2, jnp.array([60.0, 0.0]), 0.0)
    monkeypatch.setattr(choice, "spread_starts", lambda *_: begin)
    monkeypatch.setattr(choice, "ACCEPTANCE", (0.3, 0.3))
    settled = settle(KEY, problem_of(needle, 2), 64)
    assert settled.stuck == 32
    assert (settled.positions[:, 0] < 50).all()
    assert jnp.unique(settled.positions[:, 0]).size == 32, "beside another one"


@pytest.mark.parametrize(
    ("logdensity", "words"),
    [
        (lambda x: 0.0 * x[0], "constant"),
        (lambda x: jnp.where(x[0] == 0, 0.0, -jnp.inf), "nowhere"),
        (lambda x: 1e12 * jnp.cos(1e6 * x[0]), "rejected"),
    ],
)
def test_targets_without_a_step_size(logdensity, words):
    with pytest.raises(ValueError, match=words):
        settle(KEY, problem_of(logdensity, 2), 32)


@pytest.mark.slow
def test_no_chain_begins_at_the_mirror_image():
    """A draw from the long left tail of a skewed density has an impossible mirror."""
    z = jnp.full((32, 3), -8.0)
    trial = make_trial("cva", HMC, problem_of(skewed(3).logdensity, 3), z)
    np.testing.assert_array_equal(trial.states.minus.position, z)
    states, _ = run(KEY, trial.build(0.5, 3), trial.states, 45)
    assert (states.minus.position != z).any(1).all(), "X- moves"


# Candidates


def rounded_normal(z):
    """N(0, I), but for rounding, which spoils the mirror image."""
    return standard_normal(jax.lax.optimization_barrier(z + 3) - 3)


NORMAL = problem_of(rounded_normal, 2, moments)
KNOWN = exact_expectation(np.array([0.0, 0, 1, 1]))
LINEAR, SQUARES = np.array([1e-3, 1e-3, 1e9, 1e9]), np.array([1e9, 1e9, 1e-3, 1e-3])
WORK = Work(target=100.0, reference=50.0, statistic=10.0)


@pytest.fixture(scope="module")
def pilot():
    """A pilot run on N(0, I): in time X- becomes -X+, and Y becomes X+."""
    stein = [name for name in CANDIDATES if SCHEMES[name].stein]
    z = jax.random.normal(KEY, (64, 2))
    trial = make_trial("cva", HMC, NORMAL, z, stein, "full")
    grid = Grid(np.array([0.8, 0.4]), np.array([2, 4]))
    return run_pilot(KEY, trial, grid, 150, progress=False)


@pytest.mark.slow
def test_every_scheme_removes_on_a_gaussian_what_theory_says(pilot):
    fits = {n: fit_candidate(pilot, 1, n, KNOWN, "full") for n in CANDIDATES}
    left = {name: fit.variance for name, fit in fits.items()}
    assert (left["plain"] > 0.1).all()
    assert (left["antithetic"][:2] < 1e-10).all(), "odd"
    np.testing.assert_allclose(left["antithetic"][2:], left["plain"][2:], rtol=1e-3)
    for name in ("control", "cva", "stein", "antithetic+stein"):
        assert (left[name] < 1e-5).all(), name
        np.testing.assert_allclose(fits[name].mean, KNOWN.mean, atol=1e-4)
    assert len(fits["stein"].beta) >= feature_orders(2, "diagonal").size


@pytest.mark.slow
def test_rounding_is_no_feature(pilot):
    """Odd features average to rounding; a slope on that would be without bounds."""
    fitted = fit_candidate(pilot, 1, "antithetic+stein", KNOWN, "full")
    assert (fitted.beta[:2] == 0).all()
    assert np.abs(fitted.beta).max() < 2


def products(features, f):
    """Sums of a run, from features and statistics of shape (steps, chains, number)."""
    both = np.concatenate([features, f], -1)
    halves = [
        (
            features[:, i::2].reshape(-1, features.shape[-1]),
            f[:, i::2].reshape(-1, f.shape[-1]),
        )
        for i in (0, 1)
    ]
    return FeatureProducts(
        np.zeros(f.shape[-1]),
        Total(np.array(float(len(f)))),
        Total(both.sum(0)),
        Total(np.stack([g.T @ g for g, _ in halves])),
        Total(np.stack([g.T @ y for g, y in halves])),
        Total((both**2).mean(1).sum(0)),
    )


def test_corrections_off_zero_are_noticed():
    features = RNG.normal(size=(60, 64, 3))
    features[..., 2] += 0.3  # eighteen standard errors
    sums = products(features, features)
    assert is_biased(sums, np.eye(3)).tolist() == [False, False, True]
    assert is_biased(sums, np.ones((3, 1))).tolist() == [True]
    assert not is_biased(sums, np.zeros((3, 1))).any()
    assert not is_biased(sums, np.ones((2, 1))).any(), "the third is not used"
    slight = products(features - [0, 0, 0.25], features)
    assert not is_biased(slight, np.eye(3)).any(), "three standard errors are chance"


@pytest.mark.slow
def test_stein_is_ruled_out_where_a_density_is_cut_off():
    """The mean of a half-normal variable: the score says zero, with great certainty."""

    def half_normal(x):
        return jnp.where(x[0] > 0, -0.5 * x[0] ** 2, -jnp.inf)

    inside = Affine(jnp.ones(1), jnp.full(1, 0.3))
    problem = problem_of(half_normal, 1, at=1.0).through(inside)
    found = choose_scheme(KEY, problem, lambda sd: 0.01 * sd, 64, ["plain", "stein"])
    assert found.plan.scheme == "plain"
    assert found.forecast["stein"] == np.inf > found.forecast["plain"]
    assert abs(found.plan.center[0] - np.sqrt(2 / np.pi)) < 0.1


# Work


def test_operations_are_those_of_the_program():
    data = jnp.asarray(RNG.normal(size=(500, 20)), jnp.float32)

    def counted(rows):
        density = lambda x: -0.5 * jnp.sum((data[:rows] @ x) ** 2)  # noqa: E731
        return count_work(problem_of(density, 20, lambda x: data[:100] @ x))

    work = counted(500)
    # Forwards and backwards, a multiplication and an addition for each number.
    assert work.target == pytest.approx(4 * 500 * 20, rel=0.1)
    assert counted(250).target == pytest.approx(work.target / 2, rel=0.1)
    assert work.statistic == pytest.approx(2 * 100 * 20, rel=0.01)
    assert 6 * 20 < work.reference < 15 * 20
    assert counted(500) == work


def test_work_of_a_step_counts_chains_places_and_coefficients():
    work, none, some = Work(3.0, 1.0, 0.5), np.zeros((0, 5)), np.zeros((4, 5))
    steps = {
        n: work.step(s, 2, some if s.stein else np.zeros(5) if s.has_control else none)
        for n, s in SCHEMES.items()
        if n in CANDIDATES
    }
    assert steps == {
        "plain": 6 + 0.5,
        "antithetic": 12 + 1,
        "control": 6 + 2 + 1 + 10,
        "cva": 12 + 2 + 2 + 10,
        "stein": 6 + 0.5 + 40,
        "antithetic+stein": 12 + 1 + 40,
    }


def test_work_is_that_of_the_slowest_statistic():
    fitted = Fitted(np.zeros(2), np.array([1.0, 4.0]), np.zeros(2), np.zeros(2))
    asked, none = np.array([0.1, 0.1]), np.zeros(2)
    assert np.isclose(work_needed(fitted, asked, none, 5.0), 4 / 0.01 * 5)
    assert np.isclose(work_needed(fitted, asked * [0.1, 1], none, 5.0), 1 / 1e-4 * 5)
    # An error that does not go away leaves less for the chains, or nothing.
    some = np.array([0, 0.006])
    assert np.isclose(work_needed(fitted, asked, some, 5.0), 4 / 0.004 * 5)
    assert work_needed(fitted, asked, np.array([0.0101, 0]), 5.0) == np.inf
    assert work_needed(fitted, asked, np.array([0, 0.02]), 5.0) == np.inf


# The decision


def candidate(scheme, work):
    return Candidate(scheme, 0, None, work)


def test_a_swindle_must_beat_the_plain_chain_by_a_tenth():
    plain = candidate("plain", 1.0)
    assert choose([plain, candidate("cva", 0.95)]) is plain
    better = candidate("cva", 0.8)
    assert choose([plain, candidate("stein", 0.9), better]) is better
    worse = candidate("plain", 2.0)
    assert choose([worse, better, plain]) is better
    assert choose([worse, candidate("cva", 0.95), plain]) is plain
    alone = candidate("cva", np.inf)
    assert choose([alone]) is alone
    hopeless = candidate("plain", np.inf)
    assert choose([alone, hopeless]) is hopeless


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "asked", "winner"),
    [
        (["plain", "antithetic"], LINEAR, "antithetic"),
        (["plain", "antithetic"], SQUARES, "plain"),
        (["plain", "control"], SQUARES, "control"),
        (["plain", "stein"], SQUARES, "stein"),
        (["plain", "antithetic"], np.minimum(LINEAR, SQUARES), "plain"),
    ],
)
def test_right_choice_where_theory_knows_it(pilot, names, asked, winner):
    found = compare(pilot, names, KNOWN, "full", asked, WORK)
    assert len(found) == 2 * len(names)
    assert choose(found).scheme == winner


@pytest.mark.slow
def test_a_poorly_known_mean_is_not_leaned_on(pilot):
    """A control chain cannot be more accurate than the mean it is compared with."""
    poor = KNOWN._replace(covariance=1e-4 * np.eye(4), num_draws=10_000)
    names = ["plain", "antithetic", "control", "cva"]
    found = compare(pilot, names, poor, "full", SQUARES, WORK)
    work = {c.scheme: c.work for c in found}
    assert work["control"] == work["cva"] == np.inf > work["antithetic"]
    assert choose(found).scheme == "plain"
    enough = compare(pilot, names, poor, "full", 100 * SQUARES, WORK)
    assert choose(enough).scheme in ("control", "cva")


@pytest.mark.slow
def test_choice_is_that_of_the_best_setting(pilot):
    """Forecasts are those of the better setting; states and sizes the winner's."""
    found = [
        c if c.setting else c._replace(work=1e30 + c.work)
        for c in compare(pilot, list(CANDIDATES), KNOWN, "full", LINEAR, WORK)
    ]
    made = make_choice(pilot, found, KNOWN, "full", NORMAL, 7)
    best = choose(found)
    assert best.setting == 1
    for name in CANDIDATES:
        least = min(c.work for c in found if c.scheme == name)
        assert made.forecast[name] == least
    assert made.plan.scheme == best.scheme and made.stuck == 7
    assert made.step_size == pytest.approx(0.4) and made.num_integration_steps == 4
    first, second = pilot.states.plus.position
    np.testing.assert_array_equal(made.states.plus.position, second)
    assert (first != second).any()
    assert made.states._fields == SCHEMES[best.scheme].chains


# All of it


@pytest.fixture(scope="module")
def skewed_problem():
    target = skewed(3)
    problem = problem_of(target.logdensity, 3, moments)
    return problem.through(find_map(KEY, problem, 64).transport)


@pytest.fixture(scope="module")
def made(skewed_problem):
    """A choice for a skewed target, for means and for squares."""
    return choose_scheme(KEY, skewed_problem, lambda sd: 1e-3 * sd, 64)


@pytest.mark.slow
def test_choice_hands_over_a_plan_that_fits(made):
    plan = made.plan
    assert set(made.forecast) == set(CANDIDATES)
    assert made.forecast[plan.scheme] == min(made.forecast.values())
    assert made.forecast[plan.scheme] < 0.5 * made.forecast["plain"]
    assert made.states._fields == SCHEMES[plan.scheme].chains
    assert made.states.plus.position.shape == (64, 3)
    truth = np.concatenate(list(skewed(3).truth.values()))
    np.testing.assert_allclose(plan.center, truth, atol=0.1)
    assert made.step_size * made.num_integration_steps == pytest.approx(1.6, rel=0.4)


@pytest.mark.slow
def test_same_key_makes_the_same_choice(skewed_problem, made):
    again = choose_scheme(KEY, skewed_problem, lambda sd: 1e-3 * sd, 64)
    jax.tree.map(np.testing.assert_array_equal, made, again)


@pytest.mark.slow
def test_features_that_cannot_be_afforded_are_not_used():
    """200 dimensions, 1600 draws: ten for each feature would be 2000."""
    problem = problem_of(standard_normal, 200, lambda x: x[:2])
    found = choose_scheme(KEY, problem, lambda sd: 0.1 * sd, 16, ["stein"])
    assert found.plan.scheme == "stein" and found.plan.order == "none"
    assert len(found.plan.beta) == 0
    assert list(found.forecast) == ["stein"], "a named scheme is the scheme"


@pytest.mark.slow
def test_kernels_lower_for_cuda():
    problem = problem_of(skewed(3).logdensity, 3, moments)
    z, grid = jnp.zeros((8, 3)), Grid(jnp.array([0.5, 0.3]), jnp.array([3, 5]))
    trial = make_trial("cva", HMC, problem, z, ["stein", "antithetic+stein"], "full")
    zero, update = trial.fold
    steps = jnp.zeros(2, int), jnp.full(2, 10)
    states = start(HMC.make(0.1, 1)(problem.logdensity), z)
    length, target = jnp.array(1.5), jnp.array(0.8)
    programs = {
        grid_program(trial.build, update): (
            grid,
            repeat(trial.states, 2),
            repeat(zero, 2),
            *steps,
        ),
        adaptation_program(HMC, problem.logdensity, 20): (states, length, target),
        short_chains(problem): (z, identity(3, full=True)),
    }
    for program, arguments in programs.items():
        lowered = export.export(program, platforms=["cuda"])(KEY, *arguments)
        assert lowered.platforms == ("cuda",)
        assert "callback" not in lowered.mlir_module()
