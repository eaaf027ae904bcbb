"""Profile of TensorFlow 2: the operations of each device, and their times.

They are recorded by TensorFlow's profiler, and in TensorFlow 2.0 by run metadata.
"""

import collections
import contextlib
import gc
import itertools
import pathlib
import re
import tempfile
import time
from typing import Any, Dict, Iterable, Iterator, List, Sequence, Tuple

import tensorflow as tf
from tensorflow.python.eager import context

from ..._runtime.operation_times import Operation, converted, count_products
from .._tensorflow import profiler as run_statistics
from ..tensorflow1 import profiler as tensorflow1_profiler
from . import trace_profiles
from .configuration import runs_eagerly, short_name
from .run_metadata import recorded

_KERNEL = re.compile(r"([\w./>-]+):(\w+)")  # "sequential/dense_1/MatMul_2:_FusedMatMul"
_INLINED = re.compile(r"(Stateful)?PartitionedCall(_\d+)?/")  # whose function's nodes follow
_ON_VARIABLES = re.compile("Variable|VarHandleOp|^Resource")


def profiled(devices: "Sequence[str]") -> "Any":
    """Return a context in which TensorFlow's profiler records; see ``Backend.profiled()``."""
    if not runs_eagerly(tf):  # sessions record each of their runs
        return tensorflow1_profiler.profiled(devices)
    if hasattr(tf, "profiler"):
        return converted(_profile(), lambda planes: operations(planes, devices))
    # TensorFlow 2.0 and 2.1 record operations with their devices.
    executed_on = run_statistics.operations_of
    if not hasattr(context.context(), "add_post_execution_callback"):
        # TensorFlow 2.1, whose run metadata contains no times.
        return converted(
            trace_profiles.recorded(), lambda statistics: executed_on(statistics, devices)
        )
    return converted(
        recorded(with_times=True),
        lambda records: executed_on([record.step_stats for record in records], devices),
    )


@contextlib.contextmanager
def _profile():
    """Record a profile; yield a list that gets its planes: by GPU, and by thread of the CPU."""
    profiler, planes = tf.profiler.experimental, []
    with tempfile.TemporaryDirectory() as directory:
        try:
            profiler.start(directory)
        except tf.errors.AlreadyExistsError as error:
            raise trace_profiles.already_running("tf.profiler.experimental.stop()") from error
        try:
            yield planes
        finally:
            if hasattr(tf.raw_ops, "SyncDevice"):
                _synchronize()
            time.sleep(0.1)  # a thread completes its record after it has returned its results
            profiler.stop()
            paths = list(pathlib.Path(directory).rglob("*.xplane.pb"))
            # TensorFlow 2.2 writes no planes.
            for path in paths or pathlib.Path(directory).rglob("*.trace.json.gz"):
                planes.extend(_planes(path))


def _synchronize():
    """Wait until this process's devices have executed what was dispatched to them."""
    # tf.test.experimental.sync_devices() also asks other ranks' devices, which fails.
    address = tf.constant(0).device.rpartition("/device:")[0]
    for device in tf.config.list_logical_devices():
        if device.name.rpartition("/device:")[0] in ("", address):
            with tf.device(device.name):
                tf.raw_ops.SyncDevice()
    context.async_wait()


def _planes(path):
    if path.suffix == ".gz":
        return trace_profiles.planes_of(path.read_bytes())
    try:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2
    except ImportError:  # before TensorFlow 2.12
        from tensorflow.core.profiler.protobuf import xplane_pb2
    return xplane_pb2.XSpace.FromString(path.read_bytes()).planes


def operations(planes: "Iterable[Any]", devices: "Sequence[str]") -> "Iterator[Operation]":
    """Yield the operations on devices that the profiler's planes contain."""
    # The profiler counts all GPUs that CUDA shows, devices those that TensorFlow is to use.
    visible = tf.config.experimental.get_visible_devices("GPU")
    numbers = [gpu.name.split(":")[-1] for gpu in visible]
    gpus = {f"/device:GPU:{number}": f"/gpu:{place}" for place, number in enumerate(numbers)}
    for plane in planes:
        device = gpus.get(plane.name)
        if device is not None and device in devices:
            lines = [line for line in plane.lines if line.name.startswith("Stream")]
            for event in itertools.chain.from_iterable(_events(plane, line) for line in lines):
                yield Operation(device, event.name, event.start, event.duration)
        elif plane.name == "/host:CPU" and any("cpu" in device for device in devices):
            yield from _operations_of_cpu(plane, devices)


_Event = collections.namedtuple("_Event", "name start duration statistics")


def _events(plane, line):
    """Yield a line's events in the order of their start, enclosing ones first; in microseconds."""
    names = plane.stat_metadata
    for event in sorted(line.events, key=lambda event: (event.offset_ps, -event.duration_ps)):
        statistics = {names[stat.metadata_id].name: _value(plane, stat) for stat in event.stats}
        start = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
        name = plane.event_metadata[event.metadata_id].name
        yield _Event(name, start, event.duration_ps / 1e6, statistics)


def _value(plane, statistic):
    kind = statistic.WhichOneof("value")
    value = getattr(statistic, kind)
    return plane.stat_metadata[value].name if kind == "ref_value" else value


