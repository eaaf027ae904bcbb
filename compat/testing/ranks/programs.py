"""Programs that a rank, or one process, runs with Keras models in the tests of ranks.

Most of the time goes into starting processes that import a framework: ``main`` runs several of
the functions here in one.
"""

import importlib.util
import os
import shutil
import time
import warnings
from typing import Any, Dict, List

import numpy as np

import compat

from ..._runtime.process import process
from ..models import (
    CASES,
    UNCHANGED,
    fit_in_order,
    initialise,
    keras_under_test,
    new_graph,
    optimizer,
)
from .jobs import FAULTS, FAULTY, call

# Rows of a batch of all ranks, and of the data: two whole batches and one of 13 rows.
BATCH, ROWS = 61, 135
# The script of a job.
SCRIPT = "import sys\nfrom compat.testing.ranks import programs\nprograms.main(*sys.argv[1:])\n"


def main(folder, functions, **others):
    """Run some of the functions below, and write their arrays and facts into a folder.

    Arguments:
        folder: the path.
        functions: their names and arguments, as JSON: see ``jobs.call()``.
        **others: more functions, by their names.
    """
    compat.configure_gpu(gpus="cpu")
    call(dict(globals(), **others), functions, keras_under_test(), folder, new_graph)


def _data(name):
    """Return this rank's rows of a case's data, and its batch size."""
    inputs, targets = compat.shard(CASES[name].data(ROWS), BATCH)
    return inputs, targets, compat.local_batch_size(BATCH)


def _number(keras, variable):
    """Return the value of a variable: in Keras 3 not all of them are numbers for float()."""
    if hasattr(keras, "ops"):
        return float(keras.ops.convert_to_numpy(variable))
    return float(getattr(keras.backend, "get_value", float)(variable))


def _fit(model, name, epochs, **options):
    inputs, targets, batch_size = _data(name)
    history = fit_in_order(model, inputs, targets, batch_size, epochs, **options)
    return [float(loss) for loss in history.history["loss"]]


def _weights(model, prefix="weight"):
    """Return a model's weights as arrays with names."""
    return {"{}-{}".format(prefix, place): w for place, w in enumerate(model.get_weights())}


def _start(keras, name):
    """Return the model of a case, with known weights that differ between ranks."""
    return initialise(CASES[name].build(keras), seed=compat.rank())


def train(keras, folder, trials):
    """Train every case: two epochs, and then one more.

    Arguments:
        keras: the Keras under test.
        folder: that of the job.
        trials: pairs of a case and an optimizer.
    """
    arrays, facts = {}, {}
    for number, (name, optimizer_name) in enumerate(trials):
        before = number % 2 == 0  # parallelized before it is compiled, or after

        def build():
            return _start(keras, name)  # noqa: B023  # called at once

        model = compat.parallelize(build) if before else build()
        model.compile(optimizer(keras, optimizer_name), CASES[name].loss)
        if not before:
            assert compat.parallelize(model) is model
        losses = _fit(model, name, 2) + _fit(model, name, 1)
        key = "{}-{}".format(name, optimizer_name)
        inputs, targets, batch_size = _data(name)
        evaluated = model.evaluate(inputs, targets, batch_size=batch_size, verbose=0)
        facts[key] = losses + [float(value) for value in np.ravel(evaluated)]
        arrays.update(_weights(model, key))
    return arrays, facts


