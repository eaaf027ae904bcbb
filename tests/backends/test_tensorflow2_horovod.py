"""Ranks on tf.keras 2: Horovod."""

import pytest

from compat.testing_ranks import RanksContract


@pytest.mark.row("ranks: Horovod")
class TestTensorFlow2Horovod(RanksContract):
    backend = "tensorflow2"
