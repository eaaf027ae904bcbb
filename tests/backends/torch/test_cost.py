"""torch: how many operations a training step on several devices takes, counted by the profiler."""

import collections

import pytest
import torch

import compat
from compat.testing import DEVICES, keras_under_test

from .. import shared_parts
from .test_contract import devices  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("devices")
ROWS = 12
#: What has the host wait for a GPU.
WAITS = (
    "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::masked_select",
    "aten::nonzero", "aten::unique_dim", "aten::_unique2",
)  # fmt: skip


def counted(step):
    """How often each operation of torch's runs in ``step()``, once it is known."""
    step()  # is watched
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return collections.Counter(e.name for e in profile.events() if e.name.startswith("aten::"))


def module_step(parallel):
    nn = torch.nn
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4),
        nn.LayerNorm(4), nn.Linear(4, 1),
    )  # fmt: skip
    if parallel:
        compat.parallelize(model)
    inputs = torch.randn(ROWS, 2, 6, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step():
        optimizer.zero_grad()
        (model(inputs) ** 2).mean().backward()
        optimizer.step()

    return step, len(list(model.parameters())), len(list(model.buffers()))


def keras_step(parallel):
    step, model = shared_parts.keras_step(keras_under_test(), ROWS, parallel)
    return step, len(model.trainable_weights), len(model.non_trainable_weights)


@pytest.mark.parametrize("build", [module_step, keras_step])
def test_a_step_takes_no_more_operations_and_waits_no_more_often_than_on_each_device(build):
    (alone, weights, state), (step, _, _) = build(False), build(True)
    one, several = counted(alone), counted(step)
    others = DEVICES - 1
    # Each other device has a copy of a weight and gives a gradient back: a few operations, one
    # within another. What the forward pass sets is copied for each device.
    assert sum(several.values()) <= DEVICES * sum(one.values()) + 6 * (weights + state) * others
    copies = others * (weights + 1) + DEVICES * state
    assert several["aten::_to_copy"] <= DEVICES * one["aten::_to_copy"] + copies
    assert several["aten::clone"] <= DEVICES * one["aten::clone"]
    for name in WAITS:  # for a device, which one device alone would not
        assert several[name] <= one[name], name
