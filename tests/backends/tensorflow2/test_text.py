"""TensorFlow 2: layers with a vocabulary, and the text models that they are the first layers of."""

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._configuration.settings import parse_verify
from compat.testing import DEVICES, keras_under_test, slow, span

from ..messages import told

keras_ = keras_under_test()
layers = keras_.layers
HAVE_TEXT = hasattr(layers, "TextVectorization")  # in TensorFlow 2.3 they are experimental
TEXTS = np.array(
    ["the cat sat", "a dog ran fast!", "the dog", "Cat a", "sat sat", "ran the dog a cat", "x y z"]
)
TARGETS = np.arange(7, dtype="float32")[:, None] / 7


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def batches():
    return tf.data.Dataset.from_tensor_slices((TEXTS[:, None], TARGETS)).batch(4)


def adapted(layer, values=TEXTS):
    layer.adapt(values)
    return layer


def in_some(names, quick):
    return [pytest.param(name, marks=() if name in quick else slow) for name in sorted(names)]


def with_weights(model):
    random = np.random.RandomState(0)
    for weight in model.trainable_weights:
        weight.assign(random.normal(size=weight.shape).astype("float32"))
    return model


def embedded(numbers, count=20):
    return layers.Flatten()(layers.Embedding(count, 3)(numbers))


if HAVE_TEXT:

    def words(**options):
        return adapted(layers.TextVectorization(max_tokens=20, **options))

    MODELS = {
        "words": lambda x: embedded(words(output_sequence_length=5)(x)),
        "pairs of words": lambda x: embedded(words(ngrams=2, output_sequence_length=5)(x)),
        "which words": lambda x: words(output_mode="multi_hot")(x),
        "how many of each": lambda x: words(output_mode="count")(x),
        "weighted": lambda x: words(output_mode="tf_idf")(x),
        "whole texts": lambda x: embedded(adapted(layers.StringLookup())(x)),
        "one of several": lambda x: layers.Flatten()(
            adapted(layers.StringLookup(output_mode="one_hot"))(x)
        ),
        "hashed": lambda x: embedded(layers.Hashing(num_bins=20)(x)),
    }

    def trained(keras, name, parallel, path=None):
        inputs = layers.Input((1,), dtype="string")
        model = with_weights(keras.models.Model(inputs, layers.Dense(1)(MODELS[name](inputs))))
        if parallel:
            compat.parallelize(model)
        model.compile("sgd", "mse")
        history = model.fit(batches(), epochs=2, shuffle=False, verbose=0)
        loss = model.evaluate(batches(), verbose=0)
        predicted = model.predict(batches(), verbose=0)
        if path is not None:
            model.save(path)
            loaded = keras.models.load_model(path)
            np.testing.assert_allclose(loaded.predict(batches(), verbose=0), predicted, atol=1e-5)
        return history.history["loss"] + [loss, predicted]

    @pytest.mark.parametrize("verify", [pytest.param(0, marks=slow), 1])
    @pytest.mark.parametrize("name", in_some(MODELS, ["words", "which words", "one of several"]))
    def test_text_models_are_split(keras, configured_verify, verify, name, tmp_path):
        configured_verify(verify)
        expected = trained(keras, name, False)
        with told() as texts:
            found = trained(keras, name, True, str(tmp_path / "model.keras"))
        assert not texts
        for one, other in zip(expected, found):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

    def test_rows_as_long_as_the_longest_one_are_not(keras):
        """Each device would pad to its own longest row."""
        inputs = layers.Input((1,), dtype="string")
        numbers = words()(inputs)
        outputs = layers.GlobalAveragePooling1D()(layers.Embedding(20, 3)(numbers))
        model = with_weights(keras.models.Model(inputs, outputs))
        expected = model.predict(batches(), verbose=0)
        compat.parallelize(model)
        with told() as texts:
            found = model.predict(batches(), verbose=0)
        np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)
        assert len(texts) == 1 and "runs unsplit on /cpu:0" in texts[0]


@pytest.fixture
def configured_verify(keras, monkeypatch):
    settings = compat._runtime.process.process.configuration.settings

    def configure(verify):
        monkeypatch.setattr(settings, "verify", parse_verify(verify, {}, DEVICES))

    return configure


@span
def test_numbers_are_looked_up(keras):
    """Also where layers with a vocabulary are experimental, and keep it otherwise."""
    experimental = getattr(layers, "experimental", None)
    module = layers if HAVE_TEXT else getattr(experimental, "preprocessing", None)
    if not hasattr(module, "IntegerLookup") and not hasattr(module, "StringLookup"):
        assert tf.__version__.startswith(("2.0", "2.1", "2.2"))
        return
    values = np.arange(7)[:, None] % 3
    if hasattr(module, "IntegerLookup"):
        lookup, dtype = adapted(module.IntegerLookup(), values.ravel()), "int64"
    else:
        values = values.astype(str)
        lookup, dtype = adapted(module.StringLookup(), values.ravel()), "string"
    inputs = layers.Input((1,), dtype=dtype)
    model = with_weights(keras.models.Model(inputs, layers.Dense(2)(embedded(lookup(inputs)))))
    rows = tf.data.Dataset.from_tensor_slices(values).batch(7)
    expected = model.predict(rows, verbose=0)
    with told() as texts:
        compat.parallelize(model)
        found = model.predict(rows, verbose=0)
    assert not texts
    np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)


@span
def test_where_the_rows_of_all_texts_begin_is_computed_unsplit(keras):
    class Starts(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable(1)

        def __call__(self, texts):
            return tf.strings.unicode_decode(texts, "UTF-8").row_splits

    net = Starts()
    texts = tf.constant(["ab", "c", "def", "g", "hi"])
    expected = net(texts)
    compat.parallelize(net)
    with told() as warned:
        np.testing.assert_array_equal(expected, net(texts))
    assert len(warned) == 1 and "UnicodeDecode" in warned[0]
