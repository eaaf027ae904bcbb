"""TensorFlow 2: the contract, and what is special to tf.keras and Keras 3 on TensorFlow."""

import collections
import contextlib
import copy
import functools
import inspect
import pickle
import sys

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat import _api, _keras
from compat._backends.tensorflow2 import backend, variable_reads
from compat._backends.tensorflow2.call_reductions import can_count
from compat._backends.tensorflow2.configuration import short_name
from compat._backends.tensorflow2.profiler import products
from compat._backends.tensorflow2.run_metadata import nodes_executed
from compat._ranks import Job
from compat._runtime import by_path
from compat.testing import (
    CASES,
    DEVICES,
    in_span,
    initialise,
    keras_under_test,
    slow,
    span,
)
from compat.testing.automatic import compiled_on_all_devices

from .. import hooks
from ..messages import refusal, told
from ..shared_parts import KerasParts


def train_in_a_new_graph(model, inputs, targets):
    """Train a step on one batch; a graph is recorded when it is first made."""
    _keras.forget_compiled_steps(model)
    if TRAIN_STEP:
        model.train_on_batch(inputs, targets)
    else:  # there TensorFlow 2.0 computes eagerly
        rows = len(inputs[0] if isinstance(inputs, list) else inputs)
        model.fit(inputs, targets, batch_size=rows, verbose=0)


Model = keras_under_test().Model
KERAS3 = hasattr(keras_under_test(), "StatelessScope")
TRAIN_STEP = hasattr(Model, "train_step")  # not in TensorFlow 2.0
# Neither is in TensorFlow 2.3.
COPIES = Model.__reduce__ is not object.__reduce__
XLA = "jit_compile" in inspect.signature(Model.compile).parameters


# Hooks without which replicas read variables on the first device. See test_traffic.
READS = dict.fromkeys(
    ["BaseResourceVariable._read_variable_op", hooks.name_of(*variable_reads.fast_path())],
    "results are the same, and more is sent",
)


class TestTensorFlow2(KerasParts):
    backend = "tensorflow2"
    quick = {"run_eagerly": True}  # type: dict
    product_in_timelines = "MatMul: "
    # Keras 3 cannot train on with the optimizer of an HDF5 file, on one device neither.
    extension = ".keras" if KERAS3 else ".h5"
    lstm_options = {} if TRAIN_STEP else {"unroll": True}
    exempt_hooks = READS
    across_rows = "right" if can_count() else "found"  # the mean is reduced over the devices

    def seed(self, keras, number):
        super(TestTensorFlow2, self).seed(keras, number)
        tf.random.set_seed(number)  # old versions of tf.keras leave that to TensorFlow

    def test_a_strategy_of_the_script_is_kept(self, keras, automatic):
        with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
            model = self.build(keras, "dense")
            self.check_left_alone(model, "it was built under a MirroredStrategy.")

    def test_parts_that_the_script_has_placed_are_kept(self, keras, automatic):
        inputs = keras.layers.Input(shape=(4,))
        with compat.device(1):
            outputs = keras.layers.Dense(3)(inputs)
        model = keras.models.Model(inputs, outputs)
        self.check_left_alone(model, "parts of it were placed on /cpu:1 by device().")

    if not TRAIN_STEP:
        # Nothing is compared.
        test_a_difference_is_found_and_the_model_left_as_it_was = None
        test_a_loss_that_is_rounding_is_no_difference = None
        test_leaves_no_trace_whatever_the_optimizer = None
        test_one_step_in_so_many_is_verified = None
        test_random_numbers_are_those_without_verification = None
        test_statistics_of_replicas_are_no_difference = None

        @span
        def test_first_steps_are_verified(self, keras):
            """They cannot be there: a warning says so, once for each model."""
            model = self.compiled(keras, "dense", parallel=True)
            with told() as texts:
                record = self.verified(model)
                model.train_on_batch(*CASES["dense"].data(45))
            assert texts == [
                "verify=1: {} {} makes no functions of a model's steps that could be verified, so "
                "nothing is verified of model {!r}. Verify it with TensorFlow 2.2 or later.".format(
                    keras.__name__, keras.__version__, model.name
                )
            ]
            assert not any(record.steps.values())

    def placement(self, model, inputs, targets):
        step = functools.partial(train_in_a_new_graph, model, inputs, targets)
        return products(nodes_executed(step))

    def shard_sizes(self, model, inputs, targets):
        """Eagerly, TensorFlow shows each operation with its result, and where that lies."""
        rows = collections.OrderedDict()

        def note(op_type, inputs, attrs, outputs, op_name=None, graph=None):
            if op_type == "MatMul" and graph is None:
                rows.setdefault(short_name(outputs[0].device), outputs[0].shape[0])

        model.run_eagerly = True
        with op_callbacks_added(note):
            model.train_on_batch(inputs, targets)
        assert list(rows) == ["/cpu:0", "/cpu:1", "/cpu:2"]
        return rows.values()


