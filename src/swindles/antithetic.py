"""Antithetic: a chain and its mirror image.

Mirrored from book/antithetic.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.base import SamplingAlgorithm
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Float

from swindles.accuracy import (
    Estimate,
    Moments,
    add_step,
    block_means,
    empty_moments,
    summarize,
    target_variance,
)
from swindles.coupling import (
    LogDensity,
    Rates,
    Sampler,
    add_rates,
    compiled,
    couple,
    empty_rates,
)


def negate(position: Any) -> Any:
    """The mirror image of a position (a vector or a pytree)."""
    return jax.tree.map(jnp.negative, position)


def mirror(logdensity: LogDensity) -> LogDensity:
    """The density of -x when x has density ``logdensity``.

    Examples
    --------
    >>> float(mirror(lambda x: 3 * x)(jnp.array(2.0)))
    -6.0
    """
    return lambda position: logdensity(negate(position))


# What changes its sign under the mirror, in the states and infos of BlackJAX.
SIGNED = ("position", "momentum", "logdensity_grad")


def reflect(state: Any) -> Any:
    """A state, or an info, of a chain seen in the mirror.

    Examples
    --------
    >>> from blackjax.mcmc.hmc import HMCState
    >>> state = HMCState(jnp.array(1.0), jnp.array(5.0), jnp.array(-2.0))
    >>> [float(x) for x in reflect(state)]  # position, log density, gradient
    [-1.0, 5.0, 2.0]
    """
    changed = {}
    for name, value in state._asdict().items():
        if name in SIGNED:
            changed[name] = negate(value)
        elif hasattr(value, "_asdict"):
            changed[name] = reflect(value)
    return state._replace(**changed)


def mirrored(sampler: Sampler) -> Sampler:
    """The sampler that sees the log density, and every momentum, in the mirror.

    Its states hold positions, not their mirror images.

    Examples
    --------
    >>> from swindles.coupling import hmc
    >>> algorithm = mirrored(hmc(0.3, 5))(lambda x: -0.5 * jnp.sum((x - 3) ** 2))
    >>> algorithm.init(jnp.array([5.0])).logdensity.item()
    -2.0
    """

    def reflected(logdensity: LogDensity) -> SamplingAlgorithm:
        algorithm = sampler(mirror(logdensity))

        def init(position: Any, rng_key: Any = None) -> Any:
            return reflect(algorithm.init(negate(position), rng_key))

        def step(rng_key: Any, state: Any) -> tuple[Any, Any]:
            state, info = algorithm.step(rng_key, reflect(state))
            return reflect(state), reflect(info)

        return SamplingAlgorithm(init, step)

    return reflected


def antithetic(sampler: Sampler, logdensity: LogDensity) -> SamplingAlgorithm:
    """HMC-ANTITHETIC, for any sampler: chains "plus" and "minus" under one key.

    Both target ``logdensity``. The momenta of "minus" are those of "plus", negated.

    Examples
    --------
    >>> from swindles.coupling import hmc, start
    >>> algorithm = antithetic(hmc(0.3, 5), lambda x: -0.5 * jnp.sum(x**2))
    >>> start(algorithm, jnp.ones((4, 2)))._fields
    ('plus', 'minus')
    """
    return couple(plus=sampler(logdensity), minus=mirrored(sampler)(logdensity))


def plain(sampler: Sampler, logdensity: LogDensity) -> SamplingAlgorithm:
    """No swindle: one chain, called "plus".

    Examples
    --------
    >>> from swindles.coupling import hmc, start
    >>> algorithm = plain(hmc(0.3, 5), lambda x: -0.5 * jnp.sum(x**2))
    >>> start(algorithm, jnp.ones((4, 2)))._fields
    ('plus',)
    """
    return couple(plus=sampler(logdensity))


def evaluate(statistic: Callable, positions: list[Any]) -> Array:
    """The statistic at several positions of every chain: (positions, chains, dim).

    Examples
    --------
    >>> evaluate(lambda x: {"sum": x.sum(), "x": x}, [jnp.ones((4, 2))]).shape
    (1, 4, 3)
    """
    flat = jax.vmap(lambda position: ravel_pytree(statistic(position))[0])
    return jnp.stack([flat(position) for position in positions])


def pair_values(statistic: Callable, states: Any) -> Array:
    """The statistic at X+ and, if there is one, at X-: (1 or 2, chains, dim)."""
    pair = [states.plus, *([states.minus] if hasattr(states, "minus") else [])]
    return evaluate(statistic, [state.position for state in pair])


# From the states of all chains to f(X+) and Z, each (chains, dim); None for Z = f(X+).
Series = Callable[[Any], tuple[Array, Any]]


def pair_series(statistic: Callable) -> Series:
    """Z is the average of the statistic over X+ and, if there is one, X-.

    Examples
    --------
    >>> from swindles.coupling import hmc, start
    >>> algorithm = antithetic(hmc(0.3, 5), lambda x: -0.5 * jnp.sum(x**2))
    >>> plus, swindled = pair_series(jnp.square)(start(algorithm, jnp.ones((4, 2))))
    >>> plus.shape, swindled.shape
    ((4, 2), (4, 2))
    """

    def series(states: Any) -> tuple[Array, Any]:
        values = pair_values(statistic, states)
        return values[0], values.mean(0) if len(values) == 2 else None

    return compiled(statistic, "pair series", lambda: series)


class Sums(NamedTuple):
    """Running sums of any run: from them comes its estimate."""

    plus: Moments  # of f(X+)
    swindled: Any  # Moments of Z; None where Z is f(X+)
    rates: Rates


def mean_at_start(values: Array) -> Array:
    """The mean of a statistic over all positions, used as a center: (dim,).

    ``values`` has shape (..., dim). Raises ValueError if they cannot be averaged.
    """
    if values.shape[-1] == 0 or not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(
            "the statistic must return at least one floating point number for a "
            f"position, got {values.shape[-1]} of type {values.dtype}"
        )
    if not jnp.isfinite(values).all():
        raise ValueError("the statistic is not finite at the start of the chains")
    return values.reshape(-1, values.shape[-1]).mean(0)


def check_statistic(statistic: Callable, states: Any) -> Array:
    """The mean of the statistic over the chains' starts, used as a center: (dim,)."""
    values = jax.jit(lambda states: pair_values(statistic, states))
    return mean_at_start(values(states))


