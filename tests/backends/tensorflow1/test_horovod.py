"""Ranks on TensorFlow 1: Horovod."""

import os

import pages
import pytest

from compat.testing import keras_under_test, slow, span
from compat.testing.ranks.jobs import failing, name_of

from .. import rank_batch_norm, rank_decisions, rank_gradients, rank_state, ranks
from ..exchanges import KEPT_OF_METRICS, RankedParts

# The plain Adam of these, in one process, does not repeat: see test_contract.py.
KERAS = keras_under_test().__name__ == "keras"
# Before Keras 2.3, metrics that keep state are layers.
STATELESS = not hasattr(keras_under_test().metrics, "AUC")


@pytest.mark.row("ranks: Horovod")
class TestTensorFlow1Horovod(RankedParts):
    may_abort = True
    backend = "tensorflow1"
    exempt_hooks = {} if STATELESS else KEPT_OF_METRICS
    processes = True
    # To the losses of single outputs (Keras 2.3, tf.keras) each batch counts as much, of 61 rows
    # or of 13.
    compared = 4
    if KERAS:
        trials = tuple(trial for trial in RankedParts.trials if "adam" not in trial)

    # TensorFlow 2's engine is the same.
    @pytest.mark.parametrize("job", failing(slowly=["raise", "short", "sleep"]), ids=name_of)
    def test_fault_ends_the_job_and_names_the_rank(self, failed, job):
        self.check_failed(failed, job)


WAYS = """
import tensorflow as tf

from compat._backends.tensorflow1.optimizer_order import updates_in_order


def ordered(adam):
    "Adam with the order of its step counter that it has in ranks."
    get_updates = adam.get_updates

    def get_updates_in_order(loss, params):
        return updates_in_order(adam, get_updates, loss, params)

    if compat.size() == 1:
        adam.get_updates = get_updates_in_order
    return adam


def trained(name, optimizer):
    layers = [dense(4, activation="tanh"), dense(1)]
    model = keras.models.Sequential(layers, name=name)  # not built before its first batch
    if name == "clips":
        model.build((None, 6))  # tf.keras still postpones compile()
    assert compat.parallelize(model) is model
    model.compile(optimizer, "mse")
    for start in range(0, len(inputs), rows) if name != "clips" else ():
        model.train_on_batch(inputs[start : start + rows], targets[start : start + rows])
    history = model.fit(inputs, targets, batch_size=rows, epochs=1, shuffle=False, verbose=0)
    said[name] = list(map(float, history.history["loss"]))
    weights[name] = model.get_weights()


trained("clips", keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05))
trained("adam", ordered(keras.optimizers.Adam(0.01)))
trained("is_of_tensorflow", tf.compat.v1.train.MomentumOptimizer(0.05, 0.9))
"""


# Rank 0 has trained before: what its moving averages are computed from begins on all ranks.
STARTED = """
normal = keras.models.Sequential([keras.layers.BatchNormalization(input_shape=(6,)), dense(1)])
normal.compile(keras.optimizers.SGD(0.05), "mse")
if compat.is_chief():
    normal.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
compat.parallelize(normal)
normal.fit(inputs, targets, batch_size=rows, epochs=1, shuffle=False, verbose=0)
weights["started"] = [normal.get_weights()[2]]  # a moving variance is the ranks' mean
"""


# With STATELESS metrics.
STATEFUL = """
import warnings


class Hits(keras.layers.Layer):
    def __init__(self):
        super(Hits, self).__init__(name="hits")
        self.stateful = True
        self.hits = keras.backend.variable(0.0)

    def reset_states(self):
        keras.backend.set_value(self.hits, 0.0)

    def __call__(self, y_true, y_pred):
        found = keras.backend.sum(keras.backend.cast(y_pred > 0, "float32"))
        before = self.hits * 1
        self.add_update(keras.backend.update_add(self.hits, found), inputs=[y_true, y_pred])
        return before + found


counting = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))]))
counting.compile("sgd", "mse", metrics=[Hits()])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    counting.fit(inputs, targets, batch_size=rows, epochs=2, verbose=0)
said["stateful"] = [str(w.message) for w in caught if w.category is compat.CompatWarning]
"""


OPTIMIZERS = rank_gradients.OPTIMIZERS + rank_gradients.NATIVE
FUNCTIONS = rank_gradients.OWN_FUNCTIONS + rank_gradients.NATIVE_LOOP
# Its optimizers train in the contract, and its metrics and losses on TensorFlow 2.
long = (lambda test: test) if KERAS else slow
# Of keras, 2.2.4 or what is before it is enough.
IN_JOBS = STATELESS or not KERAS
of_each_keras = (lambda test: test) if IN_JOBS else slow


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return the results of one process and two ranks for these programs and all backends'."""
    programs = {"stateful": STATEFUL} if STATELESS else {"metrics": ranks.METRICS}
    programs["losses"] = "REDUCTIONS = False\n" + ranks.LOSSES
    programs.update(started=STARTED, ways=WAYS + ranks.GENERATOR)
    programs.update(state=rank_state.KERAS_2, optimizers=OPTIMIZERS, own=FUNCTIONS)
    if IN_JOBS:
        programs["batch_norm"] = rank_batch_norm.KERAS_2
    ranks_alone = ["stateful", "own_losses", "drift", *rank_decisions.programs()]
    programs.update(rank_decisions.programs(), own_losses=ranks.OWN_LOSSES, drift=ranks.DRIFT)
    return ranks.run_both(programs, tmp_path_factory.mktemp("jobs"), ranks_alone=ranks_alone)


