"""Tests for backends that run models of any kind on several devices in one process."""

import numpy as np
import pytest

import compat

from .._verification import Comparison, largest_difference
from .contract import Contract, any_backend, in_span, span
from .models import CASES, DEVICES, SHARDS


class TrainedModels:
    """Training of models of any kind, for subclasses to implement."""

    def train(self, model, inputs, targets):
        """Do one step of training: forward, a loss that is a mean over rows, backward, update.

        Returns:
            The loss.
        """
        raise NotImplementedError

    def predict(self, model, inputs):
        """Return the model's outputs for inputs, as an array."""
        raise NotImplementedError

    def weights(self, model):
        """Return copies of the model's weights, a list of arrays."""
        raise NotImplementedError

    def data(self, rows):
        """Return inputs and targets of a number of rows."""
        return CASES["dense"].data(rows)


class SeveralDevicesContract(TrainedModels, Contract):
    """Tests of one model. Subclasses implement how it is built and trained."""

    def plain(self):
        """Return a model that is not parallelized, ready to be trained."""
        raise NotImplementedError

    def fit(self, model, samples, batch):
        """Train one epoch, and return its losses."""
        raise NotImplementedError

    def parallel(self):
        """Return a model on all devices."""
        model = self.plain()
        assert compat.parallelize(model) is model
        return model

    def check_placement(self, placement, configuration):
        """Check that one step ran on all devices.

        Arguments:
            placement: the result of ``placement()``.
            configuration: that of this process.
        """
        assert sorted(placement) == sorted(configuration.devices)
        assert all(min(products) > 0 for products in placement.values()), placement
        # No device runs more than its replica: nothing ran unsplit.
        assert len(set(placement.values())) == 1, placement

    @any_backend
    def test_moves_to_other_devices_and_back_to_one(self, configuration):
        inputs, targets = self.data(14)
        plain, model = self.plain(), self.parallel()
        for devices in ([2, 0], [1], [0, 1, 2]):
            assert compat.parallelize(model, gpus=devices) is model
            for trained in (plain, model):
                self.fit(trained, 28, 14)
            self.close(self.weights(plain), self.weights(model))
            if len(devices) > 1:
                names = sorted(configuration.devices[i] for i in devices)
                assert self.devices_of(model, inputs, targets) == names
                # The step that was recorded has trained, too.
                self.train(plain, inputs, targets)

    def test_function_that_builds_the_model(self, configuration):
        model = compat.parallelize(lambda: self.plain())
        assert len(self.devices_of(model, *self.data(61))) == DEVICES

    @any_backend
    def test_trained_before(self, configuration):
        """The state of the optimizer is kept."""
        plain, model = self.plain(), self.plain()
        for epoch in range(2):
            for trained in (plain, model):
                self.fit(trained, 28, 14)
            if epoch == 0:
                assert compat.parallelize(model) is model
        self.close(self.weights(plain), self.weights(model))
        assert len(self.devices_of(model, *self.data(14))) == DEVICES

    def test_a_difference_is_found_and_the_model_left_as_it_was(self, configuration, monkeypatch):
        """A weight or gradient that a step on several devices changes by a tenth too much."""
        inputs, targets = self.data(45)
        model = self.parallel()
        self.train(model, inputs, targets)
        start = self.weights(model)
        name = self.verified(model).model
        changed = []
        verify = Comparison.compare

        def compare(comparison, values):
            for label in sorted(values, reverse=True):  # weights come before gradients
                change = values[label] - comparison.start.get(label, 0.0)
                if label.startswith(("weight", "gradient")) and np.any(change):
                    changed.append(label)
                    values = dict(values, **{label: values[label] + 0.1 * change})
                    break
            verify(comparison, values)

        monkeypatch.setattr(Comparison, "compare", compare)
        with pytest.raises(compat.ResultsDifferError) as caught:
            self.train(model, inputs, targets)
        assert f"model {name!r} does a training step on 3 devices" in str(caught.value)
        assert changed and changed[0] in str(caught.value)
        self.close(start, self.weights(model), 1e-12)
        self.train(model, inputs, targets)  # it can be trained on
        assert largest_difference(start, self.weights(model)) > 1e-4


