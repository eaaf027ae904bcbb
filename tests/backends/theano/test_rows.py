"""What models on Theano may compute of the rows of a batch."""

import types

import numpy as np
import pytest

import compat
from compat import _rows
from compat._configuration import registry
from compat._rows import Sharded
from compat._runtime.process import process
from compat.testing import initialise, keras_under_test, slow, span

from .. import graph_cases
from ..messages import told
from . import test_contract

profiles_not_printed = test_contract.profiles_not_printed


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=3)
    with pytest.MonkeyPatch.context() as patch:
        test_contract.few_streams(patch)
        yield keras_under_test()


def graph_of(model):
    from compat._backends.theano import propagation

    inputs = model.inputs
    shapes = [[size or 4 for size in v._keras_shape] for v in inputs]
    given = {v: np.zeros(shape) for v, shape in zip(inputs, shapes)}
    return propagation.ModelGraph(model.outputs, inputs, given)


def whole(operation, name, layer=None, line=None, reach=_rows.FROM_THERE_ON, why="mixed"):
    """The text of the warning."""
    across = _rows.Across(operation, layer, line, why)
    found = across.sentence(name)
    return "{} {} runs on cpu:0 with the whole batch.".format(found, reach)


def test_a_function_is_copied_without_a_trace_in_theanos_class():
    """Other threads may be compiling."""
    import theano

    from compat._backends.theano import compilation

    number = theano.shared(1.0)
    function = theano.function([], number + 1)
    makers, plain, make = [], type(function.maker), type(function.maker).__init__

    def copy(swap):
        makers.append((type(function.maker), plain.__init__))
        return swap

    copied = compilation.copied(types.SimpleNamespace(maker=function.maker, copy=copy), {number: 2})
    assert copied == {number: 2}
    ((within, init),) = makers
    assert issubclass(within, plain) and within is not plain
    assert init is make and type(function.maker) is plain


def test_no_batch_is_kept_after_an_error(keras):
    model = initialise(keras.models.Sequential([keras.layers.Dense(2, input_shape=(3,))]))
    compat.parallelize(model).compile("sgd", "mse")
    model.train_on_batch(np.ones((6, 3)), np.ones((6, 2)))

    def head(*args):
        assert model.train_function.batch is not None
        raise OSError("of the head")

    model.train_function.head = head
    with pytest.raises(OSError, match="of the head"):
        model.train_on_batch(np.ones((6, 3)), np.ones((6, 2)))
    assert model.train_function.batch is None


# Across rows ------------------------------------------------------------------------------------


def test_layers_before_stay_on_their_devices(keras):
    mean = graph_cases.across_rows(keras.backend)["mean"]
    model = initialise(graph_cases.model_of(keras, mean))
    compat.parallelize(model).compile("sgd", "mse")
    with pytest.warns(compat.CompatWarning):
        model.train_on_batch(np.ones((13, 8)), np.ones((13, 4)))
    first, last = [model.layers[i].kernel for i in (0, 2)]
    made = model.train_function
    assert len(made.forward) == 3
    assert first in made.body_weights and last not in made.used
    # Forward, and the gradients of its weights and of what the devices have computed.
    assert test_contract.number_of_products(made.head) == 3


def recurrent(layers):
    return [
        [layers.Masking(input_shape=(5, 3)), layers.LSTM(4, return_sequences=True), layers.GRU(2)],
        [layers.Bidirectional(layers.LSTM(4, unroll=True), input_shape=(2, 3)), layers.Dense(2)],
        [layers.ConvLSTM2D(2, 2, input_shape=(3, 5, 5, 2))],
        [
            layers.TimeDistributed(layers.Dense(4), input_shape=(None, 3)),
            layers.LSTM(3, dropout=0.2, recurrent_dropout=0.2, go_backwards=True),
        ],
    ]


def all_others(layers):
    return [
        [layers.Dense(4, input_shape=(5, 3)), layers.Activation("softmax")],
        [layers.TimeDistributed(layers.Dense(4), input_shape=(5, 3)), layers.Flatten()],
        [
            layers.Embedding(10, 4, input_length=5),
            layers.SpatialDropout1D(0.2),
            layers.Permute((2, 1)),
            layers.Reshape((10, 2)),
            layers.Conv1D(4, 2, padding="causal"),
            layers.MaxPooling1D(),
            layers.GlobalAveragePooling1D(),
            layers.RepeatVector(3),
        ],
        [
            layers.ZeroPadding2D(input_shape=(9, 9, 3)),
            layers.Conv2D(4, 2, padding="same", strides=2),
            layers.BatchNormalization(axis=1),
            layers.AveragePooling2D(),
            layers.UpSampling2D(),
            layers.Flatten(),
            layers.GaussianNoise(0.1),
            layers.GaussianDropout(0.1),
            layers.AlphaDropout(0.1),
            layers.BatchNormalization(scale=False, center=False),
            layers.PReLU(),
        ],
        [
            layers.SeparableConv2D(4, 3, input_shape=(5, 5, 3)),
            layers.Conv2DTranspose(2, 3, strides=2, padding="same"),
            layers.Cropping2D(),
            layers.LocallyConnected2D(2, 3),
            layers.GlobalMaxPooling2D(),
        ],
        [layers.Conv3D(2, 2, input_shape=(4, 4, 4, 2)), layers.MaxPooling3D(), layers.Flatten()],
    ]


