"""Models: the right density, names that survive, and errors in plain words."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from scipy import stats

from swindles import models
from swindles.models import (
    Model,
    from_numpyro,
    from_pymc,
    make_problem,
    name_numbers,
    need,
    quantile_of,
    whiten_sites,
)
from swindles.transport import Affine

Y = np.array([3.0, 0.0, 2.0, 4.0])


def counts(y):
    """A positive rate, a vector, and a deterministic site."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
    numpyro.deterministic("twice", 2 * rate)
    numpyro.sample("y", dist.Poisson(rate * jnp.exp(b[0])), obs=y)


def by_hand(log_rate, b):
    """Log joint density of the unconstrained values: note the log-determinant."""
    rate = np.exp(log_rate)
    prior = stats.gamma(2.0).logpdf(rate) + stats.norm(0, 2).logpdf(b).sum()
    return prior + stats.poisson(rate * np.exp(b[0])).logpmf(Y).sum() + log_rate


@pytest.fixture(scope="module")
def numpyro_counts():
    return from_numpyro(counts, Y)


def test_numpyro_density_has_the_log_determinant(numpyro_counts):
    model = numpyro_counts
    rng = np.random.default_rng(1)
    for _ in range(3):
        u, b = rng.normal(), rng.normal(size=2)
        found = model.logdensity({"rate": jnp.array(u), "b": jnp.array(b)})
        assert np.isclose(found, by_hand(u, b), rtol=1e-5)


def test_numpyro_statistics_see_constrained_values_by_site(numpyro_counts):
    values = numpyro_counts.constrain({"rate": jnp.array(0.5), "b": jnp.ones(2)})
    assert sorted(values) == ["b", "rate", "twice"]
    assert np.isclose(values["rate"], np.exp(0.5))
    assert np.isclose(values["twice"], 2 * np.exp(0.5))


@pytest.mark.slow
def test_pymc_has_the_same_density_and_names():
    import pymc as pm

    with pm.Model() as counts_model:
        rate = pm.Gamma("rate", 2.0, 1.0)
        b = pm.Normal("b", 0, 2, shape=2)
        pm.Deterministic("twice", 2 * rate)
        pm.Poisson("y", rate * pm.math.exp(b[0]), observed=Y)
    model = from_pymc(counts_model)
    at = {"rate_log__": jnp.array(0.3), "b": jnp.array([0.2, -1.0])}
    assert sorted(model.position) == sorted(at)
    assert np.isclose(
        model.logdensity(at), by_hand(0.3, np.array([0.2, -1.0])), rtol=1e-5
    )
    values = model.constrain(at)
    assert sorted(values) == ["b", "rate", "twice"]
    assert np.isclose(values["twice"], 2 * np.exp(0.3))
    assert not jax.config.jax_enable_x64, "PyMC's bridge switches it on"
    slope = jax.grad(model.logdensity)(at)
    assert slope["b"].dtype == jnp.float32
    assert make_problem(model).names == ["b[0]", "b[1]", "rate", "twice"]


def test_numpyro_starts_where_it_is_told():
    model = from_numpyro(counts, Y, init={"rate": 3.0, "b": jnp.array([0.5, -1.0])})
    values = model.constrain(model.position)
    assert np.allclose(values["rate"], 3, rtol=1e-5)
    assert np.allclose(values["b"], [0.5, -1])
    with pytest.raises(ValueError, match="and the sites are"):
        from_numpyro(counts, Y, init={"a": 1.0})


@pytest.mark.slow
def test_pymc_names_entries_by_its_coordinates():
    import pymc as pm

    with pm.Model(coords={"school": ["north", "south"]}) as schools:
        theta = pm.Normal("theta", 0, 1, dims="school")
        pm.Exponential("x__", 1)  # no coordinate of PyMC's own
        pm.Normal("y", theta, 1, observed=[1.0, 2.0])
    problem = make_problem(from_pymc(schools))
    assert problem.names == ["theta[north]", "theta[south]", "x__"]


@pytest.mark.slow
def test_what_pymc_cannot_translate_is_refused_in_words():
    import pymc as pm

    with pm.Model() as partly:
        some = pm.Minibatch(np.arange(50.0), batch_size=10)
        pm.Normal("y", pm.Normal("x", 0, 1), 1, observed=some, total_size=50)
    with pytest.raises(ValueError, match="all the data, not a Minibatch"):
        from_pymc(partly)


