"""Can `estimate` be fooled, and does it cry wolf? Calls whose answers are known.

    python benchmarks/guards.py                  # hostile targets, 5 keys each
    python benchmarks/guards.py harmless         # smooth ones, 20 keys each
    python benchmarks/guards.py hostile rosenbrock ring --keys 2
    python benchmarks/guards.py harmless --scheme antithetic  # false alarms of chains

A line for each target: how many calls were right and trusted, flagged, wrong and
trusted (by more than 4 stated errors), or failed; the median time; what was said.
"""

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
from scipy import integrate, special, stats


class Case(NamedTuple):
    """A call, and its answer."""

    model: Any
    position: Any
    statistics: Callable | None
    truth: Any  # None: not known, only trust counts
    options: dict[str, Any] = {}  # noqa: RUF012


def normal(x: Any) -> Any:
    """Log density of a standard normal."""
    return -0.5 * x @ x


def moment_1d(logdensity: Callable, power: int, reach: float = 40.0) -> float:
    """A moment of a density on the line, by quadrature."""
    import jax

    x = np.linspace(-reach, reach, 400_001)
    with jax.enable_x64(True), np.errstate(over="ignore"):
        log = np.array(logdensity(x), np.float64)
    weight = np.exp(log - log.max())
    total = integrate.trapezoid(weight, x)
    return float(integrate.trapezoid(weight * x**power, x) / total)


def two_modes(dim: int, far: float) -> Case:
    """30 % of the mass far away."""
    import jax.numpy as jnp

    def density(x: Any) -> Any:
        other = normal(x - far * jnp.eye(dim)[0])
        return jnp.logaddexp(jnp.log(0.7) + normal(x), jnp.log(0.3) + other)

    return Case(density, np.zeros(dim), lambda x: x[:1], [0.3 * far])


def label_switching() -> Case:
    """Two exchangeable means of a mixture."""
    import jax.numpy as jnp

    y = np.random.default_rng(0).normal(np.repeat([-2.0, 2.0], 30), 1.0)

    def density(mean: Any) -> Any:
        each = -0.5 * (y[:, None] - mean) ** 2
        return jnp.logaddexp(each[:, 0], each[:, 1]).sum() - 0.005 * mean @ mean

    grid = np.linspace(-6, 6, 1201)
    a, b = np.meshgrid(grid, grid, indexing="ij")
    log = -0.005 * (a**2 + b**2)
    for value in y:
        log += np.logaddexp(-0.5 * (value - a) ** 2, -0.5 * (value - b) ** 2)
    weight = np.exp(log - log.max())
    truth = (weight * a).sum() / weight.sum()
    return Case(density, np.array([0.3, -0.2]), None, [truth, truth])


def eight_schools(as_density: bool) -> Case:
    """Centred, as it stands in textbooks: in NumPyro, or as a log density."""
    import jax.numpy as jnp
    import numpyro
    from numpyro import distributions as dist

    import swindles

    effect = np.array([28, 8, -3, 7, -1, 1, 18, 12.0])
    error = np.array([15, 10, 16, 11, 9, 11, 10, 18.0])

    def schools() -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([8]).to_event(1))
        numpyro.sample("y", dist.Normal(theta, error), obs=effect)

    def density(x: Any) -> Any:
        mu, log_tau, theta = x[0], x[1], x[2:]
        tau = jnp.exp(log_tau)
        prior = -0.5 * (mu / 5) ** 2 - jnp.log1p((tau / 5) ** 2) + log_tau
        middle = -0.5 * jnp.sum(((theta - mu) / tau) ** 2) - 8 * log_tau
        return prior + middle - 0.5 * jnp.sum(((effect - theta) / error) ** 2)

    log_tau = np.linspace(-30, 8, 20_001)
    tau2 = np.exp(2 * log_tau)[:, None]
    precision = 1 / (error**2 + tau2)
    spread = 1 / (precision.sum(1) + 1 / 25)
    middle = spread * (precision * effect).sum(1)
    log = 0.5 * np.log(precision).sum(1) + 0.5 * np.log(spread)
    log += 0.5 * middle**2 / spread - 0.5 * (precision * effect**2).sum(1)
    log += log_tau - np.log1p(tau2[:, 0] / 25)
    weight = np.exp(log - log.max())
    truth = [(weight * log_tau).sum() / weight.sum()]
    if as_density:
        return Case(density, np.zeros(10), lambda x: x[1], truth)
    model = swindles.from_numpyro(schools)
    return Case(model, None, lambda v: jnp.log(v["tau"]), truth)


