"""Keras 3 on JAX: the contract, and what is special to programs that XLA partitions."""

import math
import os
import threading
import types

import numpy as np
import pytest

# Most of these tests' time is compiling.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # isort: split
import jax
from jax.experimental import sparse

import compat
from compat._backends.jax import JAX, _fraction, backend, configuration, profiler, programs, ranks
from compat._backends.jax.programs import device_name
from compat._configuration.device_choice import Devices, choose
from compat._configuration.gpu_selection import parse_gpus
from compat._configuration.settings import Memory, Settings
from compat._keras import watched_methods
from compat._runtime import work
from compat.testing import (
    CASES,
    DEVICES,
    in_span,
    initialise,
    keras_under_test,
)
from compat.testing.models import fit_in_order

from .. import verification_cases
from ..shared_parts import KerasParts
from ..verification_cases import verified


def executed(model, inputs, targets):
    """Train one step; by device, what JAX's profiler saw it execute."""
    return profiler.executed(lambda: model.train_on_batch(inputs, targets))


class TestJAX(KerasParts):
    product_in_timelines = "dot"
    backend = "jax"
    across_rows = "right"
    extension = ".keras"
    exempt_hooks = {
        "model._get_jax_state": "JAX moves arrays that no one has placed to the devices of a "
        "program, and refuses those that were placed on others",
    }

    def test_a_hook_that_is_not_reached_is_never_silent(self, keras, configuration):
        self.parallel()  # the rule for sorts, which is replaced once for the process, stays
        super().test_a_hook_that_is_not_reached_is_never_silent(keras, configuration)

    # Keras' own step gives up the weights that it replaces, and may be interrupted in between.
    test_a_fit_that_is_interrupted_can_be_run_again = None

    def test_a_distribution_of_the_script_is_kept(self, keras, automatic):
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        try:
            model = self.build(keras, "dense")
            self.check_left_alone(model, "keras.distribution.set_distribution() was called.")
        finally:
            keras.distribution.set_distribution(None)

    def placement(self, model, inputs, targets):
        found = executed(model, inputs, targets)
        for operation in sum(found.values(), []):  # nothing was computed undivided
            rows = len(targets[0] if isinstance(targets, list) else targets)
            assert rows not in sum(operation.shapes, []), operation.name
        return profiler.products(found)

    def shard_sizes(self, model, inputs, targets):
        def is_forward(operation):
            return operation.shapes[0][-1] == 16 and "transpose(" not in operation.name

        found = executed(model, inputs, targets)
        assert sorted(found) == ["cpu:0", "cpu:1", "cpu:2"]
        for ran in found.values():  # from 8 features to the 16 units of the layer "hidden"
            products = [o.shapes for o in ran if is_forward(o) and 8 in o.shapes[1]]
            (result,) = [result for result, _, _ in products]
            yield 1 if len(result) == 1 else result[0]  # a vector, up to JAX 0.9

    def sizes_of(self, rows):
        each = math.ceil(rows / DEVICES)
        return [min(each, max(0, rows - i * each)) for i in range(DEVICES)]

    @pytest.mark.parametrize("samples", in_span([2, 14, 61], [14, 2]))
    def test_batch_is_split_evenly(self, keras, samples):
        """XLA's shards are all of one size, that of the largest of an even split.

        It fills up the last ones: a step takes as long as with sizes that differ by a row.
        """
        model = self.compiled(keras, "dense", parallel=True)
        sizes = list(self.shard_sizes(model, *CASES["dense"].data(samples)))
        assert sizes == [math.ceil(samples / DEVICES)] * DEVICES


ROWS = np.random.RandomState(0).normal(size=(44, 8)).astype("float32")  # do not divide by 3
TARGETS = np.random.RandomState(1).normal(size=(44, 4)).astype("float32")


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def pair(build):
    """The same model twice, the second one parallel."""
    return initialise(build()), compat.parallelize(initialise(build()))


def small(keras, name=None):
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((8,)), layers.Dense(6, activation="tanh"), layers.Dense(4)], name=name
    )


def train(keras, model, **options):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    return fit_in_order(model, ROWS, TARGETS, epochs=2).history["loss"]


