"""Ranks on tf.keras 2 and Keras 3: TF_CONFIG's workers."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from compat import errors
from compat._ranks.engines import tensorflow as tensorflow_engine
from compat._ranks.place import Place
from compat._ranks.saving import written_by_rank_0
from compat.testing import contract_of, keras_under_test, slow, span

from .. import rank_batch_norm, rank_decisions, rank_state, rank_tables, rank_tapes, ranks
from .test_horovod import DECISIONS, KERAS3, OVERLAP, ROUNDING, WAYS, OnTensorFlow2, check_overlap

HALF = 0 if KERAS3 else 1  # see rank_tapes


@pytest.mark.row("ranks: MultiWorkerMirroredStrategy")
class TestTensorFlow2Workers(OnTensorFlow2):
    pass


ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
ROWS = """
import tempfile


class Count(keras.layers.Layer):
    def call(self, inputs):
        def count(rows):
            said["rows"].append(int(rows))
            return rows

        rows = tf.numpy_function(count, [tf.shape(inputs)[0]], tf.int32)
        with tf.control_dependencies([rows]):
            return tf.identity(inputs)


said["rows"] = []
counted = compat.parallelize(keras.Sequential([Count(input_shape=(6,)), dense(1)], name="counted"))
counted.compile("sgd", "mse")
counted.fit(inputs, targets, batch_size=rows, epochs=1, shuffle=False, verbose=0)
weights["counted"] = counted.get_weights()
with tempfile.TemporaryDirectory() as folder, compat.timeline(folder + "/timeline.json"):
    said["predicted"] = len(counted.predict(inputs[compat.rank() :], verbose=0))
said["busy"] = compat.report().devices[0].busy
"""

# In a graph the Nadam of tf.keras updates its product for each weight; the legacy one does not.
NADAM = """

def nadam(optimizer, **options):
    model = keras.Sequential([dense(3, input_shape=(6,)), dense(1)], name="nadam")
    compat.parallelize(model).compile(optimizer, "mse", **options)
    model.fit(inputs, targets, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    product = np.asarray(getattr(optimizer, "_u_product", momenta.prod())) / momenta.prod()
    return product, model.get_weights()


momenta = 0.9 * (1 - 0.5 * 0.96 ** np.arange(1, 7))  # of two epochs of three steps
product, _ = nadam(keras.optimizers.Nadam(0.01))
assert product < 0.1, product
weights["nadam"] = nadam(keras.optimizers.legacy.Nadam(0.01))[1]
product, weights["nadam, eagerly"] = nadam(keras.optimizers.Nadam(0.01), run_eagerly=True)
assert abs(product - 1) < 1e-4, product
"""

JOIN = """
joined = compat.parallelize(lambda: keras.Sequential([dense(1)]), strategy="mirrored")
"""

ALONE = """
import tensorflow as tf


def refusal(call):
    try:
        call()
    except compat.CompatError as error:
        return str(error)


def loop():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) - y)


class Alone(keras.Model):
    def train_step(self, data):
        loss = tf.reduce_mean(self(data[0]) - data[1])
        variables = [getattr(weight, "_value", weight) for weight in self.weights]
        for variable, gradient in zip(variables, tf.gradients(loss, variables)):
            variable.assign_sub(gradient)
        return {"loss": loss}


model = compat.parallelize(keras.Sequential([dense(1, input_shape=(6,))], name="looped"))
said["loop"] = refusal(loop)
model.predict(x, verbose=0)
model.compile("sgd", "mse", jit_compile=True)
said["xla"] = refusal(lambda: model.fit(inputs, targets, verbose=0))
source = keras.Input((6,))
alone = compat.parallelize(Alone(source, keras.layers.Dense(1)(source), name="alone"))
alone.compile("sgd", "mse")
weights["alone"] = alone.get_weights()
said["alone"] = refusal(lambda: alone.fit(inputs, targets, batch_size=rows, verbose=0))
weights["alone, after"] = alone.get_weights()
said["native"] = refusal(lambda: compat.parallelize(tf.function(lambda x: x)))
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, request):
    """One of them begins with a model that was built by a function."""
    programs, ranks_alone = {}, ["alone", "unproven", *DECISIONS]
    if contract_of(request.config) == "whole":
        programs.update(metrics=ranks.METRICS, losses="REDUCTIONS = True\n" + ranks.LOSSES)
        ranks_alone += ["own_losses", "drift", "overlap"]
        programs.update(own_losses=ranks.OWN_LOSSES, drift=ranks.DRIFT, overlap=OVERLAP)
    if KERAS3:
        programs = {name: ranks.of_keras_3(program) for name, program in programs.items()}
    if contract_of(request.config) == "whole":
        programs.update(DECISIONS, steps_state=rank_state.STATE)
        programs["batch_norm"] = rank_batch_norm.BATCH_NORM + rank_batch_norm.STEPS
    programs.update(gradients=rank_tapes.steps(HALF), unproven=rank_tapes.unproven_steps(HALF))
    programs["tables"] = rank_tables.tables(HALF)
    programs.update(ways=WAYS + ROWS if KERAS3 else WAYS + ROWS + NADAM, alone=ALONE)
    # The others join as TensorFlow starts, with their first models.
    programs["ways"] = JOIN + programs["ways"]
    return ranks.run_both(programs, tmp_path_factory.mktemp("jobs"), ranks_alone=ranks_alone)


