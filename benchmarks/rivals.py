"""Swindles against what else there is, at equal wall time.

    python benchmarks/rivals.py

writes book/results/rivals.csv, which the chapter on rivals reads: about half an hour on
two cores. Name one or more of logistic, item, sparse to do only these; rows of the
others stay. So do those of other methods when some are named:

    python benchmarks/rivals.py item --method cva --method hmc --seconds 10

numpyro-nuts      NumPyro's NUTS on the original parameters, all chains adapting
blackjax-nuts     BlackJAX's NUTS there, one chain adapting for all
hmc               BlackJAX's HMC after the map
zv-first          the same with zero-variance control variates of first order
zv-second         and of second order (diagonal on item response)
cva               HMC-CVA after the map: the paper's best
antithetic-stein  an antithetic pair with Stein features of second order, likewise

Every pair of posterior and method has a process of its own. ``seconds_setup`` is all
that comes before sampling, imports apart: the map (but the flow of the sparse
posterior comes with the package), adaptation, a warm-up that learns the coefficients,
and a first short chunk with what it compiles. ``first_result`` is when the estimate
from that chunk is there. Its draws are then forgotten; equal chunks are drawn until
the budget is used, and ``seconds_sampling`` ends with the estimate. ESS divides the
variance under the posterior by the squared error between chains, or of rounding where
that is larger. Variances are mean squared deviations from a fixed center, that of the
map.
``agreement`` is the largest difference from the best method of the posterior, in
combined standard errors; the best one is compared with the second. Estimates wait in
_build/rivals for their fellows.

    python benchmarks/rivals.py item --method blackjax-nuts --dense

has NUTS adapt a dense mass matrix on item response, too, and writes nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.base import SamplingAlgorithm
from numpyro.infer import MCMC, NUTS

from swindles.antithetic import estimate_series, fold_series, pair_series
from swindles.control import reference_mean
from swindles.coupling import Total, couple, hmc, is_total, run, start
from swindles.models import Model, make_problem
from swindles.schemes import SCHEMES, finish_run, learn, plan_series
from swindles.stein import Order
from swindles.tuning import adapt_step_size

sys.path.insert(0, str(Path(__file__).parents[1] / "book"))
from experiments import fit_transport, load_model, mean_and_variance
from pipeline import peak_memory, provenance, read_rows, write_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "book" / "results" / "rivals.csv"
ESTIMATES = ROOT / "_build" / "rivals"
NUM_CHAINS = 64  # or pairs, or triples
NUM_CHUNKS = 20  # of a run
FIRST = 20  # steps of the first chunk
TYPICAL_DRAWS = 1_000_000  # of a run: the error of a known mean is weighed against them
PARTS = ("mean", "variance")


class Posterior(NamedTuple):
    """A posterior, and the settings that depend on it."""

    make: Callable[[], Model]
    fit: Callable[[Model], Any]  # its map
    dense: bool = True  # mass matrix of NUTS
    adaptation: int = 600  # steps of NumPyro, all chains
    warmup: int = 100  # steps of HMC, after those that find the step size
    learning: int = 1000  # the same, where many coefficients are learned from them
    acceptance: float = 0.95  # that the swindles aim at
    order: Order = "full"  # of the Stein features


# On item response a dense matrix would need many more draws than there are parameters:
# NUTS is far faster with a diagonal one. On the sparse posterior the swindles accept
# less, as `tune` recommends.
SETTINGS = {
    "logistic": {},
    "item": {
        "dense": False,
        "adaptation": 200,
        "warmup": 50,
        "learning": 600,
        "order": "diagonal",
    },
    "sparse": {"warmup": 300, "learning": 1200, "acceptance": 0.9},
}
POSTERIORS = {
    name: Posterior(partial(load_model, name), partial(fit_transport, name), **settings)
    for name, settings in SETTINGS.items()
}


def count_gradients(fold):
    """Sum the gradients of the target beside the sums of another fold."""
    zero, update = fold

    def counting(sums, states, infos):
        leaps = [
            info.num_integration_steps
            for name, info in infos._asdict().items()
            if name != "control"
        ]
        number = sum(jnp.sum(each, dtype=float) for each in leaps)
        return update(sums[0], states, infos), Total(sums[1].value + number)

    return (zero, Total(jnp.zeros(()))), counting


def join(parts):
    """The sums of several runs as those of one."""

    def both(*leaves):
        if is_total(leaves[0]):
            return Total(sum(leaf.value for leaf in leaves))
        return np.concatenate(leaves)

    return jax.tree.map(both, *parts, is_leaf=is_total)


class Chains:
    """All chains of a method, and the sums of what they have drawn."""

    def __init__(self, key, algorithm, states, fold, finish, settings):
        self.key, self.algorithm, self.states = key, algorithm, states
        self.fold, self.finish, self.settings = count_gradients(fold), finish, settings
        self.parts, self.calls = [], 0

    def draw(self, steps):
        """Draw one more chunk."""
        key, self.calls = jax.random.fold_in(self.key, self.calls), self.calls + 1
        self.states, sums = run(
            key, self.algorithm, self.states, steps, self.fold, 1, False
        )
        self.parts.append(sums)

    def forget(self):
        """Forget all draws, but stay where they have led."""
        self.parts = []

    def result(self):
        """The estimate from all draws, and the gradients that they cost."""
        sums, gradients = join(self.parts)
        return self.finish(sums), float(gradients.value)


def spread_out(key, shape):
    """Starts without a map: uniform from -2 to 2, as Stan and NumPyro do."""
    return jax.random.uniform(key, shape, minval=-2, maxval=2)


class NumPyroState(NamedTuple):
    """A state of NumPyro's, with the name for positions that BlackJAX uses."""

    position: Any
    inner: Any