def check_same(keras, build, tolerance=1e-5, **options):
    """A model, on one device and on all, is trained to the same numbers."""
    models = pair(build)
    losses = [train(keras, model, **options) for model in models]
    np.testing.assert_allclose(losses[0], losses[1], rtol=tolerance)
    assert_same(models, tolerance / 10)
    return models


def assert_same(models, tolerance=1e-6):
    for expected, found in zip(*(model.get_weights() for model in models)):
        np.testing.assert_allclose(expected, found, atol=tolerance)


# Layers and models ----------------------------------------------------------------------------


def test_batch_statistics_masks_and_added_losses_are_those_of_one_device(keras):
    """Rows with which XLA fills up a shard enter nothing; dropout masks are the very same."""

    def build():
        layers = keras.layers
        return keras.Sequential(
            [
                layers.Input((8,)),
                layers.Dense(6, activity_regularizer="l2"),
                layers.BatchNormalization(momentum=0.5),
                layers.Dropout(0.5, seed=7),
                layers.Dense(4),
            ]
        )

    def prepared(model):  # a variance is above 0
        model.set_weights([np.abs(w) for w in model.get_weights()])
        return model

    models = [prepared(initialise(build())), prepared(compat.parallelize(initialise(build())))]
    losses = [train(keras, model) for model in models]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    variables = zip(*(model.variables for model in models))
    differences = [np.abs(np.array(a) - np.array(b)).max() for a, b in variables]
    assert max(differences) < 1e-5, differences


def test_normalising_a_constant_column_is_no_false_alarm(keras):
    """The program for several devices rounds where that for one does not, by no deviation."""
    rows = np.tile(np.float32([[1, 5], [2, 5], [0, 0], [0, 0]]), (10, 1, 1))
    inputs = keras.layers.Input((None, 2))
    outputs = keras.layers.BatchNormalization()(keras.layers.Masking()(inputs))
    model = compat.parallelize(keras.Model(inputs, outputs))
    model.compile("rmsprop", "mse")
    record = verified(backend, model, 1)
    model.fit(rows, rows, batch_size=10, verbose=0)
    assert record.steps["train"] == 1
    assert list(record.incomparable) == ["weight {}".format(model.layers[2].gamma.path)]


@pytest.mark.row("subclassed models")
@pytest.mark.parametrize("parts", ["models", "layers"])
def test_step_that_calls_the_parts_of_a_model_runs_on_several_devices(keras, parts):
    """As those of GANs and autoencoders do; its step never calls the model itself."""

    class Parts(keras.Model):
        def __init__(self):
            super().__init__(name="parts")
            wrap = keras.models.Sequential if parts == "models" else lambda layers: layers[0]
            self.encoder = wrap([keras.layers.Dense(16, name="hidden")])
            self.decoder = wrap([keras.layers.Dense(4)])
            self.encoder.build((None, 8)), self.decoder.build((None, 16))
            self.built = True

        def call(self, x):  # by which Keras builds it
            return self.decoder(self.encoder(x))

        def loss_of(self, trainable, data):
            first = len(self.encoder.trainable_variables)
            hidden, _ = self.encoder.stateless_call(trainable[:first], [], data[0])
            outputs, _ = self.decoder.stateless_call(trainable[first:], [], hidden)
            return keras.ops.mean((outputs - data[1]) ** 2)

        def train_step(self, state, data):
            trainable, others, variables, metrics = state
            loss, gradients = jax.value_and_grad(self.loss_of)(trainable, data)
            trainable, variables = self.optimizer.stateless_apply(variables, gradients, trainable)
            return {"loss": loss}, (trainable, others, variables, metrics)

    plain, parallel = pair(Parts)
    for model in plain, parallel:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        fit_in_order(model, ROWS, TARGETS, 44, epochs=2)
    assert_same([plain, parallel])
    found = executed(parallel, ROWS, TARGETS)
    assert sorted(found) == ["cpu:0", "cpu:1", "cpu:2"]
    for ran in found.values():
        shapes = [o.shapes for o in ran if o.shapes[0][-1] == 16 and 8 in o.shapes[1]]
        assert [result for result, _, _ in shapes] == [[15, 16]]
    compat.parallelize(parallel, gpus=1)
    assert "train_step" not in vars(parallel) and "call" not in vars(parallel.encoder)


