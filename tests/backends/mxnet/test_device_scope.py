"""Parts of a Keras model, arrays and symbols on devices of their own."""

import contextlib

import numpy as np
import pytest

import compat
from compat._backends.mxnet.profiler import operations
from compat._backends.mxnet.profiler import products as placement
from compat.testing import (
    in_span,
    initialise,
    largest_difference,
    optimizer,
    span,
)

from ..messages import refusal
from .keras_models import keras as keras  # the fixture
from .test_contract import executors

pytestmark = pytest.mark.row("device()")


def anywhere(device):
    return contextlib.ExitStack()


def tweets(keras, device, **options):
    """Return the example of Keras' FAQ: one LSTM for two sequences, on two devices."""
    layers = keras.layers
    first, second = layers.Input(shape=(6, 4)), layers.Input(shape=(6, 4))
    # Of a loop, implementation 1 is wrong; keras-mxnet 2.1 ends the process under 2.
    options["implementation"] = 1 if options.get("unroll") else 2
    shared = layers.LSTM(5, **options)
    with device(1):
        first_encoded = shared(first)
    with device(2):
        second_encoded = shared(second)
    with device("cpu"):
        merged = layers.concatenate([first_encoded, second_encoded])
    predictions = layers.Dense(1, activation="sigmoid")(merged)
    return initialise(keras.models.Model([first, second], predictions))


def data(rows):
    random = np.random.RandomState(rows)
    return [random.normal(size=(rows, 6, 4)) for _ in range(2)], random.randint(2, size=(rows, 1))


def compiled(keras, model, name="sgd"):
    model.compile(optimizer(keras, name), "binary_crossentropy")
    return model


