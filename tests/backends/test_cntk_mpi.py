"""Ranks on CNTK: its distributed learner, over MPI."""

import pytest

from compat.testing_ranks import RanksContract


@pytest.mark.row("ranks: MPI")
class TestCNTKRanks(RanksContract):
    backend = "cntk"
    # Keras 2.3 on CNTK tells metrics, which the losses of several outputs are, too, before it counts
    # the last batch: the more batches, the less that matters. The loss itself is right.
    compared = 4
