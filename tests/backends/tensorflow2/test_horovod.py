"""Ranks on tf.keras 2 and Keras 3: Horovod."""

import pytest

from compat.testing import contract_of, keras_under_test, slow, span

from .. import (
    rank_batch_norm,
    rank_decisions,
    rank_gradients,
    rank_state,
    rank_tables,
    rank_tapes,
    ranks,
)
from ..exchanges import EXPORT, RankedParts

KERAS3 = hasattr(keras_under_test(), "StatelessScope")
HALF = 1 if KERAS3 else 0  # see rank_tapes


class OnTensorFlow2(RankedParts):
    """What is the same on both engines."""

    backend = "tensorflow2"
    policies = ("mixed_float16",)
    extension = ".keras" if KERAS3 else ".h5"
    # Keras 3 counts each batch once in the losses of single outputs, on each rank.
    compared = 4 if KERAS3 else 9
    exempt_hooks = {"model.export": EXPORT}


@pytest.mark.row("ranks: Horovod")
class TestTensorFlow2Horovod(OnTensorFlow2):
    may_abort = True


WAYS = """
import tensorflow as tf

from compat._ranks.engines import tensorflow as tensorflow_engine

tensorflow_engine.LARGE = 64  # bytes: some gradients are sent alone
KERAS3 = hasattr(keras, "ops")


class Own(keras.Model):
    "Not built before its first batch; calls its parts, not itself, and has two optimizers."

    def __init__(self):
        super().__init__(name="own")
        self.encoder = dense(5, activation="tanh")
        self.decoder = dense(1)
        optimizers = keras.optimizers if KERAS3 else keras.optimizers.legacy
        self.encoding = optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05)
        self.decoding = keras.optimizers.Adam(0.01, clipvalue=0.02)

    def call(self, inputs):
        return self.decoder(self.encoder(inputs))

    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape(persistent=True) as tape:
            difference = self.decoder(self.encoder(inputs)) - targets
            loss = tf.reduce_mean(tf.square(difference))
        variables = self.encoder.trainable_variables
        self.encoding.apply_gradients(zip(tape.gradient(loss, variables), variables))
        variables = self.decoder.trainable_variables
        if KERAS3:
            self.decoding.apply(tape.gradient(loss, variables), variables)
        else:
            self.decoding.minimize(loss, variables, tape=tape)
        return {"loss": loss}


def trained(model, data, **options):
    assert compat.parallelize(model) is model
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", **options)
    history = model.fit(data, epochs=2, verbose=0)
    said[model.name] = list(map(float, history.history["loss"]))
    weights[model.name] = model.get_weights()
    return model


data = compat.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH), BATCH)
trained(Own(), data, steps_per_execution=2)
eager = keras.Sequential([dense(4, activation="tanh"), dense(1)], name="eager")
trained(eager, data, run_eagerly=True)
part = compat.parallelize(keras.Sequential([dense(3, input_shape=(6,))], name="part"))
trained(keras.Sequential([part, dense(1)], name="around"), data)



class Places(keras.layers.Layer):
    "All ranks look up the same rows, of which Keras 3 squares the gradients one by one."

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(6, 1), initializer="ones")
        with tf.init_scope():
            self.places = tf.range(6)

    def call(self, inputs):
        return inputs * tf.gather(self.table, self.places)[:, 0]


places = compat.parallelize(keras.Sequential([Places(), dense(1)], name="places"))
places.compile("adam", "mse")
places.fit(data, epochs=2, verbose=0)
weights["places"] = places.get_weights()

layers = [keras.Input((x.shape[1],)), keras.layers.Embedding(3, 2, "ones"), keras.layers.Flatten()]
words = keras.Sequential(layers + [dense(1)])
compat.parallelize(words).compile("sgd", "mse", run_eagerly=True)
found = compat.shard(tf.data.Dataset.from_tensor_slices((abs(x) % 3, y)).batch(BATCH), BATCH)
words.fit(found, verbose=0)
weights["words"] = words.get_weights()

batches = keras.Sequential([dense(1)], name="batches")
compat.parallelize(batches).compile("sgd", "mse")
for start in range(0, len(inputs), rows):
    batches.train_on_batch(inputs[start : start + rows], targets[start : start + rows])
weights["batches"] = batches.get_weights()

# As ranks are to draw other dropout masks: it changes what shuffle() makes of its own seed.
tf.random.set_seed(compat.rank())
mixed = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(21, seed=1).batch(BATCH)
try:
    batches.fit(compat.shard(mixed).prefetch(1), verbose=0)
    assert compat.size() == 1
except compat.RankError as error:
    assert str(error).startswith("Dataset gives other batches on rank 1 of 2 than on rank 0. ")
"""

