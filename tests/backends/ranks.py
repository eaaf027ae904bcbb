"""Programs of a test's own, as ranks."""

import concurrent.futures
import json
import os
import re
import sys

import numpy as np
from outcomes import ended

from compat._ranks.engines import jax_distributed

# What each program begins with, and ends with.
BEGIN = """
import json, os, sys, warnings
import numpy as np
import compat
from compat import testing
compat.configure_gpu(gpus="cpu")
keras = testing.keras_under_test()
# Two whole batches and one of 5 rows.
BATCH = 8
random = np.random.RandomState(0)
x = random.normal(size=(21, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)
inputs, targets = compat.shard((x, y), BATCH)
rows = compat.local_batch_size(BATCH)
weights, said, kept = {}, {}, []


def told(call):
    "What a call is told: its error, or its warnings."
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except compat.CompatError as error:
            kept.append(error)  # and the frames that it went through
            return type(error).__name__ + ": " + str(error)
    return [str(w.message) for w in caught if issubclass(w.category, compat.CompatWarning)]


def dense(units, **options):
    "A layer with other weights on each rank."
    initializer = keras.initializers.RandomUniform(-0.5, 0.5, seed=units + 100 * compat.rank())
    return keras.layers.Dense(units, kernel_initializer=initializer, **options)
"""
END = """
np.savez(sys.argv[1] + "-%d" % compat.rank(), **{
    "{}-{}".format(name, place): value
    for name, values in weights.items() for place, value in enumerate(values)
})
print("SAID " + json.dumps(said))
"""

# Batches of generators.
GENERATOR = """
model = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))]))
model.compile("sgd", "mse")


def batches():
    while True:
        for start in range(0, len(inputs), rows):
            yield inputs[start : start + rows], targets[start : start + rows]


history = model.fit_generator(
    batches(), 3, 2, verbose=0, validation_data=batches(), validation_steps=3
)
said.update((name, list(map(float, values))) for name, values in history.history.items())
said["evaluated"] = float(model.evaluate_generator(batches(), 3))
weights["generator"] = model.get_weights()
"""


# Keras 3: scaled losses whose sum over ranks is more than float16 holds, and whose mean is not.
NEAR_OVERFLOW = """
# Twice this gradient is none of float16's.
keras.config.set_dtype_policy("mixed_float16")
near = keras.models.Sequential([
    keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", input_shape=(6,))
])
keras.config.set_dtype_policy("float32")
compat.parallelize(near)
near.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0)), "mse")
near.fit(inputs[: 2 * rows] / 100, 0 * targets[: 2 * rows] + 4, rows, verbose=0, shuffle=False)
said["near"] = [float(near.optimizer.dynamic_scale), int(near.optimizer.iterations)]
"""

