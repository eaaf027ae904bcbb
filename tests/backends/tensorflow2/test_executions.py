"""TensorFlow 2: whether all devices were used, as TensorFlow itself reports it."""

import functools
import itertools
import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._api import use_checks
from compat._backends.tensorflow2 import backend, executions
from compat.testing import DEVICES, in_span, initialise, keras_under_test, slow, span

from .. import hooks
from ..messages import told
from .test_contract import READS

layers = keras_under_test().layers
ROWS = np.random.RandomState(0).normal(size=(11, 8)).astype("float32")
TARGETS = np.random.RandomState(1).normal(size=(11, 4)).astype("float32")


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def dense(keras, **options):
    parts = [layers.Input((8,)), layers.Dense(5, activation="tanh"), layers.Dense(4)]
    model = initialise(keras.models.Sequential(parts))
    model.compile("sgd", "mse", **options)
    return model


def steps(model):
    model.fit(ROWS, TARGETS, batch_size=4, epochs=2, verbose=0)
    model.evaluate(ROWS, TARGETS, verbose=0)
    model.predict(ROWS, verbose=0)


@span
@pytest.mark.parametrize("eagerly", [False, True])
def test_the_first_step_is_recorded_and_no_other(keras, eagerly, monkeypatch):
    """Also what runs eagerly; afterwards nothing is recorded."""
    recorders, noted = [], []
    note = executions.Recorder._note

    class Recorder(executions.Recorder):
        def __init__(self, devices):
            super().__init__(devices)
            recorders.append(self)

        def _note(self, *given):
            noted.append(self)
            note(self, *given)

    monkeypatch.setattr(executions, "Recorder", Recorder)
    model = compat.parallelize(dense(keras, run_eagerly=eagerly))
    with told() as texts:
        steps(model)
    assert not texts and len(recorders) == 3
    for each in recorders:
        assert list(each.counts) == ["/cpu:0", "/cpu:1", "/cpu:2"]
        assert not each.counts.is_known or all(each.counts.values())
    assert recorders[0].counts.is_known
    noted.clear()
    steps(model)
    assert not noted or not recorders[1].counts.is_known


def test_a_device_that_executes_nothing_is_named(keras):
    """TensorFlow runs what is placed on a GPU that is not there on the CPU."""
    model = dense(keras)
    devices = ["/cpu:0", "/cpu:1", "/gpu:0"]
    compat.parallelize(model)
    backend.parallelize(model, devices)
    use_checks.watch(backend, model, model.name, devices)
    with told() as texts:
        model.fit(ROWS, TARGETS, batch_size=4, epochs=2, verbose=0)
    assert texts == [
        "In the first training step of model {!r} (fit()) the framework executed no operation on "
        "/gpu:0, to which rows were given. The session, context or mesh in use has fewer devices "
        "than configure_gpu() has set up, or places operations elsewhere. Let compat configure it: "
        "leave out device_count, visible_device_list and the like.".format(model.name)
    ]
    compat.parallelize(model, gpus=1)


def test_a_trace_of_the_script_keeps_its_graph(keras, tmp_path):
    """``tf.summary.trace_on()`` has the runtime record as well, and what was taken is lost."""
    model = compat.parallelize(dense(keras))
    writer = tf.summary.create_file_writer(str(tmp_path))
    with warnings.catch_warnings(), writer.as_default():
        warnings.simplefilter("error", compat.CompatWarning)
        tf.summary.trace_on(graph=True)
        model.predict(ROWS, verbose=0)
        tf.summary.trace_export("predict", step=0)
    (events,) = tmp_path.iterdir()
    assert b"MatMul" in events.read_bytes()


# Loops of the user's own ------------------------------------------------------------------------


class Native(tf.Module):
    def __init__(self):
        super().__init__()
        self.kernel = tf.Variable(np.ones((8, 4), "float32"))

    def __call__(self, rows):
        return tf.tanh(rows @ self.kernel)


