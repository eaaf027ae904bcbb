"""Ranks on keras-mxnet: Horovod."""

import numpy as np
import pytest

from compat.testing import slow

from .. import rank_decisions, rank_gradients, rank_state, ranks
from ..exchanges import RankedParts


@pytest.mark.row("ranks: Horovod")
class TestMXNetHorovod(RankedParts):
    may_abort = True
    backend = "mxnet"
    exempt_hooks = dict.fromkeys(
        (
            "keras.backend.set_value",
            "keras.backend.mxnet_backend.set_value",
            "keras.backend.rnn",
            "keras.backend.mxnet_backend.rnn",
            "keras.backend.mxnet_backend._get_mxnet_context",
            "keras.backend.mxnet_backend.set_model",
            "MXOptimizer.weights",
            "MXOptimizer.set_weights",
            "MXOptimizer.create_state_multi_precision",
        ),
        "it mends a fault of keras-mxnet's own: see keras_mxnet_fixes",
    )


ROWS = """
# Rank 1 has trained before, and its optimizer has state.
model = keras.models.Sequential([dense(1, input_shape=(6,))])
model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
if compat.rank():
    model.fit(x, y, batch_size=5, verbose=0)
compat.parallelize(model)
read, summed = [], []


class Record(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        module = model._module._curr_module
        (executor,) = module._exec_group.execs
        read.append(executor.arg_dict[model.inputs[0].name].asnumpy().tolist())
        summed.append([float(g.asnumpy().sum()) for g in executor.grad_arrays if g is not None])


model.fit(inputs, targets, rows, epochs=1, shuffle=False, verbose=0, callbacks=[Record()])
said.update(read=read, summed=summed)
weights["model"] = model.get_weights()
weights["optimizer"] = model.optimizer.get_weights()
"""

WAYS = """
def trained(name, layers, optimizer, inputs=inputs, targets=targets):
    model = keras.models.Sequential(layers, name=name)
    assert compat.parallelize(model) is model
    model.compile(optimizer, "mse")
    for start in range(0, len(inputs), rows):
        model.train_on_batch(inputs[start : start + rows], targets[start : start + rows])
    history = model.fit(inputs, targets, rows, epochs=1, shuffle=False, verbose=0)
    said[name] = history.history["loss"] + [model.evaluate(inputs, targets, rows, verbose=0)]
    said[name] = list(map(float, said[name]))
    weights[name] = model.get_weights()
    return model


class Centre(keras.layers.Layer):
    "Has a moving average of its own."

    def build(self, shape):
        self.moving = self.add_weight(
            name="moving", shape=shape[1:], initializer="zeros", trainable=False
        )
        super(Centre, self).build(shape)

    def call(self, x):
        mean = keras.backend.mean(x, axis=0)
        self.add_update([(self.moving, self.moving * 0.5 + mean * 0.5)], x)
        return x - self.moving


# Not built before its first batch.
trained("clips", [dense(4, activation="tanh"), dense(1)], keras.optimizers.SGD(0.1, clipnorm=0.05))
trained("centre", [dense(4, input_shape=(6,)), Centre(), dense(1)], "sgd")

words = np.arange(21 * 6).reshape(21, 6) * 7 % 20
embedding = keras.layers.Embedding(20, 5, input_length=6, sparse_grad=True)
model = trained(
    "sparse",
    [embedding, keras.layers.Flatten(), dense(1)],
    keras.optimizers.SGD(0.1, momentum=0.9),
    *compat.shard((words, y), BATCH)
)
(executor,) = model._module._curr_module._exec_group.execs
said["kind"] = executor.grad_dict[embedding.embeddings.name].stype

sequences = random.normal(size=(16, 3, 4)).astype("float32")
lstm = keras.layers.LSTM(
    5, stateful=True, unroll=True, batch_input_shape=(rows, 3, 4),
    kernel_initializer="ones", recurrent_initializer="ones",
)
trained("stateful", [lstm, dense(1)], "adam", *compat.shard((sequences, y[:16]), BATCH))
"""

