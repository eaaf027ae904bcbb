"""Replicas of every kind of model: what they replace on it, and what is left of that."""

import pytest

import compat
from compat._backends.mxnet.replicas import ReplicatedCall
from compat._runtime.patching import InstanceMethod
from compat.testing import CASES, keras_under_test

from .gluon_models import contexts, dense, initialise
from .gluon_models import mx as mx  # the fixture
from .keras_models import replicas_of


@pytest.mark.row("Gluon Block")
def test_one_device_changes_nothing(mx):
    net = initialise(mx, dense(mx))
    before = dict(vars(net))
    assert compat.parallelize(net, gpus=1) is net
    assert vars(net) == before
    assert contexts(net) == [["cpu(0)"]] * 4


@pytest.mark.parametrize("kind", ["block", "keras"])
def test_only_the_methods_that_replicas_do_are_replaced(mx, kind):
    """On the model itself, until it has one device again."""
    if kind == "block":
        model, methods = initialise(mx, dense(mx)), {"forward"}
    else:
        model, methods = CASES["dense"].build(keras_under_test()), {"_sync_weights"}
        methods.update("_make_{}_function".format(phase) for phase in ("train", "test", "predict"))
        model.compile("sgd", "mse")
    before = dict(vars(model))
    assert methods.isdisjoint(before)
    compat.parallelize(model)
    calls = [each for stack in InstanceMethod.all_of(model).values() for each in stack]
    calls = [each for each in calls if isinstance(each, ReplicatedCall)]
    assert {each.method for each in calls} == methods
    assert {each.replicas for each in calls} == {replicas_of(model)}
    compat.parallelize(model, gpus=1)
    assert set(vars(model)) == set(before)