class OwnStep(keras_under_test().Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)
        self.dense.build((None, 8))
        self.built = True

    def call(self, rows):
        return self.dense(rows)

    def train_step(self, data):
        trained(self, *data)
        return {"loss": 0.0}


def variables_of(model):
    """Return the model's trainable variables as TensorFlow's, which those of Keras 3 contain."""
    return [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]


def trained(model, rows, targets, call=None):
    weights = variables_of(model)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(((call or model)(rows) - targets) ** 2)
    for weight, gradient in zip(weights, tape.gradient(loss, weights)):
        weight.assign_sub(0.1 * gradient)


def predicted(model, rows, targets):
    return model(rows)


def program(build, step, in_graph):
    def run():
        model = compat.parallelize(build())
        function = tf.function(lambda *data: step(model, *data)) if in_graph else None
        function = function or (lambda *data: step(model, *data))
        for _ in range(2):
            function(tf.constant(ROWS), tf.constant(TARGETS))

    return run


def keras_model():
    return dense(keras_under_test())


@pytest.mark.parametrize(
    "build, step, in_graph",
    in_span(
        itertools.product([keras_model, Native], [trained, predicted], [False, True]),
        [
            (keras_model, trained, False),
            (keras_model, predicted, True),
            (Native, trained, True),
            (Native, predicted, False),
        ],
    ),
)
def test_a_loop_that_reaches_no_replica_is_never_silent(keras, build, step, in_graph):
    """And one that reaches them is."""
    run = program(build, step, in_graph)
    with told() as texts:
        run()
    assert not texts
    found = hooks.left_out_one_by_one(run, READS)
    assert found and None not in found.values(), found


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_loop_that_calls_layers_by_themselves_is_told_of(keras, in_graph):
    def call(rows):
        for layer in model.layers:
            rows = layer(rows)
        return rows

    model = compat.parallelize(keras_model())
    step = functools.partial(trained, model, call=call)
    with told() as texts:
        (tf.function(step) if in_graph else step)(tf.constant(ROWS), tf.constant(TARGETS))
    assert texts == [
        "In the first training step of model {!r} no batch was split over /cpu:0, /cpu:1, /cpu:2. "
        "What parallelize() put in place of model.call() was not called. Another library has "
        "replaced it, or this version of the framework takes another way: call parallelize() after "
        "such libraries have changed the model, and report it with the output of `python -m compat "
        "env` if there is none.".format(model.name)
    ]


if hasattr(keras_under_test().Model, "train_step"):

    def test_hooks_are_left_out_of_a_train_step(keras):
        options = {"jit_compile": False} if hasattr(keras, "StatelessScope") else {}

        def run():
            model = compat.parallelize(OwnStep())
            model.compile("sgd", "mse", **options)
            model.fit(ROWS, TARGETS, batch_size=4, verbose=0)

        found = hooks.left_out_one_by_one(run, READS)
        assert found and None not in found.values(), found


# In a process of its own. Versions between these two do the same.
of_two_versions = (lambda test: test) if tf.__version__[:4] in ("2.0.", "2.15") else slow


@span
@of_two_versions
def test_threads_execute_operations_while_others_take_what_was_recorded(run):
    """A segmentation fault of TensorFlow 2.0 where the runtime recorded times as well."""
    program = """
    import threading
    import tensorflow as tf
    from compat._backends.tensorflow2 import profiler, run_metadata

    ends = threading.Event()

    def execute():
        while not ends.is_set():
            rows = tf.function(lambda rows: 0.1 * tf.matmul(rows, rows))(tf.ones((8, 8)))
            for _ in range(50):
                rows = 0.1 * tf.matmul(rows, rows)

    threads = [threading.Thread(target=execute) for _ in range(8)]
    with run_metadata.recorded() as records:
        for each in threads:
            each.start()
        for _ in range(4000):
            run_metadata.collect()
        ends.set()
        for each in threads:
            each.join()
    print(profiler.products(run_metadata.nodes_of(records)))
    """
    assert run(program).startswith("{'/cpu:0': (")