@long
def test_metrics_and_losses_are_those_of_all_rows(jobs):
    if STATELESS:
        (warning,) = jobs[1]["stateful"][1][0]["stateful"]
        assert warning.startswith("Metric 'hits' is the mean of the ranks' values")
        assert "this Keras does not tell what the metric keeps" in warning
    else:
        ranks.check_metrics(jobs)
    ranks.check_losses(jobs)
    ranks.check_same(jobs, "started")


def test_losses_and_ranks_that_cannot_be_right_are_told(jobs):
    ranks.check_own_losses(jobs)
    ranks.check_drift(jobs)


@long
def test_any_optimizer_and_generators_train_to_the_same_numbers(jobs):
    said = ranks.check_same(jobs, "ways")
    assert said[0] == said[1]
    assert said[0]["evaluated"] == pytest.approx(said[0]["val_loss"][-1], abs=1e-6)


def test_what_optimizers_make_of_gradients_is_of_all_ranks(jobs, tmp_path):
    """On 2 and 3 ranks: they clip, normalise, accumulate, or look at the loss."""
    three = ranks.run_all({"optimizers": OPTIMIZERS}, tmp_path, 3)
    said = rank_gradients.check_optimizers([*jobs, three])
    assert said == [{"curved": rank_gradients.CURVED}] * 5


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=slow)])
def test_gradients_of_the_loss_are_of_all_ranks_wherever_they_are_taken(tmp_path, size):
    """In metrics and in functions of the script; where they are not, that is reported."""
    rank_gradients.check_taken(tmp_path, "tensorflow", size)


@span
@of_each_keras
def test_gradients_of_all_ranks_on_one_rank_alone_are_an_error(tmp_path):
    rank_gradients.check_taken_alone(tmp_path)


def test_functions_of_a_script_that_train_a_model_are_refused(jobs):
    around = "K.function()" if KERAS else "SGD.apply_gradients()"
    for said in ranks.check_same(jobs, "own"):
        assert said == {
            "loop": rank_gradients.refused_loop("looped", around),
            "native": rank_gradients.refused_loop(
                "minimized", "GradientDescentOptimizer.apply_gradients()"
            ),
        }


@span
@of_each_keras
def test_horovods_own_optimizers_are_refused_and_its_callbacks_change_nothing(tmp_path):
    program = rank_gradients.left_in(keras_under_test().__name__, native=True)
    rank_gradients.check_left_in(ranks.run_both({"left_in": program}, tmp_path))


EAGER = """
import tensorflow as tf

tf.compat.v1.enable_eager_execution()
try:
    compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))]))
except compat.UnsupportedError as error:
    said["refused"] = str(error)
"""


@span
def test_eager_execution_is_refused(tmp_path):
    if KERAS:
        return  # keras runs in sessions alone
    _, said = ranks.run(EAGER, tmp_path, 2)
    text = (
        "tensorflow1 cannot train as one of several ranks after tf.enable_eager_execution(). "
        "Remove that call, or use TensorFlow 2."
    )
    assert said == [{"refused": text}] * 2


FIRST = ["1. The script as it is", "2. One line for the GPU", "3. Eight GPUs, one process"]
FIRST.append("4. Eight GPUs, one process for each")
FEWER = [("-n 8", "-n 2"), ("machines 4", "machines 2"), (",node3:1,node4:1", "")]


@pytest.mark.parametrize(
    "sections, commands, changes",
    [(FIRST, 5, FEWER[:1]), pytest.param(None, 8, FEWER, marks=slow)],
    ids=["to ranks", "all"],
)
def test_page_of_one_gpu_to_many(tmp_path, sections, commands, changes):
    """With two ranks, and machines, where the page has more."""
    assert pages.run("docs/scaling.md", tmp_path, os.environ, sections, changes) == commands


@slow  # as Theano's
def test_evaluation_on_one_rank_is_named_by_its_line(tmp_path):
    ranks.check_evaluation_on_one_rank(tmp_path, "tensorflow")


def test_state_that_updates_set_is_that_of_all_rows(jobs):
    rank_state.check_of_keras_2(jobs)


def test_what_one_rank_decides_or_is_given_by_itself_is_reported(jobs):
    rank_decisions.check(jobs[1])


@of_each_keras
def test_batch_norm_uses_the_statistics_of_all_ranks(tmp_path, request):
    if IN_JOBS:
        found = request.getfixturevalue("jobs")
    else:
        found = ranks.run_both({"batch_norm": rank_batch_norm.KERAS_2}, tmp_path)
    rank_batch_norm.check(found, 1e-5)