# Losses that are no means over rows. With REDUCTIONS, which Keras before 2.3 and graphs lack, a
# mask hides all of rank 1's rows in the second batch.
LOSSES = """
lengths = np.array([3, 1, 2, 3, 1, 1, 2, 1] + [3, 2, 1, 3, 0, 0, 0, 0] + [1, 3, 2, 1, 3])
if not REDUCTIONS:
    lengths = np.maximum(lengths, 1)
steps = np.arange(1, 4)
hidden = steps > lengths[:, None]
sequences = np.where(hidden[:, :, None], 0, 1 + x.reshape(21, 3, 2) / 4).astype("float32")
wanted = sequences.sum(axis=2, keepdims=True)
zeros = (np.arange(21) % 5 > 1).astype("float32") * np.arange(1, 22) / 11
zeros[4:8] = 0  # all of rank 1's first rows


def compiled(name, model, data, row_weights=None, **options):
    assert compat.parallelize(model) is model
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), **options)
    data = compat.shard((data, row_weights), BATCH)
    more = {} if row_weights is None else {"sample_weight": data[1]}
    history = model.fit(
        *data[0], batch_size=rows, epochs=2, shuffle=False, verbose=0,
        validation_data=data[0] + ((data[1],) if more else ()), **more
    )
    said[name] = {key: list(map(float, values)) for key, values in history.history.items()}
    evaluated = model.evaluate(*data[0], batch_size=rows, verbose=0, **more)
    said[name]["evaluated"] = list(map(float, np.ravel(evaluated)))
    weights[name] = model.get_weights()


def masked():
    layers = [keras.layers.Masking(0.0, input_shape=(3, 2)), dense(1)]
    layers[1].kernel_regularizer = keras.regularizers.l2(0.1)
    return keras.models.Sequential(layers)


def weighted():
    return keras.models.Sequential([
        dense(4, activation="tanh", input_shape=(6,)), dense(1, kernel_regularizer="l2")
    ])


def two_outputs():
    source, other = keras.Input((3, 2)), keras.Input((6,))
    hidden = keras.layers.Masking(0.0)(source)
    outputs = [dense(1, name="one")(hidden), dense(1, name="two")(dense(3)(other))]
    return keras.Model([source, other], outputs)


compat.parallelize(masked)  # before all others
compiled("masked", masked(), (sequences, wanted), loss="mse")
compiled("weighted", weighted(), (x, y), zeros, loss="mse")
if REDUCTIONS:
    compiled("both", two_outputs(), ([sequences, x], [wanted, y]), loss_weights=[0.5, 0.2],
             loss=["mse", keras.losses.Huber(reduction="sum")])
"""


def check_losses(jobs):
    """Weights and losses as one process has them, from what the LOSSES program left."""
    said = check_same(jobs, "losses")
    _, (alone,) = jobs[0]["losses"]
    for name in ("masked", "weighted", "both"):
        assert said[0].get(name) == said[1].get(name)
        for key, values in alone.get(name, {}).items():
            np.testing.assert_allclose(said[0][name][key], values, rtol=1e-4, err_msg=name + key)


# One rank's weights change where the others' do not; in a loop, and in an epoch of fit().
DRIFT = """
def drift(model):
    if compat.rank() == 1:
        values = model.get_weights()
        values[0][0] += 0.01
        model.set_weights(values)


def loop():
    for step in range(5):
        model.train_on_batch(inputs[:rows], targets[:rows])
        if step == 1:
            drift(model)


class Drift(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        drift(self.model)


model = compat.parallelize(
    lambda: keras.models.Sequential([dense(3, input_shape=(6,)), dense(1)], name="drifts")
)
model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
drifted = said["drifted"] = {}
drifted["names"] = [getattr(weight, "path", weight.name) for weight in model.weights]
drifted["loop"] = told(loop)
drifted["fit"] = told(lambda: model.fit(
    inputs, targets, rows, epochs=1, verbose=0, shuffle=False, callbacks=[Drift()]
))
"""


def check_drift(jobs):
    said = [one["drifted"] for one in jobs[1]["drift"][1]]
    for each in said:
        for name, when in ("loop", "after 4 steps"), ("fit", "after the last epoch"):
            assert each[name].startswith(
                "RankError: The ranks have drifted apart: {} the values of '{}'".format(
                    when, said[0]["names"][0]
                )
            ), each[name]
            assert "on rank 1 of 2 are not those of rank 0." in each[name]


# After the last step: no later one is compared.
LATE_DRIFT = """
class Faster(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if compat.rank() == 1:
            self.model.optimizer.learning_rate = 0.5


model = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))], name="late"))
model.compile("sgd", "mse")
said["late"] = told(
    lambda: model.fit(inputs, targets, rows, verbose=0, shuffle=False, callbacks=[Faster()])
)
"""


def check_late_drift(jobs):
    for each in jobs[1]["late_drift"][1]:
        assert each["late"].startswith(
            "RankError: The ranks have drifted apart: after the last epoch the values of "
        )
        assert "learning_rate' on rank 1 of 2 are not those of rank 0." in each["late"]