# A bucket for each gradient.
OVERLAP = """
import tensorflow as tf
from compat._ranks.engines import buckets
from compat._runtime import process

sizes = list(buckets.SIZES)
buckets.SIZES[:] = [4, 4]
parts = [dense(5, input_shape=(6,)), dense(4), dense(1)]
model = compat.parallelize(keras.Sequential(parts))
model.compile("sgd", "mse")
batch = inputs[:rows], targets[:rows]
said["between"] = []


class Listening(keras.callbacks.Callback):
    def on_train_batch_begin(self, step, logs=None):
        (engine,) = process.process.engines.values()
        exchange = type(engine).sum
        if step == 5:  # the next comparison of weights is after step 16
            engine.sum = lambda values: said["between"].append(values) or exchange(engine, values)
        if step == 8:
            del engine.sum


several = [np.concatenate([data] * 9) for data in batch]
model.fit(*several, batch_size=rows, shuffle=False, verbose=0, callbacks=[Listening()])
graph = tf.function(lambda *data: model.train_step(data)).get_concrete_function(*batch).graph


def upstream(op, found):
    for each in [tensor.op for tensor in op.inputs] + list(op.control_inputs):
        if each not in found:
            found.add(each)
            upstream(each, found)
    return found


def is_exchange(op):
    return op.type in ("HorovodAllreduce", "HorovodGroupedAllreduce", "CollectiveReduceV2")


products = [op for op in graph.get_operations() if op.type == "MatMul"]
backward = {op for op in products if "gradient" in op.name}
exchanges = {op: upstream(op, set()) for op in graph.get_operations() if is_exchange(op)}
computing = [op for op in exchanges if op.inputs[0].dtype == tf.float32]
said["exchanged first"] = [op.name for op in products if any(map(is_exchange, upstream(op, set())))]
said["products"] = [len(products), len(backward)]
said["upstream"] = sorted(len(exchanges[op] & backward) for op in computing)
said["numbers"] = [
    [op.inputs[0].dtype.name, op.inputs[0].shape[0], len(exchanges[op] & set(products))]
    for op in exchanges if op not in computing
]
buckets.SIZES[:] = sizes
"""


def check_overlap(said, upstream):
    """No rank waits for another before its backward pass, nor between steps.

    Arguments:
        said: what the ranks said.
        upstream: how many of the backward pass' five products each exchange comes after.
    """
    for one in said:
        assert one == {
            "between": [],
            "exchanged first": [],
            "products": [8, 5],
            "upstream": upstream,
            "numbers": [["float64", 3, 0]],
        }


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, request):
    """Return the results of one process and two ranks for programs of the tested contract."""
    programs = {"tables": rank_tables.tables(HALF), "steps": rank_tapes.steps(HALF)}
    batch_norm = rank_batch_norm.STEPS if KERAS3 else rank_batch_norm.NET
    ranks_alone = ["unproven", "overlap", *DECISIONS]
    if not KERAS3:
        # For Keras 3 Horovod has no optimizer, and its own tape does not know the variables.
        programs["tape"] = rank_tapes.HOROVODS_TAPE
        batch_norm += rank_batch_norm.HOROVODS
        programs["left_in"] = rank_gradients.left_in(keras_under_test().__name__, native=False)
    programs["unproven"] = rank_tapes.unproven_steps(HALF)
    if contract_of(request.config) == "whole":
        programs.update(DECISIONS, overlap=OVERLAP, steps_state=rank_state.STATE)
        programs["batch_norm"] = rank_batch_norm.BATCH_NORM + batch_norm
    return ranks.run_both(programs, tmp_path_factory.mktemp("jobs"), ranks_alone=ranks_alone)


DECISIONS = rank_decisions.programs("words")


@slow  # as with workers, where metrics and losses are compared, too
def test_own_train_steps_eager_steps_and_batches_train_to_the_same_numbers(tmp_path):
    said = ranks.check_same(ranks.run_both({"ways": WAYS}, tmp_path), "ways")
    assert said[0] == said[1]


@span
def test_lookup_layers_train_to_the_same_numbers_and_other_tables_are_an_error(jobs):
    rank_tables.check(jobs, HALF, KERAS3)


if not KERAS3:

    @span
    def test_horovods_own_optimizers_are_refused_and_its_callbacks_change_nothing(jobs):
        rank_gradients.check_left_in(jobs)


@span
def test_gradients_are_those_of_all_ranks_before_they_are_used(jobs):
    for name in {"steps", "tape"}.intersection(jobs[0]):
        rank_tapes.check_steps(*(job[name] for job in jobs))


@slow
def test_gradients_are_those_of_three_ranks(jobs, tmp_path):
    rank_tapes.check_steps(jobs[0]["steps"], ranks.run(rank_tapes.steps(HALF), tmp_path, 3))


@span
def test_gradients_of_one_rank_that_are_not_used_linearly_are_an_error(jobs):
    rank_tapes.check_unproven(jobs[1]["unproven"][1], HALF)


def test_gradients_leave_in_buckets_while_others_are_computed(jobs):
    check_overlap(jobs[1]["overlap"][1], [0, 1, 1, 2, 2, 3])


def test_mpirun_with_a_horovod_that_knows_no_mpi_is_an_error():
    program = "compat.parallelize(keras.Sequential([keras.layers.Dense(1)]))"
    assert ranks.refused_alone(program) == ranks.disagreement(2)


def test_state_that_steps_set_is_that_of_all_rows(jobs):
    rank_state.check(*jobs, keras_3=KERAS3)


def test_what_one_rank_decides_or_is_given_by_itself_is_reported(jobs):
    rank_decisions.check(jobs[1], "words")


ROUNDING = 1e-6 if KERAS3 else 1e-8


def own_statistics(layer):
    return f"each rank uses those of its own samples in layer '{layer}'."


def test_batch_norm_uses_the_statistics_of_all_ranks(jobs):
    texts = rank_batch_norm.check(jobs, ROUNDING)
    assert KERAS3 or [own_statistics("renorm") in text for text in texts] == [True]


@slow
def test_batch_norm_of_late_layers_and_in_functions_of_a_model(tmp_path):
    """Also where a loss has gradients itself."""
    program = rank_batch_norm.BATCH_NORM + rank_batch_norm.LATE
    texts = rank_batch_norm.check(ranks.run_both({"batch_norm": program}, tmp_path), ROUNDING)
    assert [own_statistics("within") in text for text in texts] == [True, True]
