"""Ranks on TensorFlow 1: Horovod."""

import pytest

from compat.testing_ranks import RanksContract


@pytest.mark.row("ranks: Horovod")
class TestTensorFlow1Horovod(RanksContract):
    backend = "tensorflow1"