# Losses: means, in any form, pass; others are told, Keras' own among them.
OWN_LOSSES = """
class Added(keras.layers.Layer):
    "Adds a loss of its inputs."

    def __init__(self, reduce, **options):
        super(Added, self).__init__(**options)
        self.reduce = reduce

    def call(self, inputs):
        self.add_loss(self.reduce(inputs), inputs=inputs)
        return inputs * 1


def total(value):
    return keras.backend.sum(keras.backend.square(value))


def of_two(y_true, y_pred):
    "Compares rows with one another, whatever the targets are."
    return keras.backend.max(y_pred) - keras.backend.min(y_pred) + keras.backend.mean(y_true)


def outcome(reduce=None, loss="mse", targets=targets, **options):
    layers = [dense(4, input_shape=(6,), kernel_regularizer="l2")]
    layers += [Added(reduce)] if reduce else []
    layers += [dense(1, **options)]
    model = compat.parallelize(keras.models.Sequential(layers, name="own"))
    model.compile("sgd", loss)
    batch = inputs[:rows], targets[:rows]
    return told(lambda: [model.train_on_batch(*batch) for _ in range(2)])


compat.parallelize(lambda: keras.models.Sequential([dense(1, input_shape=(6,))]))
own = said["own"] = {}
own["mean"] = outcome(lambda value: keras.backend.mean(keras.backend.square(value)))
own["scalar"] = outcome(None, lambda y_true, y_pred: keras.backend.mean(
    keras.backend.square(y_true - y_pred)
))
own["sum"] = outcome(total)
own["pairs"] = outcome(None, of_two)
if hasattr(keras.models.Model, "compute_loss"):  # the model's own, beside a metric of Keras'
    class Own(keras.models.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **options):
            return keras.backend.mean(keras.backend.square(y - y_pred))

    model = compat.parallelize(Own([dense(1, input_shape=(6,))]))
    model.compile("sgd", metrics=["mae"])
    own["mean"] += told(lambda: model.fit(inputs, targets, rows, verbose=0))
own["of Keras"], labels = {}, (np.arange(len(targets)) % 2).astype("float32")[:, None]
losses = [("CosineSimilarity", {"axis": 0}), ("Dice", {})]
on_torch = hasattr(keras, "ops") and keras.config.backend() == "torch"
if on_torch:  # others take long to compile these
    losses += [("CategoricalCrossentropy", {"axis": 0}), ("Tversky", {}), ("Circle", {})]
for name, options in losses:
    try:
        loss = getattr(keras.losses, name)(**options)
    except (AttributeError, TypeError):  # this Keras has none, or none with an axis
        continue
    own["of Keras"][name] = outcome(None, loss, labels, activation="sigmoid")
if on_torch:
    own["of Keras"]["dice"] = outcome(None, "dice", labels, activation="sigmoid")
"""


SUM = (
    "UnsupportedError: The loss of 'own' is, or contains, a sum over the rows of a batch: {}. Only "
    "means over rows can be averaged over ranks; the gradient of a sum would be too small by the "
    "number of ranks. Divide by the number of rows: reduce_mean() in place of reduce_sum(), in "
    "add_loss() for example."
)
NO_MEAN = (
    "The loss of 'own' is no mean over the rows of a batch: {}. Each rank computes it of its own "
    "rows, so that the ranks train to other numbers than one process. A loss that returns one "
    "value for each row trains to the same."
)


def _numbers(text):
    """Return the losses in a text in the form of the error."""
    losses = re.findall(r"-?\d+\.\d+(?:e[+-]\d+)?", text)
    return "{} of 4 rows, {} of the first 1 and {} of the others".format(*losses)


