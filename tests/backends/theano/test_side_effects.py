"""What operations and layers on Theano change, besides what they return, is as on one device."""

import numpy as np
import pytest

import compat
from compat import _keras, _rows
from compat.testing import initialise, span

from ..messages import told
from . import test_contract, test_replicas

keras = test_replicas.keras
profiles_not_printed = test_contract.profiles_not_printed

INPUTS, TARGETS = test_replicas.INPUTS, test_replicas.TARGETS


def as_op(function, backward=None):
    """Return an operation that calls a function of an array."""
    from theano import tensor
    from theano.compile import ops

    kinds = [tensor.matrix().type], [tensor.matrix().type]
    made = ops.as_op(*kinds, infer_shape=lambda node, shapes: shapes)(function)
    made.grad = lambda inputs, upstream: [backward(upstream[0]) if backward else upstream[0]]
    return made


class Kept:
    """What the operations of these tests change."""

    def __init__(self):
        self.seen, self.log = [], {"calls": 0, "rows": 0}
        self.random = np.random.RandomState(3)

    def state(self):
        numbers = [self.random.normal(), np.random.uniform()]
        return [np.round(each, 4).tolist() for each in self.seen], self.log, numbers

    # Functions of an array:

    def observes(self, values):
        self.seen.append(values.copy())
        return values.copy()

    def counts(self, values):
        self.log["calls"] += 1
        self.log["rows"] += len(values)
        return values.copy()

    def draws(self, values):
        return (values + self.random.normal(size=values.shape)).astype("float32")

    def draws_of_numpy(self, values):
        return (values * np.random.uniform(size=values.shape)).astype("float32")


def with_operation(keras, operation):
    """Return a model with an operation between its layers."""
    between = keras.layers.Lambda(operation, output_shape=lambda shape: shape)
    layers = [keras.layers.Dense(4, activation="tanh", input_shape=(4,)), between]
    return keras.models.Sequential(layers + [keras.layers.Dense(2)])


def trained(keras, build, parallel, kept, loss="mse"):
    """Return the results of training, evaluation and prediction, and their side effects."""
    model = initialise(build())
    if parallel:
        compat.parallelize(model)
    model.compile(keras.optimizers.SGD(0.1), loss(model) if callable(loss) else loss)
    np.random.seed(4)
    history = model.fit(INPUTS[:10], TARGETS[:10], 4, 3, shuffle=False, verbose=0).history
    results = [history["loss"], model.evaluate(INPUTS, TARGETS, verbose=0), model.predict(INPUTS)]
    return model, results + model.get_weights(), kept and kept.state()


def check(keras, build, makes_whole=None):
    """Three devices give what one gives; returns the model."""
    one, results, left = trained(keras, *build(False))
    with told() as said:
        model, several, state = trained(keras, *build(True))
    assert left == state
    for value, other in zip(results, several):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)
    if makes_whole is None:
        assert said == []
    else:
        (text,) = said
        sentence = makes_whole(model).sentence(model.name)
        assert text == f"{sentence} {_rows.DOWNSTREAM} runs unsplit on cpu:0."
    return model


def effects(operation, model, line):
    """Return the fallback for side effects of the operation of a model's layer."""
    layer = f"layer {model.layers[1].name!r}"
    return _rows.Fallback(_rows.Reason.SIDE_EFFECTS, operation, layer, line)


NAMES = ["observes", "counts", "draws", "draws_of_numpy"]


@span
@pytest.mark.parametrize("name", NAMES)
def test_operation_that_changes_something(keras, name):
    """It runs once, with the whole batch; a trial leaves nothing."""

    def build(parallel):
        kept = Kept()
        operation = as_op(lambda values: getattr(kept, name)(values))
        return lambda: with_operation(keras, operation), parallel, kept

    line = line_of(with_operation, "between = ")
    check(keras, build, lambda model: effects("FromFunctionOp{<lambda>}", model, line))


def line_of(function, text):
    """As messages name the line of a function that begins with a text."""
    code = function.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.strip().startswith(text))
    return f"test_side_effects.py, line {number + 2}"