def jump() -> Case:
    """A step of -0.5 in the log density at two deviations."""
    low, step = stats.norm.pdf(2), np.exp(-0.5)
    total = stats.norm.cdf(2) + step * stats.norm.sf(2)
    truth = [(step - 1) * low / total]
    return Case(lambda x: normal(x) - 0.5 * (x[0] > 2), np.zeros(1), None, truth)


def box(scheme: str | None = None) -> Case:
    """A box at 3.9 deviations, five parameters."""
    import jax.numpy as jnp

    truth = 1 - 2 * 3.9 * stats.norm.pdf(3.9) / (2 * stats.norm.cdf(3.9) - 1)
    return Case(
        lambda x: jnp.where(jnp.all(jnp.abs(x) < 3.9), normal(x), -jnp.inf),
        np.zeros(5),
        lambda x: x**2,
        np.full(5, truth),
        {"scheme": scheme},
    )


def cut() -> Case:
    """Cut off at 3.2 deviations, with Stein features asked for."""
    import jax.numpy as jnp

    return Case(
        lambda x: jnp.where(x[0] < 3.2, normal(x), -jnp.inf),
        np.zeros(1),
        None,
        [-stats.norm.pdf(3.2) / stats.norm.cdf(3.2)],
        {"scheme": "stein"},
    )


