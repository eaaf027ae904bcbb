"""Which devices executed the first step of a model, as TensorFlow reports it.

A session reports the partitions of the graph that it ran, device by device, but what Keras runs in
it is compiled for many runs: to have these report would compile all of it a second time, which
takes longer than the step. So it is noted which functions and fetches ran. A session places each
operation of its graph once, whatever is fetched. So afterwards it runs one operation that they
consist of for each device, and reports where that was.
"""

import collections
import contextlib
import sys
import threading
from _thread import get_ident

from ..._runtime import patching, work
from ..._runtime.usage import Executed
from . import graph
from .timeline import as_configured, keras_functions, partitions

_lock = threading.RLock()
_recordings = []  # type: list  # of all that record now
_patches = contextlib.ExitStack()


@contextlib.contextmanager
def by_device(devices):
    """Within, the first step of this thread is recorded; yields an ``Executed``.

    Arguments:
        devices: their names, as configured.
    """
    recording = _Recording(devices)
    try:
        with _lock:
            if not _recordings:
                _patches.enter_context(_noting())
            _recordings.append(recording)
        yield recording.executed
    finally:
        recording.end()


class _Recording:
    """What one thread runs, until a batch has been counted."""

    def __init__(self, devices):
        self.thread, self.devices = get_ident(), devices
        self.executed = Executed()
        self.before = work.batches()
        self.is_running = False  # a function, which may run a session
        self.ran = []  # type: list  # pairs of a session and what it fetched

    def run(self, fetches_of, run, *args, **kwargs):
        """Call ``run``; ``fetches_of()`` gives its session, and what it fetches, afterwards."""
        if self.ran and self.before != work.batches():
            self.end()  # of the step before
            return run(*args, **kwargs)
        if self.is_running:
            return run(*args, **kwargs)
        self.is_running = True
        try:
            return run(*args, **kwargs)
        finally:
            self.is_running = False
            self.ran.append(fetches_of())

    def end(self):
        with _lock:
            if self not in _recordings:
                return
            _recordings.remove(self)
            if not _recordings:
                _patches.close()
        fetched = collections.defaultdict(set)  # type: Any
        for session, fetches in self.ran:
            fetched[session].update(fetches)
        try:
            for session, fetches in fetched.items():
                for device, number in _placed(session, fetches).items():
                    name = as_configured([device], self.devices)[0]
                    self.executed[name] = self.executed.get(name, 0) + number
        except Exception:  # the session may be closed by now
            self.executed.is_known = False


@contextlib.contextmanager
def _noting():
    """Within, what sessions and Keras' functions run is noted by all recordings of the thread."""
    from tensorflow.python.client.session import BaseSession

    plain_run = BaseSession._do_run

    def run_session(session, handle, targets, fetches, *args, **kwargs):
        call = plain_run, session, handle, targets, fetches
        return _noted(lambda: (session, [*targets, *fetches]), *call, *args, **kwargs)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patching.replaced(BaseSession, _do_run=run_session))
        for kind in keras_functions():
            patches.enter_context(patching.replaced(kind, __call__=_noting_function(kind)))
        yield


def _noting_function(kind):
    plain_call, module = kind.__call__, sys.modules[kind.__module__]

    def call(function, *args, **kwargs):
        def fetches():
            ran = [*function.outputs, function.updates_op, *getattr(function, "fetches", ())]
            with ran[0].graph.as_default():
                return module.get_session(), ran

        return _noted(fetches, plain_call, function, *args, **kwargs)

    return call


def _noted(fetches, run, *args, **kwargs):
    recording = next((each for each in list(_recordings) if each.thread == get_ident()), None)
    if recording is None:
        return run(*args, **kwargs)
    return recording.run(fetches, run, *args, **kwargs)


def _placed(session, fetches):
    """The number of operations that fetches consist of, by the device where the session runs them.

    Those are counted that have been given a device, and one of each that takes no input is run.
    """
    tf, numbers, constants = graph.v1_names(), collections.Counter(), {}
    for op in graph.ancestors(fetches, ())[0]:
        numbers[op.device] += 1
        if op.type == "Const" and graph.is_outermost(op) and not op.control_inputs:
            constants[op.device] = op.outputs[0]
    options = tf.RunOptions(output_partition_graphs=True)
    found = collections.Counter()  # type: Any
    for device, constant in constants.items():
        metadata = tf.RunMetadata()
        session.run(constant, options=options, run_metadata=metadata)
        for actual in partitions(metadata):
            found[actual] += numbers[device]
    return found
