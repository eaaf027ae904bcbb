"""torch: replicas on devices that hold their tensors apart, as GPUs do."""

import copy
import warnings

import pytest
import torch
from torch import nn

import compat
from compat._backends.torch import native

from .. import separate_devices  # noqa: F401  (which makes the devices)

pytestmark = pytest.mark.row("torch nn.Module")
ROWS = 13
DEVICES = ["lazy:0", "lazy:1", "lazy:2"]


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(12, 4), nn.Dropout(0.0), nn.Linear(4, 1),
    ), (2, 6, 6)  # fmt: skip


def recurrent():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(3, 4, batch_first=True)
            self.dense = nn.Linear(4, 1)

        def forward(self, x):
            return self.dense(self.layer(x)[0].mean(1))

    return Recurrent(), (5, 3)


def with_state():
    """Return a mean over the rows, a buffer and an attribute, merged from all replicas."""

    class WithState(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(3, 1)
            self.register_buffer("moving", torch.zeros(3))

        def forward(self, x):
            result = self.dense(x - self.moving) * torch.ones_like(x[:, :1])
            self.moving = 0.9 * self.moving + 0.1 * x.mean(0)
            self.size = (x**2).mean()
            return result, self.size

    return WithState(), (3,)


def with_a_cache():
    """Return a module with a cache, which holds each device's shard."""

    class Cache:
        def __init__(self):
            self.values, self.device, self.calls = None, None, torch.zeros(())

        def add(self, value):
            self.values = value if self.values is None else torch.cat([self.values, value], 1)
            self.device, self.calls = value.device, self.calls + 1
            return self.values

    class WithCache(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(3, 2)

        def forward(self, x, cache=None):
            cache = Cache() if cache is None else cache
            return self.dense(x) + cache.add(self.dense(x)[:, None]).sum(1), cache

    class Twice(WithCache):
        """What is returned is put together of three, and is given to them again."""

        def __call__(self, x):
            cache = super().__call__(x)[1]
            result, same = super().__call__(x, cache)
            assert same is cache and cache.calls.item() == 2
            assert cache.device == cache.values.device == x.device
            return result, cache.values

    return Twice(), (3,)


def trained(module, device, shape):
    """Return the losses of three steps, and the weights and buffers after them."""
    module = module.to(device)
    inputs = torch.randn((ROWS,) + shape, generator=torch.Generator().manual_seed(1)).to(device)
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        results = torch.utils._pytree.tree_leaves(module(inputs))
        loss = sum((result**2).mean() for result in results)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().to("cpu"))
    assert {str(weight.grad.device) for weight in module.parameters()} == {device}
    return losses + [value.detach().to("cpu") for value in module.state_dict().values()]


@pytest.mark.parametrize("build", [convolutions, recurrent, with_state, with_a_cache])
def test_nothing_is_left_on_another_device_in_a_training_step(build):
    torch.manual_seed(0)
    module, shape = build()
    if build is convolutions:  # by moving averages, which all devices have
        module[1].eval()
    plain = copy.deepcopy(module)
    native.ReplicatedForward.install_on(module, DEVICES)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)  # that it runs unsplit
        found = trained(module, "lazy:0", shape)
    torch.testing.assert_close(trained(plain, "cpu", shape), found)


def test_batch_normalization_of_each_device_s_rows():
    torch.manual_seed(0)
    module, shape = convolutions()
    native.ReplicatedForward.install_on(module, DEVICES)
    before = module[1].running_mean.clone()
    trained(module, "lazy:0", shape)
    assert not torch.equal(module[1].running_mean.to("cpu"), before)


def test_a_tensor_that_is_left_on_another_device_is_found():
    class Misplaced(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(3, 1)
            self.constants = [torch.ones(3).to("lazy:0")]  # which nothing moves

        def forward(self, x):
            return self.dense(x * self.constants[0])

    module = Misplaced()
    native.ReplicatedForward.install_on(module, DEVICES)
    with pytest.warns(compat.CompatWarning) as caught:
        trained(module, "lazy:0", (3,))
    assert [str(warning.message) for warning in caught] == [
        "The operation mul (test_devices.py, line 140) of 'Misplaced' fails on a shard of the "
        "batch, which is all that each device sees. The model runs unsplit on lazy:0."
    ]
