"""What a step of TensorFlow 2 did: its numbers, verified; and when its operations ran."""

import collections
import contextlib
import functools
import gc
import itertools
import pathlib
import re
import tempfile
import time

import tensorflow as tf
from tensorflow.python.eager import context

from ... import _keras, errors
from ..._runtime import patching
from ..._runtime.operation_times import Operation, converted
from ..._verification import keras_steps
from .._tensorflow import profiler as run_statistics
from ..tensorflow1 import profiler as tensorflow1_profiler
from .executions import executed, products, recorded, short
from .runtime import runs_eagerly
from .side_effects import Snapshot, roots_of

# Its numbers, verified: the step done on one device, from the same state ------------------------


def _build(optimizer, variables):
    """Make the optimizer's state, which some versions of Keras make in the first step.

    Returns:
        Whether it was not there yet.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if _is_of_tensorflow(optimizer):
        with tf.init_scope():
            optimizer.optimizer._create_slots(list(variables))  # those that are not there yet
    if _is_built(optimizer):
        return False
    # The second is that of tf.keras' legacy optimizers.
    build = getattr(optimizer, "build", getattr(optimizer, "_create_all_weights", None))
    if build is not None:
        build(variables)
    return True


def _is_of_tensorflow(optimizer):
    """Whether it is one of ``tf.compat.v1.train``, which tf.keras wraps."""
    return hasattr(getattr(optimizer, "optimizer", None), "_create_slots")


def _is_built(optimizer):
    if _is_of_tensorflow(optimizer):  # ``_build`` has made its state
        return True
    if hasattr(optimizer, "_create_all_weights"):  # tf.keras' legacy ones
        return len(optimizer.weights) > 0
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))


def _batches(model, iterator):
    """Those that a call of the model's function consumes."""
    if isinstance(iterator, list):  # Keras 3 predicts lists of batches
        return iterator
    count = getattr(model, "_steps_per_execution", None)
    count = getattr(model, "steps_per_execution", 1) if count is None else count
    count = int(count.numpy() if hasattr(count, "numpy") else count)
    return [next(iterator)] + list(itertools.islice(iterator, count - 1))


class _TensorFlow2Step(keras_steps.KerasStep):
    variable_kinds = (tf.Variable,)

    def __init__(self, method, function, iterator):
        super().__init__(method, function, _batches(function.model, iterator))
        self.iterator = iterator

    def attributes(self):
        return Snapshot(super().attributes(), *roots_of(self.model))

    # Batches ------------------------------------------------------------------------------------

    def taken(self):
        """An iterator over the same batches, in which sizes are known as far as they were."""
        spec = getattr(self.iterator, "element_spec", None)
        if spec is None:
            return self.data if isinstance(self.iterator, list) else iter(self.data)
        datasets = map(tf.data.Dataset.from_tensors, self.data)
        dataset = functools.reduce(lambda first, second: first.concatenate(second), datasets)
        variant = tf.data.experimental.to_variant(dataset)
        return iter(tf.data.experimental.from_variant(variant, spec))

    def as_array(self, value):
        value = value.to_tensor() if hasattr(value, "to_tensor") else value
        return value.numpy() if hasattr(value, "numpy") else value

    # Doing it -----------------------------------------------------------------------------------

    def on_all_devices(self):
        start, noted = self.read(), self.attributes()
        results, traced = self._traced_and_done()
        if traced and self.method.has_built and noted.have_changed():
            # TensorFlow traces a function twice that makes variables. Here the optimizer's were
            # there already, and something counts traces: an optimizer, or a layer's seed.
            self.write(start)
            self.function.made = self.method.made_anew(self.model)
            results, _ = self._traced_and_done()
        self.method.has_built = False
        return results, self.named(results)

    def _traced_and_done(self):
        """Do the step; what it returned, and whether a graph was traced.

        What counts in Python begins a graph on one device with the numbers of this one.
        """
        name = keras_steps.STEPS[self.kind]
        plain, traces = getattr(self.model, name), []

        def step(*args):
            if not tf.executing_eagerly():
                traces.append(True)
                self.noted = self.attributes()
            return plain(*args)

        with patching.replaced(self.model, **{name: step}):
            return self.function.made(self.taken()), bool(traces)

    def operations(self):
        function = self.method.made_anew(self.model)
        nodes = executed(lambda: function(self.taken()))
        return products(nodes)


