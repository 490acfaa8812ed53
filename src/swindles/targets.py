"""Targets: densities with cheap gradients.

Mirrored from book/targets.md: edit there, then run `make mirror`.
"""

from collections.abc import Callable
from importlib.resources import files
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int
from scipy.special import digamma, polygamma

from swindles.models import Model


def one_vector(x: ArrayLike, dim: int) -> Array:
    """Return ``x`` as an array after checking that it is one vector.

    Parameters
    ----------
    x
        What a log density was called with.
    dim
        The length it must have.

    Raises
    ------
    ValueError
        If its shape is not ``(dim,)``.

    Examples
    --------
    >>> one_vector([1.0, 2.0], 2).shape
    (2,)
    """
    x = jnp.asarray(x)
    if x.shape != (dim,):
        raise ValueError(
            f"expected one vector of shape ({dim},), got shape {x.shape}; "
            "for many vectors at once, use jax.vmap"
        )
    return x


def gaussian(mean: ArrayLike, covariance: ArrayLike) -> Model:
    """Build a Gaussian target.

    Parameters
    ----------
    mean
        Shape ``(dim,)``.
    covariance
        Shape ``(dim, dim)``, symmetric and positive definite.

    Examples
    --------
    >>> gaussian([1.0, 0.0], [[2.0, 0.5], [0.5, 1.0]]).truth["square"]
    array([3., 1.])
    """
    centre, spread = np.asarray(mean, float), np.asarray(covariance, float)
    dim = centre.size
    if centre.shape != (dim,) or spread.shape != (dim, dim):
        raise ValueError(
            "give a mean of shape (dim,) and a covariance of shape (dim, dim), "
            f"not {centre.shape} and {spread.shape}"
        )
    if not np.allclose(spread, spread.T) or np.linalg.eigvalsh(spread)[0] <= 0:
        raise ValueError("give a covariance that is symmetric and positive definite")
    precision = np.linalg.inv(spread)

    def logdensity(x: Array) -> Array:
        residual = one_vector(x, dim) - jnp.asarray(centre, x.dtype)
        return -0.5 * residual @ (jnp.asarray(precision, x.dtype) @ residual)

    truth = {"mean": centre, "square": centre**2 + spread.diagonal()}
    return Model(
        logdensity, jnp.zeros(dim), lambda x: {"x": x}, "Gaussian", truth=truth
    )


def skewed(dim: int = 2, shape: float = 2.0) -> Model:
    """Build a target whose coordinates are logs of independent Gamma variables.

    Parameters
    ----------
    dim
        How many of them.
    shape
        Shape of the Gamma distribution; its rate is 1. The smaller, the more skewed.

    Examples
    --------
    >>> bool(abs(skewed(dim=1, shape=1.0).truth["mean"][0] + np.euler_gamma) < 1e-12)
    True
    """
    if dim < 1 or shape <= 0:
        raise ValueError(f"give dim >= 1 and shape > 0, not {dim} and {shape}")

    def logdensity(x: Array) -> Array:
        x = one_vector(x, dim)
        return jnp.sum(shape * x - jnp.exp(x))

    mean, variance = digamma(shape), polygamma(1, shape)
    truth = {"mean": np.full(dim, mean), "square": np.full(dim, mean**2 + variance)}
    return Model(logdensity, jnp.zeros(dim), lambda x: {"x": x}, "skewed", truth=truth)


def banana(curvature: float = 0.5, scale: float = 1.5) -> Model:
    """Build a two-dimensional target, Gaussian along a parabola.

    Parameters
    ----------
    curvature
        The second coordinate is centred at ``curvature`` times the first one squared.
    scale
        Standard deviation of the first coordinate.

    Examples
    --------
    >>> banana(curvature=1.0, scale=2.0).truth["mean"]
    array([0., 4.])
    """
    if scale <= 0:
        raise ValueError(f"give scale > 0, not {scale}")

    def logdensity(x: Array) -> Array:
        along, across = one_vector(x, 2)
        return -0.5 * ((along / scale) ** 2 + (across - curvature * along**2) ** 2)

    variance = scale**2
    truth = {
        "mean": np.array([0, curvature * variance]),
        "square": np.array([variance, 1 + 3 * (curvature * variance) ** 2]),
    }
    return Model(logdensity, jnp.zeros(2), lambda x: {"x": x}, "banana", truth=truth)


