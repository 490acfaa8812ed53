"""Affine maps: round trips, volumes and Laplace's approximation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swindles.targets import gaussian, item_response, logistic_regression
from swindles.transport import Affine, laplace, pull_back, standard_normal

SEED = 20203
DIM = 6
POINTS = 100


def some_map(dtype):
    rng = np.random.default_rng(SEED)
    scale = np.tril(rng.normal(size=(DIM, DIM))) / 3 + np.eye(DIM)
    return Affine(jnp.asarray(rng.normal(size=DIM), dtype), jnp.asarray(scale, dtype))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-11)]
)
def test_round_trip_and_volume(dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        transport = some_map(dtype)
        z = jnp.asarray(np.random.default_rng(1).normal(size=(POINTS, DIM)), dtype)
        back = jax.vmap(transport.inverse)(jax.vmap(transport)(z))
        np.testing.assert_allclose(back, z, atol=tolerance)
        exact = jax.vmap(lambda z: jnp.linalg.slogdet(jax.jacobian(transport)(z))[1])(z)
        np.testing.assert_allclose(
            jax.vmap(transport.log_det)(z), exact, atol=tolerance
        )
        assert back.dtype == dtype


def test_pulled_back_density_is_density_plus_volume():
    transport = some_map("float32")
    target = gaussian(jnp.ones(DIM), jnp.eye(DIM) * 2)
    latent = pull_back(target.logdensity, transport)
    for z in jax.random.normal(jax.random.key(SEED), (5, DIM)):
        expected = target.logdensity(transport(z)) + transport.log_det(z)
        assert latent(z) == expected


def test_laplace_of_a_gaussian_is_that_gaussian():
    rng = np.random.default_rng(SEED)
    root = np.tril(rng.normal(size=(DIM, DIM))) + 2 * np.eye(DIM)
    target = gaussian(jnp.arange(DIM) * 1.0, jnp.asarray(root @ root.T))
    transport = laplace(target.logdensity, jnp.zeros(DIM))
    np.testing.assert_allclose(transport.shift, np.arange(DIM), atol=1e-3)
    covariance = transport.scale @ transport.scale.T
    np.testing.assert_allclose(covariance, root @ root.T, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("make", [logistic_regression, item_response])
def test_latent_posterior_is_round_at_its_mode(make):
    target = make()
    latent = pull_back(
        target.logdensity, laplace(target.logdensity, jnp.zeros(target.dim))
    )
    origin = jnp.zeros(target.dim)
    assert jnp.abs(jax.grad(latent)(origin)).max() < 0.02
    curvature = jax.hessian(latent)(origin)
    np.testing.assert_allclose(curvature, -np.eye(target.dim), atol=5e-3)


def test_standard_normal_on_pytrees():
    tree = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
    assert standard_normal(tree) == standard_normal(jnp.array([1.0, 2.0, 3.0])) == -7


@pytest.mark.parametrize(
    ("density", "message"),
    [
        (lambda x: jnp.log(x - 1).sum(), "not finite at the starting position"),
        (lambda x: jnp.nan * x.sum(), "not finite at the starting position"),
        (lambda x: -(x[0] ** 2) + x[1] ** 2 * 0, "no Gaussian fits"),
        (lambda x: -((x**2).sum() - 1) * 0 + x.sum(), "no Gaussian fits"),
    ],
)
def test_no_laplace_approximation(density, message):
    with pytest.raises(ValueError, match=message):
        laplace(density, jnp.zeros(2))
