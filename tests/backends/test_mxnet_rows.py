"""What models on MXNet may compute of the rows of a batch, and of what came before."""

import warnings

import numpy as np
import pytest

import compat
from compat import errors
from compat.testing import in_span, initialise, keras_under_test, optimizer, span

from . import graph_cases


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=3)
    return keras_under_test()


def lambda_model(keras, function, name=None):
    """A model with an operation of MXNet's own between two layers."""
    from keras.backend import mxnet_backend

    @mxnet_backend.keras_mxnet_symbol
    def wrapped(x):
        return mxnet_backend.KerasSymbol(function(x.symbol))

    layers = keras.layers
    first = layers.Input(shape=(8,))
    x = layers.Lambda(wrapped, output_shape=(5,))(layers.Dense(5)(first))
    return keras.models.Model(first, layers.Dense(4)(x), name=name)


# The size of batches in a graph -----------------------------------------------------------------


def stateful(keras, fixed):
    """An LSTM that knows its batch size, beside an operation that may hold it, too."""
    layers = keras.layers
    rows = layers.Input(batch_shape=(7, 4, 3))
    branch = layers.Dense(5)(layers.Flatten()(rows))
    if fixed:
        branch = layers.Dense(5)(layers.Reshape((12,))(rows))
    state = layers.LSTM(5, unroll=True, stateful=True)(rows)
    return initialise(keras.models.Model(rows, layers.Dense(2)(layers.add([branch, state]))))


@pytest.mark.parametrize("fixed", [False, True])
def test_a_model_of_a_fixed_batch_size(keras, fixed):
    """Divided, unless its graph has that size: then it stays on one device, with a warning."""
    random = np.random.RandomState(0)
    inputs, targets = random.normal(size=(14, 4, 3)), random.normal(size=(14, 2))
    plain, parallel = stateful(keras, fixed), stateful(keras, fixed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert compat.parallelize(parallel) is parallel
    said = [str(w.message) for w in caught if issubclass(w.category, compat.CompatWarning)]
    assert said == fixed * [
        "parallelize() leaves model {!r} on cpu(0): its batch size is fixed to 7, so its batches "
        "cannot be split. The numbers are those of one device, and so is the speed.".format(
            parallel.name
        )
    ]
    assert hasattr(parallel, "_compat_replicas") != fixed
    for model in (plain, parallel):
        model.compile(optimizer(keras, "sgd"), "mse")
        model.fit(inputs, targets, batch_size=7, epochs=2, shuffle=False, verbose=0)
    for one, several in zip(plain.get_weights(), parallel.get_weights()):
        np.testing.assert_allclose(one, several, atol=1e-5)


# Weights that change between predictions --------------------------------------------------------


def convolutional(keras, kind):
    layers = keras.layers
    if kind == "Conv1D":
        first = [layers.Reshape((25, 2), input_shape=(5, 5, 2)), layers.Conv1D(3, 2)]
    elif kind == "Conv2D":
        first = [layers.Conv2D(3, 2, padding="same", activation="relu", input_shape=(5, 5, 2))]
    else:
        first = [layers.DepthwiseConv2D(2, input_shape=(5, 5, 2))]
    return keras.models.Sequential(first + [layers.Flatten(), layers.Dense(1)])


@pytest.mark.parametrize(
    "kind", in_span(["Conv1D", "Conv2D", "DepthwiseConv2D"], ["Conv2D", "DepthwiseConv2D"])
)
def test_predicts_with_the_weights_of_now(keras, kind):
    """oneDNN's fused operations kept those of their first batch, on the first device."""
    random = np.random.RandomState(0)
    inputs = random.normal(size=(13, 5, 5, 2)).astype("float32")
    targets = random.normal(size=(13, 1)).astype("float32")
    model = initialise(convolutional(keras, kind))
    # Plain models are bound for training, and never had the fault.
    plain = initialise(convolutional(keras, kind))
    compat.parallelize(model)
    for each in (plain, model):
        each.compile(optimizer(keras, "sgd"), "mse")
    before = model.predict(inputs)
    histories = [
        each.fit(
            inputs, targets, batch_size=13, epochs=4, shuffle=False, verbose=0,
            validation_data=(inputs, targets),
        ).history["val_loss"]
        for each in (plain, model)
    ]  # fmt: skip
    np.testing.assert_allclose(*histories, rtol=1e-4)
    np.testing.assert_allclose(plain.predict(inputs), model.predict(inputs), atol=1e-5)
    assert np.abs(before - model.predict(inputs)).max() > 1e-2
    for each in (plain, model):
        each.set_weights([2 * weight for weight in model.get_weights()])
    np.testing.assert_allclose(plain.predict(inputs), model.predict(inputs), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        *[each.evaluate(inputs, targets, verbose=0) for each in (plain, model)], rtol=1e-4
    )


@span
def test_predicts_with_the_weights_of_now_without_compile(keras):
    inputs = np.random.RandomState(0).normal(size=(13, 5, 5, 2))
    plain, model = [initialise(convolutional(keras, "Conv2D")) for _ in range(2)]
    compat.parallelize(model)
    for factor in (1, -2):
        for each in (plain, model):
            each.set_weights([factor * weight for weight in each.get_weights()])
        np.testing.assert_allclose(
            plain.predict(inputs), model.predict(inputs), rtol=1e-4, atol=1e-5
        )


def test_executors_are_bound_once_for_each_shape(keras):
    model = compat.parallelize(initialise(convolutional(keras, "Conv2D")))
    model.compile("sgd", "mse")
    inputs, targets = np.ones((13, 5, 5, 2)), np.ones((13, 1))
    model.predict(inputs)
    bodies = model._compat_replicas.phases["predict"].bodies
    model.train_on_batch(inputs, targets)
    model.predict(inputs)
    assert model._compat_replicas.phases["predict"].bodies is bodies


# Across rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    in_span(
        ["mean", "sum of all", "softmax", "softmax of the transposed", "reversed"],
        ["mean", "softmax"],
    ),
)
def test_what_computes_across_rows_gets_all_of_them(keras, name):
    function = graph_cases.across_rows(keras.backend)[name]
    texts = graph_cases.one_devices_numbers(keras, lambda: graph_cases.model_of(keras, function))
    assert len(texts) == 1
    begin, _, end = texts[0].partition(" computes")
    assert begin.startswith("The operation ")
    assert end == (
        " across the rows of a batch, of which each device has a part. It, and all that follows "
        "from it, runs on cpu(0) with the whole batch."
    )


