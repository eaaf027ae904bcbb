"""torch: Keras 3 on it, its own modules, and what is special to it."""

import collections

import numpy as np
import pytest
import torch

import compat
from compat._backends.torch.profiler import products as placement
from compat._backends.torch.profiler import replica as replica_of
from compat.testing import CASES, DEVICES

from ..shared_parts import KerasParts


def shard_sizes(step):
    """Return the rows of the first layer's products, forward, on each device."""
    sizes = collections.OrderedDict()
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    replicas = [e for e in profile.events() if e.name.startswith("replica on ")]
    # Copies of weights are made on the other devices before the first one computes.
    for replica in sorted(replicas, key=lambda event: event.name):
        products = [
            e for e in profile.events() if e.name in ("aten::addmm", "aten::mm")
            and "replica on {}".format(replica_of(e)) == replica.name
        ]  # fmt: skip
        sizes[replica.name] = next(s for s in products[0].input_shapes if len(s) == 2)[0]
    return list(sizes.values())


COMPILED = (
    "torch cannot run a model on several devices under jit_compile=True: torch.compile() makes one "
    "program for one device. Compile the model with jit_compile=False."
)


class TestTorch(KerasParts):
    across_rows = "right"
    product_in_timelines = "matmul"
    backend = "torch"
    extension = ".keras"

    def placement(self, model, inputs, targets):
        return placement(lambda: model.train_on_batch(inputs, targets))

    def shard_sizes(self, model, inputs, targets):
        if len(inputs) == 1:  # one device has it, until there was a batch that can be tried
            model.train_on_batch(np.repeat(inputs, 2, 0), np.repeat(targets, 2, 0))
        return shard_sizes(lambda: model.train_on_batch(inputs, targets))

    # What is special to Keras on torch --------------------------------------------------------

    def test_dropout_masks_of_replicas_differ(self, keras):
        layers = [keras.layers.Input((500,)), keras.layers.Dropout(0.5, seed=1)]
        model = keras.models.Sequential(layers)
        compat.parallelize(model)
        outputs = keras.ops.convert_to_numpy(model(np.ones((3, 500), "float32"), training=True))
        assert 0.3 < (outputs == 0).mean() < 0.7
        assert not (outputs[0] == outputs[1]).all() and not (outputs[1] == outputs[2]).all()

    def test_fixed_batches_stay_in_one_piece(self, keras):
        layers = [keras.layers.Input(batch_shape=(4, 3)), keras.layers.Dense(1)]
        with pytest.warns(compat.CompatWarning, match="its batch size is fixed to 4"):
            compat.parallelize(keras.Sequential(layers))

    def test_torch_compile_is_refused(self, keras):
        model = self.build(keras, "dense")
        model.compile("sgd", "mse", jit_compile=True)
        with pytest.raises(compat.UnsupportedError) as error:
            compat.parallelize(model)
        assert str(error.value) == COMPILED
        assert "call" not in vars(model)

    def test_torch_compile_is_left_alone(self, keras, automatic):
        model = self.build(keras, "dense")
        because = "it cannot run on several devices: " + COMPILED
        self.check_left_alone(model, because, jit_compile=True)
        assert "call" not in vars(model)

    def test_keras_distribution_is_said_to_do_nothing(self, keras):
        model = self.build(keras, "dense")
        distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
        keras.distribution.set_distribution(distribution)
        try:
            with pytest.warns(compat.CompatWarning, match="on torch Keras accepts it and does no"):
                compat.parallelize(model)
        finally:
            keras.distribution.set_distribution(None)
        model.compile("sgd", "mse")
        assert len(self.placement(model, *CASES["dense"].data(61))) == DEVICES

    def test_verification_tells_why_batch_normalization_is_not_compared(self, keras):
        layers = [keras.layers.BatchNormalization(name="bn"), keras.layers.Dense(4)]
        model = compat.parallelize(keras.models.Sequential(layers))
        model.compile("sgd", "mse")
        record = self.verified(model)
        model.train_on_batch(*CASES["dense"].data(45))
        assert record.steps["train"] == 0 and record.uncompared["train"] == {
            "steps": 1,
            "reason": "layer 'bn' normalizes each device's rows by their own statistics",
            "remedy": "pass sync_batch_norm=True (or --sync-batch-norm)",
            "instead": 1,
        }

    def test_parts_of_a_model_cannot_be_placed(self, keras):
        with pytest.raises(NotImplementedError) as caught:
            compat.device(1)
        assert str(caught.value) == (
            "torch cannot place parts of a model on a device of their own. Leave compat.device() "
            "out; parallelize() may run the whole model on several."
        )


@pytest.fixture
def devices():
    return compat.configure_gpu(simulate=DEVICES).devices