def rosenbrock(dim: int, scheme: str | None = None) -> Case:
    """A long, thin, bent valley."""
    import jax.numpy as jnp

    def density(x: Any) -> Any:
        a, b = x[0::2], x[1::2]
        return -jnp.sum(100 * (b - a**2) ** 2 + (1 - a) ** 2) / 20

    truth = np.full(dim // 2, 11.0)
    return Case(density, np.zeros(dim), lambda x: x[1::2], truth, {"scheme": scheme})


def spike() -> Case:
    """A tenth of the mass in a spike inside the bulk."""
    import jax.numpy as jnp

    def density(x: Any) -> Any:
        narrow = -0.5 * ((x[0] - 1.5) / 0.02) ** 2 - jnp.log(0.02)
        return jnp.logaddexp(jnp.log(0.9) + normal(x), jnp.log(0.1) + narrow)

    return Case(density, np.zeros(1), None, [0.15])


def student(degrees: float, statistic: Callable, truth: float) -> Case:
    """Heavy tails."""
    import jax.numpy as jnp

    def density(x: Any) -> Any:
        return -(degrees + 1) / 2 * jnp.sum(jnp.log1p(x**2 / degrees))

    return Case(density, np.zeros(1), statistic, [truth])


def funnel(dim: int) -> Case:
    """Neal's."""
    import jax.numpy as jnp

    def density(x: Any) -> Any:
        v, rest = x[0], x[1:]
        below = 0.5 * jnp.exp(-v) * rest @ rest + 0.5 * (dim - 1) * v
        return -0.5 * (v / 3) ** 2 - below

    def statistics(x: Any) -> Any:
        return jnp.stack([x[0], x[0] ** 2])

    return Case(density, np.zeros(dim), statistics, [0.0, 9.0])


def ring() -> Case:
    """A ring of radius ten, in the plane."""
    import jax.numpy as jnp

    def density(x: Any) -> Any:
        return -0.5 * (jnp.sqrt(x @ x + 1e-12) - 10) ** 2

    r = np.linspace(0, 30, 300_001)
    weight = r * np.exp(-0.5 * (r - 10) ** 2)
    truth = (weight * r**2).sum() / weight.sum() / 2
    statistics = lambda x: jnp.append(x, x**2)  # noqa: E731
    return Case(density, np.array([1.0, 0.0]), statistics, [0, 0, truth, truth])


def shifted(statistics: Callable, truth: float, **options: Any) -> Case:
    """A normal whose mean is 0.3."""
    return Case(lambda x: normal(x - 0.3), np.zeros(1), statistics, [truth], options)


def needle() -> Case:
    """A third of the mass in a narrow mode that is far away, in the plane."""
    import jax.numpy as jnp

    def density(x: Any) -> Any:
        away = (x - jnp.array([10.0, 0.0])) / 0.2
        narrow = jnp.log(1 / 3) - 0.5 * away @ away - 2 * jnp.log(0.2)
        return jnp.logaddexp(jnp.log(2 / 3) + normal(x), narrow)

    return Case(density, np.zeros(2), lambda x: x[:1], [10 / 3])


def hostile() -> dict[str, Callable[[], Case]]:
    """What is made to fool it."""
    import jax.numpy as jnp

    tail = stats.norm.sf(3.9) - stats.norm.sf(4.5)
    gamma = np.exp(special.gammaln(0.25) - special.gammaln(0.75))
    mean_abs = np.sqrt(1.5) * gamma / np.sqrt(np.pi)
    return {
        "schools, NumPyro": lambda: eight_schools(False),
        "schools, density": lambda: eight_schools(True),
        "rosenbrock 2": lambda: rosenbrock(2),
        "rosenbrock 2, plain": lambda: rosenbrock(2, "plain"),
        "rosenbrock 10": lambda: rosenbrock(10),
        "jump": jump,
        "box": box,
        "box, stein": lambda: box("stein"),
        "cut, stein": cut,
        "modes 12, D 1": lambda: two_modes(1, 12.0),
        "modes 20, D 1": lambda: two_modes(1, 20.0),
        "modes 12, D 10": lambda: two_modes(10, 12.0),
        "modes 20, D 10": lambda: two_modes(10, 20.0),
        "label switching": label_switching,
        "spike": spike,
        "needle": needle,
        "t 1.5, |x|": lambda: student(1.5, jnp.abs, mean_abs),
        "cauchy, sqrt": lambda: student(1, lambda x: jnp.abs(x) ** 0.5, np.sqrt(2)),
        "rare event": lambda: shifted(lambda x: x > 4.7, stats.norm.sf(4.4)),
        "mean 1e4, float32": lambda: Case(
            lambda x: normal((x - 1e4) / 0.01),
            np.full(1, 1e4),
            None,
            [1e4],
            {"dtype": "float32", "relative": 3e-5},
        ),
        "constant 1e8, float32": lambda: Case(
            lambda x: normal(x) + 1e8,
            np.full(1, 0.3),
            jnp.square,
            [1.0],
            {"dtype": "float32"},
        ),
        "integer part, CVA": lambda: shifted(
            lambda x: (x / 4.2).astype(int), tail, scheme="cva"
        ),
        "funnel 3": lambda: funnel(3),
        "funnel 10": lambda: funnel(10),
        "ring": ring,
    }


def toy(density: Callable, dim: int, power: int = 2) -> Case:
    """Alike coordinates; the mean and the second moment of each."""
    import jax.numpy as jnp

    each = [moment_1d(density, k) for k in range(1, power + 1)]
    return Case(
        lambda x: jnp.sum(density(x)),
        np.zeros(dim),
        lambda x: jnp.concatenate([x**k for k in range(1, power + 1)]),
        np.repeat(each, dim),
    )


def regression(kind: str) -> Case:
    """A regression on data drawn for it."""
    import jax.numpy as jnp

    rng = np.random.default_rng(1)
    x = np.column_stack([np.ones(200), rng.normal(size=(200, 4))])
    line = x @ np.array([0.5, 0.8, -0.4, 0.0, 0.3])
    y = {
        "logistic": 1.0 * (rng.random(200) < special.expit(line)),
        "Poisson": 1.0 * rng.poisson(np.exp(line)),
        "normal": line + rng.normal(size=200),
        "Student": line + rng.standard_t(4, 200),
        "probit": 1.0 * (line + rng.normal(size=200) > 0),
    }[kind]

    def density(w: Any) -> Any:
        at, log_sd = x @ w[:5], w[-1]
        away = (y - at) * jnp.exp(-log_sd)
        likelihood = {
            "logistic": lambda: y * at - jnp.logaddexp(0, at),
            "Poisson": lambda: y * at - jnp.exp(at),
            "normal": lambda: -0.5 * away**2 - log_sd,
            "Student": lambda: -2.5 * jnp.log1p(away**2 / 4) - log_sd,
            "probit": lambda: __import__("jax").scipy.special.log_ndtr(
                (2 * y - 1) * at
            ),
        }[kind]()
        return jnp.sum(likelihood) - 0.5 * w @ w

    return Case(density, np.zeros(6), lambda w: jnp.append(w, w**2), None)


def posterior(name: str) -> Case:
    """One of the paper's."""
    import jax.numpy as jnp

    from swindles import targets

    target = getattr(targets, name)()
    return Case(
        target.logdensity,
        np.asarray(target.position),
        lambda x: jnp.append(x, x**2),
        None,
    )


def correlated(dim: int) -> Case:
    """A normal with strong correlations."""
    import jax.numpy as jnp

    root = np.tril(np.random.default_rng(2).normal(size=(dim, dim))) + 2 * np.eye(dim)
    precision = np.linalg.inv(root @ root.T)
    truth = np.append(np.ones(dim), 1 + np.diagonal(root @ root.T))
    return Case(
        lambda x: -0.5 * (x - 1) @ precision @ (x - 1),
        np.zeros(dim),
        lambda x: jnp.append(x, x**2),
        truth,
    )


def banana() -> Case:
    """A little bent."""
    import jax.numpy as jnp

    return Case(
        lambda x: -0.5 * x[0] ** 2 - 0.5 * (x[1] - 0.3 * x[0] ** 2) ** 2,
        np.zeros(2),
        lambda x: jnp.append(x, x**2),
        [0, 0.3, 1, 1 + 3 * 0.09],
    )


def harmless() -> dict[str, Callable[[], Case]]:
    """What people fit."""
    import jax.numpy as jnp

    kinds = ("logistic", "Poisson", "normal", "Student", "probit")
    chosen = {kind: (lambda kind=kind: regression(kind)) for kind in kinds}
    return chosen | {
        "cosh": lambda: toy(lambda x: -jnp.cosh(x), 2),
        "log gamma": lambda: toy(lambda x: 3 * x - jnp.exp(x), 3),
        "skewed": lambda: toy(lambda x: -0.5 * x**2 - jnp.logaddexp(0, -2 * x), 3),
        "quartic": lambda: toy(lambda x: -(x**4) / 4 - x**2 / 4, 2),
        "t 10": lambda: toy(lambda x: -5.5 * jnp.log1p(x**2 / 10), 2),
        "Gumbel": lambda: toy(lambda x: -x - jnp.exp(-x), 2),
        "logistic toy": lambda: toy(lambda x: -x - 2 * jnp.logaddexp(0, -x), 4),
        "two near modes": lambda: toy(
            lambda x: jnp.logaddexp(-0.5 * (x - 1.2) ** 2, -0.5 * (x + 1.2) ** 2), 2
        ),
        "correlated": lambda: correlated(10),
        "banana": banana,
        "German credit": lambda: posterior("logistic_regression"),
        "sparse": lambda: posterior("sparse_logistic_regression"),
        "item response": lambda: posterior("item_response"),
    }


SETS = {"hostile": hostile, "harmless": harmless}


def call(case: Case, key: int) -> tuple[str, float, str]:
    """The verdict on one call, its seconds, and what was said."""
    import swindles

    begin = time.perf_counter()
    try:
        report = swindles.estimate(
            case.model, case.position, case.statistics, key, **case.options
        )
    except Exception as error:  # whatever goes wrong is what is to be shown
        return "failed", time.perf_counter() - begin, repr(error)[:150]
    seconds, found = time.perf_counter() - begin, report.estimate
    said = f"{report.job.scheme}: {'; '.join(report.warnings)[:150]}"
    if not report.trusted:
        return "flagged", seconds, said
    if case.truth is None:
        return "trusted", seconds, said
    away = np.abs(found.mean - np.asarray(case.truth, np.float64))
    score = float((away / (found.mcse + 1e-12)).max())
    if score > 4:
        return "WRONG", seconds, f"{said} {score:.1f} errors off"
    return "right", seconds, said


def run_case(
    group: str, name: str, keys: int, scheme: str | None
) -> list[tuple[str, float, str]]:
    """All calls on one target, in a process of its own."""
    case = SETS[group]()[name]()
    if scheme:
        case = case._replace(options=case.options | {"scheme": scheme})
    return [call(case, key) for key in range(keys)]


def main() -> None:
    """A line for each target, and one for all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", nargs="?", default="hostile", choices=SETS)
    parser.add_argument("names", nargs="*", help="targets whose names contain one")
    parser.add_argument("--keys", type=int, help="calls on each target")
    parser.add_argument("--scheme", help="to ask for, in place of the usual way")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"  # in the calls
    keys = options.keys or {"hostile": 5, "harmless": 20}[options.group]
    wanted = options.names or [""]
    names = [n for n in SETS[options.group]() if any(part in n for part in wanted)]
    total: Counter = Counter()
    pool = ProcessPoolExecutor(
        options.workers, get_context("spawn"), max_tasks_per_child=1
    )
    with pool:
        waiting = {
            name: pool.submit(run_case, options.group, name, keys, options.scheme)
            for name in names
        }
        for name, future in waiting.items():
            found = future.result()
            counts = Counter(verdict for verdict, _, _ in found)
            total += counts
            words = {said for verdict, _, said in found if verdict != "right"}
            seconds = np.median([seconds for _, seconds, _ in found])
            print(f"{name:22} {dict(counts)}  {seconds:.1f} s", flush=True)
            for said in sorted(words - {""}):
                print(f"{'':24}{said}", flush=True)
    print(dict(total), f"of {len(names) * keys} calls")


if __name__ == "__main__":
    main()
