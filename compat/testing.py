"""The tests that any backend must pass, and the models they train.

A backend's test file is mostly one subclass::

    from compat.testing import BackendContract

    class TestMyBackend(BackendContract):
        backend = "mybackend"

        def placement(self, model, inputs, targets):
            ...

Run it with the environment variable ``COMPAT_TEST_KERAS`` set to the Keras under test:
``keras`` (the default), ``tensorflow.keras``, ``tf_keras``, or ``tensorflow.compat.v1.keras``
for TensorFlow 2 in v1 mode. Needs pytest and numpy.

Every test is the whole contract. ``-m span`` runs the span contract, a part that takes about a
minute and sees what differs between versions of one backend; register the marker in your pytest's
configuration.
"""

import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest

import compat
from compat import _registry, _selftest, _verification

DEVICES = 3

# (global batch, samples): even, uneven, a last partial batch of 13, fewer rows than devices, one.
# Two steps or three, so that an optimizer's state counts.
BATCHES = [(64, 128), (61, 122), (16, 45), (2, 6), (1, 3)]
UNEVEN = BATCHES[1:2]

# Rows of a batch, and how many of them each of the three devices computes: at least one.
SHARDS = {64: [21, 21, 22], 61: [20, 20, 21], 14: [4, 5, 5], 2: [1, 1, 1], 1: [1, 1, 1]}

#: Marks the tests of the span contract.
span = pytest.mark.span


def keras_under_test():
    """The Keras that ``COMPAT_TEST_KERAS`` names; a missing one is an error, never a skip."""
    name = os.environ.get("COMPAT_TEST_KERAS", "keras")
    if name.startswith("tensorflow."):  # attributes; not all of them can be imported
        return functools.reduce(getattr, name.split(".")[1:], importlib.import_module("tensorflow"))
    return importlib.import_module(name)


# Models ---------------------------------------------------------------------------------------


class Case:
    """A model to build, and data to train it on.

    ``build(keras)`` gives a model not compiled; ``loss`` goes to its ``compile``; ``data(n)``
    gives inputs and targets of n rows.
    """

    def __init__(self, name, build, loss, data):
        self.name = name
        self.build = build
        self.loss = loss
        self.data = data


def _dense(keras):
    layers = keras.layers
    return keras.models.Sequential(
        [
            layers.Dense(
                16, activation="relu", input_shape=(8,), kernel_regularizer="l2", name="hidden"
            ),
            layers.Dense(4, activation="softmax", name="classes"),
        ],
        name="dense_model",
    )


def _one_hot(labels, classes):
    return np.eye(classes, dtype="float32")[labels]


def _dense_data(rows):
    random = np.random.RandomState(rows)
    return (
        random.normal(size=(rows, 8)).astype("float32"),
        _one_hot(random.randint(4, size=rows), 4),
    )


def _convolutional(keras):
    layers = keras.layers
    image = layers.Input(shape=(8, 8, 2), name="image")
    x = layers.Conv2D(4, 3, activation="relu", padding="same", name="conv")(image)
    x = layers.MaxPooling2D(2)(x)
    x = layers.Flatten()(x)
    return keras.models.Model(image, layers.Dense(3, activation="softmax", name="classes")(x))


def _convolutional_data(rows):
    random = np.random.RandomState(rows)
    return (
        random.normal(size=(rows, 8, 8, 2)).astype("float32"),
        random.randint(3, size=(rows, 1)).astype("float32"),
    )


def _multi(keras):
    """Two inputs, a layer that both share, a nested model, two outputs with names."""
    layers = keras.layers
    left, right = layers.Input(shape=(5,), name="left"), layers.Input(shape=(5,), name="right")
    inner_input = layers.Input(shape=(6,))
    inner_output = layers.Dense(6, activation="tanh")(inner_input)
    inner = keras.models.Model(inner_input, inner_output, name="inner")
    shared = layers.Dense(6, activation="tanh", name="shared")
    joined = layers.concatenate([inner(shared(left)), shared(right)])
    score = layers.Dense(1, name="score")(joined)
    same = layers.Dense(1, activation="sigmoid", name="same")(joined)
    return keras.models.Model([left, right], [score, same])


