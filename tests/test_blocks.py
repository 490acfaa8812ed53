"""Blocks: the series is the formula, memory is constant, files are whole."""

from itertools import pairwise
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from swindles import blocks
from swindles.accuracy import summarize, trace_moments
from swindles.blocks import (
    ROWS,
    Goal,
    add_block,
    beyond_chance,
    bias,
    drift,
    drop_half,
    estimate_rows,
    is_reached,
    make_flow,
    make_fold,
    make_goal,
    make_series,
    merge,
    read_run,
    write_run,
)
from swindles.coupling import advance, hmc
from swindles.cva import cva
from swindles.estimate import empty_run
from swindles.models import Model, flatten
from swindles.pilot import SCHEMES, Pilot, Plan
from swindles.stein import only
from swindles.targets import skewed
from swindles.transport import Affine, pull_back

KEY = jax.random.key(20212)
DIM, CHAINS = 3, 16
TARGET = skewed(DIM)
TO_X = Affine(jnp.full(DIM, 0.4), jnp.full(DIM, 0.8))
FLAT = flatten(
    Model(TARGET.logdensity, jnp.zeros(DIM)), lambda x: {"mean": x, "square": x**2}
)
TRUTH = np.concatenate([TARGET.truth["mean"], TARGET.truth["square"]])


def make_plan(scheme, size=0.4, leaps=4):
    """A plan with arbitrary coefficients."""
    rng = np.random.default_rng(1)
    used = SCHEMES[scheme]
    slope = rng.normal(size=6) * ("control" in used.chains)
    beta = rng.normal(size=(2 * DIM if used.stein else 0, 6))
    order = "diagonal" if used.stein else "none"
    known, small = rng.normal(size=6), np.full(6, 1e-7)
    zero = np.zeros(6)
    return Plan(scheme, size, leaps, order, slope, known, zero, beta, TRUTH, small)


def begin(scheme):
    """A run before its first step, and what takes its blocks."""
    plan = make_plan(scheme)
    algorithm = cva(hmc(0.4, 4), pull_back(TARGET.logdensity, TO_X))
    z = jax.random.normal(jax.random.key(3), (CHAINS, DIM))
    states = only(SCHEMES[scheme].chains, jax.vmap(algorithm.init)(z))
    pilot = Pilot(plan, jax.device_get(states), {}, 0.1, np.zeros((5, 3)), 0)
    run = empty_run(KEY, pilot, FLAT, TO_X, 0.1)
    return run, make_flow(run, FLAT, TO_X)


def take(run, flow, number):
    for _ in range(number):
        run = add_block(run, flow)
    return run


@pytest.mark.parametrize("scheme", SCHEMES)
def test_series_is_the_formula(scheme):
    """From positions and gradients, by hand."""
    run, flow = begin(scheme)
    states = take(run, flow, 1).states
    plan = run.plan

    def feature(z):
        return np.concatenate([TO_X(z), TO_X(z) ** 2], -1)

    pair = [states["plus"].position]
    slopes = [states["plus"].logdensity_grad]
    if "minus" in states:
        pair.append(-states["minus"].position)
        slopes.append(-states["minus"].logdensity_grad)
    expected = np.mean([feature(z) for z in pair], axis=0)
    if "control" in states:
        y = states["control"].position
        ys = [y, -y][: len(pair)]
        known = np.mean([feature(y) for y in ys], axis=0) - plan.known
        expected = expected - plan.slope * known
    if SCHEMES[scheme].stein:
        s = [
            np.concatenate([g, 1 + z * g], -1)
            for z, g in zip(pair, slopes, strict=True)
        ]
        expected = expected - np.mean(s, axis=0) @ plan.beta
    plus, result = make_series(plan, lambda z: FLAT.statistic(TO_X(z)))(states)
    assert np.allclose(plus, feature(pair[0]), atol=1e-5)
    assert np.allclose(result, expected, atol=1e-4)


