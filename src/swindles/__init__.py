"""Hamiltonian Monte Carlo swindles: posterior expectations with smaller errors.

``swindles.estimate(...)`` is the front door. Behind it is one module for each chapter
of the book: ``scale``, ``accuracy``, ``transport``, ``neutra``, ``models``,
``targets``, ``coupling``, ``antithetic``, ``control``, ``cva``, ``stein``,
``importance``, ``mixture``, ``schemes``, ``tuning``, ``unbiased``, ``choice`` and
``estimation``, in the order in which they build on each other. They are imported when
they are first used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

# Where each public name lives.
NAMES = {
    "Model": "models",
    "use_cores": "scale",
    "use_hosts": "scale",
    "from_numpyro": "models",
    "from_pymc": "models",
    "hmc_antithetic": "schemes",
    "hmc_control": "schemes",
    "hmc_cva": "schemes",
    "Report": "estimation",
    "estimate": "estimation",
    "load": "estimation",
}
MODULES = (
    *("scale", "accuracy", "transport", "neutra", "models", "targets", "coupling"),
    *("antithetic", "control", "cva", "stein", "importance", "mixture", "schemes"),
    *("tuning", "unbiased", "choice", "estimation"),
)
__all__ = [*NAMES, *MODULES]
__version__ = version("swindles")


def __getattr__(name: str) -> Any:
    """Import a module, or what a module defines, at its first use."""
    if name in NAMES:
        return getattr(import_module(f"swindles.{NAMES[name]}"), name)
    if name in MODULES:
        return import_module(f"swindles.{name}")
    raise AttributeError(f"module 'swindles' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names and modules."""
    return sorted([*__all__, "__version__"])
