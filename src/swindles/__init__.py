"""Hamiltonian Monte Carlo swindles: posterior expectations with smaller errors.

``estimate`` is the front door. Behind it is one module for each chapter of the book:
``targets``, ``accuracy``, ``transport``, ``coupling``, ``antithetic``, ``control``,
``cva``, ``latent``, ``tuning``, ``stein``, ``models``, ``pilot`` and ``blocks``, in the
order in which they build on each other.
"""

from importlib.metadata import version

from swindles import (
    accuracy,
    antithetic,
    blocks,
    control,
    coupling,
    cva,
    latent,
    models,
    pilot,
    stein,
    targets,
    transport,
    tuning,
)
from swindles.estimate import Report, estimate, load
from swindles.models import Model, from_numpyro, from_pymc

__all__ = [
    "Model",
    "Report",
    "accuracy",
    "antithetic",
    "blocks",
    "control",
    "coupling",
    "cva",
    "estimate",
    "from_numpyro",
    "from_pymc",
    "latent",
    "load",
    "models",
    "pilot",
    "stein",
    "targets",
    "transport",
    "tuning",
]
__version__ = version("swindles")
