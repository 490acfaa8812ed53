"""Twelve reference posteriors of posteriordb as NumPyro models.

``MODELS[name](data)`` is a model without arguments; its sites have the names of the
reference in ``name.json``. Data are NumPy's, so that a model is in the precision that
JAX has when it runs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

MODELS = {}


def model(name):
    """Enter a model into the table."""

    def register(build):
        MODELS[name] = build
        return build

    return register


def flat(name, support=constraints.real, shape=()):
    """A parameter with no prior of its own."""
    return numpyro.sample(name, dist.ImproperUniform(support, (), shape))


def data(d, *names):
    """Some of the data as arrays."""
    return [np.asarray(d[name], float) for name in names]


def regression(design, response):
    """Linear regression with flat priors."""
    x, y = design, response

    def posterior():
        beta = flat("beta", shape=(x.shape[1],))
        sigma = flat("sigma", constraints.positive)
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    return posterior


def columns(*parts):
    ones = np.ones(len(parts[0]))
    return np.column_stack([ones, *(np.asarray(part, float) for part in parts)])


def nes(d):
    age = np.asarray(d["age_discrete"])
    ages = [age == level for level in (2, 3, 4)]
    design = columns(
        *(d["real_ideo"], d["race_adj"], *ages, d["educ1"], d["gender"], d["income"])
    )
    return design, np.asarray(d["partyid7"], float)


@model("nes1972-nes")
def nes1972(d):
    return regression(*nes(d))


@model("earnings-earn_height")
def earn_height(d):
    return regression(columns(d["height"]), np.asarray(d["earn"], float))


@model("sblrc-blr")
def blr(d):
    x, y = data(d, "X", "y")

    def posterior():
        beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[1]]))
        sigma = numpyro.sample("sigma", dist.HalfNormal(10))
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    return posterior


@model("diamonds-diamonds")
def diamonds(d):
    x = np.asarray(d["X"], float)[:, 1:]
    x, y = x - x.mean(0), np.asarray(d["Y"], float)

    def posterior():
        b = numpyro.sample("b", dist.Normal(0, 1).expand([x.shape[1]]))
        level = numpyro.sample("Intercept", dist.StudentT(3, 8, 10))
        sigma = flat("sigma", constraints.positive)
        numpyro.factor("prior", dist.StudentT(3, 0, 10).log_prob(sigma))
        numpyro.sample("y", dist.Normal(level + x @ b, sigma), obs=y)

    return posterior


@model("kilpisjarvi_mod-kilpisjarvi")
def kilpisjarvi(d):
    x, y = data(d, "x", "y")

    def posterior():
        alpha = numpyro.sample("alpha", dist.Normal(d["pmualpha"], d["psalpha"]))
        beta = numpyro.sample("beta", dist.Normal(d["pmubeta"], d["psbeta"]))
        sigma = flat("sigma", constraints.positive)
        numpyro.sample("y", dist.Normal(alpha + beta * x, sigma), obs=y)

    return posterior


@model("garch-garch11")
def garch(d):
    (y,) = data(d, "y")

    def posterior():
        mu = flat("mu")
        alpha0 = flat("alpha0", constraints.positive)
        alpha1 = flat("alpha1", constraints.unit_interval)
        share = flat("share", constraints.unit_interval)
        beta1 = numpyro.deterministic("beta1", share * (1 - alpha1))
        numpyro.factor("volume", jnp.log1p(-alpha1))

        def body(variance, before):
            variance = alpha0 + alpha1 * (before - mu) ** 2 + beta1 * variance
            return variance, variance

        first = jnp.asarray(d["sigma1"] ** 2)
        _, rest = jax.lax.scan(body, first, jnp.asarray(y[:-1]))
        sigma = jnp.sqrt(jnp.concatenate([first[None], rest]))
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)

    return posterior


def forward(emission, theta):
    """The log likelihood, given log densities (time, states) and transitions."""
    move = jnp.log(theta)

    def body(level, seen):
        return jax.nn.logsumexp(level[:, None] + move, axis=0) + seen, None

    last, _ = jax.lax.scan(body, emission[0], emission[1:])
    return jax.nn.logsumexp(last)


def transitions(alpha):
    rows = [
        numpyro.sample(f"theta{k + 1}", dist.Dirichlet(np.asarray(alpha[k], float)))
        for k in range(2)
    ]
    return jnp.stack(rows)


def ordered(name, means, support):
    value = flat(name, support, (2,))
    prior = dist.Normal(np.asarray(means, float), 1.0).log_prob(value).sum()
    numpyro.factor(f"{name}_prior", prior)
    return value


@model("bball_drive_event_0-hmm_drive_0")
def hmm_drive_0(d):
    u, v = data(d, "u", "v")

    def posterior():
        theta = transitions(d["alpha"])
        phi = ordered("phi", [0, 3], constraints.positive_ordered_vector)
        rate = ordered("lambda", [0, 3], constraints.positive_ordered_vector)
        emission = jnp.log(phi) - phi * u[:, None] + jnp.log(rate) - rate * v[:, None]
        numpyro.factor("y", forward(emission, theta))

    return posterior


@model("eight_schools-eight_schools_noncentered")
def eight_schools(d):
    y, sigma = data(d, "y", "sigma")

    def posterior():
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        raw = numpyro.sample("theta_trans", dist.Normal(0, 1).expand([len(y)]))
        theta = numpyro.deterministic("theta", mu + tau * raw)
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)

    return posterior


@model("low_dim_gauss_mix-low_dim_gauss_mix")
def mixture(d):
    (y,) = data(d, "y")

    def posterior():
        mu = flat("mu", constraints.ordered_vector, (2,))
        numpyro.factor("mu_prior", dist.Normal(0, 2).log_prob(mu).sum())
        sigma = numpyro.sample("sigma", dist.HalfNormal(2).expand([2]))
        theta = numpyro.sample("theta", dist.Beta(5, 5))
        shares = jnp.log(jnp.stack([theta, 1 - theta]))
        each = shares + dist.Normal(mu, sigma).log_prob(y[:, None])
        numpyro.factor("y", jax.nn.logsumexp(each, axis=1).sum())

    return posterior


def squared_exponential(x, alpha, rho, nugget):
    distance = (x[:, None] - x) / rho
    return alpha**2 * jnp.exp(-(distance**2) / 2) + nugget * jnp.eye(len(x))


@model("gp_pois_regr-gp_pois_regr")
def gp_poisson(d):
    x, k = data(d, "x", "k")

    def posterior():
        rho = numpyro.sample("rho", dist.Gamma(25, 4))
        alpha = numpyro.sample("alpha", dist.HalfNormal(2))
        raw = numpyro.sample("f_tilde", dist.Normal(0, 1).expand([len(x)]))
        root = jnp.linalg.cholesky(squared_exponential(x, alpha, rho, 1e-10))
        f = numpyro.deterministic("f", root @ raw)
        numpyro.factor("k", jnp.sum(k * f - jnp.exp(f)))

    return posterior


def runge_kutta(slope, start, times, parts):
    """Values at the times, by the classical method; the first time is 0."""
    width = jnp.diff(jnp.concatenate([jnp.zeros(1), times])) / parts

    def small(carry, _):
        t, z, h = carry
        a = slope(t, z)
        b = slope(t + h / 2, z + h / 2 * a)
        c = slope(t + h / 2, z + h / 2 * b)
        e = slope(t + h, z + h * c)
        return (t + h, z + h / 6 * (a + 2 * b + 2 * c + e), h), None

    def large(carry, h):
        (t, z, _), _ = jax.lax.scan(small, (*carry, h), None, parts)
        return (t, z), z

    return jax.lax.scan(large, (jnp.zeros(()), start), width)[1]


@model("hudson_lynx_hare-lotka_volterra")
def lotka_volterra(d):
    ts, first, y = data(d, "ts", "y_init", "y")

    def posterior():
        typical, spread = jnp.array([1, 0.05, 1, 0.05]), jnp.array([0.5, 0.05] * 2)
        prior = dist.TruncatedNormal(typical, spread, low=0.0)
        theta = numpyro.sample("theta", prior.to_event(1))
        start = numpyro.sample("z_init", dist.LogNormal(np.log(10), 1).expand([2]))
        sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1).expand([2]))

        def slope(_, log_z):  # of the logarithms, which stay finite
            prey, hunters = jnp.exp(log_z)
            return jnp.stack(
                [theta[0] - theta[1] * hunters, -theta[2] + theta[3] * prey]
            )

        log_z = runge_kutta(slope, jnp.log(start), ts, 10)
        numpyro.sample("y_init", dist.LogNormal(jnp.log(start), sigma), obs=first)
        numpyro.sample("y", dist.LogNormal(log_z, sigma), obs=y)

    return posterior


@model("one_comp_mm_elim_abs-one_comp_mm_elim_abs")
def one_compartment(d):
    times, seen = data(d, "times", "C_hat")
    dose, volume = d["D"], d["V"]

    def posterior():
        k_a = numpyro.sample("k_a", dist.HalfCauchy(1))
        half = numpyro.sample("K_m", dist.HalfCauchy(1))
        most = numpyro.sample("V_m", dist.HalfCauchy(1))
        sigma = numpyro.sample("sigma", dist.HalfCauchy(1))

        def slope(t, c):
            gain = jnp.exp(-k_a * t) * dose * k_a / volume
            return gain - most / volume * c / (half + c)

        c = runge_kutta(slope, jnp.zeros(()), times, 10)
        numpyro.sample("C_hat", dist.LogNormal(jnp.log(c), sigma), obs=seen)

    return posterior
