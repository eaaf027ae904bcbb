"""Simulated devices, the same as those of the fuzz run, which may be in the same process."""

import os

import kerases
import pytest
from backends.conftest import INSTALLED, record_versions  # noqa: F401

from compat.testing import keras_under_test

# Most of the time is compiling, on JAX.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.fixture(scope="session")
def keras():
    kerases.configure(INSTALLED[0])
    return keras_under_test()
