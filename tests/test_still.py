"""The chains in the browser: their JavaScript against BlackJAX, and their drawings."""

import json
import re

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import still

from swindles import style, targets

SEEDS = list(range(101, 111))


@pytest.fixture(scope="module")
def call():
    """Evaluate JavaScript that knows the chains; what it gives goes through JSON."""
    context = still.browser()

    def evaluate(expression, **values):
        names, given = ", ".join(values), json.dumps(list(values.values()))
        code = f"JSON.stringify((({names}) => {expression})(...{given}))"
        return json.loads(context.eval(code))

    return evaluate


def steps_of_blackjax(keys, starts, num_steps, step_size):
    """Single steps from many starts, and the uniforms that decided over them."""
    banana, kernel = targets.banana(), blackjax.hmc.build_kernel()

    def step(key, start, num):
        state = blackjax.hmc.init(start, banana.logdensity)
        new, info = kernel(key, state, banana.logdensity, step_size, jnp.ones(2), num)
        uniform = jax.random.uniform(jax.random.split(key)[1])
        return new.position, info, uniform

    return jax.jit(jax.vmap(step))(keys, starts, num_steps)


def test_steps_are_those_of_blackjax(call):
    step_size = call("coupledHMC.stepSize")
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        along, above = random.normal(size=(2, 200))
        starts = np.stack([1.5 * along, 1.125 * along**2 + above], 1)  # the banana's
        nums = np.arange(200) % 20 + 1
        keys = jax.random.split(jax.random.key(1), 200)
        ended, info, uniforms = steps_of_blackjax(keys, starts, nums, step_size)
    momenta = np.asarray(info.momentum)
    here = call(
        "x.map((start, i) => coupledHMC.move(start, p[i], u[i], n[i]))",
        x=starts.tolist(),
        p=momenta.tolist(),
        u=np.asarray(uniforms).tolist(),
        n=nums.tolist(),
    )
    accepted = np.array([step["accepted"] for step in here])
    assert (accepted == np.asarray(info.is_accepted)).all()
    assert set(accepted) == {True, False}
    close = {"rtol": 1e-10, "atol": 1e-10}
    moved = [step["position"] for step in here]
    np.testing.assert_allclose(moved, ended, **close)
    proposed = [step["points"][-1] for step in here]
    np.testing.assert_allclose(proposed, info.proposal.position, **close)
    probability = [step["probability"] for step in here]
    np.testing.assert_allclose(probability, info.acceptance_rate, **close)


def test_a_trajectory_that_flies_away_is_refused(call):
    step = call("coupledHMC.move([40, -40], [0, 0], 0, 20)")
    assert not step["accepted"] and step["probability"] == 0
    assert step["position"] == [40, -40]


def test_random_numbers(call):
    """Moments, in units of their standard errors."""
    count = 100_000
    made = "Array.from({length: n / 2}, g.normals).flat()"
    normals = np.array(
        call(f"{{const g = coupledHMC.generator(7); return {made}}}", n=count)
    )
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (4, 3, 96)]:
        error = np.sqrt(variance / count)
        assert abs((normals**power).mean() - mean) < 4 * error
    assert abs((normals[::2] * normals[1::2]).mean()) < 4 / np.sqrt(count / 2)
    made = "Array.from({length: n}, g.uniform)"
    uniform = np.array(
        call(f"{{const g = coupledHMC.generator(8); return {made}}}", n=count)
    )
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 4 * np.sqrt(1 / 12 / count)


RUN = """{
    const pair = coupledHMC.start(seed);
    for (let i = 0; i < steps; i++) coupledHMC.step(pair, how, length);
    return pair;
}"""


def first_momenta(call, how):
    """The momenta that both chains get at their first step, from where it leads."""
    chains = call(RUN, seed=3, steps=1, how=how, length=1)["chains"]
    step_size, force = (
        call("coupledHMC.stepSize"),
        jax.grad(targets.banana().logdensity),
    )
    found = []
    for chain in chains:
        start, end = np.array(chain["points"])
        found.append(
            (end - start) / step_size - step_size / 2 * np.asarray(force(start))
        )
    return found


def test_momenta_are_what_the_reader_chose(call):
    first, second = first_momenta(call, "same")
    np.testing.assert_allclose(second, first, atol=1e-5)
    opposed, opposite = first_momenta(call, "opposite")
    np.testing.assert_allclose(opposite, -opposed, atol=1e-5)
    alone, own = first_momenta(call, "own")
    assert np.linalg.norm([own - alone, own + alone], axis=1).min() > 0.01
    np.testing.assert_allclose([opposed, alone], [first, first], atol=1e-5)


def last_distances(call, how, length):
    runs = [call(RUN, seed=s, steps=150, how=how, length=length) for s in SEEDS]
    return np.array([run["distances"][-1] for run in runs])


def test_what_the_chapter_tells_to_look_for(call):
    assert last_distances(call, "same", 4).max() < 1e-6
    assert last_distances(call, "opposite", 4).min() > 0.01
    assert last_distances(call, "own", 4).min() > 0.01
    assert np.median(last_distances(call, "same", 20)) > 0.01


def numbers(drawing):
    return np.array(re.findall(r"(?<![\w#])-?\d+(?:\.\d+)?", drawing), float)


def test_still_images_are_what_the_browser_draws():
    for name, drawing in still.draw().items():
        kept = (still.STATIC / name).read_text(encoding="utf-8")
        assert (
            re.sub(r"[\d.-]+", "", drawing).strip()
            == re.sub(r"[\d.-]+", "", kept).strip()
        )
        np.testing.assert_allclose(numbers(drawing), numbers(kept), atol=0.15)


@pytest.mark.parametrize("steps", [0, 5, 400])
def test_drawings(call, steps):
    """Of any run: no number is missing, and colours are those of the other figures."""
    pair = call(RUN, seed=1, steps=steps, how="same", length=4)
    assert len(pair["distances"]) == min(steps, call("coupledHMC.kept")) + 1
    pair["distances"][-1] = 0  # they may meet to the last bit
    paths = call("coupledPicture.drawPaths(pair)", pair=pair)
    distance = call("coupledPicture.drawDistance(pair)", pair=pair)
    assert not re.search("NaN|Infinity|undefined", paths + distance)
    used = set(re.findall(r"#\w{6}", paths + distance))
    assert used == {style.COLORS[name] for name in ("plus", "minus", "plain")}
