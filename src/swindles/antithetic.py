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


def plain(sampler: Sampler, logdensity: LogDensity) -> SamplingAlgorithm:
    """No swindle: one chain, called "plus".

    Examples
    --------
    >>> from swindles.coupling import hmc, start
    >>> algorithm = plain(hmc(0.3, 5), lambda x: -0.5 * jnp.sum(x**2))
    >>> list(start(algorithm, jnp.ones((4, 2))))
    ['plus']
    """
    return couple(plus=sampler(logdensity))


def antithetic(sampler: Sampler, logdensity: LogDensity) -> SamplingAlgorithm:
    """HMC-ANTITHETIC, for any sampler: chains "plus" and "minus" under one key.

    The state of "minus" is that of the mirrored density; negate its position to read
    it. ``init`` starts "minus" at the mirror image of the start of "plus".

    Examples
    --------
    >>> from swindles.coupling import hmc, start
    >>> algorithm = antithetic(hmc(0.3, 5), lambda x: -0.5 * jnp.sum(x**2))
    >>> sorted(start(algorithm, jnp.ones((4, 2))))
    ['minus', 'plus']
    """
    return couple(plus=sampler(logdensity), minus=sampler(mirror(logdensity)))


def evaluate(statistic: Callable, positions: list[Any]) -> Array:
    """The statistic at several positions of every chain: (positions, chains, dim).

    Examples
    --------
    >>> evaluate(lambda x: {"sum": x.sum(), "x": x}, [jnp.ones((4, 2))]).shape
    (1, 4, 3)
    """
    flat = jax.vmap(lambda position: ravel_pytree(statistic(position))[0])
    return jnp.stack([flat(position) for position in positions])


def pair_values(statistic: Callable, states: dict[str, Any]) -> Array:
    """The statistic at X+ and, if there is one, at X-: (1 or 2, chains, dim)."""
    places = [states["plus"].position]
    if "minus" in states:
        places.append(negate(states["minus"].position))
    return evaluate(statistic, places)


class PairSums(NamedTuple):
    """Running sums of an antithetic (or a plain) run."""

    plus: Moments
    average: Moments
    rates: Rates


def check_statistic(statistic: Callable, states: dict[str, Any]) -> Array:
    """The mean of the statistic over the chains' starts, used as a center: (dim,)."""
    values = pair_values(statistic, states)
    if values.shape[-1] == 0 or not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(
            "the statistic must return at least one floating point number for a "
            f"position, got {values.shape[-1]} of type {values.dtype}"
        )
    if not jnp.isfinite(values).all():
        raise ValueError("the statistic is not finite at the start of the chains")
    return values.mean((0, 1))


def fold_pairs(statistic: Callable, states: dict[str, Any]) -> tuple[Any, Callable]:
    """What to give ``coupling.run`` as ``fold`` for a plain or an antithetic run.

    Examples
    --------
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = antithetic(hmc(0.5, 3), lambda x: -0.5 * jnp.sum(x**2))
    >>> states = start(algorithm, jnp.ones((32, 2)))
    >>> fold = fold_pairs(lambda x: {"mean": x, "square": x**2}, states)
    >>> _, sums = run(jax.random.key(0), algorithm, states, 10, fold, num_blocks=5)
    >>> sums.average.total.shape  # blocks, chains, entries of the statistic
    (5, 32, 4)
    """
    center = check_statistic(statistic, states)
    moments = empty_moments(center, len(jax.tree.leaves(states)[0]))

    def update(sums: PairSums, states: dict, infos: dict) -> PairSums:
        values = pair_values(statistic, states)
        return PairSums(
            add_step(sums.plus, values[0]),
            add_step(sums.average, values.mean(0)),
            add_rates(sums.rates, infos),
        )

    return PairSums(moments, moments, empty_rates(states)), update


class Result(NamedTuple):
    """An estimate, and how well the chains behind it were coupled.

    Parameters
    ----------
    estimate
        The expectations, with their errors.
    rho
        Correlation of "plus" with each other chain, by its name.
    rates
        "acceptance" and "decoupling", by chain.
    beta
        Regression coefficients, if there are any.

    Examples
    --------
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = antithetic(hmc(0.5, 3), lambda x: -0.5 * jnp.sum(x**2))
    >>> states = start(algorithm, jax.random.normal(jax.random.key(0), (32, 2)))
    >>> fold = fold_pairs(lambda x: x, states)
    >>> _, sums = run(jax.random.key(1), algorithm, states, 100, fold)
    >>> result = estimate_pairs(sums)
    >>> result.rho["minus"].round(3).tolist(), result.rates["decoupling"]["minus"]
    ([-1.0, -1.0], 0.0)
    """

    estimate: Estimate
    rho: dict[str, Float[np.ndarray, " dim"]]
    rates: dict[str, dict[str, float]]
    beta: Float[np.ndarray, "features dim"] | None = None


def antithetic_correlation(plus: Moments, average: Moments) -> np.ndarray:
    """Correlation of f(X+) and f(X-), from the variance of their average: (dim,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 2 * target_variance(average) / target_variance(plus) - 1


def estimate_pairs(sums: PairSums) -> Result:
    """The estimate of a plain or an antithetic run from its running sums.

    Examples
    --------
    >>> from swindles.coupling import hmc, run, start
    >>> algorithm = antithetic(hmc(0.5, 3), lambda x: -0.5 * jnp.sum(x**2))
    >>> states = start(algorithm, jax.random.normal(jax.random.key(0), (32, 2)))
    >>> fold = fold_pairs(lambda x: x, states)
    >>> states, sums = run(jax.random.key(1), algorithm, states, 100, fold)
    >>> estimate_pairs(sums).estimate.mean.tolist()
    [0.0, 0.0]
    """
    rates = sums.rates.means()
    rho = {}
    if "minus" in rates["acceptance"]:
        rho["minus"] = antithetic_correlation(sums.plus, sums.average)
    return Result(summarize(sums.plus, block_means(sums.average)), rho, rates)
