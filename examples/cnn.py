"""Trains a small convolutional network on drawn shapes, with data augmentation."""

from __future__ import print_function

import argparse

import numpy as np

import compat

compat.configure_gpu()

from keras import backend as K
from keras.layers import Conv2D, Dense, Flatten, Input, MaxPooling2D
from keras.models import Model
from keras.optimizers import Adam

try:
    import scipy  # noqa: F401  # ImageDataGenerator fails without it when it is used
    from keras.preprocessing.image import ImageDataGenerator
except ImportError:
    ImageDataGenerator = None  # Keras 3 has none
try:
    from keras.utils import set_random_seed  # from Keras 2.7 on
except ImportError:
    from numpy.random import seed as set_random_seed

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()
set_random_seed(1337)  # for reproducibility

SIZE = 16
CLASSES = ["disc", "square", "cross"]


def load_data(samples):
    """Noisy images of one shape each, of any size and anywhere; labels are one-hot."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    images = np.random.normal(0.0, 0.2, size=(samples, SIZE, SIZE, 1))
    labels = np.random.randint(len(CLASSES), size=samples)
    for image, label in zip(images, labels):
        radius = np.random.randint(3, 6)
        y, x = np.random.randint(radius, SIZE - radius, size=2)
        down, right = np.abs(rows - y), np.abs(columns - x)
        shape = [
            down**2 + right**2 <= radius**2,
            np.maximum(down, right) < radius,
            (np.minimum(down, right) == 0) & (np.maximum(down, right) <= radius),
        ][label]
        image[shape] += 1.0
    if K.image_data_format() == "channels_first":
        images = images.transpose(0, 3, 1, 2)
    return images.astype("float32"), np.eye(len(CLASSES))[labels]


def flipped(x, y, batch_size):
    """Flip images, as ImageDataGenerator(horizontal_flip=True) does."""
    axis = 3 if K.image_data_format() == "channels_first" else 2
    while True:
        order = np.random.permutation(len(x))
        for start in range(0, len(x), batch_size):
            rows = order[start : start + batch_size]
            flip = np.random.uniform(size=(len(rows), 1, 1, 1)) < 0.5
            yield np.where(flip, np.flip(x[rows], axis), x[rows]), y[rows]


x_train, y_train = load_data(512)
x_test, y_test = load_data(96)

images = Input(shape=x_train.shape[1:])
x = Conv2D(8, (3, 3), activation="relu")(images)
x = MaxPooling2D((2, 2))(x)
x = Conv2D(16, (3, 3), activation="relu")(x)
x = MaxPooling2D((2, 2))(x)
x = Dense(32, activation="relu")(Flatten()(x))
model = Model(images, Dense(len(CLASSES), activation="softmax")(x))
model = compat.parallelize(model)
model.compile(optimizer=Adam(0.003), loss="categorical_crossentropy", metrics=["accuracy"])
model.summary()

if ImageDataGenerator is not None:
    augmentation = ImageDataGenerator(horizontal_flip=True, vertical_flip=True)
    flow = augmentation.flow(x_train, y_train, batch_size=args.batch_size, seed=1337)
    # Keras draws from several threads, in any order, unless it is given a plain generator.
    batches = (batch for batch in flow)
else:
    batches = flipped(x_train, y_train, args.batch_size)
# Keras 3 has no fit_generator: its fit takes generators.
fit_generator = getattr(model, "fit_generator", model.fit)

before, _ = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0)
fit_generator(
    batches,
    steps_per_epoch=-(-len(x_train) // args.batch_size),
    epochs=args.epochs,
    verbose=2,
    validation_data=(x_test, y_test),
)
loss, accuracy = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0)

print("test accuracy: {:.2f}".format(accuracy))
print("{}: {:.4f} before".format("learned" if loss < 0.6 * before else "NOT learned", before))
print("final loss: {:.6f}".format(loss))
