"""torch: what a call leaves outside of its results is what one device leaves."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch

import compat
from compat._backends.torch.native import ReplicatedForward

from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import MIXED, replicas, rows, same, same_gradients, whole

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]
ROWS = 7


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)
        self.seen, self.log, self.kinds, self.calls = [], {"n": 0}, set(), 0
        self.average, self.generator = torch.zeros(5).double(), torch.Generator()

    def forward(self, x):
        hidden = self.first(x).tanh()
        self.leave(hidden)
        return self.second(hidden)

    def leave(self, hidden):
        pass


def net(leave, hook=None):
    """Return a module whose hidden values go through a function, or a hook of its first layer."""

    class Mine(Net):
        pass

    if leave is not None:
        Mine.leave = leave
    return Mine().double()


def state(value):
    """All that a module has but for what torch keeps there, and compat."""
    left = {
        n: v for n, v in vars(value).items() if n[0] != "_" and n not in ("forward", "generator")
    }
    return {n: sorted(v) if isinstance(v, set) else v for n, v in left.items()}


def differ(make, steps=3, loss=None, split=True, told=()):
    """Check that side effects, results and gradients are the same on three devices.

    Arguments:
        make: a function that returns a module, and a function that returns its side effects.
        steps: the number of steps.
        loss: a function of the module and its result.
        split: whether batches are split.
        told: the texts of the warnings.
    """
    (plain, seen), (parallel, found) = make(), make()
    compat.parallelize(parallel)
    messages = []
    for step in range(steps):
        x = rows(ROWS, 4) + step
        results = []
        for model in (plain, parallel):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", compat.CompatWarning)
                results.append(model(x))
                model.zero_grad()
                (
                    results[-1].square().sum() if loss is None else loss(model, results[-1])
                ).backward()
            messages += [str(e.message) for e in caught if e.category is compat.CompatWarning]
        same(*results, 1e-12)
        same_gradients(plain, parallel)
        for one, other in zip(plain.parameters(), parallel.parameters()):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        same(state(plain), state(parallel), 1e-12)
        same(seen(), found(), 1e-12)
    assert messages == list(told)
    assert replicas(lambda: parallel(x)) == (3 if split else 0)


def made(leave, **kwargs):
    return lambda: (net(leave, **kwargs), lambda: None)


# Observers ----------------------------------------------------------------------------------------


def keep(self, y):
    self.last = y


def keep_nested(self, y):
    self.kept = {"y": [y, (y.detach() * 2, y.shape)], "n": y.shape[0], "name": "hidden"}


def keep_totals(self, y):
    self.total, self.mean = y.sum(), y.mean(0)
    self.by_number = y.sum().item()


def keep_array(self, y):
    self.array = y.detach().numpy()
    self.seen.append(y.detach().cpu().numpy()[:, 0])


@pytest.mark.parametrize("leave", [keep, keep_nested, keep_totals, keep_array])
def test_attributes_have_the_values_of_the_whole_batch(leave):
    differ(made(leave))


def test_an_attribute_that_is_a_result_is_that_very_tensor():
    def forward(self, x):
        self.last = result = self.first(x)
        return result

    class Same(Net):
        pass

    Same.forward = forward
    model = compat.parallelize(Same().double())
    result = model(rows(ROWS, 4))
    assert model.last is result


def hooked(register):
    """Return a module, and the values that a hook of its first layer keeps in a closure."""

    def make():
        model, kept = net(None), {}
        register(model, kept)
        return model, lambda: kept

    return make


HOOKS = {
    "forward": lambda m, kept: m.first.register_forward_hook(
        lambda _, i, o: kept.__setitem__("a", o)
    ),
    "inputs": lambda m, kept: m.second.register_forward_hook(
        lambda _, i, o: kept.setdefault("in", []).append(i)
    ),
    "pre": lambda m, kept: m.second.register_forward_pre_hook(
        lambda _, i: kept.update(a=i[0], n=kept.get("n", 0) + 1)
    ),
    "keywords": lambda m, kept: m.first.register_forward_hook(
        lambda _, i, k, o: kept.update(a=o.mean(1)), with_kwargs=True
    ),
    "of the module itself": lambda m, kept: m.register_forward_hook(
        lambda _, i, o: kept.update(i=i[0], o=o)
    ),
    "of all": lambda m, kept: [
        part.register_forward_hook(lambda part, i, o, n=n: kept.update({n: o.detach()}))
        for n, part in m.named_children()
    ],
}


@pytest.mark.parametrize("kind", sorted(HOOKS))
def test_hooks_see_the_whole_batch(kind):
    differ(hooked(HOOKS[kind]))


def test_a_loss_on_what_a_hook_keeps_trains_to_the_weights_of_one_device():
    """Deep supervision, feature matching, penalties on activations."""

    def make():
        model = net(None)
        model.kept = {}
        model.first.register_forward_hook(lambda _, i, o: model.kept.update(a=o))
        return model, lambda: None

    def loss(model, result):
        kept = model.kept["a"]
        return result.square().mean() + (kept - kept.mean(0)).pow(2).mean() * 3

    differ(make, loss=loss)


KEPT = {}


def to_global(self, y):
    KEPT[type(self).__name__] = y.detach()


def test_a_global_variable_that_the_script_replaces_between_calls():
    global KEPT
    model = compat.parallelize(net(to_global))
    for step in range(3):
        KEPT = {}
        x = rows(ROWS, 4) + step
        model(x)
        same(KEPT["Mine"], model.first(x).tanh().detach(), 1e-12)


def test_what_is_kept_does_not_stay_in_memory():
    import gc
    import weakref

    model = compat.parallelize(net(keep))
    kept = []
    for _ in range(4):
        model(rows(ROWS, 4)).sum().backward()
        kept.append(weakref.ref(model.last))
    gc.collect()
    assert [each() is not None for each in kept] == [False, False, False, True]


# What trials and replicas leave -------------------------------------------------------------------


def count(self, y):
    self.seen.append(y.detach())
    self.log["n"] += len(y)
    self.calls += 1


def count_kinds(self, y):
    self.kinds.add(y.dim())
    self.log.setdefault("shapes", []).append(y.shape[1:])
    type(self).by_class = getattr(type(self), "by_class", 0) + 1


def queue(self, y):
    """Keep the last two values."""
    self.seen.append(y.mean(0).detach())
    if len(self.seen) > 2:
        self.seen.pop(0)


def in_place(self, y):
    """Change a tensor that is not a buffer in place."""
    self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)


@pytest.mark.parametrize("leave", [count, count_kinds, queue, in_place])
def test_lists_counters_and_tensors_are_changed_once(leave):
    differ(made(leave), steps=4)


def test_three_batches_of_seven_are_21_rows():
    model = compat.parallelize(net(count))
    for _ in range(3):
        model(rows(ROWS, 4))
    assert [len(each) for each in model.seen] == [7, 7, 7]
    assert model.log["n"] == 21 and model.calls == 3


def test_also_where_the_model_runs_unsplit():
    def leave(self, y):
        count(self, y)
        in_place(self, y)
        self.spread = (y - y.flip(0)).detach()

    text = whole("flip", leave.__code__, MIXED)
    text = [
        each.replace(
            f"line {leave.__code__.co_firstlineno}", f"line {leave.__code__.co_firstlineno + 3}"
        )
        for each in text
    ]
    differ(made(leave), split=False, told=text)


def test_what_cannot_be_put_together_runs_unsplit():
    def leave(self, y):
        self.numbers = self.__dict__.get("numbers", ()) + (Opaque(y),)

    differ_opaque(leave)


class Opaque:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def differ_opaque(leave):
    model = compat.parallelize(net(leave))
    with pytest.warns(compat.CompatWarning) as caught:
        for _ in range(2):
            model(rows(ROWS, 4))
    assert [str(each.message) for each in caught] == [
        "The operation that makes a Opaque of 'Mine' may need the whole batch, but each device "
        "sees only its shard: compat has no rule for it, and cannot try it. The model runs unsplit "
        "on cpu:0."
    ]
    assert [len(each.value) for each in model.numbers] == [7, 7]


def test_a_large_tensor_that_a_later_call_changes_is_an_error():
    class Late(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.bank = torch.nn.Linear(4, 3), torch.zeros(1 << 11, 1 << 10)
            self.late = 0.0

        def forward(self, x):
            if self.late:
                self.bank[0] += 1
            return self.layer(x)

    model = compat.parallelize(Late())
    model(torch.ones(ROWS, 4))
    model.late = 1.0
    with pytest.raises(compat.UnsupportedError) as caught:
        model(torch.ones(ROWS, 4))
    assert str(caught.value) == MOVED_LATE.format("Late")


MOVED_LATE = (
    "{} changes a weight or another large tensor in place, which it left alone in its first call, "
    "so that its value of before, with which each device begins, is not known any more. Have the "
    "first call change it, too, or register_buffer() it; or run the model on one device: "
    "parallelize(model, gpus=1)."
)


@pytest.mark.parametrize("mixes", [False, True])
def test_random_numbers_that_a_trial_draws_are_put_back(mixes):
    """Those of Python, numpy and torch, and of the module's own generator."""

    def leave(self, y):
        self.drawn = [float(torch.rand((), generator=self.generator))]
        self.drawn += [random.random(), float(np.random.rand()), float(torch.rand(()))]
        if mixes:
            self.spread = y - y.mean(0)

    def drawn(parallel):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model = net(leave)
        torch.manual_seed(0)
        model.generator.manual_seed(0)
        if parallel:
            compat.parallelize(model)
        with torch.no_grad():
            for _ in range(2):
                model(rows(ROWS, 4))
        return model.drawn

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert drawn(True) == drawn(False)


