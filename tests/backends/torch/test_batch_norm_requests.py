"""Modules of torch that ask for the statistics of the whole batch are never silently without."""

import pytest
import torch

import compat

from ..batch_norm_requests import check_said
from .test_contract import devices  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("devices")


def test_sync_batch_norm_is_synchronized_or_warned_about():
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.SyncBatchNorm(3))
    check_said("torch", lambda: compat.parallelize(net), "'1'")