@contextlib.contextmanager
def op_callbacks_added(callback):
    try:
        from tensorflow.python.framework import op_callbacks
    except ImportError:  # TensorFlow 2.0
        from tensorflow.python.eager import execution_callbacks

        execution_callbacks.add_execution_callback(callback)
        yield
        execution_callbacks.clear_execution_callbacks()
        return
    op_callbacks.add_op_callback(callback)
    yield
    op_callbacks.remove_op_callback(callback)


FIRST_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
ROWS = np.random.RandomState(0).normal(size=(45, 8)).astype("float32")
TARGETS = np.random.RandomState(1).normal(size=(45, 4)).astype("float32")


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def regularized(keras):
    """Two layers that add a loss of their outputs within the call."""
    layers = keras.layers
    inputs = layers.Input((8,))
    hidden = layers.Dense(6, activation="tanh", activity_regularizer="l2")(inputs)
    return keras.models.Model(inputs, layers.Dense(4, activity_regularizer="l1")(hidden))


def pair(build):
    """Return the same model twice, the second one parallel."""
    return initialise(build()), compat.parallelize(initialise(build()))


# Layers and models ----------------------------------------------------------------------------


if not TRAIN_STEP:

    @span
    def test_loops_of_tensorflow_20_are_refused(keras):
        layers = keras.layers
        inputs = layers.Input((3, 2))
        model = keras.models.Model(inputs, layers.LSTM(3, name="memory")(inputs))
        assert refusal(compat.UnsupportedError, compat.parallelize, model) == (
            "tensorflow2 cannot run the loop of layer 'memory' on several devices in TensorFlow "
            "{}, which takes loops in functions apart. Make the layer with unroll=True, or use "
            "TensorFlow 2.2 or later.".format(tf.__version__)
        )
        assert "call" not in vars(model)


@pytest.mark.parametrize("seed", in_span([None, 7], [7]))
@pytest.mark.parametrize("eagerly", [False, True])
def test_dropout_masks_differ_between_replicas_and_steps(keras, seed, eagerly):
    layers = keras.layers
    model = keras.models.Sequential([layers.Input((50,)), layers.Dropout(0.5, seed=seed)])
    compat.parallelize(model)

    def step(rows):
        return model(rows, training=True)

    step = step if eagerly else tf.function(step)
    masks = np.concatenate([step(tf.ones((3, 50))).numpy() for _ in range(2)]) > 0
    assert len({tuple(mask) for mask in masks}) == 6


def test_batchnorm_variance_is_the_mean_of_the_replicas_variances(keras):
    layers = keras.layers
    model = keras.models.Sequential(
        [layers.Input((8,)), layers.BatchNormalization(momentum=0.5, name="bn")]
    )
    compat.parallelize(model)
    model.compile("sgd", "mse")
    model.train_on_batch(ROWS, ROWS)
    moving_mean, moving_variance = model.get_layer("bn").get_weights()[2:]
    shards = [ROWS[15 * i : 15 * (i + 1)] for i in range(3)]
    np.testing.assert_allclose(moving_mean, 0.5 * ROWS.mean(axis=0), rtol=1e-4, atol=1e-6)
    expected = 0.5 + 0.5 * np.mean([shard.var(axis=0) for shard in shards], axis=0)
    np.testing.assert_allclose(moving_variance, expected, rtol=1e-4)


@span
def test_inference_sets_no_state(keras):
    layers = keras.layers
    model = keras.models.Sequential([layers.Input((8,)), layers.BatchNormalization()])
    compat.parallelize(model)
    function = tf.function(lambda rows: model(rows)).get_concrete_function(tf.constant(ROWS))
    operations = function.graph.as_graph_def().node
    assert {op.device for op in operations} >= {"/device:CPU:%d" % i for i in range(DEVICES)}
    assert not [op.name for op in operations if "Assign" in op.op]


