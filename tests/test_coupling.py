"""Coupled chains are the plain chains, to the bit; runs are compiled once."""

import functools
import gc
import pickle
import weakref

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blackjax.base import SamplingAlgorithm
from blackjax.mcmc import integrators
from blackjax.mcmc.random_walk import normal
from jax.extend.backend import get_backend

from swindles.antithetic import antithetic, fold_series, mirror, pair_series
from swindles.control import control
from swindles.coupling import (
    Total,
    add_block,
    add_rates,
    begin_run,
    compiled,
    couple,
    coupled,
    empty_rates,
    hmc,
    keep_nothing,
    mala,
    random_walk,
    record,
    run,
    start,
    step_keys,
    take_steps,
)
from swindles.cva import cva
from swindles.targets import logistic_regression
from swindles.transport import laplace, pull_back, standard_normal

KEY = jax.random.key(20202)
CHAINS, STEPS, DIM = 16, 100, 3


def tilted(x):
    """A skewed target: symmetric ones hide sign errors."""
    return -jnp.sum(jnp.exp(x) - 1.5 * x) - 0.1 * jnp.sum(x**2)


def blackjax_hmc(logdensity):
    return blackjax.hmc(logdensity, 0.4, jnp.ones(DIM), 4)


def blackjax_mala(logdensity):
    return blackjax.mala(logdensity, 0.4**2 / 2)


def blackjax_walk(logdensity):
    return blackjax.additive_step_random_walk(logdensity, normal(jnp.full(DIM, 0.4)))


SAMPLERS = {
    "hmc": (hmc(0.4, 4), blackjax_hmc),
    "mala": (mala(0.4), blackjax_mala),
    "random walk": (random_walk(0.4), blackjax_walk),
}


def starts(chains=CHAINS, dim=DIM):
    return jax.random.normal(jax.random.key(1), (chains, dim))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_marginal_chains_are_bitwise_plain_blackjax(name, monkeypatch):
    """A loop written with BlackJAX alone, one density at a time.

    Not compiled: in another program a compiler may fuse, and so round, differently, and
    on some processors it does.
    """
    # BlackJAX's MALA passes a plain number here, which only a compiled call takes.
    product = blackjax.util.linear_map
    monkeypatch.setattr(
        blackjax.util,
        "linear_map",
        lambda a, b, **options: product(jnp.asarray(a), b, **options),
    )
    sampler, reference = SAMPLERS[name]
    algorithm = cva(sampler, tilted)
    densities = {"plus": tilted, "minus": mirror(tilted), "control": standard_normal}
    with jax.disable_jit():
        _, trace = record(KEY, algorithm, start(algorithm, starts()), 5)
        for chain, density in densities.items():
            single, sign = reference(density), -1 if chain == "minus" else 1
            states = jax.vmap(single.init)(sign * starts())
            for i in range(5):
                keys = jax.random.split(jax.random.fold_in(KEY, i), CHAINS)
                states, _ = jax.vmap(single.step)(keys, states)
                found = getattr(trace, chain)[i]
                assert np.array_equal(found, sign * states.position), chain
    assert not np.array_equal(trace.plus, trace.control)
    assert not np.array_equal(trace.plus, trace.minus)


def test_states_are_named_tuples():
    """They can be read by name, replaced, pickled, and pass through JAX."""
    algorithm = cva(hmc(0.4, 2), tilted)
    state, info = algorithm.step(KEY, algorithm.init(jnp.ones(DIM)))
    assert state._fields == info._fields == ("plus", "minus", "control")
    assert type(state) is type(info) is coupled("plus", "minus", "control")
    assert coupled("plus", "minus") is not type(state)
    for back in (pickle.loads(pickle.dumps(state)), jax.jit(lambda s: s)(state)):
        assert type(back) is type(state)
        assert np.array_equal(back.minus.position, state.minus.position)
    moved = state._replace(minus=state.plus)
    assert moved.minus is state.plus and moved.control is state.control


def test_shared_uniform_and_momentum():
    """One target, one start: coupled chains can never part."""
    single = hmc(0.9, 3)(tilted)
    algorithm = couple(plus=single, other=single)
    states = start(algorithm, starts())
    _, sums = run(
        KEY,
        algorithm,
        states,
        STEPS,
        (empty_rates(states), lambda s, _, i: add_rates(s, i)),
    )
    rates = sums.means()
    assert rates["decoupling"] == {"other": 0.0}
    assert (
        0.3 < rates["acceptance"]["plus"] < 0.97
    )  # there are rejections to disagree on