def kernels(plane: "Any") -> "Tuple[List[Any], Dict[Any, Any]]":
    """Return the kernels that the threads of the CPU executed.

    Returns:
        The event of each kernel, its node and its type, and the run of a graph that contains it,
        which is "" in TensorFlow 2.2: it does not record it; and for each run the node that called
        the function and that node's run, or None where the script called it.
    """
    executed, callers = [], {}
    for line in plane.lines:
        enclosing: "List[Any]" = []  # end, node and run of the events around
        for event in _events(plane, line):
            while enclosing and enclosing[-1][0] <= event.start:
                enclosing.pop()
            _, node, run = enclosing[-1] if enclosing else (None, None, None)
            end, kernel = event.start + event.duration, _KERNEL.fullmatch(event.name)
            if event.name == "ExecutorState::Process":
                enclosing.append((end, None, event.statistics.get("_c", "")))
            elif event.name == "ExecutorState::ProcessAsync::Start":  # of calls, too
                enclosing.append((end, event.statistics["name"], run))
            elif event.name == "FunctionRun" and "_p" in event.statistics:
                callers[event.statistics["_p"]] = (node, run) if node else None
            elif kernel:
                enclosing.append((end, kernel.group(1), run))
                if not kernel.group(2).endswith(run_statistics.WAITING):
                    executed.append((event, kernel.groups(), run))
    return executed, callers


def _operations_of_cpu(plane, devices):
    """Yield the kernels of the CPU's threads, with the simulated device that executed each.

    Threads are common to all devices, and a kernel is recorded without its device. Its device is

    - that of its node, or of the node that contains it (in the body of a loop);
    - if that has none, that of the call of the kernel's function (a layer of tf.keras that is a
      function, such as the LSTM);
    - in a function that a script calls, the first: TensorFlow's default. It is not noticed where a
      script places such a call, eagerly on a CPU.

    Kernels without a known device are left out: where nodes of one name have different ones; eager
    operations; reads and writes of variables, which run where these are; functions within functions
    in TensorFlow 2.2 and 2.3, whose caller is not recorded.
    """
    executed, callers = kernels(plane)
    called = _functions_called() if "" in [run for _, _, run in executed] else ()
    requested = collections.defaultdict(set)  # the devices of all functions' nodes, by their name
    of_others = set()  # nodes of functions that are called by other functions
    for graph, node in _nodes():
        requested[node.name].add(short_name(node.device) if node.device else None)
        if graph in called:
            of_others.add(node.name)

    def device_of(node, run):
        name = _INLINED.sub("", node)
        while name and name not in requested:
            name = name.rpartition("/")[0]
        candidates = set(requested.get(name, {None}))
        if None in candidates and run in callers:
            of_call = device_of(*callers[run]) if callers[run] else devices[0]
            candidates = candidates - {None} | {of_call}
        elif None in candidates and run == "" and name in requested and name not in of_others:
            candidates = candidates - {None} | {devices[0]}
        return candidates.pop() if len(candidates) == 1 else None

    for event, (node, kind), run in executed:
        if len(devices) == 1:
            device = devices[0]
        else:
            device = None if _ON_VARIABLES.search(kind) else device_of(node, run)
        if device in devices:
            name = run_statistics.titled(node, kind)
            yield Operation(device, name, event.start, event.duration)


def _nodes():
    """Yield the nodes of all functions that TensorFlow has, with the function's graph, or None."""
    running = context.context()
    if hasattr(running, "list_function_names"):
        for name in running.list_function_names():
            with contextlib.suppress(tf.errors.NotFoundError):  # deleted meanwhile
                for node in running.get_function_def(name).node_def:
                    yield None, node
    else:  # before TensorFlow 2.4
        for graph in _graphs():
            for node in graph.as_graph_def().node:
                yield graph, node


def _graphs():
    """Return the graphs of all functions, without those that TensorFlow has emptied."""
    from tensorflow.python.framework.func_graph import FuncGraph

    graphs = [candidate for candidate in gc.get_objects() if type(candidate) is FuncGraph]
    return [graph for graph in graphs if vars(graph)]


def _functions_called():
    """Return the graphs of functions that other functions call, in TensorFlow 2.2."""
    return [each.graph for graph in _graphs() for each in graph._functions.values()]


# How operations are called, also after Grappler ("_FusedMatMul") and, on CPUs that have what it
# wants, oneDNN ("_MklMatMul", "_MklNativeFusedMatMul").
PRODUCTS = ("MatMul", "BatchMatMulV2", "Conv2D")
BACKWARD = ("gradient_tape", "gradients", "_grad", "Backprop")


def products(nodes):
    """Count the products among the nodes that were executed; see ``count_products``."""
    return count_products(_products(nodes))


def _products(nodes):
    """Yield the device of each product, and whether it is a gradient's."""
    for node in nodes:
        # A recurrent layer of tf.keras runs as one function call on one device.
        computing = node.op.endswith(PRODUCTS) or node.op == "PartitionedCall"
        if computing or "Backprop" in node.op:
            name = node.name + node.op
            # The gradient of a product is a product with a transposed matrix.
            transposed = node.attr["transpose_a"].b or node.attr["transpose_b"].b
            backward = transposed or any(mark in name for mark in BACKWARD)
            yield short_name(node.device), backward