def test_operation_that_changes_nothing_runs_on_all_devices(keras):
    """Whatever it may read."""

    def build(parallel):
        kept = Kept()
        operation = as_op(lambda values: (values * (1 + len(kept.seen))).astype("float32"))
        return lambda: with_operation(keras, operation), parallel, kept

    model = check(keras, build)
    (cut,) = _keras.inner_model(model).train_function.plan.cuts
    assert cut.variable is model.output


def test_printed_by_a_function_of_ones_own(keras):
    from theano.printing import Print

    def build(parallel):
        kept = Kept()

        def see(operation, value):
            kept.seen.append(np.array(value))

        return lambda: with_operation(keras, Print("h", global_fn=see)), parallel, kept

    line = line_of(with_operation, "between = ")
    check(keras, build, lambda model: effects(model.layers[1].output.owner.op, model, line))


def test_operation_that_changes_something_from_a_later_step_on(keras):
    """The step in which it begins is done again, and nothing of it is lost or there twice."""

    def build(parallel):
        kept = Kept()
        operation = as_op(lambda values: kept.observes(values) if kept.log["rows"] else values * 1)
        return with_operation(keras, operation), kept

    found = []
    for parallel in (False, True):
        model, kept = build(parallel)
        initialise(model)
        if parallel:
            compat.parallelize(model)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        losses = [model.train_on_batch(INPUTS, TARGETS) for _ in range(2)]
        with told() as said:
            kept.log["rows"] = 1
            losses += [model.train_on_batch(INPUTS, TARGETS) for _ in range(2)]
        found.append([losses] + model.get_weights() + kept.seen)
        assert len(kept.seen) == 2
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    line = line_of(with_operation, "between = ")
    sentence = effects("FromFunctionOp{<lambda>}", model, line).sentence(model.name)
    assert said == [f"{sentence} {_rows.DOWNSTREAM} runs unsplit on cpu:0."]


def momentum_encoder(keras):
    """Two layers, of which one follows the other."""
    K = keras.backend

    class Encoder(keras.layers.Layer):
        def build(self, shape):
            self.quick = self.add_weight("quick", (4, 4), initializer="ones")
            self.slow = self.add_weight("slow", (4, 4), initializer="ones", trainable=False)
            self.rows = self.add_weight("rows", (), initializer="zeros", trainable=False)
            self.mean = self.add_weight("mean", (4,), initializer="zeros", trainable=False)
            self.built = True

        def call(self, inputs):
            rows = K.cast(K.shape(inputs)[0], "float32")
            moved = [
                (self.slow, self.slow * 0.5 + self.quick * 0.5),
                (self.rows, self.rows + rows),
                (self.mean, self.mean * 0.9 + K.mean(inputs, axis=0) * 0.1),
            ]
            self.add_update(moved, inputs)
            target = K.stop_gradient(K.dot(inputs - self.mean, self.slow))
            return K.tanh(K.dot(inputs, self.quick)) - K.tanh(target)

    return keras.models.Sequential([Encoder(input_shape=(4,)), keras.layers.Dense(2)])


def keeping(keras):
    """Return a layer that keeps its results, also those that do not affect the model's output."""
    K = keras.backend

    class Keeping(keras.layers.Dense):
        def call(self, inputs):
            self.last = super(Keeping, self).call(inputs)
            self.aside = K.mean(K.softmax(self.last), axis=0)
            return self.last * 2

    layers = [Keeping(4, input_shape=(4,)), keras.layers.Dense(2)]
    return keras.models.Sequential(layers)


def loss_of_kept(model):
    from keras import backend as K

    layer = model.layers[0]
    return lambda true, predicted: (
        K.mean(K.square(true - predicted), axis=-1)
        + K.mean(K.square(layer.last), axis=-1)
        + K.sum(K.square(layer.aside)) * K.sum(K.square(layer.last))
    )


@span
@pytest.mark.parametrize("build, loss", [(momentum_encoder, "mse"), (keeping, loss_of_kept)])
def test_weights_that_a_call_moves_and_tensors_that_it_keeps(keras, build, loss):
    model = check(keras, lambda parallel: (lambda: build(keras), parallel, None, loss))
    assert _keras.inner_model(model).train_function.plan.cuts
