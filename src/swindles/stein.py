"""Stein: what the gradient knows.

Mirrored from book/stein.md: edit there, then run `make mirror`.
"""

from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from swindles.antithetic import evaluate, pair_values

Order = Literal["none", "first", "diagonal", "full"]
ORDERS: tuple[Order, ...] = get_args(Order)


def stein_features(
    z: Float[Array | np.ndarray, "*any dim"],
    score: Float[Array | np.ndarray, "*any dim"],
    order: Order,
) -> Float[Any, "*any features"]:
    """The features of polynomials up to an order.

    Examples
    --------
    >>> z = jnp.array([1.0, 2.0])
    >>> stein_features(z, -z, "full").tolist()
    [-1.0, -2.0, 0.0, -3.0, -4.0]
    """
    blocks = [z[..., :0], score, 1 + z * score][: ORDERS.index(order) + 1]
    outside = isinstance(z, np.ndarray)  # of JAX: no program
    if order == "full" and outside:  # by slices, in a fourth of the time
        for k in range(z.shape[-1] - 1):
            one, rest = slice(k, k + 1), slice(k + 1, None)
            mixed = z[..., one] * score[..., rest] + z[..., rest] * score[..., one]
            blocks.append(mixed)
    elif order == "full":
        i, j = np.triu_indices(z.shape[-1], 1)
        blocks.append(z[..., i] * score[..., j] + z[..., j] * score[..., i])
    join: Any = np if outside else jnp
    return join.concatenate(blocks, -1)


def scores(states: Any) -> Array:
    """Gradients that the sampler has left at X+ and X-: (1 or 2, chains, dim)."""
    if not hasattr(states.plus, "logdensity_grad"):
        raise ValueError(
            "Stein features need gradients, and the states of this sampler have no "
            '"logdensity_grad": use HMC or MALA, or a scheme without "stein"'
        )
    pair = [states.plus, *([states.minus] if hasattr(states, "minus") else [])]
    return evaluate(lambda slope: slope, [state.logdensity_grad for state in pair])


def stein_values(order: Order, states: Any) -> Float[Array, "pair chains features"]:
    """Stein features at X+ and, if there is one, at X-: (1 or 2, chains, features).

    Their mean is zero.

    Examples
    --------
    >>> from swindles.antithetic import plain
    >>> from swindles.coupling import hmc, start
    >>> algorithm = plain(hmc(0.5, 3), lambda z: -jnp.sum(jnp.cosh(z)))
    >>> stein_values("diagonal", start(algorithm, jnp.ones((32, 2)))).shape
    (1, 32, 4)
    """
    z = pair_values(lambda z: z, states)
    return stein_features(z, z if order == "none" else scores(states), order)


# The products of so many features fill a third of a gigabyte.
MOST_FEATURES = 3000


def order_sizes(dim: int) -> list[int]:
    """How many features each order adds to the one before, from "none" on.

    Examples
    --------
    >>> order_sizes(25)
    [0, 25, 25, 300]
    """
    return [0, dim, dim, dim * (dim - 1) // 2]


def feature_orders(dim: int, order: Order) -> np.ndarray:
    """At which order each Stein feature comes in, from 1 ("first") on: (features,).

    Examples
    --------
    >>> feature_orders(3, "full").tolist()
    [1, 1, 1, 2, 2, 2, 3, 3, 3]
    """
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}: say one of {', '.join(ORDERS)}")
    sizes = order_sizes(dim)[: ORDERS.index(order) + 1]
    if sum(sizes) > MOST_FEATURES:
        raise ValueError(
            f"{sum(sizes)} Stein features are more than {MOST_FEATURES}: use a lower "
            "order"
        )
    return np.repeat(np.arange(len(sizes)), sizes)


def affordable_order(dim: int, draws: int, others: int = 0) -> Order:
    """The highest order of Stein features that so many draws can fit.

    ``others`` is the number of features of other kinds.

    Examples
    --------
    >>> affordable_order(25, 10_000), affordable_order(500, 10_000)
    ('full', 'diagonal')
    """
    most = min(draws / 10, MOST_FEATURES) - others
    numbers = np.cumsum(order_sizes(dim))
    fits = [order for order, n in zip(ORDERS, numbers, strict=True) if n <= most]
    return fits[-1] if fits else "none"
