"""Calls of MXNet's operations on arrays, which all of its functions make by a single one."""

import ctypes
import functools
import threading
from typing import Any, Callable, List, Optional

import mxnet as mx

from ..._runtime import patching


class Interception:
    """A function through which calls of operations pass, in all threads, until it is taken back.

    Arguments:
        handler: a function of the call as it would be made, and of its arguments: the operation's
            handle, its input arrays, the names and values of its attributes, ``out``, and others
            that depend on the version. A handler that is there several times is called once.
    """

    def __init__(self, handler: "Callable[..., Any]") -> None:
        self.handler = handler
        _interceptor.set(lambda handlers: [*handlers, handler])

    def take_back(self) -> None:
        """Have calls pass by the function again."""
        _interceptor.set(self._without)

    def _without(self, handlers):
        place = handlers.index(self.handler)
        return handlers[:place] + handlers[place + 1 :]


class _Interceptor:
    """The patch of MXNet's function, as long as there are handlers."""

    def __init__(self):
        self.lock = threading.Lock()
        self.handlers: "List[Any]" = []
        self.distinct: "List[Any]" = []
        self.patch: "Optional[patching.Patch]" = None

    def set(self, changed):
        with self.lock:
            self.handlers = changed(self.handlers)
            self.distinct = list(dict.fromkeys(self.handlers))
            if self.patch is None:
                self.patch = self._patch()
            elif not self.handlers:
                self.patch.take_back()
                self.patch = None

    def _patch(self):
        plain = mx.nd.register._imperative_invoke

        def invoke(*args, **kwargs):
            call = plain
            for handler in self.distinct:
                call = functools.partial(handler, call)
            return call(*args, **kwargs)

        return patching.Patch(mx.nd.register, "_imperative_invoke", invoke)


_interceptor = _Interceptor()


@functools.lru_cache(maxsize=None)
def handle_of(operation: str) -> "Optional[int]":
    """Return the number by which MXNet knows an operation, or None if there is none."""
    handle = ctypes.c_void_p()
    name = mx.base.c_str(operation)
    if mx.base._LIB.NNGetOpHandle(name, ctypes.byref(handle)):
        return None
    return handle.value
