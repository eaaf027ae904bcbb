"""When TensorFlow 2 executed what: from its profiler, and before that from its run metadata."""

import collections
import contextlib
import gc
import glob
import os
import re
import tempfile

from ... import errors
from ..._operations import Operation
from ..tensorflow1 import timeline as tensorflow1_timeline
from .device_configuration import config_function
from .op_placement import short

_KERNEL = re.compile(r"([\w./>-]+):(\w+)")  # "sequential/dense_1/MatMul_2:_FusedMatMul"
_INLINED = re.compile(r"(Stateful)?PartitionedCall(_\d+)?/")  # whose function's nodes follow


@contextlib.contextmanager
def profiled(tf, devices):
    """Within, TensorFlow's profiler records; see ``Backend.profiled()``."""
    operations = []
    record = _by_profiler if hasattr(tf, "profiler") else _by_metadata
    with record(tf, devices, operations):
        yield operations


@contextlib.contextmanager
def _by_metadata(tf, devices, operations):
    """TensorFlow 2.0 and 2.1 record each operation with its device."""
    from tensorflow.python.eager import context

    context.enable_run_metadata()
    try:
        context.export_run_metadata()  # drop what others left
        yield
    finally:
        statistics = context.export_run_metadata().step_stats
        context.disable_run_metadata()
        operations.extend(tensorflow1_timeline.executed([statistics], devices))


@contextlib.contextmanager
def _by_profiler(tf, devices, operations):
    """Later ones have a profiler: of GPUs by device, of the CPU by thread."""
    profiler = tf.profiler.experimental
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
            yield
        finally:
            if hasattr(tf.test, "experimental"):
                tf.test.experimental.sync_devices()
            profiler.stop()
            for path in glob.glob(os.path.join(directory, "**", "*.xplane.pb"), recursive=True):
                operations.extend(executed(_planes(path), devices, _gpu_planes(tf)))


def _planes(path):
    try:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2
    except ImportError:  # before TensorFlow 2.12
        from tensorflow.core.profiler.protobuf import xplane_pb2
    space = xplane_pb2.XSpace()
    with open(path, "rb") as file:
        space.ParseFromString(file.read())
    return space.planes


def _gpu_planes(tf):
    """The profiler counts all GPUs that CUDA shows, devices those that TensorFlow is to use."""
    gpus = config_function(tf, "get_visible_devices")("GPU")
    numbers = [gpu.name.split(":")[-1] for gpu in gpus]
    return {"/device:GPU:" + n: "/gpu:{}".format(place) for place, n in enumerate(numbers)}


def executed(planes, devices, gpu_planes):
    """The operations on ``devices`` that the profiler's planes tell of."""
    operations = []
    for plane in planes:
        device = gpu_planes.get(plane.name)
        if device in devices:
            lines = [line for line in plane.lines if line.name.startswith("Stream")]
            for event in (each for line in lines for each in _events(plane, line)):
                operations.append(Operation(device, event.name, event.start, event.duration))
        elif plane.name == "/host:CPU" and any("cpu" in device for device in devices):
            operations.extend(_HostPlane(plane).executed(devices))
    return operations


_Event = collections.namedtuple("_Event", "name start duration statistics")


def _events(plane, line):
    """A line's events in the order of their start, enclosing ones first; in microseconds."""
    for event in sorted(line.events, key=lambda each: (each.offset_ps, -each.duration_ps)):
        statistics = {
            plane.stat_metadata[each.metadata_id].name: each.uint64_value or each.int64_value
            for each in event.stats
        }
        start = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
        name = plane.event_metadata[event.metadata_id].name
        yield _Event(name, start, event.duration_ps / 1e6, statistics)


class _HostPlane:
    """The kernels that the threads of the CPU executed, and on which device of it each.

    Threads are common to all devices, and a kernel is recorded without its device. But graphs
    are partitioned by device, and each *execution* of a partition has a number. So all kernels
    of an execution ran on one device:

    - that which its nodes asked for, most of them: what reads and writes variables stays with
      these, whatever it asked for;
    - where no node asks for one, that of the execution it was called by (a layer of tf.keras that
      is a function, such as the LSTM);
    - where that has none, either, the first device: TensorFlow's default.

    Kernels outside of executions are those of eager operations: of unknown device.
    """

    def __init__(self, plane):
        self.kernels = []  # with the node and the kind of each, and its execution
        self.callers = {}  # of executions
        for line in plane.lines:
            self._read(plane, line)

    def _read(self, plane, line):
        enclosing = []  # executions, and when the thread leaves them
        for event in _events(plane, line):
            while enclosing and enclosing[-1][1] <= event.start:
                enclosing.pop()
            execution = enclosing[-1][0] if enclosing else None
            kernel = _KERNEL.fullmatch(event.name)
            if event.name == "ExecutorState::Process":
                enclosing.append((event.statistics["_c"], event.start + event.duration))
            elif event.name == "FunctionRun":
                self.callers[event.statistics["_p"]] = execution
            elif kernel and not kernel.group(2).endswith(tensorflow1_timeline.WAITING):
                self.kernels.append((event, kernel.groups(), execution))

    def executed(self, devices):
        ran_on = self.devices(devices)
        for event, (node, kind), execution in self.kernels:
            device = devices[0] if len(devices) == 1 else ran_on.get(execution)
            if device in devices:
                name = tensorflow1_timeline.titled(node, kind)
                yield Operation(device, name, event.start, event.duration)

    def devices(self, devices):
        """The device of each execution."""
        wanted, votes = _devices_asked_for(), {}
        for _, (node, _), execution in self.kernels:
            found = votes.setdefault(execution, collections.Counter())
            devices_asked_for = wanted[_INLINED.sub("", node)]
            if len(devices_asked_for) == 1:
                found.update(devices_asked_for)
        votes.pop(None, None)

        def device_of(execution):
            if votes.get(execution):
                return votes[execution].most_common(1)[0][0]
            caller = self.callers.get(execution)
            return devices[0] if caller is None else device_of(caller)

        return {execution: device_of(execution) for execution in votes}


def _devices_asked_for():
    """The devices that the nodes of this name ask for, in all functions that TensorFlow has."""
    wanted = collections.defaultdict(set)
    for node in _nodes():
        if node.device:
            wanted[node.name].add(short(node.device))
    return wanted


def _nodes():
    from tensorflow.python.eager import context
    from tensorflow.python.framework.func_graph import FuncGraph

    context = context.context()
    if hasattr(context, "list_function_names"):
        for name in context.list_function_names():
            yield from context.get_function_def(name).node_def
    else:  # TensorFlow 2.3
        for graph in [each for each in gc.get_objects() if type(each) is FuncGraph]:
            yield from graph.as_graph_def().node
