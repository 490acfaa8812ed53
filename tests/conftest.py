"""What several test files share."""

import importlib.util
from pathlib import Path

import pytest


def load_ground_truth(name):
    """A module of inference-gym's reference values, without importing its package."""
    (folder,) = importlib.util.find_spec("inference_gym").submodule_search_locations
    path = Path(folder) / "targets" / "ground_truth" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def logistic_truth():
    """Published moments of the German-credit regression."""
    return load_ground_truth("german_credit_numeric_logistic_regression")


@pytest.fixture(scope="session")
def sparse_truth():
    """Published moments of the sparse German-credit regression."""
    return load_ground_truth("german_credit_numeric_sparse_logistic_regression")
