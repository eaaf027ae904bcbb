"""Operations that no rule knows, tried on samples of a batch."""

import numpy as np
import pytest

import compat
from compat import _keras, _rows
from compat._rows import Sharded
from compat._runtime.process import process
from compat.testing import initialise, span

from .. import graph_cases
from ..messages import told
from . import test_contract, test_replicas

keras, profiles_not_printed = test_replicas.keras, test_contract.profiles_not_printed


def whole(
    operation, name, layer=None, line=None, reach=_rows.DOWNSTREAM, why=_rows.Reason.CROSS_BATCH
):
    """Return the text of the warning."""
    found = _rows.Fallback(why, operation, layer, line).sentence(name)
    return "{} {} runs unsplit on cpu:0.".format(found, reach)


def own_softmax():
    """Return a user-defined class, which computes rows of its inputs."""
    from theano import tensor

    class OwnSoftmax(tensor.nnet.Softmax):
        pass

    return OwnSoftmax()


def named(keras, function):
    """Return a model with names, and the line of its function."""
    layers = keras.layers
    model = keras.models.Sequential(
        [
            layers.Dense(5, input_shape=(8,)),
            layers.Lambda(function, name="own"),
            layers.Dense(4),
        ],
        name="net",
    )
    return model, "test_trial.py, line {}".format(function.__code__.co_firstlineno)


@span
def test_what_no_rule_knows_is_tried_and_split(keras):
    function = softmax_of(own_softmax())
    assert not graph_cases.one_devices_numbers(keras, lambda: named(keras, function)[0])
    model = initialise(named(keras, function)[0])
    compat.parallelize(model).compile("sgd", "mse")
    model.train_on_batch(np.random.RandomState(0).normal(size=(13, 8)), np.ones((13, 4)))
    (cut,) = _keras.inner_model(model).train_function.plan.cuts
    assert cut.variable is model.outputs[0] and cut.placement == Sharded(0)


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
    assert len(texts) == 1 and texts[0].endswith("runs unsplit on cpu:0.")
    for one, several in zip(expected, found):
        np.testing.assert_allclose(several, one, rtol=1e-5)


def test_what_a_trial_finds_across_rows_gets_all_of_them(keras):
    """Though the first batch has one row only."""
    softmax = own_softmax()
    function = softmax_of(softmax, across=True)
    line = named(keras, function)[1]
    model = lambda: named(keras, function)[0]  # noqa: E731
    texts = graph_cases.one_devices_numbers(keras, model, rows=(1, 13, 2))
    assert texts == [
        whole("OwnSoftmax", "net", "layer 'own'", line, why=_rows.Reason.TRIAL_DIFFERS)
    ]


def test_what_cannot_be_tried_gets_all_rows(keras):
    """Random numbers are others each time."""
    K, softmax = keras.backend, own_softmax()
    function = lambda x: softmax(x + K.random_uniform(K.shape(x), maxval=1e-3))  # noqa: E731
    line = named(keras, function)[1]
    texts = graph_cases.one_devices_numbers(
        keras, lambda: named(keras, function)[0], tolerance=1e-2, rows=(13,)
    )
    assert texts == [whole("OwnSoftmax", "net", "layer 'own'", line, why=_rows.Reason.NO_RULE)]


def test_a_trial_leaves_no_trace(keras):
    """Random numbers go on as they would."""
    from compat._backends.theano.graph import is_random  # imports theano

    K = keras.backend
    model = named(keras, lambda x: x + K.random_normal(K.shape(x)))[0]
    compat.parallelize(initialise(model))
    inputs = np.ones((13, 8))
    model.predict_on_batch(inputs)
    device, function = model._compat_replicas.devices[0], model.predict_function
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
        with pytest.raises(
            compat.UnsupportedError, match="gives different results for three samples"
        ):
            model.predict_on_batch(np.random.RandomState(0).normal(size=(13, 8)))
