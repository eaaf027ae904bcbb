"""Ranks on torch: torch.distributed."""

import pytest

from compat.testing_ranks import RanksContract


@pytest.mark.row("ranks: torch.distributed")
class TestTorchRanks(RanksContract):
    backend = "torch"
    extension = ".keras"
