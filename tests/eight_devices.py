"""What test_scale.py wants to know of runs on 1, 2, 4 and 8 devices: one process.

Prints what it found as JSON, in its last line.
"""

import json
from functools import partial

import swindles

if __name__ == "__main__":
    swindles.use_cores(8)

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.base import SamplingAlgorithm
from jax.sharding import AbstractMesh, NamedSharding

from swindles import scale
from swindles.antithetic import fold_series, mirror
from swindles.control import control_series, control_values, fold_feature_products
from swindles.coupling import (
    add_block,
    begin_run,
    block_program,
    couple,
    hmc,
    record,
    run,
    start,
)
from swindles.models import Model, make_problem
from swindles.schemes import SCHEMES, start_mirrored, swindle
from swindles.stein import stein_values
from swindles.transport import Evaluator, identity, standard_normal
from swindles.tuning import MALA, tune

KEY = jax.random.key
COUNTS = (1, 2, 4, 8)
DIM, CHAINS = 3, 64
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute")


def tilted(x):
    """A skewed target."""
    return -jnp.sum(jnp.exp(x) - 1.5 * x) - 0.1 * jnp.sum(x**2)


def problem():
    """Means and squares under it."""
    return make_problem(Model(tilted, jnp.zeros(DIM)), lambda x: jnp.append(x, x**2))


def estimates(name, number):
    """What ``swindle`` says on so many devices: means and errors."""
    with scale.use_devices(number):
        fixed = hmc(0.4, 3), problem(), CHAINS, 100, 60
        found = swindle(KEY(0), name, *fixed).estimate
    return found.mean.tolist(), found.mcse.tolist()


def tuned(number):
    """What ``tune`` says on so many devices."""
    with scale.use_devices(number):
        return tune(KEY(0), "plain", problem(), MALA, 32, budget=1e5).step_size


def points(number):
    """Log densities at 300 points, in batches of 64 on each device."""
    with scale.use_devices(number):
        found = Evaluator(tilted, DIM)(
            identity(DIM), np.linspace(-1, 1, 300 * DIM).reshape(300, DIM)
        )
    return found.logdensity.tolist()


def draws(number):
    """Every chain writes down what its key gives."""

    def step(key, state):
        return jax.random.uniform(key), ()

    algorithm = SamplingAlgorithm(lambda x, _=None: x, step)
    with scale.use_devices(number):
        _, rows = record(
            KEY(5), algorithm, jnp.zeros(CHAINS), 7, lambda x, _: x, progress=False
        )
    return rows


def draws_expected():
    """The same, written with JAX alone."""
    keys = [jax.random.split(jax.random.fold_in(KEY(5), i), CHAINS) for i in range(7)]
    return np.stack([jax.vmap(jax.random.uniform)(each) for each in keys])


def trace(number, steps=10):
    """Positions of the chains of CVA, and of the same chains by BlackJAX alone."""
    with jax.enable_x64(True), scale.use_devices(number):
        algorithm = SCHEMES["cva"].build(hmc(0.4, 4), tilted)
        z = jax.random.normal(KEY(1), (CHAINS, DIM))
        _, found = record(KEY(2), algorithm, start(algorithm, z), steps, progress=False)
        return found


def trace_expected(steps=10):
    """The largest difference between chains on 8 devices and those of BlackJAX."""
    found, worst = trace(8), 0.0
    with jax.enable_x64(True):
        z = jax.random.normal(KEY(1), (CHAINS, DIM))
        densities = tilted, mirror(tilted), standard_normal
        for name, density in zip(found._fields, densities, strict=True):
            single = blackjax.hmc(density, 0.4, jnp.ones(DIM), 4)
            sign, move = -1 if name == "minus" else 1, jax.jit(jax.vmap(single.step))
            states = jax.vmap(single.init)(sign * z)
            for i in range(steps):
                keys = jax.random.split(jax.random.fold_in(KEY(2), i), CHAINS)
                states, _ = move(keys, states)
                apart = getattr(found, name)[i] - sign * states.position
                worst = max(worst, float(np.abs(apart).max()))
    return worst


def cva_parts(dim=DIM, chains=CHAINS, density=tilted):
    """An algorithm, states and sums of CVA."""
    algorithm = SCHEMES["cva"].build(hmc(0.4, 4), density)
    states = start_mirrored(algorithm, jax.random.normal(KEY(1), (chains, dim)))
    observe, blank = partial(control_values, jnp.square), np.zeros(dim)
    series = control_series(jnp.square, observe, blank, blank)
    return algorithm, states, fold_series(series, states)


def stein_parts():
    """The same with the sums that coefficients of Stein features are learned from."""
    algorithm = SCHEMES["antithetic"].build(hmc(0.4, 4), tilted)
    states = start_mirrored(algorithm, jax.random.normal(KEY(1), (CHAINS, DIM)))
    observe, mean = partial(stein_values, "full"), np.zeros(9)
    fold = fold_feature_products(jnp.square, observe, mean, states)
    return algorithm, states, fold


