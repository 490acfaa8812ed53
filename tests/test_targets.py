"""The posteriors and toys: data, densities and gradients.

Their published moments are compared in `test_schemes.py`.
"""

import hashlib
from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.special
import scipy.stats

from swindles import targets
from swindles.models import make_problem

SEED = 20
DIFFERENCE_STEP, DIFFERENCE_TOLERANCE = 1e-5, 1e-6  # float64, relative to the largest
DENSITY_TOLERANCE = 1e-11  # float64, relative
ROUNDING_FACTOR = 1.5  # float32 error, relative to that of the plain float32 sum

POSTERIORS = {
    "logistic": (targets.logistic_regression, 25),
    "sparse": (targets.sparse_logistic_regression, 51),
    "item": (targets.item_response, 501),
}
TOYS = {
    "gaussian": lambda: targets.gaussian([0.5, -1.0], [[2.0, 0.7], [0.7, 1.0]]),
    "skewed": lambda: targets.skewed(dim=2, shape=1.5),
    "banana": lambda: targets.banana(curvature=0.7, scale=1.3),
}
EVERYTHING = {name: build for name, (build, _) in POSTERIORS.items()} | TOYS


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def point(dim: int, scale: float = 0.5) -> np.ndarray:
    return scale * np.random.default_rng(SEED).standard_normal(dim)


def credit_table() -> np.ndarray:
    path = files("swindles") / "data" / "german_credit_numeric.csv"
    return np.loadtxt(str(path), delimiter=",")


def answer_grid() -> np.ndarray:
    text = (files("swindles") / "data" / "irt_1pl.txt").read_text()
    return np.array([[" .01".index(mark) - 2 for mark in row] for row in text.split()])


# Data


def test_credit_checksum():
    table = credit_table().astype(np.float32)
    digest = hashlib.md5(table.tobytes() + str(table.shape).encode())
    assert digest.hexdigest() == "f905a324d38659765a0bc234238c1d77"


def test_answers_checksum():
    student, question, right = targets.student_answers()
    digest = hashlib.md5()
    for column in (student + 1, question + 1, right):
        column = column.astype(np.int64)
        digest.update(column.tobytes() + str(column.shape).encode())
    assert digest.hexdigest() == "b5cf5a4ac7e1075a4bb04ae1194e4f2f"


def test_covariates_are_standardised():
    covariates, labels = targets.german_credit()
    expected = scipy.stats.zscore(credit_table()[:, :24], axis=0, ddof=0)
    np.testing.assert_allclose(covariates[:, :24], expected, atol=1e-12)
    np.testing.assert_array_equal(covariates[:, 24], 1)
    np.testing.assert_array_equal(labels, credit_table()[:, 24] == 2)


@pytest.mark.parametrize("count", [1000, 30105])
def test_split_is_disjoint_and_complete(count):
    train, test = targets.split(count, 0.1)
    assert test.size == round(count / 10)
    np.testing.assert_array_equal(np.sort(np.append(train, test)), np.arange(count))
    np.testing.assert_array_equal(test, targets.split(count, 0.1)[1])
    assert abs(test.mean() / count - 0.5) < 0.1  # not a block at either end


# Densities


def independent_logistic(x):
    table = credit_table()
    design = np.column_stack([scipy.stats.zscore(table[:, :24], axis=0), np.ones(1000)])
    likelihood = dist.Bernoulli(logits=design @ x).log_prob(table[:, 24] - 1)
    return likelihood.sum() + dist.Normal(0, 1).log_prob(x).sum()


def independent_sparse(x):
    table = credit_table()
    design = np.column_stack([scipy.stats.zscore(table[:, :24], axis=0), np.ones(1000)])
    log_gamma = dist.TransformedDistribution(
        dist.Gamma(0.5, 0.5), dist.transforms.ExpTransform().inv
    )
    logits = design @ (x[:25] * jnp.exp(x[25:50]) * jnp.exp(x[50]))
    likelihood = dist.Bernoulli(logits=logits).log_prob(table[:, 24] - 1)
    prior = dist.Normal(0, 1).log_prob(x[:25]).sum() + log_gamma.log_prob(x[25:]).sum()
    return likelihood.sum() + prior


def independent_item(x):
    grid = answer_grid()
    logits = x[:400, None] - x[None, 400:500] + x[500]
    likelihood = scipy.stats.bernoulli.logpmf(grid == 1, scipy.special.expit(logits))
    prior = scipy.stats.norm.logpdf(x, loc=np.append(np.zeros(500), 0.75)).sum()
    return likelihood[grid >= 0].sum() + prior


INDEPENDENT = {
    "logistic": independent_logistic,
    "sparse": independent_sparse,
    "item": independent_item,
}


@pytest.mark.parametrize("name", POSTERIORS)
def test_density_matches_an_independent_one(name, x64):
    build, dim = POSTERIORS[name]
    target = build()
    assert target.dim == dim
    origin, other = np.zeros(dim), point(dim)
    ours = target.logdensity(other) - target.logdensity(origin)
    theirs = INDEPENDENT[name](other) - INDEPENDENT[name](origin)
    np.testing.assert_allclose(ours, theirs, rtol=DENSITY_TOLERANCE)


