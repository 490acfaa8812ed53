"""CVA: both swindles at once.

Mirrored from book/cva.md: edit there, then run `make mirror`.
"""

from blackjax.base import SamplingAlgorithm

from swindles.antithetic import mirrored
from swindles.coupling import LogDensity, Sampler, couple
from swindles.transport import standard_normal


def cva(
    sampler: Sampler, logdensity: LogDensity, reference: LogDensity = standard_normal
) -> SamplingAlgorithm:
    """HMC-CVA, for any sampler: chains "plus", "minus" and "control" under one key.

    ``reference`` must be symmetric around zero, as the standard normal is: the control
    of "minus" is the control of "plus", negated.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from swindles.coupling import hmc, start
    >>> algorithm = cva(hmc(0.3, 5), lambda z: -jnp.sum(jnp.cosh(z)))
    >>> start(algorithm, jnp.ones((4, 2)))._fields
    ('plus', 'minus', 'control')
    """
    return couple(
        plus=sampler(logdensity),
        minus=mirrored(sampler)(logdensity),
        control=sampler(reference),
    )
