"""How often ranks exchange something: calls of what their engine calls to do so, counted."""

import collections
import functools
import importlib
import sys

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