def _multi_data(rows):
    random = np.random.RandomState(rows)
    left, right = random.normal(size=(2, rows, 5)).astype("float32")
    score = (left * right).sum(axis=1, keepdims=True)
    return [left, right], [score, (score > 0).astype("float32")]


def _recurrent(keras, **lstm_options):
    layers = keras.layers
    words = layers.Input(shape=(6,), name="words")
    x = layers.Embedding(20, 5, name="embedding")(words)
    x = layers.LSTM(7, name="lstm", **lstm_options)(x)
    return keras.models.Model(words, layers.Dense(1, activation="sigmoid", name="mood")(x))


def _recurrent_data(rows):
    random = np.random.RandomState(rows)
    words = random.randint(1, 20, size=(rows, 6)).astype("float32")
    return words, (words.sum(axis=1, keepdims=True) > 60).astype("float32")


CASES = {
    case.name: case
    for case in [
        Case("dense", _dense, "categorical_crossentropy", _dense_data),
        Case("conv", _convolutional, "sparse_categorical_crossentropy", _convolutional_data),
        Case("multi", _multi, {"score": "mse", "same": "binary_crossentropy"}, _multi_data),
        Case("lstm", _recurrent, "binary_crossentropy", _recurrent_data),
    ]
}

# Cases and optimizers: SGD shows the scale of a gradient, which Adam hides; Adam has more state.
TRIALS = list(itertools.product(sorted(CASES), ("sgd", "adam")))
SPAN_TRIALS = [("dense", "adam"), ("lstm", "sgd"), ("multi", "sgd")]


def contract_of(config):
    """The contract that this run of pytest tests: "span", or "whole"."""
    return "span" if config.getoption("-m") == "span" else "whole"


def in_span(values, chosen):
    """Values for ``parametrize``, of which those chosen are in the span contract, too."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[span] if value in chosen else [],
        )
        for value in values
    ]


def initialise(model, seed=0):
    """Set all weights from numpy's generator, the same on every Keras."""
    random = np.random.RandomState(seed)
    model.set_weights(
        [(random.normal(size=w.shape) * 0.3).astype("float32") for w in model.get_weights()]
    )
    return model


def optimizer(keras, name):
    """SGD with momentum, or Adam, whatever this Keras calls the learning rate."""
    make = {
        "sgd": lambda **rate: keras.optimizers.SGD(momentum=0.9, **rate),
        "adam": lambda **rate: keras.optimizers.Adam(**rate),
    }[name]
    rate = {"sgd": 0.05, "adam": 0.01}[name]
    try:
        return make(learning_rate=rate)
    except TypeError:  # Keras before 2.3
        return make(lr=rate)


def largest_difference(first, second):
    """The largest absolute difference between two lists of arrays."""
    assert len(first) == len(second)
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second) if np.size(a))


# The contract ---------------------------------------------------------------------------------