@pytest.mark.slow
def test_chains_contract_and_unshared_uniforms_prevent_it():
    """The distance falls to rounding; with separate uniforms it cannot."""
    target = logistic_regression()
    latent = pull_back(
        target.logdensity, laplace(target.logdensity, jnp.zeros(target.dim))
    )
    single = hmc(0.5, 3)(latent)
    z = jax.random.normal(jax.random.key(3), (2, 64, target.dim))
    pair = couple(first=single, second=single)

    def unshared_step(key, states):
        """The same momentum, but an independent Metropolis uniform for the second."""
        moved, _ = single.step(key, states.first)
        kernel = blackjax.hmc.build_kernel(
            build_proposal=lambda *a, **k: reseeded(
                blackjax.mcmc.hmc.hmc_proposal(*a, **k)
            )
        )

        def reseeded(generate):
            return lambda k, state: generate(jax.random.fold_in(k, 99), state)

        ones = jnp.ones(target.dim)
        other, _ = kernel(key, states.second, latent, 0.5, ones, 3)
        return states._replace(first=moved, second=other), ()

    unshared = SamplingAlgorithm(pair.init, unshared_step)
    left = {}
    for name, algorithm in {"shared": pair, "unshared": unshared}.items():
        states = start(pair, z[0])._replace(second=start(pair, z[1]).second)
        _, trace = record(KEY, algorithm, states, 80)
        gap = np.linalg.norm(trace.first - trace.second, axis=-1)
        left[name] = gap[-10:].mean()
    assert left["shared"] < 1e-3 < 1e-1 < left["unshared"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "integrator",
    [
        integrators.velocity_verlet,
        integrators.mclachlan,
        integrators.yoshida,
        integrators.omelyan,
    ],
)
def test_every_integrator_on_pytrees_with_jitter(integrator):
    """A pytree position gives the chains of the flat vector: those of all schemes."""

    def on_tree(position):
        return tilted(jnp.concatenate([position["a"], position["b"][None]]))

    flat = starts()
    tree = {"a": flat[:, :2], "b": flat[:, 2]}
    sampler = hmc(0.3, 2, jitter=0.4, integrator=integrator)
    traces = []
    for density, position in [(on_tree, tree), (tilted, flat)]:
        algorithm = cva(sampler, density)
        traces.append(record(KEY, algorithm, start(algorithm, position), 20)[1])
    for chain, flat_chain in zip(*traces, strict=True):
        joined = np.concatenate([chain["a"], chain["b"][..., None]], axis=-1)
        np.testing.assert_allclose(joined, flat_chain, atol=2e-4)


def test_jitter_is_shared():
    single = hmc(0.4, 3, jitter=0.5)(tilted)
    algorithm = couple(plus=single, other=single)
    _, trace = record(KEY, algorithm, start(algorithm, starts()), 20)
    assert np.array_equal(trace.plus, trace.other)
    without = couple(plus=hmc(0.4, 3)(tilted))
    _, steady = record(KEY, without, start(without, starts()), 20)
    assert not np.allclose(steady.plus, trace.plus)


def test_mala_is_one_leapfrog_step():
    x = starts()[0]
    one, other = mala(0.4)(tilted), hmc(0.4, 1)(tilted)
    for key in jax.random.split(KEY, 10):
        a, _ = one.step(key, one.init(x))
        b, _ = other.step(key, other.init(x))
        np.testing.assert_allclose(a.position, b.position, atol=1e-6)


def counted(density):
    """A density and the number of times its gradient was evaluated at run time."""
    calls = []

    @jax.custom_vjp
    def watched(x):
        return density(x)

    def forward(x):
        jax.debug.callback(lambda: calls.append(1))
        return jax.value_and_grad(density)(x)

    watched.defvjp(forward, lambda slope, g: (g * slope,))
    return watched, calls


@pytest.mark.parametrize(
    ("sampler", "per_step"), [(hmc(0.3, 5), 5), (mala(0.3), 1), (random_walk(0.3), 0)]
)
@pytest.mark.parametrize(
    ("scheme", "target_chains"), [(antithetic, 2), (control, 1), (cva, 2)]
)
def test_no_gradient_is_wasted(sampler, per_step, scheme, target_chains):
    """Leapfrog steps x chains that target P; none for the bookkeeping."""
    density, calls = counted(tilted)
    algorithm = scheme(sampler, density)
    state = algorithm.init(jnp.ones(DIM))
    jax.effects_barrier()
    step = jax.jit(algorithm.step)
    calls.clear()
    for key in jax.random.split(KEY, 4):
        state, _ = step(key, state)
    jax.effects_barrier()
    assert len(calls) == 4 * per_step * target_chains


def test_one_compilation_for_any_number_of_steps():
    traced = []

    def density(x):
        traced.append(1)
        return tilted(x)

    algorithm = couple(plus=hmc(0.3, 2)(density))
    states = start(algorithm, starts())
    states, _ = run(KEY, algorithm, states, 10)
    before = len(traced)
    for num_steps in (7, 40, 100):
        states, _ = run(KEY, algorithm, states, num_steps)
    assert len(traced) == before > 0