def own_parts():
    """The same with sums of one's own, which add over the chains at every step."""
    algorithm = couple(plus=hmc(0.4, 4)(tilted))
    states = start(algorithm, jnp.ones((CHAINS, DIM)))

    def update(sums, states, infos):
        x = sums["x"] + states.plus.position.sum(0)
        return {"steps": sums["steps"] + 1, "x": x}

    return algorithm, states, ({"steps": jnp.zeros(()), "x": jnp.zeros(DIM)}, update)


def compiled_block(parts, number):
    """The compiled program of a block on so many devices."""
    algorithm, states, (zero, update) = parts
    with scale.use_devices(number):
        chains = len(jax.tree.leaves(states)[0])
        mesh = scale.chain_mesh(chains)
    program = block_program(algorithm, update, mesh=mesh)
    sums = scale.put_chains(mesh, jax.tree.map(jnp.array, zero), scale.sum_rules(zero))
    return program.lower(KEY(0), scale.put_chains(mesh, states), sums, 0, 10).compile()


def collectives(text):
    """Collectives in a compiled program: at its end, and elsewhere."""
    entry, found = False, {"end": 0, "elsewhere": 0}
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            entry = line.startswith("ENTRY")
        if any(f" {name}" in line and "(" in line for name in COLLECTIVES):
            found["end" if entry else "elsewhere"] += 1
    return found


def memory(number):
    """Bytes that a device needs for a block of CVA, D = 501, 4096 chains."""
    found = compiled_block(
        cva_parts(501, 4096, lambda x: -jnp.sum(jnp.cosh(x))), number
    ).memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )


def lowered_for_cuda(parts):
    """Devices of a block that is lowered for GPUs, and whether it has a loop."""
    algorithm, states, (zero, update) = parts
    mesh = AbstractMesh((8,), (scale.AXIS,))
    program = block_program(algorithm, update, mesh=mesh)

    def there(tree, rules):
        leaves, tree = jax.tree.flatten(tree)
        places = [
            NamedSharding(mesh, scale.chain_axis(np.ndim(x), rule))
            for x, rule in zip(leaves, rules, strict=True)
        ]
        each = [
            jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=place)
            for x, place in zip(leaves, places, strict=True)
        ]
        return jax.tree.unflatten(tree, each)

    first = [0] * len(jax.tree.leaves(states))
    key = there(KEY(0), ["same"])
    inputs = key, there(states, first), there(zero, scale.sum_rules(zero))
    exported = jax.export.export(program, platforms=["cuda"])(*inputs, 0, 10)
    return exported.nr_devices, "stablehlo.while" in exported.mlir_module()


def words(call):
    """What a call that is refused says."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def own_sums(number):
    """Sums of one's own, which are left to the compiler."""
    algorithm, states, fold = own_parts()
    with scale.use_devices(number):
        _, sums = run(KEY(0), algorithm, states, 10, fold, 2, progress=False)
    return {name: x.tolist() for name, x in sums.items()}


def refused():
    """What is said to numbers that do not fit."""
    algorithm, states, fold = cva_parts(chains=100)
    with scale.use_devices(8):
        block = partial(add_block, KEY(0), begin_run(states, fold[0]), algorithm, fold)
        even = scale.even_chains(128)
        return words(lambda: block(1)), even


def by_default():
    """Without a word about devices: what is spread, and over how many."""
    meshes = [scale.chain_mesh(n) for n in (64, 128, 4096)]
    with scale.use_devices(3):
        even = scale.even_chains(128)
    return [mesh.size if mesh else 1 for mesh in meshes], scale.even_chains(128), even


def words_too_late():
    """What is said when JAX has already started."""
    try:
        swindles.use_cores(5)
    except RuntimeError as error:
        return str(error)


def main() -> None:
    """Print what was found."""
    expected = draws_expected()
    blocks = {"cva": cva_parts(), "stein": stein_parts(), "own": own_parts()}
    found = {
        "estimates": {
            "cva": [estimates("cva", n) for n in COUNTS],
            "stein": [estimates("antithetic+stein", n) for n in (1, 8)],
        },
        "tuned": [tuned(n) for n in (1, 8)],
        "points": [points(n) for n in (1, 8)],
        "draws": [bool(np.array_equal(draws(n), expected)) for n in COUNTS],
        "trace": trace_expected(),
        "own": [own_sums(n) for n in (1, 8)],
        "cuda": [lowered_for_cuda(blocks[name]) for name in ("cva", "stein")],
        "refused": refused(),
        "default": by_default(),
        "too late": words_too_late(),
    }
    jax.config.update("jax_disable_most_optimizations", False)
    found["collectives"] = {
        name: collectives(compiled_block(parts, 8).as_text())
        for name, parts in blocks.items()
    }
    found["memory"] = [memory(n) for n in (1, 8)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