def test_toys_match_scipy(x64):
    x, y = np.random.default_rng(SEED).standard_normal((2, 2))
    normal = scipy.stats.multivariate_normal([0.5, -1.0], [[2.0, 0.7], [0.7, 1.0]])
    log_gamma = scipy.stats.loggamma(1.5)
    theirs = {
        "gaussian": normal.logpdf,
        "skewed": lambda z: log_gamma.logpdf(z).sum(),
        "banana": lambda z: (
            scipy.stats.norm(0, 1.3).logpdf(z[0])
            + scipy.stats.norm(0.7 * z[0] ** 2).logpdf(z[1])
        ),
    }
    for name, logpdf in theirs.items():
        ours = TOYS[name]().logdensity
        np.testing.assert_allclose(ours(x) - ours(y), logpdf(x) - logpdf(y), rtol=1e-10)


@pytest.mark.parametrize("name", TOYS)
def test_toy_moments_match_a_grid(name, x64):
    target = TOYS[name]()
    side = np.linspace(-25, 60, 1701)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    weight = np.exp(np.asarray(jax.jit(jax.vmap(target.logdensity))(grid)))
    for key, values in {"mean": grid, "square": grid**2}.items():
        mean = weight @ values / weight.sum()
        np.testing.assert_allclose(mean, target.truth[key], atol=1e-6)


@pytest.mark.parametrize("name", EVERYTHING)
def test_gradient_matches_differences(name, x64):
    target = EVERYTHING[name]()
    x = point(target.dim)
    shifts = DIFFERENCE_STEP * np.eye(target.dim)
    logdensity = jax.jit(jax.vmap(target.logdensity))
    differences = (logdensity(x + shifts) - logdensity(x - shifts)) / (
        2 * DIFFERENCE_STEP
    )
    gradient = jax.grad(target.logdensity)(x)
    bound = DIFFERENCE_TOLERANCE * np.abs(gradient).max()
    np.testing.assert_allclose(gradient, differences, rtol=0, atol=bound)


@pytest.mark.parametrize("name", EVERYTHING)
def test_hessian_matches_differences_of_the_gradient(name, x64):
    target = EVERYTHING[name]()
    x, direction = point(target.dim), point(target.dim, 1.0)
    gradient = jax.jit(jax.grad(target.logdensity))
    step = DIFFERENCE_STEP * direction
    differences = (gradient(x + step) - gradient(x - step)) / (2 * DIFFERENCE_STEP)
    product = jax.jit(jax.hessian(target.logdensity))(x) @ direction
    bound = DIFFERENCE_TOLERANCE * np.abs(product).max()
    np.testing.assert_allclose(product, differences, rtol=0, atol=bound)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYTHING)
def test_dtype_follows_the_input(name):
    target = EVERYTHING[name]()
    single = jax.value_and_grad(target.logdensity)(jnp.zeros(target.dim))
    assert {part.dtype for part in single} == {np.dtype("float32")}
    with jax.enable_x64(True):
        for dtype in (np.float32, np.float64):
            x = jnp.zeros(target.dim, dtype)
            value, gradient = jax.jit(jax.value_and_grad(target.logdensity))(x)
            assert value.dtype == gradient.dtype == dtype


@pytest.mark.parametrize("name", EVERYTHING)
def test_lowers_for_cuda(name):
    target = EVERYTHING[name]()
    batched = jax.jit(jax.vmap(jax.value_and_grad(target.logdensity)))
    shape = jax.ShapeDtypeStruct((256, target.dim), np.float32)
    exported = jax.export.export(batched, platforms=["cuda"])(shape)
    assert exported.platforms == ("cuda",)


@pytest.mark.parametrize("name", POSTERIORS)
def test_single_precision_is_as_good_as_the_plain_sum(name):
    build, dim = POSTERIORS[name]
    logdensity = build().logdensity
    xs = 0.3 * np.random.default_rng(SEED).standard_normal((200, dim))
    xs = xs.astype(np.float32)
    plain = plain_densities()[name]
    single, plain_single = (jax.jit(jax.vmap(f))(xs) for f in (logdensity, plain))
    with jax.enable_x64(True):
        exact = np.asarray(jax.jit(jax.vmap(plain))(xs.astype(np.float64)))
    error, plain_error = (
        np.sqrt(np.mean((np.asarray(value, float) - exact) ** 2))
        for value in (single, plain_single)
    )
    assert error <= ROUNDING_FACTOR * plain_error


def plain_densities():
    covariates, labels = targets.german_credit()
    student, question, right = targets.student_answers()

    def logistic(w):
        logits = jnp.asarray(covariates, w.dtype) @ w
        return jax.nn.log_sigmoid(jnp.where(labels, logits, -logits)).sum() - w @ w / 2

    def sparse(x):
        likelihood = logistic(w := x[:25] * jnp.exp(x[25:50] + x[50])) + w @ w / 2
        return likelihood - x[:25] @ x[:25] / 2 + (x[25:] - jnp.exp(x[25:])).sum() / 2

    def item(x):
        logits = x[student] + x[-1] - x[400 + question]
        likelihood = jax.nn.log_sigmoid(jnp.where(right, logits, -logits)).sum()
        return likelihood - x @ x / 2 + 0.75 * x[-1] - 0.75**2 / 2

    return {"logistic": logistic, "sparse": sparse, "item": item}


