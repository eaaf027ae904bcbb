"""Tests for backends that run a Keras model on several devices in one process.

It is trained to the results of one device, saved, loaded and freed as there.
"""

import contextlib
import gc
import os
import signal
import threading
import warnings
import weakref

import numpy as np
import pytest

import compat

from .._verification import largest_difference
from .automatic import AutomaticContract
from .contract import any_backend, contract_of, in_span, slow, span
from .models import CASES, DEVICES, SHARDS, fit_in_order, initialise, keras_under_test, optimizer
from .several import SeveralDevicesContract
from .verification import VerificationContract

# Three batches of 16 rows, which do not divide evenly over three devices. A partial one would be
# compiled separately, and is tried elsewhere.
SAMPLES = 48


class ParallelContract(VerificationContract, AutomaticContract, SeveralDevicesContract):
    """Subclass this in the test file of a backend, and set the attributes here and of its bases."""

    #: Whether plain Keras may read Adam's number of the step before or after its increment.
    plain_adam_is_random = False

    def plain(self):
        """Return a compiled model that is not parallelized."""
        return self.compiled(keras_under_test(), "dense")

    def fit(self, model, samples, batch):
        """Train one epoch, and return its losses."""
        inputs, targets = self.data(samples)
        return fit_in_order(model, inputs, targets, batch).history["loss"]

    def train(self, model, inputs, targets):
        """Do one step of training, and return the loss."""
        return model.train_on_batch(inputs, targets)

    def predict(self, model, inputs):
        """Return the model's outputs."""
        return model.predict(inputs, verbose=0)

    def weights(self, model):
        """Return copies of the model's weights."""
        return model.get_weights()

    # The same numbers -------------------------------------------------------------------------

    # SGD shows the scale of a gradient, which Adam hides; Adam has more state, whose updates are
    # the same whatever computed the gradients.
    @pytest.mark.parametrize(
        "name, optimizer_name",
        in_span([("dense", "sgd"), ("multi", "sgd"), ("dense", "adam")], [("multi", "sgd")])
        + [pytest.param(name, "sgd", marks=any_backend) for name in ("conv", "lstm")],
    )
    def test_trains_to_the_numbers_of_one_device(self, keras, batches, name, optimizer_name):
        plain, parallel = self.both(keras, name, optimizer_name)
        start = plain.get_weights()
        if name != "dense":  # they take long to compile; with this size no batch divides
            batches = batches[1:2] or batches
        elif optimizer_name != "sgd":  # gradients are the same, whichever optimizer takes them
            batches = batches[:1]
            if self.plain_adam_is_random:
                compat.parallelize(plain, gpus=1)
        for batch, samples in batches:
            inputs, targets = CASES[name].data(samples)
            losses = []
            for model in (plain, parallel):
                model.set_weights(start)
                losses.append(fit_in_order(model, inputs, targets, batch).history["loss"])
            assert largest_difference(start, plain.get_weights()) > 1e-3, "nothing was trained"
            self.close(plain.get_weights(), parallel.get_weights())
            np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["dense", pytest.param("multi", marks=any_backend)])
    def test_evaluates_and_predicts_what_one_device_does(self, keras, name):
        inputs, targets = CASES[name].data(45)
        losses, outputs = [], []
        for model in self.both(keras, name):
            losses.append(model.evaluate(inputs, targets, batch_size=16, verbose=0))
            output = model.predict(inputs, batch_size=16, verbose=0)
            outputs.append(output if isinstance(output, list) else [output])
        np.testing.assert_allclose(*map(np.ravel, losses), rtol=1e-5, atol=1e-6)
        expected, predicted = outputs
        assert [p.shape for p in predicted] == [e.shape for e in expected]
        self.close(expected, predicted, 1e-6)

    # Models and losses ------------------------------------------------------------------------

    def train_both(self, keras, build, loss, inputs, targets, batch=16, **options):
        """Train one model plain and one parallel from the same weights, and compare."""
        models = self.both_ready(keras, [build() for _ in range(2)], loss)
        for model in models:
            fit_in_order(model, inputs, targets, batch, **options)
        self.close(models[0].get_weights(), models[1].get_weights())
        return models

    def train_dense(self, keras, loss=None, **options):
        """Train the dense model plain and parallel, and compare."""
        loss = loss or CASES["dense"].loss
        data = CASES["dense"].data(SAMPLES)
        self.train_both(keras, lambda: self.build(keras, "dense"), loss, *data, **options)

    def test_sample_weights(self, keras):
        weights = np.random.RandomState(3).uniform(size=SAMPLES).astype("float32")
        weights[::4] = 0
        self.train_dense(keras, sample_weight=weights)

    @slow
    def test_class_weights(self, keras):
        self.train_dense(keras, class_weight={0: 1.0, 1: 5.0, 2: 0.0, 3: 2.0})

    def test_loss_over_the_whole_batch(self, keras):
        """A loss that compares each row with all others, as contrastive losses do."""
        K = keras.ops if hasattr(keras, "ops") else keras.backend

        def contrastive(y_true, y_pred):
            centre = K.mean(y_pred, axis=0, keepdims=True)
            return K.mean(K.square(y_pred - centre - y_true), axis=-1) * K.mean(y_pred * y_pred)

        self.train_dense(keras, contrastive)

    @any_backend
    def test_siamese_outputs_of_one_shared_layer(self, keras):
        def build():
            layers = keras.layers
            left, right = layers.Input(shape=(5,)), layers.Input(shape=(5,))
            shared = layers.Dense(3, name="shared")
            return keras.models.Model([left, right], [shared(left), shared(right)])

        (left, right), _ = CASES["multi"].data(SAMPLES)
        targets = [left[:, :3], right[:, :3]]
        plain, parallel = self.train_both(keras, build, "mse", [left, right], targets)
        assert list(plain.output_names) == list(parallel.output_names)

    def test_masked_sequence_loss(self, keras):
        """Masked steps count neither in the loss nor in the gradient."""

        def build():
            layers = keras.layers
            steps = layers.Input(shape=(6, 4))
            outputs = layers.TimeDistributed(layers.Dense(2))(layers.Masking()(steps))
            return keras.models.Model(steps, outputs)

        random = np.random.RandomState(5)
        inputs = random.normal(size=(SAMPLES, 6, 4)).astype("float32")
        for row, length in enumerate(random.randint(1, 7, size=SAMPLES)):
            inputs[row, length:] = 0
        targets = random.normal(size=(SAMPLES, 6, 2)).astype("float32")
        self.train_both(keras, build, "mse", inputs, targets)

    def test_batchnorm_makes_one_moving_average_update(self, keras):
        """The moving mean is one device's; the variance is the mean of the replicas' variances."""
        inputs, targets = CASES["dense"].data(61)
        means = []
        for parallel in (False, True):
            model = self.normalized(keras)
            if parallel:
                compat.parallelize(model)
            model.compile(optimizer(keras, "sgd"), "mse")
            model.train_on_batch(inputs * 2 + 1, targets)
            means.append(model.get_weights()[2])
            assert np.abs(means[-1]).max() > 0.1
        np.testing.assert_allclose(means[0], means[1], rtol=1e-4, atol=1e-5)

    @span
    def test_batchnorm_of_the_whole_batch_or_a_warning(self, keras):
        """Batch normalization has one device's numbers where it is synchronized."""
        inputs, targets = CASES["dense"].data(61)
        plain, parallel = self.normalized(keras), self.normalized(keras)
        parallel.set_weights(plain.get_weights())
        (layer,) = [each for each in parallel.layers if hasattr(each, "moving_mean")]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            compat.parallelize(parallel, sync_batch_norm=True)
        texts = [str(each.message) for each in said if each.category is compat.CompatWarning]
        is_synchronized = "devices" in self.instance().synchronizes
        assert is_synchronized or [repr(layer.name) in text for text in texts] == [True]
        losses = []
        for model in (plain, parallel):
            model.compile(optimizer(keras, "sgd"), "mse")
            batches = [(inputs[:rows] * 2 + 1, targets[:rows]) for rows in (61, 14, 2)]
            losses.append([float(model.train_on_batch(*batch)) for batch in batches])
        if is_synchronized:
            np.testing.assert_allclose(*losses, rtol=1e-4)
            self.close(plain.get_weights(), parallel.get_weights())
        else:
            assert abs(losses[0][2] - losses[1][2]) > 1e-4

    def test_batchnorm_of_a_model_within_another_that_is_synchronized(self, keras):
        """It is synchronized in models that contain it, compiled before or after it is asked."""
        inputs, targets = CASES["dense"].data(61)
        losses, start = [], None
        for when in ("on one device", "before", "after"):
            inner, source = self.normalized(keras), keras.layers.Input(shape=inputs.shape[1:])
            outer = keras.models.Model(source, inner(source))
            start = start or outer.get_weights()
            outer.set_weights(start)
            if when == "before":
                compat.parallelize(inner, sync_batch_norm=True)
            if when != "on one device":
                compat.parallelize(outer)
            outer.compile("sgd", "mse")
            if when == "after":
                outer.train_on_batch(inputs, targets)
                compat.parallelize(inner, sync_batch_norm=True)
                outer.set_weights(start)
            losses.append([float(outer.train_on_batch(inputs * 2 + 1, targets)) for _ in range(3)])
        np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)

    # Ways to train ----------------------------------------------------------------------------

    def test_train_on_batch_and_validation_data(self, keras):
        inputs, targets = CASES["dense"].data(39)
        models = self.both(keras, "dense")
        for samples in (13, 2):
            batch = inputs[:samples], targets[:samples]
            np.testing.assert_allclose(*[m.train_on_batch(*batch) for m in models], rtol=1e-5)
        first, later = (inputs[:26], targets[:26]), (inputs[26:], targets[26:])
        fitted = [fit_in_order(m, *first, 13, epochs=2, validation_data=later) for m in models]
        losses = [history.history["val_loss"] for history in fitted]
        np.testing.assert_allclose(*losses, rtol=1e-4, atol=1e-6)
        self.close(*[model.get_weights() for model in models])

    @any_backend
    def test_generator(self, keras):
        inputs, targets = CASES["dense"].data(SAMPLES)

        def batches():
            while True:
                for start in range(0, SAMPLES, 16):
                    yield inputs[start : start + 16], targets[start : start + 16]

        plain, parallel = self.both(keras, "dense")
        for model in (plain, parallel):
            fit = getattr(model, "fit_generator", model.fit)
            fit(batches(), steps_per_epoch=3, epochs=2, verbose=0)
        self.close(plain.get_weights(), parallel.get_weights())

    @any_backend
    def test_a_fit_that_is_interrupted_can_be_run_again(self, keras):
        """By the signal of Ctrl-C and of a notebook's button, wherever in a step that finds it."""
        inputs, targets = CASES["dense"].data(SAMPLES)
        models = plain, parallel = self.both(keras, "dense")
        for model in models:
            model.compile(keras.optimizers.SGD(0.05), CASES["dense"].loss)  # has no state
        for seconds in (0, 0.05):
            with _interrupting(seconds) as begun:
                press = keras.callbacks.LambdaCallback(
                    on_epoch_begin=lambda epoch, logs, begun=begun: epoch and begun.set()
                )
                fit_in_order(parallel, inputs, targets, epochs=10**5, callbacks=[press])
        start = parallel.get_weights()
        plain.set_weights(start)
        losses = [fit_in_order(m, inputs, targets, epochs=2).history["loss"] for m in models]
        np.testing.assert_allclose(*losses, rtol=1e-4, atol=1e-5)
        assert largest_difference(start, plain.get_weights()) > 1e-4, "nothing was trained"
        self.close(plain.get_weights(), parallel.get_weights())
        assert len(self.devices_of(parallel, inputs[:16], targets[:16])) == DEVICES

    # Files and memory -------------------------------------------------------------------------

    @span
    def test_save_and_load_model_with_optimizer_state(self, keras, tmp_path, pytestconfig):
        """A file that a callback saves on several devices continues the training, on one, too."""
        whole = contract_of(pytestconfig) == "whole"
        name = "multi" if whole else "dense"
        inputs, targets = CASES[name].data(48)
        plain, parallel = models = self.both(keras, name)
        path = str(tmp_path / "model") + self.extension
        fit_in_order(plain, inputs, targets)
        checkpoint = keras.callbacks.ModelCheckpoint(path)
        fit_in_order(parallel, inputs, targets, callbacks=[checkpoint])
        continued = plain
        if hasattr(plain, "_make_fit_function"):
            # In tf.keras 1.13 fit() of a loaded model begins with a new state of the optimizer.
            plain.save(path + "_of_plain")
            continued = keras.models.load_model(path + "_of_plain")
        for on_several in [True, False] if whole else [True]:
            loaded = keras.models.load_model(path)
            if on_several:
                assert compat.parallelize(loaded) is loaded
            self.close(plain.get_weights(), loaded.get_weights())
            models.append(loaded)
        for model in dict.fromkeys([continued, *models]):
            fit_in_order(model, inputs, targets)
        for model in models:  # saving has not disturbed the one that was saved
            reference = plain if model in (plain, parallel) else continued
            self.close(reference.get_weights(), model.get_weights())

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

    def test_it_is_freed_once_nobody_holds_it(self, keras):
        """Models that a process trains one after the other must not fill its memory."""
        model, inputs, targets = self.parallel_and_data(keras, "dense", 13)
        model.fit(inputs, targets, verbose=0)
        model.predict(inputs, verbose=0)
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None

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

    # Really on three devices ------------------------------------------------------------------

    @pytest.mark.parametrize(
        "name",
        [pytest.param("simplernn", marks=span), pytest.param("conv", marks=any_backend)]
        + [pytest.param(name, marks=slow) for name in ("dense", "lstm", "multi")],
    )
    def test_forward_and_backward_run_on_every_device(self, keras, configuration, name):
        step = self.parallel_and_data(keras, name, 61)
        self.check_placement(self.placement(*step), configuration)

    @pytest.mark.parametrize("samples", sorted(SHARDS))
    def test_batch_is_split_evenly(self, keras, samples):
        step = self.parallel_and_data(keras, "dense", samples)
        assert list(self.shard_sizes(*step)) == SHARDS[samples]

    # The same object --------------------------------------------------------------------------

    @span
    def test_object_and_its_face_stay(self, keras):
        model = self.build(keras, "multi")
        before = list(model.layers), list(model.weights), list(model.output_names)
        summary = self.summary(model)
        assert compat.parallelize(model) is model
        assert (list(model.layers), list(model.output_names)) == (before[0], before[2])
        assert [id(w) for w in model.weights] == [id(w) for w in before[1]]
        (shared,) = [layer for layer in before[0] if layer.name == "shared"]
        assert model.get_layer("shared") is shared
        assert self.summary(model) == summary

    def summary(self, model):
        """Return the lines of ``model.summary()``."""
        lines = []
        model.summary(print_fn=lambda line, **_: lines.append(line))
        return lines


@contextlib.contextmanager
def _interrupting(seconds):
    """Interrupt the block, some seconds after it has set the event that is yielded."""
    begun, ended = threading.Event(), threading.Event()

    def press():
        begun.wait()
        wait = seconds
        while not ended.wait(wait):
            os.kill(os.getpid(), signal.SIGINT)
            wait = 1  # again, if a destructor was running, whose exceptions Python ignores

    # What is started in the background may ignore it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield begun
    finally:
        ended.set()
        begun.set()
        thread.join()
        signal.signal(signal.SIGINT, handler)
