"""The four schemes together: coverage, efficiency and memory."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

from swindles.antithetic import antithetic, estimate_pairs, fold_pairs, plain
from swindles.control import (
    control,
    estimate_controls,
    exact,
    feature_values,
    fold_controls,
)
from swindles.coupling import hmc, mala, random_walk, run, start
from swindles.cva import cva
from swindles.targets import logistic_regression, skewed
from swindles.transport import laplace, pull_back, standard_normal

KEY = jax.random.key(20206)
SCHEMES = {"plain": plain, "antithetic": antithetic, "control": control, "cva": cva}
REPEATS, CHAINS, WARMUP, STEPS = 200, 16, 40, 60
LEVEL = 0.95
CHANCE = 1e-4  # two-sided, for each component


class Latent:
    """A posterior in the latent space of its Laplace approximation."""

    def __init__(self, target):
        self.dim = target.dim
        self.to_x = laplace(target.logdensity, jnp.zeros(target.dim))
        self.logdensity = pull_back(target.logdensity, self.to_x)
        shift, scale = (np.asarray(part, np.float64) for part in self.to_x)
        self.known = exact([shift, shift**2 + (scale**2).sum(1)])

    def statistic(self, z):
        x = self.to_x(z)
        return jnp.concatenate([x, x**2])

    def experiment(self, scheme, sampler, chains, beta="diagonal"):
        """A function from (key, warm-up, steps) to a result; compiled once."""
        algorithm = SCHEMES[scheme](sampler, self.logdensity)
        is_control = scheme in ("control", "cva")
        fold = None

        def result(key, warmup, steps):
            nonlocal fold
            keys = jax.random.split(key, 3)
            z = jax.random.normal(keys[0], (chains, self.dim))
            states, _ = run(keys[1], algorithm, start(algorithm, z), warmup)
            if fold is None:
                fold = (
                    fold_controls(self.statistic, states, self.known)
                    if is_control
                    else fold_pairs(self.statistic, states)
                )
            _, sums = run(keys[2], algorithm, states, steps, fold, num_blocks=4)
            if is_control:
                return estimate_controls(sums, self.known, beta)
            return estimate_pairs(sums)

        return result


@pytest.fixture(scope="module")
def logistic():
    return Latent(logistic_regression())


FULL_RUN = {"chains": 256, "warmup": 500, "steps": 500}
LEAST = {  # ESS per step at the median: (means, second moments)
    "plain": (0.5, 0.5),
    "antithetic": (90, 0),
    "control": (45, 40),
    "cva": (90, 85),
}
# Another machine rounds differently, and so makes other random decisions. An ESS from
# 256 chains has this relative standard error; with this key the bounds hold without it.
SLACK = np.sqrt(2 / 255)


@pytest.fixture(scope="module")
def full_runs(logistic):
    beta = {"control": "full"}
    return {
        scheme: logistic.experiment(
            scheme, hmc(0.3, 5), FULL_RUN["chains"], beta.get(scheme, "diagonal")
        )(KEY, FULL_RUN["warmup"], FULL_RUN["steps"])
        for scheme in SCHEMES
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_efficiency_on_logistic_regression(full_runs, scheme):
    estimate = full_runs[scheme].estimate
    per_step = np.median(estimate.ess.reshape(2, 25), axis=1) / estimate.num_draws
    assert estimate.num_draws == 256 * 500
    assert (per_step >= (1 - SLACK) * np.array(LEAST[scheme])).all()
    assert estimate.warnings() == []


def test_formulas_of_the_paper(full_runs):
    """ESS / (1 - rho^2) and 2 ESS / (1 + rho), at the median over statistics."""
    alone = full_runs["plain"].estimate.ess
    anti = full_runs["antithetic"]
    ratio = anti.estimate.ess / (2 * alone / (1 + anti.rho["minus"]))
    assert 0.75 < np.median(ratio) < 1.33
    controlled = full_runs["control"]
    ratio = controlled.estimate.ess / (alone / (1 - controlled.rho["control"] ** 2))
    assert 0.75 < np.median(ratio) < 1.33


def test_published_posterior(full_runs, logistic_truth):
    """Means of the German-credit regression against inference-gym's long run."""
    truth = logistic_truth
    error = truth.IDENTITY_MEAN_STANDARD_ERROR
    for scheme, result in full_runs.items():
        estimate = result.estimate
        distance = estimate.mean[:25] - truth.IDENTITY_MEAN
        z = distance / np.hypot(estimate.mcse[:25], error)
        assert np.abs(z).max() < 4, scheme


