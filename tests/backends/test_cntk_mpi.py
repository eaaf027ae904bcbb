"""Ranks on CNTK: its distributed learner, over MPI."""

import pytest

from compat.testing_ranks import RanksContract


@pytest.mark.row("ranks: MPI")
class TestCNTKRanks(RanksContract):
    backend = "cntk"