def test_loop_of_ones_own(keras):
    """``stateless_call`` under ``jax.jit`` is sharded like Keras' loops."""
    models, results = pair(lambda: small(keras)), []
    for model in models:

        @jax.jit
        def step(weights, rows, model=model):
            def loss(weights):
                outputs, _ = model.stateless_call(weights, [], rows, training=True)
                return (outputs**2).mean()

            return jax.value_and_grad(loss)(weights)

        weights = [v.value for v in model.trainable_variables]
        lowered = step.lower(weights, ROWS).compile()
        value, gradients = step(weights, ROWS)
        results.append([value] + gradients)
    for expected, found in zip(*results):
        np.testing.assert_allclose(expected, found, atol=1e-6)
    computed = sum(programs.operations(lowered.as_text()).values(), [])
    assert computed and not any(len(ROWS) in sum(each.shapes, []) for each in computed)


def test_uneven_batches_that_share_a_divisor_with_the_devices(run):
    """XLA would have cut what a program is given, such as targets, into two parts for four."""
    printed = run(
        """
        import compat
        compat.configure_gpu(simulate=4, verify=0)
        import jax, keras, numpy as np

        keras.utils.set_random_seed(0)
        layers = [keras.layers.Input((4, 3)), keras.layers.SimpleRNN(3), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        rows, targets = np.ones((10, 4, 3), "float32"), np.ones((10, 2), "float32")

        def loss(weights, rows, targets):
            others = [v.value for v in model.non_trainable_variables]
            outputs, _ = model.stateless_call(weights, others, rows)
            return ((outputs - targets) ** 2).mean()

        def results(count):
            weights = [v.value for v in model.trainable_variables]
            step = jax.jit(jax.value_and_grad(loss))
            value, gradients = step(weights, rows[:count], targets[:count])
            return [value] + gradients

        expected = [results(count) for count in (10, 2)]
        compat.parallelize(model)
        for count, one in zip((10, 2), expected):
            for a, b in zip(one, results(count)):
                print(np.allclose(a, b, atol=1e-6))
        model.compile("sgd", "mse")
        model.fit(rows, targets, batch_size=6, verbose=0)
        print(model.predict(rows, verbose=0).shape)
        """
    )
    assert printed.splitlines() == ["True"] * 12 + ["(10, 2)"]


def test_sorts_within_uneven_batches(run):
    """XLA's partitioner would end the process; JAX has kept what was differentiated before."""
    printed = run(
        """
        import compat
        compat.configure_gpu(simulate=3, verify=0)
        import keras, numpy as np
        from keras import ops

        class Sorted(keras.layers.Layer):
            def call(self, x):
                median = ops.median(x, axis=0)
                return ops.sort(x, axis=0) + ops.sort(x, axis=1) * median

        class Loop(keras.Sequential):
            def train_step(self, state, data):
                x, y, *_ = data
                return super().train_step(state, (x, ops.sort(y, axis=0)))

        def loss(targets, outputs):
            return ops.mean(ops.top_k(ops.transpose((outputs - targets) ** 2), 2)[0])

        def trained(parallel):
            keras.utils.set_random_seed(0)
            layers = [keras.layers.Dense(5), Sorted(), keras.layers.Dense(2)]
            model = Loop([keras.layers.Input((4,))] + layers)
            if parallel:
                compat.parallelize(model)
            model.compile(keras.optimizers.SGD(0.1), loss)
            random = np.random.RandomState(0)
            for rows in (10, 2):
                model.train_on_batch(random.rand(rows, 4), random.rand(rows, 2))
            return model.get_weights() + [model.predict(random.rand(8, 4), verbose=0)]

        for one, several in zip(trained(False), trained(True)):
            print(np.allclose(one, several, atol=1e-6))
        """
    )
    assert printed.splitlines() == ["True"] * 5


