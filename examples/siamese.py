"""Trains a siamese network on pairs of drawn letters, with the contrastive loss.

Hadsell, Chopra and LeCun, "Dimensionality Reduction by Learning an Invariant Mapping", 2006.
"""

from __future__ import print_function

import numpy as np

import compat

compat.configure_gpu()

from keras.layers import Dense, Input, Lambda
from keras.models import Model, Sequential
from keras.optimizers import RMSprop

try:
    from keras import ops as K  # Keras 3
except ImportError:
    from keras import backend as K
try:
    from keras.utils import set_random_seed  # from Keras 2.7 on
except ImportError:
    from numpy.random import seed as set_random_seed

EPOCHS = 5
BATCH_SIZE = 64
MARGIN = 1.0
set_random_seed(1337)  # for reproducibility

LETTERS = """
 ###   ####    ###   ####   #####
#   #  #   #  #   #  #   #  #
#   #  #   #  #      #   #  #
#####  ####   #      #   #  ####
#   #  #   #  #      #   #  #
#   #  #   #  #   #  #   #  #
#   #  ####    ###   ####   #####
"""


def load_letters():
    """Return the drawing above, as five images of 7 by 5 pixels."""
    lines = [line.ljust(33) for line in LETTERS.strip("\n").split("\n")]
    pixels = np.array([[pixel == "#" for pixel in line] for line in lines], "float32")
    return np.array([pixels[:, start : start + 5] for start in range(0, 33, 7)])


def create_pairs(count):
    """Two handwritings of one letter (label 1) or of different ones (label 0)."""
    letters = load_letters().reshape(5, 35)
    labels = np.random.randint(2, size=count)
    left = np.random.randint(5, size=count)
    right = np.where(labels, left, (left + np.random.randint(1, 5, size=count)) % 5)
    noise = np.random.normal(0.0, 0.3, size=(2, count, 35))
    pairs = (np.array([letters[left], letters[right]]) + noise).astype("float32")
    return [pairs[0], pairs[1]], labels.astype("float32").reshape(-1, 1)


def euclidean_distance(vectors):
    x, y = vectors
    return K.sqrt(K.maximum(K.sum(K.square(x - y), axis=1, keepdims=True), 1e-4))


def contrastive_loss(y_true, y_pred):
    return K.mean(
        y_true * K.square(y_pred) + (1.0 - y_true) * K.square(K.maximum(MARGIN - y_pred, 0.0))
    )


def compute_accuracy(y_true, distances):
    return np.mean((distances < MARGIN / 2) == (y_true > 0.5))


pairs_train, y_train = create_pairs(768)
pairs_test, y_test = create_pairs(192)

base_network = Sequential()  # shared: both inputs pass the same weights
base_network.add(Dense(32, activation="relu", input_shape=(35,)))
base_network.add(Dense(16, activation="tanh"))
input_a, input_b = Input(shape=(35,)), Input(shape=(35,))
distance = Lambda(euclidean_distance, output_shape=lambda shapes: (shapes[0][0], 1))(
    [base_network(input_a), base_network(input_b)]
)
model = Model([input_a, input_b], distance)
model = compat.parallelize(model)
model.compile(loss=contrastive_loss, optimizer=RMSprop(0.002))

before = model.evaluate(pairs_test, y_test, batch_size=BATCH_SIZE, verbose=0)
model.fit(
    pairs_train,
    y_train,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    verbose=2,
    validation_data=(pairs_test, y_test),
)
loss = model.evaluate(pairs_test, y_test, batch_size=BATCH_SIZE, verbose=0)

accuracy = compute_accuracy(y_test, model.predict(pairs_test, batch_size=BATCH_SIZE))
print("test accuracy: {:.2f}".format(accuracy))
print("{}: {:.4f} before".format("learned" if loss < 0.5 * before else "NOT learned", before))
print("final loss: {:.6f}".format(loss))
