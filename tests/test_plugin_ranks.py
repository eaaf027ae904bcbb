"""The contract of ranks for the backend of another package, tests/plugin."""

import pytest
from test_plugin import Networks

from compat.testing.ranks import NativeRanksContract

pytestmark = pytest.mark.row("third parties' backends")


class TestNumpyRanks(Networks, NativeRanksContract):
    """By its name, which is enough where the backend is found by it."""

    backend = "numpy"
    timeout = 5
