"""TensorFlow 1 under keras 2.2.4, keras 2.3.1 and tf.keras: ``COMPAT_TEST_KERAS`` chooses."""

import collections
import contextlib
import copy
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat import _keras
from compat._backends import tensorflow1
from compat._backends.tensorflow1 import sessions, timeline
from compat._backends.tensorflow1.graph import ancestors, v1_names
from compat._backends.tensorflow1.step_order import counts_without_order
from compat._backends.tensorflow1.timeline import partitions, products
from compat.testing import (
    CASES,
    DEVICES,
    in_span,
    initialise,
    keras_under_test,
    largest_difference,
    optimizer,
    slow,
    span,
)

from .. import tensorflow1_hooks
from ..shared_parts import KerasParts

v1 = v1_names(tf)


def function_of(model, name="train_function"):
    """One of the three functions of a Keras model, made."""
    model = _keras.inner_model(model)
    getattr(model, "_make_" + name)()
    return getattr(model, name)


def record(model, inputs, targets):
    """One training step, as TensorFlow recorded it: the graphs it ran, and their statistics."""
    function_of(model)
    with timeline.recorded(v1, output_partition_graphs=True) as runs:
        model.train_on_batch(inputs, targets)
    return max(runs, key=v1.RunMetadata.ByteSize)  # others read and write variables, for a trial


def unordered_reads(model):
    """Reads of what the optimizer counts that may come before or after it has grown."""
    operations, _ = ancestors([function_of(model).updates_op], set())
    found = []
    for counter in vars(model.optimizer).values():
        handle = getattr(counter, "handle", None)
        uses = [op for op in operations if handle is not None and handle in list(op.inputs)]
        writes = [op for op in uses if op.type.startswith("Assign")]
        assert len(writes) <= 1
        found += [
            read
            for read in uses
            for write in writes
            if read.type == "ReadVariableOp"
            and write not in ancestors([read], set())[0]
            and read not in ancestors([write], set())[0]
        ]
    return found


#: Before 2.2, a Model needs its inputs and outputs.
HAS_SUBCLASSED_MODELS = not _keras.wraps_a_model(keras_under_test().models.Sequential())


