"""Schemes: everything is one average.

Mirrored from book/schemes.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.base import SamplingAlgorithm
from blackjax.mcmc import integrators
from jax import Array
from jaxtyping import Float, Key

from swindles.accuracy import target_variance
from swindles.antithetic import (
    Result,
    Series,
    antithetic,
    estimate_series,
    fold_series,
    mirrored,
    pair_series,
    plain,
)
from swindles.control import (
    Expectation,
    FeatureProducts,
    Fitted,
    PairProducts,
    check_features,
    control,
    control_series,
    control_values,
    exact_expectation,
    fit_features,
    fit_pair,
    fold_feature_products,
    fold_pair_products,
    reference_mean,
    shared_variance,
)
from swindles.coupling import Sampler, couple, coupled, run, start
from swindles.cva import cva
from swindles.models import Problem
from swindles.stein import Order, affordable_order, feature_orders, stein_values
from swindles.transport import standard_normal


class Scheme(NamedTuple):
    """A way to make an estimate from coupled chains.

    Parameters
    ----------
    build
        From a sampler and a log density to an algorithm.
    chains
        The names of its chains.
    stein
        Whether Stein features help.

    Examples
    --------
    >>> SCHEMES["cva"].rows()
    ([0, 1], [2, 3])
    """

    build: Callable[..., SamplingAlgorithm]
    chains: tuple[str, ...]
    stein: bool = False

    @property
    def has_control(self) -> bool:
        """Whether one of the chains targets Q."""
        return "control" in self.chains

    @property
    def num_targets(self) -> int:
        """Chains that cost gradients of the posterior."""
        return len(self.chains) - self.has_control

    def rows(
        self, chains: tuple[str, ...] = ("plus", "minus", "control")
    ) -> tuple[list[int], list[int]]:
        """Rows of ``PairProducts`` of some chains that are this scheme's f, and g."""
        pair = 1 + ("minus" in chains)
        f = list(range(self.num_targets))
        return f, [pair + row for row in f] if self.has_control else []


CHAINS = {
    "plain": (plain, ("plus",)),
    "antithetic": (antithetic, ("plus", "minus")),
    "control": (control, ("plus", "control")),
    "cva": (cva, ("plus", "minus", "control")),
}
SCHEMES = {name: Scheme(*parts) for name, parts in CHAINS.items()} | {
    "stein" if name == "plain" else f"{name}+stein": Scheme(*parts, stein=True)
    for name, parts in CHAINS.items()
}