class TestDevice:
    @pytest.mark.parametrize(
        "name, unroll", in_span([("sgd", True), ("adam", False)], [("sgd", True)])
    )
    def test_trains_to_the_numbers_of_one_device(self, keras, unroll, name):
        inputs, targets = data(45)
        results = []
        for device in (anywhere, compat.device):
            model = compiled(keras, tweets(keras, device, unroll=unroll), name)
            start = model.get_weights()
            model.fit(inputs, targets, batch_size=16, epochs=3, shuffle=False, verbose=0)
            tested = model.evaluate(inputs, targets, batch_size=16, verbose=0)
            results.append((model.get_weights(), [model.predict(inputs), np.array([tested])]))
        assert largest_difference(start, results[1][0]) > 1e-2
        assert largest_difference(results[0][0], results[1][0]) < 1e-5
        assert largest_difference(results[0][1], results[1][1]) < 1e-5

    @span
    def test_each_part_runs_where_it_was_built_forward_and_backward(self, keras):
        inputs, targets = data(16)
        model = compiled(keras, tweets(keras, compat.device, unroll=True))

        def step():
            model.train_on_batch(inputs, targets)

        step()
        # 6 steps of the LSTM, eight products each; one product of the layer on top.
        assert placement(step) == {"cpu(0)": (1, 1), "cpu(1)": (48, 48), "cpu(2)": (48, 48)}
        joined = {device for device, name in operations(step) if name == "Concat"}
        assert joined == {"cpu(0)"}
        # The weights and their gradients lie where the layer was built first.
        (executor,) = executors(model)
        for name, array in executor.arg_dict.items():
            device = "cpu(1)" if name.startswith("lstm") else "cpu(0)"
            assert str(array.context) == device, name
            if executor.grad_dict[name] is not None:
                assert str(executor.grad_dict[name].context) == device
                assert np.abs(executor.grad_dict[name].asnumpy()).max() > 0

    def test_a_loop_runs_where_it_was_built(self, keras):
        """MXNet records the loop of an LSTM that is not unrolled in bulks, forward and backward."""
        inputs, targets = data(16)
        model = compiled(keras, tweets(keras, compat.device, unroll=False))
        model.train_on_batch(inputs, targets)
        counted = operations(lambda: model.train_on_batch(inputs, targets))
        bulks = {device: n for (device, name), n in counted.items() if name == "ImperativeBulk"}
        assert sorted(bulks) == ["cpu(1)", "cpu(2)"]
        assert min(bulks.values()) >= 12  # 6 steps there, and 6 back

    def test_predicts_without_compile(self, keras):
        inputs, _ = data(5)
        results = [
            tweets(keras, device, unroll=True).predict(inputs)
            for device in (anywhere, compat.device)
        ]
        assert np.abs(results[0]).max() > 0
        assert largest_difference(results[:1], results[1:]) < 1e-6

    def check_trained(self, keras, build):
        """Train what this makes of an input on one device and on several, and compare."""
        inputs, targets = np.random.RandomState(0).normal(size=(2, 16, 4))
        results = []
        for device in (anywhere, compat.device):
            image = keras.layers.Input(shape=(4,))
            model = initialise(keras.models.Model(image, build(image, device)))
            model.compile(optimizer(keras, "sgd"), "mse")
            model.fit(inputs, targets, epochs=3, verbose=0)
            results.append(model.get_weights())
        assert largest_difference(*results) < 1e-5

    def test_a_value_that_many_layers_of_several_devices_use(self, keras):
        """More than eight gradients: MXNet's own sum of them leaves some out, silently."""
        layers = keras.layers

        def build(image, device):
            shared = layers.Dense(4, activation="tanh")
            x = shared(image)
            parts = []
            for number in range(15):
                with device(number % 3):
                    parts.append(layers.Dense(4, activation="tanh")(shared(x)))
            return layers.add(parts)

        self.check_trained(keras, build)

    @span
    def test_batchnorm_learns_there(self, keras):
        layers = keras.layers

        def build(image, device):
            with device(2):
                x = layers.BatchNormalization(momentum=0.5)(layers.Dense(4)(image))
            with device(1):
                return layers.Dense(4)(x)

        self.check_trained(keras, build)

    def test_averages_on_two_devices_are_refused(self, keras):
        layers = keras.layers
        image = layers.Input(shape=(4,))
        shared = layers.BatchNormalization()
        with compat.device(0):
            x = shared(image)
        with compat.device(1):
            y = shared(x)
        model = keras.models.Model(image, y)
        assert refusal(compat.UnsupportedError, model.compile, "sgd", "mse") == (
            "{} is used on several devices, and MXNet would keep only what one of them computes "
            "of it. Call the layer inside one compat.device() only.".format(shared.moving_mean.name)
        )

    REFUSED = (
        "Parts of the model {} were placed by compat.device(), which parallelize() on several "
        "devices would undo. Use one of the two."
    )

    def test_not_with_replicas(self, keras):
        model = compiled(keras, tweets(keras, compat.device, unroll=True))
        told = refusal(compat.UnsupportedError, compat.parallelize, model)
        assert told == self.REFUSED.format(model.name)

    def test_not_with_replicas_of_a_subclass_either(self, keras):
        class Placed(keras.models.Model):
            def __init__(self):
                super(Placed, self).__init__(name="placed")
                self.out = keras.layers.Dense(1)

            def call(self, x):
                with compat.device(1):
                    return self.out(x)

        model = compat.parallelize(Placed())
        model.compile("sgd", "mse")
        batch = np.ones((8, 4)), np.ones((8, 1))
        told = refusal(compat.UnsupportedError, model.train_on_batch, *batch)
        assert told == self.REFUSED.format("placed")

    def test_what_was_built_outside_moves_alone(self, keras):
        """With the optimizer's state, each beside its weight."""
        inputs, targets = data(16)
        plain, model = [
            compiled(keras, tweets(keras, device, unroll=True), "adam")
            for device in (anywhere, compat.device)
        ]
        for devices in ([0], [2]):
            assert compat.parallelize(model, gpus=devices) is model
            for each in (plain, model):
                each.fit(inputs, targets, verbose=0)
        assert largest_difference(plain.get_weights(), model.get_weights()) < 1e-5
        (executor,) = executors(model)
        assert {str(array.context) for array in executor.arg_dict.values()} == {"cpu(1)", "cpu(2)"}
        updater = model._module._curr_module._updater
        names = model._module._curr_module._exec_group.param_names
        assert len(updater.states) == 5
        for number, state in updater.states.items():
            assert {a.context for a in state} == {executor.arg_dict[names[number]].context}

    def test_arrays_and_parameters_of_gluon(self, keras):
        import mxnet as mx

        with compat.device(2):
            net = mx.gluon.nn.Dense(3, in_units=4)
            net.initialize()
            inputs = mx.nd.ones((5, 4))
            net.hybridize()
            with mx.autograd.record():
                out = net(inputs)
            out.backward()
        assert str(inputs.context) == str(out.context) == "cpu(2)"
        assert str(net.weight.grad().context) == "cpu(2)"
        assert (net.weight.grad().asnumpy() == 5).all()
        assert str(net.weight.data().context) == "cpu(2)"
        assert str(mx.nd.ones(1).context) == "cpu(0)"