# Weights that are moved ---------------------------------------------------------------------------


class Momentum(torch.nn.Module):
    """A momentum encoder, as in MoCo, BYOL and DINO: ``key`` follows ``query``."""

    def __init__(self, move, first=0):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        self.key.requires_grad_(False)
        self.move, self.first, self.steps = move, first, 0

    def forward(self, x):
        self.steps += 1
        if self.steps > self.first:
            with torch.no_grad():
                for a, b in zip(self.query.parameters(), self.key.parameters()):
                    self.move(a, b, x)
        return self.query(x) * self.key(x)


def by_data(a, b, x):
    b.data = b.data * 0.5 + a.data * 0.5


def by_copy(a, b, x):
    b.copy_(b * 0.5 + a * 0.5)


def by_mul(a, b, x):
    b.mul_(0.5).add_(a, alpha=0.5)


def by_lerp(a, b, x):
    b.lerp_(a, 0.5)


def by_batch(a, b, x):
    b.data = b.data * 0.5 + x.mean() * 0.5


def by_batch_in_place(a, b, x):
    b.mul_(0.5).add_(x.mean())


@pytest.mark.filterwarnings("ignore:.* runs unsplit on")
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("move", [by_data, by_copy, by_mul, by_lerp, by_batch, by_batch_in_place])
def test_weights_are_moved_once(move, first, training):
    """By what the batch is, too; then it runs unsplit, for what follows depends on all rows."""
    plain = Momentum(move, first).double().train(training)
    parallel = compat.parallelize(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(each.query.parameters(), 0.1) for each in (plain, parallel)]
    for step in range(4):
        x = rows(ROWS, 4) * (step + 1) / 4
        for model, optimizer in zip((plain, parallel), optimizers):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        for one, other in zip(plain.parameters(), parallel.parameters()):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert replicas(lambda: parallel(x)) == (0 if move is by_batch else 3)