class VerifiedTensorFlow2Step(keras_steps.Verified):
    """The method by which tf.keras, or Keras 3 on TensorFlow, makes the function of a step."""

    step = _TensorFlow2Step
    has_built = False  # whether the optimizer made its state here, not in a step

    def is_ready(self, model):
        is_built = getattr(model, "built", True)
        if self.kind != "train" or not is_built:
            return is_built
        optimizers = keras_steps.optimizers(model)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not _keras.is_users(type(model).train_step):
            self.has_built = _build(optimizer, model.trainable_variables) or self.has_built
            optimizers = [optimizer]
        return all(_is_built(optimizer) for optimizer in optimizers)


# When its operations ran: from the profiler, and before that from run metadata --------------------

_KERNEL = re.compile(r"([\w./>-]+):(\w+)")  # "sequential/dense_1/MatMul_2:_FusedMatMul"
_INLINED = re.compile(r"(Stateful)?PartitionedCall(_\d+)?/")  # whose function's nodes follow
_ON_VARIABLES = re.compile("Variable|VarHandleOp|^Resource")


def profiled(devices):
    """Within, TensorFlow's profiler records; see ``Backend.profiled()``."""
    if not runs_eagerly(tf):  # sessions record each of their runs
        return tensorflow1_profiler.profiled(devices)
    if hasattr(tf, "profiler"):
        return converted(_profile(), lambda planes: operations(planes, devices))
    # TensorFlow 2.0 and 2.1 record operations with their devices.
    executed_on = run_statistics.operations_of
    return converted(
        recorded(with_times=True),
        lambda found: executed_on([each.step_stats for each in found], devices),
    )


@contextlib.contextmanager
def _profile():
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


def operations(planes, devices):
    """The operations on ``devices`` that the profiler's planes tell of."""
    # The profiler counts all GPUs that CUDA shows, devices those that TensorFlow is to use.
    visible = tf.config.experimental.get_visible_devices("GPU")
    numbers = [gpu.name.split(":")[-1] for gpu in visible]
    gpus = {f"/device:GPU:{number}": f"/gpu:{place}" for place, number in enumerate(numbers)}
    for plane in planes:
        device = gpus.get(plane.name)
        if device in devices:
            lines = [line for line in plane.lines if line.name.startswith("Stream")]
            for event in (each for line in lines for each in _events(plane, line)):
                yield Operation(device, event.name, event.start, event.duration)
        elif plane.name == "/host:CPU" and any("cpu" in device for device in devices):
            yield from _operations_of_cpu(plane, devices)


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


def kernels(plane):
    """The kernels that the threads of the CPU executed.

    Returns:
        The event of each kernel, its node and its kind, and the run of a graph that it was in; and
        by run the node that called for it and that one's run, or None where the script called.
    """
    found, callers = [], {}
    for line in plane.lines:
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
                callers[event.statistics["_p"]] = (node, run) if node else None
            elif kernel:
                enclosing.append((end, kernel.group(1), run))
                if not kernel.group(2).endswith(run_statistics.WAITING):
                    found.append((event, kernel.groups(), run))
    return found, callers


def _operations_of_cpu(plane, devices):
    """The kernels of the CPU's threads, with the device of it that executed each.

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
    asked_for = collections.defaultdict(set)  # by nodes of each name, in all functions
    for node in _nodes():
        asked_for[node.name].add(short(node.device) if node.device else None)
    found, callers = kernels(plane)

    def device_of(node, run):
        name = _INLINED.sub("", node)
        while name and name not in asked_for:
            name = name.rpartition("/")[0]
        asked = set(asked_for.get(name, {None}))
        if None in asked and run in callers:
            by_call = device_of(*callers[run]) if callers[run] else devices[0]
            asked = asked - {None} | {by_call}
        return asked.pop() if len(asked) == 1 else None

    for event, (node, kind), run in found:
        if len(devices) == 1:
            device = devices[0]
        else:
            device = None if _ON_VARIABLES.search(kind) else device_of(node, run)
        if device in devices:
            name = run_statistics.titled(node, kind)
            yield Operation(device, name, event.start, event.duration)


def _nodes():
    """The nodes of all functions that TensorFlow has."""
    from tensorflow.python.framework.func_graph import FuncGraph

    running = context.context()
    if hasattr(running, "list_function_names"):
        for name in running.list_function_names():
            with contextlib.suppress(tf.errors.NotFoundError):  # collected meanwhile
                yield from running.get_function_def(name).node_def
    else:  # TensorFlow 2.3, which empties graphs that it no longer needs
        for graph in [each for each in gc.get_objects() if type(each) is FuncGraph]:
            if vars(graph):
                yield from graph.as_graph_def().node