class Normal:
    """A distribution, which is no tensor and holds some."""

    def __init__(self, mean):
        self.mean = mean


def test_model_that_returns_a_distribution_runs_unsplit_and_says_so(keras):
    class Model(keras.Model):
        def __init__(self):
            super().__init__(name="net")
            self.last = keras.layers.Dense(4)

        def call(self, inputs):
            return Normal(self.last(inputs))

    model = Model()
    expected = model(ROWS).mean
    compat.parallelize(model)
    with told() as texts:
        found = model(ROWS).mean
    np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)
    assert texts == [
        "Model 'net' returns an object that is not a tensor, such as a distribution, and those of "
        "the devices cannot be merged. The model runs unsplit on {}.".format(backend.devices()[0])
    ]


@pytest.mark.row("subclassed models")
def test_subclassed_model_with_dictionaries_and_a_scalar_output(keras):
    """A loop of one's own: a dict in, a dict out, one output without rows, a loss added."""
    layers = keras.layers

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.last = layers.Dense(5, activation="tanh"), layers.Dense(4)

        def call(self, inputs, training=None):
            hidden = self.hidden(inputs["rows"])
            if not KERAS3 and tf.reduce_sum(self.hidden.kernel) > 1e9:  # for autograph
                hidden = hidden * 2.0
            self.add_loss(0.1 * tf.reduce_mean(hidden * hidden))
            return {"rows": self.last(hidden), "mean": tf.reduce_mean(hidden)}

    def build():
        model = Model()
        model({"rows": ROWS[:2]})
        return model

    results = []
    for model in pair(build):
        optimizer = keras.optimizers.SGD(0.1)
        losses = []

        @tf.function
        def step(rows, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                outputs = model({"rows": rows}, training=True)
                loss = tf.reduce_mean(outputs["rows"] ** 2) + outputs["mean"]
                loss += tf.add_n(model.losses)
            weights = [getattr(v, "value", v) if KERAS3 else v for v in model.trainable_variables]
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        for rows in (44, 2):
            losses.append(float(step(tf.constant(ROWS[:rows]))))
        results.append(losses + model.get_weights())
    for expected, found in zip(*results):
        np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)


if KERAS3:

    def test_a_trainer_that_is_no_model_is_left_alone(keras):
        trainer = keras.src.models.model.Trainer  # of this backend

        class Trained(trainer, keras.layers.Dense):
            def __init__(self):
                keras.layers.Dense.__init__(self, 4)
                trainer.__init__(self)

        with compiled_on_all_devices(_api.configured_backend()):
            model = Trained()
            with pytest.warns(compat.CompatWarning, match="because its class is no keras.Model"):
                model.compile("sgd", "mse")
            history = model.fit(ROWS, TARGETS, epochs=2, verbose=0).history["loss"]
        assert history[1] < history[0]


def test_model_without_shapes_before_its_first_batch(keras):
    models = []
    for prepare in (lambda model: model, compat.parallelize):
        layers = [keras.layers.Dense(units, kernel_initializer="ones") for units in (5, 4)]
        model = prepare(keras.models.Sequential(layers))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.train_on_batch(ROWS, TARGETS)
        models.append(model.get_weights()[0])
    np.testing.assert_allclose(*models, rtol=1e-4, atol=1e-6)