def test_a_trainable_weight_that_a_later_call_moves_is_an_error():
    class Late(Momentum):
        def forward(self, x):
            if self.first:
                with torch.no_grad():
                    self.query.weight.mul_(0.5)
            return self.query(x)

    model = compat.parallelize(Late(None))
    model.first = 0.0
    model(torch.ones(ROWS, 4))
    model.first = 1.0  # a flag, or a whole number, would have been noticed
    with pytest.raises(compat.UnsupportedError) as caught:
        model(torch.ones(ROWS, 4))
    assert str(caught.value) == MOVED_LATE.format("Late")


def test_a_weight_that_is_moved_by_rows_runs_unsplit():
    def move(a, b, x):
        b.copy_(b * 0.5 + x.median())

    plain = Momentum(move).double()
    parallel = compat.parallelize(copy.deepcopy(plain))
    with pytest.warns(compat.CompatWarning, match="median .* needs the whole batch"):
        for model in (plain, parallel):
            for _ in range(2):
                model(rows(ROWS, 4))
    for one, other in zip(plain.parameters(), parallel.parameters()):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_weight_that_is_replaced_runs_unsplit():
    def move(a, b, x):
        pass

    class Replaced(Momentum):
        def forward(self, x):
            result = self.query(x)
            self.query.weight = torch.nn.Parameter(self.query.weight.detach() * 0.5)
            return result

    plain = Replaced(move).double()
    parallel = compat.parallelize(copy.deepcopy(plain))
    with pytest.warns(compat.CompatWarning) as caught:
        for model in (plain, parallel):
            for _ in range(2):
                model(rows(ROWS, 4))
    assert [str(each.message) for each in caught] == [
        "Model 'Replaced' assigns to a trainable weight when it is called, and the devices share "
        "that weight. The model runs unsplit on cpu:0."
    ]
    torch.testing.assert_close(plain.query.weight, parallel.query.weight, rtol=0, atol=0)


