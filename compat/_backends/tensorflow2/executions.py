"""Which devices executed operations, as TensorFlow's runtime reports it.

It reports the partitions of a function's graph when that is first executed, and every operation
that runs eagerly, with its results, which know their device.
"""

import collections
import contextlib
import sys
import threading

import tensorflow as tf
from tensorflow.python.eager import context, execute

from ..._runtime.usage import Executed

# Graphs --------------------------------------------------------------------------------------

# How operations are called, also after Grappler ("_FusedMatMul") and, on CPUs that have what it
# wants, oneDNN ("_MklMatMul", "_MklNativeFusedMatMul").
PRODUCTS = ("MatMul", "BatchMatMulV2", "Conv2D")
BACKWARD = ("gradient_tape", "gradients", "_grad", "Backprop")

_lock = threading.Lock()
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
    with _lock:
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
    with _lock:
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
    """Whether the runtime records for ``tf.summary.trace_on()``: taking it would lose that."""
    module = sys.modules.get("tensorflow.python.ops.summary_ops_v2")
    module = module or sys.modules.get("tensorflow_core.python.ops.summary_ops_v2")
    return getattr(module, "_current_trace_context", None) is not None


def executed(step):
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
    """The nodes of the partitions of functions, each as it was executed."""
    return [node for parts in functions_of(records) for part in parts for node in part.node]


def _is_one_operation(partition):
    """Whether this is an operation that ran eagerly, and that oneDNN's rewriting makes a graph."""
    return sum(node.op not in ("_Arg", "_Retval") for node in partition.node) == 1


def products(nodes):
    """Matrix products and convolutions by device, forward and backward."""
    counts = collections.defaultdict(lambda: [0, 0])  # type: dict
    for node in nodes:
        # A recurrent layer of tf.keras runs as one function call on one device.
        computing = node.op.endswith(PRODUCTS) or node.op == "PartitionedCall"
        if computing or "Backprop" in node.op:
            name = node.name + node.op
            # The gradient of a product is a product with a transposed matrix.
            transposed = node.attr["transpose_a"].b or node.attr["transpose_b"].b
            backward = transposed or any(mark in name for mark in BACKWARD)
            counts[short(node.device)][backward] += 1
    return {device: tuple(count) for device, count in counts.items()}


def short(device):
    """/job:localhost/replica:0/task:0/device:CPU:1 as compat names it."""
    return "/" + device.split("device:")[-1].lower()


# What is executed, while it is executed --------------------------------------------------------

_listeners = threading.local()
_listening = set()  # type: set  # the identities of threads that have listeners


def listen(listener):
    """Have a listener called with whatever this thread executes from now on.

    Arguments:
        listener: a function of the kind of an operation, or the name of a function, and of its
            results. It may call ``ignore()``.
    """
    known = _listeners.__dict__.setdefault("all", [])
    known.append(listener)
    with _lock, tf.init_scope():  # else functions would not be noted
        _listening.add(threading.get_ident())
        _add_callback(context.context())


def ignore(listener):
    """Have a listener of this thread no longer called."""
    known = _listeners.__dict__.setdefault("all", [])
    if listener in known:
        known.remove(listener)
        if not known:
            with _lock, tf.init_scope():
                _listening.discard(threading.get_ident())
                _remove_callback(context.context())


def _call_listeners(kind, inputs, attributes, outputs, op_name=None, graph=None):
    if graph is None:  # else it is only added to that
        for listener in list(_listeners.__dict__.get("all", ())):
            listener(kind.decode() if isinstance(kind, bytes) else kind, outputs)


def _add_callback(running):
    """Have TensorFlow call the listeners; others may have taken the callback away meanwhile."""
    if hasattr(running, "add_post_execution_callback"):  # TensorFlow 2.0
        if _call_listeners not in running.post_execution_callbacks:
            running.add_post_execution_callback(_call_listeners)
        execute.execute = execute.execute_with_callbacks
    else:
        from tensorflow.python.framework import op_callbacks

        op_callbacks.add_op_callback(_call_listeners)


def _remove_callback(running):
    if hasattr(running, "add_post_execution_callback"):
        # The callback is that of all threads, and others may have taken it away.
        if not _listening and _call_listeners in running.post_execution_callbacks:
            running.post_execution_callbacks.remove(_call_listeners)
        if not running.post_execution_callbacks:
            execute.execute = execute.quick_execute
    else:
        from tensorflow.python.framework import op_callbacks

        op_callbacks.remove_op_callback(_call_listeners)


def is_function(kind):
    """Whether what was executed is a function: a graph, not a single operation."""
    return kind.startswith("__")


class Recorder:
    """Counts the operations that devices execute in a step of this thread's.

    It ends by itself once each device has executed some, or after so many operations that there
    have been several steps.

    Arguments:
        devices: their names.
    """

    #: Operations, and functions, after which it ends.
    LIMIT, FUNCTIONS = 200000, 100

    def __init__(self, devices):
        self.counts = Executed.fromkeys(devices, 0)
        self.records, self.left = [], self.LIMIT
        self.seen, self.unseen = set(), set()  # names of functions
        self.is_running = not script_records()
        self.counts.is_known = self.is_running
        if self.is_running:
            begin(self.records)
            listen(self._note)

    def _note(self, kind, outputs):
        self.left -= 1
        if is_function(kind):
            self.left -= self.LIMIT // self.FUNCTIONS
            with _lock:
                collect()
            # One that was executed before is not recorded.
            (self.seen if self._count_nodes() else self.unseen).add(kind)
        elif outputs and hasattr(outputs[0], "numpy"):
            self._count(outputs[0].device)
        if script_records() or all(self.counts.values()) or self.left <= 0:
            self.end()

    def _count(self, device):
        name = short(device)
        if name in self.counts:
            self.counts[name] += 1

    def _count_nodes(self):
        """Count the nodes that were recorded; return whether any function was."""
        functions, nodes, self.records[:] = functions_of(self.records), nodes_of(self.records), []
        for node in nodes:
            self._count(node.device)  # also what only passes values on: a model may do no more
        return bool(functions)

    def end(self):
        """Record no longer."""
        if not self.is_running:
            return
        self.is_running = False
        ignore(self._note)
        end(self.records)
        self._count_nodes()
        may_be_more = self.unseen - self.seen or script_records()
        self.counts.is_known = all(self.counts.values()) or not may_be_more


@contextlib.contextmanager
def by_device(devices):
    """Within, the operations that devices execute in the first step are counted."""
    recorder = Recorder(devices)
    try:
        yield recorder.counts
    finally:
        recorder.end()
