"""A Keras training script with two lines of compat in it, on whatever backend is installed.

    python examples/train.py                  # on 3 CPU devices that stand in for GPUs
    python examples/train.py --simulate 0     # on the GPUs of this machine, or its CPU

It trains the same model once on all devices and once on one, compares, and says whether all is
well; its exit status is 0 if it is.
"""

import argparse
import os
import sys
import time

import numpy as np

import compat
from compat import _verification  # for the last lines alone: see devices_that_worked()
from compat._configuration import detection  # for the last lines alone: see devices_that_worked()

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--simulate", type=int, default=3, help="CPU devices to use as GPUs")
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()
os.environ.update(detection.choose()[0].recording)
_verification.record_operations()

# The first line of compat: before Keras and its backend are imported.
configuration = compat.configure_gpu(simulate=arguments.simulate or None, verify=1)
print(configuration)

try:
    import keras
except ImportError:
    from tensorflow import keras

SAMPLES, BATCH = 2000, 61  # a batch that three devices cannot share evenly


def data():
    """Noisy drawings of ten shapes, 12 by 12 pixels, and which of the ten each is."""
    random = np.random.RandomState(0)
    shapes = random.uniform(size=(10, 144)) > 0.5
    labels = random.randint(10, size=SAMPLES)
    images = shapes[labels] + random.normal(scale=0.8, size=(SAMPLES, 144))
    return images.astype("float32"), np.eye(10, dtype="float32")[labels]


def build():
    layers = keras.layers
    image = layers.Input((144,))
    hidden = layers.Dense(64, activation="tanh")(image)
    hidden = layers.Dense(64, activation="tanh")(hidden)
    return keras.models.Model(image, layers.Dense(10, activation="softmax")(hidden))


def train(gpus, start=None):
    """Train on that many devices (None: all); returns the model and the weights it began with."""
    model = build()
    if start is not None:
        model.set_weights(start)
    start = model.get_weights()
    # The second line of compat: the same model object, now on all of these devices.
    model = compat.parallelize(model, gpus)
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9), "categorical_crossentropy", metrics=["accuracy"]
    )
    began = time.time()
    model.fit(*data(), batch_size=BATCH, epochs=arguments.epochs, shuffle=False, verbose=2)
    print("trained in {:.1f} s".format(time.time() - began))
    return model, start


def devices_that_worked():
    """Those that ran matrix products, forward and backward, as the framework recorded them.

    None where that cannot be seen (TensorFlow 2.0).

    Your scripts need none of this: ``python -m compat test train.py`` shows it of any script.
    """
    for record in _verification.records():
        return [device for device, counts in sorted(record.operations.items()) if min(counts) > 0]
    return None


devices = configuration.devices
print("\nOn {}:".format(", ".join(devices)))
model, start = train(gpus=None)
if len(devices) == 1:
    print("\nTrained on {}. With one device there is nothing to compare.".format(devices[0]))
    sys.exit(arguments.simulate > 1)
print("\nOn one device, from the same weights:")
plain, _ = train(gpus=1, start=start)

difference = max(
    np.abs(ours - theirs).max() for ours, theirs in zip(model.get_weights(), plain.get_weights())
)
losses = [each.evaluate(*data(), batch_size=BATCH, verbose=0)[0] for each in (model, plain)]
worked = devices_that_worked()
print("\n                      {:>12} {:>12}".format("all devices", "one device"))
print("loss after training   {:12.8f} {:12.8f}".format(*losses))
print("largest difference between their weights: {:.1e}".format(difference))
if worked is not None:
    print("devices that worked, forward and backward: {}".format(", ".join(worked) or "none"))
if worked is not None and len(worked) < len(devices):
    sys.exit(
        "NOT ON ALL DEVICES: {} of {} had a part of each batch. The report above says what was "
        "configured, and its warnings what was not.".format(len(worked), len(devices))
    )
if not difference < 1e-5:  # also where it is no number
    sys.exit(
        "NOT THE SAME: more than rounding. With configure_gpu(verify=10) above, ten steps are "
        "compared, and an error names the first thing that differs."
    )
print(
    "OK: batches of {} rows, split over {} devices, trained to what one device trains to{}.".format(
        BATCH,
        len(devices),
        "" if worked else "; where operations ran cannot be seen on this version",
    )
)
