"""Lookup layers on ranks: tables that are equal train as one process does, others are an error."""

from . import rank_tapes, ranks

TABLES = """
import tensorflow as tf

layers = keras.layers
KERAS3 = hasattr(keras, "ops")
words = np.array(["a", "b", "c", "d"])[np.arange(21) * 7 % 4][:, None]


def built(layer, data, name="looked_up"):
    def build():
        source = keras.Input((1,), dtype=data.dtype.name if data.dtype.kind != "U" else "string")
        hidden = layers.Flatten()(layers.Embedding(8, 3, "ones")(layer(source)))
        return keras.Model(source, dense(1)(hidden), name=name)

    return compat.parallelize(build)


def train(layer, data, name="looked_up"):
    model = built(layer, data, name)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    data, targets = compat.shard((data, y), BATCH)
    if data.dtype.kind == "U":  # Keras 3 takes no such arrays
        data = tf.constant(data)
    history = model.fit(data, targets, rows, epochs=2, shuffle=False, verbose=0)
    model.evaluate(data, targets, verbose=0)
    return [np.array(history.history["loss"])] + [v.numpy() for v in model.trainable_variables]


def adapted(layer, data):
    layer.adapt(data)
    return layer


numbers = (np.arange(21) * 7 % 5)[:, None]
text = layers.TextVectorization(output_sequence_length=1)
trained = {
    "strings": lambda: train(adapted(layers.StringLookup(), words), words),
    "bins": lambda: train(layers.Discretization([-1.0, 0.0, 1.0]), x[:, :1]),
    "text": lambda: train(adapted(text, words), words),
    "numbers": lambda: train(adapted(layers.IntegerLookup(), numbers), numbers),
    "given": lambda: train(layers.StringLookup(vocabulary=["d", "a"]), words),
}
for name in list(trained)[HALF]:
    weights[name] = trained[name]()

some = compat.shard(words, BATCH)[: 1 + compat.rank()]
tokens = ["a", "b"][:: 1 - 2 * compat.rank()]
own_text = {"vocabulary": tokens, "output_sequence_length": 1, "name": "own"}
refused = {
    "adapted": lambda: train(adapted(layers.StringLookup(name="own"), some), words),
    "text": lambda: train(layers.TextVectorization(**own_text), words),
    "bins": lambda: train(layers.Discretization([0.0, 1.0 + compat.rank()], name="own"), x[:, :1]),
    "ordered": lambda: train(layers.StringLookup(vocabulary=tokens, name="own"), words),
}
if not KERAS3:

    class Counts(layers.Layer):
        "Has a table of its own, which tf.keras lists among the model's weights."

        def __init__(self, factor):
            super().__init__(name="own")
            self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 1)
            self._add_trackable(self.table, trainable=False)
            self.table.insert(["a", "b"], [1, 2 + compat.rank() * factor])

        def call(self, inputs):
            return tf.ensure_shape(self.table.lookup(inputs), inputs.shape)

    refused["table"] = lambda: train(Counts(1), words)
    refused["equal"] = lambda: train(Counts(0), words)
if compat.size() > 1:
    for name in list(refused)[HALF]:
        said[name] = told(refused[name])
"""


def tables(number):
    """Return the program, of a half of the layers: see ``rank_tapes``."""
    return "HALF = {}\n{}".format(rank_tapes.half(number), TABLES)


def refusal(entries, rank):
    return (
        "RankError: Layer 'own' of model 'looked_up' looks its input up in a table that is another "
        "one on rank 1 than on rank 0; on rank {} of 2 it has {} entries. Ranks would train on "
        "other indices. Give adapt() the same data on every rank, before shard(), or set the same "
        "vocabulary.".format(rank, entries)
    )


def check(jobs, number, keras_3):
    """Check what the program has left, of the same half.

    Arguments:
        jobs: the results of ``ranks.run_both()``.
        number: that of the half.
        keras_3: whether the layers are those of Keras 3.
    """
    for rank, said in enumerate(ranks.check_same(jobs, "tables")):
        expected = {
            "adapted": refusal(2 + rank, rank),
            "text": refusal(4, rank),
            "bins": refusal(2, rank),
            "ordered": refusal(3, rank),
        }
        if not keras_3:
            expected.update(table=refusal(2, rank), equal=[])
        assert said == {name: expected[name] for name in list(expected)[rank_tapes.half(number)]}
