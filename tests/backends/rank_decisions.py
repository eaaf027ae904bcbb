"""What one rank decides, computes or is given by itself: an error, a warning, or that of all ranks.

Programs for ``ranks.run_all()``, for all engines.
"""

import numpy as np

DECISIONS = """
def fresh(name):
    model = compat.parallelize(
        keras.models.Sequential([dense(3, input_shape=(6,)), dense(1)], name=name)
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def fit(model, *callbacks):
    options = dict(epochs=3, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model.fit(inputs, targets, rows, **options)


def stopping(name):
    "Stops after the second epoch, and sets the weights of the first one."
    return keras.callbacks.EarlyStopping(
        name, mode="max", patience=0, restore_best_weights=True
    )


class OfOneRank(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        if compat.rank() == compat.size() - 1:
            self.model.set_weights([value + 1 for value in self.model.get_weights()])


class Score(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["same"] = 1.0 - epoch
        if compat.is_chief():
            logs["rare"] = 0.25
        logs["score"] = ([0.7, 0.5, 0.4] if compat.is_chief() else [0.5, 0.5, 0.9])[epoch]


class Seen(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        said["seen"].append(float(logs["score"]))


said["seen"] = []
said["one has it"] = told(lambda: fit(fresh("has"), *[stopping("loss")] * compat.is_chief()))
said["one sets"] = told(lambda: fit(fresh("sets"), OfOneRank()))
model = fresh("decides")
alike = [Score(), stopping("score")]
said["logs"] = told(lambda: fit(model, *alike + [Seen()] * compat.is_chief()))
said["history"] = list(map(float, model.history.history["score"]))
said["rare"] = list(map(float, model.history.history["rare"]))
weights["decides"] = model.get_weights()
said["last"] = told(lambda: fit(model, Score()))
said["last history"] = list(map(float, model.history.history["score"]))
said["evaluated before"] = told(lambda: model.evaluate(inputs, targets, rows, verbose=0))
if compat.is_chief():
    model.set_weights([value + 1 for value in model.get_weights()])
said["evaluated"] = told(lambda: model.evaluate(inputs, targets, rows, verbose=0))
said["trained"] = told(lambda: fit(model))
said["evaluated then"] = told(lambda: model.evaluate(inputs, targets, rows, verbose=0))
said["names"] = [getattr(weight, "path", weight.name) for weight in model.weights]
"""

DATA = """
model = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))], name="data"))
model.compile(keras.optimizers.SGD(0.01), "mse")
orders = [random.permutation(21) for random in (np.random.RandomState(compat.rank()), random)]


def fit(data):
    return told(lambda: model.fit(*data, batch_size=rows, verbose=0, shuffle=False))


def evaluate(data):
    return told(lambda: model.evaluate(*data, batch_size=rows, verbose=0))


unseeded, seeded = (compat.shard((x[order], y[order]), BATCH) for order in orders)
said["fit"] = fit(unseeded)
said["fit again"] = fit(seeded)  # which the first call has compared as well
unseeded = compat.shard((x[orders[0]], y[orders[0]]), BATCH)
said["evaluate"] = evaluate(unseeded)
compat.shard((x[orders[0]], y[orders[0]]), BATCH)
said["on batches"] = told(lambda: model.train_on_batch(inputs[:rows], targets[:rows]))
said["labels"] = []
for order in orders:
    data = compat.shard((x, y[order]), BATCH)
    said["labels"].append(fit(data))
compat.shard(x * (1 + 1e-7 * compat.rank()))
said["rounding"] = fit(seeded)
if compat.is_chief():
    compat.shard(y)
said["one rank alone"] = fit(seeded)
own = slice(4 * compat.rank(), 4 * compat.rank() + 4)
said["without shard"] = fit((x[own], y[own]))
"""

ADAPT = """
layers = keras.layers
part = compat.shard(x, BATCH)
copies = {"whole": x, "rows of it": x[:4], "part": part, "copy": np.array(part), "view": part[:5]}
said["normalized"] = {
    name: told(lambda: layers.Normalization(name="norm").adapt(data))
    for name, data in copies.items()
}
said["rows"] = len(part)


def binned():
    bins = layers.Discretization([0.0, 1.0 + compat.rank()], name="bins")
    model = keras.Sequential([keras.Input((6,)), bins, dense(1)], name="binned")
    compat.parallelize(model).compile("sgd", "mse")
    model.fit(inputs, targets, rows, verbose=0)


said["bins"] = told(binned)
words = np.array(["a", "b", "c"])[np.arange(21) % 3]
if WORDS:
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(words).batch(BATCH)
    mapped = compat.shard(batches).map(lambda words: words)
    sliced = tf.data.Dataset.from_tensor_slices(compat.shard(words, BATCH)).batch(2)
    said["vocabulary"] = [
        told(lambda: layers.StringLookup(name="look").adapt(data))
        for data in (batches, mapped, sliced)
    ]
    said["vocabulary"].append(
        told(lambda: layers.TextVectorization(name="text").adapt(compat.shard(words, BATCH)))
    )
    order = np.random.RandomState(compat.rank()).permutation(21)
    drawn = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(BATCH)
    model = compat.parallelize(keras.Sequential([keras.Input((6,)), dense(1)]))
    model.compile("sgd", "mse")
    said["drawn"] = told(lambda: model.fit(compat.shard(drawn), verbose=0))
"""