def test_direct_calls(keras):
    """Outside of a program only a batch that divides is sharded; others are right, too."""
    plain, parallel = pair(lambda: small(keras))
    for rows in (42, 44, 1):
        outputs = parallel(ROWS[:rows])
        np.testing.assert_allclose(plain(ROWS[:rows]), outputs, atol=1e-6)
        assert len(outputs.devices()) == DEVICES
        shards = [shard.data.shape[0] for shard in outputs.addressable_shards]
        assert shards == [rows if rows % DEVICES else rows // DEVICES] * DEVICES


def test_eager_steps_of_batches_that_do_and_do_not_divide(keras):
    models = pair(lambda: keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)]))
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        for rows in (7, 6):
            model.train_on_batch(ROWS[:rows], TARGETS[:rows])
    assert_same(models)


def test_batches_of_other_threads_count_while_a_step_runs(keras):
    """Of other models, too."""

    class Waiting(keras.Sequential):
        def train_step(self, state, data):
            thread = threading.Thread(target=other.predict_on_batch, args=(ROWS[:9],))
            thread.start()
            thread.join()
            return super().train_step(state, data)

    model, other = (
        compat.parallelize(kind([keras.layers.Input((8,)), keras.layers.Dense(4)]))
        for kind in (Waiting, keras.Sequential)
    )
    model.compile("sgd", "mse", run_eagerly=True)
    before = sum(work.batches().values())
    model.train_on_batch(ROWS[:6], TARGETS[:6])
    assert sum(work.batches().values()) == before + 2


def test_several_batches_in_one_execution(keras):
    check_same(keras, lambda: small(keras), steps_per_execution=2)


def test_a_verified_step_is_compiled_for_all_devices_and_for_one(keras, caplog):
    """What was compiled for all devices does the steps that follow, too."""
    model = compat.parallelize(small(keras))
    model.compile("sgd", "mse")
    record = verified(backend, model, 1)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        model.fit(ROWS[:32], TARGETS[:32], batch_size=16, epochs=2, verbose=0)
    assert record.steps["train"] == 1
    compiled = [each for each in caplog.messages if each.startswith("Compiling jit(train_step)")]
    # JAX may have forgotten one of them in a long process, and compile it again.
    assert ["NamedSharding" in each for each in compiled][:2] == [True, False]
    assert len(set(compiled)) == 2


def test_sparse_batches_have_rows_and_stay_whole(keras):
    table = ROWS[:30] * (ROWS[:30] > 0)
    inputs = [keras.layers.Input((8,), sparse=is_sparse) for is_sparse in (True, False)]
    outputs = keras.layers.add([keras.layers.Dense(4)(each) for each in inputs])
    model = compat.parallelize(keras.Model(inputs, outputs))
    model.compile("sgd", "mse")
    kind = ("cpu:0", "cpu:1", "cpu:2"), (10, 10, 10), True
    before = work.batches().get(kind, 0)
    batch = [sparse.BCOO.fromdense(table), table]
    model.train_on_batch(batch, TARGETS[:30])
    assert ranks._rows(model, (batch, TARGETS[:30])) == 30
    assert work.batches().get(kind, 0) == before + 1


def test_an_optional_input_that_is_not_given(keras):
    verification_cases.check_an_optional_input_that_is_not_given(keras, backend)


def test_the_users_error_is_the_one_that_is_raised(keras):
    verification_cases.check_the_users_error_is_the_one_that_is_raised(keras, backend)


def test_quantized_tables(keras):
    verification_cases.check_quantized_tables(keras)


def test_float8_has_the_largest_values_of_the_whole_batch(keras):
    """Keras sets its history of them to its gradient."""

    def build():
        model = small(keras)
        model.layers[-1].quantize("float8")
        return model

    check_same(keras, build)


def test_mixed_precision_scales_the_loss(keras):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        models = check_same(keras, lambda: small(keras), 1e-3)
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(models[1].optimizer).__name__ == "LossScaleOptimizer"