# Optimizers that look at gradients, and keep their norms.
LOOKING = """
class ByNorm(keras.optimizers.Adam):
    "Clips each gradient by its norm."

    def update(self, index, weight, grad, state):
        norm = float(grad.norm().asscalar())
        norms.append(norm)
        grad = grad * min(1.0, 0.05 / norm)
        super(ByNorm, self).update(index, weight, grad, state)


class Adaptive(keras.optimizers.Adam):
    "Clips by the norm of the weights."

    def update(self, index, weight, grad, state):
        norm, limit = float(grad.norm().asscalar()), 0.05 * float(weight.norm().asscalar())
        norms.append(norm)
        grad = grad * min(1.0, limit / norm)
        super(Adaptive, self).update(index, weight, grad, state)


def taken():
    model = keras.models.Sequential([dense(1, input_shape=(6,))])
    compat.parallelize(model).compile("sgd", "mse")
    keras.backend.gradients(model.total_loss, model.trainable_weights)


for name, kind in (("by_norm", ByNorm), ("adaptive", Adaptive)):
    norms = []
    layers = [dense(4, activation="tanh", input_shape=(6,)), dense(1)]
    model = compat.parallelize(keras.models.Sequential(layers, name=name))
    model.compile(kind(0.01), "mse")
    model.fit(inputs, targets, rows, epochs=2, shuffle=False, verbose=0)
    weights[name] = model.get_weights() + [np.array(norms)]
try:
    taken()
except NotImplementedError as error:
    said["taken"] = str(error)
"""

# The last batch has five rows, three of them rank 1's.
BATCH_NORM = """
layers = keras.layers


def normalizing(name, is_asked):
    model = keras.models.Sequential([
        layers.Reshape((6, 1, 1), input_shape=(6,)), layers.Conv2D(4, (3, 1)),
        layers.BatchNormalization(axis=3), layers.Activation("relu"), layers.Flatten(),
        layers.Dense(5), layers.BatchNormalization(axis=1, momentum=0.7, center=False),
        layers.Dense(1),
    ], name=name)
    values = np.random.RandomState(0)
    model.set_weights([values.uniform(0.1, 0.9, size=w.shape) for w in model.get_weights()])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    compat.parallelize(model)
    model.train_on_batch(x[:8], y[:8])  # the same on each rank
    said[name] = told(lambda: compat.parallelize(model, sync_batch_norm=is_asked))
    model.predict(inputs[:2 + compat.rank()])  # of which no rank waits for another
    history = model.fit(inputs, targets, rows, epochs=2, shuffle=False, verbose=0)
    said[name] += history.history["loss"]
    weights[name] = model.get_weights()


keras.backend.set_floatx("float64")
x, y = x.astype("float64") * 2 + 1, y.astype("float64")
inputs, targets = compat.shard((x, y), BATCH)
for is_asked in (False, True):
    normalizing("normalizing%d" % is_asked, is_asked)


def nested(name, inner, outer):
    "A model in another one asks for it, or the other one does, or a layer by its class."
    norm = layers.BatchNormalization if inner is not None else SyncBatchNormalization
    within = keras.models.Sequential([dense(3, input_shape=(6,)), norm(axis=1)])
    if inner is not None:
        compat.parallelize(within, sync_batch_norm=inner)
    model = keras.models.Sequential([within, dense(1)], name=name)
    compat.parallelize(model, sync_batch_norm=outer).compile("sgd", "mse")
    model.fit(inputs, targets, rows, epochs=1, shuffle=False, verbose=0)
    weights[name] = model.get_weights()


class SyncBatchNormalization(layers.BatchNormalization):
    pass


nested("nested_inner", True, False)
nested("nested_outer", False, True)
nested("nested_layer", None, False)
keras.backend.set_floatx("float32")
"""