def test_discrete_pymc_variables_are_refused():
    import pymc as pm

    with pm.Model() as mixed:
        pm.Bernoulli("z", 0.5)
    with pytest.raises(ValueError, match="discrete"):
        from_pymc(mixed)


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        (lambda: from_numpyro(counts, Y), "numpyro"),
        (lambda: from_pymc(None), "pymc"),
        (lambda: need("matplotlib.pyplot", "plot"), "plot"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, call, extra):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(models, "import_module", missing)
    library = {"plot": "matplotlib"}.get(extra, extra)
    with pytest.raises(ImportError, match=rf"needs {library}: .*swindles\[{extra}\]"):
        call()


def test_names_and_shapes_survive():
    position = {"a": jnp.zeros((2, 2)), "b": [jnp.zeros(()), jnp.zeros(1)]}
    model = Model(lambda p: -(jnp.sum(p["a"]) ** 2) - p["b"][0] ** 2, position)
    problem = make_problem(model)
    names = ["a[0, 0]", "a[0, 1]", "a[1, 0]", "a[1, 1]", "b.0", "b.1[0]"]
    assert problem.names == name_numbers(position) == names
    assert problem.dim == model.dim == 6
    back = problem.restore(np.arange(6.0))
    assert back["a"].tolist() == [[0, 1], [2, 3]]
    assert back["b"][0] == 4 and back["b"][1].tolist() == [5]
    restored = problem.restore(np.asarray(problem.statistic(jnp.arange(6.0))))
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, back))


def test_statistics_may_be_counts_and_events():
    problem = make_problem(
        Model(lambda x: -(x @ x), jnp.ones(2)),
        lambda x: {"up": x > 0, "n": jnp.size(x)},
    )
    assert problem.names == ["n", "up[0]", "up[1]"]
    assert problem.statistic(jnp.array([1.0, -1.0])).tolist() == [2, 1, 0]


def test_mixed_types_become_one():
    position = {"a": 1, "b": np.float64(2), "c": np.ones(1, np.float16)}
    model = Model(lambda p: -(p["a"] ** 2) - p["b"] ** 2 - p["c"][0], position)
    assert model.dim == 3
    assert make_problem(model).position.dtype == jnp.float32
    with jax.enable_x64(True):
        problem = make_problem(model)
        assert problem.position.dtype == jnp.float64
        assert problem.logdensity(problem.position).dtype == jnp.float64


def rate_model():
    """A log rate and a vector; statistics see the rate."""
    return Model(
        lambda p: p["log_rate"] - jnp.exp(p["log_rate"]) - p["b"] @ p["b"] / 2,
        {"log_rate": 0.5, "b": jnp.zeros(2)},
        lambda p: {"rate": jnp.exp(p["log_rate"]), "b": p["b"]},
    )


def sheared():
    """A full map: triangular, with a negative entry on its diagonal."""
    scale = jnp.array([[2.0, 0.0, 0.0], [0.3, -0.5, 0.0], [-1.0, 0.2, 1.5]])
    return Affine(jnp.array([0.1, -0.2, 0.3]), scale)


@pytest.mark.parametrize("x64", [False, True])
def test_a_problem_through_a_map_is_the_same_problem(x64):
    with jax.enable_x64(x64):
        to_x = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), sheared())
        problem = make_problem(rate_model())
        latent = problem.through(to_x)
        z = jax.random.normal(jax.random.key(0), (3,))
        x, jacobian = to_x(z), jax.jacobian(to_x)(z)
        moved = problem.logdensity(x) + jnp.linalg.slogdet(jacobian)[1]
        np.testing.assert_allclose(latent.logdensity(z), moved, rtol=1e-6)
        assert np.array_equal(latent.statistic(z), problem.statistic(x))
        assert np.array_equal(latent.constrain(z)["b"], problem.constrain(x)["b"])
        assert np.array_equal(latent.position, np.zeros(3))
        assert latent.position.dtype == problem.position.dtype == z.dtype
        assert latent.logdensity(z).dtype == latent.statistic(z).dtype == z.dtype
        assert latent.names == problem.names and latent.dim == problem.dim
        restored = latent.restore(np.asarray(latent.statistic(z)))
        np.testing.assert_allclose(restored["rate"], np.exp(x[2]), rtol=1e-6)


