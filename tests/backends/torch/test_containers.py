"""torch: caches and other containers that a call is given and changes, or returns."""

import collections
import copy
import dataclasses

import pytest
import torch

import compat
from compat._backends.torch.tensors import tensors_in
from compat.testing import DEVICES

from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import backward, computing, replicas, rows, same
from .test_verification import verified_module

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]
ROWS = 7


class Cache:
    """As those of language models: layers, each with what it has seen so far."""

    def __init__(self):
        self.layers, self.kind, self.length = [], Cache, 0

    def add(self, value):
        if not self.layers:
            self.layers.append(collections.OrderedDict(values=value[:, :0], device=value.device))
        layer = self.layers[0]
        layer["values"] = torch.cat([layer["values"], value], 1)
        self.length += 1
        return layer["values"]


class Outer:
    """A cache within a cache, which is there twice, and knows who holds it."""

    def __init__(self):
        self.inner = self.again = Cache()
        self.inner.owner = self

    def add(self, value):
        return self.again.add(value)


@dataclasses.dataclass
class Record:
    parts: list = dataclasses.field(default_factory=list)

    def add(self, value):
        self.parts.append(value)
        return torch.cat(self.parts, 1)


class Base:
    """Without slots, so that what is derived from it has a ``__dict__`` as well."""


@dataclasses.dataclass
class Slots(Base):
    __slots__ = ("parts",)
    parts: list

    add = Record.add


class InPlace:
    """Room for all that there will be, filled in place."""

    def __init__(self):
        self.values, self.length = torch.zeros(ROWS, 3, 5, dtype=torch.float64), torch.tensor(0)

    def add(self, value):
        self.values[:, int(self.length)] = value.detach()[:, 0]
        self.length += 1
        return self.values


def add_to_list(given, value):
    given.append(value)
    return torch.cat(given, 1)


def add_to_dict(given, value):
    given["all"] = torch.cat([given["all"], value], 1) if "all" in given else value
    return given["all"]


KINDS = {
    "object": (Cache, Cache.add),
    "within another": (Outer, Outer.add),
    "dataclass": (Record, Record.add),
    "slots": (lambda: Slots([]), Slots.add),
    "in place": (InPlace, InPlace.add),
    "list": (list, add_to_list),
    "dictionary": (dict, add_to_dict),
}


@pytest.mark.parametrize("verify", [0, 3])
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_a_call_adds_to_its_arguments(kind, verify):
    """The caller's own object gets it, each row once, however often the call was tried."""
    make, add = KINDS[kind]

    def forward(m, y, cache):
        return add(cache, y[:, None]).sum(1) + y, cache

    module = computing(forward).double()
    plain, parallel = copy.deepcopy(module), compat.parallelize(module)
    if verify:
        verified_module(parallel, verify)
    expected, found = make(), make()
    for step in range(3):
        x = rows(ROWS, 4) + step
        one, other = plain(x, expected), parallel(x, found)
        assert other[1] is found
        same(one[0], other[0], 1e-12)
    for module, result in ((plain, one[0]), (parallel, other[0])):
        backward(module, result)
    same(plain.layer.weight.grad, parallel.layer.weight.grad, 1e-12)
    tensors = [list(tensors_in(each, 5)) for each in (expected, found)]
    assert len(tensors[0]) == len(tensors[1]) > 0
    same(tensors[0], tensors[1], 1e-12)
    assert replicas(lambda: parallel(rows(ROWS, 4), make())) == DEVICES


def test_what_a_call_leaves_alone_stays_the_callers():
    """A batch in an object: its tensors are not those that were put together again."""
    module = compat.parallelize(computing(lambda m, y, batch: (y + batch.more, batch)).double())
    batch = type("Batch", (), {})()
    batch.more = more = rows(ROWS, 5)
    batch.names = names = ["a", more]
    result, same_batch = module(rows(ROWS, 4), batch)
    assert same_batch is batch and batch.more is more and batch.names is names
    assert replicas(lambda: module(rows(ROWS, 4), batch)) == DEVICES


def test_a_cache_of_a_model_that_runs_unsplit():
    """What was added before it turned out that rows are mixed is taken back."""

    def forward(m, y, cache):
        return cache.add((y - y.flip(0))[:, None]).sum(1)

    module = computing(forward).double()
    plain, parallel = copy.deepcopy(module), compat.parallelize(module)
    expected, found = Cache(), Cache()
    with pytest.warns(compat.CompatWarning, match="runs unsplit on"):
        result = parallel(rows(ROWS, 4), found)
    same(plain(rows(ROWS, 4), expected), result, 1e-12)
    assert found.length == expected.length == 1
    same(expected.layers[0]["values"], found.layers[0]["values"], 1e-12)


@pytest.mark.parametrize("verify", [0, 2])
def test_hooks_that_forward_registers_once(verify):
    """As transformers does to collect hidden states: a flag of the module tells that it is done."""
    module = computing(None).double()
    module.seen = seen = []

    def forward(x):
        del seen[:]
        if not getattr(module, "is_watched", False):
            module.layer.register_forward_hook(lambda layer, given, result: seen.append(result))
            module.is_watched = True
        return module.layer(x).relu(), tuple(seen)

    type(module).forward = lambda self, x: forward(x)
    compat.parallelize(module)
    if verify:
        verified_module(module, verify)
    for _ in range(2):
        result, collected = module(rows(ROWS, 4))
        assert len(collected) == len(module.layer._forward_hooks) == 1
        same(collected[0].relu(), result, 0)
    assert replicas(lambda: module(rows(ROWS, 4))) == DEVICES


def test_verification_knows_what_a_result_is_rounded_to():
    """A loss that is computed with fewer digits than the weights have is no false alarm."""

    def forward(m, y, t):
        return torch.nn.functional.cross_entropy(y.float() * 3, t)

    module = compat.parallelize(computing(forward).double())
    record = verified_module(module, 8)
    for step in range(8):
        loss = module(rows(ROWS, 4) + step, (torch.arange(ROWS) + step) % 5)
    assert loss.dtype == torch.float32 and record.steps["train"] == 8
