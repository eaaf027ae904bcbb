"""What Keras' and TensorFlow's own tests of multi_gpu_model cover, and what old scripts rely on.

Equivalents of keras/tests/keras/utils/multi_gpu_test.py and of
tensorflow/python/keras/utils/multi_gpu_utils_test.py: simple, multi-input and multi-output,
invalid devices, serialization, siamese names, lists of ids. On eight simulated devices. Their
recurrent layer with an initial state is one of tests/idioms.
"""

import numpy as np
import pytest

import compat
from compat.testing import CASES, any_backend, initialise, largest_difference, optimizer

pytestmark = pytest.mark.row("multi_gpu_model and make_parallel")

SIMULATED = (
    "On a machine with fewer, `compat run --simulate {0} script.py` lets {0} CPU devices stand "
    "in for GPUs, on all backends but CNTK."
)


def dense(keras):
    return initialise(CASES["dense"].build(keras))


def data(rows=62):
    """Return data whose last batch of 16 divides by two devices, and not by eight."""
    return CASES["dense"].data(rows)


def compiled(keras, model, loss="mse"):
    model.compile(optimizer(keras, "sgd"), loss)
    return model


def fit(model, inputs, targets, batch=16, epochs=2):
    model.fit(inputs, targets, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return model


# As Keras' tests ------------------------------------------------------------------------------


@any_backend
def test_simple_model(keras, contract):
    plain, template = compiled(keras, dense(keras)), dense(keras)
    parallel = compat.multi_gpu_model(template)
    assert parallel is not template
    compiled(keras, parallel)
    for model in (plain, parallel):
        fit(model, *data())
    assert largest_difference(plain.get_weights(), template.get_weights()) <= contract.tolerance


@pytest.mark.parametrize(
    "gpus, ids",
    [
        (None, range(8)),
        (0, range(8)),
        ([], range(8)),
        (8, range(8)),
        (2, [0, 1]),
        ((7, 3), [7, 3]),
        ([2, 5, 2], [2, 5]),
    ],
    ids=repr,
)
def test_which_devices_are_asked_for(keras, configuration, contract, monkeypatch, gpus, ids):
    asked = []

    def parallelize(model, devices):
        asked.extend(devices)
        return model

    monkeypatch.setattr(contract.instance(), "parallelize", parallelize)
    compat.multi_gpu_model(dense(keras), gpus=gpus)
    assert asked == [configuration.devices[i] for i in ids]


def test_which_devices_train(keras, configuration, contract):
    parallel = compiled(keras, compat.multi_gpu_model(dense(keras), gpus=(7, 3)))
    devices = [configuration.devices[i] for i in (3, 7)]
    assert contract.devices_of(parallel, *data(14)) == devices


@any_backend
def test_multi_input_and_multi_output(keras, contract):
    case = CASES["multi"]
    plain, template = (initialise(case.build(keras)) for _ in range(2))
    parallel = compat.multi_gpu_model(template, gpus=4)
    assert list(parallel.output_names) == ["score", "similar"]  # what losses are named by
    for model in (plain, parallel):
        fit(compiled(keras, model, case.loss), *case.data(13))
    assert largest_difference(plain.get_weights(), template.get_weights()) <= contract.tolerance


@any_backend
@pytest.mark.parametrize(
    "gpus, name",
    [(1, "gpus"), (-1, "gpus"), ([0], "len(gpus)")],
)
def test_fewer_than_two(keras, gpus, name):
    with pytest.raises(ValueError) as caught:
        compat.multi_gpu_model(dense(keras), gpus=gpus)
    assert str(caught.value) == (
        "For multi-gpu usage to be effective, call `multi_gpu_model` with `{} >= 2`. Received: "
        "`gpus={}`. {}".format(name, gpus, SIMULATED.format(2))
    )


@any_backend
@pytest.mark.parametrize("gpus", [10, [0, 2, 4, 6, 8]])
def test_invalid_devices(keras, gpus):
    with pytest.raises(ValueError) as caught:
        compat.multi_gpu_model(dense(keras), gpus=gpus)
    ids = gpus if isinstance(gpus, list) else range(gpus)
    assert str(caught.value) == (
        "To call `multi_gpu_model` with `gpus={}`, we expect the following devices to be "
        "available: {}. However this machine only has: {}. Try reducing `gpus`. {}".format(
            gpus,
            ["/cpu:0"] + ["/gpu:{}".format(i) for i in ids],
            ["/cpu:0"] + ["/gpu:{}".format(i) for i in range(8)],
            SIMULATED.format(max(ids) + 1),
        )
    )


@any_backend
@pytest.mark.parametrize("gpus", ["2", 2.0])
def test_what_is_no_number(keras, gpus):
    with pytest.raises(ValueError, match="is not understood. Use a number, 1 or more"):
        compat.multi_gpu_model(dense(keras), gpus=gpus)


def test_no_model_with_symbolic_inputs(keras):
    model = keras.models.Sequential()
    for function, given in ((compat.multi_gpu_model, 3), (compat.make_parallel, model)):
        with pytest.raises(TypeError) as caught:
            function(given, 2)
        assert type(caught.value) is compat.NotAModelError
        assert str(caught.value) == (
            "{}() takes a Keras model with symbolic inputs, functional or Sequential with an input "
            "shape, to make another one around it; it was given '{}.{}'. compat.parallelize() "
            "takes any Keras model.".format(
                function.__name__, type(given).__module__, type(given).__name__
            )
        )


def test_serialization(keras, contract, tmp_path):
    """Saving the parallel model could not pickle; now it loads in plain Keras, and again on 3."""
    template, (inputs, targets) = dense(keras), data(13)
    parallel = compiled(keras, compat.multi_gpu_model(template, gpus=2))
    fit(parallel, inputs, targets, epochs=1)
    path = str(tmp_path / "parallel") + contract.extension
    parallel.save(path)
    loaded = keras.models.load_model(path)
    expected = template.predict(inputs, verbose=0)
    assert np.abs(loaded.predict(inputs, verbose=0) - expected).max() < 1e-6
    from_json = keras.models.model_from_json(parallel.to_json())
    from_json.set_weights(parallel.get_weights())
    assert np.abs(from_json.predict(inputs, verbose=0) - expected).max() < 1e-6
    assert compat.parallelize(loaded, 3) is loaded
    for model in (parallel, loaded):
        fit(model, inputs, targets, epochs=1)
    assert largest_difference(parallel.get_weights(), loaded.get_weights()) <= contract.tolerance


def test_siamese_names(keras):
    layers = keras.layers
    nested = keras.models.Sequential([layers.Dense(4, input_shape=(3,)), layers.Dense(1)])
    left, right = layers.Input(shape=(3,)), layers.Input(shape=(3,))
    siamese = keras.models.Model([left, right], [nested(left), nested(right)])
    parallel = compat.multi_gpu_model(siamese, gpus=2)
    assert len(set(siamese.output_names)) in (1, 2)  # newer versions number them by themselves
    expected = [name + end for name, end in zip(siamese.output_names, ("_1", "_2"))]
    if len(set(siamese.output_names)) == 2:
        expected = list(siamese.output_names)
    assert list(parallel.output_names) == expected


# As old scripts -------------------------------------------------------------------------------


def test_the_template_is_a_layer_of_the_parallel_model(keras):
    template = dense(keras)
    parallel = compat.multi_gpu_model(template, gpus=2, cpu_merge=False)
    assert parallel.layers[-2] is template
    assert parallel.get_layer(template.name) is template
    assert parallel.get_layer("dense_model").get_layer("hidden") is template.layers[-2]


@any_backend
def test_template_and_parallel_model_compiled_separately(keras, contract):
    """Each trains the same weights; the template stays on one device."""
    inputs, targets = data(14)
    plain, template = compiled(keras, dense(keras)), compiled(keras, dense(keras))
    parallel = compat.multi_gpu_model(template, gpus=3, cpu_relocation=True)
    compiled(keras, parallel)
    for models in ((plain, parallel), (plain, template)):
        for model in models:
            fit(compiled(keras, model), inputs, targets)
    assert largest_difference(plain.get_weights(), template.get_weights()) <= contract.tolerance
    assert largest_difference(plain.get_weights(), parallel.get_weights()) <= contract.tolerance
    results = [model.evaluate(inputs, targets, verbose=0) for model in (plain, template, parallel)]
    np.testing.assert_allclose(results, results[0], rtol=1e-4)
    assert len(contract.devices_of(parallel, inputs, targets)) == 3


@any_backend
def test_saving_the_template(keras, contract, tmp_path):
    template = dense(keras)
    parallel = compiled(keras, compat.multi_gpu_model(template, gpus=2))
    fit(parallel, *data(13), epochs=1)
    path = str(tmp_path / "template") + contract.extension
    template.save(path)
    loaded = keras.models.load_model(path)
    assert largest_difference(loaded.get_weights(), parallel.get_weights()) == 0
    weights = str(tmp_path / "model") + contract.weights_extension
    parallel.save_weights(weights)
    other = compat.multi_gpu_model(dense(keras), gpus=4)
    other.load_weights(weights)
    assert largest_difference(other.get_weights(), parallel.get_weights()) == 0


@any_backend
def test_one_template_wrapped_twice(keras, configuration, contract):
    template, plain, (inputs, targets) = dense(keras), compiled(keras, dense(keras)), data(14)
    wide = compiled(keras, compat.multi_gpu_model(template, gpus=[0, 1, 2]))
    narrow = compiled(keras, compat.multi_gpu_model(template, gpus=[7, 5]))
    for model in (wide, narrow):
        fit(model, inputs, targets)
        fit(compiled(keras, plain), inputs, targets)
        assert largest_difference(plain.get_weights(), model.get_weights()) <= contract.tolerance
    names = configuration.devices
    assert contract.devices_of(narrow, inputs, targets) == sorted([names[5], names[7]])
    assert contract.devices_of(wide, inputs, targets) == sorted(names[:3])


@any_backend
def test_make_parallel(keras, contract):
    """62 rows on four devices: none is dropped."""
    plain, template = compiled(keras, dense(keras)), dense(keras)
    parallel = compiled(keras, compat.make_parallel(template, 4))
    for model in (plain, parallel):
        fit(model, *data(), batch=62)
    assert parallel.predict(data()[0], batch_size=62, verbose=0).shape == (62, 4)
    assert largest_difference(plain.get_weights(), template.get_weights()) <= contract.tolerance
    assert len(contract.devices_of(parallel, *data())) == 4


@any_backend
def test_make_parallel_on_more_than_there_are(keras, contract):
    with pytest.warns(compat.CompatWarning, match="gpus=9 was asked for, but these are"):
        parallel = compiled(keras, compat.make_parallel(dense(keras), 9))
    assert len(contract.devices_of(parallel, *data())) == 8
    for wrong in (0, -1, True, "2"):
        with pytest.raises(ValueError, match="gpu_count="):
            compat.make_parallel(dense(keras), wrong)


@pytest.mark.parametrize("wrap", [compat.multi_gpu_model, compat.make_parallel])
def test_unwrap_gives_the_template(keras, wrap):
    template = dense(keras)
    assert compat.unwrap(wrap(template, 2)) is template
    assert compat.unwrap(template) is template
