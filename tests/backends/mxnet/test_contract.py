"""MXNet under keras-mxnet: the contract, and what is special to it."""

import contextlib
import functools
import inspect
import sys

import numpy as np
import pytest

import compat
from compat import _keras
from compat._backends.mxnet.profiler import products as placement
from compat._configuration import registry
from compat._ranks import Job
from compat.testing import (
    CASES,
    in_span,
    initialise,
    largest_difference,
    optimizer,
    span,
)
from compat.testing.models import fit_in_order

from ..interruptions import interrupted
from ..messages import refusal
from ..shared_parts import KerasParts
from .gluon_models import running_statistics
from .keras_models import replicas_of


def executors(model):
    """Return the executors of a plain model."""
    return _keras.inner_model(model)._module._curr_module._exec_group.execs


def mxnet_error():
    from mxnet.base import MXNetError

    return MXNetError


class TestMXNet(KerasParts):
    product_in_timelines = "dot"
    backend = "mxnet"
    random_numbers_come_back = False  # nothing can read or set their state
    across_rows = "found"  # right, and a warning says what it costs
    copies = ()  # a deep copy of keras-mxnet's does not train as its model does, nor can it pickle

    def placement(self, model, inputs, targets):
        if "train" not in replicas_of(model).phases:
            model.train_on_batch(inputs, targets)  # of the first step, some rows are tried besides
        return placement(lambda: model.train_on_batch(inputs, targets))

    def test_replicas_are_the_same_wherever_a_step_was_interrupted(self, keras):
        """Also while executors are made, for batches of another size."""
        inputs, targets = CASES["dense"].data(16)
        models = plain, parallel = self.both(keras, "dense")
        for model in models:
            model.compile(keras.optimizers.SGD(0.05), CASES["dense"].loss)  # has no state
        parallel.train_on_batch(inputs, targets)
        step = functools.partial(parallel.train_on_batch, inputs[:13], targets[:13])
        count = interrupted(step, lambda calls: False)
        for number in range(1, count, count // 8):
            parallel.train_on_batch(inputs, targets)
            with contextlib.suppress(KeyboardInterrupt):
                interrupted(step, lambda calls, number=number: len(calls) == number)
            plain.set_weights(parallel.get_weights())
            losses = [model.train_on_batch(inputs, targets) for model in models]
            np.testing.assert_allclose(*losses, rtol=1e-5)
            self.close(plain.get_weights(), parallel.get_weights())

    def devices_of(self, model, inputs, targets):
        """MXNet's profiler aborts from cpu(4) on where there are two cores: ask the executors."""
        model.train_on_batch(inputs, targets)
        bodies = replicas_of(model).phases["train"].bodies
        for body in bodies:
            gradients = [gradient for gradient in body.grad_dict.values() if gradient is not None]
            assert {a.context for a in body.outputs} == {a.context for a in gradients}
        return sorted(str(body.outputs[0].context) for body in bodies)

    def shard_sizes(self, model, inputs, targets):
        model.train_on_batch(inputs, targets)
        name = model.inputs[0].name
        bodies = replicas_of(model).phases["train"].bodies
        assert [str(b.arg_dict[name].context) for b in bodies] == ["cpu(0)", "cpu(1)", "cpu(2)"]
        return [body.arg_dict[name].shape[0] for body in bodies]

    def test_masked_sequence_loss(self, keras):
        """As the contract's, with a weight for each step: the plain model can do no other.

        keras-mxnet on MXNet 1.9 does not know that such a loss has two dimensions, and
        multiplies it, (16, 3), by the weights of 16 samples.
        """
        random = np.random.RandomState(5)
        inputs = random.normal(size=(45, 3, 4)).astype("float32")
        for row, length in enumerate(random.randint(1, 4, size=45)):
            inputs[row, length:] = 0
        targets = random.normal(size=(45, 3, 2)).astype("float32")
        weights = random.uniform(size=(45, 3)).astype("float32")
        layers, models = keras.layers, []
        for parallel in (False, True):
            steps = layers.Input(shape=(3, 4))
            x = layers.LSTM(5, return_sequences=True, unroll=True)(layers.Masking()(steps))
            model = keras.models.Model(steps, layers.TimeDistributed(layers.Dense(2))(x))
            self.ready(keras, model, parallel)
            with pytest.raises((RuntimeError, mxnet_error()), match="broadcast"):
                model.train_on_batch(inputs, targets)
            model.compile(optimizer(keras, "sgd"), "mse", sample_weight_mode="temporal")
            fit_in_order(model, inputs, targets, sample_weight=weights)
            models.append(model.get_weights())
        self.close(*models)

    # Two models that share layers train copies of the weights, also on one device; one is compared
    # by test_a_script_without_compat_runs_on_all_devices.
    test_compiled_models_train_to_the_numbers_of_one_device = None

    def test_a_context_of_the_script_is_kept(self, keras, automatic):
        model = self.build(keras, "dense")
        self.check_left_alone(model, "it is compiled with context=['cpu(0)'].", context=["cpu(0)"])
        assert getattr(model, "_compat_replicas", None) is None

    # What the head computes -------------------------------------------------------------------

    def test_scalar_output(self, keras):
        """A model whose output is one number for the whole batch, as in keras-yolo3."""
        K = keras.backend

        def build():
            layers = keras.layers
            image, truth = layers.Input(shape=(8,)), layers.Input(shape=(4,))
            guess = layers.Dense(4)(image)
            square = layers.Lambda(lambda pair: K.mean(K.square(pair[0] - pair[1])) * 2.0)
            return keras.models.Model([image, truth], square([guess, truth]))

        inputs, targets = CASES["dense"].data(45)
        # Plain keras-mxnet fails where a loss leaves its targets out.
        plain, parallel = self.train_both(
            keras, build, lambda y_true, y_pred: y_pred + 0 * K.mean(y_true),
            [inputs, targets], np.zeros(45),
        )  # fmt: skip
        results = [m.predict_on_batch([inputs, targets]) for m in (plain, parallel)]
        assert results[0].shape == results[1].shape == (1,)
        np.testing.assert_allclose(*results, rtol=1e-5)

    @pytest.mark.parametrize("optimizer_name", in_span(["sgd", "adam"], ["adam"]))
    def test_sparse_gradients_of_an_embedding(self, keras, optimizer_name):
        def build():
            layers = keras.layers
            embedding = layers.Embedding(20, 5, input_length=6, sparse_grad=True)
            return keras.models.Sequential([embedding, layers.Flatten(), layers.Dense(1)])

        if "sparse_grad" not in inspect.signature(keras.layers.Embedding).parameters:
            pytest.skip("embeddings have sparse gradients since keras-mxnet 2.2")
        inputs, targets = CASES["lstm"].data(45)
        models = []
        for parallel in (False, True):
            model = self.ready(keras, build(), parallel, "mse", optimizer_name)
            fit_in_order(model, inputs, targets, epochs=3)
            models.append(model)
        self.close(models[0].get_weights(), model.get_weights())
        name = model.layers[0].embeddings.name
        for body in replicas_of(model).phases["train"].bodies:
            assert body.grad_dict[name].stype == "row_sparse"

    def test_layer_with_averages_of_its_own(self, keras):
        """They see the whole batch, since no row of the outputs depends on their new values."""
        K = keras.backend

        class Centre(keras.layers.Layer):
            def build(self, shape):
                self.moving = self.add_weight(
                    name="moving", shape=shape[1:], initializer="zeros", trainable=False
                )
                super(Centre, self).build(shape)

            def call(self, x):
                mean = K.mean(x, axis=0)
                self.add_update([(self.moving, self.moving * 0.5 + mean * 0.5)], x)
                return x - self.moving

        def build():
            layers = keras.layers
            return keras.models.Sequential(
                [layers.Dense(5, input_shape=(8,)), Centre(), layers.Dense(4)]
            )

        inputs, targets = CASES["dense"].data(45)
        self.train_both(keras, build, "mse", inputs, targets)

    # Where mathematics forbids one device's numbers -------------------------------------------

    @pytest.mark.parametrize("rows", in_span([61, 2], [61]))
    def test_batchnorm_by_numbers(self, keras, rows):
        """Each shard by its own statistics; one update of the averages, weighted by size."""
        layers = keras.layers
        norm = layers.BatchNormalization(momentum=0.75, input_shape=(8,))
        model = compat.parallelize(keras.models.Sequential([norm, layers.Dense(4)]))
        model.compile(keras.optimizers.SGD(lr=0.0), "mse")
        inputs, targets = CASES["dense"].data(rows)
        model.train_on_batch(inputs * 3 + 1, targets)
        by_name = dict(zip([w.name.split("/")[-1] for w in norm.weights], norm.get_weights()))
        moving = [v for n, v in sorted(by_name.items()) if n.startswith("moving")]
        expected = running_statistics(inputs * 3 + 1)
        np.testing.assert_allclose(moving, expected, rtol=1e-4, atol=1e-6)
        # The replicas hold the same averages, so that the next step starts from one state.
        replicas = replicas_of(model)
        for held in replicas.arrays[1:]:
            for name in replicas.model._auxs:
                assert (held[name].asnumpy() == replicas.arrays[0][name].asnumpy()).all()

    @span
    def test_moving_averages_are_never_read_too_early(self, keras):
        """MXNet's engine does not order the reads after the backward pass's writes."""
        layers = keras.layers
        norm = layers.BatchNormalization(momentum=0.5, input_shape=(8,))
        model = compat.parallelize(keras.models.Sequential([norm, layers.Dense(4)]))
        model.compile(keras.optimizers.SGD(lr=0.0), "mse")
        inputs, targets = CASES["dense"].data(2)
        start = model.get_weights()
        results = []
        for _ in range(25):
            model.set_weights(start)
            model.train_on_batch(inputs, targets)
            results.append(np.concatenate([w.ravel() for w in norm.get_weights()]))
        assert np.abs(results[0] - np.concatenate([w.ravel() for w in start[:4]])).max() > 0.1
        assert (np.array(results) == results[0]).all()

    def test_dropout_masks_differ_between_replicas(self, keras):
        layers = keras.layers
        dropout = layers.Dropout(0.5, input_shape=(200,), seed=7)
        model = compat.parallelize(keras.models.Sequential([dropout]))
        model.compile("sgd", "mse")
        model.train_on_batch(np.ones((30, 200)), np.ones((30, 200)))
        masks = [
            body.outputs[0].asnumpy() != 0 for body in replicas_of(model).phases["train"].bodies
        ]
        for first, second in ((0, 1), (0, 2), (1, 2)):
            assert 0.4 < (masks[first] == masks[second]).mean() < 0.6
        assert all(0.4 < mask.mean() < 0.6 for mask in masks)

    @pytest.mark.parametrize("rows", [7, 2])
    def test_stateful_rnn_keeps_the_states_of_each_row(self, keras, rows):
        """Unrolled or not: of a loop, keras-mxnet gives all states the last one's value."""

        def build(unroll):
            layers = keras.layers
            lstm = layers.LSTM(
                5, stateful=True, unroll=unroll, implementation=2, batch_input_shape=(rows, 3, 4)
            )
            return keras.models.Sequential([lstm, layers.Dense(2)])

        random = np.random.RandomState(5)
        inputs, targets = random.normal(size=(3 * rows, 3, 4)), random.normal(size=(3 * rows, 2))
        results = []
        for unroll, parallel in ((True, False), (False, False), (False, True)):
            model = initialise(build(unroll))
            if parallel:
                compat.parallelize(model)
            model.compile(optimizer(keras, "sgd"), "mse")
            fit_in_order(model, inputs, targets, batch_size=rows)
            again = [model.predict(inputs[:rows], batch_size=rows) for _ in range(2)]
            model.reset_states()
            fresh = model.predict(inputs[:rows], batch_size=rows)
            tested = model.evaluate(inputs, targets, batch_size=rows, verbose=0)
            results.append((model.get_weights(), again + [fresh], tested))
        expected, outputs, loss = results[0]
        for weights, predicted, tested in results[1:]:
            self.close(expected, weights)
            self.close(outputs, predicted)
            assert abs(loss - tested) < 1e-5
        assert np.abs(outputs[0] - outputs[1]).max() > 1e-4  # the states count

    # Between plain and parallel ---------------------------------------------------------------

    def test_it_is_exported_to_mxnet(self, keras, tmp_path):
        """With the weights that it has then, each time."""
        import mxnet as mx

        inputs, targets = CASES["dense"].data(13)
        model = self.compiled(keras, "dense", parallel=True)
        for epoch in range(2):
            model.train_on_batch(inputs, targets)
            prefix = str(tmp_path / "exported")
            names, shapes = keras.models.save_mxnet_model(model, prefix=prefix, epoch=epoch)
            assert (names, shapes) == keras.backend.get_mxnet_model_info(model)
            symbol, args, auxs = mx.model.load_checkpoint(prefix, epoch)
            module = mx.mod.Module(symbol, data_names=names, label_names=None)
            module.bind(data_shapes=shapes, for_training=False)
            module.set_params(args, auxs)
            predicted = module.predict(mx.io.NDArrayIter(inputs, batch_size=13)).asnumpy()
            self.close(predicted, model.predict(inputs), 1e-6)
        assert len(self.devices_of(model, inputs, targets)) > 1

    def test_one_device_leaves_nothing_behind(self, keras):
        model = self.compiled(keras, "dense")
        before = dict(vars(model))
        compat.parallelize(model, gpus=1)
        assert vars(model) == before
        inputs, targets = CASES["dense"].data(16)
        compat.parallelize(model)
        model.train_on_batch(inputs, targets)
        for number in (0, 2):
            compat.parallelize(model, gpus=[number])
            assert set(vars(model)) == set(before)
            model.train_on_batch(inputs, targets)
            (executor,) = executors(model)
            context = executor.arg_dict[model.inputs[0].name].context
            assert str(context) == "cpu({})".format(number)

    def test_compiled_again_keeps_weights(self, keras):
        inputs, targets = CASES["dense"].data(45)
        plain, model = self.compiled(keras, "dense"), self.compiled(keras, "dense", parallel=True)
        shared = keras.optimizers.SGD(0.05, momentum=0.9)  # its state is each model's own
        for each in (plain, model) * 2:
            fit_in_order(each, inputs, targets)
            each.get_weights()  # plain Keras forgets what was not asked for
            compat.parallelize(model, gpus=[0, 2])
            each.compile(shared, "mse")
        model.train_on_batch(inputs, targets)
        model.compile(optimizer(keras, "adam"), "mse")
        model._sync_weights()  # which everything that reads weights calls
        for name, array in replicas_of(model).arrays[0].items():
            assert (model._args[name].asnumpy() == array.asnumpy()).all()
        plain.train_on_batch(inputs, targets)
        self.close(plain.get_weights(), model.get_weights())

    def test_predicts_without_compile(self, keras):
        inputs, _ = CASES["dense"].data(13)
        plain, parallel = self.build(keras, "dense"), self.build(keras, "dense")
        compat.parallelize(parallel)
        self.close([plain.predict(inputs)], [parallel.predict(inputs)], 1e-6)

    # Models that are built by their data ------------------------------------------------------

    def unbuilt(self, keras, kind):
        layers = keras.layers
        if kind == "sequential":
            return keras.models.Sequential([layers.Dense(6), layers.Dense(4, activation="softmax")])

        class Perceptron(keras.models.Model):
            def __init__(self):
                super(Perceptron, self).__init__(name="perceptron")
                self.hidden = layers.Dense(6, activation="tanh")
                self.out = layers.Dense(4, activation="softmax")

            def call(self, x):
                return self.out(self.hidden(x))

        return Perceptron()

    @pytest.mark.row("subclassed models")
    @pytest.mark.parametrize(
        "kind, moment, optimizer_name",
        in_span(
            [
                ("subclassed", "before", "adam"),
                ("subclassed", "after", "sgd"),
                ("sequential", "before", "sgd"),
            ],
            [("subclassed", "before", "adam")],
        ),
    )
    def test_models_whose_shapes_come_with_data(self, keras, kind, moment, optimizer_name):
        inputs, targets = CASES["dense"].data(61)
        models = []
        if _keras.wraps_a_model(keras.models.Sequential()):  # before Keras 2.2
            with pytest.raises(TypeError):  # a model has inputs, or is none
                self.unbuilt(keras, kind)
            return
        for parallel in (False, True):
            model = self.unbuilt(keras, kind)
            if parallel and moment == "before":
                assert compat.parallelize(model) is model
            model.compile(optimizer(keras, optimizer_name), "categorical_crossentropy")
            model.train_on_batch(inputs, targets)  # its shapes are known from the first batch
            if parallel and moment == "after":
                compat.parallelize(model)
            start = initialise(model).get_weights()
            for rows in (61, 16, 2, 1):
                model.fit(inputs[:rows], targets[:rows], batch_size=16, shuffle=False, verbose=0)
            models.append(model)
        assert largest_difference(start, models[0].get_weights()) > 1e-3
        self.close(*[model.get_weights() for model in models])
        self.close(*[[model.predict(inputs)] for model in models])
        assert sorted(self.placement(models[1], inputs, targets)) == ["cpu(0)", "cpu(1)", "cpu(2)"]
        for forward, backward in self.placement(models[1], inputs, targets).values():
            assert forward > 0 and backward > 0

    # keras-mxnet fixed ------------------------------------------------------------------------

    @pytest.mark.parametrize("parallel", [False, True])
    def test_lstm_not_unrolled_learns_and_tells(self, keras, parallel, tmp_path):
        """It began with zeros, and get_weights() never told what it had learnt.

        With implementation=2: under 1, keras-mxnet's loop adds the bias of the input gate to
        all four gates.
        """
        inputs, targets = CASES["lstm"].data(45)
        looped, unrolled = [
            initialise(CASES["lstm"].build(keras, unroll=unroll, implementation=2))
            for unroll in (False, True)
        ]
        start = looped.get_weights()
        for model in (looped, unrolled):
            if parallel:
                compat.parallelize(model)
            model.compile(optimizer(keras, "sgd"), "binary_crossentropy")
            fit_in_order(model, inputs, targets, epochs=3)
        self.close(looped.get_weights(), unrolled.get_weights())
        changed = [np.abs(a - b).max() for a, b in zip(start, looped.get_weights())]
        assert min(changed) > 1e-4, changed
        path = str(tmp_path / "model.h5")
        looped.save(path)
        self.close(keras.models.load_model(path).get_weights(), looped.get_weights(), 1e-12)

    def test_weights_of_a_model_not_compiled_last(self, keras):
        inputs, targets = CASES["dense"].data(16)
        first, last = self.compiled(keras, "dense"), self.compiled(keras, "dense")
        start = first.get_weights()
        first.train_on_batch(inputs, targets)
        trained = first.get_weights()
        assert largest_difference(start, trained) > 1e-3
        first.set_weights(start)
        last.train_on_batch(inputs, targets)
        self.close(first.get_weights(), start, 1e-12)
        assert largest_difference(start, last.get_weights()) > 1e-3
        np.testing.assert_allclose(
            first.predict(inputs), self.compiled(keras, "dense").predict(inputs), rtol=1e-6
        )

    @pytest.mark.parametrize("name", in_span(["SGD", "Adam", "Nadam", "RMSprop"], ["Adam"]))
    def test_optimizer_state_is_saved(self, keras, name, tmp_path):
        inputs, targets = CASES["dense"].data(45)
        options = {"momentum": 0.9, "decay": 0.01} if name == "SGD" else {}
        model = compat.parallelize(self.build(keras, "dense"))
        model.compile(getattr(keras.optimizers, name)(**options), "mse")
        fit_in_order(model, inputs, targets)
        path = str(tmp_path / "model.h5")
        model.save(path)
        loaded = keras.models.load_model(path)
        loaded.save(path)  # nothing trained in between: the state is still there
        again = keras.models.load_model(path)
        for each in (model, loaded, again):
            fit_in_order(each, inputs, targets)
            self.close(model.get_weights(), each.get_weights(), 1e-6)

    def test_optimizer_state_is_set_while_a_model_trains(self, keras):
        """Ranks take rank 0's so, which may be none."""
        inputs, targets = CASES["dense"].data(45)
        model = self.compiled(keras, "dense", "adam")
        states, weights = [], [model.get_weights()]
        for _ in range(2):
            states.append(model.optimizer.get_weights())
            fit_in_order(model, inputs, targets)
            weights.append(model.get_weights())
        for moment in (1, 0):
            model.set_weights(weights[moment])
            model.optimizer.set_weights(states[moment])
            for place, value in enumerate(states[moment]):
                np.testing.assert_array_equal(model.optimizer.get_weights()[place], value)
            fit_in_order(model, inputs, targets)
            self.close(weights[moment + 1], model.get_weights(), 1e-6)

    def test_ranks_without_horovod_say_what_is_missing(self, keras, monkeypatch):
        for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2")):
            monkeypatch.setenv("HOROVOD_" + name, value)
        model = keras.models.Sequential([keras.layers.Dense(1, input_shape=(3,))])
        job = Job(2, sys.executable, {})
        for call in (
            lambda: compat.parallelize(model),
            lambda: registry.load("mxnet").launcher(job),
        ):
            assert refusal(compat.NotInstalledError, call) == (
                "Ranks of mxnet train together through Horovod, which is not installed. Build it "
                "where mxnet is: HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MXNET=1 pip install "
                "--no-build-isolation --no-cache-dir horovod==0.28.1 (that needs a C++ compiler, "
                "setuptools<60 and cmake<4). Or start the script without a launcher (compat run "
                "without -n)."
            )