NOT_ALL = (
    "Not all ranks have the same callbacks: rank 0 has EarlyStopping. Give a callback that sets "
    "weights, as EarlyStopping(restore_best_weights=True) does, to all ranks."
)
OWN = (
    " Or a callback (OfOneRank) has set weights by numbers that are each rank's own; those in logs "
    "are the same."
)
SET = (
    "RankError: The ranks have drifted apart: in evaluate() the values of {!r} and 3 others on {} "
    "of {} are not those of rank 0. Ranks train to one process's numbers as long as these are the "
    "same. Likely causes: weights that were set or loaded on one rank alone, as by load_weights() "
    "under is_chief(); a model that was built after parallelize(), of which each rank has drawn "
    "its own initial weights until fit() begins."
)
LOGS = (
    "A callback of fit() has put {!r} into the logs, and not the same number on each rank: {}. "
    "All ranks go on with the mean, {:.4g}, so that callbacks decide alike; it need not be one "
    "process's number. Compute it from the same data on every rank, or as a metric that is given "
    "to compile()."
)
OTHER = (
    "RankError: shard() was given other data on {} of {} than on rank 0, so that the ranks train "
    "on some rows several times and on others never. Each rank takes its rows of the same data: "
    "seed what is shuffled, split or made at random, with one seed for all ranks."
)
ADAPTED = (
    "adapt() of {} {!r} was given {}, so that its statistics or its vocabulary are those of one "
    "rank's rows. Call adapt() with the data of all ranks, those that shard() was given."
)
BINS = (
    "RankError: Layer 'bins' of model 'binned' looks its input up in a table that is another one "
    "on {} than on rank 0; on rank {} of {} it has 2 entries. Ranks would train on other indices. "
    "Give adapt() the same data on every rank, before shard(), or set the same vocabulary."
)
PART = "what shard() has returned"


def programs(adapts=""):
    """Return the programs, by name. Only ranks run them.

    Arguments:
        adapts: "numbers" where this Keras has layers that adapt, "words" where it has vocabularies.
    """
    found = {"decisions": DECISIONS, "data": DATA}
    if adapts:
        found["adapt"] = "WORDS = {}\n".format(adapts == "words") + ADAPT
    return found


def check(found, adapts=""):
    """Check what each rank says, and its weights.

    Arguments:
        found: the result of ``ranks.run_all()`` for these programs, and others.
        adapts: the warning of a layer that is adapted to a shard; empty: not checked.
    """
    size = len(found["data"][1])
    _check_decisions(*found["decisions"], size=size)
    for said in found["data"][1]:
        _check_data(said, size)
    for rank, said in enumerate(found["adapt"][1] if adapts else ()):
        assert said["bins"] == BINS.format(_others(size), rank, size)
        _check_adapt(said, adapts)
        assert said.get("drawn", OTHER.format(_others(size), size)) == OTHER.format(
            _others(size), size
        )


def _others(size):
    return "rank 1" if size == 2 else "ranks 1 and 2"


def _check_decisions(arrays, found, size):
    last, others = "rank {}".format(size - 1), size - 1
    means = [(0.7 + 0.5 * others) / size, 0.5, (0.4 + 0.9 * others) / size]
    values = ", ".join(["0.7 on rank 0"] + ["0.5 on rank %d" % rank for rank in range(1, size)])
    for rank, said in enumerate(found):
        assert said["one has it"].startswith("RankError: The ranks have drifted apart: after the ")
        assert said["one has it"].endswith(" are the same. " + NOT_ALL), said["one has it"]
        assert "on {} of {}".format(_others(size), size) in said["one has it"]
        assert said["one sets"].startswith("RankError: The ranks have drifted apart: after the ")
        assert "on {} of {}".format(last, size) in said["one sets"]
        assert said["one sets"].endswith(OWN), said["one sets"]
        rare = ", ".join(["0.25 on rank 0"] + ["none on rank %d" % r for r in range(1, size)])
        assert said["logs"] == [
            LOGS.format("rare", rare, 0.25),
            LOGS.format("score", values, means[0]),
        ]
        assert said["rare"] == [0.25, 0.25]
        np.testing.assert_allclose(said["history"], means[:2])
        assert said["last"] == []  # as it was said before
        np.testing.assert_allclose(said["last history"], means)
        if rank == 0:
            np.testing.assert_allclose(said["seen"], means[:2])
        assert said["evaluated"] == SET.format(found[0]["names"][0], _others(size), size)
        assert said["evaluated before"] == said["trained"] == said["evaluated then"] == []
        for name, value in arrays[0].items():
            np.testing.assert_array_equal(value, arrays[rank][name])


def _check_data(said, size):
    other = OTHER.format(_others(size), size)
    assert said["fit"] == said["evaluate"] == said["on batches"] == other
    assert said["labels"] == [other, []]
    assert said["fit again"] == said["rounding"] == []
    assert said["one rank alone"] == said["without shard"] == []


def _check_adapt(said, adapts):
    rows = "{} rows, as many as shard() has returned of 21".format(said["rows"])
    norm = "Normalization", "norm"
    normalized = said["normalized"]
    assert normalized["whole"] == normalized["rows of it"] == []
    assert normalized["part"] == normalized["view"] == [ADAPTED.format(*norm, PART)]
    assert normalized["copy"] == [ADAPTED.format(*norm, rows)]
    if adapts == "words":
        look = [ADAPTED.format("StringLookup", "look", PART)]
        by_rows = [ADAPTED.format("StringLookup", "look", rows)]
        text = [ADAPTED.format("TextVectorization", "text", PART)]
        assert said["vocabulary"] == [[], look, by_rows, text]
