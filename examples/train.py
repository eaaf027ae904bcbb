"""A Keras training script with two lines of compat in it, on whatever backend is installed.

    python examples/train.py                  # on 3 CPU devices that stand in for GPUs
    python examples/train.py --simulate 0     # on the GPUs of this machine, or its CPU

It trains the same model once on all devices and once on one, compares, and says whether all is
well; its exit status is 0 if it is.
"""

import argparse
import sys

import numpy as np

import compat

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--simulate", type=int, default=3, help="CPU devices to use as GPUs")
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()

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
    """Return the model, with the same weights each time and on each backend."""
    layers = keras.layers
    image = layers.Input((144,))
    hidden = layers.Dense(64, activation="tanh")(image)
    hidden = layers.Dense(64, activation="tanh")(hidden)
    model = keras.models.Model(image, layers.Dense(10, activation="softmax")(hidden))
    random = np.random.RandomState(1)
    model.set_weights([random.normal(scale=0.1, size=each.shape) for each in model.get_weights()])
    return model


def train(gpus):
    """Train a new model on that many devices (None: all)."""
    # The second line of compat: the same model object, now on all of these devices.
    model = compat.parallelize(build(), gpus)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "categorical_crossentropy")
    x, y = data()
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=print_loss)]
    epochs = arguments.epochs
    model.fit(x, y, BATCH, epochs, verbose=0, callbacks=callbacks, shuffle=False)
    return model


def print_loss(epoch, logs):
    print("epoch {}: loss {:.4f}".format(epoch + 1, logs["loss"]))


devices = configuration.devices
print("\nOn {}:".format(", ".join(devices)))
model = train(gpus=None)
if len(devices) == 1:
    print("\nTrained on {}. With one device there is nothing to compare.".format(devices[0]))
    sys.exit(arguments.simulate > 1 and compat.size() == 1)  # a rank has one device
report = compat.report()
print("\nOn one device, from the same weights:")
plain = train(gpus=1)

difference = max(
    np.abs(ours - theirs).max() for ours, theirs in zip(model.get_weights(), plain.get_weights())
)
losses = [each.evaluate(*data(), batch_size=BATCH, verbose=0) for each in (model, plain)]
print("\n                      {:>12} {:>12}".format("all devices", "one device"))
print("loss after training   {:12.4f} {:12.4f}".format(*losses))
print(report.verdict)
if not report.all_worked:
    sys.exit(
        "NOT ON ALL DEVICES. The report at the top says what was configured, and its warnings what "
        "was not."
    )
if not difference < 1e-5:  # also where it is no number
    sys.exit(
        "NOT THE SAME: weights differ by {:.1e}, more than rounding. With configure_gpu(verify=10) "
        "above, ten steps are compared, and an error names the first thing that "
        "differs.".format(difference)
    )
print(
    "OK: batches of {} rows, split over {} devices, trained to the weights of one device.".format(
        BATCH, len(devices)
    )
)
if arguments.simulate:
    print(
        "Simulated devices share one CPU: they show that results are the same, not how fast GPUs "
        "would be.\ndocs/benchmarks.md compares times."
    )
