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
from compat._backends._tensorflow.graph import v1_names
from compat._backends.tensorflow1 import profiler
from compat._backends.tensorflow1.graph import ancestors
from compat._backends.tensorflow1.optimizer_order import counts_without_order
from compat._backends.tensorflow1.profiler import partitions, products
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
    with profiler.recorded(v1, output_partition_graphs=True) as runs:
        model.train_on_batch(inputs, targets)
    return max(runs, key=v1.RunMetadata.ByteSize)  # others read and write variables, for a trial


def unordered_reads(model):
    """Return reads of the optimizer's counters that may come before or after their increment."""
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
    across_rows = "right"  # the mean is reduced over the replicas
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
        because = "one of its inputs is a variable, which has no batch to split."
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
        """Return compat's name of a device of TensorFlow's graphs."""
        return device

    def ran(self, model, inputs, targets):
        """Return the operations that one training step ran, by device."""
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
        """Plain Keras 2.2.4 is wrong in some of 200: its reference variables race.

        The contract's tests check that one step is right.
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

    def check_nothing_unsplit(self, model, ran, more_than=0):
        """Check that a step ran no operation of the graph's unsplit part.

        Arguments:
            model: one on several devices.
            ran: the operations of the step, by device.
            more_than: that part has more operations than these.
        """
        names = {node.name for nodes in ran.values() for node in nodes}
        unsplit = vars(model)["_compat_functions"]._part.operations
        assert len(unsplit) > more_than
        assert not names & {op.name for op in unsplit}

    def test_functions_may_be_copied(self, keras):
        model = compat.parallelize(CASES["dense"].build(keras))
        model.compile(optimizer(keras, "sgd"), "mse")
        function = function_of(model)
        assert copy.copy(function).made is function.made

    # What runs ------------------------------------------------------------------------------

    def test_nothing_of_the_unsplit_batch_part_runs(self, keras):
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
        self.check_nothing_unsplit(model, ran, more_than=30)
        for index, device in enumerate(sorted(ran)):
            here = {node.name.split("/")[0] for node in ran[device] if profiler.is_product(node)}
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
        """Keras 2 sums an activity regulariser over the batch, tf.keras averages it."""

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
            """It holds tensors of the unsplit graph, which must not run for that."""

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
            self.check_nothing_unsplit(model, ran)

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
                r"by tf.custom_gradient, which is bound to the whole batch\. Use one device: "
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

    # Never silent -----------------------------------------------------------------------------

    def test_configured_after_the_session_of_keras(self):
        """One without variables gives way; another would lose their values. Devices need none."""
        printed = run(
            """
            keras = keras_under_test()
            from compat._backends.tensorflow1 import backend, configuration
            assert backend.devices() == ["/device:CPU:0"]
            assert configuration.session_of(keras) is None
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
            from compat._backends._tensorflow.graph import v1_names
            from compat._backends.tensorflow1 import configuration as configuring
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
                configuring.set_session_defaults(None)
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
    """Return a model whose layers are called by a method."""

    class Classifier(keras.models.Model):
        def __init__(self):
            super().__init__(name="classifier")
            self.hidden = keras.layers.Dense(6, activation="tanh")
            self.classes = keras.layers.Dense(4, activation="softmax")

        def call(self, inputs):
            return self.classes(self.hidden(inputs))

    return Classifier()


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
    """Return the outputs of the model's predict function, in training mode if requested."""
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