@pytest.mark.parametrize("kind", ["pairs", "positions", "looked up", "loop"])
def test_mxnets_own_operations_across_rows(keras, kind):
    import mxnet as mx

    def function(x):
        if kind == "pairs":
            first, second = [mx.sym.expand_dims(x, axis=axis) for axis in (0, 1)]
            return mx.sym.mean(mx.sym.abs(mx.sym.broadcast_sub(first, second)), axis=0)
        if kind == "positions":
            count = mx.sym.sum(mx.sym.slice_axis(mx.sym.ones_like(x), axis=1, begin=0, end=1))
            places = mx.sym.contrib.arange_like(x, axis=0)
            places = mx.sym.broadcast_div(places, count)
            return mx.sym.broadcast_add(x, mx.sym.expand_dims(places, axis=1))
        if kind == "loop":
            sums, _ = mx.sym.contrib.foreach(
                lambda row, total: (row + total, row + total), x, mx.sym.zeros((5,))
            )
            return 0.1 * sums
        return mx.sym.take(x, mx.sym.sum(mx.sym.abs(x), axis=1))

    if kind == "positions" and not hasattr(mx.sym.contrib, "arange_like"):
        assert mx.__version__ < "1.6"
        return
    graph_cases.one_devices_numbers(keras, lambda: lambda_model(keras, function))


def test_layers_before_and_after_stay_on_their_devices(keras):
    """Only what follows from the operation across rows is the first device's alone."""
    mean = graph_cases.across_rows(keras.backend)["mean"]
    model = initialise(graph_cases.model_of(keras, mean))
    compat.parallelize(model).compile("sgd", "mse")
    with pytest.warns(compat.CompatWarning):
        model.train_on_batch(np.ones((13, 8)), np.ones((13, 4)))
    phase = model._compat_replicas.phases["train"]
    first, last = [model.layers[i].kernel.name for i in (0, 2)]
    assert all(first in body.grad_dict and last not in body.arg_dict for body in phase.bodies)
    assert last in phase.head.grad_dict and first not in phase.head.arg_dict


def test_a_first_layer_across_rows_leaves_all_to_the_first_device(keras):
    mean = graph_cases.across_rows(keras.backend)["mean"]

    def build():
        rows = keras.layers.Input(shape=(8,))
        return keras.models.Model(rows, keras.layers.Dense(4)(keras.layers.Lambda(mean)(rows)))

    graph_cases.one_devices_numbers(keras, build, rows=(13, 11), tolerance=1e-5)


