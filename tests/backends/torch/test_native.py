"""torch: the contract of native models, by modules of torch's own."""

import weakref

import pytest
import torch

from compat.testing import NativeModels

from ..shared_parts import NativeParts
from .test_contract import placement, shard_sizes

pytestmark = pytest.mark.row("torch nn.Module")


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
