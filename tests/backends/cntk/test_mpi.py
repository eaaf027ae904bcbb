"""Ranks on CNTK: its distributed learner, over MPI."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from compat._backends.cntk import backend
from compat._ranks import Job
from compat.testing import slow

from .. import rank_decisions, rank_gradients, rank_state, ranks
from ..exchanges import KEPT_OF_METRICS, RankedParts


@pytest.mark.row("ranks: MPI")
class TestCNTKRanks(RankedParts):
    backend = "cntk"
    exempt_hooks = KEPT_OF_METRICS
    exchanges = (12, 4)  # two of MPI's each; CNTK's own learner exchanges gradients besides
    # Keras 2.3 on CNTK tells metrics, such as the losses of several outputs, before it counts the
    # last batch, in one process, too. The loss itself is right.
    compared = 4
    compared_of_batches = 1


METRICS = """
labels = (y > 0.5).astype("float32")
shard = compat.shard((x, labels), BATCH)
model = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))]))
model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae", "acc"])
model.fit(*shard, batch_size=rows, epochs=0)  # all ranks begin with rank 0's weights
weights["first"] = model.get_weights()
said["fit"] = model.fit(*shard, batch_size=rows, epochs=2, shuffle=False, verbose=0).history
said["fit"] = {name: list(map(float, values)) for name, values in said["fit"].items()}
said["evaluate"] = list(map(float, model.evaluate(*shard, batch_size=rows, verbose=0)))
weights["data"] = [x, labels]
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return the results of one process and two ranks for these programs and all backends'."""
    programs = {"losses": "REDUCTIONS = False\n" + ranks.LOSSES, "metrics": METRICS}
    programs.update(own_losses=ranks.OWN_LOSSES, of_keras_2=ranks.OF_KERAS_2, drift=ranks.DRIFT)
    programs.update(state=rank_state.KERAS_2, optimizers=rank_gradients.OPTIMIZERS)
    programs.update(rank_decisions.programs(), own=rank_gradients.OWN_FUNCTIONS)
    ranks_alone = ["own_losses", "of_keras_2", "drift", *rank_decisions.programs()]
    return ranks.run_both(programs, tmp_path_factory.mktemp("jobs"), "cntk", ranks_alone)


def test_losses_are_those_of_all_rows_and_what_cannot_be_is_told(jobs):
    ranks.check_losses(jobs)
    ranks.check_own_losses(jobs)
    ranks.check_of_keras_2(jobs)
    ranks.check_drift(jobs)


def test_what_optimizers_make_of_gradients_is_of_all_ranks(jobs):
    """They clip, normalise, or look at the loss."""
    rank_gradients.check_optimizers(jobs)


def test_functions_of_a_script_that_train_a_model_are_refused(jobs):
    rank_gradients.check_own_functions(jobs)


def test_metrics_are_those_of_all_rows(jobs):
    """As computed here, with the weights after each batch's step, as Keras on CNTK does.

    In one process Keras 2.3 tells them without the last batch.
    """
    for job, told in zip(jobs, (slice(0, 16), slice(0, 21))):
        (found, *_), said = job["metrics"]
        kernel, bias, x, labels = [
            found[name] for name in ("first-0", "first-1", "data-0", "data-1")
        ]

        for epoch in range(2):
            before, after = [], []  # each batch's step
            for rows in (slice(0, 8), slice(8, 16), slice(16, 21)):
                before.append(x[rows] @ kernel + bias - labels[rows])
                gradient = 2 * before[-1] / len(before[-1])
                kernel, bias = kernel - 0.05 * x[rows].T @ gradient, bias - 0.05 * gradient.sum(0)
                after.append(x[rows] @ kernel + bias - labels[rows])
            expected = _results(before, after, labels[told])
            for each in said:
                results = [each["fit"][name][epoch] for name in ("loss", "mae", "acc")]
                np.testing.assert_allclose(results, expected, rtol=1e-4)
        last = [x @ kernel + bias - labels]
        for each in said:
            expected = _results(last, last, labels[told])
            np.testing.assert_allclose(each["evaluate"], expected, rtol=1e-4)


def _results(before, after, labels):
    """Loss, mae and acc, of batches' errors before and after their steps."""
    before, after = np.concatenate(before), np.concatenate(after)[: len(labels)]
    right = np.round(after + labels) == labels
    return [np.mean(before**2), np.mean(abs(after)), np.mean(right)]


STUCK = """\
import time, numpy, compat
compat.configure_gpu(gpus="cpu")
import keras
model = compat.parallelize(keras.models.Sequential([keras.layers.Dense(2, input_shape=(3,))]))
model.compile("sgd", "mse")
batch = numpy.ones((4, 3)), numpy.zeros((4, 2))
model.train_on_batch(*batch)
function = (vars(model).get("model") or model).train_function  # a Sequential's, of Keras 2.1
if compat.rank() == 1:
    stuck = dict(trainer=None, __call__=lambda self, inputs: time.sleep(100))
    function.made = type("Stuck", (), stuck)()
else:
    function.maker.engine.timeout = 3
model.train_on_batch(*batch)
"""


@slow  # as Theano's
def test_a_rank_that_leaves_is_named(tmp_path):
    """``mpirun`` ends the others, which can say nothing of it."""
    ranks.check_a_rank_that_leaves(tmp_path, "cntk")


@slow  # as Theano's
def test_a_rank_that_is_stopped_before_it_joins_is_named(tmp_path):
    ranks.check_a_rank_that_is_stopped_before_it_joins(tmp_path, "cntk")


def test_waits_of_its_own_learner_are_bounded(tmp_path):
    """It waits in MPI itself, which has no timeout, for a rank that does not do the step.

    That rank is named, and not the third one, which waits as well.
    """
    script = tmp_path / "script.py"
    script.write_text(STUCK)
    completed = subprocess.run(
        backend.launcher(Job(3, sys.executable, os.environ)) + [sys.executable, str(script)],
        env=dict(os.environ, KERAS_BACKEND="cntk"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=200,
    )
    assert completed.returncode == 1
    told = (
        r"RankLostError: Rank [02] of 3 waited for the others' gradients \(script.py, line 14\), "
        r"but rank 1 failed, ended or did not come: 3 seconds are over\."
    )
    assert re.search(told, completed.stderr), completed.stderr


def test_state_that_updates_set_is_that_of_all_rows(jobs):
    rank_state.check_of_keras_2(jobs)


def test_what_one_rank_decides_or_is_given_by_itself_is_reported(jobs):
    rank_decisions.check(jobs[1])