def mean_position(sums, states, infos):
    return sums + states.plus.position.mean(0)


@pytest.mark.slow
def test_blocks_and_pieces_do_not_change_the_chains():
    """A run that goes on, also from the disk, is the run that never stopped."""
    algorithm = antithetic(hmc(0.3, 2), tilted)
    states, fold = start(algorithm, starts()), (jnp.zeros(DIM), mean_position)
    one, total = run(KEY, algorithm, states, 30, fold, num_blocks=1)
    many, rows = run(KEY, algorithm, states, 30, fold, num_blocks=7)
    final, trace = record(KEY, algorithm, states, 30)
    begun = begin_run(states, fold[0])
    piece = add_block(KEY, begun, algorithm, fold, 11)
    piece = pickle.loads(pickle.dumps(jax.device_get(piece)))
    piece = add_block(KEY, piece, algorithm, fold, 19)
    assert (begun.steps, piece.steps) == (0, 30) and len(begun.rows) == 0
    for name in states._fields:
        expected = getattr(trace, name)[-1]
        for found in (one, many, final, piece.states):
            assert np.array_equal(getattr(found, name).position, expected)
    assert rows.shape == (7, DIM) and piece.rows.shape == (2, DIM)
    direct = trace.plus.mean(1)
    cut = [direct[:11].sum(0), direct[11:].sum(0)]
    np.testing.assert_allclose(piece.rows, cut, rtol=1e-4, atol=1e-4)
    for sums in (total, rows):
        np.testing.assert_allclose(sums.sum(0), direct.sum(0), rtol=1e-4, atol=1e-4)


def test_runs_that_start_anew_repeat_their_random_numbers():
    """The number of steps taken matters: without it the second piece is another."""
    algorithm = couple(plus=hmc(0.3, 2)(tilted))
    fold = jnp.zeros(DIM), mean_position
    begun = begin_run(start(algorithm, starts()), fold[0])
    piece = add_block(KEY, begun, algorithm, fold, 5)
    on = add_block(KEY, piece, algorithm, fold, 5)
    again = add_block(KEY, piece._replace(steps=0), algorithm, fold, 5)
    assert not np.allclose(on.states.plus.position, again.states.plus.position)


def test_totals_are_added_in_double_precision():
    """2^24 + 1 is no float32."""
    algorithm = couple(plus=hmc(0.3, 2)(tilted))
    zero = {"large": Total(jnp.zeros(2)), "row": jnp.zeros(())}

    def update(sums, states, infos):
        large = sums["large"].value + jnp.array([2.0**23, 0.5])
        return {"large": Total(large), "row": sums["row"] + 1}

    states = start(algorithm, starts())
    _, sums = run(KEY, algorithm, states, 3, (zero, update), num_blocks=3)
    assert sums["large"].value.dtype == np.float64
    assert sums["large"].value.tolist() == [3 * 2.0**23, 1.5]
    assert sums["row"].tolist() == [1, 1, 1]


@pytest.mark.slow
def test_rates_count_each_chain():
    """Against the decisions stored at every step."""
    algorithm = cva(hmc(0.9, 3), tilted)
    states = start(algorithm, starts())
    fold = empty_rates(states), lambda sums, _, infos: add_rates(sums, infos)
    _, rates = run(KEY, algorithm, states, 50, fold, num_blocks=5)
    _, infos = record(KEY, algorithm, states, 50, lambda _, infos: infos)
    assert rates.steps.tolist() == [10] * 5
    assert set(rates.decoupled) == {"minus", "control"}
    for name, info in infos._asdict().items():
        accepted = rates.accepted[name].sum(0)
        assert accepted.tolist() == info.is_accepted.sum(0).tolist()
        assert 0 < accepted.sum() < 50 * CHAINS
        probability = info.acceptance_rate.sum(0)
        np.testing.assert_allclose(rates.acceptance[name].sum(0), probability, 1e-4)
    for name, parted in rates.decoupled.items():
        differs = getattr(infos, name).is_accepted != infos.plus.is_accepted
        assert parted.sum(0).tolist() == differs.sum(0).tolist()
        mean = rates.means()["decoupling"][name]
        assert mean == pytest.approx(differs.mean()) and mean > 0