def test_averages_behind_an_operation_across_rows(keras):
    """They are those of the whole batch, and the same for all replicas."""

    def build():
        mean = graph_cases.across_rows(keras.backend)["mean"]
        model = graph_cases.model_of(keras, mean)
        model.add(keras.layers.BatchNormalization(momentum=0.5))
        return model

    graph_cases.one_devices_numbers(keras, build, rows=(13, 11), tolerance=1e-4)
    model = compat.parallelize(initialise(build()))
    model.compile(optimizer(keras, "sgd"), "mse")
    inputs, targets = np.random.RandomState(0).normal(size=(13, 8)), np.ones((13, 4))
    with pytest.warns(compat.CompatWarning):
        model.train_on_batch(inputs, targets)
    auxs = model._compat_replicas.auxs
    assert len(auxs[0]) == 2
    for name, array in auxs[0].items():
        assert np.abs(array.asnumpy()).max() > 0
        for other in auxs[1:]:
            assert (array.asnumpy() == other[name].asnumpy()).all()


@pytest.mark.parametrize(
    "kind", in_span(["steps", "sum", "rows", "maximum", "mean"], ["steps", "sum"])
)
def test_states_are_those_of_one_device(keras, kind):
    texts = graph_cases.one_devices_numbers(keras, lambda: graph_cases.totals(keras, kind))
    assert bool(texts) == (kind != "steps")


@span
def test_losses_that_are_sums(keras):
    K = keras.backend
    assert not graph_cases.one_devices_numbers(keras, lambda: graph_cases.with_added_loss(keras))
    graph_cases.one_devices_numbers(
        keras,
        lambda: graph_cases.model_of(keras, lambda x: x * 1.0),
        loss=lambda y, p: 0.1 * K.sum(K.square(y - p)),
    )


# What cannot be ---------------------------------------------------------------------------------


def test_state_of_an_unknown_operation_is_refused(keras):
    import mxnet as mx

    class Counting(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            aux[0][:] += in_data[0].sum()
            self.assign(out_data[0], req[0], in_data[0])

        def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
            self.assign(in_grad[0], req[0], out_grad[0])

    @mx.operator.register("compat_counting")
    class Prop(mx.operator.CustomOpProp):
        def list_auxiliary_states(self):
            return ["count"]

        def infer_shape(self, in_shape):
            return in_shape, [in_shape[0]], [(1,)]

        def create_operator(self, context, shapes, types):
            return Counting()

    model = lambda_model(
        keras, lambda x: mx.sym.Custom(x, op_type="compat_counting", name="counter")
    )
    compat.parallelize(model).compile("sgd", "mse")
    with pytest.raises(compat.UnsupportedError) as error:
        model.train_on_batch(np.ones((13, 8)), np.ones((13, 4)))
    assert str(error.value) == (
        "The operation Custom of '{}' has the state 'counter_count', which several devices would "
        "each change by their own rows. How these go together is known of BatchNorm's averages "
        "only. parallelize(model, gpus=1) runs it on one device.".format(model.name)
    )


@span
def test_inputs_with_other_numbers_of_rows_are_refused(keras):
    layers, K = keras.layers, keras.backend
    queries, memory = layers.Input(shape=(8,)), layers.Input(shape=(8,))
    whole = layers.Lambda(lambda pair: pair[0] + K.mean(pair[1], axis=0, keepdims=True))
    model = keras.models.Model([queries, memory], whole([queries, memory]), name="memory")
    compat.parallelize(model).compile("sgd", "mse")
    with pytest.raises(compat.UnsupportedError) as error:
        model.predict_on_batch([np.ones((6, 8)), np.ones((11, 8))])
    problem = "its inputs have rows: 6 of {}, 11 of {}".format(queries.name, memory.name)
    assert str(error.value) == str(errors.rows_cannot_be_cut("memory", problem))


def test_shapes_that_mxnet_cannot_infer_are_an_error_with_its_reason(keras):
    """They were a TypeError of zip()."""
    import mxnet as mx

    # For batches of 13 rows only.
    model = lambda_model(keras, lambda x: x + mx.sym.ones((13, 5)), name="fixed")
    inputs = np.ones((13, 8))
    plain = model.predict_on_batch(inputs)
    assert plain.shape == (13, 4)
    compat.parallelize(model)
    with pytest.raises(compat.UnsupportedError) as error:
        model.predict_on_batch(inputs)
    problem, hint = str(error.value).splitlines()
    assert problem.startswith("'fixed' cannot be computed on a part of a batch: with 1009 rows, ")
    assert "expected [1009,5], got [13,5]" in problem
    assert hint == (
        "parallelize() cuts each batch by rows: every input needs one row for each sample, and "
        "nothing may depend on how many there are. parallelize(model, gpus=1) runs it whole, on "
        "one device."
    )
    compat.parallelize(model, gpus=1)
    np.testing.assert_array_equal(model.predict_on_batch(inputs), plain)
