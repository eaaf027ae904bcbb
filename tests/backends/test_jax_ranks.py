"""Ranks on JAX: jax.distributed."""

import pytest

from compat.testing_ranks import RanksContract


@pytest.mark.row("ranks: jax.distributed")
class TestJAXRanks(RanksContract):
    backend = "jax"
    extension = ".keras"
    # XLA compiles two programs for each, in each rank.
    trials = (("dense", "sgd"), ("lstm", "sgd"), ("multi", "adam"))