def test_weights_shared_by_models_on_different_devices(keras):
    """Each loop takes them to its own devices; a plain model leaves them where they are."""
    template = initialise(small(keras))
    inputs = keras.layers.Input((8,))
    all_three, two = (
        compat.parallelize(keras.Model(inputs, template(inputs)), gpus) for gpus in (None, [2, 1])
    )
    weight = template.weights[0]
    for model, devices in [
        (all_three, ["cpu:0", "cpu:1", "cpu:2"]),
        (two, ["cpu:1", "cpu:2"]),
        (template, None),
        (all_three, ["cpu:0", "cpu:1", "cpu:2"]),
    ]:
        before = template.get_weights()
        losses = train(keras, model)
        assert losses[0] > losses[-1]
        assert np.abs(before[0] - np.array(weight)).max() > 1e-4
        if devices:
            assert sorted(map(device_name, weight.value.devices())) == devices
    outputs = [model.predict(ROWS, verbose=0) for model in (all_three, two, template)]
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-6)
    np.testing.assert_allclose(outputs[0], outputs[2], atol=1e-6)


def test_inner_model_does_not_split_again(keras):
    inner = compat.parallelize(initialise(small(keras)), [0, 1])
    inputs = keras.layers.Input((8,))
    outer = compat.parallelize(keras.Model(inputs, inner(inputs)))
    plain = initialise(small(keras))
    np.testing.assert_allclose(train(keras, plain), train(keras, outer), rtol=1e-5)
    assert_same([plain, outer])
    np.testing.assert_allclose(train(keras, plain), train(keras, inner), rtol=1e-5)


# One device -----------------------------------------------------------------------------------


def test_one_device_leaves_nothing_behind(keras):
    model = small(keras)
    train(keras, model)
    before = set(vars(model))
    assert compat.parallelize(model, gpus=1) is model
    assert set(vars(model)) == before
    compat.parallelize(model)
    train(keras, model)
    assert len(model.weights[0].value.devices()) == DEVICES
    added = {name for name in set(vars(model)) - before if not name.startswith("make_")}
    # And what verifies the first steps, and what checks that they use all devices.
    added -= set(watched_methods._KINDS)
    assert added == {"call", "_get_jax_state", "_make_function"}
    compat.parallelize(model, gpus=1)
    assert set(vars(model)) == before
    for variable in model.variables + model.optimizer.variables + model.metrics_variables:
        assert variable.value.devices() == {jax.devices()[0]}
        assert not variable.value.committed  # goes where its step goes, as a new one does
    train(keras, model)
    assert model.weights[0].value.devices() == {jax.devices()[0]}


# What cannot be -------------------------------------------------------------------------------


def test_keras_own_distribution_is_refused(keras):
    """It shards batches before the step, where JAX takes none that does not divide."""
    text = (
        "parallelize() cannot shard the batches of model {!r}: a keras.distribution is set, or was "
        "when the model was built, and Keras shards them itself, with an error for batches that do "
        "not divide. Use one of the two: call keras.distribution.set_distribution(None) before the "
        "model is built, or leave parallelize() out."
    )
    model, spread = compat.parallelize(small(keras, "before")), keras.distribution.DataParallel()
    with spread.scope():
        for name, call in (
            ("in_scope", lambda: compat.parallelize(small(keras, "in_scope"))),
            ("before", lambda: model.predict_on_batch(ROWS)),
        ):
            with pytest.raises(compat.UnsupportedError) as error:
                call()
            assert str(error.value) == text.format(name)
        laid_out = small(keras, "laid_out")
        with pytest.raises(Exception, match="divisible|divide"):
            train(keras, laid_out)
    with pytest.raises(compat.UnsupportedError) as error:
        compat.parallelize(laid_out)
    assert str(error.value) == text.format("laid_out")
    train(keras, model)


def test_parts_of_a_model_have_no_device_of_their_own(keras):
    """``jax.default_device``, which keras.device() sets, moves nothing within a program."""

    @jax.jit
    def step(rows):
        with jax.default_device(jax.devices()[1]):
            return rows @ rows.T

    assert step(ROWS).devices() == {jax.devices()[0]}
    with pytest.raises(compat.UnsupportedError) as error:
        compat.device(1)
    assert str(error.value) == (
        "jax cannot place parts of a model on cpu:1: under jax.jit a step is one program, all of "
        "which runs on the same devices. Leave compat.device() out; parallelize() splits the "
        "batches of the whole model."
    )


# Configuring ----------------------------------------------------------------------------------