class TestTensorFlow1(KerasParts):
    backend = "tensorflow1"
    in_sessions = True  # Keras runs in sessions
    plain_adam_is_random = True
    product_in_timelines = "MatMul: "
    # One product a step in place of eight, which take long to build: the examples have these, where
    # they are the default.
    lstm_options = {"implementation": 2}

    @property
    def exempt_hooks(self):
        keras = keras_under_test()
        built = {"model.build": "the model is built before it is parallelized"}
        return dict(tensorflow1_hooks.exempt(keras), **({} if HAS_SUBCLASSED_MODELS else built))

    @pytest.fixture(autouse=True)
    def own_graph(self, keras):
        """All models of a process share one graph: the more it holds, the longer each run."""
        yield
        keras.backend.clear_session()

    tolerance = 5e-6  # rounding differs: three sums of a third of the rows each, then one

    def compiled(self, keras, name, optimizer_name="sgd", parallel=False):
        """Adam of keras 2.2 and 2.3 repeats only with the order that ``parallelize`` gives it."""
        model = super().compiled(keras, name, optimizer_name, parallel)
        if optimizer_name == "adam":
            if not parallel:
                self.instance().parallelize(model, self.instance().devices()[:1])
            assert not unordered_reads(model)
        return model

    @span
    def test_nothing_orders_the_step_counter_of_plain_adam(self, keras):
        """In keras 2 the plain model does not repeat; tf.keras has an order from 1.14 on."""
        model = super().compiled(keras, "dense", "adam")
        assert bool(unordered_reads(model)) == counts_without_order(model)

    @pytest.mark.parametrize("gpus", in_span([None, 1], [None]))
    def test_first_step_of_adam_is_step_one(self, keras, gpus):
        """Its size is the learning rate, whatever the gradient, and verification sees the same.

        Also in fit(): a session that has run knows no new order (keras 2.3).
        """
        layers, K = keras.layers, keras.backend
        model = keras.models.Sequential([layers.Dense(3, input_shape=(4,))])
        compat.parallelize(initialise(model), gpus).compile(optimizer(keras, "adam"), "mse")
        record = self.verified(model) if gpus is None else None
        inputs = CASES["dense"].data(13)[0][:, :4]
        for _ in range(2):
            before = model.get_weights()[-1]
            model.fit(inputs, np.full((13, 3), 9.0), batch_size=13, epochs=1, verbose=0)
            steps = np.abs(model.get_weights()[-1] - before) / 0.01
            np.testing.assert_allclose(steps, 1, rtol=1e-2)
        counts = [int(K.get_value(model.optimizer.iterations)) for _ in range(2)]
        counts += [int(model.optimizer.get_weights()[0])]
        assert counts == [2, 2, 2]  # reading does not count
        assert not unordered_reads(model)
        assert gpus == 1 or (record.steps["train"] == 1 and not record.failure)

    @slow
    def test_nadam_reads_its_schedule_before_it_is_set(self, keras):
        model = keras.models.Sequential([keras.layers.Dense(3, input_shape=(4,))])
        compat.parallelize(model).compile(keras.optimizers.Nadam(), "mse")
        model.train_on_batch(np.ones((6, 4)), np.ones((6, 3)))
        assert not unordered_reads(model)

    def test_a_model_on_a_variable_is_left_alone(self, keras, automatic):
        layers, K = keras.layers, keras.backend
        inputs = layers.Input(tensor=K.variable(np.ones((6, 4), "float32")))
        if not hasattr(inputs, "assign"):
            return  # this Keras takes its value
        model = keras.models.Model(inputs, layers.Dense(3)(inputs))
        because = "one of its inputs is a variable, which has no rows to divide."
        self.check_left_alone(model, because)
        model.train_on_batch(None, np.ones((6, 3)))

    @slow
    def test_tensors_are_fed_in_place_of_arrays(self, keras):
        """Keras 2.2 and 2.3 run them first; their rows are TensorFlow's numbers."""
        if keras.__name__ != "keras" or not HAS_SUBCLASSED_MODELS:
            return  # tf.keras builds the model on them
        K = keras.backend
        results = []
        for parallel in (False, True):
            model = self.compiled(keras, "dense", parallel=parallel)
            inputs, targets = map(K.constant, CASES["dense"].data(12))
            history = model.fit(inputs, targets, steps_per_epoch=2, epochs=1, verbose=0)
            results.append([np.array(history.history["loss"])] + model.get_weights())
        self.close(*results)

    def test_parts_that_the_script_has_placed_are_kept(self, keras, automatic, configuration):
        inputs = keras.layers.Input(shape=(4,))
        with compat.device(1):
            outputs = keras.layers.Dense(3)(inputs)
        model = keras.models.Model(inputs, outputs)
        device = configuration.devices[1]
        self.check_left_alone(model, "parts of it were placed on {} by device().".format(device))

    @slow
    def test_compile_keeps_what_one_device_needs(self, keras):
        """A Sequential of a Keras before 2.2 makes its inner model anew then."""
        model = keras.models.Sequential([keras.layers.Dense(3, input_shape=(4,))])
        backend = self.instance()
        backend.parallelize(model, backend.devices()[:1])
        self.verified(model)
        for _ in range(2):
            model.compile(optimizer(keras, "adam"), "mse")
            assert not unordered_reads(model)
            assert type(function_of(model)).__name__ == "VerifiedFunction"
        backend.verify(model, None)
        assert type(function_of(model)).__name__ != "VerifiedFunction"
        assert not unordered_reads(model)
        backend.parallelize(model, backend.devices())
        backend.parallelize(model, backend.devices()[:1])
        model.compile(optimizer(keras, "adam"), "mse")
        assert not unordered_reads(model)

    @slow
    def test_each_next_model_is_built_as_the_first(self, keras, monkeypatch):
        """In the graph that all models of a process share, and as often as plain Keras runs it.

        Besides, the first step is tried: on three rows, twice, on two parts of them, on two other
        parts, and in another order.
        """
        from tensorflow.python.client.session import BaseSession

        counted = collections.Counter()

        def count(name):
            plain = getattr(BaseSession, name)

            def counting(*args, **kwargs):
                counted[name] += 1
                return plain(*args, **kwargs)

            monkeypatch.setattr(BaseSession, name, counting)

        count("run")
        count("_extend_graph")
        inputs, targets = CASES["dense"].data(13)

        def built(devices):
            counted.clear()
            before = len(v1.get_default_graph().get_operations())
            model = CASES["dense"].build(keras)
            if devices > 1:
                compat.parallelize(model, gpus=devices)
            model.compile(optimizer(keras, "sgd"), "mse")
            model.train_on_batch(inputs, targets)
            return len(v1.get_default_graph().get_operations()) - before, dict(counted)

        built(1)  # the first of a process also makes what all share
        plain, two, three = built(1), built(2), built(3)
        assert built(3) == three
        assert two[1] == three[1] == {name: count + 7 for name, count in plain[1].items()}
        assert three[0] - two[0] <= plain[0]

    def name(self, device):
        """What compat calls the device that TensorFlow's graphs name so."""
        return device

    def ran(self, model, inputs, targets):
        """The operations that one training step ran, by device."""
        ran = partitions(record(model, inputs, targets))
        return {self.name(device): nodes for device, nodes in ran.items()}

    def placement(self, model, inputs, targets):
        return products(self.ran(model, inputs, targets))

    def shard_sizes(self, model, inputs, targets):
        rows = {}
        for stats in record(model, inputs, targets).step_stats.dev_stats:
            for node in stats.node_stats:
                layer = node.node_name.startswith("replica_") and "/hidden" in node.node_name
                shape = node.output[0].tensor_description.shape if layer and node.output else None
                if shape and len(shape.dim) == 2:
                    rows[stats.device] = shape.dim[0].size
        return [rows[device] for device in sorted(rows)]

    # One step, right every time ------------------------------------------------------------

    @pytest.mark.parametrize("devices", [1, DEVICES])
    def test_one_step_is_right_200_times_of_200(self, keras, devices):
        """keras 2.2.4 alone is wrong in some of 200: its reference variables race.

        That a step is right as such, the contract's tests tell.
        """
        inputs, targets = CASES["dense"].data(61)
        layers = keras.layers
        model = keras.models.Sequential(
            [layers.Dense(32, activation="tanh", input_shape=(8,)), layers.Dense(4)]
        )
        compat.parallelize(initialise(model), gpus=devices)
        try:
            model.compile(keras.optimizers.SGD(learning_rate=0.5), "mse")
        except TypeError:
            model.compile(keras.optimizers.SGD(lr=0.5), "mse")
        start = model.get_weights()
        found = []
        for _ in range(200):
            model.set_weights(start)
            model.train_on_batch(inputs, targets)
            found.append(model.get_weights())
        assert largest_difference(start, found[0]) > 1e-3
        assert max(largest_difference(found[0], each) for each in found) <= 1e-6

    def check_nothing_undivided(self, model, ran, more_than=0):
        """That a step ran no operation of the part of the graph that computes the whole batch.

        Arguments:
            more_than: that part has more operations than these.
        """
        names = {node.name for nodes in ran.values() for node in nodes}
        undivided = vars(model)["_compat_functions"]._replicas.part.operations
        assert len(undivided) > more_than
        assert not names & {op.name for op in undivided}

    def test_functions_may_be_copied(self, keras):
        model = compat.parallelize(CASES["dense"].build(keras))
        model.compile(optimizer(keras, "sgd"), "mse")
        function = function_of(model)
        assert copy.copy(function).made is function.made

    # What runs ------------------------------------------------------------------------------

    def test_nothing_of_the_undivided_batch_part_runs(self, keras):
        layers = keras.layers
        model = keras.models.Sequential(
            [
                layers.Dense(6, activation="relu", activity_regularizer="l2", input_shape=(8,)),
                layers.BatchNormalization(),
                layers.Dropout(0.5),
                layers.Dense(4, activation="softmax"),
            ]
        )
        compat.parallelize(model).compile("sgd", "categorical_crossentropy", ["accuracy"])
        inputs, targets = CASES["dense"].data(13)
        ran = self.ran(model, inputs, targets)
        self.check_nothing_undivided(model, ran, more_than=30)
        for index, device in enumerate(sorted(ran)):
            here = {node.name.split("/")[0] for node in ran[device] if timeline.is_product(node)}
            assert "replica_{}".format(index) in str(sorted(here))

    @slow
    def test_moving_variance_is_the_mean_of_the_replicas(self, keras):
        """After one step from the same start: each replica's rows as a batch of their own."""
        inputs, _ = CASES["dense"].data(13)
        start, shards = [np.zeros(8), np.ones(8)], np.split(inputs, [4, 8])
        alone = [self.moving_averages_after(keras, start, shard, 1) for shard in shards]
        expected = [
            np.average(values, axis=0, weights=[len(shard) for shard in shards])
            for values in zip(*alone)
        ]
        found = self.moving_averages_after(keras, start, inputs, DEVICES)
        self.close(expected, found, 1e-5)

    def moving_averages_after(self, keras, start, inputs, devices):
        layers = keras.layers
        options = {"momentum": 0.5, "center": False, "scale": False}
        model = keras.models.Sequential([layers.BatchNormalization(input_shape=(8,), **options)])
        compat.parallelize(model, gpus=devices).compile("sgd", "mse")
        model.set_weights(start)
        model.train_on_batch(inputs, inputs)
        return model.get_weights()

    @pytest.mark.parametrize("seed", [None, 7])
    def test_dropout_masks_of_replicas_are_independent(self, keras, seed):
        model = keras.models.Sequential([keras.layers.Dropout(0.5, seed=seed, input_shape=(40,))])
        compat.parallelize(model).compile("sgd", "mse")
        ones = np.ones((12, 40), "float32")
        losses = model.train_on_batch(ones, ones)
        assert np.isfinite(losses)
        (outputs,) = whole_outputs(keras, model, ones, training=True)
        masks = [shard.ravel() > 0 for shard in np.split(outputs, 3)]
        for first, second in [(0, 1), (1, 2), (0, 2)]:
            assert 0.3 < np.mean(masks[first] == masks[second]) < 0.7

    # Losses, states, outputs ------------------------------------------------------------------

    @span
    def test_losses_of_layers_are_those_of_the_whole_batch(self, keras):
        """keras 2 sums an activity regulariser over the batch, tf.keras averages it."""

        def build():
            layers = keras.layers
            inputs = layers.Input(shape=(8,))
            hidden = layers.Dense(
                6, activation="tanh", activity_regularizer="l2", kernel_regularizer="l1"
            )(inputs)
            model = keras.models.Model(inputs, layers.Dense(4)(hidden))
            model.add_loss(0.1 * keras.backend.mean(keras.backend.square(hidden)))
            return model

        inputs, targets = CASES["dense"].data(45)
        models = self.train_both(keras, build, "mse", inputs, targets)
        losses = [model.train_on_batch(inputs[:13], targets[:13]) for model in models]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)

    def test_model_that_is_built_by_its_first_batch(self, keras):
        inputs, targets = CASES["dense"].data(45)
        models = []
        for parallel in (False, True):
            layers = keras.layers
            model = keras.models.Sequential()
            if parallel:
                assert compat.parallelize(model) is model
            # Before Keras 2.2 a first layer must know its input.
            shape = {"input_shape": (8,)} if _keras.wraps_a_model(model) else {}
            model.add(layers.Dense(6, activation="tanh", **shape))
            model.add(layers.Dense(4))
            model.compile(optimizer(keras, "sgd"), "mse")
            model.train_on_batch(inputs[:2], targets[:2])
            initialise(model)
            models.append(model)
        for model in models:
            model.optimizer.set_weights([0 * w for w in model.optimizer.get_weights()])
            model.fit(inputs, targets, batch_size=16, epochs=2, shuffle=False, verbose=0)
        self.close(models[0].get_weights(), models[1].get_weights())
        assert len(self.placement(models[1], inputs, targets)) == DEVICES

    if hasattr(tf, "custom_gradient"):  # from TensorFlow 1.7

        @span
        def test_custom_gradient(self, keras):
            """It holds tensors of the undivided graph, which must not run for that."""

            def build():
                layers = keras.layers
                return keras.models.Sequential(
                    [
                        layers.Dense(6, activation=square, input_shape=(8,)),
                        layers.Dense(4, name="last"),
                    ]
                )

            inputs, targets = CASES["dense"].data(45)
            _, model = self.train_both(keras, build, "mse", inputs, targets)
            ran = self.ran(model, inputs, targets)
            assert sorted(products(ran).values()) == [(2, 3)] * DEVICES
            self.check_nothing_undivided(model, ran)

        @span
        def test_custom_gradient_in_a_loop_is_refused(self, keras):
            rnn = keras.layers.SimpleRNN(3, activation=square, input_shape=(4, 3))
            model = keras.models.Sequential([rnn])
            model.compile("sgd", "mse")
            compat.parallelize(model)
            with pytest.raises(compat.UnsupportedError) as raised:
                model.train_on_batch(np.ones((5, 4, 3)), np.ones((5, 3)))
            assert re.fullmatch(
                r"tensorflow cannot run \S+ on several devices: it is in a loop and has a gradient "
                r"by tf.custom_gradient, which is bound to the undivided batch\. Use one device: "
                r"gpus=1, or give the operation TensorFlow's own gradient\.",
                str(raised.value),
            )

    def test_sparse_input(self, keras):
        from scipy import sparse

        def build():
            inputs = keras.layers.Input(shape=(8,), sparse=True)
            return keras.models.Model(inputs, keras.layers.Dense(4)(inputs))

        inputs, targets = CASES["dense"].data(13)
        inputs = sparse.csr_matrix(inputs)
        if keras.__name__ == "keras" and not keras.__version__.startswith("2.3"):
            self.train_both(keras, build, "mse", inputs, targets, batch=13)
        else:
            with pytest.raises(ValueError):  # on one device, neither
                build().predict(inputs)

    # Subclassed models ------------------------------------------------------------------------

    if HAS_SUBCLASSED_MODELS:

        @pytest.mark.row("subclassed models")
        @pytest.mark.parametrize(
            "moment",
            [
                pytest.param("new", marks=span),
                pytest.param("compiled", marks=slow),
                pytest.param("fitted", marks=slow),
            ],
        )
        def test_subclassed_model(self, keras, moment, tmp_path):
            """Its inputs and weights are known from the first batch on."""
            inputs, targets = CASES["dense"].data(61)
            plain, parallel = subclassed(keras), subclassed(keras)
            results = []
            for model in (plain, parallel):
                if model is parallel and moment == "new":
                    assert compat.parallelize(model) is model
                model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy", ["accuracy"])
                if model is parallel and moment == "compiled":
                    assert compat.parallelize(model) is model
                model.train_on_batch(inputs[:2], targets[:2])
                if model is parallel and moment == "fitted":
                    assert compat.parallelize(model) is model
                initialise(model)
                fitted = model.fit(
                    inputs, targets, batch_size=16, epochs=2, shuffle=False, verbose=0
                )
                results.append([fitted.history[name] for name in sorted(fitted.history)])
            self.close(plain.get_weights(), parallel.get_weights())
            self.close([plain.predict(inputs)], [parallel.predict(inputs)], 1e-6)
            np.testing.assert_allclose(results[0], results[1], rtol=1e-5)
            placement = self.placement(parallel, inputs, targets)
            assert len(placement) == DEVICES
            assert len(set(placement.values())) == 1
            assert min(map(min, placement.values())) > 0
            path = str(tmp_path / "model") + self.weights_extension
            parallel.save_weights(path)
            plain.load_weights(path)
            self.close(plain.get_weights(), parallel.get_weights(), 1e-12)

    else:

        @span
        def test_there_are_no_subclassed_models(self, keras):
            with pytest.raises(TypeError):
                subclassed(keras)

    # Parts of a model on devices of their own --------------------------------------------------

    @slow
    @pytest.mark.row("device()")
    def test_siamese_model_of_keras_faq(self, keras, configuration, siamese):
        """One layer encodes two sequences on two devices; merged and classified on a third."""
        inputs, targets = siamese_data()
        plain = siamese(None, None, None)
        model = siamese(0, 1, 2)
        for each in (plain, model):
            each.fit(inputs, targets, batch_size=16, epochs=1, shuffle=False, verbose=0)
        self.close(plain.get_weights(), model.get_weights(), 1e-6)
        devices = configuration.devices
        ran = self.ran(model, inputs, targets)
        placement = products(ran)
        assert placement[devices[0]] == placement[devices[1]]
        assert placement[devices[0]][0] >= 2 and placement[devices[0]][1] >= 3
        assert placement[devices[2]] == (1, 2)
        # No loop lies on two devices: it would wait for the other one at each step.
        loops = [
            (node.attr["frame_name"].s, device)
            for device, nodes in ran.items()
            for node in nodes
            if node.op == "Enter"
        ]
        assert len(set(loops)) == len({name for name, _ in loops}) == 4

    @pytest.mark.row("device()")
    @span
    def test_merged_on_the_cpu(self, configuration, siamese):
        """The host is the first device here: what the CPU does is no branch's part."""
        inputs, targets = siamese_steps()
        model = siamese(1, 2, "cpu", layer="Dense")
        placement = self.placement(model, inputs, targets)
        devices = configuration.devices
        assert placement[devices[1]] == placement[devices[2]]
        assert placement[devices[0]] == (1, 2)

    @slow
    @pytest.mark.row("device()")
    def test_parallelized_it_runs_whole_on_each_device(self, keras, configuration, siamese):
        inputs, targets = siamese_steps()
        plain, model = [siamese(*devices, layer="Dense") for devices in ([None] * 3, [0, 1, 2])]
        with pytest.warns(compat.CompatWarning) as warned:
            compat.parallelize(model, gpus=2)
        assert str(warned[0].message) == (
            "Parts of {} were placed on /device:CPU:0, /device:CPU:1, /device:CPU:2 by device(), "
            "but parallelize() runs all of it on each of /device:CPU:0, /device:CPU:1. Leave out "
            "one of the two; parallelize(model, gpus=1) puts the parts back.".format(model.name)
        )
        for each in (plain, model):
            each.train_on_batch(inputs, targets)
        self.close(plain.get_weights(), model.get_weights(), 1e-6)
        placement = self.placement(model, inputs, targets)
        assert sorted(placement) == configuration.devices[:2]
        assert len(set(placement.values())) == 1
        compat.parallelize(model, gpus=1)
        assert sorted(self.placement(model, inputs, targets)) == configuration.devices

    @pytest.fixture
    def siamese(self, keras):
        def build(first, second, third, layer="SimpleRNN"):
            layers = keras.layers
            shape = (4, 3) if layer == "SimpleRNN" else (3,)
            left, right = layers.Input(shape=shape), layers.Input(shape=shape)
            encode = getattr(layers, layer)(3, activation="tanh")
            with placed(first):
                encoded_left = encode(left)
            with placed(second):
                encoded_right = encode(right)
            with placed(third):
                merged = layers.concatenate([encoded_left, encoded_right])
                outputs = layers.Dense(1, activation="sigmoid")(merged)
            model = initialise(keras.models.Model([left, right], outputs))
            model.compile(optimizer(keras, "sgd"), "binary_crossentropy")
            return model

        return build

    # Never silent -----------------------------------------------------------------------------

    def test_configured_after_the_session_of_keras(self):
        """One without variables gives way; another would lose their values. Devices need none."""
        printed = run(
            """
            keras = keras_under_test()
            from compat._backends.tensorflow1 import backend, sessions
            assert backend.devices() == ["/device:CPU:0"]
            assert sessions.session_of(keras) is None
            assert backend.initialised() == (
                "tensorflow is imported, and may have asked CUDA for its GPUs"
            )

            def cpus(session):
                return len([d for d in session.list_devices() if d.device_type == "CPU"])

            old = keras.backend.get_session()
            assert cpus(old) == 1
            assert len(compat.configure_gpu(simulate=2).devices) == 2
            new = keras.backend.get_session()
            assert new is not old and cpus(new) == 2
            keras.backend.set_session(old)
            weight = keras.backend.variable(3.0)
            assert keras.backend.get_value(weight) == 3.0
            from compat._runtime import process
            process.process.configuration = None  # as if never configured
            try:
                compat.configure_gpu(simulate=2)
            except compat.TooLateError as error:
                print(error)
            assert keras.backend.get_value(weight) == 3.0
            """,
            self.prelude,
        )
        assert re.fullmatch(
            r"configure_gpu\(\) came too late for tensorflow: Keras has made its session already, "
            r'without .*device_count \{ key: "CPU" value: 2 \}.*; what a session has cannot be '
            r"changed, and another one would lose the values of its 1 variables\.\n"
            r"Call it before the first model is built\.",
            "\n".join(printed.splitlines()[-2:]),
        )

    @span
    def test_every_session_begins_with_one_configuration(self):
        """Those of Keras and of users, whose own fields win."""
        options, expected = {}, [DEVICES, True]
        if self.backend == "tensorflow1":  # in v1 mode, tf.config has them
            options = {"intra_op_parallelism_threads": 2, "device_count": {"CPU": 4}}
            options["backend"] = "tensorflow1"
            expected = [4, True, 2]
        printed = run(
            """
            configuration = compat.configure_gpu(simulate=3, **options)
            print(configuration)
            import tensorflow
            from compat._backends.tensorflow1 import sessions
            from compat._backends.tensorflow1.graph import v1_names
            tf = v1_names(tensorflow)
            keras = keras_under_test()

            def seen(session):
                cpus = [d for d in session.list_devices() if d.device_type == "CPU"]
                config = session._config or tf.ConfigProto()
                threads = [config.intra_op_parallelism_threads] if options else []
                return [len(cpus), config.allow_soft_placement] + threads

            own = tf.ConfigProto(log_device_placement=True)
            own.gpu_options.allow_growth = True
            session = tf.Session(config=own)
            assert seen(session) == expected
            assert session._config.log_device_placement
            assert session._config.gpu_options.allow_growth
            # The user's own is not changed.
            assert not own.allow_soft_placement and own.intra_op_parallelism_threads == 0
            with tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
                assert seen(session) == [2] + expected[1:]
            with tf.Session() as session:
                assert seen(session) == expected
            assert seen(keras.backend.get_session()) == expected
            keras.backend.clear_session()
            assert seen(keras.backend.get_session()) == expected
            if options:
                try:
                    tf.Session(config="wrong")
                except TypeError as error:
                    assert "ConfigProto" in str(error), error
                assert isinstance(keras.backend.variable(1.0).handle, tf.Tensor)
                assert compat.configure_gpu(simulate=3, **options) is configuration
                constructor = tf.Session.__bases__[0].__init__
                sessions.set_session_defaults(None)
                assert tf.Session.__bases__[0].__init__ is not constructor
                with tf.Session() as session:
                    assert seen(session) == [1, False, 0]
            """,
            self.prelude + "options, expected = {!r}, {!r}\n".format(options, expected),
        )
        if not options:
            return
        assert "/device:CPU:0, /device:CPU:1, /device:CPU:2" in printed
        assert (
            'every session, of Keras and others: ConfigProto device_count { key: "CPU" value: 4 } '
            'device_count { key: "GPU" value: 0 } intra_op_parallelism_threads: 2 '
            "allow_soft_placement: true\n"
        ) in printed
        resource = ", since reference variables race and train wrongly\n"
        assert "tf.enable_resource_variables()" + resource in printed.replace(
            "tf.Variable() makes resource variables",
            "tf.enable_resource_variables()",  # before 1.11
        )

    @span
    def test_one_device_leaves_the_model_alone(self, keras):
        """But for the order of Adam's step counter, where Keras has none."""
        model = self.compiled(keras, "dense")
        known = vars(_keras.inner_model(model))  # of the inner one, in an old Sequential
        before = dict(known)
        for gpus in (1, None, 1):
            assert compat.parallelize(model, gpus=gpus) is model
        orders = {"_make_train_function", "_compat_functions"}
        assert ("_make_train_function" in known) == counts_without_order(model)
        assert {name: known[name] for name in set(known) - orders} == before

    @span
    def test_reference_variables_are_warned_of(self, keras):
        with reference_variables():
            model = self.build(keras, "dense")
        if not model.weights[0].dtype._is_ref_dtype:
            return  # keras 2.3 and tf.keras make resource variables in any case
        with pytest.warns(compat.CompatWarning) as warned:
            compat.parallelize(model)
        assert str(warned[0].message) == (
            "The weights of {} are reference variables, which TensorFlow may overwrite while a "
            "replica still reads them: training goes wrong now and then. Call configure_gpu() "
            "before the model is built; it switches resource variables on.".format(model.name)
        )


