"""Files of wrapped models, written by the Keras that has the wrapper, and unwrapped.

``multi_gpu_model`` is the Keras' own, told of GPUs that are not there: without them, the parts
of the graph run on the CPU.
"""

import inspect
import os
import re
import subprocess
import sys

import h5py
import numpy as np
import pytest
import tensorflow as tf

import compat
from compat import __main__, _api
from compat._commands import unwrap
from compat.testing import (
    DEVICES,
    in_span,
    initialise,
    keras_under_test,
    largest_difference,
    slow,
    span,
)
from compat.testing.automatic import compiled_on_all_devices

from . import damaged_files

KERAS = keras_under_test()
ROWS = np.random.RandomState(0).normal(size=(8, 4)).astype("float32")
TARGETS = np.random.RandomState(1).normal(size=(8, 3)).astype("float32")


def get_slice(data, index, parts):
    shape = tf.shape(data)
    size = tf.concat([shape[:1] // parts, shape[1:]], axis=0)
    stride = tf.concat([shape[:1] // parts, shape[1:] * 0], axis=0)
    return tf.slice(data, stride * index, size)


def make_parallel(keras, model, monkeypatch=None):
    """Return a model by the recipe of 2016, with the names of Keras 2."""
    towers = []
    for index in range(2):
        with tf.device("/gpu:{}".format(index)), tf.name_scope("tower_{}".format(index)):
            inputs = [
                keras.layers.Lambda(
                    get_slice,
                    output_shape=keras.backend.int_shape(x)[1:],
                    arguments={"index": index, "parts": 2},
                )(x)
                for x in model.inputs
            ]
            outputs = model(inputs if len(inputs) > 1 else inputs[0])
            towers.append(outputs if isinstance(outputs, (list, tuple)) else [outputs])
    with tf.device("/cpu:0"):
        merged = [keras.layers.concatenate(list(each), axis=0) for each in zip(*towers)]
    return keras.models.Model(model.inputs, merged)


def multi_gpu_model(keras, model, monkeypatch, **options):
    function = keras.utils.multi_gpu_model
    module = sys.modules[getattr(function, "__wrapped__", function).__module__]
    device = "/{}:{}" if module.__name__.startswith("keras.") else "/device:{}:{}"
    devices = [device.format("cpu", 0), device.format("gpu", 0), device.format("gpu", 1)]
    monkeypatch.setattr(module, "_get_available_devices", lambda: devices)
    return function(model, 2, **options)


def relocated(keras, model, monkeypatch):
    return multi_gpu_model(keras, model, monkeypatch, cpu_relocation=True)


def of_compat(keras, model, monkeypatch):
    return compat.multi_gpu_model(model, 2)


WRAPPERS = [make_parallel, of_compat]
if hasattr(KERAS.utils, "multi_gpu_model"):
    if "cpu_relocation" in inspect.signature(KERAS.utils.multi_gpu_model).parameters:
        WRAPPERS = [relocated] + WRAPPERS  # from Keras 2.1.6
    WRAPPERS = [multi_gpu_model] + WRAPPERS


def sequential(keras):
    layers = keras.layers
    return keras.models.Sequential(
        [
            layers.Dense(5, activation="tanh", input_shape=(4,)),
            layers.Reshape((5,)),
            layers.Dense(3),
        ]
    )


def branched(keras):
    """Return a model with a model in it, a frozen layer, two outputs, and a name with a slash."""
    layers = keras.layers
    encoder = keras.models.Sequential(
        [layers.Dense(5, input_shape=(5,)), layers.BatchNormalization(), layers.Dense(5)]
    )
    inputs = layers.Input((4,))
    hidden = layers.BatchNormalization(name="block/norm")(inputs)
    hidden = encoder(layers.Dense(5, activation="tanh", trainable=False)(hidden))
    hidden = layers.TimeDistributed(layers.Dense(2))(layers.Reshape((5, 1))(hidden))
    hidden = layers.Flatten()(hidden)
    outputs = [layers.Dense(3, name="first")(hidden), layers.Dense(3, name="second")(hidden)]
    return keras.models.Model(inputs, outputs)


def arrays(values):
    return [np.asarray(value) for value in values]


def state(model):
    """Return the state of the optimizer."""
    if hasattr(model.optimizer, "get_weights"):
        return arrays(model.optimizer.get_weights())
    return arrays(variable.numpy() for variable in model.optimizer.variables)  # TensorFlow 2.11


def assert_equal(expected, found):
    assert len(expected) == len(found)
    for one, other in zip(expected, found):
        np.testing.assert_array_equal(one, other)


def unwrapped(capsys, path, *options):
    """Return the path of the new file, and what the command printed after it."""
    capsys.readouterr()
    status = __main__.main(["unwrap", path] + list(options))
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    new, _, told = out.partition(": ")
    return new, told


def refused(capsys, path, *options):
    """Return the text of the error."""
    capsys.readouterr()
    folder = os.path.dirname(path)
    before = sorted(os.listdir(folder))
    status = __main__.main(["unwrap", path] + list(options))
    out, err = capsys.readouterr()
    assert (status, out, sorted(os.listdir(folder))) == (2, "", before)
    assert err.startswith("compat unwrap: ") and err.endswith("\n")
    return err[len("compat unwrap: ") : -1]


class Unwrapping:
    #: How many damaged files are tried.
    damaged = 150

    @pytest.fixture
    def keras(self):
        compat.configure_gpu(simulate=DEVICES)
        yield KERAS
        KERAS.backend.clear_session()

    @pytest.fixture
    def path(self, tmp_path):
        return str(tmp_path / "old.h5")

    def wrapped(self, keras, model, wrapper, monkeypatch):
        initialise(model)
        model.set_weights([np.abs(each) for each in model.get_weights()])  # as variances must be
        return wrapper(keras, model, monkeypatch)

    def trained(self, keras, model, wrapper, monkeypatch, optimizer):
        """Return the wrapper after a step, and the targets, one for each output."""
        wrapped = self.wrapped(keras, model, wrapper, monkeypatch)
        loss = {name: "mse" for name in wrapped.output_names}
        wrapped.compile(optimizer, loss)
        targets = [TARGETS] * len(model.outputs)
        wrapped.train_on_batch(ROWS, targets if len(targets) > 1 else TARGETS)
        return wrapped, targets if len(targets) > 1 else TARGETS

    @pytest.mark.parametrize(
        "build, wrapper",
        [pytest.param(sequential, WRAPPERS[0], marks=span)]
        + [pytest.param(sequential, each, marks=slow) for each in WRAPPERS[1:]]
        + [pytest.param(branched, WRAPPERS[0], marks=slow)],
    )
    def test_a_whole_model(self, keras, path, capsys, monkeypatch, wrapper, build):
        model = build(keras)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        wrapped, targets = self.trained(keras, model, wrapper, monkeypatch, optimizer)
        inner = compat.unwrap(wrapped)
        assert inner.name == model.name and (inner is model or wrapper is relocated)
        try:
            wrapped.save(path)
        except TypeError as error:  # Keras before 2.2.3 copies the function, with its modules
            assert "pickle" in str(error)
            assert refused(capsys, path) == (
                "{} is HDF5, but neither a whole model nor weights of Keras: it has no "
                "layer_names. Some versions of Keras stopped halfway when they saved a wrapper "
                'whole ("can\'t pickle module objects"); use a file of save_weights() '
                "then.".format(path)
            )
            return
        new, told = unwrapped(capsys, path)
        assert new == path.replace("old.h5", "old.unwrapped.h5")
        if build is sequential:
            assert told == (
                "4 weights of 2 layers ({}), and the optimizer's state\n".format(
                    ", ".join(layer.name for layer in model.layers if layer.weights)
                )
            )
        loaded = keras.models.load_model(new)
        layers = [[len(layer.weights) for layer in each.layers] for each in (inner, loaded)]
        assert layers[0] == layers[1]
        assert_equal(inner.get_weights(), loaded.get_weights())
        predictions = arrays(loaded.predict(ROWS))
        assert np.isfinite(predictions).all()
        assert_equal(arrays(inner.predict(ROWS)), predictions)
        assert len(state(wrapped)) > 1
        assert_equal(state(wrapped), state(loaded))
        for each in (wrapped, loaded):
            each.train_on_batch(ROWS, targets)
        states = state(wrapped), state(loaded)
        assert [each.shape for each in states[0]] == [each.shape for each in states[1]]
        assert int(states[1][0]) == 2
        if build is sequential:  # where no layer normalizes each half of the batch by itself
            assert largest_difference(inner.get_weights(), loaded.get_weights()) < 1e-6
            assert largest_difference(*states) < 1e-6

    @pytest.mark.parametrize("wrapper", in_span(WRAPPERS[:2], WRAPPERS[:1]))
    def test_weights_alone(self, keras, path, capsys, monkeypatch, wrapper):
        """The names of the weights tell the layers."""
        wrapped = self.wrapped(keras, sequential(keras), wrapper, monkeypatch)
        wrapped.save_weights(path)
        plain = sequential(keras)
        with pytest.raises(ValueError, match="containing 1 layers|found 1 saved layers"):
            plain.load_weights(path)
        new, told = unwrapped(capsys, path)
        assert told.endswith(
            "\nIdentified by the weights' names, in their order. If layers of the model are "
            "models, or were not trained (trainable=False), add --model model.json, from the plain "
            "model's to_json().\n"
        )
        plain.load_weights(new)
        assert_equal(compat.unwrap(wrapped).get_weights(), plain.get_weights())
        with h5py.File(new, "r") as file:
            for name in (b"backend", b"keras_version"):  # old Keras decodes bytes
                kind = h5py.h5a.open(file.id, name).get_type()
                assert kind.get_cset() == h5py.h5t.CSET_ASCII
            names = [name.decode() for name in file.attrs["layer_names"]]
        expected = [layer.name for layer in compat.unwrap(wrapped).layers if layer.weights]
        assert names == expected or wrapper is relocated  # which has other names in TensorFlow

    def test_weights_that_do_not_tell_the_layers(self, keras, path, tmp_path, capsys, monkeypatch):
        model = branched(keras)
        wrapped = self.wrapped(keras, model, make_parallel, monkeypatch)
        wrapped.save_weights(path)
        assert "their names do not show the order of its layers: " in refused(capsys, path)
        (tmp_path / "model.json").write_text(model.to_json())
        new, told = unwrapped(capsys, path, "--model", str(tmp_path / "model.json"))
        assert told.count("\n") == 1
        expected = model.get_weights()
        initialise(model)
        model.load_weights(new)
        assert_equal(expected, model.get_weights())
        (tmp_path / "other.json").write_text(sequential(keras).to_json())
        text = refused(capsys, path, "--model", str(tmp_path / "other.json"), "--force")
        assert re.match(
            "{} cannot be unwrapped: the names of its weights \\(.*, .*, .*, ...\\) do not show "
            "which layers of '.*' have them.".format(re.escape(path)),
            text,
        )

    def test_wrappers_of_a_script_are_left_alone(self, keras, monkeypatch):
        """Where all compiled models are parallelized."""
        model = initialise(sequential(keras))
        wrapped = make_parallel(keras, model, monkeypatch)
        with compiled_on_all_devices(_api.backend_of(model)):
            with pytest.warns(compat.CompatWarning) as warned:
                wrapped.compile("sgd", "mse")
        assert [str(w.message) for w in warned if w.category is compat.CompatWarning] == [
            "parallelize=True leaves the model {!r} as it is, because it is a wrapper such as "
            "multi_gpu_model() makes, which splits batches itself.".format(wrapped.name)
        ]

    def test_names_cut_into_several_attributes(self, keras, path, capsys, monkeypatch):
        wrapped = self.wrapped(keras, sequential(keras), make_parallel, monkeypatch)
        wrapped.save_weights(path)
        inner = compat.unwrap(wrapped)
        with h5py.File(path, "r+") as file:
            names = file[inner.name].attrs["weight_names"]
            del file[inner.name].attrs["weight_names"]
            file[inner.name].attrs["weight_names0"] = names[:3]
            file[inner.name].attrs["weight_names1"] = names[3:]
        monkeypatch.setattr(unwrap, "ATTRIBUTE_LIMIT", len(names[0]))
        new, _ = unwrapped(capsys, path)
        with h5py.File(new, "r") as file:
            assert "weight_names1" in file[inner.layers[0].name].attrs
        if KERAS.__name__ != "keras" or keras.__version__ >= "2.2":  # older ones cut nothing
            plain = sequential(keras)
            plain.load_weights(new)
            assert_equal(inner.get_weights(), plain.get_weights())

    def test_what_is_no_wrapper(self, keras, path, tmp_path, capsys):
        layers = keras.layers
        encoder = sequential(keras)
        inputs = [layers.Input((4,)), layers.Input((4,))]
        joined = layers.concatenate([encoder(each) for each in inputs], axis=0)
        siamese = keras.models.Model(inputs, joined)
        assert compat.unwrap(siamese) is siamese and compat.unwrap(encoder) is encoder
        for model in (siamese, encoder):
            model.save(path)
            assert refused(capsys, path) == (
                "{} does not contain a multi_gpu_model wrapper: no layer of it is a model that has "
                "all the weights and is called on parts of a batch, as multi_gpu_model and "
                "make_parallel make it. Load it as it is.".format(path)
            )
        with h5py.File(path, "r+") as file:
            file.attrs["keras_version"] = b"3.1.0"
        assert refused(capsys, path) == (
            "{} was saved by Keras 3.1.0, whose models compat unwrap does not read. Load it, and "
            "save compat.unwrap(model).".format(path)
        )
        encoder.save(path)
        (tmp_path / "model.json").write_text(encoder.to_json())
        assert refused(capsys, path, "--model", str(tmp_path / "model.json")) == (
            "--model is for files of weights; {} is a whole model and has its own layers. Leave "
            "--model out.".format(path)
        )
        encoder.save_weights(path)
        assert refused(capsys, path) == (
            "{} does not contain a multi_gpu_model wrapper: 2 of its {} layers have weights. A "
            "wrapper has one, the model inside, between layers without weights. Load it as it "
            "is.".format(path, len(encoder.layers))
        )
        path = str(tmp_path / "new.weights.h5")
        encoder.save_weights(path)
        with h5py.File(path, "r") as file:
            is_of_keras_3 = "layer_names" not in file.attrs  # so Keras from 2.13 on writes it
        if is_of_keras_3:
            assert refused(capsys, path) == (
                "{} has weights in the format of Keras 3 (.weights.h5), which compat unwrap does "
                "not read. Load it into the wrapper, built by your code, and save the weights of "
                "compat.unwrap(parallel).".format(path)
            )
        with pytest.raises(compat.NotAModelError) as error:
            compat.unwrap(path)
        assert str(error.value) == (
            "unwrap() takes a Keras model; it was given 'builtins.str'. For a file there is the "
            "command compat unwrap."
        )

    def test_damaged_files_are_refused_in_words(self, keras, path, tmp_path, monkeypatch):
        """In less than a second and 2,000 characters, whatever the damage."""
        wrapped, _ = self.trained(keras, branched(keras), make_parallel, monkeypatch, "sgd")
        wrapped.save(path)
        weights = str(tmp_path / "weights.h5")
        wrapped = self.wrapped(keras, sequential(keras), make_parallel, monkeypatch)
        wrapped.save_weights(weights)
        command = [sys.executable, damaged_files.__file__, str(self.damaged), path, weights]
        assert subprocess.check_output(command, universal_newlines=True) == "\n"

    def test_no_file_is_lost(self, keras, path, capsys, monkeypatch):
        wrapped = self.wrapped(keras, sequential(keras), make_parallel, monkeypatch)
        wrapped.save_weights(path)
        with open(path, "rb") as file:
            content = file.read()
        os.chmod(path, 0o640)
        new, _ = unwrapped(capsys, path)
        assert os.stat(new).st_mode & 0o777 == 0o640
        os.chmod(path, 0o644)
        assert refused(capsys, path) == (
            "{} is there already. Name another file with -o, or replace it with --force.".format(
                new
            )
        )
        assert unwrapped(capsys, path, "--force")[0] == new
        missing = os.path.join(path + ".folder", "new.h5")
        assert refused(capsys, path, "-o", missing) == (
            "{} cannot be written: No such file or directory.".format(missing)
        )
        with open(path, "rb") as file:
            assert file.read() == content
        os.symlink(new, path + ".link")
        os.chmod(new, 0o600)
        unwrapped(capsys, path, "--force", "-o", path + ".link")
        assert os.path.islink(path + ".link") and os.stat(new).st_mode & 0o777 == 0o600
        os.mkfifo(path + ".fifo")
        received = os.open(path + ".fifo", os.O_RDONLY | os.O_NONBLOCK)
        unwrapped(capsys, path, "--force", "-o", path + ".fifo")
        assert os.read(received, 100000).startswith(content[:8])
        os.chmod(path, 0o640)
        assert unwrapped(capsys, path, "-o", path)[0] == path
        assert os.stat(path).st_mode & 0o777 == 0o640
        sequential(keras).load_weights(path)
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
        text = refused(capsys, path, "--force")
        assert text.startswith("{} cannot be unwrapped: ".format(path))
        assert text.endswith(". Nothing was written.")