def test_divergences_are_counted_once_a_step():
    """A wall that every trajectory of two of three chains runs into."""

    def wall(x):
        return jnp.where(jnp.abs(x).sum() > 1e-3, -jnp.inf, -0.5 * jnp.sum(x**2))

    algorithm = couple(
        plus=hmc(0.5, 2)(wall), a=hmc(0.5, 2)(wall), b=hmc(0.5, 2)(tilted)
    )
    states = start(algorithm, jnp.zeros((4, DIM)))
    fold = empty_rates(states), lambda sums, _, infos: add_rates(sums, infos)
    _, rates = run(KEY, algorithm, states, 6, fold)
    assert rates.divergent.sum(0).tolist() == [6] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_programs_die_with_the_sampler(name):
    """With all that they were made of, however the sampler was used."""

    def use():
        def density(x):
            return tilted(x)

        algorithm = antithetic(SAMPLERS[name][0], density)
        states = start(algorithm, starts())
        fold = fold_series(pair_series(lambda x: x), states)
        states, _ = run(KEY, algorithm, states, 2, fold, num_blocks=1)
        record(KEY, algorithm, states, 2)
        return [weakref.ref(f) for f in (density, *algorithm, fold[1])]

    references = use()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


@pytest.mark.slow
def test_many_samplers_leave_no_programs_behind():
    """A process may make as many samplers as it likes."""

    def held_after(number):
        for _ in range(number):
            algorithm = couple(plus=random_walk(0.1)(lambda x: -x @ x))
            run(KEY, algorithm, start(algorithm, starts()), 2)
        kept = len(get_backend().live_executables())
        del algorithm
        gc.collect()
        return kept, len(get_backend().live_executables()), len(jax.live_arrays())

    (kept, *few), (_, *many) = held_after(1), held_after(30)
    assert few == many
    assert kept > few[0]  # programs are seen while their sampler lives


def test_a_wrapper_does_not_inherit_programs():
    """``functools.wraps`` copies attributes; the wrapper is still another function."""
    algorithm = couple(plus=random_walk(0.1)(tilted))
    states = start(algorithm, starts())
    walked, _ = run(KEY, algorithm, states, 2)

    @functools.wraps(algorithm.step)
    def stay(key, state):
        return state, algorithm.step(key, state)[1]

    stayed, _ = run(KEY, SamplingAlgorithm(algorithm.init, stay), states, 2)
    assert np.array_equal(stayed.plus.position, starts())
    assert not np.array_equal(walked.plus.position, starts())


def test_methods_of_two_objects_do_not_share_programs():
    """Nor do they need a place to keep them."""

    class Shift:
        def __init__(self, by):
            self.by = by

        def move(self):
            return self.by

    one, two = Shift(1).move, Shift(2).move
    assert [compiled(f, "move", lambda f=f: f)() for f in (one, two, one)] == [1, 2, 1]
    assert compiled(len, "builtin", lambda: max) is max


def test_every_step_and_chain_has_its_own_key():
    keys = [jax.random.key_data(step_keys(KEY, i, 8)) for i in range(8)]
    assert len(np.unique(np.concatenate(keys), axis=0)) == 64


@pytest.mark.parametrize("sampler", [hmc(0.3, 5), mala(0.3), random_walk(0.3)])
def test_lowers_for_cuda(sampler):
    algorithm = cva(sampler, tilted)
    states = start(algorithm, starts())

    def kernel(key, states, first, last):
        return take_steps(key, states, (), first, last, algorithm.step, keep_nothing)

    exported = jax.export.export(jax.jit(kernel), platforms=["cuda"])
    assert exported(KEY, states, 0, 10).platforms == ("cuda",)


BAD_SETTINGS = [
    (lambda: hmc(0.0, 5), "step_size must be a positive"),
    (lambda: hmc(-0.1, 5), "step_size must be a positive"),
    (lambda: hmc(float("nan"), 5), "step_size must be a positive"),
    (lambda: hmc(0.1, 0), "num_integration_steps must be a positive"),
    (lambda: mala(0.0), "step_size must be a positive"),
    (lambda: random_walk(float("inf")), "step_size must be a positive"),
]


@pytest.mark.parametrize(("make", "message"), BAD_SETTINGS)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("density", "positions", "message"),
    [
        (tilted, jnp.full((4, 3), jnp.nan), "4 of 4 chains start"),
        (tilted, starts().at[2, 1].set(jnp.inf), "1 of 16 chains start"),
        (lambda x: jnp.log(x).sum(), -jnp.ones((5, 2)), "5 of 5 chains .*logdensity"),
        (tilted, jnp.array(1.0), "one leading axis"),
        (tilted, jnp.zeros((0, 3)), "one leading axis"),
        (
            lambda p: tilted(p["a"]),
            {"a": jnp.ones((4, 3)), "b": jnp.ones(3)},
            "same length",
        ),
    ],
)
def test_bad_starts(density, positions, message):
    with pytest.raises(ValueError, match=message):
        start(couple(plus=hmc(0.3, 2)(density)), positions)


def test_no_steps_is_an_error():
    algorithm = couple(plus=hmc(0.3, 2)(tilted))
    with pytest.raises(ValueError, match="num_steps must be a positive"):
        run(KEY, algorithm, start(algorithm, starts()), 0)