def fold_series(
    series: Series, states: Any, center: ArrayLike | None = None
) -> tuple[Any, Callable]:
    """What to give ``coupling.run`` as ``fold``, to average a series.

    ``center`` is subtracted before anything is summed: a guess of the answer. By
    default it is the average over the chains' starts.

    Examples
    --------
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = antithetic(hmc(0.5, 3), lambda x: -0.5 * jnp.sum(x**2))
    >>> states = start(algorithm, jnp.ones((32, 2)))
    >>> fold = fold_series(pair_series(lambda x: {"mean": x, "square": x**2}), states)
    >>> _, sums = run(jax.random.key(0), algorithm, states, 10, fold, num_blocks=5)
    >>> sums.swindled.total.shape  # blocks, chains, entries of the statistic
    (5, 32, 4)
    """
    plus, swindled = jax.eval_shape(series, states)
    if center is None:
        center = mean_at_start(jax.jit(lambda states: series(states)[0])(states))
    moments = empty_moments(jnp.asarray(center, plus.dtype), len(plus))

    def update(sums: Sums, states: Any, infos: Any) -> Sums:
        plus, swindled = series(states)
        both = None if sums.swindled is None else add_step(sums.swindled, swindled)
        return Sums(add_step(sums.plus, plus), both, add_rates(sums.rates, infos))

    none = None if swindled is None else moments
    same = compiled(series, "update", lambda: update)  # and with it its program
    return Sums(moments, none, empty_rates(states)), same


class Result(NamedTuple):
    """An estimate, and how well the chains behind it were coupled.

    Parameters
    ----------
    estimate
        The expectations, with their errors.
    rho
        Correlation of "plus" with each other chain, or with the features, by name.
    rates
        "acceptance" and "decoupling", by chain.
    beta
        Regression coefficients, if there are any.

    Examples
    --------
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = antithetic(hmc(0.5, 3), lambda x: -0.5 * jnp.sum(x**2))
    >>> states = start(algorithm, jax.random.normal(jax.random.key(0), (32, 2)))
    >>> states, _ = run(jax.random.key(1), algorithm, states, 100)
    >>> fold = fold_series(pair_series(lambda x: x), states)
    >>> _, sums = run(jax.random.key(2), algorithm, states, 100, fold)
    >>> result = estimate_series(sums)
    >>> result.rho["minus"].round(3).tolist(), result.rates["decoupling"]["minus"]
    ([-1.0, -1.0], 0.0)
    """

    estimate: Estimate
    rho: dict[str, Float[np.ndarray, " dim"]]
    rates: dict[str, dict[str, float]]
    beta: Float[np.ndarray, "*features dim"] | None = None


def antithetic_correlation(sums: Sums) -> np.ndarray:
    """Correlation of f(X+) and f(X-), from the variance of their average: (dim,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 2 * target_variance(sums.swindled) / target_variance(sums.plus) - 1


def estimate_series(
    sums: Sums,
    shared_variance: ArrayLike = 0.0,
    rho: dict[str, Float[np.ndarray, " dim"]] | None = None,
) -> Result:
    """The estimate of any run from its running sums.

    Parameters
    ----------
    shared_variance
        Variance of an error that all chains have in common.
    rho
        Correlations, if they are known. By default that of X+ and X-, for a series that
        is their average.

    Examples
    --------
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = plain(hmc(0.5, 3), lambda x: -0.5 * jnp.sum(x**2))
    >>> states = start(algorithm, jax.random.normal(jax.random.key(0), (32, 2)))
    >>> fold = fold_series(pair_series(lambda x: x), states)
    >>> states, sums = run(jax.random.key(1), algorithm, states, 100, fold)
    >>> found = estimate_series(sums).estimate
    >>> bool((abs(found.mean) < 4 * found.mcse).all())
    True
    """
    rates = sums.rates.means()
    means = None if sums.swindled is None else block_means(sums.swindled)
    if rho is None:
        pair = set(rates["acceptance"]) == {"plus", "minus"}
        rho = {"minus": antithetic_correlation(sums)} if pair else {}
    return Result(summarize(sums.plus, means, shared_variance), rho, rates)