def square(x):
    """x**2, whose gradient is said to be x, so that using another one shows."""
    return tf.custom_gradient(lambda x: (x * x, lambda upstream: upstream * x))(x)


def subclassed(keras):
    """A model whose layers are called by a method, not wired."""

    class Classifier(keras.models.Model):
        def __init__(self):
            super().__init__(name="classifier")
            self.hidden = keras.layers.Dense(6, activation="tanh")
            self.classes = keras.layers.Dense(4, activation="softmax")

        def call(self, inputs):
            return self.classes(self.hidden(inputs))

    return Classifier()


def placed(which):
    """The scope of ``compat.device()``, or none."""
    return contextlib.ExitStack() if which is None else compat.device(which)


def siamese_data():
    random = np.random.RandomState(2)
    left, right = random.normal(size=(2, 32, 4, 3)).astype("float32")
    return [left, right], random.randint(2, size=(32, 1)).astype("float32")


def siamese_steps():
    """Single steps of these sequences."""
    sequences, targets = siamese_data()
    return [steps[:, 0] for steps in sequences], targets


@contextlib.contextmanager
def reference_variables():
    """Within, variables are what they were before ``configure_gpu()``."""
    switch = getattr(v1, "disable_resource_variables", None)
    if switch is not None:
        switch()
        yield
        v1.enable_resource_variables()
    else:
        resources = tf.Variable.__new__
        tf.Variable.__new__ = lambda cls, *_, **__: object.__new__(cls)
        yield
        tf.Variable.__new__ = resources


