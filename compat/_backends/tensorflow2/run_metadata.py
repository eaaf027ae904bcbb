"""Partitions of graphs, as TensorFlow's runtime records them when they are first executed."""

import contextlib
import sys
import threading
from typing import Any, Callable, Iterator, List

from tensorflow.python.eager import context

lock = threading.Lock()
_recordings: "List[List[Any]]" = []  # the lists to which each record is added


@contextlib.contextmanager
def recorded(with_times: bool = False) -> "Iterator[List[Any]]":
    """Let TensorFlow's runtime record; yield a list, to which its records are added.

    Arguments:
        with_times: whether the records contain the times of operations.
    """
    records: "List[Any]" = []
    begin(records, with_times)
    try:
        yield records
    finally:
        end(records)


def begin(records: "List[Any]", with_times: bool = False) -> None:
    """Let the runtime record, and add its records to a list."""
    with lock:
        # Without times, unless these are needed: TensorFlow 2.0 writes those of an operation to its
        # record after another thread has taken that, and ends with a segmentation fault.
        if with_times:
            context.enable_run_metadata()
        else:
            context.enable_graph_collection()
        collect()  # earlier records
        _recordings.append(records)


def end(records: "List[Any]") -> None:
    """Stop adding the runtime's records to a list."""
    with lock:
        collect()
        _recordings[:] = [recording for recording in _recordings if recording is not records]
        if not (_recordings or script_records()):
            context.disable_graph_collection()
            context.disable_run_metadata()


def collect() -> None:
    """Add what the runtime has recorded so far to all lists."""
    if not script_records():
        record = context.export_run_metadata()
        for records in _recordings:
            records.append(record)


def script_records() -> bool:
    """Return whether the runtime records for ``tf.summary.trace_on()``, to not lose its records."""
    module = sys.modules.get("tensorflow.python.ops.summary_ops_v2")
    module = module or sys.modules.get("tensorflow_core.python.ops.summary_ops_v2")
    return getattr(module, "_current_trace_context", None) is not None


def nodes_executed(step: "Callable[[], Any]") -> "List[Any]":
    """Do a step, and return the nodes of every graph partition that TensorFlow executed.

    A graph is recorded when it is first executed: ``step`` has to trace its functions.
    """
    with recorded() as records:
        step()
    return nodes_of(records)


def functions_of(records: "List[Any]") -> "List[Any]":
    """Return the partitions of each function that was executed; an empty function has none."""
    functions = [function for record in records for function in record.function_graphs]
    graphs = [function.partition_graphs for function in functions]
    return [parts for parts in graphs if not (parts and all(map(_is_one_operation, parts)))]


def nodes_of(records: "List[Any]") -> "List[Any]":
    """Return the nodes of the partitions of functions, as they were executed."""
    return [node for parts in functions_of(records) for part in parts for node in part.node]


def _is_one_operation(partition):
    """Return whether this is an operation that ran eagerly, of which oneDNN has made a graph."""
    return sum(node.op not in ("_Arg", "_Retval") for node in partition.node) == 1
