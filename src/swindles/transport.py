"""Transport: make the posterior round first.

Mirrored from book/transport.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike
from scipy.optimize import minimize


class Transport(Protocol):
    """An invertible map from latent z to parameters x."""

    def __call__(self, z: Array) -> Array:
        """Map z to x."""

    def inverse(self, x: Array) -> Array:
        """Map x back to z."""

    def log_det(self, z: Array) -> Array:
        """Log of the absolute determinant of dx/dz at z."""


def pull_back(
    logdensity: Callable[[Array], Array], transport: Transport
) -> Callable[[Array], Array]:
    """The log density of z when x = transport(z) has log density ``logdensity``.

    Examples
    --------
    >>> double = Affine(jnp.zeros(1), 2 * jnp.eye(1))
    >>> latent = pull_back(lambda x: -x[0], double)
    >>> bool(jnp.isclose(latent(jnp.ones(1)), -2 + jnp.log(2)))
    True
    """

    def latent(z: Array) -> Array:
        return logdensity(transport(z)) + transport.log_det(z)

    return latent


def standard_normal(z: Array) -> Array:
    """Log density of N(0, I) without its constant; ``z`` may be a pytree.

    Examples
    --------
    >>> float(standard_normal(jnp.array([1.0, 2.0])))
    -2.5
    """
    squares = [jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(z)]
    return -0.5 * jnp.sum(jnp.stack(squares))


class Affine(NamedTuple):
    """The map x = shift + scale z, with ``scale`` lower triangular."""

    shift: Array  # (dim,)
    scale: Array  # (dim, dim)

    def __call__(self, z: Array) -> Array:
        """Map z to x."""
        return self.shift + self.scale @ z

    def inverse(self, x: Array) -> Array:
        """Map x back to z."""
        return solve_triangular(self.scale, x - self.shift, lower=True)

    def log_det(self, z: Array) -> Array:
        """The same everywhere: the sum of the logs on the diagonal."""
        return jnp.log(jnp.abs(jnp.diagonal(self.scale))).sum()


def find_mode(logdensity: Callable[[Array], Array], position: Array) -> Array:
    """Climb from ``position`` to a maximum of ``logdensity``."""
    value_and_slope = jax.jit(jax.value_and_grad(lambda x: -logdensity(x)))

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = value_and_slope(jnp.asarray(x, position.dtype))
        return float(value), np.asarray(slope, np.float64)

    if not np.isfinite(objective(np.asarray(position))[0]):
        raise ValueError(
            "the log density is not finite at the starting position: start elsewhere"
        )
    climbed = minimize(objective, np.asarray(position, np.float64), jac=True)
    return jnp.asarray(climbed.x, position.dtype)


@partial(jax.jit, static_argnames=("slope",))
def hessian(position: Array, slope: Callable[[Array], Array]) -> Array:
    """The derivative of ``slope``, a few rows at a time to spare memory."""

    def row(direction: Array) -> Array:
        return jax.jvp(slope, (position,), (direction,))[1]

    rows = jnp.eye(position.size, dtype=position.dtype)
    return jax.lax.map(row, rows, batch_size=16)


def laplace(logdensity: Callable[[Array], Array], position: ArrayLike) -> Affine:
    """The affine map of Laplace's approximation: mode and curvature.

    Raises ValueError when the curvature at the mode is not that of a maximum.

    Examples
    --------
    >>> transport = laplace(lambda x: -0.5 * ((x - 3) ** 2 / 4).sum(), jnp.zeros(2))
    >>> bool(jnp.allclose(transport.shift, 3)), transport.scale.round(3).tolist()
    (True, [[2.0, 0.0], [0.0, 2.0]])
    """
    mode = find_mode(logdensity, jnp.asarray(position, float))
    slope = jax.jit(jax.grad(logdensity))
    for _ in range(3):
        mode = mode - jnp.linalg.solve(hessian(mode, slope), slope(mode))
    precision = -np.asarray(hessian(mode, slope), np.float64)
    smallest = np.linalg.eigvalsh(precision)[0] if np.isfinite(precision).all() else 0
    if not smallest > 0:
        raise ValueError(
            "no Gaussian fits at the mode: the negative Hessian has smallest "
            f"eigenvalue {smallest:.3g}; start elsewhere or give a map of your own"
        )
    root = np.linalg.cholesky(np.linalg.inv(precision))
    return Affine(mode, jnp.asarray(root, mode.dtype))