def test_environ(monkeypatch):
    def environ(devices, memory=None, given=None):
        return backend.environ(Settings(devices, memory), given or {})

    assert environ(Devices()) == {"CUDA_VISIBLE_DEVICES": "-1"}
    simulated = {"CUDA_VISIBLE_DEVICES": "-1", "NPROC": "3000"}
    assert environ(Devices(simulated=1000), Memory(fraction=0.5)) == simulated
    assert environ(Devices(simulated=1000), given={"NPROC": "2999"}) == simulated
    assert environ(Devices(simulated=1000), given={"NPROC": "all"}) == simulated
    assert "NPROC" not in environ(Devices(simulated=1000), given={"NPROC": "3000"})
    assert "NPROC" not in environ(Devices(simulated=1))
    monkeypatch.setattr("compat._backends.jax.usable_cores", lambda: 64)
    assert "NPROC" not in environ(Devices(simulated=2))
    assert environ(Devices(simulated=2), given={"NPROC": "0"})["NPROC"] == "6"  # XLA reads 0
    gpus = Devices(["2", "0"], [2, 0])
    order = {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert environ(gpus) == order
    assert environ(gpus, Memory(size=2**30)) == order
    grow = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert environ(gpus, Memory(grow=True)) == dict(order, **grow)
    fraction = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.25"}
    assert environ(gpus, Memory(fraction=0.25)) == dict(order, **fraction)
    # JAX refuses the two names of the fraction together.
    new = {"XLA_CLIENT_MEM_FRACTION": "0.9"}
    assert environ(gpus, Memory(fraction=0.25), dict(order, **new)) == dict(
        fraction, XLA_CLIENT_MEM_FRACTION=None
    )


@pytest.fixture
def machine_of(monkeypatch, imitate):
    """Have JAX list GPUs that are not here; returns what configures, before JAX made any."""

    def machine_of(platform, number):
        class Device:
            def __init__(self, index):
                self.platform, self.id = platform, index

        assert all(hasattr(jax.devices()[0], name) for name in vars(Device(0)))

        def local_devices(process_index=None, backend=None, host_id=None):
            said = updates.get("jax_rocm_visible_devices") if platform == "gpu" else None
            return [Device(i) for i in range(min(number, len(said.split(","))) if said else number)]

        def update(name, val):
            assert name in jax.config.values
            updates[name] = val

        updates = {}
        imitate(jax, "local_devices", local_devices)
        imitate(jax.config, "update", update)
        # Other tests in this process have simulated devices.
        monkeypatch.setattr(type(jax.config), "jax_platforms", None)
        monkeypatch.setattr(JAX, "initialised", lambda self: None)

        def configured(gpus=None, **settings):
            updates.clear()
            devices = choose(parse_gpus(gpus), None, {}, discover=list)
            JAX().configure(Settings(devices, **settings))
            shortage = devices.shortage and devices.shortage[1]
            return JAX().devices(), dict(updates), devices.gpus, shortage

        return configured

    return machine_of


def test_gpus_of_a_rocm_machine(machine_of):
    configured = machine_of("gpu", 2)
    assert configured() == (["gpu:0", "gpu:1"], {}, ("0", "1"), None)
    ids = {"jax_cuda_visible_devices": "1", "jax_rocm_visible_devices": "1"}
    assert configured([1]) == (["gpu:0"], ids, ("0",), None)
    assert configured(3)[2:] == (("0", "1"), "2 GPUs are visible")
    with pytest.raises(compat.UnsupportedError, match="^jax cannot limit memory to 1024 MiB per "):
        configured(memory=Memory(size=2**30))


def test_a_platform_without_gpus_is_a_warning(machine_of, monkeypatch):
    monkeypatch.setattr(type(jax.config), "jax_platforms", "cpu")
    monkeypatch.setattr(JAX, "initialised", lambda self: None)
    settings = Settings(Devices(["0"], [0]))
    _, warnings = JAX().configure(settings)
    assert warnings == [
        "JAX_PLATFORMS=cpu keeps JAX from GPUs. Remove the variable, or ask for no GPU with gpus=0."
    ]


def test_the_gpu_of_a_metal_machine(machine_of):
    configured = machine_of("METAL", 1)
    assert configured() == (["METAL:0"], {}, ("0",), None)
    assert configured(2)[2:] == (("0",), "1 GPU is visible")
    assert configured(0)[1] == {"jax_platforms": "cpu"}


def test_size_of_memory_becomes_one_fraction(machine):
    def fraction(size, *gpus):
        return _fraction(Settings(Devices(gpus, range(len(gpus))), Memory(size=size)))

    machine.add(total=2000)
    machine.add(total=2000)
    machine.add(total=4000)
    machine.plug()
    assert fraction(500 * 2**20, "0", "1") == 0.25
    assert fraction(500 * 2**20, "2") == 0.125
    assert fraction(9000 * 2**20, "2") == 1
    with pytest.raises(compat.UnsupportedError) as error:
        fraction(500 * 2**20, "1", "2")
    assert str(error.value) == (
        "jax cannot limit memory to 500 MiB per GPU: it takes one fraction for all GPUs, and "
        "nvidia-smi does not tell that they all have the same amount. Use a fraction such as "
        'memory=0.5, or memory="grow".'
    )


def test_configured_after_the_import_and_before_the_first_operation(run):
    """Nothing is initialised by it, and simulated devices beat the flag of XLA."""
    printed = run(
        """
        import jax  # not too late
        import compat
        from jax._src import xla_bridge

        report = compat.configure_gpu(simulate=2, floatx="float64", memory="grow")
        print(report.devices, xla_bridge.backends_are_initialized())
        print("\\n".join(report.applied))
        import keras
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
        print(layer.kernel.value.dtype, jax.devices())
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=5",
    )
    assert printed.splitlines() == [
        "['cpu:0', 'cpu:1'] False",
        "jax.config.update('jax_platforms', 'cpu')",
        "jax.config.update('jax_enable_x64', True)",
        "jax.config.update('jax_num_cpu_devices', 2)",
        "keras.backend.set_floatx('float64')",
        "float64 [CpuDevice(id=0), CpuDevice(id=1)]",
    ]


def test_devices_are_simulated_by_a_flag_of_xla_before_jax_has_an_option(monkeypatch):
    monkeypatch.setattr(configuration, "jax", types.SimpleNamespace(config=object()))
    flag = "--xla_force_host_platform_device_count"
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=5 --xla_other=1")
    assert configuration.simulated() == 5
    assert configuration.simulate(3) == f"XLA_FLAGS=--xla_other=1 {flag}=3"
    assert configuration.simulated() == 3
    monkeypatch.delenv("XLA_FLAGS")
    assert configuration.simulated() == 0


def test_simulated_devices_have_threads_for_steps_that_nobody_waits_for(run):
    """With NPROC removed again, XLA aborted in each of three runs."""
    seconds = "--xla_cpu_collective_call_terminate_timeout_seconds"
    printed = run(
        """
        import compat
        compat.configure_gpu(simulate=3)
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
        rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["batch"], []))
        x = jax.device_put(np.full((30, 64), 0.01, "float32"), rows)
        w = jax.device_put(np.ones((64, 64), "float32"), whole)

        @jax.jit
        def step(w, x):
            return w - 0.1 * (x.T @ (x @ w))

        for _ in range(3000):
            w = step(w, x)
        print(abs(x @ w).max() < 0.64)
        """,
        NPROC="",
        XLA_FLAGS=seconds + "=5",
    )
    assert printed.splitlines() == ["True"]


def test_too_late_says_why(run):
    printed = run(
        """
        import jax
        import compat

        jax.numpy.ones(1)
        try:
            compat.configure_gpu(simulate=3)
        except compat.TooLateError as error:
            print(error)
        print(compat.configure_gpu("cpu").devices)  # nothing that has to change
        """
    )
    assert printed.splitlines() == [
        "configure_gpu() came too late for jax: JAX made its devices (cpu:0) with its first "
        "operation (it was imported by `import jax`), and cannot change them or their memory any "
        "more (devices: 3 simulated on the CPU).",
        "Call it before the first model, variable or array is made, best before the first "
        "`import jax` or `import keras`.",
        "['cpu:0']",
    ]
