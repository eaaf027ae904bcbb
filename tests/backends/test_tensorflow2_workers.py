"""Ranks on tf.keras 2: TF_CONFIG's workers."""

import pytest

from compat.testing_ranks import RanksContract


@pytest.mark.row("ranks: MultiWorkerMirroredStrategy")
class TestTensorFlow2Workers(RanksContract):
    backend = "tensorflow2"