# What a script switches between calls -------------------------------------------------------------


class Switched(Net):
    def __init__(self):
        super().__init__()
        self.centred, self.noted, self.gradients, self.epoch = False, None, [], 0
        self.double()

    def forward(self, x):
        hidden = self.first(x).tanh()
        if self.centred or self.epoch > 1:
            hidden = hidden - hidden.flip(0)
        if self.noted == "gradients" and hidden.requires_grad:
            hidden.register_hook(self.gradients.append)
        return self.second(hidden)


def late_backward_hook(model):
    model.first.register_full_backward_hook(
        lambda module, given, found: model.gradients.append(found[0])
    )


def late_tensor_hook(model):
    model.noted = "gradients"


def late_forward_hook(model):
    model.first.register_forward_hook(lambda module, args, found: found - found.flip(0))


def late_number(model):
    model.epoch = 2


def late_flag(model):
    model.centred = True


@pytest.mark.parametrize(
    "switch", [late_backward_hook, late_tensor_hook, late_forward_hook, late_flag, late_number]
)
def test_what_a_script_switches_after_the_first_calls(switch):
    plain, parallel = Switched(), Switched()
    compat.parallelize(parallel)
    messages = []
    for step in range(6):
        if step == 3:
            assert replicas(lambda: parallel(rows(ROWS, 4))) == 3
            switch(plain), switch(parallel)
        for model in (plain, parallel):
            model.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", compat.CompatWarning)
                model(rows(ROWS, 4) + step).square().sum().backward()
            messages += [str(e.message) for e in caught if e.category is compat.CompatWarning]
        same_gradients(plain, parallel)
        same(plain.gradients, parallel.gradients, 1e-12)
    (text,) = messages
    assert "the whole batch" in text and text.endswith("runs unsplit on cpu:0.")


def test_a_hook_that_is_registered_for_each_call_has_it_tried_once():
    model = Switched()
    compat.parallelize(model)
    for _ in range(4):
        handle = model.first.register_forward_hook(lambda module, args, found: found * 2)
        model(rows(ROWS, 4))
        handle.remove()
        model(rows(ROWS, 4))
    assert len(ReplicatedForward.of(model).plans) == 2


class LateBuffer(Net):
    """Registers a buffer of as many rows as its first batch has."""

    def forward(self, x):
        hidden = self.first(x)
        if not hasattr(self, "before"):
            self.register_buffer("before", torch.zeros_like(hidden))
        hidden, self.before = hidden + self.before, hidden.detach()
        return self.second(hidden)


class EmptyBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("before", None)

    def forward(self, x):
        hidden = self.first(x)
        was, self.before = self.before, hidden.detach()
        return self.second(hidden if was is None or was.shape != hidden.shape else hidden + was)


@pytest.mark.parametrize("build", [LateBuffer, EmptyBuffer])
def test_a_buffer_that_a_call_adds_runs_unsplit(build):
    plain, parallel = build().double(), compat.parallelize(build().double())
    with pytest.warns(compat.CompatWarning) as caught:
        for step in range(3):
            same(plain(rows(ROWS, 4) + step), parallel(rows(ROWS, 4) + step), 1e-12)
            same(plain.before, parallel.before, 1e-12)
    assert [str(each.message) for each in caught] == [
        "The operation that sets the state 'before' of {!r} needs the whole batch, but each device "
        "sees only its shard. The model runs unsplit on cpu:0.".format(build.__name__)
    ]