def check_own_losses(jobs):
    for each in [one["own"] for one in jobs[1]["own_losses"][1]]:
        assert each["mean"] == each["scalar"] == []
        assert each["sum"] == SUM.format(_numbers(each["sum"]))
        assert each["pairs"] == [NO_MEAN.format(_numbers(each["pairs"][0]))]
        for name, told in each["of Keras"].items():
            assert isinstance(told, str) or len(told) == 1, (name, told)
            told = told[0] if isinstance(told, list) else told
            text = SUM if told.startswith("UnsupportedError") else NO_MEAN
            assert told == text.format(_numbers(told)), name


# What Keras 2 in a graph computes otherwise than in one process.
OF_KERAS_2 = """
def net(loss, *layers):
    model = compat.parallelize(keras.models.Sequential(list(layers), name="net"))
    model.compile("sgd", loss)
    return model


def masking():
    return net("mse", keras.layers.Masking(0.0, input_shape=(3, 2)), dense(1, name="last"))


steps = inputs.reshape(-1, 3, 2), targets[:, :, None] * np.ones((1, 3, 1), "float32")
if hasattr(keras.losses, "MeanSquaredError"):
    model = net(keras.losses.MeanSquaredError(reduction="sum"), dense(1, input_shape=(6,)))
    said["of Keras 2"] = [told(lambda: model.train_on_batch(inputs, targets))]
else:
    masked, partly = masking(), masking()
    said["of Keras 2"] = [
        told(lambda: masked.train_on_batch(0 * steps[0], steps[1])),
        told(lambda: partly.fit(
            *steps, rows, verbose=0, validation_data=steps if compat.is_chief() else None
        )),
    ]
"""


def check_of_keras_2(jobs):
    for one in jobs[1]["of_keras_2"][1]:
        assert one["of Keras 2"] in (
            [
                "UnsupportedError: 'net' cannot train on several ranks with a loss of "
                "reduction='sum': ranks average means over rows. Use "
                "reduction='sum_over_batch_size', and a learning rate times the batch size for the "
                "steps of a sum."
            ],
            [
                "UnsupportedError: All rows of a batch on one rank are masked in output 'last' of "
                "'net': this Keras divides by the number of those left. Shuffle the rows, or use "
                "larger batches.",
                [
                    "Validation losses of 'net' are those of the ranks that validate, each of its "
                    "own rows: masks or sample weights divide them by what the others do not tell. "
                    "Give every rank its part of the validation data: compat.shard()."
                ],
            ],
        )


# Metrics that are no means of batches; on ranks, a last batch of 3 and of 2 rows.
METRICS = """
labels = (y > 0.5).astype("float32")
row_weights = (np.arange(21) % 4).astype("float32")


def added(update):
    return [update] if keras.__name__ == "keras" and not hasattr(keras, "ops") else update


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest", **options):
        super().__init__(name=name, **options)
        self.value = self.add_weight(name="value", shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        return added(self.value.assign(testing_max(self.value, y_pred)))

    def result(self):
        return self.value + 0


class Total(Largest):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return added(self.value.assign_add(testing_sum(y_pred)))


class Documented(Largest):
    "As Keras 3's documentation writes one."

    def update_state(self, y_true, y_pred, sample_weight=None):
        return added(self.value.assign(self.value + testing_sum(y_pred)))


if hasattr(keras, "ops"):
    testing_sum = keras.ops.sum
    testing_max = lambda value, y: keras.ops.maximum(value + 0, keras.ops.max(y))
else:
    testing_sum = keras.backend.sum
    testing_max = lambda value, y: keras.backend.maximum(value, keras.backend.max(y))


def metrics():
    return [
        keras.metrics.AUC(num_thresholds=20, name="auc"),
        keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall"),
        keras.metrics.TruePositives(name="hits"), Total("total"), Largest(),
        Documented("documented"),
    ]


decided = compat.parallelize(
    lambda: keras.models.Sequential([dense(1, activation="sigmoid", input_shape=(6,))])
)
decided.compile(
    keras.optimizers.SGD(0.3), "binary_crossentropy", metrics=metrics(),
    weighted_metrics=[
        keras.metrics.BinaryAccuracy(name="weighted"), keras.metrics.AUC(name="other"),
    ],
)
train = compat.shard((x, labels, row_weights), BATCH)
test = compat.shard((x[::-1][:16], labels[::-1][:16], 1 + row_weights[:16]), BATCH)
stop = keras.callbacks.EarlyStopping("val_auc", mode="max", patience=1, min_delta=0.02)
said["warned"] = told(lambda: decided.fit(
    *train[:2], sample_weight=train[2], batch_size=rows, epochs=8, shuffle=False, verbose=0,
    validation_data=test, callbacks=[stop],
))
history = decided.history.history
said["history"] = {
    name: [np.ravel(value).tolist() for value in values]
    for name, values in history.items() if "largest" not in name
}
again = decided.evaluate(test[0], test[1], batch_size=rows, sample_weight=test[2], verbose=0)
names = [name for name in history if name[:4] != "val_"]
said["evaluated"] = [float(value) for name, value in zip(names, again) if name != "largest"]
weights["decided"] = decided.get_weights()
"""


