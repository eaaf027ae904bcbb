"""Blocks and modules that ask for the statistics of the whole batch are never silently without."""

import pytest

import compat

from ..batch_norm_requests import check_said


@pytest.fixture(scope="module")
def mx():
    compat.configure_gpu(simulate=3)
    import mxnet

    return mxnet


def test_a_gluon_layer_is_synchronized_or_warned_about(mx):
    net = mx.gluon.nn.HybridSequential()
    inner = mx.gluon.contrib.nn.SyncBatchNorm(in_channels=3, num_devices=3)
    net.add(mx.gluon.nn.Dense(3, in_units=4), inner)
    net.initialize()
    check_said("mxnet", lambda: compat.parallelize(net), repr(inner.name))


def test_an_operation_of_a_module_is_synchronized_or_warned_about(mx):
    data = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3)
    symbol = mx.sym.contrib.SyncBatchNorm(data, ndev=3, key="norm", name="norm")
    module = mx.mod.Module(symbol, label_names=[])
    check_said("mxnet", lambda: compat.parallelize(module), "'norm'")
