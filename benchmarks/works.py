"""The models that the benchmarks train, in the words that every Keras knows, and their data."""

import os

import numpy as np


def rows(measured):
    """How many rows a batch has that is measured with so many: fewer in tests of the scripts."""
    return min(measured, int(os.environ.get("BENCHMARKS_ROWS", measured)))


#: name -> shape of a row, rows of a batch of one device.
WORKS = {
    "dense": ((2000,), rows(512)),
    "dense-128": ((2000,), rows(128)),
    "deep": ((128,), rows(512)),
    "conv": ((32, 32, 3), rows(64)),
    "lstm": ((20, 32), rows(128)),
    "small": ((32,), rows(16)),
}


def build(keras, work):
    """A ``Sequential`` of this Keras, not compiled, with the same weights each time."""
    layers, shape = keras.layers, {"input_shape": WORKS[work][0]}

    def dense(units, **more):
        return layers.Dense(units, activation="relu", **more)

    if work in ("dense", "dense-128"):
        parts = [dense(2000, **shape), dense(2000), dense(1000), dense(500)]
    elif work == "deep":
        parts = [dense(128, **shape)] + [dense(128) for _ in range(99)]
    elif work == "small":
        parts = [dense(64, **shape), dense(64), dense(64)]
    elif work == "conv":
        parts = [
            layers.Conv2D(32, (3, 3), activation="relu", **shape),
            layers.Conv2D(32, (3, 3), activation="relu"),
            layers.MaxPooling2D((2, 2)),
            layers.Conv2D(64, (3, 3), activation="relu"),
            layers.Flatten(),
            dense(128),
        ]
    else:
        parts = [layers.LSTM(128, **shape)]
    model = keras.models.Sequential(parts + [layers.Dense(1)])
    random = np.random.RandomState(0)
    model.set_weights(
        [
            (random.normal(size=w.shape) * (2.0 / (w.shape[0] if w.ndim > 1 else 1e9)) ** 0.5)
            for w in model.get_weights()
        ]
    )
    return model


def data(work, rows):
    """Random rows, and a target for each."""
    random = np.random.RandomState(1)
    inputs = random.normal(size=(rows,) + WORKS[work][0]).astype("float32")
    return inputs, random.normal(size=(rows, 1)).astype("float32")