class BackendContract:
    """Subclass this in the test file of a backend, and set the attributes below."""

    #: The backend's name.
    backend = ""
    #: How far weights may be from one device's after some steps.
    tolerance = 1e-5
    #: Optimizers under which the plain model itself repeats.
    optimizers = ("sgd", "adam")
    #: Keyword arguments of the LSTM layer, for backends with a trap there.
    lstm_options = {}  # type: dict
    #: The endings of files of whole models, and of weights.
    extension, weights_extension = ".h5", ".weights.h5"
    #: What a program of its own begins with, where it imports the framework.
    prelude = ""

    # What a subclass must say ---------------------------------------------------------------

    def placement(self, model, inputs, targets):
        """Where one training step ran, from the framework's own record.

        Returns:
            For each device that took part ``(forward, backward)``: numbers of operations of
            the model's layers (matrix products, convolutions) that ran there.
        """
        raise NotImplementedError

    def shard_sizes(self, model, inputs, targets):
        """How many rows each device computed in one training step, from the same record."""
        raise NotImplementedError

    def devices_of(self, model, inputs, targets):
        """The devices where one training step ran, forward and backward, sorted."""
        placement = self.placement(model, inputs, targets)
        assert all(forward and backward for forward, backward in placement.values()), placement
        return sorted(placement)

    # Fixtures -------------------------------------------------------------------------------

    @pytest.fixture(scope="class")
    def configuration(self):
        """Three simulated devices; the same call again does nothing, so every class may ask."""
        return compat.configure_gpu(simulate=DEVICES)

    @pytest.fixture
    def keras(self, configuration):
        return keras_under_test()

    def build(self, keras, name):
        """A model of the zoo with known weights, not compiled."""
        case = CASES[name]
        options = self.lstm_options if name == "lstm" else {}
        return initialise(case.build(keras, **options))

    def compiled(self, keras, name, optimizer_name="sgd", parallel=False):
        model = self.build(keras, name)
        if parallel:
            assert compat.parallelize(model) is model
        model.compile(optimizer(keras, optimizer_name), CASES[name].loss)
        return model

    @pytest.fixture
    def batches(self, request):
        """All batches; in the span contract the uneven one, since models compile for each size."""
        return UNEVEN if contract_of(request.config) == "span" else BATCHES

    def close(self, first, second, tolerance=None):
        difference = largest_difference(first, second)
        assert difference <= (tolerance or self.tolerance), difference

    # The backend itself -----------------------------------------------------------------------

    @span
    def test_is_in_the_directory(self):
        assert self.backend in _registry.names()
        backend = _registry.load(self.backend)
        assert backend.name == self.backend
        assert backend.framework and backend.distributions and backend.extra

    @span
    def test_environ_is_pure(self):
        from compat._devices import Devices
        from compat._settings import Settings

        before, environ = dict(os.environ), {"PATH": "/bin"}
        result = _registry.load(self.backend).environ(Settings(Devices(simulated=2)), environ)
        assert all(isinstance(name, str) for name in result)
        assert environ == {"PATH": "/bin"}
        assert dict(os.environ) == before

    @span
    def test_configuration_reports_three_devices(self, configuration):
        assert configuration.backend == self.backend
        assert len(configuration.devices) == DEVICES
        assert len(set(configuration.devices)) == DEVICES
        report = str(configuration)
        assert self.backend in report
        assert "{} simulated".format(DEVICES) in report

    @span
    def test_same_configuration_again_is_the_same_object(self, configuration):
        assert compat.configure_gpu(simulate=DEVICES) is configuration
        with pytest.raises(compat.AlreadyConfiguredError):
            compat.configure_gpu(simulate=DEVICES - 1)

    # The command line -------------------------------------------------------------------------

    def command(self, program):
        """Run a program in a process of its own; its exit status and what it printed."""
        framework = _registry.load(self.backend).framework
        completed = subprocess.run(
            [sys.executable, "-c", program],
            env=dict(os.environ, KERAS_BACKEND=framework),
            stdout=subprocess.PIPE,
            universal_newlines=True,
        )
        return completed.returncode, completed.stdout

    @span
    def test_env_command_finds_the_backend_and_imports_nothing(self):
        status, out = self.command(
            "import sys\n"
            "from compat import __main__\n"
            "status = __main__.main(['env'])\n"
            "assert not {'keras', 'numpy', 'tensorflow', 'theano', 'mxnet'} & set(sys.modules)\n"
            "sys.exit(status)\n"
        )
        assert status == 0, out
        assert "backend     {} (".format(self.backend) in out
        assert out.endswith("problems    none\n")


