"""What a backend must pass that runs models of its framework's own kind, made without Keras."""

import numpy as np
import pytest

import compat

from .._verification import largest_difference
from .models import DEVICES, SHARDS
from .several import SeveralDevicesContract, TrainedModels
from .spans import in_span, span


class NativeModels(TrainedModels):
    """How a test file builds and trains a model of the framework's own kind.

    It maps 8 inputs to 4 outputs, and nothing in it is random or reads several rows at once.
    """

    def build(self, seed=0):
        """A model that is not parallelized, with the weights that belong to the seed."""
        raise NotImplementedError


class NativeContract(NativeModels, SeveralDevicesContract):
    """Subclass this in a backend's test file: methods of ``NativeModels``, ``placement`` and
    ``shard_sizes`` say how."""

    def plain(self):
        return self.build()

    def fit(self, model, samples, batch):
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
            expected, found = (self.predict(model, inputs) for model in (plain, parallel))
            assert found.shape == expected.shape
            self.close([expected], [found], 1e-6)

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
        before = [each.rows for each in compat.report().devices]
        assert sum(before) == 61 and min(before) >= 19
        self.predict(model, self.data(7)[0])
        report = compat.report()
        assert [each.device for each in report.devices] == configuration.devices
        rows = [each.rows for each in report.devices]
        assert sum(rows) == 68
        assert [each.training_rows for each in report.devices] == before
        assert [each.steps for each in report.devices] == [5] * DEVICES
        verdict = "All 3 devices worked: {} to {} rows each."
        assert report.verdict == verdict.format(min(rows), max(rows))

    # Verification -----------------------------------------------------------------------------

    @span
    def test_first_steps_are_verified(self, configuration):
        """They leave the model as steps do that are not, and say what they compared."""
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
