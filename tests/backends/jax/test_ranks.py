"""Ranks on JAX: jax.distributed."""

import re

import pytest

from compat._ranks.engines import jax_distributed
from compat.testing import slow, span

from .. import rank_decisions, rank_state, ranks
from ..exchanges import EXPORT, RankedParts
from . import batch_norm_steps


@pytest.mark.skipif(not jax_distributed.is_supported(), reason="JAX before 0.4.26")
@pytest.mark.row("ranks: jax.distributed")
class TestJAXRanks(RankedParts):
    backend = "jax"
    extension = ".keras"
    exempt_hooks = {"model.export": EXPORT}
    policies = ("mixed_float16",)


@span
def test_a_jax_that_binds_no_address_is_refused(tmp_path):
    said = ranks.what_a_failed_job_says(tmp_path, "jax", BINDS_NO_ADDRESS, size=2, timeout=60)
    assert (
        "compat.errors.UnsupportedError: jax cannot train as one of several ranks in this version. "
        "Install JAX 0.4.26 or later, or start the script without a launcher (compat run without "
        "-n); parallelize() then uses the devices of one process."
    ) in said.splitlines()


BINDS_NO_ADDRESS = """
import jax
import compat

jax.distributed.initialize = lambda coordinator_address, num_processes, process_id: None
compat.configure_gpu(gpus="cpu")
"""


@slow  # as torch's
@pytest.mark.parametrize(
    "program", [ranks.STOPPED, ranks.STOPPED_AT_START], ids=["trains", "starts"]
)
def test_a_rank_0_that_is_stopped_is_named(tmp_path, program):
    ranks.check_stopped_rank_0(tmp_path, "jax", program)


@slow  # as Theano's
def test_evaluation_on_one_rank_is_named_by_its_line(tmp_path):
    ranks.check_evaluation_on_one_rank(tmp_path, "jax")


@slow
def test_ranks_in_different_calls_are_told_which(tmp_path):
    ranks.check_different_calls(tmp_path, "jax")


@slow
def test_a_rank_that_never_comes_is_named(tmp_path):
    """JAX itself aborts the others, as if they were at fault."""
    said = ranks.what_a_failed_job_says(tmp_path, "jax", NEVER_COMES).splitlines()
    assert (
        "compat run: rank 2 of 3 did not come to the others, which waited for it; the others "
        "were ended."
    ) in said
    told, lines = re.subn(r" \(script.py, line \d+\)", "", said[-1])
    assert lines == 1
    assert told in (
        "compat.errors.RankLostError: Rank {} of 3 waited to start, but another rank failed, ended "
        "or did not come: {} seconds are over. Look at what another rank printed. (COMPAT_TIMEOUT, "
        "or compat run --timeout, sets how many seconds ranks wait.)".format(*numbers)
        for numbers in ((0, 9), (1, 8))  # rank 0 is the last to give up
    )


NEVER_COMES = """
import os, signal
import compat
if os.environ["COMPAT_RANK"] == "2":
    os.kill(os.getpid(), signal.SIGSTOP)
compat.configure_gpu(gpus="cpu")
"""


PRECISIONS = """
import jax
jax.config.update("jax_enable_x64", True)


class Products(keras.layers.Layer):
    def build(self, shape):
        self.factors = self.add_weight(name="factors", shape=(6,), initializer="uniform")

    def call(self, x):
        return keras.ops.sum(x * self.factors, -1, keepdims=True)


keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
model = keras.models.Sequential([keras.Input((6,)), Products()])
model.set_weights([np.arange(6.0) / 7])
compat.parallelize(model).compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
count = 2 * rows  # of the last batch, Keras divides by 5 in float32
model.fit(inputs[:count], targets[:count], batch_size=rows, shuffle=False, verbose=0)
weights["float64"] = model.get_weights()
keras.config.set_floatx("float32")
"""
PRECISIONS += ranks.NEAR_OVERFLOW


@slow  # as torch trains
def test_trains_in_every_precision(jobs):
    """With those of the contract."""
    ((one,), (alone,)), (both, said) = (job["precisions"] for job in jobs)
    assert one["float64-0"].dtype == "float64"
    ranks.check_arrays(one, *both, tolerance=1e-12)
    assert said == [alone, alone]
    assert alone["near"] == [2.0**15, 2]


