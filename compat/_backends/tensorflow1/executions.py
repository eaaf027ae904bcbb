"""Proof of use: which devices executed the first step of a model, as TensorFlow reports it.

A session reports the partitions of the graph that it ran, device by device. But Keras' functions
are compiled for many runs, and a report would compile all of them a second time, which takes longer
than the step. So the functions and fetches that ran are recorded. A session places each operation
of its graph once, whatever is fetched. So afterwards one operation of theirs runs for each device
that they were assigned to, whose partition shows where that is.
"""

import collections
import contextlib
import sys
import threading
from _thread import get_ident
from typing import Any, Iterator, List

from ... import _keras
from ..._runtime import patching
from ..._runtime.usage import Executed
from .._tensorflow.graph import v1_names
from .._tensorflow.profiler import as_configured
from . import graph
from .profiler import around_calls, partitions

_lock = threading.RLock()
_recordings: "List[_Recording]" = []  # of all threads
_patches = contextlib.ExitStack()


@contextlib.contextmanager
def executed(model: "Any", devices: "List[str]") -> "Iterator[Executed]":
    """Record the first step of a model within a block, on this thread; yield an ``Executed``.

    Arguments:
        model: the model.
        devices: the names of its devices, as configured.
    """
    recording = _Recording(model, devices)
    with _lock:
        if not _recordings:
            _patches.enter_context(_recording_runs())
        _recordings.append(recording)
    try:
        yield recording.executed
    finally:
        recording.end()


class _Recording:
    """Record of what one thread runs, until a function of the model has run."""

    def __init__(self, model, devices):
        self.thread, self.model, self.devices = get_ident(), model, devices
        self.executed = Executed()
        self.is_running = False  # a function, which may run a session
        self.fetched: "Any" = collections.defaultdict(set)  # by session

    def run(self, run, fetched, function=None):
        """Call ``run``, and record what it has fetched.

        Arguments:
            run: a function without arguments.
            fetched: returns the session and its fetches, afterwards.
            function: the Keras function that runs, if it is one.
        """
        if self.is_running:
            return run()
        self.is_running = True
        try:
            return run()
        finally:
            self.is_running = False
            session, fetches = fetched()
            self.fetched[session].update(fetches)
            if function is not None and self._is_of_model(function):
                self.end()

    def _is_of_model(self, function):
        inner = _keras.inner_model(self.model)
        for of_model in [getattr(inner, name, None) for name in _keras.ALL_FUNCTIONS]:
            while hasattr(of_model, "made"):  # of replicas, or verified
                of_model = of_model.made
            if of_model is function:
                return True
        return False

    def end(self):
        """Stop recording, and count the operations that each device has executed."""
        with _lock:
            if self not in _recordings:
                return
            _recordings.remove(self)
            if not _recordings:
                _patches.close()
        try:
            for session, fetches in self.fetched.items():
                counts = _placed(session, fetches)
                for name, number in zip(as_configured(counts, self.devices), counts.values()):
                    self.executed[name] = self.executed.get(name, 0) + number
        except Exception:  # the session may be closed by now
            self.executed.is_known = False


@contextlib.contextmanager
def _recording_runs():
    """Have sessions and Keras' functions report to the recordings of their thread."""
    from tensorflow.python.client.session import BaseSession

    plain_run = BaseSession._do_run

    def run_session(session, handle, targets, fetches, *args, **kwargs):
        def run():
            return plain_run(session, handle, targets, fetches, *args, **kwargs)

        return _recorded(run, lambda: (session, [*targets, *fetches]))

    def call_function(call, function):
        def fetched():
            fetches = [*function.outputs, function.updates_op]
            fetches += getattr(function, "fetches", None) or ()
            with fetches[0].graph.as_default():
                return sys.modules[type(function).__module__].get_session(), fetches

        return _recorded(call, fetched, function)

    with patching.replaced(BaseSession, _do_run=run_session), around_calls(call_function):
        yield


def _recorded(run, *fetched):
    ours = [recording for recording in list(_recordings) if recording.thread == get_ident()]
    return ours[-1].run(run, *fetched) if ours else run()  # a callback may run another model


def _placed(session, fetches):
    """Return the number of operations that fetches need, by the device that runs them.

    Those without a device run on the one that sessions prefer, the first GPU if any.
    """
    tf, numbers, constants = v1_names(), collections.Counter(), {}
    for op in graph.ancestors(fetches, ())[0]:
        numbers[op.device] += 1
        if op.type == "Const" and graph.is_outermost(op) and not op.control_inputs:
            # A colocated one may be elsewhere.
            if "_class" not in op.node_def.attr or op.device not in constants:
                constants[op.device] = op.outputs[0]
    listed = getattr(session, "list_devices", list)()  # a MonitoredSession lists none
    has_gpu = any(device.device_type == "GPU" for device in listed)
    preferred = "/device:{}:0".format("GPU" if has_gpu else "CPU")
    counts = collections.Counter({preferred: numbers.pop("", 0)})
    constants = {device: constants[device] for device in numbers if device in constants}
    device_of = {constant.op.name: device for device, constant in constants.items()}
    metadata = tf.RunMetadata()
    options = tf.RunOptions(output_partition_graphs=True)
    session.run(list(constants.values()), options=options, run_metadata=metadata)
    for actual, nodes in partitions(metadata).items():
        counts[actual] += sum(numbers[device_of.get(node.name)] for node in nodes)
    return counts