def test_sums_are_those_of_the_recorded_run():
    run, flow = begin("plain")
    values = []
    step_by_step = run._replace(length=1)
    for _ in range(20):
        step_by_step = add_block(step_by_step, flow)
        values.append(
            jax.vmap(FLAT.statistic)(TO_X(step_by_step.states["plus"].position))
        )
    direct = summarize(trace_moments(np.asarray(values, np.float64), 2))
    found = estimate_rows(take(run, flow, 2))
    assert np.allclose(found.mean, direct.mean, rtol=1e-5)
    assert np.allclose(found.mcse, direct.mcse, rtol=1e-4)
    assert np.allclose(found.variance, direct.variance, rtol=1e-4)
    assert np.allclose(found.rhat, direct.rhat, rtol=1e-4)


def size_of(run):
    return sum(
        np.asarray(leaf).nbytes for leaf in jax.tree.leaves(run._replace(history=0))
    )


def test_memory_does_not_grow_and_nothing_is_lost():
    run, flow = begin("cva")
    most, seen = 0, []
    for _ in range(3 * ROWS):
        run = add_block(run, flow)
        most = max(most, size_of(run))
        seen.append(len(run.draws))
    assert max(seen) < ROWS and seen[-1] >= ROWS // 2
    merged = sum(b < a for a, b in pairwise(seen))
    assert merged > 3 and run.length == 10 * 2**merged
    assert int(np.sum(run.rows.plus.steps)) == run.steps
    assert most < 1.05 * size_of(take(begin("cva")[0], flow, ROWS - 1))


def test_merging_changes_no_estimate():
    run, flow = begin("antithetic")
    run = take(run, flow, 8)
    rows, draws = merge(run.rows, run.draws)
    before, after = estimate_rows(run), estimate_rows(run._replace(rows=rows))
    assert np.allclose(before.mean, after.mean, rtol=1e-6)
    assert np.allclose(before.mcse, after.mcse, rtol=1e-4)
    assert np.array_equal(draws, run.draws[1::2])


def test_errors_that_stay_are_part_of_the_error():
    run, flow = begin("plain")
    run = take(run, flow, 4)
    before = estimate_rows(run).mcse
    plan = run.plan._replace(shared=np.full(6, 0.09), rounding=np.full(6, 0.4))
    after = estimate_rows(run._replace(plan=plan)).mcse
    assert np.allclose(after**2 - before**2, 0.25)


def test_rates_are_counted():
    states = begin("cva")[0].states
    infos = {
        name: SimpleNamespace(is_accepted=accepted, is_divergent=~accepted)
        for name, accepted in {
            "plus": jnp.arange(CHAINS) < 12,
            "minus": jnp.arange(CHAINS) < 10,
            "control": jnp.arange(CHAINS) < 13,
        }.items()
    }
    zero, update = make_fold(
        make_plan("cva"), lambda z: FLAT.statistic(TO_X(z)), CHAINS
    )
    sums = update(update(zero, states, infos), states, infos)
    assert sums.accepted.sum(1).tolist() == [2 * 12, 2 * 10, 2 * 13]
    assert sums.divergent == 2 * 6
    assert sums.decoupled == 2 * 3


def test_chance_is_told_from_difference():
    """At a level of 5 %, 2 to 9 % of 1000 trials are false alarms."""
    rng = np.random.default_rng(5)
    alarms = [
        beyond_chance(rng.normal(size=(32, 4)), np.zeros(4), 0.05) for _ in range(1000)
    ]
    assert 0.02 < np.mean(alarms) < 0.09
    shifted = rng.normal(size=(32, 4)) + np.array([0, 0, 0, 2])
    assert beyond_chance(shifted, np.zeros(4), 1e-3)
    assert not beyond_chance(shifted, np.full(4, 1.0), 1e-3), "noise is allowed for"


def test_drift_is_seen_and_dropped():
    run, flow = begin("plain")
    run = take(run, flow, 16)
    assert not drift(run)
    total = run.rows.total.copy()
    total[:8] += 10 * 10.0  # ten more in each of ten steps
    moved = run._replace(rows=run.rows._replace(total=total))
    assert drift(moved)
    rest = drop_half(moved)
    assert len(rest.draws) == 8 and rest.dropped == 80 and not drift(rest)


