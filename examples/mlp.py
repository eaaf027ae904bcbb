"""Trains a dense network on drawn digits: what mnist_mlp.py is among Keras' own examples."""

from __future__ import print_function

import argparse

import numpy as np

import compat

compat.configure_gpu()

from keras.layers import Dense
from keras.models import Sequential
from keras.optimizers import SGD
from keras.regularizers import l2

try:
    from keras.utils import set_random_seed  # from Keras 2.7 on
except ImportError:
    from numpy.random import seed as set_random_seed

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=61)
args = parser.parse_args()
set_random_seed(1337)  # for reproducibility

# Which of the seven segments of a pocket calculator each digit lights, and where they are drawn.
LIT = ["abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg"]
SEGMENTS = {
    "a": (slice(0, 1), slice(1, 5)),
    "b": (slice(1, 5), slice(5, 6)),
    "c": (slice(6, 10), slice(5, 6)),
    "d": (slice(10, 11), slice(1, 5)),
    "e": (slice(6, 10), slice(0, 1)),
    "f": (slice(1, 5), slice(0, 1)),
    "g": (slice(5, 6), slice(1, 5)),
}


def load_data(samples):
    """Noisy images, 13 by 8 pixels, of a digit somewhere in them; labels are one-hot."""
    images = np.random.normal(0.0, 0.3, size=(samples, 13, 8))
    labels = np.random.randint(10, size=samples)
    for image, label in zip(images, labels):
        top, left = np.random.randint(3, size=2)
        for segment in LIT[label]:
            image[top : top + 11, left : left + 6][SEGMENTS[segment]] += 1.0
    return images.reshape(samples, 13 * 8).astype("float32"), np.eye(10)[labels]


x_train, y_train = load_data(1000)
x_test, y_test = load_data(200)

model = Sequential()
model.add(Dense(64, activation="relu", kernel_regularizer=l2(1e-4), input_shape=(13 * 8,)))
model.add(Dense(32, activation="relu"))
model.add(Dense(10, activation="softmax"))
model = compat.parallelize(model)
model.compile(SGD(0.05, momentum=0.9), "categorical_crossentropy", metrics=["accuracy"])

before, _ = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0)
model.fit(
    x_train,
    y_train,
    batch_size=args.batch_size,
    epochs=args.epochs,
    verbose=2,
    validation_data=(x_test, y_test),
)
loss, accuracy = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0)

print("test accuracy: {:.2f}".format(accuracy))
print("{}: {:.4f} before".format("learned" if loss < 0.5 * before else "NOT learned", before))
print("final loss: {:.6f}".format(loss))
