"""What a call changes in the objects that it reaches is noted, listed and put back."""

import collections
import gc
import weakref

import numpy as np
import pytest

from compat._runtime.containers import MISSING
from compat._runtime.effects import Effects

CALLS = 0
UNRELATED = 0
KEPT = {}


class Model:
    seen_by_class = 0

    def __init__(self):
        self.log = {"n": 0, "kinds": set()}
        self.seen = [1]
        self.queue = collections.deque([1, 2], maxlen=2)
        self.total = 0
        self.nested = [{"deep": []}]
        self.histogram = np.zeros(3)
        self.generator = np.random.RandomState(0)

    def forward(self, x):
        global CALLS
        CALLS += 1
        type(self).seen_by_class += 1
        self.total += len(x)
        self.last = x
        self.seen.append(x)
        self.queue.append(x)
        self.log["n"] += len(x)
        self.log["kinds"].add(len(x))
        self.nested[0]["deep"].append(x)
        self.histogram[1] += 1
        return self.generator.rand()


def state(model):
    return (
        CALLS, Model.seen_by_class, model.total, getattr(model, "last", None), list(model.seen),
        list(model.queue), model.log["n"], set(model.log["kinds"]), list(model.nested[0]["deep"]),
        model.histogram.tolist(),
    )  # fmt: skip


def test_all_that_a_call_changes_is_listed_and_put_back():
    model, batch = Model(), (4, 5, 6)
    before, drawn = state(model), model.generator.get_state()[1].tolist()
    found = Effects([model.forward])
    found.note()
    assert found.changes() == []
    first = model.forward(batch)
    after = state(model)
    assert sorted(map(str, found.changes())) == sorted(
        [
            "a set",
            "an array of numpy's",
            "attribute 'last' of Model",
            "attribute 'seen_by_class' of class Model",
            "attribute 'total' of Model",
            "element 0 of a list",
            "element 0 of a list",
            "element 1 of a list",
            "element 1 of a list",
            "global variable 'CALLS'",
            "item 'n' of a dictionary",
        ]
    )
    changes = found.changes()
    found.restore()
    assert state(model) == before and found.changes() == []
    assert model.generator.get_state()[1].tolist() == drawn or model.forward(batch) != first
    found.restore(randoms=True)
    assert model.forward(batch) == first
    found.restore(randoms=True)
    found.write(changes)
    assert state(model) == after


def test_a_closure_is_followed():
    count, kept = 0, []

    def hook(value):
        nonlocal count
        count += 1
        kept.append(value)

    found = Effects([hook])
    found.note()
    hook("first")
    assert [(str(each), each.before, each.after) for each in found.changes()] == [
        ("a variable of a closure", 0, 1),
        ("element 0 of a list", MISSING, "first"),
    ]
    found.restore()
    assert (count, kept) == (0, [])


def test_what_a_call_makes_is_followed_from_then_on():
    class Lazy:
        def __call__(self, value):
            if not hasattr(self, "made"):
                self.made = []
            self.made.append(value)

    lazy = Lazy()
    found = Effects([lazy])
    found.note()
    lazy(1)
    (change,) = found.changes()
    found.restore()
    assert not hasattr(lazy, "made")
    found.write([change])
    found.note()
    lazy(2)
    assert [str(each) for each in found.changes()] == ["element 1 of a list"]


@pytest.mark.parametrize("value", ["text", 3, 2.5, None, (1, 2)])
def test_equal_values_are_no_change(value):
    class Owner:
        pass

    owner = Owner()
    owner.value = value
    found = Effects([owner])
    found.note()
    owner.value = value if isinstance(value, tuple) else type(value)(value) if value else value
    assert found.changes() == []


def test_slots_are_attributes():
    class Slotted:
        __slots__ = ("value", "other")

    owner = Slotted()
    owner.value = 1
    found = Effects([owner])
    found.note()
    owner.value, owner.other = 2, 3
    found.restore()
    assert owner.value == 1 and not hasattr(owner, "other")


def test_tensors_are_values_and_long_lists_are_data():
    class Tensor:
        def __init__(self):
            self.inside = []

    tensor, data = Tensor(), list(range(20000))

    def call():
        tensor.inside.append(1)
        data.append(1)

    found = Effects([call], lambda value: isinstance(value, Tensor))
    found.note()
    call()
    assert [each.key for each in found.changes()] == [MISSING]
    found.restore()
    assert len(data) == 20000 and tensor.inside == [1]


def test_what_is_put_in_place_between_calls_is_followed_and_what_is_gone_is_let_go():
    global KEPT

    class Tensor:
        pass

    def hook(value):
        KEPT["value"] = value

    found = Effects([hook], lambda value: isinstance(value, Tensor))
    for _ in range(2):
        KEPT = {}  # as a script does before each of its steps
        found.note()
        hook(1)
        assert [str(each) for each in found.take()] == ["item 'value' of a dictionary"]
        assert KEPT == {}
    KEPT = {"tensor": Tensor()}
    found.note()
    kept = weakref.ref(KEPT["tensor"])
    KEPT = {}
    found.forget()
    found.note()
    gc.collect()
    assert kept() is None


def test_attributes_that_are_left_alone():
    class Layer:
        def __init__(self):
            self.kept, self.inner = [], {"framework": []}

    layer = Layer()
    found = Effects([layer], hidden=lambda value: ("inner",) if isinstance(value, Layer) else ())
    found.note()
    layer.kept.append(1)
    layer.inner["framework"].append(1)
    layer.inner = layer.last = {}
    assert sorted(map(str, found.take())) == ["attribute 'last' of Layer", "element 0 of a list"]
    assert layer.inner == {} and layer.kept == [] and not hasattr(layer, "last")
