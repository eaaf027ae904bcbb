"""The models that contracts train, and their data."""

import collections
import functools
import importlib
import os

import numpy as np

DEVICES = 3

# (global batch, samples): uneven, a last partial batch of 13, fewer rows than devices, one.
# Two steps or three, so that an optimizer's state counts.
BATCHES = [(61, 122), (16, 45), (2, 6), (1, 3)]
UNEVEN = BATCHES[:1]

# Rows of a batch, and how many of them each of the three devices computes: at least one.
SHARDS = {61: [20, 20, 21], 14: [4, 5, 5], 2: [1, 1, 1]}


def keras_under_test():
    """Return the Keras that ``COMPAT_TEST_KERAS`` names. If it is missing, that is an error."""
    if not hasattr(np, "Inf"):  # numpy 2 has none, which callbacks of Keras before 3.6 read
        np.Inf = np.inf
    name = os.environ.get("COMPAT_TEST_KERAS", "keras")
    if name.startswith("tensorflow."):  # attributes; not all of them can be imported
        return functools.reduce(getattr, name.split(".")[1:], importlib.import_module("tensorflow"))
    return importlib.import_module(name)


class Case(collections.namedtuple("Case", "name build loss data")):
    """A model to build, and data to train it on.

    Attributes:
        name: that of the case.
        build: a function of a Keras that returns a model, not compiled.
        loss: the loss for ``compile()``.
        data: a function of a number of rows that returns inputs and targets.
    """


def _dense(keras):
    layers = keras.layers
    options = {"input_shape": (8,), "kernel_regularizer": "l2", "name": "hidden"}
    hidden = layers.Dense(16, activation="relu", **options)
    classes = layers.Dense(4, activation="softmax", name="classes")
    return keras.models.Sequential([hidden, classes], name="dense_model")


def _dense_data(rows):
    random = np.random.RandomState(rows)
    inputs = random.normal(size=(rows, 8)).astype("float32")
    return inputs, np.eye(4, dtype="float32")[random.randint(4, size=rows)]


def _convolutional(keras):
    layers = keras.layers
    image = layers.Input(shape=(8, 8, 2), name="image")
    x = layers.Conv2D(4, 3, activation="relu", padding="same", name="conv")(image)
    x = layers.MaxPooling2D(2)(x)
    x = layers.Flatten()(x)
    return keras.models.Model(image, layers.Dense(3, activation="softmax", name="classes")(x))


def _convolutional_data(rows):
    random = np.random.RandomState(rows)
    images = random.normal(size=(rows, 8, 8, 2)).astype("float32")
    return images, random.randint(3, size=(rows, 1)).astype("float32")


def _multi(keras):
    """Return a model of two inputs, a layer that both share, a nested model, and two outputs."""
    layers = keras.layers
    left, right = (layers.Input(shape=(5,), name=name) for name in ("left", "right"))
    rows = layers.Input(shape=(6,))
    inner = keras.models.Model(rows, layers.Dense(6, activation="tanh")(rows), name="inner")
    shared = layers.Dense(6, activation="tanh", name="shared")
    joined = layers.concatenate([inner(shared(left)), shared(right)])
    score = layers.Dense(1, name="score")(joined)
    # Keras 3.5 and 3.6 take losses in the order of their names.
    similar = layers.Dense(1, activation="sigmoid", name="similar")(joined)
    return keras.models.Model([left, right], [score, similar])


def _multi_data(rows):
    random = np.random.RandomState(rows)
    left, right = random.normal(size=(2, rows, 5)).astype("float32")
    score = (left * right).sum(axis=1, keepdims=True)
    return [left, right], [score, (score > 0).astype("float32")]


def _words(kind, units, keras, **options):
    """Return a model of an embedding, whose gradient may be sparse, and a layer of a kind."""
    layers = keras.layers
    words = layers.Input(shape=(6,), name="words")
    x = layers.Embedding(20, 5, name="embedding")(words)
    x = getattr(layers, kind)(*units, name="memory", **options)(x)
    return keras.models.Model(words, layers.Dense(1, activation="sigmoid", name="mood")(x))


