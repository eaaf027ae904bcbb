"""A script that knows nothing of compat, and is run as it is on ranks."""

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


def unchanged(keras, folder):
    """Run the script in this process, which has configured compat already."""
    names = {}  # type: dict
    exec(UNCHANGED, names)
    return {}, {"history": names["numbers"]}
