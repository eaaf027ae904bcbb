"""Models that compute across the rows of a batch, for the backends that cut Keras' graph in two."""

import functools
import sys
import warnings

import numpy as np

import compat
from compat import _keras
from compat._configuration import registry
from compat.testing import CASES, initialise, largest_difference, optimizer

from . import verification_cases

ROWS = (13, 11, 2, 1)


def across_rows(K):
    """Functions of a layer's output that give one row something of the others."""
    return {
        "mean": lambda x: x - K.mean(x, axis=0, keepdims=True),
        "softmax": lambda x: K.softmax(x, axis=0),
    }


def model_of(keras, function):
    layers = keras.layers
    return keras.models.Sequential(
        [layers.Dense(5, input_shape=(8,)), layers.Lambda(function), layers.Dense(4)]
    )


def totals(keras, kind):
    """Return a model with a layer whose state grows with each batch, and is in its outputs."""
    K = keras.backend

    class Total(keras.layers.Layer):
        def build(self, shape):
            self.state = self.add_weight(
                name="state", shape=(shape[1],), initializer="zeros", trainable=False
            )
            super(Total, self).build(shape)

        def call(self, x):
            new = self.state + (1.0 if kind == "steps" else K.sum(x, axis=0))
            self.add_update([(self.state, new)], x)
            return x + 0.01 * new

    layers = keras.layers
    return keras.models.Sequential(
        [layers.Dense(5, input_shape=(8,)), Total(name="total"), layers.Dense(4)]
    )


def with_added_loss(keras):
    K = keras.backend

    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.01 * K.sum(K.square(x)), x)
            return 1.0 * x

    layers = keras.layers
    return keras.models.Sequential([layers.Dense(5, input_shape=(8,)), Penalty(), layers.Dense(4)])


def results(keras, build, parallel, loss="mse", rows=ROWS):
    """Losses and predictions of some steps, then all weights; and the warnings of compat."""
    random = np.random.RandomState(1)
    inputs, targets = random.normal(size=(13, 8)), random.normal(size=(13, 4))
    model = initialise(build())
    if parallel:
        compat.parallelize(model)
    model.compile(optimizer(keras, "sgd"), loss)
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", compat.CompatWarning)
        for count in rows:
            found.append(np.array(model.train_on_batch(inputs[:count], targets[:count])))
            found.append(np.array(model.test_on_batch(inputs[:count], targets[:count])))
            found.append(model.predict_on_batch(inputs[:count]))
    texts = [str(w.message) for w in caught if issubclass(w.category, compat.CompatWarning)]
    return found + model.get_weights(), texts


def one_devices_numbers(keras, build, tolerance=1e-5, **options):
    """Train plain and on three devices, compare, and return the warnings of the latter."""
    plain, _ = results(keras, build, False, **options)
    parallel, texts = results(keras, build, True, **options)
    difference = largest_difference(plain, parallel)
    assert difference < tolerance, difference
    return texts


class _Calling:
    def __init__(self, made):
        self.made = made

    def __call__(self, values):
        return self.made(values)


#: What a script puts in the place of the function that Keras makes of a training step.
OWN_FUNCTIONS = {
    "function": lambda made: lambda values: made(values),
    "partial": lambda made: functools.partial(made),
    "object": _Calling,
}


def check_training_function_of_ones_own(keras, backend, kind):
    """As adversarial training has one, which calls Keras'."""
    losses = []
    for parallel in (False, True):
        model = initialise(
            keras.models.Sequential(
                [keras.layers.Dense(4, input_shape=(3,)), keras.layers.Dense(2)]
            )
        )
        if parallel:
            compat.parallelize(model)
        model.compile("sgd", "mse")
        if parallel:
            verification_cases.verified(registry.find(backend), model, 1)
        inner = _keras.inner_model(model)
        inner._make_train_function()
        inner.train_function = OWN_FUNCTIONS[kind](inner.train_function)
        inputs, targets = np.ones((13, 3)) * np.arange(13)[:, None] / 13, np.ones((13, 2))
        losses.append([model.train_on_batch(inputs, targets) for _ in range(3)])
        assert np.isfinite(model.predict_on_batch(inputs)).all()
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def small(keras, *hidden):
    """Return a parallel model with these layers in its middle."""
    layers = [keras.layers.Dense(6, activation="tanh", input_shape=(8,))]
    layers += list(hidden) + [keras.layers.Dense(4)]
    return compat.parallelize(initialise(keras.models.Sequential(layers)))


def accumulating(keras):
    """Return an SGD of two batches at a time, whose sums are not among its weights."""
    K = keras.backend

    class Accumulating(keras.optimizers.SGD):
        def get_updates(self, loss, params):
            gradients = self.get_gradients(loss, params)
            sums = [K.zeros(K.int_shape(p)) for p in params]
            self.updates = [K.update_add(self.iterations, 1)]
            is_second = K.cast(K.equal(self.iterations % 2, 1), "float32")
            for p, g, total in zip(params, gradients, sums):
                both = total + g  # once: nothing orders a second read and the update
                self.updates.append(K.update(p, p - 0.1 * is_second * both))
                self.updates.append(K.update(total, (1 - is_second) * both))
            return self.updates

    return Accumulating()


def check_state_that_an_optimizer_does_not_list(keras, backend, make):
    """Training is the same to the bit, verified or not."""
    inputs, targets = CASES["dense"].data(40)
    trained, kept = [], []
    for steps in (0, 3):
        model = small(keras)
        own = make(keras)
        model.compile(own, "mse")
        if steps:
            record = verification_cases.verified(backend, model, steps)
        model.fit(inputs, targets, batch_size=8, epochs=1, shuffle=False, verbose=0)
        trained.append(model.get_weights())
        kept.append(len(getattr(own, "optimizer", own).weights))
    assert record.steps["train"] == 3
    assert largest_difference(*trained) == 0
    assert kept[0] == kept[1], "its variables are those of the model's own function"


def check_prediction_in_the_learning_phase_of_training(keras, backend):
    """Check that it raises no alarm.

    Returns:
        The warnings that a prediction could not be verified.
    """
    inputs, targets = CASES["dense"].data(20)
    module = sys.modules[keras.backend.set_learning_phase.__module__]
    phase = getattr(module, "_LEARNING_PHASE", None)
    keras.backend.set_learning_phase(1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", compat.CompatWarning)
            for layer in (keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)):
                model = small(keras, layer)
                model.compile("sgd", "mse")
                record = verification_cases.verified(backend, model)
                model.predict(inputs)
                model.train_on_batch(inputs, targets)
                assert record.seen("predict") == record.seen("train") == 1
                assert record.steps["train"] == 0
    finally:
        getattr(keras.backend, "clear_session", int)()
        if phase is not None:  # nothing public gives it back
            module._LEARNING_PHASE = phase
    told = [str(each.message) for each in caught]
    return [text for text in told if text.startswith("compat could not verify a prediction")]
