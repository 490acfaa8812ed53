"""What one value and gradient over 256 chains costs, against its floor.

Run ``python benchmarks/gradients.py``. Every formulation takes a few small steps up its
gradient in one compiled loop, as a sampler would. They alternate within one run, and a
ratio is the median, over the alternations, of a formulation's time to its floor's.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from swindles import targets

NUM_CHAINS = 256
Step = Callable[[Array], tuple[Array, Array]]


def looped(step: Step, length: int) -> Callable[[Array], tuple[Array, Array]]:
    """Compile a loop that follows a step's gradient and adds its values up."""

    def body(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        value, gradient = step(carry[0])
        return (carry[0] + 1e-6 * gradient, carry[1] + value), None

    def loop(x: Array) -> tuple[Array, Array]:
        return jax.lax.scan(body, (x, jnp.zeros(len(x))), length=length)[0]

    return jax.jit(loop)


def compare(
    title: str, steps: dict[str, Step], x: Array, rounds: int, length: int
) -> None:
    """Print times and ratios to the first one, the floor."""
    functions = {name: looped(step, length) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(x))
            seconds[name].append((time.perf_counter() - start) / length)
    table = np.array(list(seconds.values()))[:, 1:]
    ratios = np.median(table / table[0], axis=1)
    print(f"\n{title}\n{'':44}{'least ms':>10}{'median ratio':>14}")
    for name, row, ratio in zip(functions, table, ratios, strict=True):
        print(f"{name:44}{row.min() * 1e3:10.2f}{ratio:14.2f}")


def batched(logdensity: Callable[[Array], Array]) -> Step:
    """Value and gradient of all chains."""
    return jax.vmap(jax.value_and_grad(logdensity))


def no_value(gradient: Callable[[Array], Array]) -> Step:
    """A step that costs no more than the function given."""
    return lambda x: (jnp.zeros(len(x)), gradient(x))


def shared_sum(u: Array) -> tuple[Array, Array]:
    """Sum of log sigmoids and its slope from one exponential, a logarithm each."""
    small = jnp.exp(-jnp.abs(u))
    slope = jnp.where(u > 0, small, 1) / (1 + small)
    return jnp.sum(jnp.minimum(u, 0) - jnp.log1p(small)), slope


@jax.custom_jvp
def shared_log_sigmoid(u: Array) -> Array:
    """Sum of log sigmoids, sharing the exponential but no logarithms."""
    return shared_sum(u)[0]


@shared_log_sigmoid.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    value, slope = shared_sum(*primals)
    return value, slope @ tangents[0]


def logistic(rounds: int) -> None:
    """Compare formulations of the logistic regression."""
    covariates, labels = targets.german_credit()
    signed = jnp.asarray(np.where(labels[:, None], covariates, -covariates))
    turned = signed.T

    def plain(logits: Callable[[Array], Array]) -> Step:
        return batched(lambda w: jax.nn.log_sigmoid(logits(w)).sum() - w @ w / 2)

    steps = {
        "two matrix products (floor)": no_value(lambda w: (w @ turned) @ signed),
        "the same as matrix @ w": no_value(jax.vmap(lambda w: (signed @ w) @ signed)),
        "the products and a sigmoid, no value": no_value(
            lambda w: jax.nn.sigmoid(-(w @ turned)) @ signed
        ),
        "automatic, matrix @ w": plain(lambda w: signed @ w),
        "automatic, w @ matrix.T": plain(lambda w: w @ turned),
        "shared exponential, w @ matrix.T": batched(
            lambda w: shared_log_sigmoid(w @ turned) - w @ w / 2
        ),
        "swindles.targets.logistic_regression": batched(
            targets.logistic_regression().logdensity
        ),
    }
    w = 0.1 * jax.random.normal(jax.random.key(0), (NUM_CHAINS, signed.shape[1]))
    compare("Logistic regression, 256 chains", steps, w, rounds, length=20)


def item_response(rounds: int) -> None:
    """Compare formulations of the item response model."""
    student, question, right = targets.student_answers()
    asked, correct = np.zeros((2, 400, 100), np.float32)
    asked[student, question] = 1
    correct[student, question] = right

    def prior(x: Array) -> Array:
        return 0.75 * x[-1] - x @ x / 2

    def gathered(x: Array) -> Array:
        logits = x[student] + x[-1] - x[400 + question]
        return jax.nn.log_sigmoid(jnp.where(right, logits, -logits)).sum() + prior(x)

    def dense(x: Array) -> Array:
        logits = x[:400, None] + x[-1] - x[400:-1]
        return jnp.sum(correct * logits - asked * jax.nn.softplus(logits)) + prior(x)

    def exponentials(x: Array) -> Array:
        sums = jnp.exp(x[:400, None] - x[400:-1]).sum(axis=1)
        return jnp.append(sums, jnp.zeros(101))

    steps = {
        "40000 exponentials, summed (floor)": no_value(jax.vmap(exponentials)),
        "automatic, gathered pairs": batched(gathered),
        "automatic, dense grid and mask": batched(dense),
        "swindles.targets.item_response": batched(targets.item_response().logdensity),
    }
    x = 0.5 * jax.random.normal(jax.random.key(0), (NUM_CHAINS, 501))
    compare("Item response, 256 chains", steps, x, rounds, length=2)


if __name__ == "__main__":
    logistic(rounds=40)
    item_response(rounds=9)
