"""Is what `estimate` says true, and is it worth its time?

    python benchmarks/estimate.py repeats   # stated errors against real ones
    python benchmarks/estimate.py plain     # error per second against plain HMC

Both write a table into book/results/, which the chapter `estimation` reads.
About 20 minutes each on one core. Name models to run only those.
"""

import argparse
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.reparam import TransformReparam
from scipy.special import logsumexp

import swindles
from swindles import targets
from swindles.models import Model, from_numpyro

sys.path.insert(0, str(Path(__file__).parents[1] / "book"))
from pipeline import as_table, provenance, where, write_rows

RESULTS = Path(__file__).parents[1] / "book" / "results"
REPEATS = 20

EFFECT = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
ERROR = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])


def eight_schools(effect: Any, error: Any) -> None:
    """NumPyro's non-centred example."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("J", len(effect)):
        with numpyro.handlers.reparam(config={"theta": TransformReparam()}):
            theta = numpyro.sample(
                "theta",
                dist.TransformedDistribution(
                    dist.Normal(0.0, 1.0), dist.transforms.AffineTransform(mu, tau)
                ),
            )
        numpyro.sample("obs", dist.Normal(theta, error), obs=effect)


def eight_schools_truth() -> dict[str, np.ndarray]:
    """Exact means: given tau all is Gaussian, and tau is integrated numerically."""
    u = np.linspace(-15, 12, 40_001)  # log tau
    tau = np.exp(u)
    variance = ERROR**2 + tau[:, None] ** 2
    precision = 1 / 25 + (1 / variance).sum(1)
    mu = (EFFECT / variance).sum(1) / precision
    log_weight = (
        -0.5 * np.log(variance).sum(1)
        - 0.5 * (EFFECT**2 / variance).sum(1)
        + 0.5 * mu**2 * precision
        - 0.5 * np.log(precision)
        - np.log1p((tau / 5) ** 2)
        + u
    )
    weight = np.exp(log_weight - logsumexp(log_weight))
    shrunk = tau[:, None] ** 2 / variance
    theta = mu[:, None] + shrunk * (EFFECT - mu[:, None])
    return {"mu": weight @ mu, "tau": weight @ tau, "theta": weight @ theta}


def executions_data() -> tuple[np.ndarray, np.ndarray]:
    """Executions in 17 states in 1997, and what may explain them, from statsmodels."""
    from statsmodels.datasets import cpunish

    data = cpunish.load_pandas()
    x = np.asarray(data.exog, float)
    x = (x - x.mean(0)) / x.std(0)
    return np.column_stack([np.ones(len(x)), x]), np.asarray(data.endog, float)


def poisson_regression(x: Any, y: Any) -> None:
    """A Poisson regression with normal priors."""
    prior = dist.Normal(0, 1).expand([x.shape[1]]).to_event(1)
    b = numpyro.sample("b", prior)
    numpyro.sample("y", dist.Poisson(jnp.exp(x @ b)), obs=y)


def poisson_truth(draws: int = 4_000_000) -> tuple[np.ndarray, np.ndarray]:
    """Means by importance sampling from Student's t at the mode, and their errors."""
    from scipy.optimize import minimize

    x, y = executions_data()

    def logdensity(b: np.ndarray) -> np.ndarray:
        eta = b @ x.T
        return eta @ y - np.exp(eta).sum(-1) - 0.5 * (b**2).sum(-1)

    mode = minimize(lambda b: -logdensity(b), np.zeros(x.shape[1])).x
    rate = np.exp(x @ mode)
    root = np.linalg.cholesky(np.linalg.inv((x.T * rate) @ x + np.eye(len(mode))))
    rng, degrees, sums = np.random.default_rng(0), 8, []
    for _ in range(draws // 100_000):
        z = rng.normal(size=(100_000, len(mode)))
        z /= np.sqrt(rng.chisquare(degrees, 100_000) / degrees)[:, None]
        b = mode + z @ root.T
        log_t = -(degrees + len(mode)) / 2 * np.log1p((z**2).sum(1) / degrees)
        weight = np.exp(logdensity(b) - log_t - logdensity(mode))
        sums.append((weight.sum(), weight @ b))
    each = np.array([mean / total for total, mean in sums])
    total = sum(t for t, _ in sums)
    mean = sum(m for _, m in sums) / total
    return mean, each.std(0, ddof=1) / np.sqrt(len(each))


def logistic_truth() -> tuple[np.ndarray, np.ndarray]:
    """Published means, and their errors, of inference-gym."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from conftest import load_ground_truth

    truth = load_ground_truth("german_credit_numeric_logistic_regression")
    return truth.IDENTITY_MEAN, truth.IDENTITY_MEAN_STANDARD_ERROR


class Case(NamedTuple):
    """A model of others, its true means with their errors, and the error to ask for."""

    model: Callable[[], Model]
    statistics: Callable[[Any], Any]
    truth: Callable[[], tuple[np.ndarray, np.ndarray]]
    relative: float


def schools_truth() -> tuple[np.ndarray, np.ndarray]:
    """In the order of the statistics."""
    truth = eight_schools_truth()
    mean = np.concatenate([[truth["mu"], truth["tau"]], truth["theta"]])
    return mean, np.zeros(10)


CASES = {
    "eight schools": Case(
        lambda: from_numpyro(eight_schools, EFFECT, ERROR),
        lambda site: {name: site[name] for name in ("mu", "tau", "theta")},
        schools_truth,
        0.003,
    ),
    "Poisson regression": Case(
        lambda: from_numpyro(poisson_regression, *executions_data()),
        lambda site: site["b"],
        poisson_truth,
        0.0002,
    ),
    "logistic regression": Case(
        lambda: Model(targets.logistic_regression().logdensity, jnp.zeros(25)),
        lambda x: x,
        logistic_truth,
        0.0001,
    ),
}


def count_steps(report: Any) -> int:
    """Steps of every chain; or weighted points, where there is no chain."""
    if report.job.scheme == "importance":
        return int(report.job.run.gradients)
    return int(np.sum(report.job.run.rows.plus.steps))


def all_seconds(report: Any) -> float:
    """Seconds of a call, set-up included."""
    return float(sum(stage.seconds for stage in report.job.stages.values()))


def repeat(name: str, seed: int, truth: tuple[np.ndarray, np.ndarray]) -> list[dict]:
    """One call of `estimate`, as rows of a table."""
    case = CASES[name]
    report = swindles.estimate(
        case.model(), None, case.statistics, seed, relative=case.relative, seconds=120
    )
    found, sd = report.estimate, np.sqrt(report.estimate.variance)
    about = {
        "model": name,
        "repeat": seed,
        "scheme": report.job.scheme,
        "reached": int(report.reached),
        "trusted": int(report.trusted),
        "steps": count_steps(report),
        "seconds": round(all_seconds(report), 2),
    }
    made_by = provenance("numpyro")
    columns = zip(report.names, found.mean, found.mcse, sd, *truth, strict=True)
    return [
        about
        | {
            "statistic": which,
            "mean": f"{m:.9g}",
            "mcse": e,
            "sd": s,
            "asked": case.relative * s,
        }
        | {"truth": f"{t:.9g}", "truth_error": te}
        | made_by
        for which, m, e, s, t, te in columns
    ]


def funnel(x: Any) -> Any:
    """Neal's funnel in ten dimensions."""
    return -(x[0] ** 2) / 18 - 4.5 * x[0] - 0.5 * jnp.sum(x[1:] ** 2) * jnp.exp(-x[0])


def mixture(x: Any) -> Any:
    """Two normal modes, three standard deviations apart, one with twice the weight."""
    near, far = jnp.sum((x - 1.5) ** 2), jnp.sum((x + 1.5) ** 2)
    return jnp.logaddexp(-near / 2, -far / 2 - jnp.log(2.0))


def student(x: Any) -> Any:
    """Student's t with five degrees of freedom, in five dimensions."""
    return -3 * jnp.sum(jnp.log1p(x**2 / 5))


@cache
def stiff() -> np.ndarray:
    """The precision of a correlated Gaussian of condition 10^4."""
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    return (turn * np.geomspace(1, 1e4, 20)) @ turn.T


def correlated(x: Any) -> Any:
    """That Gaussian."""
    return -0.5 * x @ (jnp.asarray(stiff(), x.dtype) @ x)


POSTERIORS = {
    "logistic": (targets.logistic_regression, 25),
    "sparse": (targets.sparse_logistic_regression, 51),
    "item response": (targets.item_response, 501),
    "funnel": (lambda: funnel, 10),
    "banana": (lambda: targets.banana(), 2),
    "mixture": (lambda: mixture, 2),
    "Student's t": (lambda: student, 5),
    "correlated Gaussian": (lambda: correlated, 20),
}


def race(
    name: str, seed: int, seconds: float, schemes: tuple = (None, "plain")
) -> list[dict]:
    """The same time for `estimate` as it comes and for plain HMC: rows of a table."""
    make, dim = POSTERIORS[name]
    made = make()
    logdensity = getattr(made, "logdensity", made)
    rows = []
    for scheme in schemes:
        report = swindles.estimate(
            logdensity,
            jnp.zeros(dim) + 0.1,
            lambda x: {"mean": x, "square": x**2},
            seed,
            relative=1e-9,
            seconds=seconds,
            scheme=scheme,
        )
        error = report.estimate.mcse / np.sqrt(report.estimate.variance)
        first = report.job.history[0, 1]  # map, pilot, compilation, and one block
        rows.append(
            {
                "posterior": name,
                "repeat": seed,
                "asked": scheme or "",
                "scheme": report.job.scheme,
                "steps": count_steps(report),
                "setup": round(first, 2),
                "seconds": round(all_seconds(report) - first, 3),
                "worst": error.max(),
                "median": np.median(error),
                "rhat": np.nanmax(report.estimate.rhat, initial=1.0),
            }
            | provenance("numpyro")
        )
    return rows


def warn_of_repeats(rows: list[dict]) -> None:
    """Print what is wrong with repeated calls: errors, spread, accuracy, waste."""
    table = as_table(rows)
    for model in dict.fromkeys(table["model"]):
        mine = where(table, model=model)
        repeats = len(np.unique(mine["repeat"]))
        mean, mcse, asked, steps = (
            mine[name].reshape(repeats, -1)
            for name in ("mean", "mcse", "asked", "steps")
        )
        error = np.hypot(mine["mcse"], mine["truth_error"])
        spread = mean.var(0, ddof=1) if repeats > 1 else np.nan * mean[0]
        ratio = np.sqrt((spread / (mcse**2).mean(0)).mean())
        too_long = np.median(1 / (mcse / asked).max(1) ** 2)
        for fault, found in {
            "not all reached or trusted": (mine["reached"] * mine["trusted"]).min() < 1,
            "further off than four errors": (
                np.abs(mine["mean"] - mine["truth"]) > 4 * error
            ).any(),
            f"spread over stated error {ratio:.2f}": not 0.85 < ratio < 1.15,
            "less accurate than asked": np.sqrt((spread / asked.mean(0) ** 2).mean())
            > 1.1,
            f"{too_long:.1f} times as long as needed": too_long > 2
            and np.median(steps) > 80,
        }.items():
            if found:
                print(f"WARNING: {model}: {fault}")


def warn_of_races(rows: list[dict]) -> None:
    """Print where plain HMC is ahead: error times the root of the seconds."""
    table = as_table(rows)
    for name in dict.fromkeys(table["posterior"]):
        best, plain = (
            where(table, posterior=name, asked=asked) for asked in ("", "plain")
        )
        cost = [
            np.mean(np.log(part["worst"]) + np.log(part["seconds"]) / 2)
            for part in (best, plain)
        ]
        if np.exp(cost[0] - cost[1]) > 1.2:
            ratio = np.exp(cost[0] - cost[1])
            print(f"WARNING: {name}: {ratio:.2f} times the error of plain HMC")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["repeats", "plain"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--number", type=int, help="how many repeats")
    arguments = parser.parse_args()
    known = CASES if arguments.what == "repeats" else POSTERIORS
    path = RESULTS / f"estimate_{arguments.what}.csv"
    rows: list[dict] = []
    for name in arguments.names or known:
        truth = CASES[name].truth() if arguments.what == "repeats" else None
        for seed in range(arguments.number or (3 if truth is None else REPEATS)):
            if truth is None:
                rows += race(name, seed, arguments.seconds)
            else:
                rows += repeat(name, seed, truth)
            print(rows[-1], flush=True)
            if not arguments.names:
                write_rows(path, rows)
    (warn_of_repeats if arguments.what == "repeats" else warn_of_races)(rows)


if __name__ == "__main__":
    main()
