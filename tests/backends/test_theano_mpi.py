"""Ranks on Theano: MPI."""

import os

import pytest

from compat.testing_ranks import RanksContract

# As in test_theano.py: implementations in Python, which are not compiled for each rank.
os.environ.setdefault("KERAS_BACKEND", "theano")
os.environ.setdefault(
    "THEANO_FLAGS",
    "optimizer=fast_compile,optimizer_excluding=conv_gemm:AbstractConvCheck,cxx=",
)


@pytest.mark.row("ranks: MPI")
class TestTheanoRanks(RanksContract):
    backend = "theano"
