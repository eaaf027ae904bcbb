"""Ranks on keras-mxnet: Horovod."""

import pytest

from compat.testing_ranks import RanksContract


@pytest.mark.row("ranks: Horovod")
class TestMXNetHorovod(RanksContract):
    backend = "mxnet"
