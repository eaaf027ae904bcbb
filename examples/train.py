"""A Keras training script with two lines of compat in it.

    python examples/train.py                  # on 3 CPU devices that stand in for GPUs
    python examples/train.py --simulate 0     # on the GPUs of this machine, or its CPU

It trains the same model once on all devices and once on one, and compares.
"""

import argparse
import time

import numpy as np

import compat

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--simulate", type=int, default=3, help="CPU devices to use as GPUs")
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()

# The first line of compat: before TensorFlow is imported.
configuration = compat.configure_gpu(simulate=arguments.simulate or None)
print(configuration)

from tensorflow import keras  # noqa: E402

SAMPLES, BATCH = 2000, 61  # a batch that three devices cannot share evenly


def data():
    """Noisy drawings of ten shapes, 12 by 12 pixels."""
    random = np.random.RandomState(0)
    shapes = random.uniform(size=(10, 12, 12, 1)) > 0.5
    labels = random.randint(10, size=SAMPLES)
    images = shapes[labels] + random.normal(scale=0.8, size=(SAMPLES, 12, 12, 1))
    return images.astype("float32"), labels


def build():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(16, 3, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="tanh"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def train(gpus, start=None):
    """Train on that many devices (None: all); returns the model and the weights it began with."""
    model = build()
    if start is not None:
        model.set_weights(start)
    start = model.get_weights()
    # The second line of compat: the same model object, now on all of these devices.
    model = compat.parallelize(model, gpus)
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    began = time.time()
    model.fit(*data(), batch_size=BATCH, epochs=arguments.epochs, shuffle=False, verbose=2)
    print("trained in {:.1f} s".format(time.time() - began))
    return model, start


print("\nOn {}:".format(", ".join(configuration.devices)))
model, start = train(gpus=None)
print("\nOn one device, from the same weights:")
plain, _ = train(gpus=1, start=start)

difference = max(
    np.abs(ours - theirs).max() for ours, theirs in zip(model.get_weights(), plain.get_weights())
)
losses = [each.evaluate(*data(), batch_size=BATCH, verbose=0)[0] for each in (model, plain)]
print("\n                      {:>12} {:>12}".format("all devices", "one device"))
print("loss after training   {:12.8f} {:12.8f}".format(*losses))
print("largest difference between their weights: {:.1e}".format(difference))
if difference > 1e-5:
    raise SystemExit("the two differ: more than rounding")
