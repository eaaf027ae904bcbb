"""The models that the benchmarks train, in the words that every Keras knows, and their data."""

import os

import numpy as np


def size(measured):
    """How many rows or units are measured with so many: fewer in tests of the scripts."""
    return min(measured, int(os.environ.get("BENCHMARKS_LARGEST", measured)))


#: name -> shape of a row, rows of a batch of one device.
WORKS = {
    "dense": ((size(2000),), size(512)),
    "dense-128": ((size(2000),), size(128)),
    "deep": ((128,), size(512)),
    "conv": ((32, 32, 3), size(64)),
    "lstm": ((20, 32), size(128)),
    "small": ((32,), size(16)),
}


def build(keras, work):
    """Return a ``Sequential`` of this Keras, not compiled, with the same weights each time."""
    layers, shape = keras.layers, {"input_shape": WORKS[work][0]}

    def dense(units, **more):
        return layers.Dense(size(units), activation="relu", **more)

    if work in ("dense", "dense-128"):
        parts = [dense(2000, **shape), dense(2000), dense(1000), dense(500)]
    elif work == "deep":
        parts = [dense(128, **shape)] + [dense(128) for _ in range(99)]
    elif work == "small":
        parts = [dense(64, **shape), dense(64), dense(64)]
    elif work == "conv":
        parts = [
            layers.Conv2D(size(32), (3, 3), activation="relu", **shape),
            layers.Conv2D(size(32), (3, 3), activation="relu"),
            layers.MaxPooling2D((2, 2)),
            layers.Conv2D(size(64), (3, 3), activation="relu"),
            layers.Flatten(),
            dense(128),
        ]
    else:
        parts = [layers.LSTM(size(128), **shape)]
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
