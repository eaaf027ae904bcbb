"""Replicas that need values of each other while they run: threads that hand over to one another.

One thread runs at a time, in the order of replicas, and goes on until it needs a value of the whole
batch. The caller's thread waits meanwhile, so that Ctrl-C and errors end all of them.
"""

import contextlib
import contextvars  # novm
import sys
import threading
from typing import Any, Callable, Iterator, List, Sequence

import torch
from torch.utils import _python_dispatch

from ..._rows.splitting import unsplit
from .merging import NotMergeable


class Stopped(BaseException):
    """Another replica has failed, or the call was interrupted."""


class Turn:
    """One replica's thread.

    Attributes:
        suspensions: functions that take out of the model what the replica has set up there. Each
            returns a function that puts it back.
    """

    def __init__(self, index: int, threads: "ReplicaThreads", function: "Callable[[Turn], Any]"):
        self.index, self.threads, self.function = index, threads, function
        self.suspensions: "List[Callable[[], Callable[[], Any]]]" = []
        self.lock = _locked()
        self.outcome: Any = None
        self.error: Any = None
        self.is_finished = False
        self.request: Any = None  # what it waits for: a key, its value, and a function of all
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        self.lock.acquire()
        try:
            if not self.threads.is_stopped:
                with self.threads.caller_state.entered():
                    self.outcome = self.function(self)
        except BaseException as error:
            self.error = error
        self.is_finished = True
        _release(self.threads.returned)

    def meet(self, key: Any, value: Any, merge: "Callable[[List[Any]], Any]") -> Any:
        """Return what ``merge`` returns for the values of all replicas.

        Arguments:
            key: the same in each of them.
            value: this replica's.
            merge: a function, which is called once.
        """
        with torch._C.DisableTorchFunction():
            put_back = [suspend() for suspend in self.suspensions]
            self.request = key, value, merge, torch.is_grad_enabled()
            _release(self.threads.returned)
            self.lock.acquire()
            self.request = None
            self.check()
            for function in reversed(put_back):
                function()
            return self.threads.merged

    def check(self) -> None:
        """Check that the replicas go on.

        Raises:
            Stopped: they do not.
        """
        if self.threads.is_stopped:
            raise Stopped


def _locked():
    """Return a lock that one thread acquires, and waits until another one releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _release(lock):
    """Release a lock, which an interruption may have left released."""
    with contextlib.suppress(RuntimeError):
        lock.release()


class ReplicaThreads:
    """The threads of one call's replicas.

    Arguments:
        functions: what each runs, given its ``Turn``.
        names: the devices' names.
    """

    def __init__(self, functions: "Sequence[Callable[[Turn], Any]]", names: "Sequence[str]"):
        self.is_stopped, self.merged = False, None
        self.returned = _locked()
        self.caller_state = _CallerState(names)
        self.turns = [Turn(index, self, function) for index, function in enumerate(functions)]

    def run(self) -> "List[Any]":
        """Return what each function has returned; the first error ends all."""
        try:
            for turn in self.turns:
                turn.thread.start()
            while not all(turn.is_finished for turn in self.turns):
                for turn in self.turns:
                    _release(turn.lock)
                    self.returned.acquire()
                    if turn.error is not None:
                        raise turn.error
                self._merge()
        finally:
            interruption = None
            while True:
                try:
                    self._stop()
                    break
                except KeyboardInterrupt as error:  # one more of them
                    interruption = error
            if interruption is not None:
                raise interruption
        return [turn.outcome for turn in self.turns]

    def _merge(self):
        """Merge the values that all replicas have come with, or none."""
        requests = [turn.request for turn in self.turns if not turn.is_finished]
        if requests:
            keys, values, merges, grads = zip(*requests)
            if len(requests) < len(self.turns) or len(set(zip(keys, grads))) > 1:
                raise NotMergeable()
            with torch.set_grad_enabled(grads[0]):
                self.merged = merges[0](list(values))

    def _stop(self):
        """End the threads that run: that whose turn it is at its next function, then the others."""
        self.is_stopped = True
        waiting = [turn for turn in self.turns if turn.request is not None]
        for turn in [turn for turn in self.turns if turn not in waiting] + waiting:
            while turn.thread.is_alive():
                _release(turn.lock)
                turn.thread.join(0.01)


class _CallerState:
    """What torch, Keras and Python keep for each thread, as the caller's thread has it now."""

    def __init__(self, names):
        self.context = contextvars.copy_context()  # novm
        self.is_grad_enabled = torch.is_grad_enabled()
        types = sorted({"cpu", *(name.partition(":")[0] for name in names)})
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in types
        ]
        self.caches_casts = torch.is_autocast_cache_enabled()
        self.functions = torch.overrides._get_current_function_mode_stack()
        self.dispatched = _python_dispatch._get_current_dispatch_mode_stack()
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
        self.saved_tensors = top(False)
        gpus = [name for name in names if name.startswith("cuda")]
        self.gpu = torch.cuda.current_device() if gpus else None
        self.streams = [torch.cuda.current_stream(name) for name in gpus]
        self.values = [
            (local, {k: list(v) if type(v) is list else v for k, v in vars(local()).items()})
            for local in _locals()
        ]

    @contextlib.contextmanager
    def entered(self) -> "Iterator[None]":
        """Return the context in which the present thread has this state."""
        for variable, value in self.context.items():
            variable.set(value)
        for local, values in self.values:
            for name, value in values.items():
                setattr(local(), name, value)
        for stream in self.streams:
            torch.cuda.set_stream(stream)
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
        for kind, is_enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.caches_casts)
        with contextlib.ExitStack() as afterwards:
            afterwards.enter_context(torch.set_grad_enabled(self.is_grad_enabled))
            afterwards.enter_context(unsplit)
            if self.saved_tensors is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*self.saved_tensors)
                afterwards.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            for mode in self.dispatched:
                _python_dispatch._push_mode(mode)
                afterwards.callback(_python_dispatch._pop_mode)
            for mode in self.functions:
                torch._C._push_on_torch_function_stack(mode)
                afterwards.callback(torch._C._pop_torch_function_stack)
            yield


def _locals():
    """Return functions that get the ``threading.local()`` objects of torch and of Keras."""
    functions = [lambda: torch._GLOBAL_DEVICE_CONTEXT]
    state = sys.modules.get("keras.src.backend.common.global_state")
    names = ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")
    functions += [lambda name=name: getattr(state, name) for name in names if hasattr(state, name)]
    return functions
