"""Partitions of graphs, as TensorFlow's runtime records them when they are first executed."""

import contextlib
import sys
import threading

from tensorflow.python.eager import context

lock = threading.Lock()
_recordings = []  # type: list  # lists that get each record, of all that record now


@contextlib.contextmanager
def recorded(with_times=False):
    """Within, TensorFlow's runtime records; yields a list, to which its records are added.

    Arguments:
        with_times: whether also when each operation ran.
    """
    records = []  # type: list
    begin(records, with_times)
    try:
        yield records
    finally:
        end(records)


def begin(records, with_times=False):
    """Have the runtime record, and its records added to a list."""
    with lock:
        # Without times where these are not needed: TensorFlow 2.0 fills in those of an operation
        # that a thread executes after another thread has taken the record that they belong to,
        # and ends with a segmentation fault.
        if with_times:
            context.enable_run_metadata()
        else:
            context.enable_graph_collection()
        collect()  # what others left
        _recordings.append(records)


def end(records):
    """Have the runtime no longer record for a list."""
    with lock:
        collect()
        _recordings[:] = [each for each in _recordings if each is not records]
        if not (_recordings or script_records()):
            context.disable_graph_collection()
            context.disable_run_metadata()


def collect():
    """Add what the runtime has recorded so far to the lists of all that record."""
    if not script_records():
        record = context.export_run_metadata()
        for records in _recordings:
            records.append(record)


def script_records():
    """Return whether the runtime records for ``tf.summary.trace_on()``, which would lose that."""
    module = sys.modules.get("tensorflow.python.ops.summary_ops_v2")
    module = module or sys.modules.get("tensorflow_core.python.ops.summary_ops_v2")
    return getattr(module, "_current_trace_context", None) is not None


def nodes_executed(step):
    """Do a step, and return the nodes of every graph partition that TensorFlow executed.

    A graph is recorded when it is first executed: ``step()`` is to trace its functions.
    """
    with recorded() as records:
        step()
    return nodes_of(records)


def functions_of(records):
    """Return the partitions of each function that was executed; one that is empty has none."""
    graphs = [each.partition_graphs for record in records for each in record.function_graphs]
    return [parts for parts in graphs if not (parts and all(map(_is_one_operation, parts)))]


def nodes_of(records):
    """Return the nodes of the partitions of functions, each as it was executed."""
    return [node for parts in functions_of(records) for part in parts for node in part.node]


def _is_one_operation(partition):
    """Whether this is an operation that ran eagerly, and that oneDNN's rewriting makes a graph."""
    return sum(node.op not in ("_Arg", "_Retval") for node in partition.node) == 1
