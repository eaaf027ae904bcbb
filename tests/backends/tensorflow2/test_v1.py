"""TensorFlow 2 in v1 mode, after ``tf.compat.v1.disable_v2_behavior()``: what TensorFlow 1 passes.

Only these tests are collected where ``COMPAT_TEST_KERAS`` is the Keras of that mode.
"""

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow1.configuration import merged
from compat._backends.tensorflow1.profiler import partitions, products
from compat.testing import CASES, DEVICES, initialise, optimizer, span

from ..tensorflow1 import test_contract
from ..tensorflow1.test_device_scope import (  # noqa: F401  # run here, too
    keras_of_devices,
    siamese,
    test_merged_on_the_cpu,
    test_parallelized_it_runs_unsplit_on_each_device,
    test_siamese_model_of_keras_faq,
    three_configured_devices,
)
from ..tensorflow1.test_partition import (  # noqa: F401  # run here, too
    test_outputs_without_rows_are_computed_of_the_whole_batch,
)

v1 = tf.compat.v1


@pytest.mark.row("TensorFlow 2 in v1 mode")
class TestV1Mode(test_contract.TestTensorFlow1):
    backend = "tensorflow2"
    # TensorFlow 2.15 writes what ends in ".weights.h5" in Keras 3's way, which fails in v1 mode.
    weights_extension = ".h5"
    prelude = "import tensorflow\ntensorflow.compat.v1.disable_v2_behavior()\n"

    def name(self, device):
        """/device:CPU:1 is /cpu:1."""
        return "/" + device[len("/device:") :].lower()

    # Layers of tf.keras, some of which are others than those of tf.compat.v1.keras ----------------

    @span
    def test_layers_of_tf_keras(self, keras):
        layers = tf.keras.layers
        assert layers.LSTM is not keras.layers.LSTM

        def build():
            return tf.keras.models.Sequential(
                [
                    layers.Masking(input_shape=(4, 3)),
                    layers.LSTM(5),
                    layers.Dense(2, activation=tf.nn.swish),
                ]
            )

        random = np.random.RandomState(1)
        inputs = random.normal(size=(45, 4, 3)).astype("float32")
        targets = random.normal(size=(45, 2)).astype("float32")
        _, model = self.train_both(keras, build, "mse", inputs, targets)
        placement = self.placement(model, inputs, targets)
        assert len(placement) == DEVICES
        assert len(set(placement.values())) == 1
        assert min(placement["/cpu:0"]) > 4

    @span
    def test_batchnorm_of_tf_keras(self, keras):
        layers = tf.keras.layers
        assert layers.BatchNormalization is not keras.layers.BatchNormalization
        self.test_moving_variance_is_the_mean_of_the_replicas(tf.keras)

    # Sessions -----------------------------------------------------------------------------------

    @span
    def test_limits_of_gpus_are_not_added_up(self):
        """Keras makes sessions with what tf.config has; laid under them is the same."""
        config = v1.ConfigProto(allow_soft_placement=True)
        config.gpu_options.visible_device_list = "0"
        config.gpu_options.experimental.virtual_devices.add(memory_limit_mb=[1024])
        assert merged(config, config) == config
        own = v1.ConfigProto()
        own.gpu_options.allow_growth = True
        options = merged(config, own).gpu_options
        assert options.allow_growth
        assert options.experimental == config.gpu_options.experimental

    # Without Keras, and by TensorFlow itself ------------------------------------------------------

    @pytest.mark.row("device()")
    @span
    def test_parts_of_a_graph_without_keras(self, configuration):
        with tf.Graph().as_default():
            rows = v1.placeholder("float32", (None, 3))
            first, last = (v1.get_variable(name, (3, 3)) for name in ("first", "last"))
            with compat.device(1):
                hidden = tf.matmul(rows, first)
            with compat.device(2):
                outputs = tf.matmul(hidden, last)
            gradients = v1.gradients(outputs, [first, last])
            metadata = v1.RunMetadata()
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                options = v1.RunOptions(output_partition_graphs=True)
                session.run(gradients, {rows: np.ones((2, 3))}, options, metadata)
        assert products(partitions(metadata)) == {
            "/device:CPU:1": (1, 1),
            "/device:CPU:2": (1, 2),
        }

    @span
    def test_model_without_keras_is_refused(self, configuration):
        class Net(tf.Module):
            def __init__(self):
                super().__init__()
                self.weight = tf.Variable(1.0)

            def __call__(self, rows):
                return rows * self.weight

        net = Net()
        assert compat.parallelize(net, gpus=1) is net
        with pytest.raises(compat.UnsupportedError) as raised:
            compat.parallelize(net)
        assert str(raised.value) == (
            "tensorflow2 cannot run a model without Keras on several devices after "
            "tf.compat.v1.disable_v2_behavior(). Use a Keras model, or place the model's parts by "
            "compat.device()."
        )

    @pytest.mark.row('strategy="mirrored"')
    @span
    def test_mirrored_strategy(self, keras):
        """When a model is compiled TensorFlow gives Keras a new session, for it alone."""
        inputs, targets = CASES["dense"].data(60)
        replicas, losses, weights = [], [], []

        def build():
            replicas.append(tf.distribute.get_strategy().num_replicas_in_sync)
            model = CASES["dense"].build(keras)
            model.compile(optimizer(keras, "sgd"), CASES["dense"].loss)
            return initialise(model)

        for make in (build, lambda: compat.parallelize(build, strategy="mirrored")):
            model = make()
            history = model.fit(inputs, targets, batch_size=30, epochs=2, shuffle=False, verbose=0)
            losses.append(history.history["loss"])
            weights.append(model.get_weights())
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
        self.close(weights[0], weights[1])
        assert replicas == [1, DEVICES]
