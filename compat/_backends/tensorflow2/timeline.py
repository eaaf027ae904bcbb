"""When TensorFlow 2 executed what: from its profiler, and before that from its run metadata."""

import collections
import contextlib
import gc
import pathlib
import re
import tempfile
import time

from ... import errors
from ..._runtime.operation_times import Operation, converted
from ..tensorflow1 import timeline as tensorflow1_timeline
from .op_placement import recorded, short

_KERNEL = re.compile(r"([\w./>-]+):(\w+)")  # "sequential/dense_1/MatMul_2:_FusedMatMul"
_INLINED = re.compile(r"(Stateful)?PartitionedCall(_\d+)?/")  # whose function's nodes follow
_ON_VARIABLES = re.compile("Variable|VarHandleOp|^Resource")


def profiled(tf, devices):
    """Within, TensorFlow's profiler records; see ``Backend.profiled()``."""
    if hasattr(tf, "profiler"):
        return converted(_profile(tf), lambda planes: executed(planes, devices, _gpu_planes(tf)))

    def convert(records):
        return tensorflow1_timeline.executed([records[0].step_stats], devices)

    return converted(recorded(), convert)  # TensorFlow 2.0 and 2.1: operations with their devices


@contextlib.contextmanager
def _profile(tf):
    """Within, the profiler records: of GPUs by device, of the CPU by thread; gives its planes."""
    profiler, planes = tf.profiler.experimental, []
    with tempfile.TemporaryDirectory() as directory:
        try:
            profiler.start(directory)
        except tf.errors.AlreadyExistsError as error:
            raise errors.InvalidArgumentError(
                "timeline(): TensorFlow's profiler is running already, and it records one profile "
                "at a time. End that one first: tf.profiler.experimental.stop(), or a fit() whose "
                "TensorBoard callback has profile_batch."
            ) from error
        try:
            yield planes
        finally:
            if hasattr(tf.test, "experimental"):
                tf.test.experimental.sync_devices()
            time.sleep(0.1)  # a thread ends its record after it has handed over its results
            profiler.stop()
            for path in pathlib.Path(directory).rglob("*.xplane.pb"):
                planes.extend(_planes(path))


def _planes(path):
    try:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2
    except ImportError:  # before TensorFlow 2.12
        from tensorflow.core.profiler.protobuf import xplane_pb2
    return xplane_pb2.XSpace.FromString(path.read_bytes()).planes


def _gpu_planes(tf):
    """The profiler counts all GPUs that CUDA shows, devices those that TensorFlow is to use."""
    gpus = tf.config.experimental.get_visible_devices("GPU")
    names = ["/device:GPU:" + gpu.name.split(":")[-1] for gpu in gpus]
    return {name: f"/gpu:{place}" for place, name in enumerate(names)}


def executed(planes, devices, gpu_planes):
    """The operations on ``devices`` that the profiler's planes tell of."""
    for plane in planes:
        device = gpu_planes.get(plane.name)
        if device in devices:
            lines = [line for line in plane.lines if line.name.startswith("Stream")]
            for event in (each for line in lines for each in _events(plane, line)):
                yield Operation(device, event.name, event.start, event.duration)
        elif plane.name == "/host:CPU" and any("cpu" in device for device in devices):
            yield from _HostPlane(plane).executed(devices)


_Event = collections.namedtuple("_Event", "name start duration statistics")


def _events(plane, line):
    """A line's events in the order of their start, enclosing ones first; in microseconds."""
    names = plane.stat_metadata
    for event in sorted(line.events, key=lambda each: (each.offset_ps, -each.duration_ps)):
        statistics = {names[each.metadata_id].name: _value(plane, each) for each in event.stats}
        start = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
        name = plane.event_metadata[event.metadata_id].name
        yield _Event(name, start, event.duration_ps / 1e6, statistics)


def _value(plane, statistic):
    kind = statistic.WhichOneof("value")
    value = getattr(statistic, kind)
    return plane.stat_metadata[value].name if kind == "ref_value" else value


class _HostPlane:
    """The kernels that the threads of the CPU executed, and on which device of it each.

    Threads are common to all devices, and a kernel is recorded without its device. It is that

    - which its node asks for, or the node that it is a part of (of the body of a loop);
    - where that asks for none, that of the call which the kernel's function was run by (a layer
      of tf.keras that is a function, such as the LSTM);
    - in a function that a script calls, the first: TensorFlow's default. A script that places
      such a call, eagerly on a CPU, is not seen to.

    Left out is what has no known device: where nodes of one name ask for different ones; eager
    operations; what reads and writes variables, which runs where these are; functions within
    functions in TensorFlow 2.3, whose caller is not recorded.
    """

    def __init__(self, plane):
        self.kernels = []  # with the node and the kind of each, and the run of a graph it was in
        self.callers = {}  # of runs: the node and its run, or None where the script called
        for line in plane.lines:
            self._read(plane, line)

    def _read(self, plane, line):
        enclosing = []  # when each ends, its node and its run
        for event in _events(plane, line):
            while enclosing and enclosing[-1][0] <= event.start:
                enclosing.pop()
            _, node, run = enclosing[-1] if enclosing else (None, None, None)
            end, kernel = event.start + event.duration, _KERNEL.fullmatch(event.name)
            if event.name == "ExecutorState::Process":
                enclosing.append((end, None, event.statistics["_c"]))
            elif event.name == "ExecutorState::ProcessAsync::Start":  # of calls, too
                enclosing.append((end, event.statistics["name"], run))
            elif event.name == "FunctionRun":
                self.callers[event.statistics["_p"]] = (node, run) if node else None
            elif kernel:
                enclosing.append((end, kernel.group(1), run))
                if not kernel.group(2).endswith(tensorflow1_timeline.WAITING):
                    self.kernels.append((event, kernel.groups(), run))

    def executed(self, devices):
        asked_for = collections.defaultdict(set)  # by nodes of each name, in all functions
        for node in _nodes():
            asked_for[node.name].add(short(node.device) if node.device else None)
        for event, (node, kind), run in self.kernels:
            if len(devices) == 1:
                device = devices[0]
            elif _ON_VARIABLES.search(kind):
                device = None
            else:
                device = self._device(node, run, asked_for, devices[0])
            if device in devices:
                name = tensorflow1_timeline.titled(node, kind)
                yield Operation(device, name, event.start, event.duration)

    def _device(self, node, run, asked_for, default):
        name = _INLINED.sub("", node)
        while name and name not in asked_for:
            name = name.rpartition("/")[0]
        devices = set(asked_for.get(name, {None}))
        if None in devices and run in self.callers:
            caller = self.callers[run]
            by_call = self._device(*caller, asked_for, default) if caller else default
            devices = devices - {None} | {by_call}
        return devices.pop() if len(devices) == 1 else None


def _nodes():
    """The nodes of all functions that TensorFlow has."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework.errors import NotFoundError
    from tensorflow.python.framework.func_graph import FuncGraph

    context = context.context()
    if hasattr(context, "list_function_names"):
        for name in context.list_function_names():
            with contextlib.suppress(NotFoundError):  # collected meanwhile
                yield from context.get_function_def(name).node_def
    else:  # TensorFlow 2.3, which empties graphs that it no longer needs
        for graph in [each for each in gc.get_objects() if type(each) is FuncGraph]:
            if vars(graph):
                yield from graph.as_graph_def().node
