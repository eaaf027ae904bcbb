"""Models that compute across the rows of a batch, for the backends that cut Keras' graph in two."""

import functools
import warnings

import numpy as np

import compat
from compat import _keras
from compat._configuration import registry
from compat.testing import initialise, largest_difference, optimizer

from . import verification_cases

ROWS = (13, 11, 2, 1)


def across_rows(K):
    """Functions of a layer's output that give one row something of the others."""

    def transposed(x):
        return K.permute_dimensions(x, (1, 0))

    return {
        "mean": lambda x: x - K.mean(x, axis=0, keepdims=True),
        "sum of all": lambda x: x + 0.01 * K.sum(x),
        "softmax": lambda x: K.softmax(x, axis=0),
        "softmax of the transposed": lambda x: transposed(K.softmax(transposed(x))),
        "reversed": lambda x: K.reverse(x, 0),
    }


def model_of(keras, function):
    layers = keras.layers
    return keras.models.Sequential(
        [layers.Dense(5, input_shape=(8,)), layers.Lambda(function), layers.Dense(4)]
    )


def totals(keras, kind):
    """A model with a layer whose state grows with each batch, and whose outputs depend on that."""
    K = keras.backend

    class Total(keras.layers.Layer):
        def build(self, shape):
            self.state = self.add_weight(
                name="state", shape=(shape[1],), initializer="zeros", trainable=False
            )
            super(Total, self).build(shape)

        def call(self, x):
            new = {
                "steps": lambda: self.state + 1.0,
                "sum": lambda: self.state + K.sum(x, axis=0),
                "rows": lambda: self.state + K.sum(0.0 * x + 1.0, axis=0),
                "maximum": lambda: 0.5 * self.state + K.max(x, axis=0),
                "mean": lambda: 0.5 * self.state + 0.5 * K.mean(x, axis=0),
            }[kind]()
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


def check_training_function_of_ones_own(keras, backend, kind, verify):
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
        if parallel and verify:
            verification_cases.verified(registry.find(backend), model, verify)
        inner = _keras.inner_model(model)
        inner._make_train_function()
        inner.train_function = OWN_FUNCTIONS[kind](inner.train_function)
        inputs, targets = np.ones((13, 3)) * np.arange(13)[:, None] / 13, np.ones((13, 2))
        losses.append([model.train_on_batch(inputs, targets) for _ in range(3)])
        assert np.isfinite(model.predict_on_batch(inputs)).all()
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