def test_maps_can_be_chained():
    problem, outer = make_problem(rate_model()), sheared()
    inner = Affine(jnp.ones(3), jnp.array([0.5, 2.0, 3.0]))
    twice = problem.through(outer).through(inner)
    once = problem.through(Affine(outer(inner.shift), outer.scale * inner.scale))
    z = jnp.array([0.3, -0.1, 0.2])
    np.testing.assert_allclose(twice.statistic(z), once.statistic(z), rtol=1e-5)
    np.testing.assert_allclose(twice.logdensity(z), once.logdensity(z), rtol=1e-5)


def test_a_latent_problem_is_compiled_once():
    """Its functions are the same objects, so a second ``jax.jit`` finds the first."""
    traces = []

    def counted(x):
        traces.append("density")
        return -(x @ x)

    def constrain(x):
        traces.append("statistic")
        return x

    problem = make_problem(Model(counted, jnp.ones(3), constrain))
    latent = problem.through(sheared())
    traces.clear()
    for _ in range(2):
        jax.jit(latent.logdensity)(latent.position)
        jax.jit(latent.statistic)(latent.position)
    assert traces == ["density", "statistic"]


def square(x):
    return -jnp.sum(x**2)


def changing(x):
    return x[x > 0]


def halves(x):
    return jnp.float16(1) * x.astype(jnp.float16)