def whole_outputs(keras, model, inputs, training=False):
    """What the model's predict function gives for a batch, in training mode if asked."""
    K = keras.backend
    phase = getattr(K, "symbolic_learning_phase", K.learning_phase)()
    feed = {model.inputs[0]: inputs, phase: training}
    return K.get_session().run(function_of(model, "predict_function").outputs, feed)


# Configuring, a process for each case ---------------------------------------------------------


def run(script, prelude=""):
    """Run a script in a process of its own, and return what it printed."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", prelude + PRELUDE + textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr.decode()[-3000:]
    return process.stdout.decode().strip()


PRELUDE = """
import compat
from compat.testing import keras_under_test
"""


def test_a_script_can_be_forked_where_there_is_no_gpu():
    """A process that has made a session hangs then, with plain TensorFlow, too."""
    printed = run(
        """
        import multiprocessing
        import numpy as np
        keras = keras_under_test()
        fork = multiprocessing.get_context("fork")

        def train():
            model = keras.models.Sequential([keras.layers.Dense(2, input_shape=(3,))])
            compat.parallelize(model).compile("sgd", "mse")
            model.train_on_batch(np.ones((7, 3)), np.ones((7, 2)))
            return compat.report().as_dict()["devices"]

        def script(simulate):
            configuration = compat.configure_gpu(simulate=simulate)
            with fork.Pool(1) as pool:
                devices = pool.apply_async(train).get(120)
            assert [each["device"] for each in devices] == configuration.devices
            print([each["training_rows"] for each in devices], flush=True)

        for simulate in (None, 3):
            process = fork.Process(target=script, args=(simulate,))
            process.start()
            process.join()
            assert process.exitcode == 0
        """
    )
    assert printed.splitlines()[-2:] == ["[0]", "[2, 2, 3]"]  # one device does as ever, uncounted


# The session configuration of GPUs, which this machine need not have --------------------------


def session_config(late=None, **settings):
    from compat._configuration import settings as _settings
    from compat._configuration.device_choice import Devices

    memory = _settings.parse_memory(settings.pop("memory", None))
    devices = Devices(["2", "3"], [0, 1])
    asked = _settings.Settings(devices, memory, options=settings)
    return tensorflow1.backend.session_config(v1, asked, late)


@span
def test_gpu_options(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert session_config(memory="grow").gpu_options.allow_growth
    assert session_config(memory=0.5).gpu_options.per_process_gpu_memory_fraction == 0.5
    assert session_config().gpu_options.visible_device_list == ""
    assert session_config(late="imported").gpu_options.visible_device_list == "0,1"
    config = session_config(device_count={"GPU": 1, "CPU": 56}, log_device_placement=True)
    assert dict(config.device_count) == {"GPU": 1, "CPU": 56}
    assert config.log_device_placement and config.allow_soft_placement
    assert not session_config(allow_soft_placement=False).allow_soft_placement


@span
def test_a_session_of_the_users_has_fixed_the_memory_of_gpus(monkeypatch):
    from tensorflow.python.client import session

    v1.Session().close()
    monkeypatch.setattr(v1.test, "is_built_with_cuda", lambda: True)
    monkeypatch.setattr(sessions, "imported_keras_packages", list)
    monkeypatch.setattr(sessions, "_defaults", None)  # as before compat was configured
    config = session_config(memory="grow")
    if not hasattr(session, "_python_session_create_counter"):
        return sessions.ensure_no_other_session(v1, config)  # before 1.13 nothing tells
    with pytest.raises(compat.TooLateError) as raised:
        sessions.ensure_no_other_session(v1, config)
    assert str(raised.value) == (
        "configure_gpu() came too late for tensorflow: a session was made in this process, which "
        "fixed GPUs and their memory; they cannot become allow_growth: true.\n"
        "Call it before the first tf.Session()."
    )


@span
def test_memory_size_is_a_fraction_of_the_largest_gpu(monkeypatch):
    from compat._configuration import device_choice

    gpus = [
        device_choice.GPU(2, memory_total=8 * 2**30),
        device_choice.GPU(3, memory_total=16 * 2**30),
    ]
    monkeypatch.setattr(device_choice, "discover", lambda: gpus)
    config = session_config(memory="4GiB")
    assert config.gpu_options.per_process_gpu_memory_fraction == 0.25
    monkeypatch.setattr(device_choice, "discover", lambda: [])
    with pytest.raises(compat.UnsupportedError) as raised:
        session_config(memory="4GiB")
    assert str(raised.value) == (
        "tensorflow1 cannot limit memory to 4096 MiB per GPU: it takes a fraction of each GPU "
        "only, and nvidia-smi does not tell how much memory the GPUs have. Use a fraction such "
        'as memory=0.5, or memory="grow".'
    )


# GPUs that no command of a driver lists -------------------------------------------------------


@span
def test_gpus_that_only_tensorflow_lists(monkeypatch):
    from compat._configuration import device_choice, gpu_selection
    from compat._configuration import settings as _settings

    def configured(gpus, listed, memory=None):
        backend = tensorflow1.TensorFlow1()
        devices = device_choice.choose(gpu_selection.parse_gpus(gpus), None, {}, discover=list)
        settings = _settings.Settings(devices, _settings.parse_memory(memory))
        configs = []
        names = ["/device:GPU:{}".format(index) for index in range(listed)] or ["/device:CPU:0"]
        monkeypatch.setattr(sessions, "ensure_no_other_session", lambda *arguments: None)
        monkeypatch.setattr(sessions, "set_session_defaults", configs.append)
        monkeypatch.setattr(backend, "initialised", lambda: None)
        monkeypatch.setattr(backend, "devices", lambda: names)
        backend.configure(settings)
        return configs[0](), devices

    config, devices = configured(None, 2, "grow")
    assert not config.device_count and config.gpu_options.allow_growth
    assert devices.gpus == ("0", "1") and not devices.shortage
    config, devices = configured(3, 2)
    assert dict(config.device_count) == {"GPU": 3}  # at most
    assert devices.shortage == ("gpus=3", "2 GPUs are visible")
    config, _ = configured([2, 1], 2)
    assert config.gpu_options.visible_device_list == "2,1"
    config, devices = configured(2, 0, "grow")
    assert dict(config.device_count) == {"GPU": 0} and not config.gpu_options.allow_growth
    assert configured(None, 0, "4GiB")[1].gpus == devices.gpus == ()
    with pytest.raises(compat.UnsupportedError, match="it takes a fraction of each GPU only"):
        configured(None, 1, "4GiB")