class NativeModels(TrainedModels):
    """A model without Keras, which a test file builds and trains.

    It maps 8 inputs to 4 outputs, and nothing in it is random or reads several rows at once.
    """

    def build(self, seed=0):
        """Return a model that is not parallelized, with weights by a seed."""
        raise NotImplementedError


class NativeContract(NativeModels, SeveralDevicesContract):
    """Tests of models without Keras, to subclass in a backend's test file.

    Subclasses implement the methods of ``NativeModels``, ``placement`` and ``shard_sizes``.
    """

    def plain(self):
        """Return a model that is not parallelized."""
        return self.build()

    def fit(self, model, samples, batch):
        """Train one epoch, and return its losses."""
        inputs, targets = self.data(samples)
        parts = [slice(start, start + batch) for start in range(0, samples, batch)]
        return [float(self.train(model, inputs[part], targets[part])) for part in parts]

    # The same numbers -------------------------------------------------------------------------

    @span
    def test_is_told_from_other_objects(self, configuration):
        assert self.instance().is_native(self.build())
        for other in (None, object(), np.zeros(3), self.build, type(self.build())):
            assert not self.instance().is_native(other)

    @span
    def test_trains_to_the_numbers_of_one_device(self, configuration, batches):
        for batch, samples in batches:
            plain, parallel = self.build(), self.parallel()
            start = self.weights(plain)
            losses = [self.fit(model, samples, batch) for model in (plain, parallel)]
            np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4, atol=1e-5)
            assert largest_difference(start, self.weights(plain)) > 1e-3, "nothing was trained"
            self.close(self.weights(plain), self.weights(parallel))

    @span
    def test_predicts_what_one_device_does(self, configuration, batches):
        plain, parallel = self.build(), self.parallel()
        for batch, _ in batches:
            inputs, _ = self.data(batch)
            expected, predicted = (self.predict(model, inputs) for model in (plain, parallel))
            assert predicted.shape == expected.shape
            self.close([expected], [predicted], 1e-6)

    # Really on three devices ------------------------------------------------------------------

    @span
    def test_forward_and_backward_run_on_every_device(self, configuration):
        self.check_placement(self.placement(self.parallel(), *self.data(61)), configuration)

    @pytest.mark.parametrize("samples", in_span([61, 14], [14]))
    def test_batch_is_split_evenly(self, configuration, samples):
        sizes = list(self.shard_sizes(self.parallel(), *self.data(samples)))
        assert sorted(sizes) == sorted(SHARDS[samples])

    @span
    @pytest.mark.row("compat.report()")
    def test_report_says_what_each_device_did(self, configuration, counted_anew):
        model = self.parallel()
        self.fit(model, 61, 16)
        before = [use.rows for use in compat.report().devices]
        assert sum(before) == 61 and min(before) >= 19
        self.predict(model, self.data(7)[0])
        report = compat.report()
        assert [use.device for use in report.devices] == configuration.devices
        rows = [use.rows for use in report.devices]
        assert sum(rows) == 68
        assert [use.training_rows for use in report.devices] == before
        assert [use.steps for use in report.devices] == [5] * DEVICES
        verdict = "All 3 devices worked: {} to {} rows each."
        assert report.verdict == verdict.format(min(rows), max(rows))

    # Verification -----------------------------------------------------------------------------

    @span
    def test_first_steps_are_verified(self, configuration):
        """They leave the model as other steps do, and record what they compared."""
        models = [self.parallel(), self.parallel()]
        record = self.verified(models[1], 2)
        for model in models:
            self.fit(model, 45, 16)
            self.predict(model, self.data(13)[0])
        assert (record.steps["train"], record.steps["predict"]) == (2, 1)
        assert record.compared > len(self.weights(models[0]))
        assert not record.incomparable
        assert record.largest[0] < 1e-3  # the same work in another order
        self.close(self.weights(models[0]), self.weights(models[1]))
