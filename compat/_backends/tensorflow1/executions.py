"""Proof of use: which devices executed the first step of a model, as TensorFlow reports it.

A session reports the partitions of the graph that it ran, device by device. But what Keras runs in
it is compiled for many runs, and to have these report would compile all of it a second time, which
takes longer than the step. So it is noted which functions and fetches ran. A session places each
operation of its graph once, whatever is fetched. So afterwards one operation of theirs runs for
each device that they were given, and its partition tells where that was.
"""

import collections
import contextlib
import sys
import threading
from _thread import get_ident

from ... import _keras
from ..._runtime import patching
from ..._runtime.usage import Executed
from .._tensorflow.graph import v1_names
from .._tensorflow.profiler import as_configured
from . import graph
from .profiler import around_calls, partitions

_lock = threading.RLock()
_recordings = []  # type: list  # those of all threads
_patches = contextlib.ExitStack()


@contextlib.contextmanager
def executed(model, devices):
    """Within, the first step of a model is recorded, on this thread; yields an ``Executed``.

    Arguments:
        devices: their names, as configured.
    """
    recording = _Recording(model, devices)
    with _lock:
        if not _recordings:
            _patches.enter_context(_noting())
        _recordings.append(recording)
    try:
        yield recording.executed
    finally:
        recording.end()


class _Recording:
    """What one thread runs, until a function of the model has run."""

    def __init__(self, model, devices):
        self.thread, self.model, self.devices = get_ident(), model, devices
        self.executed = Executed()
        self.is_running = False  # a function, which may run a session
        self.fetched = collections.defaultdict(set)  # type: Any  # by session

    def run(self, run, fetched, function=None):
        """Call ``run``.

        Arguments:
            fetched: gives the session and what it has fetched, afterwards.
            function: the function of Keras' that runs.
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
        for each in [getattr(inner, name, None) for name in _keras.ALL_FUNCTIONS]:
            while hasattr(each, "made"):  # of replicas, or verified
                each = each.made
            if each is function:
                return True
        return False

    def end(self):
        with _lock:
            if self not in _recordings:
                return
            _recordings.remove(self)
            if not _recordings:
                _patches.close()
        try:
            for session, fetches in self.fetched.items():
                found = _placed(session, fetches)
                for name, number in zip(as_configured(found, self.devices), found.values()):
                    self.executed[name] = self.executed.get(name, 0) + number
        except Exception:  # the session may be closed by now
            self.executed.is_known = False


@contextlib.contextmanager
def _noting():
    """Within, what sessions and Keras' functions run is noted by the recordings of the thread."""
    from tensorflow.python.client.session import BaseSession

    plain_run = BaseSession._do_run

    def run_session(session, handle, targets, fetches, *args, **kwargs):
        def run():
            return plain_run(session, handle, targets, fetches, *args, **kwargs)

        return _noted(run, lambda: (session, [*targets, *fetches]))

    def call_function(call, function):
        def fetched():
            fetches = [*function.outputs, function.updates_op]
            fetches += getattr(function, "fetches", None) or ()
            with fetches[0].graph.as_default():
                return sys.modules[type(function).__module__].get_session(), fetches

        return _noted(call, fetched, function)

    with patching.replaced(BaseSession, _do_run=run_session), around_calls(call_function):
        yield


def _noted(run, *fetched):
    ours = [each for each in list(_recordings) if each.thread == get_ident()]
    return ours[-1].run(run, *fetched) if ours else run()  # a callback may run another model


def _placed(session, fetches):
    """The number of operations that fetches consist of, by the device where the session runs them.

    Those to which no device was given run on the one that sessions prefer, the first GPU if any.
    """
    tf, numbers, constants = v1_names(), collections.Counter(), {}
    for op in graph.ancestors(fetches, ())[0]:
        numbers[op.device] += 1
        if op.type == "Const" and graph.is_outermost(op) and not op.control_inputs:
            constants[op.device] = op.outputs[0]
    listed = getattr(session, "list_devices", list)()  # a MonitoredSession lists none
    has_gpu = any(each.device_type == "GPU" for each in listed)
    preferred = "/device:{}:0".format("GPU" if has_gpu else "CPU")
    found = collections.Counter({preferred: numbers.pop("", 0)})
    constants = {device: constants[device] for device in numbers if device in constants}
    device_of = {constant.op.name: device for device, constant in constants.items()}
    metadata = tf.RunMetadata()
    options = tf.RunOptions(output_partition_graphs=True)
    session.run(list(constants.values()), options=options, run_metadata=metadata)
    for actual, nodes in partitions(metadata).items():
        found[actual] += sum(numbers[device_of.get(node.name)] for node in nodes)
    return found