def test_replicas_never_nest(keras):
    layers = keras.layers
    inner = regularized(keras)

    def build():
        inputs = layers.Input((8,))
        return keras.models.Model(inputs, layers.Dense(4)(inner(inputs)))

    results = []
    for prepare in (
        lambda outer: None,
        lambda outer: compat.parallelize(inner),
        lambda outer: compat.parallelize(outer),
    ):
        model = initialise(build())
        prepare(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.train_on_batch(ROWS[:16], TARGETS[:16])
        results.append(model.get_weights())
    for other in results[1:]:
        for expected, found in zip(results[0], other):
            np.testing.assert_allclose(expected, found, atol=1e-6)


# Gradients of one's own -----------------------------------------------------------------------


def penalty(model, rows):
    """Return a gradient of a gradient."""
    with tf.GradientTape() as inner:
        inner.watch(rows)
        loss = tf.reduce_sum(model(rows, training=True) ** 2)
    return [tf.reduce_sum(inner.gradient(loss, rows) ** 2)]


def twice(model, rows):
    loss = tf.reduce_sum(model(rows, training=True) ** 2)
    return [loss, loss * 2]


def function_within(model, rows):
    return [tf.reduce_sum(tf.function(model)(rows, training=True) ** 2)]


def loop(model, rows):
    for _ in tf.range(3):
        rows = model(rows, training=True)
    return [tf.reduce_sum(rows**2)]


def branch(model, rows):
    if tf.reduce_sum(rows) > -1e9:
        rows = model(rows, training=True)
    return [tf.reduce_sum(rows**2)]


def weights_of(model):
    return [v.value if KERAS3 else v for v in model.trainable_variables]


# In TensorFlow 2.0 a gradient function in a loop or a branch fails, and says so.
GRADIENTS = [penalty, twice, function_within] + ([loop, branch] if TRAIN_STEP else [])
# Eagerly, loops and branches are Python's.
WAYS = [(each, False) for each in GRADIENTS if each is not twice] + [(penalty, True)]
MORE = [(twice, False), (twice, True), (function_within, True)]


@pytest.mark.parametrize(
    "losses_of, eagerly",
    in_span(WAYS, [(loop if TRAIN_STEP else function_within, False)])
    + [pytest.param(*each, marks=slow) for each in MORE],
)
def test_gradients_of_ones_own(keras, losses_of, eagerly):
    layers = keras.layers
    batch = tf.constant(ROWS[:7])

    def build():
        inputs = layers.Input((8,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        return keras.models.Model(inputs, layers.Dense(8, activation="tanh")(hidden))

    results = []
    for model in pair(build):

        def step(rows, model=model):
            with tf.GradientTape(persistent=losses_of is twice) as tape:
                losses = losses_of(model, rows)
            found = [tape.gradient(loss, weights_of(model)) for loss in losses]
            return sum(found, [])

        if not eagerly:
            step = tf.function(step, input_signature=[tf.TensorSpec((None, 8), tf.float32)])
        results.append([gradient.numpy() for gradient in step(batch)])
    assert min(np.abs(gradient).max() for gradient in results[0]) > 1e-2
    for expected, found in zip(*results):
        np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)


# What cannot be divided -----------------------------------------------------------------------


@span
def test_stateful_model_stays_whole_and_says_so(keras):
    layers = keras.layers
    inputs = layers.Input(batch_shape=(4, 3, 2))
    outputs = layers.LSTM(3, stateful=True, name="memory")(inputs)
    model = keras.models.Model(inputs, outputs, name="remembering")
    plain = model.predict(np.ones((4, 3, 2), "float32"), batch_size=4, verbose=0)
    (layer,) = [layer for layer in model.layers if layer.name == "memory"]
    getattr(layer, "reset_state", getattr(layer, "reset_states", None))()
    with pytest.warns(compat.CompatWarning) as record:
        compat.parallelize(model)
    text = (
        "parallelize() leaves model 'remembering' on /cpu:0: its layer 'memory' is stateful, so "
        "its batches cannot be split. The results are those of one device, and so is the speed."
    )
    assert [str(w.message) for w in record if w.category is compat.CompatWarning] == [text]
    assert record[-1].filename == __file__
    found = model.predict(np.ones((4, 3, 2), "float32"), batch_size=4, verbose=0)
    np.testing.assert_allclose(plain, found)


@span
def test_fixed_batch_size_stays_whole_and_says_so(keras):
    inputs = keras.layers.Input(batch_shape=(5, 8))
    model = keras.models.Model(inputs, keras.layers.Dense(4)(inputs))
    with pytest.warns(compat.CompatWarning, match="its batch size is fixed to 5"):
        compat.parallelize(model)
    model.compile("sgd", "mse")
    model.fit(ROWS, TARGETS, batch_size=5, verbose=0)


if XLA:

    @span
    def test_xla_is_refused(keras):
        model = regularized(keras)
        model.compile("sgd", "mse", jit_compile=True)
        compat.parallelize(model, gpus=1)  # nothing that XLA could not do
        assert refusal(compat.UnsupportedError, compat.parallelize, model) == (
            "tensorflow2 cannot run a model on several devices under jit_compile=True: XLA puts a "
            "whole step on one. Compile the model with jit_compile=False."
        )
        model.compile("sgd", "mse", jit_compile=False)
        compat.parallelize(model)
        if KERAS3:
            with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
                model.compile("sgd", "mse", jit_compile=True)
            assert model.jit_compile is False
            model.train_on_batch(ROWS, TARGETS)
            assert compat.parallelize(model, gpus=1).supports_jit
        else:
            model.compile("sgd", "mse", jit_compile=True)
            with pytest.raises(
                Exception, match="under jit_compile=True: XLA puts a whole step on one"
            ):
                model.train_on_batch(ROWS, TARGETS)

    def test_xla_is_left_alone(keras):
        """Keras 3 does without XLA, and says so."""
        with compiled_on_all_devices(_api.configured_backend()):
            model = regularized(keras)
            told = "doesn't support `jit_compile=True`" if KERAS3 else "under jit_compile=True: XLA"
            with pytest.warns(UserWarning, match=told):
                model.compile("sgd", "mse", jit_compile=True)
            model.train_on_batch(ROWS, TARGETS)


# Copies and files -----------------------------------------------------------------------------


def test_copies_are_independent(keras):
    model = compat.parallelize(regularized(keras))
    model.compile("sgd", "mse")
    model.train_on_batch(ROWS, TARGETS)
    if not COPIES:
        for other in (model, regularized(keras)):
            with pytest.raises(TypeError, match="can't pickle"):
                copy.deepcopy(other)
        return
    expected = np.asarray(model(ROWS))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_allclose(expected, other(ROWS), atol=1e-6)
        assert "call" not in vars(other)
    unbuilt = compat.parallelize(keras.models.Sequential([keras.layers.Dense(4)]))
    assert copy.deepcopy(unbuilt).call.__self__ is not unbuilt


def saved(model, path):
    """Save a model for serving, and return the devices that its graph names."""
    if KERAS3:
        model.export(path, verbose=False)
    else:
        model.save(path, save_format="tf")
    graph = tf.saved_model.load(path).signatures["serving_default"].graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    return {node.device for node in list(graph.node) + nodes}


@slow
def test_saved_model_names_no_device(keras, tmp_path):
    plain, model = pair(lambda: regularized(keras))
    for each in (plain, model):
        each.compile("sgd", "mse")
        each.train_on_batch(ROWS, TARGETS)
    expected, path = np.asarray(model(ROWS)), str(tmp_path / "saved")
    # What plain models name: nothing, and in TensorFlow 2.0 one operation on the first CPU.
    assert saved(model, path) == saved(plain, str(tmp_path / "plain")) <= {"", FIRST_CPU}
    if not KERAS3:
        revived = compat.parallelize(keras.models.load_model(path))
        np.testing.assert_allclose(expected, revived(ROWS), atol=1e-6)
        revived.fit(ROWS, TARGETS, verbose=0)


@span
def test_one_device_leaves_nothing_behind(keras):
    model = regularized(keras)
    before = dict(vars(model))
    assert compat.parallelize(model, gpus=1) is model
    assert vars(model) == before
    compat.parallelize(model)
    assert "call" in vars(model)
    compat.parallelize(model, gpus=1)
    changed = {name for name, value in vars(model).items() if value is not before.get(name)}
    # tf.keras counts assignments of attributes; the steps are forgotten, as before a compile.
    assert changed <= {"_obj_reference_counts_dict"}


@span
def test_ranks_without_horovod_say_what_is_missing(keras, monkeypatch):
    for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv("HOROVOD_" + name, value)
    model = keras.models.Sequential([keras.layers.Dense(1, input_shape=(3,))])
    if TRAIN_STEP:
        assert refusal(compat.NotInstalledError, compat.parallelize, model) == (
            "Ranks of tensorflow train together through Horovod, which is not installed. Build it "
            "where tensorflow is: HOROVOD_WITH_GLOO=1 HOROVOD_WITH_TENSORFLOW=1 pip install "
            "--no-build-isolation --no-cache-dir horovod==0.28.1 (that needs a C++ compiler, "
            "setuptools<60 and cmake<4). Or start the script without a launcher (compat run "
            "without -n). From TensorFlow 2.4 on, compat run -n 2 needs no Horovod."
        )
    else:
        assert refusal(compat.UnsupportedError, compat.parallelize, model) == (
            "tensorflow2 cannot train a model of {} {} as one of several ranks. Use tf.keras from "
            "TensorFlow 2.4, or Keras 3.".format(keras.__name__, keras.__version__)
        )
    # TensorFlow's own workers do without.
    command = by_path.command("_ranks.launch.starter") + ["2", "--cluster"]
    assert backend.launcher(Job(2, sys.executable, {})) == command