# Ranks that train apart.
DRIFTS = """
class Skips(keras.optimizers.SGD):
    "Rank 1 skips an update, as where its loss is not finite."

    def stateless_apply(self, variables, gradients, trainable):
        factor = 1 - (compat.rank() == 1)
        return super().stateless_apply(variables, [g * factor for g in gradients], trainable)


model = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))], name="skips"))
model.compile(Skips(0.1), "mse")
try:
    model.fit(inputs, targets, batch_size=rows, shuffle=False, verbose=0)
except compat.RankError as error:
    said["drifts"] = str(error)


def refusal(call):
    try:
        call()
    except compat.UnsupportedError as error:
        return str(error)


class Around(keras.models.Sequential):
    "Calls another model that is a rank's, in a step of its own."

    def train_step(self, state, data):
        values = [variable.value for variable in part.trainable_variables], []
        part.stateless_call(*values, data[0], training=True)
        return super().train_step(state, data)


part = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))], name="part"))
model = compat.parallelize(Around([dense(1, input_shape=(6,))], name="around"))
model.compile("sgd", "mse")
model.fit(inputs, targets, rows, verbose=0)
model = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))], name="loop"))
values = [variable.value for variable in model.trainable_variables], []
said["loop"] = refusal(lambda: model.stateless_call(*values, inputs, training=True))
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return the results of one process and two ranks for these programs and all backends'."""
    programs = {"metrics": ranks.METRICS, "losses": "REDUCTIONS = True\n" + ranks.LOSSES}
    programs.update(own_losses=ranks.OWN_LOSSES, late_drift=ranks.LATE_DRIFT)
    programs = {name: ranks.of_keras_3(program) for name, program in programs.items()}
    programs.update(drifts=DRIFTS, precisions=PRECISIONS)
    ranks_alone = ["own_losses", "late_drift", "drifts"]
    return ranks.run_both(programs, tmp_path_factory.mktemp("jobs"), "jax", ranks_alone)


@slow
def test_metrics_and_losses_are_those_of_all_rows_and_what_cannot_be_is_told(jobs):
    ranks.check_metrics(jobs)
    ranks.check_losses(jobs)
    ranks.check_own_losses(jobs)
    ranks.check_late_drift(jobs)
    _, said = jobs[1]["drifts"]
    for rank, each in enumerate(said):
        assert each["loop"] == (
            "jax cannot train model 'loop' in a loop of the script's own in rank {} of 2 (compat "
            "run): gradients of such a loop are never the model's. Use fit() or train_on_batch(), "
            "or start the script without a launcher.".format(rank)
        )
        assert each["drifts"].startswith(
            "The ranks have drifted apart: after 1 step the values of 'skips/dense"
        )
        assert "/kernel' and 1 other on rank 1 of 2 are not those of rank 0." in each["drifts"]


TIMELINE = """
import glob, json, os, tempfile, jax

with tempfile.TemporaryDirectory() as folder:
    with compat.timeline(os.path.join(folder, "timeline.json")):
        jax.jit(lambda value: value @ value)(np.ones((8, 8))).block_until_ready()
    (file,) = glob.glob(os.path.join(folder, "*"))
    events = json.load(open(file))["traceEvents"]
said["executed"] = sum(event["ph"] == "X" for event in events)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return the results of one process and two ranks for programs that are not slow."""
    programs = rank_decisions.programs("numbers")
    both = dict(programs, steps_state=rank_state.STATE, timeline=TIMELINE)
    both["batch_norm"] = batch_norm_steps.PROGRAM  # the last one: it changes the type of floats
    return ranks.run_both(both, tmp_path_factory.mktemp("reports"), "jax", programs)


def test_the_timeline_of_each_rank_has_what_its_device_executed(reports):
    _, said = reports[1]["timeline"]
    assert all(each["executed"] for each in said), said


def test_state_that_steps_set_is_that_of_all_rows(reports):
    rank_state.check(*reports)


def test_batch_normalization_of_the_whole_batch_is_that_of_one_process(reports):
    batch_norm_steps.check(reports)


def test_what_one_rank_decides_or_is_given_by_itself_is_reported(reports):
    rank_decisions.check(reports[1], "numbers")