class ParallelContract(BackendContract):
    """What a backend that runs several devices in one process must pass besides."""

    #: What becomes of an operation across the rows of a batch: "right", or "found" and refused.
    across_rows = "found"

    def test_test_command_compares_step_by_step(self):
        status, out = self.command(
            self.prelude
            + "import sys\n"
            "from compat import __main__, _selftest\n"
            "assert __main__.main(['test', '--devices', '{}', '--simulate']) == 0\n"
            "_selftest.BATCHES, _selftest.TOLERANCE = (13,), -1.0\n"
            "sys.exit(__main__.main(['test', '--devices', '{}', '--simulate']))\n".format(
                DEVICES, DEVICES
            )
        )
        assert status == 1, out
        assert "{} simulated on the CPU".format(DEVICES) in out
        steps = [line.split()[:2] for line in out.splitlines() if line.startswith("   ")]
        rows = [[str(step), str(rows)] for step, rows in enumerate(_selftest.BATCHES, 1)]
        rows += [["1", "13"]]  # of one row for each device XLA makes no products
        assert [step for step in steps if step in rows] == rows
        assert "\nThe same: no weight ever differs by more than 1e-05.\n" in out
        assert "\nNOT the same: a weight differs by more than -1.\n" in out
        ran = re.findall(r"^  \S+: (\d+) \+ (\d+)$", out, re.MULTILINE)
        assert len(ran) == 2 * DEVICES and len(set(ran)) == 1 and "0" not in ran[0], ran

    def test_test_command_fails_where_one_device_worked(self):
        status, out = self.command(
            self.prelude
            + "import sys\n"
            "from compat import _registry, _selftest\n"
            "from compat import __main__\n"
            "_selftest.BATCHES = (13,)\n"
            "backend = _registry.load({!r})\n"
            "type(backend).parallelize = lambda self, model, devices: model\n"
            "sys.exit(__main__.main(['test', '--devices', '{}', '--simulate']))\n".format(
                self.backend, DEVICES
            )
        )
        assert status == 1, out
        assert "\nThe same: no weight ever differs" in out
        assert re.search(r"\nNOT on all devices: [01] of {} worked.\n$".format(DEVICES), out), out

    # The same numbers -------------------------------------------------------------------------

    @pytest.mark.parametrize("name, optimizer_name", in_span(TRIALS, SPAN_TRIALS))
    def test_trains_to_the_numbers_of_one_device(self, keras, batches, name, optimizer_name):
        if optimizer_name not in self.optimizers:
            return self.check_optimizer_does_not_repeat(keras, name, optimizer_name)
        plain = self.compiled(keras, name, optimizer_name)
        parallel = self.compiled(keras, name, optimizer_name, parallel=True)
        start = plain.get_weights()
        if optimizer_name != "sgd":  # the gradients are the same, whichever optimizer takes them
            batches = UNEVEN
        for batch, samples in batches:
            inputs, targets = CASES[name].data(samples)
            losses = []
            for model in (plain, parallel):
                model.set_weights(start)
                history = model.fit(
                    inputs, targets, batch_size=batch, epochs=1, shuffle=False, verbose=0
                )
                losses.append(history.history["loss"])
            assert largest_difference(start, plain.get_weights()) > 1e-3, "nothing was trained"
            self.close(plain.get_weights(), parallel.get_weights())
            np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4, atol=1e-5)

    def check_optimizer_does_not_repeat(self, keras, name, optimizer_name):
        """Left out of ``optimizers``: a subclass shows that the plain model differs by itself."""
        raise NotImplementedError

    @pytest.mark.parametrize("name", in_span(sorted(CASES), ["dense"]))
    def test_evaluates_and_predicts_what_one_device_does(self, keras, batches, name):
        plain = self.compiled(keras, name)
        parallel = self.compiled(keras, name, parallel=True)
        for batch, samples in batches:
            inputs, targets = CASES[name].data(samples)
            results = [
                (
                    np.ravel(model.evaluate(inputs, targets, batch_size=batch, verbose=0)),
                    model.predict(inputs, batch_size=batch, verbose=0),
                )
                for model in (plain, parallel)
            ]
            np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
            expected, predicted = (r[1] if isinstance(r[1], list) else [r[1]] for r in results)
            assert [p.shape for p in predicted] == [e.shape for e in expected]
            self.close(expected, predicted, 1e-6)

    # Really on three devices ------------------------------------------------------------------

    @span
    @pytest.mark.parametrize("name", sorted(CASES))
    def test_forward_and_backward_run_on_every_device(self, keras, configuration, name):
        model = self.compiled(keras, name, parallel=True)
        inputs, targets = CASES[name].data(61)
        placement = self.placement(model, inputs, targets)
        assert sorted(placement) == sorted(configuration.devices)
        for device, (forward, backward) in placement.items():
            assert forward > 0, (device, placement)
            assert backward > 0, (device, placement)
        # No device runs more than its replica: nothing was computed undivided.
        assert len(set(placement.values())) == 1, placement

    @pytest.mark.parametrize("samples", in_span(sorted(SHARDS), [14, 2]))
    def test_batch_is_split_evenly(self, keras, samples):
        model = self.compiled(keras, "dense", parallel=True)
        inputs, targets = CASES["dense"].data(samples)
        assert list(self.shard_sizes(model, inputs, targets)) == SHARDS[samples]

    # The same object --------------------------------------------------------------------------

    @span
    def test_object_and_its_face_stay(self, keras):
        model = self.build(keras, "multi")
        before = list(model.layers), list(model.weights), list(model.output_names)
        summary = self.summary(model)
        assert compat.parallelize(model) is model
        assert (list(model.layers), list(model.output_names)) == (before[0], before[2])
        assert [id(w) for w in model.weights] == [id(w) for w in before[1]]
        assert (
            model.get_layer("shared")
            is before[0][[layer.name for layer in before[0]].index("shared")]
        )
        assert self.summary(model) == summary

    def summary(self, model):
        lines = []
        model.summary(print_fn=lambda line, **_: lines.append(line))
        return lines

    def test_moves_to_other_devices_and_back_to_one(self, keras, configuration):
        inputs, targets = CASES["dense"].data(61)
        plain = self.compiled(keras, "dense")
        model = self.compiled(keras, "dense", parallel=True)
        for devices in ([2, 0], [0, 1, 2], [1], [1, 2], [0]):
            assert compat.parallelize(model, gpus=devices) is model
            for each in (plain, model):
                each.fit(inputs, targets, batch_size=16, epochs=1, shuffle=False, verbose=0)
            self.close(plain.get_weights(), model.get_weights())
            if len(devices) > 1:
                names = sorted(configuration.devices[i] for i in devices)
                assert sorted(self.placement(model, inputs, targets)) == names
                # The step that was recorded has trained, too.
                plain.train_on_batch(inputs, targets)

    @span
    def test_already_compiled_and_fitted(self, keras):
        inputs, targets = CASES["dense"].data(61)
        plain, model = self.compiled(keras, "dense"), self.compiled(keras, "dense")
        for epoch in range(3):
            for each in (plain, model):
                each.fit(inputs, targets, batch_size=16, epochs=1, shuffle=False, verbose=0)
            if epoch == 0:  # the optimizer has its momentum by now, and must keep it
                assert compat.parallelize(model) is model
        self.close(plain.get_weights(), model.get_weights())
        assert len(self.placement(model, inputs, targets)) == DEVICES

    def test_function_that_builds_the_model(self, keras):
        model = compat.parallelize(lambda: self.build(keras, "dense"))
        model.compile(optimizer(keras, "sgd"), CASES["dense"].loss)
        assert len(self.placement(model, *CASES["dense"].data(61))) == DEVICES

    # What models and losses there are ---------------------------------------------------------

    def train_both(self, keras, build, loss, inputs, targets, batch=16, steps=3, **fit_options):
        """Train one model plain and one parallel from the same weights, and compare."""
        models = []
        for parallel in (False, True):
            model = initialise(build())
            if parallel:
                compat.parallelize(model)
            model.compile(optimizer(keras, "sgd"), loss)
            model.fit(
                inputs, targets, batch_size=batch, epochs=steps, shuffle=False, verbose=0,
                **fit_options
            )  # fmt: skip
            models.append(model)
        self.close(models[0].get_weights(), models[1].get_weights())
        return models

    @span
    def test_sample_weights(self, keras):
        inputs, targets = CASES["dense"].data(45)
        weights = np.random.RandomState(3).uniform(size=45).astype("float32")
        weights[::4] = 0
        self.train_both(
            keras, lambda: self.build(keras, "dense"), CASES["dense"].loss, inputs, targets,
            sample_weight=weights,
        )  # fmt: skip

    def test_class_weights(self, keras):
        inputs, targets = CASES["dense"].data(45)
        self.train_both(
            keras, lambda: self.build(keras, "dense"), CASES["dense"].loss, inputs, targets,
            class_weight={0: 1.0, 1: 5.0, 2: 0.0, 3: 2.0},
        )  # fmt: skip

    def test_loss_over_the_whole_batch(self, keras):
        """A loss that compares each row with all others, as contrastive losses do."""
        inputs, targets = CASES["dense"].data(45)
        self.train_both(
            keras, lambda: self.build(keras, "dense"), self.contrastive(keras), inputs, targets
        )

    def contrastive(self, keras):
        K = keras.ops if hasattr(keras, "ops") else keras.backend

        def loss(y_true, y_pred):
            centre = K.mean(y_pred, axis=0, keepdims=True)
            return K.mean(K.square(y_pred - centre - y_true), axis=-1) * K.mean(y_pred * y_pred)

        return loss

    def test_siamese_outputs_of_one_shared_layer(self, keras):
        def build():
            layers = keras.layers
            left, right = layers.Input(shape=(5,)), layers.Input(shape=(5,))
            shared = layers.Dense(3, name="shared")
            return keras.models.Model([left, right], [shared(left), shared(right)])

        (left, right), _ = CASES["multi"].data(45)
        plain, parallel = self.train_both(
            keras, build, "mse", [left, right], [left[:, :3], right[:, :3]]
        )
        assert list(plain.output_names) == list(parallel.output_names)

    def test_masked_sequence_loss(self, keras):
        """Masked steps count neither in the loss nor in the gradient."""

        def build():
            layers = keras.layers
            steps = layers.Input(shape=(6, 4))
            x = layers.Masking()(steps)
            x = layers.LSTM(5, return_sequences=True, **self.lstm_options)(x)
            return keras.models.Model(steps, layers.TimeDistributed(layers.Dense(2))(x))

        random = np.random.RandomState(5)
        inputs = random.normal(size=(45, 6, 4)).astype("float32")
        for row, length in enumerate(random.randint(1, 7, size=45)):
            inputs[row, length:] = 0
        targets = random.normal(size=(45, 6, 2)).astype("float32")
        self.train_both(keras, build, "mse", inputs, targets)

    @span
    def test_batchnorm_makes_one_moving_average_update(self, keras):
        """The moving mean is one device's; the variance is the mean of the replicas' variances."""

        def build():
            layers = keras.layers
            return keras.models.Sequential(
                [layers.BatchNormalization(momentum=0.5, input_shape=(8,)), layers.Dense(4)]
            )

        inputs, targets = CASES["dense"].data(61)
        means = []
        for parallel in (False, True):
            model = build()
            if parallel:
                compat.parallelize(model)
            model.compile(optimizer(keras, "sgd"), "mse")
            model.train_on_batch(inputs * 2 + 1, targets)
            means.append(model.get_weights()[2])
            assert np.abs(means[-1]).max() > 0.1
        np.testing.assert_allclose(means[0], means[1], rtol=1e-4, atol=1e-5)

    # Verification -----------------------------------------------------------------------------

    def verified(self, model, steps=1):
        """Have the model's first steps verified, and return the record of what was."""
        devices = compat._api.configured_backend().devices()
        verification = _verification.Verification(model.name, devices, steps)
        _registry.load(self.backend).verify(model, verification)
        return verification.record

    @pytest.mark.parametrize("name", in_span(sorted(CASES), ["dense"]))
    def test_first_steps_are_verified(self, keras, name):
        """They leave the model as steps do that are not, and say what they compared."""
        inputs, targets = CASES[name].data(45)
        models = [self.compiled(keras, name, parallel=True) for _ in range(2)]
        record = self.verified(models[1], 2)
        for model in models:
            model.fit(
                inputs, targets, batch_size=16, epochs=1, shuffle=False, verbose=0,
                validation_data=(inputs, targets),
            )  # fmt: skip
            model.predict(inputs, verbose=0)
        assert record.steps == {"train": 2, "evaluate": 1, "predict": 1}
        assert record.compared > 2 * len(models[0].get_weights())
        assert not record.incomparable
        assert 0 < record.largest[0] < 1e-3  # the same work in another order
        self.close(models[0].get_weights(), models[1].get_weights())

    def test_a_step_that_cannot_be_compared_is_taken_all_the_same(self, keras):
        """Its weights and slots are those of a step that nobody looked at."""

        def build():
            layers = keras.layers
            return keras.models.Sequential(
                [layers.BatchNormalization(momentum=0.5, input_shape=(8,)), layers.Dense(4)]
            )

        inputs, targets = CASES["dense"].data(45)
        models = [build(), build()]
        models[1].set_weights(models[0].get_weights())
        for model in models:
            compat.parallelize(model)
            model.compile(optimizer(keras, "sgd"), "mse")
        self.verified(models[1])
        for model in models:
            for _ in range(3):
                model.train_on_batch(inputs, targets)
        self.close(models[0].get_weights(), models[1].get_weights())

    @span
    def test_a_difference_is_found_and_the_model_left_as_it_was(self, keras, monkeypatch):
        """A weight that a step on several devices changes by a tenth too much."""
        inputs, targets = CASES["dense"].data(45)
        model = self.compiled(keras, "dense", parallel=True)
        model.train_on_batch(inputs, targets)
        start = model.get_weights()
        self.verified(model)
        difference = self.disturb(monkeypatch)
        with pytest.raises(compat.ResultsDifferError) as caught:
            model.train_on_batch(inputs, targets)
        assert "model {!r} does a training step on 3 devices".format(model.name) in str(
            caught.value
        )
        assert difference and difference[0] in str(caught.value)
        self.close(start, model.get_weights(), 1e-12)
        model.train_on_batch(inputs, targets)  # it can be trained on
        assert largest_difference(start, model.get_weights()) > 1e-4

    def disturb(self, monkeypatch):
        """Change a weight after each step on several devices; the list gets its label."""
        labels = []
        verify = _verification.Comparison.compare

        def compare(comparison, found):
            label = sorted(label for label in found if label.startswith("weight"))[0]
            change = found[label] - comparison.start[label]
            labels.append(label)
            verify(comparison, dict(found, **{label: found[label] + 0.1 * change}))

        monkeypatch.setattr(_verification.Comparison, "compare", compare)
        return labels

    @span
    def test_operation_across_rows_is_right_or_found(self, keras):
        """Each row less the mean of all rows of the batch, which no replica sees."""
        K = keras.ops if hasattr(keras, "ops") else keras.backend

        def build():
            layers = keras.layers
            rows = layers.Input(shape=(8,))
            hidden = layers.Dense(6, name="hidden")(rows)
            centred = layers.Lambda(lambda x: x - K.mean(x, axis=0, keepdims=True))(hidden)
            return keras.models.Model(rows, layers.Dense(4, name="classes")(centred))

        inputs, targets = CASES["dense"].data(45)
        plain, parallel = initialise(build()), initialise(build())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", compat.CompatWarning)
                compat.parallelize(parallel)
                for model in (plain, parallel):
                    model.compile(optimizer(keras, "sgd"), "mse")
                self.verified(parallel)
                for model in (plain, parallel):
                    model.train_on_batch(inputs, targets)
        except (compat.ResultsDifferError, compat.UnsupportedError, compat.CompatWarning) as error:
            assert self.across_rows == "found", error
        else:
            assert self.across_rows == "right"
            self.close(plain.get_weights(), parallel.get_weights())

    # Ways to train ----------------------------------------------------------------------------

    @span
    def test_train_on_batch_and_validation_data(self, keras):
        inputs, targets = CASES["dense"].data(45)
        plain = self.compiled(keras, "dense")
        parallel = self.compiled(keras, "dense", parallel=True)
        for samples in (45, 7, 2, 1):
            losses = [
                model.train_on_batch(inputs[:samples], targets[:samples])
                for model in (plain, parallel)
            ]
            np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
        histories = [
            model.fit(
                inputs[:32], targets[:32], validation_data=(inputs[32:], targets[32:]),
                batch_size=8, epochs=2, shuffle=False, verbose=0,
            ).history
            for model in (plain, parallel)
        ]  # fmt: skip
        np.testing.assert_allclose(
            histories[0]["val_loss"], histories[1]["val_loss"], rtol=1e-4, atol=1e-6
        )
        self.close(plain.get_weights(), parallel.get_weights())

    def test_generator(self, keras):
        inputs, targets = CASES["dense"].data(45)

        def batches():
            while True:
                for start in range(0, 45, 16):
                    yield inputs[start : start + 16], targets[start : start + 16]

        plain = self.compiled(keras, "dense")
        parallel = self.compiled(keras, "dense", parallel=True)
        for model in (plain, parallel):
            fit = getattr(model, "fit_generator", model.fit)
            fit(batches(), steps_per_epoch=3, epochs=2, verbose=0)
        self.close(plain.get_weights(), parallel.get_weights())

    # Saving -----------------------------------------------------------------------------------

    def continued(self, model, path, keras, parallel):
        """The model saved, loaded and trained on, with the optimizer's state."""
        model.save(path)
        loaded = keras.models.load_model(path)
        if parallel:
            assert compat.parallelize(loaded) is loaded
        return loaded

    @pytest.mark.parametrize(
        "saved_on, loaded_on",
        in_span([(1, 1), (1, DEVICES), (DEVICES, 1), (DEVICES, DEVICES)], [(DEVICES, DEVICES)]),
    )
    def test_save_and_load_model_with_optimizer_state(self, keras, tmp_path, saved_on, loaded_on):
        inputs, targets = CASES["multi"].data(45)
        options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
        expected = self.compiled(keras, "multi")
        model = self.compiled(keras, "multi", parallel=saved_on > 1)
        for each in (expected, model):
            each.fit(inputs, targets, **options)
        path = str(tmp_path / "model") + self.extension
        loaded = self.continued(model, path, keras, loaded_on > 1)
        self.close(expected.get_weights(), loaded.get_weights())
        for each in (expected, loaded, model):  # saving has not disturbed the model
            each.fit(inputs, targets, **options)
        self.close(expected.get_weights(), loaded.get_weights())
        self.close(expected.get_weights(), model.get_weights())
        if loaded_on > 1:
            assert len(self.placement(loaded, inputs, targets)) == DEVICES

    @span
    def test_weights_go_both_ways(self, keras, tmp_path):
        plain, parallel = self.build(keras, "conv"), self.build(keras, "conv")
        compat.parallelize(parallel)
        path = str(tmp_path / "model") + self.weights_extension
        for source, target in ((parallel, plain), (plain, parallel)):
            initialise(source, seed=id(source) % 1000)
            source.save_weights(path)
            target.load_weights(path)
            self.close(source.get_weights(), target.get_weights(), 1e-12)

    def test_checkpoint_and_resume(self, keras, tmp_path):
        inputs, targets = CASES["dense"].data(45)
        options = {"batch_size": 16, "shuffle": False, "verbose": 0}
        expected = self.compiled(keras, "dense")
        expected.fit(inputs, targets, epochs=4, **options)
        model = self.compiled(keras, "dense", parallel=True)
        path = str(tmp_path / "checkpoint") + self.extension
        checkpoint = keras.callbacks.ModelCheckpoint(path)
        model.fit(inputs, targets, epochs=2, callbacks=[checkpoint], **options)
        resumed = compat.parallelize(keras.models.load_model(path))
        resumed.fit(inputs, targets, epochs=4, initial_epoch=2, **options)
        self.close(expected.get_weights(), resumed.get_weights())

    @span
    def test_json_and_clone_are_plain_models(self, keras):
        plain, parallel = self.build(keras, "multi"), self.build(keras, "multi")
        compat.parallelize(parallel)
        assert parallel.count_params() == plain.count_params()
        clone = keras.models.clone_model(parallel)
        from_json = keras.models.model_from_json(parallel.to_json())
        inputs, _ = CASES["multi"].data(13)
        expected = plain.predict(inputs, verbose=0)
        for copy in (clone, from_json):
            copy.set_weights(parallel.get_weights())
            self.close(expected, copy.predict(inputs, verbose=0), 1e-6)
