"""Listeners that are called with each operation that a thread executes."""

import threading
from typing import Any, Callable, Set

import tensorflow as tf
from tensorflow.python.eager import context, execute

from .run_metadata import lock

of_threads = threading.local()  # ``all``: the listeners of each thread
_listening: "Set[int]" = set()  # the identities of threads that have listeners


def listen(listener: "Callable[[str, Any], None]") -> None:
    """Call a listener with each operation that this thread executes from now on.

    Arguments:
        listener: a function of the type of an operation, or the name of a function, and of its
            results. It may call ``ignore()``.
    """
    listeners = of_threads.__dict__.setdefault("all", [])
    listeners.append(listener)
    with lock, tf.init_scope():  # else functions would not be reported
        _listening.add(threading.get_ident())
        _add_callback(context.context())


def ignore(listener: "Callable[[str, Any], None]") -> None:
    """Stop calling a listener of this thread."""
    listeners = of_threads.__dict__.setdefault("all", [])
    if listener in listeners:
        listeners.remove(listener)
        if not listeners:
            with lock, tf.init_scope():
                _listening.discard(threading.get_ident())
                _remove_callback(context.context())


def _call_listeners(kind, inputs, attributes, outputs, op_name=None, graph=None):
    if graph is None:  # else it is only added to that
        for listener in list(of_threads.__dict__.get("all", ())):
            listener(kind.decode() if isinstance(kind, bytes) else kind, outputs)
        return None
    return None if outputs is None else list(outputs)  # for other callbacks


def _add_callback(running):
    """Register the listeners' callback, which other code may have removed meanwhile."""
    if hasattr(running, "add_post_execution_callback"):  # TensorFlow 2.0
        if _call_listeners not in running.post_execution_callbacks:
            running.add_post_execution_callback(_call_listeners)
        execute.execute = execute.execute_with_callbacks
    else:
        from tensorflow.python.framework import op_callbacks

        op_callbacks.add_op_callback(_call_listeners)


def _remove_callback(running):
    if hasattr(running, "add_post_execution_callback"):
        # The callback is that of all threads, and other code may have removed it.
        if not _listening and _call_listeners in running.post_execution_callbacks:
            running.post_execution_callbacks.remove(_call_listeners)
        if not running.post_execution_callbacks:
            execute.execute = execute.quick_execute
    else:
        from tensorflow.python.framework import op_callbacks

        op_callbacks.remove_op_callback(_call_listeners)


def is_function(kind: str) -> bool:
    """Return whether a listener was called with a function: a graph, not a single operation."""
    return kind.startswith("__")