def train_on(keras, folder, extension):
    """Parallelize a model that was fitted, with its optimizer's state; then save and load."""
    inputs, targets = CASES["dense"].data(ROWS)

    def build():
        model = _start(keras, "dense")
        model.compile(optimizer(keras, "sgd"), CASES["dense"].loss, metrics=["accuracy"])
        # As if rank 0 had loaded a checkpoint, and the others started anew.
        if compat.is_chief():
            fit_in_order(model, inputs, targets, BATCH)
        return model

    model = compat.parallelize(build)
    assert compat.parallelize(model) is model
    callbacks = [keras.callbacks.ModelCheckpoint(os.path.join(folder, "checkpoint" + extension))]
    log, backup, board = (os.path.join(folder, name + str(compat.size()))
                          for name in ("log", "backup", "board"))  # fmt: skip
    backs_up = hasattr(keras.callbacks, "BackupAndRestore")

    def writing():
        """Return callbacks that write into the same files on all ranks."""
        callbacks = [keras.callbacks.CSVLogger(log)]
        if backs_up:
            callbacks.append(keras.callbacks.BackupAndRestore(backup, delete_checkpoint=False))
        if importlib.util.find_spec("tensorflow") and importlib.util.find_spec("tensorboard"):
            callbacks.append(keras.callbacks.TensorBoard(board, write_graph=False))
        return callbacks

    losses = _fit(model, "dense", 2, callbacks=callbacks + writing())
    left = 1
    if backs_up:  # all ranks go on with the third epoch
        left = len(_fit(model, "dense", 3, callbacks=writing()[1:]))
        # Left by restoring: Keras 3 would begin every fit() there; tf.keras does not read it.
        model._initial_epoch = model._training_state = None
    paths = [os.path.join(folder, "{}-{}{}".format(compat.size(), rank, extension))
             for rank in range(compat.size())]  # fmt: skip
    model.save(paths[compat.rank()])
    deadline = time.monotonic() + 60
    while not os.path.exists(paths[0]) and time.monotonic() < deadline:
        time.sleep(0.05)  # rank 0 may be later
    # Of a folder of its own: Keras 3.4 unpacks the file beside it, where ranks would meet.
    own = os.path.join(folder, "{}-{} alone".format(compat.size(), compat.rank()))
    os.mkdir(own)
    loaded = keras.models.load_model(shutil.copy(paths[0], own))
    with open(log) as file:
        logged = len(file.readlines())
    rate = getattr(model.optimizer, "lr" if hasattr(model.optimizer, "lr") else "learning_rate")
    facts = {
        "losses": losses,
        "logged": logged,
        "left": left,
        "saved": [os.path.exists(path) for path in paths],
        "learning rate": _number(keras, rate),
        "class": type(model).__module__ + "." + type(model).__name__,
        "mixed precision": hasattr(keras, "mixed_precision"),
        "saved over": _saved_over(model, folder, extension) if compat.is_chief() else None,
    }
    arrays = dict(_weights(model), loaded=loaded.predict(inputs, verbose=0))
    (x, y), rows = _data("dense")[:2], slice(compat.local_batch_size(BATCH))
    facts["on batches"] = [
        [float(value) for value in call(x[rows], y[rows])]
        for call in (model.train_on_batch, model.test_on_batch, model.train_on_batch)
    ]
    facts["stopped"] = [len(_fit(model, "dense", 4, callbacks=[_stop(keras, moment)]))
                        for moment in ("batch", "epoch")]  # fmt: skip
    facts["written"] = sum(len(files) for _, _, files in os.walk(board))
    if compat.rank() == compat.size() - 1:
        x = np.full_like(x, np.nan)
    callbacks = [keras.callbacks.TerminateOnNaN()]
    history = fit_in_order(model, x, y, rows.stop, 3, callbacks=callbacks)
    facts["stopped"].append(len(history.history["loss"]))
    if hasattr(keras.callbacks, "SwapEMAWeights"):
        averages = compat.parallelize(_start(keras, "dense"))
        averages.compile(keras.optimizers.SGD(0.05, use_ema=True), CASES["dense"].loss)
        _fit(averages, "dense", 2, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
        arrays.update(_weights(averages, "averages"))
    return arrays, facts


def _stop(keras, moment):
    """Return a callback that stops training on the last rank alone, in or after epoch two."""

    class Stop(keras.callbacks.Callback):  # type: ignore  # whichever Keras it is
        def on_epoch_begin(self, epoch, logs=None):
            self.stops = compat.rank() == compat.size() - 1 and epoch == 1

        def stop(self, number, logs=None):
            if self.stops:
                self.model.stop_training = True

    setattr(Stop, "on_{}_end".format(moment), Stop.stop)
    return Stop()


def _saved_over(model, folder, extension):
    """Return the state of a link with a long name, and of its private target, after saving."""
    folder = os.path.join(folder, "saved-over-{}".format(compat.size()))
    os.mkdir(folder)
    target = os.path.join(folder, "target")
    open(target, "w").close()
    os.chmod(target, 0o600)
    link = os.path.join(folder, "n" * (255 - len(extension)) + extension)
    os.symlink(target, link)
    model.save(link)
    mode = os.stat(target).st_mode & 0o777
    return [os.path.islink(link), mode, os.path.getsize(target) > 0, len(os.listdir(folder))]


def go_on(keras, folder, optimizer_name, extension, first, last, others=()):
    """Train epochs from the file of the epoch before: two ranks, then three.

    Arguments:
        keras: the Keras under test.
        folder: that of the files.
        optimizer_name: as ``models.optimizer()`` takes it.
        extension: that of the files.
        first: the first epoch.
        last: the epoch before which training stops.
        others: more files in the folder that are to be loaded.
    """
    for name in others:
        keras.models.load_model(os.path.join(folder, name))

    def file_of(epoch, size):
        return os.path.join(folder, "epoch-{}-of-{}{}".format(epoch, size, extension))

    def build():
        if first:
            return keras.models.load_model(file_of(first, first + 1))
        model = _start(keras, "dense")
        model.compile(optimizer(keras, optimizer_name), CASES["dense"].loss)
        return model

    model = compat.parallelize(build)
    arrays, losses = {}, []
    for epoch in range(first, last):
        losses += _fit(model, "dense", 1)
        arrays.update(_weights(model, "epoch-{}".format(epoch)))
    model.save(file_of(last, compat.size()))
    return arrays, {"losses": losses}


def normalise(keras, folder):
    """Train models with batch normalization, whose moving averages are weights, too.

    The first one's has each rank's own samples, and the second one's those of all ranks. That one
    predicts on rank 0 alone. A third one contains one that is synchronized after it was trained.
    """

    def build():
        layers = [keras.layers.BatchNormalization(input_shape=(8,)), keras.layers.Dense(4)]
        model = initialise(keras.models.Sequential(layers))
        model.set_weights([np.abs(weight) for weight in model.get_weights()])  # such as a variance
        return model

    arrays, told = {}, []
    for name, is_asked in [("weight", False), ("synchronized", True)]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = compat.parallelize(build, sync_batch_norm=is_asked)
        told += [str(each.message) for each in caught if each.category is compat.CompatWarning]
        model.compile(optimizer(keras, "sgd"), "mse")
        _fit(model, "dense", 2)
        arrays.update(_weights(model, name))
    inner, source = build(), keras.layers.Input((8,))
    outer = compat.parallelize(keras.models.Model(source, inner(source)))
    outer.compile("sgd", "mse")
    _fit(outer, "dense", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compat.parallelize(inner, sync_batch_norm=True)
    outer.set_weights([np.abs(weight) for weight in initialise(outer).get_weights()])
    _fit(outer, "dense", 1)
    (arrays["synchronized within"],) = [each for each in outer.get_weights() if each.ndim == 2]
    facts = {"told": [text for text in told if "statistics of the whole batch" in text]}
    if compat.is_chief():
        facts["predicted"] = model.predict(CASES["dense"].data(5)[0]).tolist()
    return arrays, facts


def batches(keras, folder, processes):
    """Train from sources of batches, the last of which are uneven and too small.

    Arguments:
        keras: the Keras under test.
        folder: that of the job.
        processes: whether Keras is to compute items in processes, too.
    """
    inputs, targets = CASES["dense"].data(ROWS)
    starts = list(range(0, ROWS, BATCH))
    base = getattr(keras.utils, "PyDataset", None) or keras.utils.Sequence
    in_fit = base.__name__ == "Sequence"  # Keras 2 takes its options there

    class Items(base):  # type: ignore  # whichever Keras it is
        def __init__(self, rows, shift=0, **options):
            if options:
                super().__init__(**options)
            self.rows = rows
            self.shift = shift  # by how many rows each epoch's batches move

        def __len__(self):
            return len(starts)

        def __getitem__(self, index):
            rows = self.rows[starts[index] : starts[index] + BATCH]
            return inputs[rows], targets[rows]

        def on_epoch_end(self):
            self.rows = np.roll(self.rows, self.shift)

    def draw(epochs):
        for _ in range(epochs):
            for start in starts:
                yield inputs[start : start + BATCH], targets[start : start + BATCH]
            if compat.size() > 1:
                yield inputs[:1], targets[:1]  # which ranks leave out

    model = compat.parallelize(lambda: _start(keras, "dense"))
    model.compile(optimizer(keras, "sgd"), CASES["dense"].loss)
    fit = model.fit_generator if hasattr(model, "fit_generator") else model.fit

    def fitted(source, **options):
        of_fit, of_items = (options, {}) if in_fit else ({}, options)
        if isinstance(source, Items):
            source = Items(source.rows, source.shift, **of_items)
            of_fit["shuffle"] = False
        else:
            of_fit["steps_per_epoch"] = len(starts)
        history = fit(compat.shard(source), epochs=2, verbose=0, **of_fit)
        return [float(loss) for loss in history.history["loss"]]

    arrays, facts = {}, {}
    rows = np.arange(ROWS)
    trials: List[Any] = [("sequence", Items(rows, 7), {}), ("generator", draw(3), {})]
    if not in_fit:  # Keras 2 has computed them in a thread
        trials.append(("threads", Items(rows), {"workers": 2}))
    if processes:
        trials += [("processes", Items(rows), {"workers": 2, "use_multiprocessing": True})]
    for name, source, options in trials:
        facts[name] = fitted(source, **options)
        arrays.update(_weights(model, name))
    # Keras has drawn more than it used, and on each rank as many more as it had time for.
    again = compat.shard(draw(100))
    for _ in range(2):
        fit(again, steps_per_epoch=len(starts), epochs=1, verbose=0)
    differing = {"begin": Items(np.roll(rows, compat.rank())), "epoch": Items(rows, compat.rank())}
    for name, source in differing.items():
        try:
            fitted(source)
        except compat.RankError as error:
            facts[name] = str(error)
    arrays.update(_unsharded(keras, facts))
    path = os.path.join(folder, "barrier-{}".format(compat.size()))
    if compat.rank() == compat.size() - 1:
        time.sleep(0.5)
        open(path, "w").close()
    compat.barrier()
    facts["waited"] = os.path.exists(path)
    return arrays, facts


def _unsharded(keras, facts):
    """Train without ``shard()``: a batch is the same on all ranks, but for ``--parallelize``."""
    inputs, targets = CASES["dense"].data(ROWS)
    model = compat.parallelize(lambda: _start(keras, "dense"))
    model.compile(optimizer(keras, "sgd"), CASES["dense"].loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.train_on_batch(inputs[:9], targets[:9])
    told = [str(each.message) for each in caught if each.category is compat.CompatWarning]
    facts["same rows"] = [text.replace(repr(model.name), "MODEL") for text in told]
    facts["device"] = compat.report().devices[0].device
    facts["reported"] = list(compat.report().same_rows) == [model.name]
    has_sharded, process.has_sharded, process.parallelizes_compiled = (
        process.has_sharded,
        False,
        True,
    )
    try:
        compat.parallelize(model)
        fit_in_order(model, inputs[:18], targets[:18], 18)  # of two ranks, as many rows as above
    finally:
        process.has_sharded, process.parallelizes_compiled = has_sharded, False
    return _weights(model, "unsharded")


# How far weights may be from one process's, whose matrix products are in that type, too.
POLICIES = {"mixed_float16": 3e-3, "mixed_bfloat16": 1e-2}


def mixed(keras, folder, policies):
    """Train under policies of mixed precision; then a step that overflows on the last rank."""
    arrays, facts = {}, {}
    for policy in policies:
        keras.mixed_precision.set_global_policy(policy)
        try:
            model = compat.parallelize(lambda: _start(keras, "multi"))
        finally:
            keras.mixed_precision.set_global_policy("float32")
        model.compile(optimizer(keras, "sgd"), CASES["multi"].loss)
        _fit(model, "multi", 3)
        scales = [_loss_scale(model.optimizer)]
        arrays.update(_weights(model, policy))
        if scales[0] is not None:
            (left, right), (score, same), batch_size = _data("multi")
            if compat.rank() == compat.size() - 1:
                score = score.copy()
                score[batch_size - 1] = 1e8  # one process has it in the same batch
            rows = slice(batch_size)
            model.train_on_batch([left[rows], right[rows]], [score[rows], same[rows]])
            scales.append(_loss_scale(model.optimizer))
            arrays.update(_weights(model, policy + "-overflow"))
        facts[policy] = scales
    return arrays, facts


def _loss_scale(optimizer):
    """Return the loss scale of mixed_float16's optimizer, or None of others."""
    for name in ("loss_scale", "dynamic_scale"):
        if getattr(optimizer, name, None) is not None:
            return float(np.asarray(getattr(optimizer, name)))
    return None


def unchanged(keras, folder):
    """Run the script without compat in this process, where compat is configured."""
    names: Dict[str, Any] = {}
    exec(UNCHANGED, names)
    return {}, {"history": names["numbers"]}


def fail(keras, folder, fault, extension):
    """Train, save after each batch, and have one rank fail at its third batch."""
    model = compat.parallelize(lambda: _start(keras, "dense"))
    model.compile(optimizer(keras, "sgd"), CASES["dense"].loss)

    class Fault(keras.callbacks.Callback):  # type: ignore  # whichever Keras it is
        def on_batch_end(self, batch, logs=None):
            self.model.save(os.path.join(folder, fault + extension))
            if compat.rank() == FAULTY and batch == 2:
                FAULTS[fault]()

    inputs, targets = compat.shard(CASES["dense"].data(90))
    if fault == "short" and compat.rank() == FAULTY:
        inputs, targets = inputs[:9], targets[:9]
    model.fit(inputs, targets, batch_size=3, epochs=50, verbose=0, callbacks=[Fault()])
    return {}, {}