@pytest.mark.parametrize(
    "stacks", [pytest.param(all_others, marks=span), pytest.param(recurrent, marks=slow)]
)
def test_layers_of_keras_compute_row_by_row(keras, stacks):
    """None of them is taken for an operation across rows, which would leave devices idle."""
    layers = keras.layers
    models = [keras.models.Sequential(stack) for stack in stacks(layers)]
    queries, values = layers.Input(shape=(4, 3)), layers.Input(shape=(6, 3))
    weights = layers.Activation("softmax")(layers.Dot(axes=2)([queries, values]))
    found = layers.Dot(axes=(2, 1))([weights, values])
    models.append(keras.models.Model([queries, values], layers.Concatenate()([found, queries])))
    for model in models:
        graph, name = graph_of(model), model.layers[-1].name
        assert graph.across("unknown") is None, name
        cuts = [(cut.variable, cut.placement.axis) for cut in graph.cuts(model.outputs)]
        assert cuts == [(output, 0) for output in model.outputs], name


def test_outputs_that_are_sums(keras):
    K = keras.backend
    layers = keras.layers
    total = layers.Lambda(lambda x: K.sum(x, axis=0, keepdims=True), output_shape=(8,))
    model = keras.models.Sequential([layers.Activation("tanh", input_shape=(8,)), total])
    inputs = np.random.RandomState(0).normal(size=(13, 8))
    compat.parallelize(model)
    np.testing.assert_allclose(
        model.predict_on_batch(inputs), np.tanh(inputs).sum(axis=0, keepdims=True), rtol=1e-5
    )


# What no rule knows ----------------------------------------------------------------------------


def own_softmax():
    """A class of the user's own, which computes rows of what it is given."""
    from theano import tensor

    class OwnSoftmax(tensor.nnet.Softmax):
        pass

    return OwnSoftmax()


def named(keras, function):
    """A model with names, and the line of its function."""
    layers = keras.layers
    model = keras.models.Sequential(
        [
            layers.Dense(5, input_shape=(8,)),
            layers.Lambda(function, name="own"),
            layers.Dense(4),
        ],
        name="net",
    )
    return model, "test_rows.py, line {}".format(function.__code__.co_firstlineno)


@span
def test_what_no_rule_knows_is_tried_and_split(keras):
    function = softmax_of(own_softmax())
    assert not graph_cases.one_devices_numbers(keras, lambda: named(keras, function)[0])
    model = initialise(named(keras, function)[0])
    compat.parallelize(model).compile("sgd", "mse")
    model.train_on_batch(np.random.RandomState(0).normal(size=(13, 8)), np.ones((13, 4)))
    (cut,) = model.train_function.cuts
    assert cut.variable is model.outputs[0] and cut.placement == Sharded(0)


def test_the_shape_of_a_scalar_has_no_dimensions(keras):
    from theano.tensor import tensordot

    model = lambda: named(keras, lambda x: tensordot(x, 2.0, 0))[0]  # noqa: E731
    assert not graph_cases.one_devices_numbers(keras, model)


def softmax_of(operation, across=False):
    return (lambda x: operation(x.T).T) if across else (lambda x: operation(x))


def test_batches_of_other_sizes_are_tried_again(keras):
    """What is row by row for sequences of four steps need not be for five."""
    K, layers = keras.backend, keras.layers
    inputs = layers.Input(shape=(None, 3))
    pairs = layers.Lambda(lambda x: K.reshape(x, (-1, 6)), output_shape=(6,), name="pairs")(inputs)
    model = initialise(keras.models.Model(inputs, layers.Dense(2)(pairs), name="net"))
    random = np.random.RandomState(0)
    batches = [random.normal(size=(12, steps, 3)) for steps in (4, 5, 4)]
    expected = [model.predict_on_batch(batch) for batch in batches]
    compat.parallelize(model)
    with told() as texts:
        found = [model.predict_on_batch(batch) for batch in batches]
    assert len(texts) == 1 and texts[0].endswith("runs on cpu:0 with the whole batch.")
    for one, several in zip(expected, found):
        np.testing.assert_allclose(several, one, rtol=1e-5)


def test_what_a_trial_finds_across_rows_gets_all_of_them(keras):
    """Though the first batch has one row only."""
    softmax = own_softmax()
    function = softmax_of(softmax, across=True)
    line = named(keras, function)[1]
    model = lambda: named(keras, function)[0]  # noqa: E731
    texts = graph_cases.one_devices_numbers(keras, model, rows=(1, 13, 2))
    assert texts == [whole("OwnSoftmax", "net", "layer 'own'", line, why="tried")]


