"""How often the ranks of compat's own engines exchange something, besides the contract of ranks."""

import collections
import functools
import importlib
import os
import sys

import compat
from compat._runtime.process import process
from compat.testing import CASES, initialise, optimizer
from compat.testing.models import fit_in_order
from compat.testing.ranks import RanksContract
from compat.testing.ranks.programs import BATCH

SCRIPT = """\
import sys
from compat.testing.ranks import programs
sys.path.append({!r})
from backends import exchanges, rank_hooks
programs.main(*sys.argv[1:], exchange=exchanges.exchange, left_out=rank_hooks.left_out)
"""


#: Why ``export`` is none of the hooks that ranks depend on.
EXPORT = "it only writes files, when a script calls it, on rank 0 alone"
UNREACHED = (
    "What parallelize() put in place of {} was not called. Another library has replaced it, or "
    "this version of the framework takes another way: call parallelize() after such libraries have "
    "changed the model, and report it with the output of `python -m compat env` if there is none."
)
# What metrics compute again keeps this attribute as it is meanwhile: no step calls it.
KEPT_OF_METRICS = dict.fromkeys(
    ["Mean._call_result", "MeanMetricWrapper._call_result"],
    "nothing calls it: the attribute is kept while metrics are computed once more",
)


class RankedParts(RanksContract):
    """Subclass this in place of ``RanksContract``."""

    #: How often ranks exchange something at most, by the calls of their engine: in a fit() of four
    #: steps that is not the first, and in train_on_batch().
    exchanges = (10, 3)
    #: Hooks that ranks do not depend on, by name, each with the reason.
    exempt_hooks = {}  # type: dict

    def script(self):
        return SCRIPT.format(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

    def calls(self, size):
        calls = super().calls(size)
        if size != 2:
            return calls
        # The last one changes the engine.
        return calls + [("left_out", [self.exempt_hooks]), ("exchange", [])]

    def test_a_hook_that_is_not_reached_is_never_silent(self, results):
        """Each of them is left out once, on all ranks, as if the framework did not call it."""
        for _, facts in results(2, "left_out"):
            print("\n".join(f"{name}: {text}" for name, text in facts["said"].items()))
            silent = [name for name, text in facts["said"].items() if text is None]
            assert facts["said"] and not silent, silent

    def test_ranks_that_do_not_train_together_are_reported_and_an_error_under_strict(self, results):
        for rank, (_, facts) in enumerate(results(2, "left_out")):
            said, (all_worked, verdict) = facts["warned"], facts["report"]
            assert said.startswith(
                f"In the first training step of model 'net' (fit()) rank {rank} "
            )
            end = " did not do all that ranks depend on. " + UNREACHED.format("model.fit()")
            assert said.endswith(end), said
            assert facts["said"]["model.fit"] == "DevicesNotUsedError: " + said
            end = " rows. Model 'net' did not train together with the others: see below."
            assert not all_worked and verdict.endswith(end), verdict

    def test_ranks_exchange_once_before_and_once_after_the_steps(self, results):
        """And the gradients of eight small layers at once."""
        for _, facts in results(2, "exchange"):
            fit, batch = self.exchanges
            assert facts["third"] <= fit and facts["batch"] <= batch, facts


def exchange(keras, folder):
    """Train a model of many small layers, and count how often the ranks exchange something."""
    found = counted(next(iter(process.engines.values())))

    def build():
        layers = [keras.layers.Dense(4, input_shape=(8,))]
        layers += [keras.layers.Dense(4) for _ in range(7)]
        return initialise(keras.models.Sequential(layers))

    model = compat.parallelize(build)
    model.compile(optimizer(keras, "sgd"), "mse", metrics=["mae"])
    inputs, targets = compat.shard(CASES["dense"].data(4 * BATCH), BATCH)
    rows = compat.local_batch_size(BATCH)
    facts = {}
    for name in "first", "second", "third":
        found.clear()
        fit_in_order(model, inputs, targets, rows, 1)
        facts[name] = sum(found.values())
    found.clear()
    model.train_on_batch(inputs[:rows], targets[:rows])
    return {}, dict(facts, batch=sum(found.values()))


#: By the engine's class, where the calls are: "module:attribute", or an attribute of the engine.
_CALLS = {
    "TorchDistributed": [
        "torch.distributed:all_reduce",
        "torch.distributed:all_gather",
        "torch.distributed.distributed_c10d:broadcast",
    ],
    "JaxDistributed": ["total", "all_rows"],
    "TensorFlowCollectives": [
        "tensorflow:raw_ops.CollectiveReduceV2",
        "tensorflow:raw_ops.CollectiveGatherV2",
    ],
    "TensorFlowHorovod": [
        "session.run",
        "horovod.allreduce",
        "horovod.allgather",
        "horovod.grouped_allreduce",
    ],
    "MXNetHorovod": [
        "horovod.allreduce_",
        "horovod.allgather",
        "horovod.broadcast_",
        "horovod.grouped_allreduce_",
    ],
    "MPI": ["comm.Iallreduce", "comm.Iallgather", "comm.Ibcast"],
}


class _Counting:
    """A communicator of mpi4py, whose own methods cannot be replaced."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)


def counted(engine):
    """Count what this process exchanges from now on. Graphs have to be made after this.

    Returns:
        A ``collections.Counter``, by the names of the calls.
    """
    found = collections.Counter()  # type: collections.Counter
    if hasattr(engine, "comm"):
        engine.comm = _Counting(engine.comm)
    for path in _CALLS[type(engine).__name__]:
        module, _, attributes = path.rpartition(":")
        owner = importlib.import_module(module) if module else engine
        *parts, name = attributes.split(".")
        owner = functools.reduce(getattr, parts, owner)
        setattr(owner, name, _counting(getattr(owner, name), name, found))
    return found


def _counting(call, name, found):
    def count(*args):
        found[name] += 1
        return 0.0

    @functools.wraps(call)
    def calls(*args, **options):
        tf = sys.modules.get("tensorflow")
        if tf is None or tf.executing_eagerly() or name == "run":
            count()
            return call(*args, **options)
        # As often as the graph runs.
        with tf.control_dependencies([tf.numpy_function(count, [], tf.float64)]):
            return call(*args, **options)

    return calls
