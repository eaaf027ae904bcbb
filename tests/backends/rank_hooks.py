"""What ranks say of each hook that they depend on, where it is left out, besides the contract."""

import functools
import os
import warnings

import numpy as np

import compat
from compat._runtime import patching
from compat._runtime.process import process
from compat.testing.models import fit_in_order, new_graph

from . import hooks


def left_out(keras, folder, exempt):
    """Leave out each hook in turn, in the same two ranks, and note what each rank says.

    Arguments:
        keras: the Keras under test.
        folder: that of the job.
        exempt: hooks that no step depends on, by name, each with the reason.
    """
    with warnings.catch_warnings():  # of what is said with all hooks
        warnings.simplefilter("error", compat.CompatWarning)
        model, data = train_and_evaluate(keras, folder)
        # Functions that are made are called again, and what they were made by is not.
        assert compat.parallelize(model) is model
        fit_in_order(model, *data, validation_data=data)
    program = functools.partial(train_and_evaluate, keras, folder)
    settings = process.configuration.settings
    settings.strict = True  # a program ends where something is found
    try:
        said = hooks.left_out_one_by_one(program, exempt)
    finally:
        settings.strict = False
    warned = hooks.said_without("model.fit", program)
    report = compat.report()
    return {}, {"said": said, "warned": warned, "report": [report.all_worked, report.verdict]}


def take_back_patches():
    """Have what is replaced once in a process be replaced again."""
    for patch in reversed(patching.patches()):
        if not hasattr(patch, "watches") and not hasattr(patch, "mends"):
            patch.take_back()


def train_and_evaluate(keras, folder):
    """Train, evaluate and save a new model by each of Keras' methods that does so.

    Returns:
        The model, and its data.
    """
    take_back_patches()
    new_graph()
    random = np.random.RandomState(0)
    x = random.normal(size=(20, 6)).astype("float32")  # the last batch is of another size
    inputs, targets = compat.shard((x, x.sum(axis=1, keepdims=True)), 8)
    rows = compat.local_batch_size(8)
    targets = [targets, -targets]
    first = inputs[:rows], [each[:rows] for each in targets]

    def build():
        source = keras.layers.Input((6,))
        outputs = [keras.layers.Dense(1, name=name)(source) for name in ("one", "two")]
        return keras.models.Model(source, outputs, name="net")

    model = compat.parallelize(build)
    names = {"one": "mae", "two": "mae"}
    model.compile(keras.optimizers.SGD(0.01), ["mse", "mse"], metrics=names)
    endings = (".keras", ".weights.h5") if hasattr(keras, "StatelessScope") else (".h5", ".w.h5")
    # A file for each rank: without the hooks all would write the same one at once.
    paths = [os.path.join(folder, f"left-out-{compat.rank()}{ending}") for ending in endings]
    checkpoint = keras.callbacks.ModelCheckpoint
    saving = [checkpoint(paths[0]), checkpoint(paths[1], save_weights_only=True)]
    data = inputs, targets
    fit_in_order(model, *data, rows, validation_data=data, callbacks=saving)
    model.evaluate(inputs, targets, batch_size=rows, verbose=0)
    model.train_on_batch(*first)
    model.test_on_batch(*first)
    if hasattr(model, "fit_generator"):  # before Keras 3
        model.fit_generator((first for _ in range(9)), 1, verbose=0)
        model.evaluate_generator((first for _ in range(9)), 1)
    return model, data