ITERATORS = """
import warnings
import mxnet as mx

Loader, pairs = mx.gluon.data.DataLoader, mx.gluon.data.ArrayDataset(x, y)


def caught(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            call()
        except (compat.InvalidArgumentError, compat.RankError) as error:
            return str(error)
    return [str(w.message) for w in found if w.category is compat.CompatWarning]


shuffled = mx.io.NDArrayIter(x, y, 8, shuffle=True)
errors = said["errors"] = [caught(lambda: next(compat.shard(shuffled)))]


def of_iterator(**options):
    np.random.seed(3)
    part = compat.shard(mx.io.NDArrayIter(x, y, 8, **options))
    assert isinstance(part, mx.io.DataIter) and part.num_data == 21
    for _ in range(2):
        part.reset()
        for batch in part:
            described = [part.provide_data[0].shape[0], part.provide_label[0].shape[0]]
            assert described == [rows, rows] == [len(batch.data[0]), len(batch.label[0])]
            said.setdefault("pads", []).append(batch.pad)
            yield batch.data[0].asnumpy(), batch.label[0].asnumpy()


def of_loader(**options):
    np.random.seed(3)
    part = compat.shard(Loader(pairs, **options))
    assert type(part) is Loader
    for _ in range(2):
        for batch in part:
            yield [array.asnumpy() for array in batch]


def trained(name, batches):
    model = keras.models.Sequential([dense(1, input_shape=(6,))])
    compat.parallelize(model).compile("sgd", "mse")
    for rows, targets in batches:
        model.train_on_batch(rows, targets)
    weights[name] = model.get_weights()


trained("padded", of_iterator())
trained("discarded", of_iterator(last_batch_handle="discard", shuffle=True))
trained("prefetched", (
    (batch.data[0].asnumpy(), batch.label[0].asnumpy())
    for batch in mx.io.PrefetchingIter(compat.shard(mx.io.NDArrayIter(x, y, 8)))
))
trained("loaded", of_loader(batch_size=8))
trained("shuffled", of_loader(batch_size=8, shuffle=True, num_workers=2))
if compat.size() > 1:
    for call in (
        lambda: next(compat.shard(mx.io.NDArrayIter(x, y, 8, shuffle=True))),
        lambda: list(compat.shard(Loader(pairs, 8, shuffle=True))),
        lambda: list(compat.shard(Loader(pairs, 10))),
        lambda: compat.shard(mx.io.NDArrayIter(x, y, 8), 4),
        lambda: compat.shard(mx.io.NDArrayIter(x, y, 1)),
    ):
        np.random.seed(compat.rank())
        errors.append(caught(call))
"""

NATIVE = """
import mxnet as mx

said["native"] = [
    told(lambda: compat.parallelize(model))
    for model in (mx.gluon.nn.Dense(1), mx.mod.Module(mx.sym.Variable("data"), label_names=None))
]
"""

ENGINE = """
import mxnet as mx

from compat import _ranks
from compat._backends.mxnet import ranks

engine = ranks.MXNetHorovod.join(_ranks.own_place())
rank = compat.rank()
arrays = [
    mx.nd.array([[1, 2], [3, 4]], mx.cpu(index), dtype) * (rank + 1)
    for index in (0, 1) for dtype in ("float32", "float64", "float16")
] + [
    mx.nd.sparse.row_sparse_array(([[1.0], [2.0]], [rank, 2]), (4, 1), mx.cpu(index))
    for index in (0, 1)
]
engine.mean(arrays, (rank + 1) / 4.0, "test")
said["context"] = [str(array.context) for array in arrays]
said["kinds"] = [array.stype for array in arrays]
weights["means"] = [array.asnumpy() for array in arrays]
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return the arrays and reports of one process and two ranks for all programs above."""
    programs = {"iterators": ITERATORS, "own": ROWS + WAYS + ranks.GENERATOR}
    programs["losses"] = "REDUCTIONS = False\n" + ranks.LOSSES
    programs.update(own_losses=ranks.OWN_LOSSES, drift=ranks.DRIFT, others=NATIVE + ENGINE)
    programs.update(rank_decisions.programs(), state=rank_state.KERAS_2, optimizers=LOOKING)
    programs.update(batch_norm=BATCH_NORM)
    ranks_alone = ["own_losses", "drift", "others", *rank_decisions.programs()]
    return ranks.run_both(programs, tmp_path_factory.mktemp("jobs"), "mxnet", ranks_alone)


@pytest.mark.row("ranks: Horovod")
def test_every_program_trains_to_the_same_numbers(jobs):
    """Any layer and optimizer, rows from generators; rank 1's optimizer had other state."""
    said = ranks.check_same(jobs, "own")
    for name in ("clips", "centre", "sparse", "stateful", "loss", "val_loss", "evaluated"):
        assert said[0][name] == said[1][name]
    assert said[0]["evaluated"] == pytest.approx(said[0]["val_loss"][-1], abs=1e-6)
    assert said[0]["kind"] == "row_sparse"


def test_losses_are_those_of_all_rows_and_what_cannot_be_is_told(jobs):
    ranks.check_losses(jobs)
    ranks.check_own_losses(jobs)
    ranks.check_drift(jobs)


def test_what_optimizers_make_of_gradients_is_of_all_ranks(jobs):
    """They clip, and keep norms. keras-mxnet has no other gradients."""
    check_optimizers(jobs)


@slow
def test_what_optimizers_make_of_gradients_is_of_three_ranks(jobs, tmp_path):
    check_optimizers([jobs[0], ranks.run_all({"optimizers": LOOKING}, tmp_path, 3, "mxnet")])