@pytest.mark.parametrize("size", [1, 7, 20, 999])
def test_sum_log_sigmoid_of_any_length(size):
    u = np.random.default_rng(SEED).normal(scale=30, size=size).astype(np.float32)
    value, slope = jax.value_and_grad(targets.sum_log_sigmoid)(jnp.asarray(u))
    np.testing.assert_allclose(value, jax.nn.log_sigmoid(u).sum(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slope, jax.nn.sigmoid(-u), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("logit", [-80.0, -40.0, 0.0, 40.0, 80.0])
@pytest.mark.parametrize("difficulty", [-40.0, 0.0, 40.0])
def test_item_response_is_right_for_large_logits(logit, difficulty):
    ability = np.clip(logit + difficulty, -80, 80)  # as far as the answer is exact
    parts = np.repeat([ability, ability - logit, 0.0], [400, 100, 1])
    x = jnp.asarray(parts, jnp.float32)
    value, gradient = jax.value_and_grad(targets.item_response().logdensity)(x)
    with jax.enable_x64(True):
        plain = plain_densities()["item"]
        expected = jax.value_and_grad(plain)(np.asarray(x, float))
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=0.05)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8, 1e18])
def test_item_response_is_never_nan(size):
    value_and_grad = jax.value_and_grad(targets.item_response().logdensity)
    for seed in range(5):
        x = size * jax.random.rademacher(jax.random.key(seed), (501,), jnp.float32)
        value, gradient = value_and_grad(x)
        assert not jnp.isnan(value)
        assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("name", POSTERIORS)
def test_held_out_completes_the_likelihood(name, x64):
    build, dim = POSTERIORS[name]
    whole, part = build(), build(held_out=0.1)
    assert whole.held_out is None
    x = point(dim)
    scores = part.held_out(x)
    assert scores.shape == {"item": (3010,)}.get(name, (100,))
    assert (scores < 0).all()
    together = part.logdensity(x) + scores.sum()
    np.testing.assert_allclose(together, whole.logdensity(x), rtol=DENSITY_TOLERANCE)


def test_parameters_have_names(x64):
    sparse = targets.sparse_logistic_regression()
    named = sparse.constrain(jnp.arange(51.0) / 10)
    np.testing.assert_allclose(named["unscaled_weights"], np.arange(25) / 10)
    np.testing.assert_allclose(named["local_scales"], np.exp(np.arange(25, 50) / 10))
    np.testing.assert_allclose(named["global_scale"], np.exp(5.0))
    item = targets.item_response().constrain(jnp.arange(501.0))
    assert [np.size(part) for part in item.values()] == [400, 100, 1]
    weights = targets.logistic_regression().constrain(jnp.arange(25.0))["weights"]
    np.testing.assert_array_equal(weights, np.arange(25.0))


@pytest.mark.parametrize("name", EVERYTHING)
def test_targets_are_models(name):
    target = EVERYTHING[name]()
    problem = make_problem(target)
    assert problem.dim == target.dim == len(problem.names)
    assert problem.names[0] in ("x[0]", "weights[0]", "ability[0]", "global_scale")
    x = jnp.asarray(point(target.dim), jnp.float32)
    assert problem.logdensity(x) == target.logdensity(x)
    values = target.constrain(x)
    together = np.hstack([np.ravel(values[key]) for key in sorted(values)])
    np.testing.assert_array_equal(problem.statistic(x), together)


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad])
def test_wrong_shape_is_refused(name, transform):
    target = EVERYTHING[name]()
    for shape in ((), (target.dim + 1,), (3, target.dim)):
        with pytest.raises(ValueError, match=r"expected one vector .* jax\.vmap"):
            transform(target.logdensity)(jnp.zeros(shape))


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5, float("nan")])
@pytest.mark.parametrize("name", POSTERIORS)
def test_bad_fraction_is_refused(name, fraction):
    with pytest.raises(ValueError, match="held_out is a fraction"):
        POSTERIORS[name][0](held_out=fraction)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: targets.gaussian([0.0], [[-1.0]]), "positive definite"),
        (lambda: targets.gaussian([0, 0], [[1, 2], [2, 1]]), "positive definite"),
        (lambda: targets.gaussian([0, 0], [[1, 0.5], [0, 1]]), "symmetric"),
        (lambda: targets.gaussian([0, 0], [[1.0]]), "shape"),
        (lambda: targets.gaussian([[0.0]], [[1.0]]), "shape"),
        (lambda: targets.skewed(dim=0), "dim"),
        (lambda: targets.skewed(shape=0.0), "shape"),
        (lambda: targets.banana(scale=0.0), "scale"),
    ],
)
def test_bad_toys_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