def test_bias_is_seen():
    run, flow = begin("control")
    run = take(run, flow, 8)
    assert bias(run), "its coefficients and its known mean are arbitrary"
    honest, flow = begin("antithetic")
    assert not bias(take(honest, flow, 8))


def test_goals():
    sd = np.array([1.0, 2.0, 0.0])
    assert Goal(None, 0.1, None, None).asked(sd).tolist() == [0.1, 0.2, np.inf]
    both = Goal(np.array([0.15, 0.15, 0.15]), 0.1, None, None)
    assert np.allclose(both.asked(sd), [0.1, 0.15, 0.15])
    assert make_goal(FLAT, None, None, 60, None).relative == 0.01
    each = make_goal(
        FLAT, {"mean": [1.0, 2, 3], "square": [4.0, 5, 6]}, None, None, 9.0
    )
    assert each.mcse.tolist() == [1, 2, 3, 4, 5, 6] and each.relative is None
    assert each.is_spent(1e9, 9.0) and not each.is_spent(1e9, 8.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"mcse": 0.0},
        {"mcse": [1.0, 2.0]},
        {"mcse": np.nan},
        {"relative": -1.0},
        {"seconds": 0.0},
        {"gradients": np.inf},
    ],
)
def test_bad_goals(bad):
    goal = {"mcse": None, "relative": None, "seconds": 1.0, "gradients": None} | bad
    with pytest.raises(ValueError, match=next(iter(bad))):
        make_goal(FLAT, **goal)


def test_reached_needs_a_margin_rhat_and_rest(monkeypatch):
    run, flow = begin("plain")
    run = take(run, flow, 16)
    found = estimate_rows(run)._replace(rhat=np.ones(6))
    margin = 1 + 1 / np.sqrt(2 * (CHAINS - 1))
    just = Goal(found.mcse * margin * 1.001, None, None, None)
    assert is_reached(run, found, just)
    assert not is_reached(run, found, just._replace(mcse=found.mcse * 1.01))
    assert not is_reached(run, found._replace(rhat=np.full(6, 1.2)), just)
    monkeypatch.setattr(blocks, "drift", lambda run: True)
    assert not is_reached(run, found, just)


def test_files_hold_everything(tmp_path):
    run, flow = begin("cva")
    run = take(run, flow, 3)
    write_run(tmp_path / "run.npz", run, {"names": ["a"]})
    back, about = read_run(tmp_path / "run.npz")
    assert about == {"names": ["a"]}
    assert jax.tree.structure(run) == jax.tree.structure(back)
    for one, other in zip(jax.tree.leaves(run), jax.tree.leaves(back), strict=True):
        assert type(one) is type(other) or np.asarray(one).dtype == other.dtype
        assert np.array_equal(one, other)
    assert list(tmp_path.iterdir()) == [tmp_path / "run.npz"]
    ahead, behind = take(run, flow, 2), take(back, flow, 2)
    assert np.array_equal(ahead.rows.total, behind.rows.total)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a").write_text("no run")
    np.savez(tmp_path / "b.npz", x=1)
    for name in ("a", "b.npz", "missing"):
        with pytest.raises(ValueError, match="not a run"):
            read_run(tmp_path / name)


def test_kernel_lowers_for_cuda():
    run, _ = begin("antithetic+stein")
    plan = run.plan
    step = blocks.make_step(plan, pull_back(TARGET.logdensity, TO_X))
    zero, update = make_fold(plan, lambda z: FLAT.statistic(TO_X(z)), CHAINS)

    def kernel(key, states, sums):
        return advance(key, states, sums, 0, 10, step, update, store=False)

    lowered = export.export(jax.jit(kernel), platforms=["cuda"])(KEY, run.states, zero)
    assert "xla_python" not in lowered.mlir_module()