def german_credit() -> tuple[Float[np.ndarray, "1000 25"], Bool[np.ndarray, "1000"]]:
    """Read the German credit data.

    Returns
    -------
    covariates
        24 columns with mean 0 and variance 1, then ones.
    labels
        True where the credit was bad.

    Examples
    --------
    >>> german_credit()[1].sum().item()
    300
    """
    path = files("swindles") / "data" / "german_credit_numeric.csv"
    table = np.array([line.split(",") for line in path.read_text().split()], float)
    numbers = (table[:, :-1] - table[:, :-1].mean(0)) / table[:, :-1].std(0)
    return np.column_stack([numbers, np.ones(len(table))]), table[:, -1] == 2


def student_answers() -> tuple[
    Int[np.ndarray, "30105"], Int[np.ndarray, "30105"], Bool[np.ndarray, "30105"]
]:
    """Read the answers of 400 students to some of 100 questions.

    Returns
    -------
    student, question
        Who was asked what, counted from 0.
    right
        Whether the answer was right.

    Examples
    --------
    >>> student_answers()[2].size
    30105
    """
    rows = (files("swindles") / "data" / "irt_1pl.txt").read_text().split()
    marks = np.array([list(row) for row in rows])
    student, question = np.nonzero(marks != ".")
    return student, question, marks[student, question] == "1"


