"""Latent: the swindles through a map.

Mirrored from book/latent.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Key

from swindles.antithetic import Result, estimate_pairs, fold_pairs, pair_values
from swindles.control import (
    Beta,
    Expectation,
    draw_expectation,
    estimate_controls,
    fold_controls,
)
from swindles.coupling import LogDensity, Sampler, Total, hmc, run, start
from swindles.cva import cva
from swindles.transport import Affine, Transport, log_weights, pareto_k, pull_back


def through(transport: Transport, statistic: Callable) -> Callable[[Array], Array]:
    """The statistic as a function of z, its values as one vector.

    Examples
    --------
    >>> double = Affine(jnp.zeros(2), 2 * jnp.ones(2))
    >>> through(double, lambda x: {"mean": x, "sum": x.sum()})(jnp.ones(2)).tolist()
    [2.0, 2.0, 4.0]
    """
    return lambda z: ravel_pytree(statistic(transport(z)))[0]


class Problem(NamedTuple):
    """A posterior, a map to it, and what to estimate.

    Parameters
    ----------
    logdensity
        Log density of the posterior, up to a constant.
    transport
        The map from z to x.
    dim
        Length of x.
    statistic
        From x to the array, or pytree of arrays, whose expectation is wanted.

    Examples
    --------
    >>> to_x = Affine(jnp.ones(2), jnp.ones(2))
    >>> problem = Problem(lambda x: -0.5 * x @ x, to_x, 2, jnp.square)
    >>> problem.latent()(jnp.ones(2)).item(), problem.feature()(jnp.ones(2)).tolist()
    (-4.0, [4.0, 4.0])
    """

    logdensity: LogDensity
    transport: Transport
    dim: int
    statistic: Callable = lambda x: x

    def latent(self) -> LogDensity:
        """The log density of z."""
        return pull_back(self.logdensity, self.transport)

    def feature(self) -> Callable[[Array], Array]:
        """The statistic as a function of z."""
        return through(self.transport, self.statistic)


def derivative(function: Callable, direction: Array, order: int) -> Callable:
    """The derivative of some order along a direction, as a function of the place."""
    if order == 0:
        return function
    lower = derivative(function, direction, order - 1)
    return lambda z: jax.jvp(lower, (z,), (direction,))[1]


@partial(jax.jit, static_argnames=("feature",))
def second_derivatives(feature: Callable, origin: Array) -> Array:
    """Second derivatives of all features along all axes: (dim, features)."""
    axes = jnp.eye(origin.size, dtype=origin.dtype)
    return jax.lax.map(
        lambda axis: derivative(feature, axis, 2)(origin), axes, batch_size=16
    )


@partial(jax.jit, static_argnames=("feature",))
def is_quadratic(feature: Callable, points: Array) -> Array:
    """Whether no feature has an even part beyond the quadratic one, at some points."""
    origin = jnp.zeros_like(points[0])

    def check(z: Array) -> Array:
        fourth = derivative(feature, z, 4)(z / 3)
        bent = derivative(feature, z, 2)(origin) / 2
        ends = feature(z), feature(-z)
        rest = (ends[0] + ends[1]) / 2 - feature(origin) - bent
        size = jnp.abs(ends[0]) + jnp.abs(ends[1]) + jnp.abs(bent)
        return jnp.all((fourth == 0) & (jnp.abs(rest) <= 1e-3 * size))

    return jax.lax.map(check, points).all()


def known_expectation(
    key: Key[Array, ""], problem: Problem, num_draws: int = 400_000
) -> Expectation:
    """E_Q of the statistic: exact for quadratics and affine maps, else from draws.

    Examples
    --------
    >>> to_x = Affine(jnp.ones(2), jnp.array([1.0, 2.0]))
    >>> problem = Problem(jnp.sum, to_x, 2, lambda x: x**2)
    >>> known = known_expectation(jax.random.key(0), problem)
    >>> known.mean.tolist(), known.num_draws
    ([2.0, 5.0], 0)
    """
    feature, origin = problem.feature(), jnp.zeros(problem.dim)
    if isinstance(problem.transport, Affine):
        if is_quadratic(feature, jax.random.normal(key, (3, problem.dim))):
            bent = np.asarray(second_derivatives(feature, origin), np.float64).sum(0)
            mean = np.asarray(feature(origin), np.float64) + bent / 2
            return Expectation(mean, np.zeros((mean.size, mean.size)))
    return draw_expectation(key, feature, origin, num_draws)


def swindle(
    key: Key[Array, ""],
    scheme: Callable,
    sampler: Sampler,
    problem: Problem,
    num_chains: int,
    num_steps: int,
    warmup: int,
    expectation: Expectation | None = None,
    beta: Beta = "diagonal",
) -> Result:
    """Run a scheme in the latent space of a map and estimate the statistic's mean.

    ``scheme`` is ``plain``, ``antithetic``, ``control`` or ``cva``. ``expectation`` is
    the mean of the statistic under Q; it is worked out when it is needed and not given.
    Chains start at draws of Q.

    Examples
    --------
    >>> from swindles.antithetic import antithetic
    >>> problem = Problem(lambda x: -0.5 * x @ x, Affine(jnp.ones(2), jnp.ones(2)), 2)
    >>> key = jax.random.key(0)
    >>> result = swindle(key, antithetic, hmc(0.5, 3), problem, 64, 200, warmup=50)
    >>> bool(np.abs(result.estimate.mean).max() < 0.05)
    True
    """
    keys = jax.random.split(key, 4)
    algorithm = scheme(sampler, problem.latent())
    states = start(algorithm, jax.random.normal(keys[0], (num_chains, problem.dim)))
    if "control" in states:
        known = expectation or known_expectation(keys[3], problem)
        full = isinstance(beta, str) and beta == "full"
        fold = fold_controls(problem.feature(), states, known, full=full)
    else:
        fold = fold_pairs(problem.feature(), states)
    # The warm-up keeps the same sums, to be forgotten: one program serves both runs.
    states, _ = run(keys[1], algorithm, states, warmup, fold)
    _, sums = run(keys[2], algorithm, states, num_steps, fold)
    if "control" in states:
        return estimate_controls(sums, known, beta)
    return estimate_pairs(sums)


class Quality(NamedTuple):
    """How good a map is, for swindles.

    Parameters
    ----------
    pareto_k
        That of the weights; below 0.7 their tail can be trusted.
    mean, covariance
        Moments of the posterior in latent space.
    rates
        "acceptance" and "decoupling", by chain.
    rho
        Correlation of "plus" with "minus" and with "control", for every statistic.

    Examples
    --------
    What to expect of correlations like these:

    >>> rho = {"minus": np.array([-0.9]), "control": np.array([0.8])}
    >>> quality = Quality(0.1, np.zeros(1), np.eye(1), rates={}, rho=rho)
    >>> {scheme: gain.round(2).tolist() for scheme, gain in quality.gain.items()}
    {'antithetic': [10.0], 'control': [2.78]}
    """

    pareto_k: float
    mean: Float[np.ndarray, " dim"]
    covariance: Float[np.ndarray, "dim dim"]
    rates: dict[str, dict[str, float]]
    rho: dict[str, Float[np.ndarray, " statistics"]]

    @property
    def gain(self) -> dict[str, Float[np.ndarray, " statistics"]]:
        """Predicted gain over one plain chain, for every statistic, at equal cost."""
        minus, control = self.rho["minus"], self.rho["control"]
        with np.errstate(divide="ignore"):
            return {"antithetic": 1 / (1 + minus), "control": 1 / (1 - control**2)}

    def __str__(self) -> str:
        """A few lines to read."""
        return "\n".join(describe(self))


def describe(quality: Quality) -> list[str]:
    """What the numbers of a ``Quality`` say, in words."""
    spread = np.sqrt(np.sort(np.diagonal(quality.covariance))[[0, -1]])
    away = np.abs(quality.mean).max()
    lines = [
        f"Pareto k {quality.pareto_k:.2f}",
        f"latent mean within {away:.2f} of 0, deviations {spread[0]:.2f} to "
        f"{spread[1]:.2f} (1 is perfect)",
        f"acceptance {quality.rates['acceptance']['plus']:.2f}",
    ]
    for scheme, chain in {"antithetic": "minus", "control": "control"}.items():
        gain = np.median(quality.gain[scheme])
        verdict = "pays" if gain > 1.2 else "does not pay"
        lines.append(
            f"{scheme} {verdict}: rho {np.median(quality.rho[chain]):.3f}, decoupling "
            f"{quality.rates['decoupling'][chain]:.1%}, predicted gain {gain:.3g}"
        )
    return lines


def fold_quality(
    feature: Callable, states: dict[str, Any], expectation: Expectation
) -> tuple[Any, Callable]:
    """Sums of a CVA run for ``assess``: controls, z and the products of z."""
    controls, update_controls = fold_controls(feature, states, expectation, full=False)

    def update(sums: tuple, states: dict, infos: dict) -> tuple:
        z = pair_values(lambda z: z, states)
        product = jnp.einsum("sci,scj->ij", z, z, precision="highest")
        return (
            update_controls(sums[0], states, infos),
            Total(sums[1].value + z.sum((0, 1))),
            Total(sums[2].value + product),
        )

    dim = states["plus"].position.shape[-1]
    zeros = Total(jnp.zeros(dim)), Total(jnp.zeros((dim, dim)))
    return (controls, *zeros), update


def cautious(dim: int) -> Sampler:
    """HMC with a step size for an acceptance near 0.95 on a round target."""
    step_size = 0.7 * dim**-0.25
    return hmc(step_size, round(1.5 / step_size))


def assess(
    key: Key[Array, ""],
    problem: Problem,
    sampler: Sampler | None = None,
    num_chains: int = 64,
    num_steps: int = 200,
) -> Quality:
    """Say how good a map is from a short run of CVA.

    Correlations are those of the problem's statistic. The default sampler is
    ``cautious``.

    Examples
    --------
    >>> perfect = Affine(jnp.ones(2), 3 * jnp.ones(2))
    >>> problem = Problem(lambda x: -jnp.sum((x - 1) ** 2) / 18, perfect, 2)
    >>> quality = assess(jax.random.key(0), problem)
    >>> bool(quality.rho["control"].min() > 0.9999)
    True
    """
    logdensity, transport, dim, _ = problem
    keys = jax.random.split(key, 5)
    algorithm = cva(sampler or cautious(dim), problem.latent())
    states = start(algorithm, jax.random.normal(keys[0], (num_chains, dim)))
    known = known_expectation(keys[2], problem, 20_000)
    fold = fold_quality(problem.feature(), states, known)
    states, _ = run(keys[1], algorithm, states, num_steps // 2, fold)
    _, (sums, total, gram) = run(keys[3], algorithm, states, num_steps, fold)
    mean, square = (t.value / (2 * num_chains * num_steps) for t in (total, gram))
    result = estimate_controls(sums, known)
    k = pareto_k(log_weights(keys[4], logdensity, transport, dim, 4096))
    covariance = square - np.outer(mean, mean)
    return Quality(k, mean, covariance, result.rates, result.rho)
