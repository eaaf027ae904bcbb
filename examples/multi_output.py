"""Trains one network to tell what a drawing shows and where: two outputs, two losses."""

from __future__ import print_function

import numpy as np

import compat

compat.configure_gpu()

from keras.layers import Dense, Input, concatenate
from keras.models import Model
from keras.optimizers import Adam

try:
    from keras.utils import set_random_seed  # from Keras 2.7 on
except ImportError:
    from numpy.random import seed as set_random_seed

SIZE = 12
EPOCHS = 5
BATCH_SIZE = 40
set_random_seed(1337)  # for reproducibility


def load_data(samples):
    """Images of a horizontal, a vertical or two crossing bars, and where their middle is."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    images = np.random.normal(0.0, 0.2, size=(samples, SIZE, SIZE))
    kinds = np.random.randint(3, size=samples)
    middles = np.random.randint(2, SIZE - 2, size=(samples, 2))
    for image, kind, (y, x) in zip(images, kinds, middles):
        horizontal = (rows == y) & (np.abs(columns - x) <= 3)
        vertical = (columns == x) & (np.abs(rows - y) <= 3)
        image[[horizontal, vertical, horizontal | vertical][kind]] += 1.0
    x = images.reshape(samples, SIZE * SIZE).astype("float32")
    return x, {"kind": np.eye(3)[kinds], "place": middles / float(SIZE)}


x_train, y_train = load_data(800)
x_test, y_test = load_data(120)

image = Input(shape=(SIZE * SIZE,), name="image")
h = Dense(64, activation="relu")(image)
kind = Dense(3, activation="softmax", name="kind")(Dense(32, activation="tanh")(h))
# Where a bar is depends on which one it is.
place = Dense(2, activation="sigmoid", name="place")(concatenate([h, kind]))
model = Model(inputs=image, outputs=[kind, place])
model = compat.parallelize(model)
model.compile(
    optimizer=Adam(0.003),
    loss={"kind": "categorical_crossentropy", "place": "mse"},
    loss_weights={"kind": 1.0, "place": 5.0},
    metrics={"kind": "accuracy"},
)

before = model.evaluate(x_test, y_test, batch_size=BATCH_SIZE, verbose=0)[0]
history = model.fit(
    x_train,
    y_train,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    verbose=2,
    validation_split=0.1,
)
loss = model.evaluate(x_test, y_test, batch_size=BATCH_SIZE, verbose=0)[0]

print("loss of the place: {:.4f}".format(history.history["place_loss"][-1]))
print("{}: {:.4f} before".format("learned" if loss < 0.5 * before else "NOT learned", before))
print("final loss: {:.6f}".format(loss))
