"""What each context executed, as the profiler of MXNet's engine records it."""

import tempfile
import time

import pytest

import compat
from compat import _verification
from compat._backends.mxnet import profiler
from compat._runtime.process import process

from .gluon_models import DEVICES, dense, initialise, train, trainer
from .gluon_models import mx as mx  # the fixture
from .test_verification import verified

pytestmark = pytest.mark.row("Gluon Block")


def test_products_are_counted_by_context(mx, monkeypatch):
    """What ``compat test script.py`` tells of a block."""
    monkeypatch.setattr(process, "records_operations", True)
    net = compat.parallelize(initialise(mx, dense(mx)))
    net.hybridize(forward_bulk_size=0, backward_bulk_size=0)  # one operation a record
    record = verified(net)
    train(mx, net, trainer(mx, net), (14,))
    assert sorted(record.operations) == DEVICES
    assert all(forward and backward for forward, backward in record.operations.values())
    assert _verification.same(record.as_dict()) is True


def test_the_record_is_written_once_at_its_end(mx, monkeypatch, tmp_path):
    """MXNet's own thread, which writes once a second, would meet the folder's removal."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ones = mx.nd.ones((2, 2))
    with profiler.recorded() as events:
        mx.nd.dot(ones, ones)
        time.sleep(1.2)
        assert not list(tmp_path.glob("*/*"))
    assert [event["ph"] for event in events if event["name"] == "dot"].count("B") == 1
    assert not list(tmp_path.glob("*"))