def check_optimizers(jobs):
    for job in jobs:  # norms of each step
        assert all(len(arrays["by_norm-4"]) == 4 * 6 for arrays in job["optimizers"][0])
    refused = "MXNet Backend: Gradients operator is not supported yet."
    said = rank_gradients.check_optimizers(jobs)
    assert said == [{"taken": refused}] * len(jobs[1]["optimizers"][0])


@pytest.mark.row("ranks: Horovod")
def test_batch_norm_uses_the_statistics_of_all_ranks(jobs):
    ((one,), (alone,)), ((chief, other), said) = (job["batch_norm"] for job in jobs)
    assert all(np.array_equal(chief[key], other[key]) for key in one)
    keys = [key for key in one if key.startswith(("normalizing1", "nested"))]
    for key in keys:
        np.testing.assert_allclose(chief[key], one[key], rtol=1e-9, atol=1e-9)
    assert any(np.abs(chief[k] - one[k]).max() > 1e-3 for k in one if k not in keys)
    for facts in said:
        np.testing.assert_allclose(facts["normalizing1"], alone["normalizing1"], rtol=1e-9)


@pytest.mark.row("ranks: Horovod")
def test_ranks_read_their_rows_and_sum_gradients(jobs):
    """As MXNet's executors have them: rows of one's own, and the mean gradient of all rows."""
    (_, (alone,)), (_, said) = (job["own"] for job in jobs)
    assert [len(read) for read in said[1]["read"]] == [4, 4, 2]
    for batch, read in enumerate(alone["read"]):
        np.testing.assert_array_equal(said[0]["read"][batch] + said[1]["read"][batch], read)
    assert said[0]["summed"] == said[1]["summed"]
    np.testing.assert_allclose(said[0]["summed"], alone["summed"], rtol=1e-4, atol=1e-6)


def test_means_of_arrays_wherever_they_are(jobs):
    """Times the shares of 1/4 and 1/2, in the host's memory and (as of a GPU) elsewhere."""
    both, said = jobs[1]["others"]
    assert said[0]["context"] == 3 * ["cpu(0)"] + 3 * ["cpu(1)"] + ["cpu(0)", "cpu(1)"]
    assert said[0]["kinds"] == 6 * ["default"] + 2 * ["row_sparse"]
    for arrays in both:
        for place in range(6):
            mean = arrays["means-%d" % place]
            np.testing.assert_array_equal(mean, [[1.25, 2.5], [3.75, 5]])
            assert mean.dtype == ["float32", "float64", "float16"][place % 3]
        for place in (6, 7):
            np.testing.assert_array_equal(arrays["means-%d" % place].ravel(), [0.25, 0.5, 1.5, 0])


def test_models_of_mxnets_own_are_refused(jobs):
    for each in jobs[1]["others"][1]:
        assert each["native"] == [
            "UnsupportedError: mxnet cannot train a {} of MXNet's own as one of several ranks. Use "
            "a model of Keras, or start the script without a launcher.".format(kind)
            for kind in ("Dense", "Module")
        ]


@slow  # without a last word, as Theano's
def test_a_rank_that_leaves_is_named(tmp_path):
    ranks.check_a_rank_that_leaves(tmp_path, "mxnet")


@pytest.mark.row("shard() of iterators of MXNet and DataLoaders of Gluon")
def test_iterators_give_each_rank_its_part_of_one_process_s_batches(jobs):
    said = ranks.check_same(jobs, "iterators")
    assert [each["pads"][:3] for each in said] == [[0, 0, 0], [0, 0, 3]]
    differs = (
        "{} gives other batches on rank 1 of 2 than on rank 0. Each rank takes its rows of the "
        "same batches, in the same order: seed what is shuffled or made at random, with one seed "
        "for all ranks."
    )
    for each in said:
        assert each["errors"] == [
            [
                "The ranks cannot agree on the order of a shuffled NDArrayIter before they have "
                "joined: each may draw another one, so that they train on some rows several times "
                "and on others never. Call compat.parallelize() first, and iterate in the main "
                "thread."
            ],
            differs.format("NDArrayIter"),
            differs.format("DataLoader"),
            ["A batch of 1 rows is left out: they are too few for one on each of 2 ranks."],
            "shard(batch_size=4) was given batches of 8 rows. Leave batch_size out: what comes in "
            "batches has its own.",
            "A batch of 1 rows is too small for 2 ranks. Use 2 rows or more.",
        ]


def test_state_that_updates_set_is_that_of_all_rows(jobs):
    rank_state.check_of_keras_2(jobs)


def test_what_one_rank_decides_or_is_given_by_itself_is_reported(jobs):
    rank_decisions.check(jobs[1])
