"""The benchmark against other methods: is it fair, and does it say what it measured?

Runs here are short. Errors are compared at five of their standard errors.
"""

import importlib.util
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blackjax.base import SamplingAlgorithm
from pipeline import ORIGIN, read_rows

from swindles import targets
from swindles.accuracy import Estimate
from swindles.antithetic import estimate_series, fold_series, pair_series
from swindles.coupling import couple, start
from swindles.transport import laplace

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rivals():
    """The benchmark as a module."""
    path = ROOT / "benchmarks" / "rivals.py"
    spec = importlib.util.spec_from_file_location("rivals", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


METHODS = (
    "numpyro-nuts",
    "blackjax-nuts",
    "hmc",
    "zv-first",
    "zv-second",
    "cva",
    "antithetic-stein",
)
DIM = 3
CENTER = np.array([0.5, 0.0, -1.0])  # anything but the mean


def skewed_posterior(rivals):
    """A small posterior whose moments are known; skewed, since symmetry hides bugs."""
    return rivals.Posterior(
        lambda: targets.skewed(DIM)._replace(constrain=lambda x: x),
        fit=lambda model: laplace(model.logdensity, jnp.zeros(DIM)),
        adaptation=200,
        warmup=50,
        learning=200,
    )


def test_methods_are_those_promised(rivals):
    assert tuple(rivals.METHODS) == METHODS


# Effective draws per draw of a mean: about half of what a longer run gives.
LEAST = {"zv-first": 0.8, "zv-second": 30, "cva": 1.2, "antithetic-stein": 100}


@pytest.fixture
def chunks(rivals, monkeypatch):
    """The steps of all chunks drawn."""
    steps, draw = [], rivals.Chains.draw
    monkeypatch.setattr(
        rivals.Chains, "draw", lambda self, n: (steps.append(n), draw(self, n))
    )
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_known_moments(rivals, chunks, method):
    posterior = skewed_posterior(rivals)
    found, mean, error, variance = rivals.measure(posterior, method, 0.5, CENTER)
    truth = targets.skewed(DIM).truth
    about = truth["square"] - 2 * CENTER * truth["mean"] + CENTER**2
    expected = np.concatenate([truth["mean"], about])
    assert (np.abs(mean - expected) < 5 * error).all()
    # The errors are worth something: those of at least a thousand draws.
    assert (variance / error**2 > 1000).all()
    spread = np.square([mean[:DIM] - CENTER]).ravel()
    assert np.allclose(variance[:DIM], about - spread, rtol=0.2)
    assert 0 < found["seconds_setup"] <= found["first_result"]
    assert found["seconds_sampling"] >= 0.5
    assert 0.5 < found["acceptance"] <= 1
    assert found["rhat"] < 1.05
    ess = variance / error**2 / found["draws"]
    assert ess[:DIM].min() > LEAST.get(method, 0.2)
    # Behind the warm-up, BlackJAX's NUTS has one more, for all chains.
    assert chunks[0] == (100 if method == "blackjax-nuts" else rivals.FIRST)
    leaps = found["gradients"] / found["draws"]
    if "nuts" not in method:
        leaps = leaps / (2 if method in ("cva", "antithetic-stein") else 1)
        said = int(found["settings"].split(", ")[1].split()[0])
        assert leaps == pytest.approx(said, rel=1e-6)
    assert leaps >= 1


class Draw(SimpleNamespace):
    """A state, an info: whatever has these names."""


jax.tree_util.register_pytree_node(
    Draw,
    lambda draw: (list(vars(draw).values()), tuple(vars(draw))),
    lambda names, values: Draw(**dict(zip(names, values, strict=True))),
)


def independent_chains(rivals, posterior, center, key):
    """Draws from N(1, 4), one after the other independent, seven gradients each."""

    def step(key, state):
        info = Draw(acceptance_rate=jnp.ones(()), num_integration_steps=jnp.array(7))
        return Draw(position=1 + 2 * jax.random.normal(key, (25,))), info

    algorithm = couple(plus=SamplingAlgorithm(lambda x, _=None: Draw(position=x), step))
    states = start(algorithm, jnp.zeros((rivals.NUM_CHAINS, 25)))
    statistic = partial(rivals.mean_and_variance, center)
    fold = fold_series(pair_series(statistic), states)
    return rivals.Chains(key, algorithm, states, fold, estimate_series, "none")


def test_ess_of_independent_draws_is_their_number(rivals, chunks, monkeypatch):
    monkeypatch.setitem(rivals.METHODS, "iid", partial(independent_chains, rivals))
    center = np.full(25, -0.5)
    found, mean, error, variance = rivals.measure(None, "iid", 0.5, center)
    expected = np.repeat([1.0, 4 + 1.5**2], 25)
    assert (np.abs(mean - expected) < 5 * error).all()
    assert np.allclose(
        variance, np.repeat([4.0, 2 * 16 + 4 * 4 * 1.5**2], 25), rtol=0.1
    )
    # Errors come from 64 chains: each ESS is right within a few times 18 %.
    for row in rivals.make_rows("logistic", "iid", 0.5, found, mean, error, variance):
        assert 0.85 < row["ess_median"] / row["draws"] < 1.2
        assert 0.4 < row["ess_min"] / row["draws"] < row["ess_median"] / row["draws"]
    # A short chunk, others that double, all forgotten; then equal ones, whose number
    # depends on the machine. The last pilot may have their size.
    same = next(i for i, n in enumerate(reversed([0, *chunks])) if n != chunks[-1])
    pilots = {rivals.FIRST * 2**i for i in range(20)}
    assert chunks[0] == rivals.FIRST and set(chunks[:-same]) <= pilots
    counted = found["draws"] / rivals.NUM_CHAINS / chunks[-1]
    assert counted in (same, same - 1) and counted > 0
    assert found["gradients"] == pytest.approx(7 * found["draws"])


def estimate(mcse, rounding=0.0):
    """An estimate of which only the errors matter."""
    one = np.ones(2)
    return Estimate(one, np.asarray(mcse), one, one, one, 63, 100, rounding)


def test_no_error_is_below_rounding(rivals):
    error = rivals.usable_error(estimate([1e-3, 1e-9], rounding=np.array([1e-6, 1e-6])))
    assert error.tolist() == [1e-3, 1e-6]


def test_first_result_has_finite_errors(rivals):
    class Slow:
        chunks = 1

        def draw(self, steps):
            self.chunks += 1

        def result(self):
            error = np.array([1.0, np.nan if self.chunks < 3 else 1.0])
            return SimpleNamespace(estimate=estimate(error)), 0

    slow = Slow()
    assert np.isfinite(rivals.first_estimate(slow).estimate.mcse).all()
    assert slow.chunks == 3
    with pytest.raises(ValueError, match="not finite"):
        rivals.first_estimate(Slow(), chunks=2)


def some_rows(rivals, posterior, method, ess=100.0):
    """Two rows with made-up numbers."""
    found = {"draws": 10, "rhat": 1.0}
    one = np.ones(4)
    error = np.sqrt(one / ess)
    return rivals.make_rows(posterior, method, 1.0, found, one, error, one)


def test_rows_of_others_stay(rivals, tmp_path):
    path = tmp_path / "results" / "rivals.csv"
    for posterior, method in [("sparse", "hmc"), ("logistic", "cva")]:
        rivals.replace_rows(some_rows(rivals, posterior, method), path)
    rivals.replace_rows(some_rows(rivals, "logistic", "hmc"), path)
    before = read_rows(path)
    assert list(before[0])[-4:] == list(ORIGIN)
    order = [(row["posterior"], row["method"], row["statistic"]) for row in before]
    assert order == [
        (*pair, part)
        for pair in [("logistic", "hmc"), ("logistic", "cva"), ("sparse", "hmc")]
        for part in ("mean", "variance")
    ]
    rivals.replace_rows(some_rows(rivals, "logistic", "cva", 300.0), path)
    after = read_rows(path)
    assert after[:2] == before[:2] and after[4:] == before[4:]
    assert [row["ess_min"] for row in after[2:4]] == ["300", "300"]
    assert [each.name for each in path.parent.iterdir()] == ["rivals.csv"]


def test_a_broken_write_leaves_the_old_file(rivals, tmp_path, monkeypatch):
    path = tmp_path / "rivals.csv"
    rivals.replace_rows(some_rows(rivals, "logistic", "cva"), path)
    before = path.read_text()
    new = some_rows(rivals, "logistic", "hmc")
    with pytest.raises(ValueError, match="stray"):
        rivals.replace_rows([*new, new[0] | {"stray": 1}], path)
    assert path.read_text() == before

    def interrupt(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rivals.replace_rows(new, path)
    assert path.read_text() == before


def test_differences_are_those_from_the_best(rivals, tmp_path):
    zero = np.zeros(4)
    estimates = {
        "hmc": (np.array([0.0, 5.0, 0.0, -2.0]), np.full(4, 1.0)),
        "cva": (np.array([0.0, 0.0, 0.6, 0.0]), np.full(4, 0.3)),
        "antithetic-stein": (zero, np.full(4, 0.1)),
    }
    found = rivals.compare(estimates)
    assert found["hmc"] == pytest.approx((5 / np.hypot(1, 0.1), 2 / np.hypot(1, 0.1)))
    assert found["cva"] == pytest.approx((0, 0.6 / np.hypot(0.3, 0.1)))
    assert found["antithetic-stein"] == found["cva"]
    assert rivals.compare({"hmc": estimates["hmc"]}) == {}
    path = tmp_path / "rivals.csv"
    for posterior in ("logistic", "sparse"):
        rivals.replace_rows(some_rows(rivals, posterior, "hmc"), path)
    rivals.update_agreement("sparse", found, path)
    said = [float(row["agreement"]) for row in read_rows(path)]
    assert np.isnan(said[:2]).all()
    assert said[2:] == pytest.approx(found["hmc"], rel=1e-3)