def check_metrics(jobs, but=()):
    """Check that metrics are those of one process.

    Arguments:
        jobs: the results of ``run_both()``, with the METRICS program.
        but: names in the history that are not compared.
    """
    (_, (alone,)), (_, both) = (job["metrics"] for job in jobs)
    assert not alone["warned"]
    for said in [alone] + both:
        for name in but:
            del said["history"][name]
    for said in both:
        assert said["history"] == both[0]["history"]
        assert sorted(said["history"]) == sorted(alone["history"])
        for name, values in alone["history"].items():
            np.testing.assert_allclose(said["history"][name], values, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(said["evaluated"], alone["evaluated"], rtol=1e-5)
        assert said["warned"] == [
            "Metric 'largest' is the mean of the ranks' values, weighted by their rows, and not "
            "what one process computes: update_state() sets its variables, and does not add to "
            "them. For that have update_state() add to its variables with assign_add(), or a "
            "function return one value for each row."
        ]


def of_keras_3(program):
    """Return a program of those above for Keras 3's other backends."""
    program = program.replace("keras.backend.", "keras.ops.").replace(", inputs=inputs)", ")")
    # Its logs are in another order than what evaluate() returns.
    program = program.replace("test[2], verbose=0)", "test[2], verbose=0, return_dict=True)")
    return program.replace("zip(names, again)", "again.items()")


# Runs programs, each with names of its own.
IN_TURN = """
import runpy, sys
from compat.testing.models import new_graph

for place, path in enumerate(sys.argv[1:]):
    if place:
        new_graph()
    sys.argv[1:] = [path]
    runpy.run_path(path + ".py", run_name="__main__")
"""


def run_all(programs, folder, size, backend="tensorflow"):
    """Run programs in turn in the same ranks, since most of the time goes into starting them.

    Arguments:
        programs: by their names. Changes that one makes besides its own names last for the others.
        folder: that of the files.
        size: the number of ranks.
        backend: its name.

    Returns:
        By the programs' names, each rank's arrays, and what each rank said.
    """
    stems = [os.path.join(str(folder), "{}-{}".format(name, size)) for name in programs]
    for stem, program in zip(stems, programs.values()):
        with open(stem + ".py", "w") as file:
            file.write(BEGIN + program + END)
    script = os.path.join(str(folder), "in_turn.py")
    with open(script, "w") as file:
        file.write(IN_TURN)
    command = [sys.executable, "-m", "compat", "run", "--backend", backend, "--gpus", "cpu"]
    if size > 1:
        command += ["-n", str(size), "--timeout", "120"]
    status, out, err = ended(command + [script] + stems, timeout=900)
    assert status == 0, out + err
    said = [line.partition("SAID ") for line in out.split("\n") if "SAID " in line]
    assert len(said) == size * len(stems)
    said.sort(key=lambda line: line[0])  # by rank
    found = {}
    for place, (name, stem) in enumerate(zip(programs, stems)):
        arrays = []
        for rank in range(size):
            with np.load("{}-{}.npz".format(stem, rank)) as file:
                arrays.append(dict(file))
        found[name] = arrays, [json.loads(text) for _, _, text in said[place :: len(stems)]]
    return found


def run(program, folder, size, backend="tensorflow"):
    """Run a program as so many ranks, and give each rank's arrays, and what they said."""
    return run_all({"program": program}, folder, size, backend)["program"]


def run_both(programs, folder, backend="tensorflow", ranks_alone=()):
    """Return the results of one process and two ranks for programs, as ``run_all()`` does.

    Arguments:
        programs: by their names.
        folder: that of the files.
        backend: its name.
        ranks_alone: names of programs that one process does not run.
    """
    common = {name: program for name, program in programs.items() if name not in ranks_alone}
    return run_all(common, folder, 1, backend), run_all(programs, folder, 2, backend)


def check_same(jobs, name):
    """Check that two ranks end with the same bits, and as one process; return their reports.

    Arguments:
        jobs: what ``run_both()`` returns.
        name: the program's.
    """
    ((one,), _), ((chief, other), said) = (job[name] for job in jobs)
    assert sorted(chief) == sorted(one)
    check_arrays(one, chief, other)
    return said


def check_arrays(one, chief, other, tolerance=1e-5):
    """Two ranks have the same bits in all that one process left, and its numbers."""
    assert one
    for key in one:
        np.testing.assert_array_equal(chief[key], other[key], err_msg=key)
        np.testing.assert_allclose(chief[key], one[key], rtol=0, atol=tolerance, err_msg=key)


# Kills the second rank in the third epoch of the first start.
KILLER = """
import signal


class Killer(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("EPOCH", epoch)
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if compat.rank() == 1 and self.epoch == 2 and os.environ["COMPAT_RESTART"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(0)
model = compat.parallelize(build)
"""


def check_restarts(jobs, folder):
    """Check that the example of docs/ranks.md continues after a rank was killed."""
    page = os.path.join(os.path.dirname(__file__), "..", "..", "docs", "ranks.md")
    with open(page) as file:
        (program,) = [text for text in re.findall("```python\n(.*?)```", file.read(), re.DOTALL)
                      if "initial_epoch" in text]  # fmt: skip
    changes = {
        "compat.configure_gpu()": "import sys\nos.chdir(sys.argv[1])\ncompat.configure_gpu()",
        "import keras\n": "from compat import testing\nkeras = testing.keras_under_test()\n",
        "model = compat.parallelize(build)\n": KILLER,
        "callbacks=[": "callbacks=[Killer(), ",
    }
    for before, after in changes.items():
        assert program.count(before) == 1, before
        program = program.replace(before, after)
    script = folder / "train.py"
    script.write_text(program + 'np.savez("weights-%d" % compat.rank(), *model.get_weights())\n')
    for size in (1, 2):
        (folder / str(size)).mkdir()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        alone = pool.submit(jobs.run, 1, str(script), str(folder / "1"))
        options = ["--max-restarts", "2"]
        job = jobs.run(2, str(script), str(folder / "2"), before=options)
    assert alone.result().status == 0, alone.result().err
    assert job.status == 0, job.err
    assert re.findall("compat run: (r.*)", job.err) == [
        "rank 1 of 2 was killed by signal 9; the others were ended.",
        "restart 1 of 2, because rank 1 of 2 was killed by signal 9.",
    ]
    for rank in range(2):
        epochs = re.findall(r"\[{}\] EPOCH (\d)".format(rank), job.out)
        assert epochs == ["0", "1", "2", "2", "3", "4"]
    jobs.check_no_process_is_left(str(script))
    names = "1/weights-0.npz", "2/weights-0.npz", "2/weights-1.npz"
    check_arrays(*(dict(np.load(str(folder / name))) for name in names))


def refused_alone(program):
    """Return the error of a program that mpirun has started, though Horovod knows no MPI."""
    place = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    environ = {"OMPI_COMM_WORLD_" + name: place[name] for name in place}
    status, _, err = ended([sys.executable, "-c", BEGIN + program], environ, timeout=300)
    assert status == 1
    return err.rstrip().split("\n")[-1]


def disagreement(size):
    return "compat.errors.RankError: " + (
        "mpirun started this process as one of {0}, but Horovod sees 1: each would train alone. "
        "Start it with the launcher of Horovod, or with compat run -n {0}.".format(size)
    )


# How the scripts of jobs that fail begin.
TRAINS = """
import os, signal, numpy as np
import compat.testing
compat.configure_gpu(gpus="cpu")
keras = compat.testing.keras_under_test()
x, y = compat.shard((np.ones((48, 6), "float32"), np.ones((48, 1), "float32")), 8)
model = compat.parallelize(
    lambda: keras.models.Sequential([keras.layers.Dense(1, input_shape=(6,))])
)
model.compile("sgd", "mse")
"""

STOPPED = (
    TRAINS
    + """

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and compat.rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)


model.fit(x, y, compat.local_batch_size(8), verbose=0, callbacks=[Stop()])
"""
)

# Rank 0 takes connections then, and answers none.
STOPPED_AT_START = """
import os, signal
import compat
from compat._ranks import rendezvous
listen = rendezvous.listen


def stop(*arguments):
    listening = listen(*arguments)
    os.kill(os.getpid(), signal.SIGSTOP)
    return listening


rendezvous.listen = stop
compat.configure_gpu(gpus="cpu")
from compat import testing
keras = testing.keras_under_test()
compat.parallelize(keras.models.Sequential([keras.layers.Dense(1, input_shape=(6,))]))
"""


# The others' scripts have ended by then, or go on at the next line.
EVALUATES_ALONE = (
    TRAINS
    + """\
model.fit(x, y, compat.local_batch_size(8), verbose=0)
if compat.is_chief():
    model.evaluate(x, y, verbose=0)
"""
)
TRAINS_ON = "model.fit(x, y, compat.local_batch_size(8), verbose=0)"
DOES_A_STEP = "model.train_on_batch(x[:4], y[:4])"


def check_evaluation_on_one_rank(folder, backend):
    """Check that the error names the line at which that rank waits."""
    said = what_a_failed_job_says(folder, backend, EVALUATES_ALONE, size=2)
    waited = (
        r"^compat.errors.RankLostError: Rank 0 of 2 waited for the .* \(script.py, line 13\), but "
    )
    assert re.search(waited, said, re.MULTILINE), said


def check_different_calls(folder, backend, call=TRAINS_ON):
    """Rank 0 evaluates, and the other one goes on to train."""
    program = EVALUATES_ALONE + call + "\n"
    said = what_a_failed_job_says(folder, backend, program, size=2)
    told = (
        r"^compat.errors.RankError: The ranks wait for different things: rank 0 for the others.* "
        r"\(script.py, line 13\); rank 1 for the others.* \(script.py, line 14\). Each has to make "
        r"the same calls in the same order: fit\(\) and evaluate\(\), for example, on all of them.$"
    )
    assert re.search(told, said, re.MULTILINE), said


LEAVES = (
    TRAINS
    + """

class Leave(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        if batch == 2 and compat.rank() == 1:
            os._exit(0)


model.fit(x, y, compat.local_batch_size(8), verbose=0, callbacks=[Leave()])
"""
)


def check_a_rank_that_leaves(folder, backend):
    """Check that a rank is named which left without a report, and with exit status 0."""
    said = what_a_failed_job_says(folder, backend, LEAVES, size=2)
    told = (
        "rank 1 of 2 ended (exit status 0) while others were still training; the others were ended."
    )
    assert "compat run: {}\n".format(told) in said, said


FAILS = """
import compat
if compat.rank() == 1:
    raise ValueError("bad")
"""


def check_a_rank_that_fails_early(folder, backend):
    """Before it joins the others, or before its first step."""
    for program in (FAILS + TRAINS, TRAINS + FAILS):
        program += "model.fit(x, y, compat.local_batch_size(8), verbose=0)\n"
        said = what_a_failed_job_says(folder, backend, program, size=2)
        told = "compat run: rank 1 of 2 failed with exit status 1; the others were ended.\n"
        assert told in said and said.endswith("\nValueError: bad\n"), said


def check_a_rank_that_is_stopped_before_it_joins(folder, backend):
    """In ``MPI_Init`` the other one cannot know which rank is missing."""
    begin = "import os, signal, compat\nif compat.rank(): os.kill(os.getpid(), signal.SIGSTOP)\n"
    said = what_a_failed_job_says(folder, backend, begin + TRAINS, size=2)
    assert verdict(said) in (WAITED.format(0, 2, 1), DID_NOT_COME.format(1, 2))


def what_a_failed_job_says(folder, backend, program, size=3, timeout=8):
    """Return the errors that ``compat run`` prints for a program some of whose ranks fail."""
    script = folder / "script.py"
    script.write_text(program)
    command = [sys.executable, "-m", "compat", "run", "-n", str(size), "--timeout", str(timeout)]
    command += ["--gpus", "cpu", "--backend", backend, script]
    status, _, err = ended(command, timeout=200)
    assert status == 1
    return err


def check_compat_test(script, *options, backend="tensorflow"):
    """Check that ``compat test``, as in docs/checks.md, reports no problem.

    The examples do not shard their data.
    """
    command = [sys.executable, "-m", "compat", "test", "--backend", backend, str(script)]
    status, out, err = ended(command + list(options), timeout=600)
    verdict = out[out.rindex("-" * 72) :]
    assert "\nThe same on several devices.\n" in verdict, verdict + err
    if backend == "jax" and not jax_distributed.is_supported():
        assert "jax cannot train as one of several ranks in this version." in verdict
        return
    assert status == 0, verdict + err
    assert verdict.endswith(
        "\nAs 2 ranks: all ended well, with the same weights, but trained on the same rows, so "
        "that nothing is gained: call compat.shard().\n"
    )


def verdict(said):
    """Return the report of ``compat run`` on the rank for which the job failed."""
    (line,) = [line for line in said.splitlines() if line.endswith("; the others were ended.")]
    return line


DID_NOT_COME = (
    "compat run: rank {} of {} did not come to the others, which waited for it; the others were "
    "ended."
)
WAITED = (
    "compat run: rank {} of {} waited for rank {}, which failed, ended or did not come; the others "
    "were ended."
)


def check_stopped_rank_0(folder, backend, program):
    """Check that rank 0 is named, though it answers no query of the other."""
    said = what_a_failed_job_says(folder, backend, program, size=2)
    assert ", but rank 0 failed, ended or did not come: " in said
    assert verdict(said) in (DID_NOT_COME.format(0, 2), WAITED.format(1, 2, 0))
    return said


# Makes a train function of its own, as keras_lookahead does.
LOOKAHEAD = """
from keras import backend as K

model = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))], name="net"))
model.compile("sgd", "mse")


def make():
    inputs = model._feed_inputs + model._feed_targets + model._feed_sample_weights
    trained = model._collected_trainable_weights
    updates = model.optimizer.get_updates(params=trained, loss=model.total_loss)
    model.train_function = K.function(inputs, [model.total_loss], updates=updates)


said["lookahead"] = told(make)
"""


def check_lookahead(jobs):
    """Ranks whose gradients another library would take out of their hands."""
    for said in jobs[1]["lookahead"][1]:
        assert said["lookahead"] == (
            "UnsupportedError: 'net' cannot train as one of several ranks in a loop of your own "
            "around K.function(): nothing exchanges its gradients. Give compile() the loss, and "
            "call fit() or train_on_batch()."
        )
