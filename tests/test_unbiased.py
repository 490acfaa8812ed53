"""Pairs of chains: their laws, the telescoping sum, bounds, reports that merge."""

import pickle
from functools import cache

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blackjax.mcmc.integrators import velocity_verlet
from blackjax.mcmc.metrics import gaussian_euclidean
from jax import export
from scipy import stats

from swindles.models import Model, make_problem
from swindles.targets import skewed
from swindles.transport import standard_normal
from swindles.unbiased import (
    NEVER,
    SHARES,
    WALKS,
    Moves,
    PairJob,
    PairKernel,
    PairPlan,
    as_variants,
    average_pairs,
    bound_total_variation,
    choose_walk,
    correction_weight,
    fingerprint,
    follow,
    merge,
    pair_kernel,
    pair_value,
    plan_pairs,
    problem_kernel,
    recommend_window,
    run_lanes,
    run_pairs,
    switched_leapfrog,
    tally,
)

KEY = jax.random.key(20401)
SKEWED = skewed(dim=2, shape=2.0)


def normal_start(key):
    return jax.random.normal(key, (2,))


def position(state, _):
    return state.position


def means_and_squares(state, _):
    return jnp.concatenate([state.position, state.position**2])


# The telescoping sum.

MATRIX = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.5, 0.1, 0.4]])
WINDOWS = [
    (1, 0, 0),
    (1, 3, 3),
    (1, 2, 9),
    (4, 0, 5),
    (3, 2, 4),
    (5, 7, 8),
    (7, 2, 40),
]