@span
def test_own_train_steps_eager_steps_and_batches_train_to_the_same_numbers(jobs):
    """Each rank sees its rows alone."""
    said = ranks.check_same(jobs, "ways")
    assert [one.pop("rows") for one in said] == [[4, 4, 3, 11], [4, 4, 2, 9]]
    assert [one.pop("predicted") for one in said] == [11, 9]
    assert all(one.pop("busy") for one in said)
    assert said[0] == said[1]


@span
def test_gradients_are_those_of_all_ranks_before_they_are_used(jobs):
    rank_tapes.check_steps(*(job["gradients"] for job in jobs))


@span
def test_gradients_of_one_rank_that_are_not_used_linearly_are_an_error(jobs):
    rank_tapes.check_unproven(jobs[1]["unproven"][1], HALF)


def test_metrics_and_losses_are_those_of_all_rows(jobs):
    ranks.check_metrics(jobs)
    ranks.check_losses(jobs)


@span
def test_nothing_trains_alone(jobs):
    (arrays, _), (said, _) = jobs[1]["alone"]
    for place in range(2):
        key = "-{}".format(place)
        assert (arrays["alone" + key] == arrays["alone, after" + key]).all()
    loop = (
        "tensorflow2 cannot train 'looped' as one of several ranks in a "
        "loop of your own around tf.GradientTape. Put the step into the model's train_step(), "
        "and call fit() or train_on_batch()."
    )
    assert loop in said.pop("loop")  # Keras adds where it was
    assert said == {
        "xla": "tensorflow2 cannot train as one of several ranks under "
        "jit_compile=True: XLA compiles no messages. Compile the model with jit_compile=False.",
        "alone": "tensorflow2 cannot train 'alone' as one of several ranks: its "
        "train_step neither asks a tf.GradientTape for the gradients of the model's weights nor "
        "applies any by an optimizer that is an attribute of the model. "
        "Have train_step do that, with the optimizer given to compile() for example.",
        "native": "tensorflow2 cannot train a model without Keras as one of several "
        "ranks. Use a Keras model, or start the script without a launcher.",
    }


@span
def test_lookup_layers_train_to_the_same_numbers_and_other_tables_are_an_error(jobs):
    rank_tables.check(jobs, HALF, KERAS3)


def test_losses_and_ranks_that_cannot_be_right_are_told(jobs):
    ranks.check_own_losses(jobs)
    ranks.check_drift(jobs)


def test_gradients_leave_in_buckets_while_others_are_computed(jobs):
    """One bucket comes after the other, from the last layer on."""
    check_overlap(jobs[1]["overlap"][1], [0, 1, 2, 3, 4, 5])


def test_large_gradients_are_sent_alone_and_others_in_buckets():
    sizes = 2**18, 10, 2**18 - 1, 5  # the first takes a MiB
    gradients = [tf.zeros([size]) for size in sizes]
    assert tensorflow_engine._buckets(tf, gradients) == [[3, 2], [0], [1]]


@slow  # without a last word, as Theano's
def test_a_rank_that_leaves_is_named(tmp_path):
    ranks.check_a_rank_that_leaves(tmp_path, "tensorflow")


@slow  # as Theano's
def test_a_job_goes_on_from_its_checkpoint_after_a_rank_was_killed(tmp_path):
    ranks.check_restarts(TestTensorFlow2Workers(), tmp_path)


@slow  # as Theano's
def test_evaluation_on_one_rank_is_named_by_its_line(tmp_path):
    ranks.check_evaluation_on_one_rank(tmp_path, "tensorflow")


@slow
def test_ranks_in_different_calls_are_told_which(tmp_path):
    ranks.check_different_calls(tmp_path, "tensorflow")


if not KERAS3:  # for which test_examples.py does so, in an environment with the same packages

    @span
    def test_compat_test_of_an_example_says_that_all_is_well():
        ranks.check_compat_test(os.path.join(ROOT, "examples", "mlp.py"), "--epochs", "1")


def alone(program, begin=ranks.BEGIN, **environ):
    """Run a program as a worker whose only fellow never comes."""
    config = {
        "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
        "task": {"type": "worker", "index": 1},
    }
    environ = dict(os.environ, **environ)
    environ.setdefault("TF_CONFIG", json.dumps(config))
    return subprocess.run(
        [sys.executable, "-c", begin + program],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=120,
    )