def test_what_cannot_be_tried_gets_all_rows(keras):
    """Random numbers are others each time."""
    K, softmax = keras.backend, own_softmax()
    function = lambda x: softmax(x + K.random_uniform(K.shape(x), maxval=1e-3))  # noqa: E731
    line = named(keras, function)[1]
    texts = graph_cases.one_devices_numbers(
        keras, lambda: named(keras, function)[0], tolerance=1e-2, rows=(13,)
    )
    assert texts == [whole("OwnSoftmax", "net", "layer 'own'", line, why="unknown")]


def test_a_trial_leaves_no_trace(keras):
    """Random numbers go on as they would."""
    from compat._backends.theano.compilation import is_random  # imports theano

    K = keras.backend
    model = named(keras, lambda x: x + K.random_normal(K.shape(x)))[0]
    compat.parallelize(initialise(model))
    inputs = np.ones((13, 8))
    model.predict_on_batch(inputs)
    device, function = model._compat_functions.devices[0], model.predict_function
    results, states = [], []
    for tried in True, False:
        with device.randomness_kept():
            if not tried:
                function.tried.clear()
            results.append(model.predict_on_batch(inputs))
            states += [v.get_value() for k, v in device.variables.items() if is_random(k)]
    np.testing.assert_array_equal(results[0][:4], results[1][:4])
    assert len(states) == 2 and function.tried == {((8,),): 13}
    np.testing.assert_array_equal(*states)


def test_strict_makes_it_an_error(keras, monkeypatch):
    """Each time."""
    monkeypatch.setattr(process.configuration.settings, "strict", True)
    model = named(keras, softmax_of(own_softmax(), across=True))[0]
    compat.parallelize(model)
    for _ in range(2):
        with pytest.raises(compat.UnsupportedError, match="gives other numbers for three rows"):
            model.predict_on_batch(np.random.RandomState(0).normal(size=(13, 8)))


# What only the whole batch can be computed of ---------------------------------------------------


def assert_runs_whole(model, inputs, text):
    """A call of it is one device's; so is the next one, without a warning."""
    expected = model.predict_on_batch(inputs)
    compat.parallelize(model)
    with told() as texts:
        found = [model.predict_on_batch(inputs) for _ in range(2)]
    assert texts == [text]
    for each in found:
        np.testing.assert_array_equal(each, expected)


def test_inputs_with_other_numbers_of_rows_run_whole(keras):
    K, layers = keras.backend, keras.layers
    both = [layers.Input(shape=(8,)), layers.Input(shape=(8,))]
    read = layers.Lambda(lambda p: K.dot(K.softmax(K.dot(p[0], K.transpose(p[1]))), p[1]), (8,))
    model = keras.models.Model(both, read(both), name="two")
    inputs = [np.ones((6, 8)), np.ones((11, 8))]
    assert_runs_whole(model, inputs, whole(None, "two", reach="The model"))


def test_what_asks_for_the_number_of_rows_runs_whole(keras):
    from theano.tensor import gt
    from theano.tensor.opt import Assert

    checked = keras.layers.Lambda(lambda x: Assert("few")(x, gt(x.shape[0], 5)), (8,), name="check")
    first = keras.layers.Input(shape=(8,))
    model = keras.models.Model(first, checked(first), name="checked")
    line = "test_rows.py, line {}".format(checked.function.__code__.co_firstlineno)
    text = whole("Assert{msg='few'}", "checked", "layer 'check'", line)
    assert_runs_whole(model, np.ones((13, 8)), text)


def test_what_fails_for_a_part_of_a_batch_runs_whole(keras):
    from theano import tensor
    from theano.compile.ops import as_op

    @as_op([tensor.fmatrix], [tensor.fmatrix], lambda node, shapes: shapes)
    def picky(x):
        if len(x) == 4:
            raise ValueError("four rows")
        return x * 2

    first = keras.layers.Input(shape=(8,))
    model = keras.models.Model(first, keras.layers.Lambda(picky, (8,))(first), name="picky")
    assert_runs_whole(model, np.ones((13, 8)), whole(None, "picky", reach="The model"))
    with pytest.raises(ValueError, match="four rows"):
        model.predict_on_batch(np.ones((4, 8)))


@pytest.mark.parametrize("kind", ["function", "object"])
def test_training_function_of_the_users_own(keras, kind):
    graph_cases.check_training_function_of_ones_own(keras, "theano", kind)


def test_state_that_an_optimizer_does_not_list(keras):
    backend = registry.find("theano")
    graph_cases.check_state_that_an_optimizer_does_not_list(
        keras, backend, graph_cases.accumulating
    )


@slow
def test_prediction_in_the_learning_phase_of_training(keras):
    graph_cases.check_prediction_in_the_learning_phase_of_training(keras, registry.find("theano"))