@pytest.mark.parametrize(("lag", "k", "m"), WINDOWS)
def test_weights_telescope_to_the_stationary_mean(lag, k, m):
    """Three states: all expectations are known, and the sum of them is exact."""
    f, first = np.array([1.0, -2.0, 5.0]), np.array([1.0, 0.0, 0.0])
    expected = [first @ np.linalg.matrix_power(MATRIX, t) @ f for t in range(400)]
    time = np.arange(lag, 400)
    weights = np.asarray(correction_weight(time, lag, k, m))
    differences = np.array([expected[t] - expected[t - lag] for t in time])
    found = np.mean(expected[k : m + 1]) + weights @ differences / (m - k + 1)
    stationary = np.linalg.matrix_power(MATRIX, 1000)[0] @ f
    assert found == pytest.approx(stationary, abs=1e-12)
    brute = [sum(k <= s - j * lag <= m for j in range(1, s // lag + 1)) for s in time]
    assert weights.tolist() == brute


WIDE = pair_kernel(SKEWED.logdensity, 3, lambda key: 4 * normal_start(key))
STEP = jax.jit(WIDE.step)


def walk_pair(key, moves, lag, steps):
    """Both chains of one pair, by hand: positions of X and of Y."""
    first, second = jax.random.split(jax.random.fold_in(key, NEVER))
    x, y = (WIDE.init(WIDE.start(each)) for each in (first, second))
    xs, ys = [x.position], [y.position]
    for t in range(steps):
        here, leader = jax.random.fold_in(key, t), x.position
        x = STEP(here, x, leader, moves)
        xs.append(x.position)
        if t >= lag:
            y = STEP(here, y, leader, moves)
            ys.append(y.position)
    return np.array(xs), np.array(ys)


def by_definition(xs, ys, lag, k, m, f, times):
    """Meeting time, the average of H_k to H_m, and the sums of distances."""
    meets = [t for t in range(lag, len(xs)) if np.array_equal(xs[t], ys[t - lag])]
    tau = meets[0]

    def corrected(t):
        total = f(xs[t])
        for j in range(1, len(xs)):
            if t + j * lag < tau:
                total = total + f(xs[t + j * lag]) - f(ys[t + (j - 1) * lag])
        return total

    gaps = [
        sum(
            np.linalg.norm(xs[t + j * lag] - ys[t + (j - 1) * lag])
            for j in range(1, len(xs))
            if t + j * lag < tau
        )
        for t in times
    ]
    return tau, np.mean([corrected(t) for t in range(k, m + 1)], axis=0), gaps


@pytest.mark.slow
@pytest.mark.parametrize(("lag", "k", "m"), [(1, 0, 3), (3, 2, 9), (8, 5, 60)])
def test_pairs_are_what_the_definition_says(lag, k, m):
    """Positions stored step by step; the sum as it stands in the book."""
    moves = Moves(0.4, 0.4, 0.3, lag, k, m)
    times, number = [0, 1, 5, 20], 6
    found = run_pairs(KEY, WIDE, means_and_squares, moves, number, (), times, 4)
    assert found.correction.any()
    for pair in range(number):
        key = jax.random.fold_in(KEY, pair)
        xs, ys = walk_pair(key, moves, lag, max(m, 100))
        tau, mean, gaps = by_definition(
            xs, ys, lag, k, m, lambda x: np.append(x, x**2), times
        )
        assert found.meeting[pair, 0] == tau
        np.testing.assert_allclose(found.estimates[pair], mean, rtol=2e-4, atol=1e-4)
        np.testing.assert_allclose(found.distance[pair, 0], gaps, rtol=1e-4, atol=1e-5)


def test_a_pair_that_has_met_costs_nothing_more():
    """Steps are those of X, and those of Y until they meet. One program for all.

    Nothing is compiled, or made larger, for later meetings or longer averages; and how
    many pairs move at a time changes nothing.
    """
    traced, counts, found = [], [], []

    def value(state, _):
        traced.append(1)
        return state.position

    for lanes in (7, 64):
        for lag, k, m, walk in [(5, 10, 40, 0.4), (20, 100, 900, 0.02)]:
            moves = Moves(0.4, walk, 0.3, lag, k, m)
            each = run_pairs(KEY, WIDE, value, moves, 50, num_lanes=lanes)
            counts.append(len(traced))
            found.append(each)
            tau = each.meeting
            assert np.array_equal(each.moves, np.maximum(tau, m) + tau - lag)
    assert 0 < counts[0] == counts[1] < counts[2] == counts[3]
    for one, other in zip(found[:2], found[2:], strict=True):
        assert np.array_equal(one.meeting, other.meeting)
        np.testing.assert_allclose(one.estimates, other.estimates, rtol=1e-4, atol=1e-6)
    assert found[1].meeting.max() > 3 * found[0].meeting.max()


# The kernels.


def test_force_is_a_switch():
    """With force: BlackJAX's leapfrog. Without: straight on."""
    metric = gaussian_euclidean(jnp.ones(2))
    x, p = jnp.array([0.3, -1.0]), jnp.array([1.0, 2.0])
    value, slope = jax.value_and_grad(SKEWED.logdensity)(x)
    state = blackjax.mcmc.integrators.IntegratorState(x, p, value, slope)
    usual = velocity_verlet(SKEWED.logdensity, metric.kinetic_energy)(state, 0.3)
    mine = switched_leapfrog(1.0)(SKEWED.logdensity, None)(state, 0.3)
    for one, other in zip(mine, usual, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    straight = switched_leapfrog(0.0)(SKEWED.logdensity, None)(state, 0.3)
    np.testing.assert_allclose(straight.position, x + 0.3 * p, rtol=1e-6)
    np.testing.assert_array_equal(straight.momentum, p)
    expected = jax.grad(SKEWED.logdensity)(straight.position)
    np.testing.assert_allclose(straight.logdensity_grad, expected, rtol=1e-5)


@pytest.mark.parametrize("distance", [0.2, 1.0, 3.0])
def test_proposals_meet_as_often_as_they_can(distance):
    """And each is Gaussian around where its chain is: Kolmogorov-Smirnov."""
    number, walk = 40_000, 0.7
    x, leader = jnp.zeros(3), walk * distance * jnp.array([0.6, 0.0, 0.8])
    keys = jax.random.split(KEY, number)
    p = jax.random.normal(jax.random.key(1), (number, 3))
    same, mirrored = jax.vmap(lambda k, p: follow(k, p, x, leader, walk))(keys, p)
    proposal = np.where(same[:, None], leader + walk * p, x + walk * mirrored)
    most = 2 * stats.norm.cdf(-distance / 2)
    assert abs(same.mean() - most) < 4 * np.sqrt(most * (1 - most) / number)
    for direction in np.eye(3), np.array([[0.6, 0.0, 0.8], [0.8, 0.0, -0.6]]):
        for axis in direction:
            assert stats.kstest(proposal @ axis / walk, "norm").pvalue > 1e-3


def test_chains_meet_to_the_bit_as_often_as_they_can():
    """In one step, where every proposal is accepted."""
    kernel = pair_kernel(lambda x: 0 * x.sum(), 3, normal_start)
    moves, number = Moves(1.0, 0.7, 1.0), 20_000
    one, other = (kernel.init(x) for x in (jnp.zeros(2), jnp.array([0.42, 0.56])))

    def meet(key):
        moved = [kernel.step(key, s, one.position, moves) for s in (one, other)]
        return (moved[0].position == moved[1].position).all()

    found = jax.jit(jax.vmap(meet))(jax.random.split(KEY, number)).mean()
    most = 2 * stats.norm.cdf(-0.5)
    assert abs(found - most) < 4 * np.sqrt(most * (1 - most) / number)


def exact_start(key):
    """A draw of the target, so that every chain has its law from the start."""
    return jnp.log(jax.random.gamma(key, 2.0, (2,)))


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_each_chain_has_its_own_law(sign):
    """Y among them, whatever X does: moments, and a Kolmogorov-Smirnov test.

    A third chain follows a point that does not move at all.
    """
    number, steps = 20_000, 12
    target = SKEWED.logdensity if sign > 0 else lambda x: SKEWED.logdensity(-x)
    kernel = pair_kernel(target, 3, exact_start)

    def run(key, share):
        moves, keys = (
            Moves(0.5, 0.9, share, sign=sign),
            jax.random.split(key, steps + 2),
        )

        def both(states, key):
            x = states[0].position
            leaders = x, x, sign * jnp.array([1.2, -0.3])
            each = zip(states, leaders, strict=True)
            return tuple(kernel.step(key, *pair, moves) for pair in each), None

        states = tuple(kernel.init(sign * exact_start(k)) for k in keys[:3])
        return jax.lax.scan(both, states, keys[3:])[0]

    program = jax.jit(jax.vmap(run, (0, None)))
    for share in (0.0, 0.4, 1.0):
        ends = program(jax.random.split(KEY, number), share)
        x, y, z = (sign * np.asarray(s.position, np.float64) for s in ends)
        assert ((x == y).all(1).mean() > 0.2) == (share > 0)
        for chain in (x, y, z):
            for axis in range(2):
                draws = np.exp(chain[:, axis])
                assert stats.kstest(draws, stats.gamma(2).cdf).pvalue > 1e-3
            for f, name in [(chain, "mean"), (chain**2, "square")]:
                error = f.std(0) / np.sqrt(number)
                assert (np.abs(f.mean(0) - SKEWED.truth[name]) < 4 * error).all()


def test_after_meeting_equal_for_ever():
    """To the bit: positions, densities and gradients.

    One program moves both chains, one after the other, as in the lanes. In two copies
    of it the compiler may round differently.
    """
    kernel = pair_kernel(SKEWED.logdensity, 3, normal_start)
    moves = Moves(0.5, 0.5, 0.3)

    def both(states, key):
        def step(state):
            return kernel.step(key, state, states.position[0], moves)

        moved = jax.lax.map(step, states)
        return moved, moved

    def run(key):
        keys = jax.random.split(key, 402)
        states = jax.vmap(lambda k: kernel.init(normal_start(k)))(keys[:2])
        return jax.lax.scan(both, states, keys[2:])[1]

    states = jax.device_get(jax.jit(jax.vmap(run))(jax.random.split(KEY, 64)))
    x = jax.tree.map(lambda part: part[:, :, 0], states)
    y = jax.tree.map(lambda part: part[:, :, 1], states)
    same = (x.position == y.position).all(-1)
    assert not same[:, 0].all() and same[:, 100].all()
    assert (np.diff(same.astype(int), axis=1) >= 0).all()
    for one, other in zip(x, y, strict=True):
        assert np.array_equal(one[same], other[same])


@pytest.mark.parametrize("kind", [jnp.float32, jnp.float64])
def test_both_precisions(kind):
    """That of the positions decides, also where double precision is at hand."""
    with jax.enable_x64(True):
        kernel = pair_kernel(
            standard_normal, 3, lambda k: jax.random.normal(k, 2, kind)
        )
        moves = Moves(0.4, 0.4, 0.2, lag=3, k=0, m=9)
        found = run_pairs(KEY, kernel, position, moves, 200)
    assert found.distance.dtype == kind
    error = found.estimates.std(0) / np.sqrt(200)
    assert (np.abs(found.estimates.mean(0)) < 4 * error).all()


def test_mirrored_variants_of_a_symmetric_target_cancel():
    kernel = pair_kernel(standard_normal, 3, normal_start)
    moves = Moves(0.4, 0.4, 0.2, lag=3, k=2, m=9, sign=(1.0, -1.0))
    found = run_pairs(KEY, kernel, position, moves, 30)
    assert np.array_equal(found.meeting[:, 0], found.meeting[:, 1])
    assert found.average[:, 0].any() and found.correction[:, 0].any()
    np.testing.assert_allclose(found.estimates, 0, atol=1e-6)


# No bias, and errors that are what they say.


@pytest.mark.slow
def test_no_bias_from_twenty_deviations_out():
    """10 000 pairs; a plain average of the same length is far off."""
    number, origin = 10_000, jnp.array([20.0, -20.0])
    kernel = pair_kernel(standard_normal, 2, lambda key: origin + normal_start(key))
    moves = Moves(0.35, 0.5, 0.2, lag=10, k=2, m=12)
    found = run_pairs(KEY, kernel, means_and_squares, moves, number, num_lanes=512)
    truth = np.array([0.0, 0.0, 1.0, 1.0])
    corrected, alone = tally(found.estimates), tally(found.average[:, 0])
    assert (np.abs(corrected.mean - truth) < 4 * corrected.error).all()
    assert (np.abs(alone.mean - truth) > 50 * alone.error).all()
    # Variances, too: unbiased as a product of independent halves.
    first, second = tally(found.estimates[::2]), tally(found.estimates[1::2])
    variance = corrected.mean[2:] - first.mean[:2] * second.mean[:2]
    assert (np.abs(variance - 1) < 4 * corrected.error[2:]).all()


@cache
def cosh_problem():
    model = Model(lambda x: -jnp.sum(jnp.cosh(x - 0.5 * x[::-1])), jnp.zeros(2))
    return make_problem(model, lambda x: jnp.array([x[0], x[0] ** 2, jnp.exp(x[1])]))


def cosh_truth():
    """By a sum over a fine grid."""
    grid = np.linspace(-12, 12, 1601)
    x, y = np.meshgrid(grid, grid, indexing="ij")
    p = np.exp(-np.cosh(x - 0.5 * y) - np.cosh(y - 0.5 * x))
    return np.array([(f * p).sum() / p.sum() for f in (x, x**2, np.exp(y))])


def cosh_plan(scheme, order, k=3):
    """Coefficients that nobody fitted: they must not matter for the mean."""
    beta = np.zeros((0, 3)) if order == "none" else np.full((5, 3), -0.2)
    moves = Moves(0.5, 0.6, 0.2, lag=6, k=k, m=24)
    return PairPlan(scheme, order, beta, 3, moves, np.ones(9), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "order"), [("plain", "none"), ("antithetic+stein", "full")]
)
def test_coverage_over_repeats(scheme, order):
    """200 jobs: intervals hold the truth as often as they say; so does their merger."""
    problem, plan, truth = cosh_problem(), cosh_plan(scheme, order), cosh_truth()
    keys = jax.random.split(jax.random.fold_in(KEY, 7), 200)
    reports = [average_pairs(key, problem, plan, 50) for key in keys]
    for level in (0.8, 0.95):
        inside = np.array(
            [(low < truth) & (truth < high) for low, high in intervals(reports, level)]
        )
        allowed = 4 * np.sqrt(level * (1 - level) / 200)
        assert (np.abs(inside.mean(0) - level) < allowed).all(), (level, inside.mean(0))
    means = np.array([report.mean for report in reports])
    stated = np.mean([report.mcse**2 for report in reports], axis=0)
    assert (np.abs(np.log(means.var(0, ddof=1) / stated)) < 0.4).all()
    merged = merge(reports)
    assert merged.estimate.number == 10_000
    (warning,) = merged.warnings()  # of a plan that nobody made
    assert "met later than the plan expected" in warning
    assert (np.abs(merged.mean - truth) < 4 * merged.mcse).all()


def intervals(reports, level):
    return [report.interval(level) for report in reports]


# Bounds.

RHO, FAR = 0.9, 5.0


def autoregression():
    """x' = rho x + noise, coupled by a mirror between the two means; from 5."""
    scale = np.sqrt(1 - RHO**2)

    def step(key, state, leader, moves):
        keys = jax.random.split(key)
        noise = jax.random.normal(keys[0], (1,))
        mine, other = RHO * state.position, RHO * leader
        same, mirrored = follow(keys[1], noise, mine, other, scale)
        place = jnp.where(same, other + scale * noise, mine + scale * mirrored)
        return state._replace(position=place)

    def init(x):
        return blackjax.hmc.init(x, standard_normal)

    return PairKernel(lambda key: jnp.full(1, FAR), init, step)


def true_distances(t):
    """Total variation and Wasserstein distance of X_t from N(0, 1)."""
    mean, spread = RHO**t * FAR, np.sqrt(max(1 - RHO ** (2 * t), 1e-12))
    x = np.linspace(-10, 12, 200_001)
    width = x[1] - x[0]
    one, other = stats.norm(mean, spread), stats.norm()
    variation = 0.5 * np.abs(one.pdf(x) - other.pdf(x)).sum() * width
    return variation, np.abs(one.cdf(x) - other.cdf(x)).sum() * width


def test_bounds_on_an_autoregression():
    """Above the truth everywhere, and close where it matters."""
    times, lag = np.arange(1, 61), 60
    moves = Moves(1.0, 1.0, 0.5, lag=lag)
    inputs = autoregression(), position, moves, 10_000, (), times
    found = run_pairs(KEY, *inputs, num_lanes=512)
    truth = np.array([true_distances(t) for t in times])
    variation, error = bound_total_variation(found.meeting, lag, times)
    assert (variation + 4 * error > truth[:, 0]).all()
    near = np.abs(np.log(truth[:, 0] / 0.1)).argmin()
    assert truth[near, 0] == pytest.approx(0.1, rel=0.1)
    assert variation[near] < 5 * truth[near, 0]
    distance = tally(found.distance[:, 0])
    assert (distance.mean + 4 * distance.error > truth[:, 1]).all()
    near = np.abs(np.log(truth[:, 1] / 0.1)).argmin()
    assert distance.mean[near] < 5 * truth[near, 1]


def test_bound_from_few_meeting_times():
    """By hand: ceil((tau - L - t) / L), no less than 0."""
    meeting = np.array([[11, 12], [35, 11]])
    bound, error = bound_total_variation(meeting, 10, [0, 1, 4, 24, 25])
    # tau - L: 1, 2, 25, 1; at t = 4: 0, 0, ceil(2.1), 0
    assert bound.tolist() == [1.0, 1.0, 0.75, 0.25, 0.0]
    assert error[2] == pytest.approx(np.std([0, 1.5], ddof=1) / np.sqrt(2))


# Plans, jobs, reports.


@pytest.mark.slow
def test_a_plan_makes_quiet_jobs():
    """The pilot's window suits the jobs, and Stein features take most of the noise."""
    model = Model(lambda x: -jnp.sum(jnp.exp(x) - 2 * x) - 0.1 * x @ x, jnp.zeros(3))
    problem = make_problem(model, lambda x: x)
    plan = plan_pairs(jax.random.fold_in(KEY, 1), problem)
    assert plan.scheme == "antithetic+stein" and plan.order == "full"
    moves = plan.moves
    assert moves.lag == moves.k >= np.median(plan.meeting) - 1
    assert moves.m == 10 * moves.k and plan.gradients > 0
    assert pickle.loads(pickle.dumps(plan)).moves == moves
    report = average_pairs(jax.random.fold_in(KEY, 2), problem, plan, 100)
    assert not report.warnings()
    assert (report.meeting > moves.k + moves.lag).mean() < 0.1
    grid = np.linspace(-15, 5, 20_001)
    p = np.exp(2 * grid - np.exp(grid) - 0.1 * grid**2)
    truth = (grid * p).sum() / p.sum()
    spread = np.sqrt(((grid - truth) ** 2 * p).sum() / p.sum())
    assert (np.abs(report.mean - truth) < 4 * report.mcse).all()
    draws = 100 * 2 * (moves.m - moves.k)
    assert (report.mcse < spread / np.sqrt(20 * draws)).all()


def test_window_from_meeting_times():
    meeting = np.append(np.full(99, 21), 301)
    assert recommend_window(meeting, 0.9, 5) == {"lag": 20, "k": 20, "m": 100}
    assert recommend_window(meeting, 1.0, 5)["k"] == 300
    for wrong in ({"quantile": 0}, {"length": 0.5}):
        with pytest.raises(ValueError, match="give a quantile"):
            recommend_window(meeting, **wrong)


def test_walk_is_the_one_that_leaves_most(monkeypatch):
    """Of jobs of one length: what k takes, and what the random walk takes."""
    walk, share = (x.ravel() for x in np.meshgrid(WALKS, SHARES))
    meeting = np.full((64, 9), 100)
    middle = walk == WALKS[1]
    meeting[:, middle & (share == SHARES[1])] = 20
    meeting[:, middle & (share == SHARES[2])] = 18
    meeting[:, middle & (share == SHARES[0])] = NEVER
    found = meeting, 7
    monkeypatch.setattr("swindles.unbiased.pilot_pairs", lambda *_, **__: found)
    moves, cost = choose_walk(KEY, cosh_problem(), 0.5, 3, length=10)
    assert moves == Moves(0.5, WALKS[1] / np.sqrt(2), SHARES[1]) and cost == 7
    meeting[:, middle & (share == SHARES[2])] = 5  # so much sooner: shorter jobs
    assert choose_walk(KEY, cosh_problem(), 0.5, 3, length=10)[0].share == SHARES[2]


def test_merging_is_running_more():
    """Two jobs, back from a file: the tally of all their repeats."""
    problem, plan = cosh_problem(), cosh_plan("plain", "none")
    jobs = [average_pairs(jax.random.key(i), problem, plan, 50) for i in (1, 2, 3)]
    jobs = [pickle.loads(pickle.dumps(job)) for job in jobs]
    merged, again = merge(jobs), merge([merge(jobs[:2]), jobs[2]])
    assert merged.mean.tolist() == again.mean.tolist()
    means = np.array([job.mean for job in jobs])
    np.testing.assert_allclose(merged.mean, means.mean(0), rtol=1e-12)
    inputs = problem_kernel(problem, 3), pair_value(problem, "none"), plan.variants
    rest = 50, jnp.asarray(plan.beta, jnp.float32), np.arange(4)  # from 0 to k
    rows = [run_pairs(jax.random.key(i), *inputs, *rest).estimates for i in (1, 2, 3)]
    whole = tally(np.concatenate(rows))
    np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-5)
    np.testing.assert_allclose(merged.mcse, whole.error, rtol=1e-4)
    assert merged.gradients == sum(job.gradients for job in jobs)
    assert merged.meeting.shape == (150, 1)


def test_merging_refuses_in_words():
    problem, plan = cosh_problem(), cosh_plan("plain", "none")
    job = average_pairs(jax.random.key(1), problem, plan, 50)
    other = job._replace(keys=((0, 2),))
    assert merge([job, other]).estimate.number == 100
    with pytest.raises(ValueError, match="the same key"):
        merge([job, other, job])
    with pytest.raises(ValueError, match="different plans"):
        merge([job, other._replace(moves=job.moves._replace(k=4))])
    for changed in (
        problem._replace(logdensity=lambda x: 1.1 * problem.logdensity(x)),
        problem._replace(statistic=lambda x: problem.statistic(x) + 1),
    ):
        with pytest.raises(ValueError, match="different problems"):
            merge([job, other._replace(fingerprint=fingerprint(changed))])


def two_modes(x):
    return jnp.logaddexp(standard_normal(x - 15), standard_normal(x + 15))


def test_chains_that_do_not_meet_give_no_answer(monkeypatch):
    """Rather than a biased one."""
    problem = make_problem(Model(two_modes, jnp.zeros(1)))
    moves = Moves(0.5, 0.5, 0.2, lag=5, k=5, m=20)
    plan = PairPlan("plain", "none", np.zeros((0, 1)), 3, moves, np.ones(9), 0)
    report = average_pairs(jax.random.key(0), problem, plan, 30, patience=5)
    assert np.isnan(report.mean).all() and "have not met" in report.warnings()[0]
    assert report.total_variation([0])[0] == 1
    assert np.isnan(report.distance.mean).all()
    never = np.full((64, 9), NEVER), 1
    monkeypatch.setattr("swindles.unbiased.pilot_pairs", lambda *_, **__: never)
    with pytest.raises(ValueError, match="do not meet within 2000 steps"):
        choose_walk(KEY, problem, 0.5, 3, length=10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lag": 0}, "lag must be"),
        ({"k": -1}, "lag must be"),
        ({"k": 5, "m": 4}, "ends before"),
        ({"walk": 0.0}, "walk must be"),
        ({"share": 1.5}, "share between"),
    ],
)
def test_impossible_moves_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        as_variants(Moves(0.5, 0.5, 0.2)._replace(**change))


def test_schemes_with_a_control_chain_are_refused():
    with pytest.raises(ValueError, match="no control chain"):
        plan_pairs(KEY, cosh_problem(), "cva")


def test_lowers_for_cuda():
    kernel = pair_kernel(SKEWED.logdensity, 3, normal_start)
    moves = Moves(0.4, 0.4, 0.2, lag=3, k=2, m=9)

    def program(key):
        limits = as_variants(moves), jnp.zeros(1, jnp.int32), 1000
        job = PairJob(key, kernel, lambda state: state.position, *limits)
        return run_lanes(job, 20, 8)

    exported = export.export(jax.jit(program), platforms=["cuda"])(KEY)
    assert exported.platforms == ("cuda",)
