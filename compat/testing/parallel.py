"""What a backend must pass besides that runs a Keras model on several devices in one process."""

import pytest

import compat

from .automatic import AutomaticContract
from .models import SHARDS, fit_in_order, keras_under_test
from .reporting import ReportContract
from .saving import SavingContract
from .several import SeveralDevicesContract
from .spans import any_backend, slow, span
from .training import TrainingContract
from .verification import VerificationContract


class ParallelContract(
    TrainingContract,
    VerificationContract,
    SavingContract,
    AutomaticContract,
    ReportContract,
    SeveralDevicesContract,
):
    """Subclass this in the test file of a backend, and set the attributes of its bases."""

    def plain(self):
        return self.compiled(keras_under_test(), "dense")

    def fit(self, model, samples, batch):
        inputs, targets = self.data(samples)
        return fit_in_order(model, inputs, targets, batch).history["loss"]

    def train(self, model, inputs, targets):
        return model.train_on_batch(inputs, targets)

    def predict(self, model, inputs):
        return model.predict(inputs, verbose=0)

    def weights(self, model):
        return model.get_weights()

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
        lines = []
        model.summary(print_fn=lambda line, **_: lines.append(line))
        return lines