REFUSED = """
import tensorflow as tf


def refusal(call):
    try:
        call()
    except compat.CompatError as error:
        print(type(error).__name__, error)


assert tf.config.list_physical_devices("GPU") == []
model = keras.Sequential([dense(1, input_shape=(6,))])
refusal(lambda: compat.parallelize(model))
refusal(lambda: compat.multi_gpu_model(model, 2))
refusal(lambda: compat.parallelize(lambda: model))
refusal(lambda: compat.parallelize(model, strategy="mirrored"))
tf.compat.v1.disable_eager_execution()
refusal(lambda: compat.parallelize(lambda: model))
"""


def test_a_model_that_was_built_before_configure_gpu_is_refused():
    begin = ranks.BEGIN.replace('compat.configure_gpu(gpus="cpu")\n', "")
    job = alone(REFUSED, begin)
    assert job.returncode == 0, job.stderr
    place = Place(1, 2, 1, 2, "TF_CONFIG")
    early = (
        f"RankError This process is {place}, but TensorFlow started before it could join the "
        "others: a model, a variable or a tensor was made. Call compat.configure_gpu() before "
        "that, at the top of the script."
    )
    no_function = "NotAModelError strategy='mirrored' takes a function that builds the model, "
    late = "UnsupportedError {}".format(
        errors.unsupported(
            "tensorflow2",
            "train as {} after tf.compat.v1.disable_v2_behavior() or "
            "disable_eager_execution()".format(place),
            "Remove that call, or start the script with horovodrun.",
        )
    )
    said = job.stdout.strip().split("\n")
    assert said[:3] == [early] * 3
    assert said[3].startswith(no_function)
    assert said[4:] == [late]


@slow
def test_a_worker_waits_for_the_others_so_long():
    began = time.monotonic()
    job = alone("compat.parallelize(lambda: keras.Sequential())", COMPAT_TIMEOUT="3")
    assert time.monotonic() - began < 60
    assert job.returncode == 1
    said = job.stderr.rstrip().split("\n")[-1]
    told = r"compat.errors.RankLostError: Rank 1 of 2 waited to start \(.*, line \d+\), but rank 0 "
    assert re.match(told, said)
    assert "did not come: no answer for 3 s." in said


OF_ITS_OWN = """
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(2)  # TensorFlow has not started
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    variable = tf.Variable(0.0)


@tf.function
def step():
    def add():
        mine = tf.constant(compat.rank() + 1.0)
        context = tf.distribute.get_replica_context()
        variable.assign_add(context.all_reduce(tf.distribute.ReduceOp.SUM, mine))

    strategy.run(add)


step()
said["sum"] = float(variable.numpy())
model = keras.Sequential([dense(1, input_shape=(6,))])
said["by both"] = told(lambda: compat.parallelize(model))
with strategy.scope():
    said["within"] = told(lambda: compat.parallelize(model))
"""


def test_a_strategy_of_the_scripts_own_joins_the_workers_itself(tmp_path):
    """``configure_gpu()`` alone neither takes their place nor starts TensorFlow."""
    _, each = ranks.run(OF_ITS_OWN, tmp_path, 2)
    for rank, said in enumerate(each):
        assert said["sum"] == 3.0
        place = Place(rank, 2, rank, 2, "TF_CONFIG")
        assert said["by both"] == (
            f"RankError: This process is {place}, and the script has made a strategy of "
            "TensorFlow's own, which has joined the others: a model trains by one or the other. "
            "Leave the strategy out, or do not give the model to compat.parallelize()."
        )
        assert said["within"].startswith("UnsupportedError: parallelize() and tf.distribute both ")


POOL = """
import multiprocessing
import tensorflow as tf
with multiprocessing.get_context("fork").Pool(1) as pool:
    said["size"] = pool.apply(eval, ["int(__import__('tensorflow').size([0, 0, 0]))"])
said["before"] = told(compat.barrier)
"""


@pytest.mark.parametrize(
    "first",
    [
        "tf.function(lambda: tf.constant(1.0))()",
        pytest.param(
            "with tf.Graph().as_default(): tf.constant(1.0)\ntf.constant(1.0)", marks=slow
        ),
    ],
)
def test_the_workers_join_with_tensorflows_first_operation(tmp_path, first):
    """Also where that is in a graph. Before that, ``barrier()`` would be an error.

    A process that prepares data is not one of them.
    """
    program = POOL + first + "\ncompat.barrier()\n"
    _, said = ranks.run(program, tmp_path, 2)
    assert [each["size"] for each in said] == [3, 3]
    assert all(each["before"].startswith("RankError: compat.barrier() ") for each in said)