class NumPyroInfo(NamedTuple):
    """What the sums want to know about a step."""

    acceptance_rate: Any
    num_integration_steps: Any


def numpyro_algorithm(kernel):
    """NumPyro's kernel, after warm-up, as a sampling algorithm for one chain."""

    def step(key, state):
        # After a vectorised warm-up the kernel wants an axis of chains.
        one = jax.tree.map(lambda x: x[None], state.inner._replace(rng_key=key))
        inner = jax.tree.map(lambda x: x[0], kernel.sample(one, (), {}))
        info = NumPyroInfo(inner.accept_prob, inner.num_steps)
        return NumPyroState(inner.z, inner), info

    return SamplingAlgorithm(lambda state, _=None: NumPyroState(state.z, state), step)


def numpyro_nuts(posterior, center, key):
    """NumPyro's NUTS: every chain has its own step size and mass matrix."""
    keys, target = jax.random.split(key, 3), posterior.make()
    kernel = NUTS(
        potential_fn=lambda x: -target.logdensity(x), dense_mass=posterior.dense
    )
    mcmc = MCMC(
        kernel,
        num_warmup=posterior.adaptation,
        num_samples=1,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    begin = spread_out(keys[0], (NUM_CHAINS, target.dim))
    mcmc.warmup(keys[1], init_params=begin)
    algorithm = couple(plus=numpyro_algorithm(kernel))
    states = start(algorithm, mcmc.last_state)
    sizes = np.asarray(mcmc.last_state.adapt_state.step_size)
    settings = f"step {np.median(sizes):.3g}, adapted in {posterior.adaptation} steps"
    fold = fold_series(pair_series(partial(mean_and_variance, center)), states)
    return Chains(keys[2], algorithm, states, fold, estimate_series, settings)


def keep_positions(state, info, adaptation):
    """What to keep of an adaptation: by default it is every mass matrix."""
    return state.position


def blackjax_nuts(posterior, center, key, adaptation=1000, warmup=100):
    """BlackJAX's NUTS: one chain adapts, all start where it has been."""
    keys, target = jax.random.split(key, 4), posterior.make()
    window = blackjax.window_adaptation(
        blackjax.nuts,
        target.logdensity,
        is_mass_matrix_diagonal=not posterior.dense,
        adaptation_info_fn=keep_positions,
    )
    begin = spread_out(keys[0], (target.dim,))
    adapt = jax.jit(window.run, static_argnames="num_steps")
    (_, found), trail = adapt(keys[1], begin, num_steps=adaptation)
    algorithm = couple(plus=blackjax.nuts(target.logdensity, **found))
    later = np.linspace(adaptation // 2, adaptation - 1, NUM_CHAINS).astype(int)
    states = start(algorithm, trail[later])
    settings = f"step {found['step_size']:.3g}, one chain adapted in {adaptation} steps"
    fold = fold_series(pair_series(partial(mean_and_variance, center)), states)
    chains = Chains(keys[3], algorithm, states, fold, estimate_series, settings)
    chains.draw(warmup)
    chains.forget()
    return chains


def after_map(posterior, center, key, scheme, order):
    """HMC in latent space, by some scheme; trajectories have the length pi / 2.

    The warm-up learns the coefficients of the scheme, if it has any.
    """
    keys, model = jax.random.split(key, 4), posterior.make()
    statistics = partial(mean_and_variance, center)
    problem = make_problem(model, statistics).through(posterior.fit(model))
    chains, swindled = SCHEMES[scheme], len(SCHEMES[scheme].chains) > 1
    target = posterior.acceptance if swindled else 0.8
    found = adapt_step_size(keys[0], problem, target=target, num_chains=NUM_CHAINS)
    sampler = hmc(found.step_size, found.num_integration_steps)
    algorithm = chains.build(sampler, problem.logdensity)
    states = start(algorithm, found.positions)
    expectation = (
        reference_mean(keys[1], problem, 1_000_000) if chains.has_control else None
    )
    steps = posterior.learning if chains.stein else posterior.warmup
    states, plan, learned = learn(
        keys[2],
        algorithm,
        states,
        problem,
        scheme,
        steps,
        TYPICAL_DRAWS,
        expectation,
        order,
    )
    fold = fold_series(plan_series(plan, problem.statistic), states, plan.center)
    settings = f"step {found.step_size:.3g}, {found.num_integration_steps} leaps"
    finish = partial(finish_run, plan=plan, learned=learned)
    return Chains(keys[3], algorithm, states, fold, finish, settings)


def latent_method(scheme, order="none"):
    """A method that runs after the map; the order None is the posterior's highest."""

    def prepare(posterior, center, key):
        return after_map(posterior, center, key, scheme, order or posterior.order)

    return prepare


METHODS = {
    "numpyro-nuts": numpyro_nuts,
    "blackjax-nuts": blackjax_nuts,
    "hmc": latent_method("plain"),
    "zv-first": latent_method("stein", "first"),
    "zv-second": latent_method("stein", None),
    "cva": latent_method("cva"),
    "antithetic-stein": latent_method("antithetic+stein", None),
}


def find_center(posterior):
    """Means of the map, for the squared deviations of all methods."""
    model = posterior.make()
    problem = make_problem(model).through(posterior.fit(model))
    return reference_mean(jax.random.key(4), problem).mean


def usable_error(estimate):
    """Standard errors, but none below what rounding may do."""
    return np.maximum(estimate.mcse, estimate.rounding)


def first_estimate(chains, chunks=10):
    """An estimate whose errors are all finite, from as few chunks as that takes."""
    for _ in range(chunks):
        result, _ = chains.result()
        if np.isfinite(result.estimate.mcse).all():
            return result
        chains.draw(FIRST)
    raise ValueError(f"some errors are not finite after {chunks} chunks")


def plan_chunks(chains, seconds):
    """How many steps make a chunk; from runs that double until they can be timed."""
    steps = FIRST
    while True:
        begin = time.perf_counter()
        chains.draw(steps)
        spent = time.perf_counter() - begin
        if spent > seconds / NUM_CHUNKS / 4:
            return max(int(steps * seconds / NUM_CHUNKS / spent), 1)
        steps *= 2


def measure(posterior, method, seconds, center, seed=0):
    """Run one method: its measurements, and mean and error of every statistic."""
    clock = time.perf_counter
    center = jnp.asarray(center, float)
    begin = clock()
    chains = METHODS[method](posterior, center, jax.random.key(seed))
    chains.draw(FIRST)
    setup = clock() - begin
    first_estimate(chains)
    first = clock() - begin
    steps = plan_chunks(chains, seconds)
    chains.forget()
    begin = clock()
    while clock() - begin < seconds:
        chains.draw(steps)
    result, gradients = chains.result()
    sampling = clock() - begin
    estimate = result.estimate
    error = usable_error(estimate)
    found = {
        "seconds_setup": setup,
        "first_result": first,
        "seconds_sampling": sampling,
        "peak_mb": peak_memory(),
        "draws": estimate.num_draws,
        "chains": NUM_CHAINS,
        "gradients": gradients,
        "acceptance": result.rates["acceptance"]["plus"],
        "rhat": float(np.max(estimate.rhat)),
        "rounded": float(np.mean(estimate.mcse < estimate.rounding)),
        "settings": chains.settings,
    }
    return found, estimate.mean, error, estimate.variance


def make_rows(posterior, method, seconds, found, mean, error, variance):
    """Two rows of the table: one for the means, one for the variances."""
    ess = np.reshape(variance / error**2, (len(PARTS), -1))
    made_by = provenance("numpyro")
    return [
        {"posterior": posterior, "method": method, "statistic": part}
        | {"ess_min": each.min(), "ess_median": float(np.median(each))}
        | found
        | {"agreement": np.nan, "seconds": seconds}
        | made_by
        for part, each in zip(PARTS, ess, strict=True)
    ]


def largest_difference(one, other):
    """Largest difference of two pairs (mean, error), in combined standard errors."""
    gap, error = np.abs(one[0] - other[0]), np.hypot(one[1], other[1])
    return float(np.max(gap / error))


def by_part(pair):
    """Split means and errors into those of the means and those of the variances."""
    return [
        tuple(np.split(np.asarray(each), len(PARTS))[i] for each in pair)
        for i in range(len(PARTS))
    ]


def compare(estimates):
    """How far each method is from the best: {method: (of means, of variances)}.

    ``estimates`` has means and errors by method. The best has the smallest errors,
    geometric mean over the statistics. It is compared with the second best.
    """
    size = {name: np.mean(np.log(error)) for name, (_, error) in estimates.items()}
    order = sorted(size, key=size.get)
    if len(order) < 2:
        return {}
    other = {name: order[0] for name in order} | {order[0]: order[1]}
    return {
        name: tuple(
            largest_difference(*both)
            for both in zip(
                by_part(estimates[name]), by_part(estimates[other[name]]), strict=True
            )
        )
        for name in order
    }


def place(row):
    """Where a row belongs in the table."""
    names = list(POSTERIORS), list(METHODS), PARTS
    keys = row["posterior"], row["method"], row["statistic"]
    return [each.index(key) for each, key in zip(names, keys, strict=True)]


def replace_rows(new, path=RESULTS):
    """Put rows in the place of those of the same posterior and method."""
    mine = {(row["posterior"], row["method"]) for row in new}
    rows = read_rows(path)
    kept = [row for row in rows if (row["posterior"], row["method"]) not in mine]
    write_rows(path, sorted(new + kept, key=place))


def update_agreement(posterior, differences, path=RESULTS):
    """Write the differences of ``compare`` into the rows of a posterior."""
    rows = read_rows(path)
    for row in rows:
        if row["posterior"] == posterior and row["method"] in differences:
            part = PARTS.index(row["statistic"])
            row["agreement"] = float(differences[row["method"]][part])
    write_rows(path, rows)


def waiting(posterior):
    """The estimates of all methods that have been run on this machine."""
    found = {}
    for method in METHODS:
        path = ESTIMATES / f"{posterior}-{method}.npz"
        if path.exists():
            with np.load(path) as file:
                found[method] = file["mean"], file["error"]
    return found


def child(posterior, method, seconds, dense):
    """What a process of its own does: leave an estimate, or the center, in a file."""
    ESTIMATES.mkdir(parents=True, exist_ok=True)
    setting = POSTERIORS[posterior]
    if method == "center":
        np.save(ESTIMATES / f"{posterior}-center.npy", find_center(setting))
        return
    if dense:
        setting = setting._replace(dense=True)
    center = np.load(ESTIMATES / f"{posterior}-center.npy")
    found, mean, error, variance = measure(setting, method, seconds, center)
    rows = make_rows(posterior, method, seconds, found, mean, error, variance)
    path = ESTIMATES / (f"{posterior}-{method}" + ("-dense" if dense else ""))
    np.savez(path, mean=mean, error=error, rows=json.dumps(rows, default=float))


def spawn(posterior, method, seconds, dense=False):
    """Run ``child`` in a process of its own; whether that went well."""
    command = [sys.executable, __file__, posterior, "--method", method, "--child"]
    command += ["--seconds", str(seconds)] + ["--dense"] * dense
    quiet = os.environ | {"TQDM_DISABLE": "1"}
    return subprocess.run(command, env=quiet).returncode == 0


def report(rows):
    """Print what a method has reached."""
    for row in rows:
        rate = row["ess_median"] / row["seconds_sampling"]
        least = row["ess_min"] / row["seconds_sampling"]
        print(
            f"{row['posterior']:9} {row['method']:17} {row['statistic']:9}"
            f"ESS/s {rate:9.3g}, least {least:9.3g}; set-up "
            f"{row['seconds_setup']:5.1f} s, first {row['first_result']:5.1f} s, "
            f"{row['peak_mb']:5.0f} MB, R-hat {row['rhat']:.2f}",
            flush=True,
        )


def benchmark(posterior, methods, seconds, dense):
    """Run some methods on a posterior, and name those that fail."""
    if not spawn(posterior, "center", seconds):
        return [f"{posterior} center"]
    failed = []
    for method in methods:
        if not spawn(posterior, method, seconds, dense):
            failed.append(f"{posterior} {method}")
            continue
        name = f"{posterior}-{method}" + ("-dense" if dense else "")
        with np.load(ESTIMATES / f"{name}.npz") as file:
            rows = json.loads(str(file["rows"]))
        report(rows)
        if dense:
            continue
        replace_rows(rows)
        update_agreement(posterior, compare(waiting(posterior)))
    return failed


def warn(posteriors):
    """Print which estimates differ from the best by more than five standard errors."""
    for row in read_rows(RESULTS):
        if row["posterior"] in posteriors and not float(row["agreement"]) < 5:
            print(
                f"WARNING: {row['posterior']} {row['method']} {row['statistic']}: "
                f"{row['agreement']} standard errors from the best (R-hat "
                f"{row['rhat']})"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("posterior", nargs="*", help=f"of {', '.join(POSTERIORS)}")
    parser.add_argument(
        "--method", action="append", help=f"of {', '.join(METHODS)}; may be repeated"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of sampling, for each method"
    )
    parser.add_argument(
        "--dense", action="store_true", help="dense masses everywhere, write nothing"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = arguments.posterior or list(POSTERIORS)
    methods = arguments.method or list(METHODS)
    if not set(wanted) <= set(POSTERIORS):
        parser.error(f"a posterior is one of {', '.join(POSTERIORS)}")
    if not set(methods) <= {*METHODS, *(["center"] if arguments.child else [])}:
        parser.error(f"a method is one of {', '.join(METHODS)}")
    if arguments.child:
        child(wanted[0], methods[0], arguments.seconds, arguments.dense)
        sys.exit()
    begin, failed = time.perf_counter(), []
    for name in wanted:
        failed += benchmark(name, methods, arguments.seconds, arguments.dense)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    warn(wanted)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
