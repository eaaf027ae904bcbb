"""State that MXNet keeps for each thread, carried over to another one."""

import contextlib
import threading
from _thread import get_ident
from typing import Any, Callable, ContextManager, Iterator

import mxnet as mx

_callers = threading.local()  # ``number``: of the thread whose state this one has


def caller() -> int:
    """Return the number of the thread whose state this one has, or of this one."""
    return getattr(_callers, "number", None) or get_ident()


def callers_state() -> "Callable[[], ContextManager[None]]":
    """Return a function that returns the context in which a thread has this one's state."""
    number = caller()
    is_recording, is_training = mx.autograd.is_recording(), mx.autograd.is_training()
    # MXNet before 1.5 has no numpy mode.
    is_np_shape = getattr(getattr(mx, "util", None), "is_np_shape", None)
    has_np_shape = is_np_shape is not None and is_np_shape()
    values = [(local, dict(vars(local))) for local in _locals()]

    @contextlib.contextmanager
    def entered():
        _callers.number = number
        for local, attributes in values:
            for name, value in attributes.items():
                setattr(local, name, value)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mx.autograd._RecordingStateScope(is_recording, is_training))
            if is_np_shape is not None:
                stack.enter_context(mx.util.np_shape(has_np_shape))
            yield

    return entered


def _locals() -> "Iterator[Any]":
    """Yield the ``threading.local`` objects of MXNet."""
    scopes = [
        (mx.Context, "_default_ctx"),
        (mx.name.NameManager, "_current"),
        (mx.attribute.AttrScope, "_current"),
        (mx.gluon.block._BlockScope, "_current"),
        (getattr(getattr(mx, "util", None), "_NumpyArrayScope", None), "_current"),
    ]
    for kind, name in scopes:
        # Before MXNet 1.3 some of them are one object for all threads.
        local = vars(kind).get(name) if kind is not None else None
        if hasattr(local, "__dict__"):
            yield local