def split(count: int, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """Split observations at random, the same way every time.

    Parameters
    ----------
    count
        Number of observations.
    held_out
        Fraction to hold out, at least 0 and less than 1.

    Returns
    -------
    train, test
        Indices, each in increasing order.

    Examples
    --------
    >>> [part.size for part in split(1000, 0.1)]
    [900, 100]
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is a fraction: 0 <= held_out < 1, not {held_out}")
    order = np.random.default_rng(0).permutation(count)
    num_test = round(held_out * count)
    return np.sort(order[num_test:]), np.sort(order[:num_test])


@jax.custom_jvp
def sum_log_sigmoid(u: Array) -> Array:
    """Sum ``log(sigmoid(u))`` over a vector, with one exponential per entry.

    Value and gradient share the sigmoid; logarithms are taken of products of 20
    factors. Right for every finite ``u``.

    Parameters
    ----------
    u
        Logits, shape ``(n,)``.

    Examples
    --------
    >>> bool(jnp.allclose(sum_log_sigmoid(jnp.zeros(3)), -3 * jnp.log(2.0)))
    True
    """
    slope = jax.nn.sigmoid(-u)
    gap = (0, -u.size % 20)
    factors = jnp.pad(jnp.maximum(slope, 1 - slope), gap, constant_values=1)
    minima = jnp.pad(jnp.minimum(u, 0), gap)
    products, sums = jax.lax.reduce(
        (factors.reshape(20, -1), minima.reshape(20, -1)),
        (u.dtype.type(1), u.dtype.type(0)),
        lambda a, b: (a[0] * b[0], a[1] + b[1]),
        dimensions=(0,),
    )
    return jnp.sum(jnp.log(products) + sums)


@sum_log_sigmoid.defjvp
def _sum_log_sigmoid_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    (u,), (du,) = primals, tangents
    return sum_log_sigmoid(u), jax.nn.sigmoid(-u) @ du


class Regression(NamedTuple):
    """Log likelihoods of a logistic regression, as functions of the weights.

    Parameters
    ----------
    train
        From weights to the log likelihood of the observations fitted.
    test
        From weights to that of each held-out observation; ``None`` without any.
    num_weights
        Length of the weights.
    """

    train: Callable[[Array], Array]
    test: Callable[[Array], Array] | None
    num_weights: int


def credit_regression(held_out: float) -> Regression:
    """Build the likelihood that both credit posteriors share.

    Parameters
    ----------
    held_out
        Fraction of the applicants to hold out.

    Examples
    --------
    >>> bool(credit_regression(0.0).train(jnp.zeros(25)) + 1000 * jnp.log(2) < 1e-3)
    True
    """
    covariates, labels = german_credit()
    signed = np.where(labels[:, None], covariates, -covariates).T
    train, test = (signed[:, part] for part in split(len(labels), held_out))

    def log_likelihood(weights: Array) -> Array:
        return sum_log_sigmoid(weights @ jnp.asarray(train, weights.dtype))

    def score(weights: Array) -> Array:
        return jax.nn.log_sigmoid(weights @ jnp.asarray(test, weights.dtype))

    return Regression(log_likelihood, score if test.size else None, len(signed))


def logistic_regression(held_out: float = 0.0) -> Model:
    """Build the German credit logistic regression posterior, D = 25.

    Weights are standard Gaussian a priori; the intercept is the last one.

    Parameters
    ----------
    held_out
        Fraction of the 1000 applicants to hold out.

    Examples
    --------
    >>> target = logistic_regression(held_out=0.1)
    >>> target.dim, target.held_out(jnp.zeros(target.dim)).shape
    (25, (100,))
    """
    train, test, dim = credit_regression(held_out)

    def logdensity(x: Array) -> Array:
        x = one_vector(x, dim)
        return train(x) - 0.5 * x @ x

    def constrain(x: Array) -> dict[str, Array]:
        return {"weights": x}

    return Model(logdensity, jnp.zeros(dim), constrain, "logistic regression", test)


def sparse_logistic_regression(held_out: float = 0.0) -> Model:
    """Build the German credit posterior with a sparse prior, D = 51.

    The vector holds 25 unscaled weights, the logs of their 25 local scales, and the
    log of the global scale. The scales are Gamma(1/2, 1/2) a priori.

    Parameters
    ----------
    held_out
        Fraction of the 1000 applicants to hold out.

    Examples
    --------
    >>> target = sparse_logistic_regression()
    >>> target.constrain(jnp.zeros(target.dim))["global_scale"].item()
    1.0
    """
    train, test, num = credit_regression(held_out)

    def weights(x: Array) -> Array:
        return x[:num] * jnp.exp(x[num:-1] + x[-1])

    def logdensity(x: Array) -> Array:
        unscaled, log_scales = jnp.split(one_vector(x, 2 * num + 1), [num])
        prior = jnp.sum(log_scales - jnp.exp(log_scales)) - unscaled @ unscaled
        return train(weights(x)) + 0.5 * prior

    def constrain(x: Array) -> dict[str, Array]:
        scales = {"local_scales": jnp.exp(x[num:-1]), "global_scale": jnp.exp(x[-1])}
        return {"unscaled_weights": x[:num], **scales}

    return Model(
        logdensity,
        jnp.zeros(2 * num + 1),
        constrain,
        "sparse logistic regression",
        held_out=None if test is None else lambda x: test(weights(x)),
    )


def bounded(x: Array) -> Array:
    """Clip ``x`` so that ``exp(x)`` and ``exp(-x)`` are finite and not zero.

    Examples
    --------
    >>> bool(jnp.isfinite(jnp.exp(bounded(jnp.array(1e6)))))
    True
    """
    limit = np.floor(-np.log(jnp.finfo(x.dtype).tiny))
    return jnp.clip(x, -limit, limit)


def expected_right(
    answered: ArrayLike, minus_ability: Array, difficulty: Array
) -> Array:
    """Sum ``answered * sigmoid(ability[:, None] - difficulty)`` along each row.

    This is the number of right answers to expect of each student. With the grid
    transposed and the other arguments exchanged, it is that for each question.

    Parameters
    ----------
    answered
        One where there is an answer, else zero; shape ``(rows, columns)``.
    minus_ability, difficulty
        Minus the logit is their sum; shapes ``(rows,)`` and ``(columns,)``.

    Examples
    --------
    >>> expected_right(jnp.ones((2, 4)), jnp.zeros(2), jnp.zeros(4)).tolist()
    [2.0, 2.0]
    """
    rows, columns = jnp.exp(bounded(minus_ability)), jnp.exp(bounded(difficulty))
    grid, one = jnp.asarray(answered, rows.dtype), jnp.ones((), rows.dtype)
    grid, one, rows = jax.lax.optimization_barrier((grid, one, rows))
    return jnp.sum(grid / (one + rows[:, None] * columns), 1)


def two_cosh(answered: ArrayLike, ability: Array, difficulty: Array) -> Array:
    """Compute ``2 cosh(t / 2)`` of logits ``t``, and 1 where there is no answer.

    Parameters
    ----------
    answered
        One where there is an answer, else zero; shape ``(questions, students)``.
    ability, difficulty
        The logit is ``t = ability - difficulty[:, None]``.

    Examples
    --------
    >>> two_cosh(jnp.array([[1.0, 0.0]]), jnp.zeros(2), jnp.zeros(1)).tolist()
    [[2.0, 1.0]]
    """
    a, b = bounded(ability) / 2, bounded(difficulty[:, None]) / 2
    grid, a = jax.lax.optimization_barrier((jnp.asarray(answered, a.dtype), a))
    return grid * (jnp.exp(a) * jnp.exp(-b) + jnp.exp(-a) * jnp.exp(b)) + (1 - grid)


def answers_log_likelihood(
    answered: np.ndarray, right: np.ndarray
) -> Callable[[Array, Array], Array]:
    """Build the log likelihood of a grid of answers.

    Parameters
    ----------
    answered, right
        One where a student answered, and where the answer was right, else zero;
        shape ``(students, questions)`` with an even number of questions.

    Returns
    -------
    log_likelihood
        A function of abilities (with their mean) and difficulties. Right where these
        and all logits are within ±87 (±708 in double precision). Not NaN beyond.

    Examples
    --------
    >>> one = np.ones((3, 2))
    >>> value = answers_log_likelihood(one, one)(jnp.zeros(3), jnp.zeros(2))
    >>> bool(jnp.allclose(value, 6 * jnp.log(0.5)))
    True
    """
    surplus = right - answered / 2
    first, second = np.split(answered.T, 2)

    @jax.custom_jvp
    def log_likelihood(ability: Array, difficulty: Array) -> Array:
        linear = [jnp.asarray(surplus.sum(axis), ability.dtype) for axis in (1, 0)]
        low, high = jnp.split(difficulty, 2)
        products = two_cosh(first, ability, low) * two_cosh(second, ability, high)
        return linear[0] @ ability - linear[1] @ difficulty - jnp.log(products).sum()

    @log_likelihood.defjvp
    def jvp(
        primals: tuple[Array, Array], tangents: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        ability, difficulty = primals
        up, down = (jnp.asarray(right.sum(axis), ability.dtype) for axis in (1, 0))
        up -= expected_right(answered, -ability, difficulty)
        down -= expected_right(answered.T, difficulty, -ability)
        return log_likelihood(*primals), up @ tangents[0] - down @ tangents[1]

    return log_likelihood


def item_response(held_out: float = 0.0) -> Model:
    """Build the one-parameter item response posterior, D = 501.

    The vector holds 400 abilities less their mean, 100 difficulties, and the mean
    ability. All are Gaussian with variance 1 a priori; the mean ability has mean 0.75.

    Parameters
    ----------
    held_out
        Fraction of the 30105 answers to hold out.

    Examples
    --------
    >>> target = item_response(held_out=0.1)
    >>> target.dim, target.held_out(jnp.zeros(target.dim)).shape
    (501, (3010,))
    """
    student, question, right = student_answers()
    train, test = split(right.size, held_out)
    answered, correct = np.zeros((2, 400, 100))
    answered[student[train], question[train]] = 1
    correct[student[train], question[train]] = right[train]
    log_likelihood = answers_log_likelihood(answered, correct)
    prior_mean = np.append(np.zeros(500), 0.75)

    def constrain(x: Array) -> dict[str, Array]:
        return {"ability": x[:400], "difficulty": x[400:-1], "mean_ability": x[-1]}

    def logdensity(x: Array) -> Array:
        residual = one_vector(x, 501) - jnp.asarray(prior_mean, x.dtype)
        likelihood = log_likelihood(x[:400] + x[-1], x[400:-1])
        return likelihood - 0.5 * residual @ residual

    def score(x: Array) -> Array:
        logits = x[student[test]] + x[-1] - x[400 + question[test]]
        return jax.nn.log_sigmoid(jnp.where(right[test], logits, -logits))

    scored = score if test.size else None
    return Model(logdensity, jnp.zeros(501), constrain, "item response", scored)