def check_coverage(experiment, truth, truth_error=0.0, steps=STEPS):
    results = [
        experiment(key, WARMUP, steps).estimate
        for key in jax.random.split(KEY, REPEATS)
    ]
    lower, upper = np.array([r.interval(LEVEL) for r in results]).swapaxes(0, 1)
    covered = ((lower < truth) & (truth < upper)).sum(0)
    least, most = binom.ppf([CHANCE, 1 - CHANCE], REPEATS, LEVEL)
    assert covered.min() >= least, covered
    assert covered.max() <= most, covered
    means = np.array([r.mean for r in results])
    spread = means.std(0, ddof=1)
    bias = (means.mean(0) - truth) / np.hypot(spread / np.sqrt(REPEATS), truth_error)
    assert np.abs(bias).max() < 4, bias
    stated = np.sqrt(np.mean([r.mcse**2 for r in results], axis=0))
    assert 0.85 < np.median(stated / spread) < 1.15


# MALA mixes slowly here. Errors of a swindle come in rare bursts after a decoupling. A
# run of 16 x 60 has seen too few of them for a nominal interval: it covers 80 % for
# second moments, without bias and with the right standard error. So this is longer.
SKEWED_RUNS = {"hmc": (hmc(0.4, 4), CHAINS, STEPS), "mala": (mala(0.6), 64, 400)}


@pytest.mark.parametrize(
    ("scheme", "name"),
    [*((scheme, "hmc") for scheme in SCHEMES), ("plain", "mala"), ("cva", "mala")],
)
def test_coverage_on_a_skewed_target(scheme, name):
    sampler, chains, steps = SKEWED_RUNS[name]
    target = skewed(2)
    truth = np.concatenate([target.truth["mean"], target.truth["square"]])
    check_coverage(
        Latent(target).experiment(scheme, sampler, chains), truth, steps=steps
    )


@pytest.mark.parametrize("scheme", ["plain", "cva"])
def test_coverage_on_logistic_regression(logistic, full_runs, scheme):
    truth = full_runs["cva"].estimate
    experiment = logistic.experiment(scheme, hmc(0.3, 5), CHAINS)
    check_coverage(experiment, truth.mean, truth.mcse)


def test_the_mirrored_control_is_reflected():
    algorithm = cva(hmc(0.3, 3), standard_normal)
    states = start(algorithm, jax.random.normal(KEY, (8, 2)))
    values = feature_values(lambda z: z**3, states)
    y = states["control"].position
    np.testing.assert_array_equal(values, jnp.stack([y**3, (-y) ** 3]))


@pytest.mark.parametrize("sampler", [hmc(0.3, 5), mala(0.5), random_walk(0.4)])
def test_linear_statistic_of_an_affine_map_needs_no_beta(logistic, sampler):
    """Y+ and Y- average to the mean of Q: any beta gives the antithetic estimate."""
    results = [
        logistic.experiment("cva", sampler, CHAINS, beta)(KEY, 20, 50).estimate
        for beta in (np.zeros((50, 50)), np.eye(50))
    ]
    pair = logistic.experiment("antithetic", sampler, CHAINS)(KEY, 20, 50).estimate
    for estimate in results:
        np.testing.assert_allclose(estimate.mean[:25], pair.mean[:25], atol=2e-6)


MEMORY = """
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from swindles.control import exact, fold_controls
from swindles.coupling import hmc, run, start
from swindles.cva import cva
from swindles.transport import standard_normal
algorithm = cva(hmc(0.3, 1), lambda z: standard_normal(z) - 0.01 * jnp.sum(z**4))
states = start(algorithm, jnp.zeros((256, 501)))
fold = fold_controls(lambda z: z, states, exact(np.zeros(501)))
peaks = []
for steps in (20, 320):
    run(jax.random.key(0), algorithm, states, steps, fold)
    lines = Path("/proc/self/status").read_text().splitlines()
    peaks.append(next(int(x.split()[1]) / 1024 for x in lines if x[:5] == "VmHWM"))
print(*peaks)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_steps():
    """256 chains of 501 dimensions, all products of features summed."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    short, long = map(float, done.stdout.split())
    assert long < 1000  # MB; a stored trace of 320 steps would take 490 more
    assert long - short < 100
