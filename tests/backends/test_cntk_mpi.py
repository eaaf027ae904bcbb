"""Ranks on CNTK: its distributed learner, over MPI."""

import pytest

from compat.testing_ranks import RanksContract


@pytest.mark.row("ranks: MPI")
class TestCNTKRanks(RanksContract):
    backend = "cntk"
    # Keras 2.3 on CNTK tells metrics, such as the losses of several outputs, before it counts the
    # last batch, in one process, too. The loss itself is right.
    compared = 4
