"""Hamiltonian Monte Carlo swindles: posterior expectations with smaller errors.

One module for each chapter of the book: ``targets``, ``accuracy``, ``transport``,
``coupling``, ``antithetic``, ``control``, ``cva``, ``latent``, ``tuning`` and
``stein``, in the order in which they build on each other.
"""

from importlib.metadata import version

from swindles import (
    accuracy,
    antithetic,
    control,
    coupling,
    cva,
    latent,
    stein,
    targets,
    transport,
    tuning,
)

__all__ = [
    "accuracy",
    "antithetic",
    "control",
    "coupling",
    "cva",
    "latent",
    "stein",
    "targets",
    "transport",
    "tuning",
]
__version__ = version("swindles")
