"""torch: values with rows that a model keeps from one call to the next."""

import copy
import warnings

import numpy as np
import pytest
import torch

import compat
from compat._configuration import registry
from compat.testing import keras_under_test

from ..verification_cases import verified
from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import replicas, rows, same, same_gradients

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]


class Net(torch.nn.Module):
    """Keeps a hidden state of its rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.last = torch.nn.GRUCell(4, 5), torch.nn.Linear(5, 3)
        self.h, self.fresh = None, 0.5
        self.double()

    def zeros(self, x):
        return torch.full((x.size(0), 5), self.fresh, dtype=x.dtype)

    def forward(self, x):
        return self.last(self.step(x))


class SizeCheck(Net):
    def step(self, x):
        if self.h is None or self.h.size(0) != x.size(0):
            self.h = self.zeros(x)
        self.h = self.cell(x, self.h.detach())
        return self.h


class NoCheck(Net):
    def step(self, x):
        self.h = self.cell(x, self.zeros(x) if self.h is None else self.h).detach()
        return self.h + self.cell(x, self.zeros(x))


class Previous(Net):
    def step(self, x):
        y = self.cell(x, self.zeros(x))
        was, self.h = self.h, y.detach()
        return y + 0.3 * was if was is not None and was.shape == y.shape else y


class InPlace(Net):
    def step(self, x):
        y = self.cell(x, self.zeros(x))
        if self.h is None or self.h.shape != y.shape:
            self.h = y.detach().clone()
        else:
            y = y + self.h
            self.h.mul_(0.5).add_(y.detach())
        return y


class Array(Net):
    def step(self, x):
        y = self.cell(x, self.zeros(x))
        if self.h is not None and self.h.shape == tuple(y.shape):
            y = y + torch.from_numpy(self.h)
        self.h = y.detach().numpy()
        return y


class Layers(Net):
    """Of two layers, whose states have the rows in their second dimension."""

    def __init__(self):
        super().__init__()
        self.cell = torch.nn.LSTM(4, 5, 2, batch_first=True).double()

    def step(self, x):
        if self.h is not None and self.h[0].size(1) != x.size(0):
            self.h = None
        states = None if self.h is None else tuple(each.detach() for each in self.h)
        y, self.h = self.cell(x[:, None].expand(-1, 3, -1), states)
        return y[:, -1]


class Listed(Net):
    """Looks at the newest of a list in a dictionary, which the script empties."""

    def __init__(self):
        super().__init__()
        self.kept = {"outputs": []}

    def step(self, x):
        y = self.cell(x, self.zeros(x))
        outputs = self.kept["outputs"]
        if outputs and outputs[-1].shape == y.shape:
            y = y + 0.5 * outputs[-1]
        outputs.append(y.detach())
        return y


class OtherBranch(Net):
    """Computes across rows once there is a state."""

    def step(self, x):
        y = self.cell(x, self.zeros(x))
        if self.h is not None and self.h.size(0) == x.size(0):
            y = y - y.flip(0)
        self.h = y.detach()
        return y


def closure():
    kept = None

    class Closure(Net):
        def step(self, x):
            nonlocal kept
            y = self.cell(x, self.zeros(x))
            y = y if kept is None or kept.shape != y.shape else torch.maximum(kept, y)
            kept = y.detach()
            return y

    return Closure()


MODELS = [SizeCheck, NoCheck, Previous, InPlace, Layers, Listed, closure]


def differ(build, counts, between=lambda model, step: None, modes=None, split=True, told=()):
    """Training on three devices gives what one gives; the rows of each batch are in ``counts``."""
    plain, parallel = build(), build()
    compat.parallelize(parallel)
    messages = []
    for step, count in enumerate(counts):
        x, results = rows(count, 4) + step, []
        for model in (plain, parallel):
            between(model, step)
            model.train(modes is None or modes[step])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", compat.CompatWarning)
                with torch.set_grad_enabled(model.training):
                    results.append(model(x))
            messages += [str(e.message) for e in caught if e.category is compat.CompatWarning]
        same(*results, 1e-12)
        if plain.training:
            for model, result in zip((plain, parallel), results):
                model.zero_grad()
                result.square().sum().backward()
            same_gradients(plain, parallel)
            with torch.no_grad():
                for model in (plain, parallel):
                    for weight in model.parameters():
                        if weight.grad is not None:
                            weight -= 0.01 * weight.grad
        same(plain.h, parallel.h, 1e-12)
    assert replicas(lambda: parallel(rows(counts[-1], 4))) == (3 if split else 0)
    assert told is None or messages == list(told)
    return messages


@pytest.mark.parametrize("build", MODELS)
def test_each_replica_finds_its_own_rows(build):
    differ(build, [7] * 5)


CHECKED = [build for build in MODELS if build is not NoCheck]


@pytest.mark.parametrize("build", CHECKED)
@pytest.mark.parametrize("counts", [[7, 7, 5, 7, 7, 5], [7, 4, 9, 9, 1, 9], [5, 7, 7]])
def test_batches_of_other_numbers_of_rows(build, counts):
    differ(build, counts)


@pytest.mark.parametrize("build", [each for each in CHECKED if each is not Listed])
@pytest.mark.parametrize("counts", [[7, 7, 2, 7, 7], [2, 7, 7], [7, 3, 7, 3, 7, 7]])
def test_as_many_rows_as_a_replica_has_of_the_next_batch(build, counts):
    """That batch runs unsplit, for each replica would take them for its own."""
    (text,) = differ(build, counts, told=None)
    assert text.endswith(" The model runs unsplit on cpu:0.")


@pytest.mark.parametrize("build", CHECKED)
def test_evaluation_after_training(build):
    differ(build, [7, 7, 6, 6, 7, 7], modes=[True, True, False, False, False, True])


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("count", [7, 4, 3, 2])
@pytest.mark.parametrize("build", [SizeCheck, Previous, InPlace])
def test_a_script_sets_what_is_kept(build, count, first):
    def between(model, step):
        if step == first:
            model.h = rows(count, 5) * 0.1
        elif step == first + 2:
            model.h = None

    messages = differ(build, [7] * 6, between, told=None)
    # Three rows, or two, are as many as a replica has.
    assert len(messages) == (count < 4)


def test_a_script_empties_a_list_and_replaces_it():
    def between(model, step):
        if step in (2, 3):
            del model.kept["outputs"][:]
        elif step > 4:
            model.kept = {"outputs": []}

    differ(Listed, [7] * 7, between)


def test_a_branch_that_computes_across_rows_is_told():
    text = (
        "The operation flip (test_kept_rows.py, line {}) of 'OtherBranch' needs the whole batch, "
        "but each device sees only its shard. The model runs unsplit on cpu:0."
    ).format(OtherBranch.step.__code__.co_firstlineno + 3)
    differ(OtherBranch, [7] * 4, split=False, told=[text])


def test_arrays_are_told():
    """What of a tensor an array was made is not seen."""
    text = (
        "The operation add (test_kept_rows.py, line {}) of 'Array' needs the whole batch, but each "
        "device sees only its shard. The model runs unsplit on cpu:0."
    ).format(Array.step.__code__.co_firstlineno + 3)
    differ(Array, [7] * 4, split=False, told=[text])


def test_gradients_through_what_is_kept():
    class Through(Net):
        def step(self, x):
            self.h = self.cell(x, self.zeros(x) if self.h is None else self.h)
            return self.h

    plain, parallel = Through(), Through()
    compat.parallelize(parallel)
    for model in (plain, parallel):
        sum(model(rows(7, 4) + step).square().sum() for step in range(3)).backward()
    same_gradients(plain, parallel)
    assert replicas(lambda: parallel(rows(7, 4))) == 3


def test_copies_of_a_model_find_it_too():
    plain, parallel = SizeCheck(), SizeCheck()
    compat.parallelize(parallel)
    with torch.no_grad():
        for model in (plain, parallel):
            model(rows(7, 4))
        one, other = copy.deepcopy(plain), copy.deepcopy(parallel)
        same(one(rows(7, 4) + 1), other(rows(7, 4) + 1), 1e-12)
        same(plain(rows(7, 4)), parallel(rows(7, 4)), 1e-12)


def test_a_layer_of_keras_finds_its_own_rows():
    keras = keras_under_test()

    class Keeping(keras.layers.Layer):
        h = None

        def call(self, x):
            if x.device.type != "meta":
                y = x if self.h is None or self.h.shape != x.shape else x + 0.3 * self.h
                self.h = y.detach()
                return y
            return x

    found = []
    for parallel in (False, True):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Input((4,)), keras.layers.Dense(5), Keeping()]
        model = keras.Sequential(layers + [keras.layers.Dense(1)])
        if parallel:
            compat.parallelize(model)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        with warnings.catch_warnings():
            warnings.simplefilter("error", compat.CompatWarning)
            for count in (7, 7, 5, 7, 7, 5):
                x = np.random.RandomState(count).normal(size=(count, 4))
                model.train_on_batch(x, x[:, :1])
        found.append(model.get_weights())
    for pair in zip(*found):
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)
    assert replicas(lambda: model(np.ones((7, 4)))) == 3


@pytest.mark.parametrize("build", [SizeCheck, Previous, InPlace, Layers, closure])
def test_verification_leaves_what_is_kept_as_it_was(build):
    plain, parallel = build(), build()
    compat.parallelize(parallel)
    record = verified(registry.find("torch"), parallel, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        for count in (7, 7, 5, 5, 7):
            same(plain(rows(count, 4)), parallel(rows(count, 4)), 1e-12)
            same(plain.h, parallel.h, 1e-12)
    assert record.steps["train"] == 3
    assert replicas(lambda: parallel(rows(7, 4))) == 3