def find_scheme(name: str) -> Scheme:
    """The scheme of this name, or a ValueError.

    Examples
    --------
    >>> find_scheme("antithetic+stein").chains
    ('plus', 'minus')
    """
    if name not in SCHEMES:
        raise ValueError(f"scheme is {name!r}: say one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


class Features(NamedTuple):
    """What a scheme knows the mean of.

    Parameters
    ----------
    observe
        From the states of all chains to features: (1 or 2, chains, features).
    expectation
        Their mean, and its error.
    widths
        After how many of them to stop, to be tried: up to each order of Stein features.

    Examples
    --------
    >>> features = make_features(SCHEMES["stein"], jnp.square, 2, order="full")
    >>> features.expectation.mean.size, features.widths
    (5, [2, 4, 5])
    """

    observe: Callable[[Any], Array]
    expectation: Expectation
    widths: list[int]


def no_features(states: Any) -> Array:
    """Features of a scheme that has none: (1, chains, 0)."""
    return jnp.zeros((1, len(jax.tree.leaves(states)[0]), 0))


def make_features(
    scheme: Scheme,
    statistic: Callable,
    dim: int,
    expectation: Expectation | None = None,
    order: Order = "none",
) -> Features:
    """The features of a scheme: those of the control chain, then Stein's.

    ``expectation`` is the mean of the statistic under Q.
    """
    if scheme.has_control and expectation is None:
        raise ValueError("a control chain is of use only with the expectation under Q")
    own = expectation if scheme.has_control else None
    own = own or exact_expectation(np.zeros(0))
    orders = feature_orders(dim, order if scheme.stein else "none")
    first, number = own.mean.size, own.mean.size + orders.size
    covariance = np.zeros((number, number))
    covariance[:first, :first] = own.covariance
    mean = np.append(own.mean, np.zeros(orders.size))

    def observe(states: Any) -> Array:
        parts = [control_values(statistic, states)] if first else []
        if orders.size:
            parts.append(stein_values(order, states))
        return jnp.concatenate(parts, -1) if parts else no_features(states)

    ends = [first + int((orders <= last).sum()) for last in np.unique(orders)]
    widths = sorted({first, *ends} - {0})
    return Features(observe, Expectation(mean, covariance, own.num_draws), widths)


class Plan(NamedTuple):
    """All that a run needs to know, apart from the problem.

    Parameters
    ----------
    scheme
        The name of one of ``SCHEMES``.
    order
        Of the Stein features.
    beta
        Coefficients: one for each statistic, or (features, statistics).
    mean
        What is known of the features' mean: (features,).
    shared_variance
        Variance that the error of that mean gives to the answer.
    center
        A first estimate of the answer.
    rounding
        What the arithmetic may be off by.

    Examples
    --------
    >>> blank = np.zeros(2)
    >>> Plan("plain", "none", np.zeros((0, 2)), np.zeros(0), blank, blank, blank).scheme
    'plain'
    """

    scheme: str
    order: Order
    beta: Float[np.ndarray, "*features statistics"]
    mean: Float[np.ndarray, " features"]
    shared_variance: Float[np.ndarray, " statistics"]
    center: Float[np.ndarray, " statistics"]
    rounding: Float[np.ndarray, " statistics"]


def fit_scheme(scheme: Scheme, sums: Any, features: Features, draws: float) -> Fitted:
    """Fit the coefficients of a scheme to the sums of a run with its chains."""
    expectation = features.expectation
    if isinstance(sums, FeatureProducts):
        eps = float(np.finfo(np.asarray(sums.center).dtype).eps)
        return fit_features(sums, features.widths, draws * expectation.covariance, eps)
    if isinstance(sums, PairProducts):
        return fit_pair(sums, *scheme.rows(scheme.chains), expectation, draws)
    found = estimate_series(sums).estimate  # nothing to fit
    size = np.sqrt(found.variance + found.mean**2)
    variance = found.num_draws * found.mcse**2
    return Fitted(np.zeros((0, size.size)), variance, found.mean, size)


def make_plan(
    scheme: str, order: Order, features: Features, fitted: Fitted, dtype: Any
) -> Plan:
    """A plan from the coefficients that were fitted."""
    return Plan(
        scheme,
        order,
        fitted.beta,
        features.expectation.mean[: len(fitted.beta)],
        shared_variance(features.expectation, fitted.beta),
        fitted.mean,
        np.finfo(dtype).eps * fitted.size,
    )


def start_mirrored(
    algorithm: SamplingAlgorithm, positions: Float[Array, "chains dim"]
) -> Any:
    """States of many chains, with "minus" at the mirror image of the others.

    Examples
    --------
    >>> from swindles.coupling import hmc
    >>> algorithm = antithetic(hmc(0.5, 3), standard_normal)
    >>> states = start_mirrored(algorithm, jnp.ones((16, 2)))
    >>> states.minus.position[0].tolist()
    [-1.0, -1.0]
    """
    states = start(algorithm, positions)
    if not hasattr(states, "minus"):
        return states
    return states._replace(minus=start(algorithm, -positions).minus)


def learn(
    key: Key[Array, ""],
    algorithm: SamplingAlgorithm,
    states: Any,
    problem: Problem,
    scheme: str,
    num_steps: int,
    draws: int,
    expectation: Expectation | None,
    order: Order,
) -> tuple[Any, Plan, Any]:
    """Warm chains up, and learn the coefficients from the second half.

    Returns the states, a plan for a run of so many ``draws``, and the sums.
    """
    parts, keys = SCHEMES[scheme], jax.random.split(key)
    features = make_features(parts, problem.statistic, problem.dim, expectation, order)
    mean = features.expectation.mean
    if parts.stein:
        fold = fold_feature_products(problem.statistic, features.observe, mean, states)
    elif parts.has_control:
        observe = features.observe
        check_features(jax.jit(lambda states: observe(states))(states), mean)
        fold = fold_pair_products(problem.statistic, states)
    else:  # the sums of the run to come, and so its program
        fold = fold_series(pair_series(problem.statistic), states)
    states, _ = run(keys[0], algorithm, states, max(num_steps // 2, 1), fold)
    states, sums = run(keys[1], algorithm, states, max(num_steps // 2, 1), fold)
    fitted = fit_scheme(parts, sums, features, draws)
    plan = make_plan(scheme, order, features, fitted, problem.position.dtype)
    return states, plan, sums


def plan_series(plan: Plan, statistic: Callable) -> Series:
    """From the states of all chains to f(X+) and Z, under a plan."""
    scheme = SCHEMES[plan.scheme]
    if not len(plan.beta):
        return pair_series(statistic)

    def observe(states: Any) -> Array:
        parts = [control_values(statistic, states)] if scheme.has_control else []
        if scheme.stein:
            parts.append(stein_values(plan.order, states))
        return jnp.concatenate(parts, -1)[..., : len(plan.beta)]

    return control_series(statistic, observe, plan.mean, plan.beta)


def swindle(
    key: Key[Array, ""],
    scheme: str,
    sampler: Sampler,
    problem: Problem,
    num_chains: int,
    num_steps: int,
    warmup: int,
    expectation: Expectation | None = None,
    order: Order | None = None,
) -> Result:
    """Run a scheme and estimate the mean of the problem's statistic.

    Coefficients are learned in the second half of the warm-up, and then left alone.

    Parameters
    ----------
    scheme
        The name of one of ``SCHEMES``.
    problem
        Usually in the latent space of a map, as ``Problem.through`` makes it. Chains
        start at draws of N(0, I).
    expectation
        The mean of the statistic under Q; it is worked out when it is needed.
    order
        Of the Stein features; by default the highest that the warm-up can fit.

    Examples
    --------
    >>> from swindles.coupling import hmc
    >>> from swindles.models import Model, make_problem
    >>> model = Model(lambda x: -jnp.sum(jnp.cosh(x)), jnp.zeros(2))
    >>> problem, key = make_problem(model, jnp.square), jax.random.key(0)
    >>> plain = swindle(key, "plain", hmc(0.5, 3), problem, 32, 100, warmup=50)
    >>> stein = swindle(key, "stein", hmc(0.5, 3), problem, 32, 100, warmup=50)
    >>> bool((stein.estimate.mcse < plain.estimate.mcse / 3).all())
    True
    """
    parts, keys = find_scheme(scheme), jax.random.split(key, 4)
    if parts.has_control and expectation is None:
        expectation = reference_mean(keys[3], problem)
    others = expectation.mean.size if parts.has_control and expectation else 0
    if order is None:
        order = affordable_order(problem.dim, num_chains * warmup // 2, others)
    algorithm = parts.build(sampler, problem.logdensity)
    z = jax.random.normal(keys[0], (num_chains, problem.dim), problem.position.dtype)
    states, draws = start_mirrored(algorithm, z), num_chains * num_steps
    states, plan, learned = learn(
        keys[1], algorithm, states, problem, scheme, warmup, draws, expectation, order
    )
    fold = fold_series(plan_series(plan, problem.statistic), states, plan.center)
    _, sums = run(keys[2], algorithm, states, num_steps, fold)
    return finish_run(sums, plan, learned)


def correlations(plan: Plan, learned: Any) -> dict[str, np.ndarray]:
    """Correlations of f(X+) with the other chains, from what a warm-up learned."""
    if not isinstance(learned, PairProducts):
        return {}
    covariance, found = learned.covariance(), {}
    deviation = np.sqrt(np.einsum("iid->id", covariance))
    with np.errstate(divide="ignore", invalid="ignore"):
        rho = covariance / (deviation[:, None] * deviation)
    chains = SCHEMES[plan.scheme].chains
    if "minus" in chains:
        found["minus"] = rho[0, 1]
    if "control" in chains:
        found["control"] = rho[0, len(chains) - 1]
    return found


def finish_run(sums: Any, plan: Plan, learned: Any) -> Result:
    """The result of a run under a plan."""
    rho = correlations(plan, learned) if len(plan.beta) else None
    if rho is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = target_variance(sums.swindled) / target_variance(sums.plus)
        rho["features"] = np.sqrt(np.clip(1 - ratio, 0, 1))
    result = estimate_series(sums, plan.shared_variance, rho)
    found = result.estimate._replace(rounding=plan.rounding)
    return result._replace(estimate=found, beta=plan.beta if len(plan.beta) else None)


def hmc_kernel(chains: tuple[str, ...], reference_fn: Callable, *options: Any) -> Any:
    """A step of coupled HMC chains, with the arguments of BlackJAX's kernel."""
    single = blackjax.hmc.build_kernel(*options)

    def kernel(
        rng_key: Any,
        state: Any,
        logdensity_fn: Callable,
        step_size: float,
        inverse_mass_matrix: Any,
        num_integration_steps: int,
    ) -> tuple[Any, Any]:
        def sampler(density: Callable) -> SamplingAlgorithm:
            settings = step_size, inverse_mass_matrix, num_integration_steps
            return SamplingAlgorithm(
                lambda position, _=None: blackjax.hmc.init(position, density),
                lambda key, mine: single(key, mine, density, *settings),
            )

        algorithms = {
            "plus": sampler(logdensity_fn),
            "minus": mirrored(sampler)(logdensity_fn),
            "control": sampler(reference_fn),
        }
        return couple(**{name: algorithms[name] for name in chains}).step(
            rng_key, state
        )

    return kernel


@dataclass(frozen=True)
class CoupledHMC:
    """HMC under a scheme, in the shape of ``blackjax.hmc``.

    Its states and infos are NamedTuples with the chains as fields.

    Parameters
    ----------
    chains
        Their names: some of "plus", "minus" and "control".

    Examples
    --------
    >>> def logdensity_fn(x):
    ...     return -0.5 * jnp.sum((x - 3.0) ** 2)
    >>> algorithm = hmc_antithetic(logdensity_fn, 0.5, jnp.ones(2), 4)
    >>> state, step = algorithm.init(jnp.zeros(2)), jax.jit(algorithm.step)
    >>> for rng_key in jax.random.split(jax.random.key(0), 50):
    ...     state, info = step(rng_key, state)
    >>> ((state.plus.position + state.minus.position) / 2).round(4).tolist()
    [3.0, 3.0]
    """

    chains: tuple[str, ...]

    def init(
        self,
        position: Any,
        logdensity_fn: Callable,
        reference_fn: Callable = standard_normal,
    ) -> Any:
        """The state of all chains at one position."""
        targets = {"control": reference_fn}
        states = (
            blackjax.hmc.init(position, targets.get(name, logdensity_fn))
            for name in self.chains
        )
        return coupled(*self.chains)(*states)

    def build_kernel(
        self,
        integrator: Callable = integrators.velocity_verlet,
        divergence_threshold: float = 1000,
        reference_fn: Callable = standard_normal,
    ) -> Callable:
        """A step of all chains, from a key, a state, a density and the settings."""
        return hmc_kernel(self.chains, reference_fn, integrator, divergence_threshold)

    def as_top_level_api(
        self,
        logdensity_fn: Callable,
        step_size: float,
        inverse_mass_matrix: Any,
        num_integration_steps: int,
        *,
        divergence_threshold: int = 1000,
        integrator: Callable = integrators.velocity_verlet,
        reference_fn: Callable = standard_normal,
    ) -> SamplingAlgorithm:
        """HMC under this scheme as one BlackJAX sampling algorithm."""
        kernel = self.build_kernel(integrator, divergence_threshold, reference_fn)
        settings = step_size, inverse_mass_matrix, num_integration_steps

        def init_fn(position: Any, rng_key: Any = None) -> Any:
            return self.init(position, logdensity_fn, reference_fn)

        def step_fn(rng_key: Any, state: Any) -> tuple[Any, Any]:
            return kernel(rng_key, state, logdensity_fn, *settings)

        return SamplingAlgorithm(init_fn, step_fn)

    def __call__(self, *settings: Any, **options: Any) -> SamplingAlgorithm:
        """The same as ``as_top_level_api``."""
        return self.as_top_level_api(*settings, **options)


hmc_antithetic = CoupledHMC(SCHEMES["antithetic"].chains)
hmc_control = CoupledHMC(SCHEMES["control"].chains)
hmc_cva = CoupledHMC(SCHEMES["cva"].chains)
