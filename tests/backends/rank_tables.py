"""Lookup layers on ranks: tables that are equal train as one process does, others are an error."""

from . import ranks

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
weights["strings"] = train(adapted(layers.StringLookup(), words), words)
weights["numbers"] = train(adapted(layers.IntegerLookup(), numbers), numbers)
weights["given"] = train(layers.StringLookup(vocabulary=["d", "a"]), words)
weights["bins"] = train(layers.Discretization([-1.0, 0.0, 1.0]), x[:, :1])
text = layers.TextVectorization(output_sequence_length=1)
weights["text"] = train(adapted(text, words), words)
if compat.size() > 1:
    some = compat.shard(words, BATCH)[: 1 + compat.rank()]
    said["adapted"] = told(lambda: train(adapted(layers.StringLookup(name="own"), some), words))
    tokens = ["a", "b"][:: 1 - 2 * compat.rank()]
    layer = layers.StringLookup(vocabulary=tokens, name="own")
    said["ordered"] = told(lambda: train(layer, words))
    layer = layers.TextVectorization(vocabulary=tokens, output_sequence_length=1, name="own")
    said["text"] = told(lambda: train(layer, words))
    layer = layers.Discretization([0.0, 1.0 + compat.rank()], name="own")
    said["bins"] = told(lambda: train(layer, x[:, :1]))
    if not KERAS3:

        class Counts(layers.Layer):
            "Has a table of its own, which tf.keras lists among the model's weights."

            def __init__(self):
                super().__init__(name="own")
                self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 1)
                self._add_trackable(self.table, trainable=False)
                self.table.insert(["a", "b"], [1, 2 + compat.rank() * FACTOR])

            def call(self, inputs):
                return tf.ensure_shape(self.table.lookup(inputs), inputs.shape)

        FACTOR = 0
        said["equal"] = told(lambda: train(Counts(), words))
        FACTOR = 1
        said["table"] = told(lambda: train(Counts(), words))
"""


def refusal(entries, rank):
    return (
        "RankError: Layer 'own' of model 'looked_up' looks its input up in a table that is another "
        "one on rank 1 than on rank 0; on rank {} of 2 it has {} entries. Ranks would train on "
        "other indices. Give adapt() the same data on every rank, before shard(), or set the same "
        "vocabulary.".format(rank, entries)
    )


def check(jobs):
    """Check what the program above left."""
    for rank, said in enumerate(ranks.check_same(jobs, "tables")):
        assert said.pop("equal", []) == []
        assert said.pop("table", refusal(2, rank)) == refusal(2, rank)
        assert said == {
            "adapted": refusal(2 + rank, rank),
            "ordered": refusal(3, rank),
            "text": refusal(4, rank),
            "bins": refusal(2, rank),
        }
