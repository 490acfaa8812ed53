"""Hamiltonian Monte Carlo swindles: posterior expectations with smaller errors."""

from importlib.metadata import version

__version__ = version("swindles")
