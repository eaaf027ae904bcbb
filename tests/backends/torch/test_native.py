"""torch: the contract of native models, by modules of torch's own, and what is special to these."""

import copy
import io
import pickle
import weakref

import pytest
import torch

import compat
from compat._configuration import registry
from compat.testing import CASES, DEVICES, NativeModels, largest_difference

from ..shared_parts import NativeParts
from ..verification_cases import verified
from .test_contract import devices as three_devices
from .test_contract import placement, shard_sizes
from .test_merging import agree, computing, rows, same, same_gradients

pytestmark = pytest.mark.row("torch nn.Module")
devices = three_devices


class Modules(NativeModels):
    backend = "torch"
    optimizers = weakref.WeakKeyDictionary()  # type: weakref.WeakKeyDictionary

    def build(self, seed=0):
        torch.manual_seed(seed)
        nn = torch.nn
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizers[model] = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        return model

    def train(self, model, inputs, targets):
        model.train()
        optimizer = self.optimizers[model]
        optimizer.zero_grad()
        outputs = model(torch.from_numpy(inputs))
        loss = ((outputs - torch.from_numpy(targets)) ** 2).sum(1).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def predict(self, model, inputs):
        model.eval()
        with torch.no_grad():
            return model(torch.from_numpy(inputs)).numpy()

    def weights(self, model):
        return [weight.detach().numpy().copy() for weight in model.parameters()]


class TestTorchModules(Modules, NativeParts):
    def placement(self, model, inputs, targets):
        return placement(lambda: self.train(model, inputs, targets))

    def shard_sizes(self, model, inputs, targets):
        return shard_sizes(lambda: self.train(model, inputs, targets))


# Beside the contract ---------------------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)
    )


def train(model, rows=61, steps=3):
    """Train by a user's loop, without any device."""
    inputs, targets = (torch.as_tensor(array) for array in CASES["dense"].data(rows))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets.argmax(1))
        loss.backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


class TestModule:
    def test_buffers_are_set_once_to_the_mean_of_the_replicas(self, devices):
        plain, module = network(), compat.parallelize(network())
        inputs = torch.as_tensor(CASES["dense"].data(61)[0])
        for each in (plain, module):
            each(inputs)
        names = [name for name, _ in plain.named_buffers()]
        assert names == ["2.running_mean", "2.running_var", "2.num_batches_tracked"]
        buffers = [dict(each.named_buffers()) for each in (plain, module)]
        torch.testing.assert_close(buffers[0][names[0]], buffers[1][names[0]])
        assert buffers[1][names[2]].item() == 1
        for each in (plain, module):
            each.eval()
        torch.testing.assert_close(plain(inputs), module(inputs), rtol=0.1, atol=0.1)
        assert module(inputs).shape == (61, 4)

    def test_saving_copying_and_moving(self, devices):
        module = compat.parallelize(network())
        assert list(module.state_dict()) == list(network().state_dict())
        assert str(module) == str(network())
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert placement(lambda: train(loaded, steps=1)) == {}  # a plain module
        clone = copy.deepcopy(module)
        assert len(placement(lambda: train(clone, steps=1))) == DEVICES
        assert largest_difference(train(module, steps=0), train(network(), steps=0)) == 0
        assert module.to(torch.float64)(torch.zeros(5, 8, dtype=torch.float64)).shape == (5, 4)

    def test_a_copy_of_a_loaded_module_has_weights_of_its_own(self, devices):
        """Pickle leaves the class's method in the instance, bound to it."""
        loaded = compat.parallelize(pickle.loads(pickle.dumps(compat.parallelize(network()))))
        clone = copy.deepcopy(loaded)
        before = [parameter.detach().clone() for parameter in loaded.parameters()]
        train(clone, steps=1)
        assert all(parameter.grad is not None for parameter in clone.parameters())
        assert all(parameter.grad is None for parameter in loaded.parameters())
        assert all(map(torch.equal, before, loaded.parameters()))
        assert compat.parallelize(clone, gpus=1).forward.__self__ is clone

    @pytest.mark.parametrize("rows", [5, 3, 2])
    def test_batch_normalization_of_small_batches(self, devices, rows):
        """Batch normalization refuses to normalise one row, so fewer replicas take two and more."""
        counts = placement(lambda: train(compat.parallelize(network()), rows, steps=1))
        assert sorted(counts) == devices[: rows // 2 if rows > 3 else 1]

    def test_verification_tells_why_batch_normalization_is_not_compared(self, devices):
        """Dropout, which is named as well, would still make it random with the remedy of that."""
        module = network()
        module.add_module("drop", torch.nn.Dropout(0.5))
        compat.parallelize(module)
        record = verified(registry.load("torch"), module)
        train(module, steps=1)
        assert record.steps["train"] == 0 and record.uncompared["train"] == {
            "steps": 1,
            "reason": "module '2' normalizes each device's rows by their own statistics; module "
            "'drop' draws random numbers",
            "remedy": "pass sync_batch_norm=True (or --sync-batch-norm) and set the p of 'drop' "
            "to 0",
            "instead": 1,
        }

    def test_no_gradient_where_none_is_wanted(self, devices):
        module = compat.parallelize(network())
        with torch.no_grad():
            assert not module(torch.zeros(5, 8)).requires_grad
        module[0].weight.requires_grad_(False)
        before = module[0].weight.clone()
        train(module, steps=1)
        assert torch.equal(before, module[0].weight)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("order", ["before", "after", "in place", "around"])
def test_compiled_modules(order):
    def forward(m, y, t):
        return y.relu(), torch.nn.functional.cross_entropy(y, t)

    class Outer(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = compat.parallelize(module)

        def forward(self, *args):
            return self.module(*args)

    plain = computing(forward).double()
    compiled = copy.deepcopy(plain)
    if order == "before":
        compiled = torch.compile(compiled, backend="eager")
        assert compat.parallelize(compiled) is compiled
    elif order == "after":
        compiled = torch.compile(compat.parallelize(compiled), backend="eager")
    elif order == "in place":
        compat.parallelize(compiled).compile(backend="eager")
    else:
        compiled = torch.compile(Outer(compiled), backend="eager")
    targets = torch.arange(13) % 5
    for ignored in (0, 3, 6):
        targets[:ignored] = -100
        for module in (plain, compiled):
            module.zero_grad()
        expected, found = plain(rows(13, 4), targets), compiled(rows(13, 4), targets)
        same(expected, found, 1e-12)
        expected[1].backward()
        found[1].backward()
        same_gradients(plain, compiled)
    assert len(placement(lambda: compiled(rows(13, 4), targets))) == DEVICES


@pytest.mark.usefixtures("devices")
def test_a_compiled_module_stays_compiled():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    module = compat.parallelize(torch.compile(computing(lambda m, y: y.relu()), backend=count))
    for _ in range(3):  # the first call is watched, in eager mode
        module(rows(13, 4).float())
    assert graphs


@pytest.mark.usefixtures("devices")
def test_replicas_of_torchs_own_are_refused():
    wrapped = torch.nn.DataParallel(computing(lambda m, y: y))
    with pytest.raises(compat.UnsupportedError) as caught:
        compat.parallelize(wrapped)
    assert str(caught.value) == (
        "parallelize() was given a torch.nn.parallel.DataParallel, which splits batches by "
        "itself. Pass the module within it: parallelize(model.module), and use that."
    )
    agree(wrapped.module, rows(13, 4))