def _words_data(rows):
    random = np.random.RandomState(rows)
    words = random.randint(1, 20, size=(rows, 6)).astype("float32")
    return words, (words.sum(axis=1, keepdims=True) > 60).astype("float32")


_CASES = [
    Case("dense", _dense, "categorical_crossentropy", _dense_data),
    Case("conv", _convolutional, "sparse_categorical_crossentropy", _convolutional_data),
    Case("multi", _multi, {"score": "mse", "similar": "binary_crossentropy"}, _multi_data),
] + [
    Case(name, functools.partial(_words, kind, units), "binary_crossentropy", _words_data)
    for name, kind, units in (
        ("words", "Flatten", []), ("lstm", "LSTM", [7]), ("simplernn", "SimpleRNN", [7]),
    )
]  # fmt: skip
CASES = {case.name: case for case in _CASES}


def initialise(model, seed=0):
    """Set all weights from numpy's generator, the same on every Keras."""
    random = np.random.RandomState(seed)
    weights = [random.normal(size=weight.shape) * 0.3 for weight in model.get_weights()]
    model.set_weights([weight.astype("float32") for weight in weights])
    return model


def optimizer(keras, name):
    """Return SGD with momentum, or Adam, whatever this Keras calls the learning rate."""
    kind, rate, options = {
        "sgd": (keras.optimizers.SGD, 0.05, {"momentum": 0.9}),
        "adam": (keras.optimizers.Adam, 0.01, {}),
    }[name]
    try:
        return kind(learning_rate=rate, **options)
    except TypeError:  # Keras before 2.3
        return kind(lr=rate, **options)


def clear_session(keras):
    """Clear the models that Keras keeps; in Keras 3 without its garbage collection."""
    if hasattr(keras, "ops"):
        try:
            keras.backend.clear_session(free_memory=False)
        except TypeError:  # Keras before 3.3 collects none
            keras.backend.clear_session()
    elif hasattr(keras.backend, "clear_session"):  # Theano has none
        keras.backend.clear_session()


def new_graph():
    """Drop the models built so far: more of them make building one slower in Keras 2."""
    if not hasattr(keras_under_test(), "ops"):  # Keras 3 has no graph to drop
        clear_session(keras_under_test())


def fit_in_order(model, inputs, targets, batch_size=16, epochs=1, **options):
    """Train on the batches in their order, print nothing, and return ``model.fit()``'s result."""
    options.update(batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return model.fit(inputs, targets, **options)


# A script without compat, which is run as it is: on devices, and on ranks.
# Its last batches are uneven on two ranks, and on three.
UNCHANGED = """\
import importlib, os, sys
import numpy as np
keras = importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "keras"))
layers = keras.layers
model = keras.models.Sequential(
    [layers.Dense(8, activation="tanh", input_shape=(6,)), layers.Dense(4)]
)
random = np.random.RandomState(3)
model.set_weights([random.uniform(-0.5, 0.5, w.shape) for w in model.get_weights()])
model.compile("sgd", "mse")
x, y = random.normal(size=(135, 6)), random.normal(size=(135, 4))
history = model.fit(
    x, y, batch_size=62, epochs=2, shuffle=False, verbose=0, validation_split=0.25
).history


class Items(getattr(keras.utils, "PyDataset", None) or keras.utils.Sequence):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(62 * index, 62 * index + 62)
        return x[rows], y[rows]

    def on_epoch_end(self):
        pass


fit = model.fit_generator if hasattr(model, "fit_generator") else model.fit
batches = (Items()[step % 3] for step in range(100))
history["of_items"] = fit(Items(), shuffle=False, epochs=2, verbose=0).history["loss"]
history["of_batches"] = fit(batches, steps_per_epoch=3, epochs=2, verbose=0).history["loss"]
numbers = [float(value) for name in sorted(history) for value in history[name]]
print("HISTORY", *map(repr, numbers))
"""
