"""What a backend must pass that runs models on several devices in one process, whatever models."""

import numpy as np
import pytest

import compat

from .. import _verification
from .._verification import largest_difference
from .contract import Contract
from .models import CASES, DEVICES
from .spans import any_backend


class TrainedModels:
    """How models are trained, of whatever kind they are."""

    def train(self, model, inputs, targets):
        """Do one step of training: forward, a loss that is a mean over rows, backward, update.

        Returns:
            The loss.
        """
        raise NotImplementedError

    def predict(self, model, inputs):
        """What the model computes of the inputs, as an array."""
        raise NotImplementedError

    def weights(self, model):
        """Copies of the model's weights, a list of arrays."""
        raise NotImplementedError

    def data(self, rows):
        """Inputs and targets."""
        return CASES["dense"].data(rows)


class SeveralDevicesContract(TrainedModels, Contract):
    """Tests of one model. Subclasses say how it is built and trained."""

    def plain(self):
        """A model that is not parallelized, ready to be trained."""
        raise NotImplementedError

    def fit(self, model, samples, batch):
        """Train one epoch, and return its losses."""
        raise NotImplementedError

    def parallel(self):
        """A model on all devices."""
        model = self.plain()
        assert compat.parallelize(model) is model
        return model

    def check_placement(self, placement, configuration):
        """That one step ran on all devices, of a model and data for ``placement()``."""
        assert sorted(placement) == sorted(configuration.devices)
        assert all(min(products) > 0 for products in placement.values()), placement
        # No device runs more than its replica: nothing was computed undivided.
        assert len(set(placement.values())) == 1, placement

    @any_backend
    def test_moves_to_other_devices_and_back_to_one(self, configuration):
        inputs, targets = self.data(14)
        plain, model = self.plain(), self.parallel()
        for devices in ([2, 0], [1], [0, 1, 2]):
            assert compat.parallelize(model, gpus=devices) is model
            for each in (plain, model):
                self.fit(each, 28, 14)
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
        """What the optimizer keeps stays as it is."""
        plain, model = self.plain(), self.plain()
        for epoch in range(2):
            for each in (plain, model):
                self.fit(each, 28, 14)
            if epoch == 0:
                assert compat.parallelize(model) is model
        self.close(self.weights(plain), self.weights(model))
        assert len(self.devices_of(model, *self.data(14))) == DEVICES

    def test_a_difference_is_found_and_the_model_left_as_it_was(self, configuration, monkeypatch):
        """Something that a step on several devices changes by a tenth too much."""
        inputs, targets = self.data(45)
        model = self.parallel()
        self.train(model, inputs, targets)
        start = self.weights(model)
        name = self.verified(model).model
        changed = []
        verify = _verification.Comparison.compare

        def compare(comparison, found):
            for label in sorted(found, reverse=True):  # weights come before gradients
                change = found[label] - comparison.start.get(label, 0.0)
                if label.startswith(("weight", "gradient")) and np.any(change):
                    changed.append(label)
                    found = dict(found, **{label: found[label] + 0.1 * change})
                    break
            verify(comparison, found)

        monkeypatch.setattr(_verification.Comparison, "compare", compare)
        with pytest.raises(compat.ResultsDifferError) as caught:
            self.train(model, inputs, targets)
        assert f"model {name!r} does a training step on 3 devices" in str(caught.value)
        assert changed and changed[0] in str(caught.value)
        self.close(start, self.weights(model), 1e-12)
        self.train(model, inputs, targets)  # it can be trained on
        assert largest_difference(start, self.weights(model)) > 1e-4