BAD = {
    "vector density": (lambda x: -(x**2), jnp.ones(2), None, "take a sum"),
    "matrix density": (lambda x: jnp.ones((1, 1)), jnp.ones(2), None, "take a sum"),
    "tuple density": (lambda x: (x[0], x[1]), jnp.ones(2), None, "one number"),
    "integer density": (lambda x: jnp.array(1), jnp.ones(2), None, "int32"),
    "half density": (lambda x: halves(x).sum(), jnp.ones(2), None, "float16"),
    "no density": (lambda x: None, jnp.ones(2), None, "one number"),
    "numpy density": (lambda x: np.sum(np.asarray(x)), jnp.ones(2), None, "jax.numpy"),
    "branching density": (
        lambda x: x[0] if x[0] > 0 else x[1],
        jnp.ones(2),
        None,
        "if",
    ),
    "failing density": (lambda x: x["a"], jnp.ones(2), None, "fails at the position"),
    "wrong size": (lambda x: -(x @ jnp.ones(3)), jnp.ones(2), None, "fails"),
    "NaN at the start": (lambda x: jnp.log(x[0]), -jnp.ones(2), None, "nan"),
    "inf at the start": (lambda x: jnp.log(x[0]), jnp.zeros(2), None, "inf"),
    "NaN gradient": (lambda x: jnp.sqrt(x[0]), jnp.zeros(2), None, r"x\[0\] is inf"),
    "NaN position": (square, jnp.array([0, jnp.nan]), None, r"x\[1\]"),
    "complex position": (square, jnp.ones(2) * 1j, None, "real"),
    "words": (square, "start", None, "real"),
    "truth values": (square, np.array([True]), None, "real"),
    "empty position": (square, {}, None, "empty"),
    "no numbers": (square, jnp.zeros(0), None, "empty"),
    "NaN statistic": (square, jnp.ones(2), lambda x: jnp.log(-x), "is nan"),
    "no statistic": (square, jnp.ones(2), lambda x: {}, "nothing"),
    "half statistic": (square, jnp.ones(2), halves, "float16"),
    "changing shape": (square, jnp.ones(2), changing, "statistic"),
    "complex statistic": (square, jnp.ones(2), lambda x: 1j * x, "complex"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_models_are_refused_in_words(name):
    logdensity, position, statistics, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        make_problem(Model(logdensity, position), statistics)


# Whitened priors.


PRIORS = {
    "normal": (dist.Normal(1.0, 2.0), stats.norm(1, 2)),
    "half-normal": (dist.HalfNormal(2.0), stats.halfnorm(0, 2)),
    "Cauchy": (dist.Cauchy(1.0, 2.0), stats.cauchy(1, 2)),
    "half-Cauchy": (dist.HalfCauchy(2.0), stats.halfcauchy(0, 2)),
    "exponential": (dist.Exponential(2.0), stats.expon(0, 0.5)),
    "uniform": (dist.Uniform(1.0, 3.0), stats.uniform(1, 2)),
    "logistic": (dist.Logistic(1.0, 2.0), stats.logistic(1, 2)),
    "Gumbel": (dist.Gumbel(1.0, 2.0), stats.gumbel_r(1, 2)),
    "chi-square": (dist.Gamma(0.5, 0.5), stats.chi2(1)),
    "log-normal": (dist.LogNormal(1.0, 0.5), stats.lognorm(0.5, scale=np.e)),
}


@pytest.mark.parametrize("name", PRIORS)
def test_quantiles_turn_a_normal_into_the_prior(name):
    """Value, and density by the change of variables, far into both tails."""
    prior, truth = PRIORS[name]
    with jax.enable_x64(True):
        u = jnp.array([-6.0, -3.0, -0.5, 0.0, 0.7, 3.0, 6.0])
        quantile = quantile_of(prior.expand([1]).to_event(1))
        found = np.asarray(quantile(u))
        slope = np.asarray(jax.vmap(jax.grad(quantile))(u))
    left, right = truth.cdf(found), truth.sf(found)
    np.testing.assert_allclose(left[:4], stats.norm.cdf(u[:4]), rtol=1e-6)
    np.testing.assert_allclose(right[4:], stats.norm.sf(u[4:]), rtol=1e-6)
    np.testing.assert_allclose(
        truth.logpdf(found) + np.log(slope), stats.norm.logpdf(u), rtol=1e-10
    )


def hierarchy(y):
    """Priors that depend on each other, a plate, a vector, and one without quantile."""
    tau = numpyro.sample("tau", dist.HalfCauchy(2.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    pair = dist.MultivariateNormal(jnp.ones(2), jnp.array([[2.0, 0.5], [0.5, 1.0]]))
    numpyro.sample("pair", pair)
    with numpyro.plate("groups", 4):
        theta = numpyro.sample("theta", dist.Normal(rate, tau))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def test_whitened_model_is_the_same_posterior():
    """Its density is that of the usual coordinates, times the volume of the change."""
    with jax.enable_x64(True):
        usual = from_numpyro(hierarchy, Y)
        white = usual.whitened()
        names = ["pair_whitened", "rate", "tau_whitened", "theta_whitened"]
        assert sorted(white.position) == names  # what has no quantile stays
        rng = np.random.default_rng(2)

        def to_usual(position):
            values = white.constrain(position)
            logs = {name: jnp.log(values[name]) for name in ("rate", "tau")}
            return values | logs

        restore = ravel_pytree(white.position)[1]
        change_of = jax.jit(
            jax.jacobian(lambda v: ravel_pytree(to_usual(restore(v)))[0])
        )
        for _ in range(3):
            position = jax.tree.map(
                lambda x: jnp.asarray(rng.normal(size=x.shape)), white.position
            )
            change = change_of(ravel_pytree(position)[0])
            volume = np.linalg.slogdet(change)[1]
            there = usual.logdensity(to_usual(position)) + volume
            np.testing.assert_allclose(white.logdensity(position), there, rtol=1e-9)
            same = usual.constrain(to_usual(position))
            for name, value in white.constrain(position).items():
                np.testing.assert_allclose(same[name], value, rtol=1e-9)
        assert usual.whitened() is white  # and so are its programs


def test_whitening_leaves_data_and_names_alone():
    model = numpyro.handlers.seed(whiten_sites(hierarchy), 0)
    sites = numpyro.handlers.trace(model).get_trace(Y)
    np.testing.assert_array_equal(sites["y"]["value"], Y)
    assert sites["tau"]["type"] == "deterministic"
    assert sites["rate"]["type"] == "sample"


def test_sites_that_cannot_be_whitened_stay_as_they_are():
    """A prior to a power, a change of shape, a mask; and a shape that is not a half."""

    def model():
        with numpyro.handlers.scale(scale=2.0):
            numpyro.sample("scaled", dist.Normal(0.0, 1.0))
        break_stick = dist.transforms.StickBreakingTransform()
        simplex = dist.TransformedDistribution(
            dist.Normal(0, 1).expand([2]).to_event(1), break_stick
        )
        numpyro.sample("simplex", simplex)
        numpyro.sample("masked", dist.Normal(0.0, 1.0).mask(False))
        numpyro.sample("gamma", dist.Gamma(0.7, 1.0))
        numpyro.sample("free", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.sample("normal", dist.Normal(0.0, 1.0))

    kept = ["free", "gamma", "masked", "normal_whitened", "scaled", "simplex"]
    assert sorted(from_numpyro(model).whitened().position) == kept