JOINING = """
import threading
import tensorflow as tf
joining = tf.distribute.MultiWorkerMirroredStrategy


class Strategy(joining):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        thread = threading.Thread(target=tf.constant, args=[1.0], daemon=True)
        thread.start()
        thread.join(30)
        said["waits"] = thread.is_alive()


tf.distribute.MultiWorkerMirroredStrategy = Strategy
tf.constant(1.0)
compat.barrier()
"""


@span
def test_a_strategy_joins_by_threads_of_its_own(tmp_path):
    """As that of TensorFlow 2.5 does."""
    _, said = ranks.run(JOINING, tmp_path, 2)
    assert [each["waits"] for each in said] == [False, False]


def test_a_tf_config_that_is_no_json_is_an_error():
    job = alone("", TF_CONFIG="{")
    assert job.returncode == 1
    assert "compat.errors.RankError: TF_CONFIG={ is not understood: " in job.stderr


MASTER = """
model = compat.parallelize(keras.Sequential([dense(1, input_shape=(6,))]))
model.compile("sgd", "mse")
model.fit(inputs, targets, batch_size=rows, epochs=1, shuffle=False, verbose=0)
model.save_weights(sys.argv[1] + "-saved-by-{}.weights.h5".format(compat.rank()))
if hasattr(keras, "ops"):  # Keras 3
    model.save("ram://model.keras")
    model.export(sys.argv[1] + "-missing/folder/exported", verbose=False)
    import tensorflow as tf
    said["ram"] = tf.io.gfile.exists("ram://model.keras") == compat.is_chief()
said["place"] = [compat.rank(), compat.size(), compat.is_chief()]
weights["model"] = model.get_weights()
"""


@span
def test_callbacks_of_keras_that_write_are_rank_0s(tmp_path):
    """One of the user's own, also of such a class, is on all ranks."""
    callbacks = keras_under_test().callbacks

    class Own(callbacks.CSVLogger):
        pass

    given = [
        callbacks.CSVLogger(str(tmp_path / "log")),
        callbacks.TensorBoard(str(tmp_path / "board")),
        callbacks.BackupAndRestore(str(tmp_path / "backup")),
        callbacks.EarlyStopping(),
        Own(str(tmp_path / "own")),
    ]
    assert written_by_rank_0(keras_under_test(), Place(0, 2, 0, 2, "a launcher"), given) == given
    restore, *others = written_by_rank_0(keras_under_test(), Place(1, 2, 1, 2, "a launcher"), given)
    assert restore.callback is given[2] and others == given[3:]


@slow
def test_a_master_its_worker_and_an_evaluator(tmp_path):
    """A cluster as AI Platform and TFJob write it; the evaluator is no rank, and never saves."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        first, second, third = ["127.0.0.1:%d" % each.getsockname()[1] for each in sockets]
    cluster = {"master": [first], "worker": {"0": second}, "evaluator": [third]}
    jobs = []
    for kind in ("master", "worker", "evaluator"):
        config = {"cluster": cluster, "task": {"type": kind, "index": 0}}
        command = [sys.executable, "-c", ranks.BEGIN + MASTER + ranks.END, str(tmp_path / kind)]
        environ = dict(os.environ, TF_CONFIG=json.dumps(config))
        jobs.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE))
    said = [json.loads(job.communicate(timeout=300)[0].decode().split("SAID ")[1]) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0]
    assert [one["place"] for one in said] == [[0, 2, True], [1, 2, False], [-1, 1, False]]
    assert sorted(tmp_path.glob("*.h5")) == [tmp_path / "master-saved-by-0.weights.h5"]
    assert [one["ram"] for one in said if "ram" in one] in ([], [True] * 3)
    exported = [str(tmp_path / "master-missing" / "folder" / "exported")] * ("ram" in said[0])
    assert [str(path) for path in tmp_path.glob("*/*/exported")] == exported
    trained = [np.load(str(tmp_path / name)) for name in ("master-0.npz", "worker-1.npz")]
    for name in trained[0].files:
        np.testing.assert_array_equal(trained[0][name], trained[1][name])


def test_state_that_steps_set_is_that_of_all_rows(jobs):
    rank_state.check(*jobs, keras_3=KERAS3)


def test_what_one_rank_decides_or_is_given_by_itself_is_reported(jobs):
    rank_decisions.check(jobs[1], "words")


def test_batch_norm_uses_the_statistics_of_all_ranks(jobs):
    rank_batch_norm.check(jobs, ROUNDING)


@slow
def test_batch_norm_of_several_and_late_layers(tmp_path):
    programs = rank_batch_norm.BATCH_NORM, rank_batch_norm.NET, rank_batch_norm.LATE
    rank_batch_norm.check(ranks.run_both({"batch_norm": "".join(programs)}, tmp_path), ROUNDING)
