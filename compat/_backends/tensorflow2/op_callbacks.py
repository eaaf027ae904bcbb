"""Listeners, called with each operation that a thread executes."""

import threading

import tensorflow as tf
from tensorflow.python.eager import context, execute

from .run_metadata import lock

_listeners = threading.local()
_listening = set()  # type: set  # the identities of threads that have listeners


def listen(listener):
    """Have a listener called with whatever this thread executes from now on.

    Arguments:
        listener: a function of the kind of an operation, or the name of a function, and of its
            results. It may call ``ignore()``.
    """
    known = _listeners.__dict__.setdefault("all", [])
    known.append(listener)
    with lock, tf.init_scope():  # else functions would not be noted
        _listening.add(threading.get_ident())
        _add_callback(context.context())


def ignore(listener):
    """Have a listener of this thread no longer called."""
    known = _listeners.__dict__.setdefault("all", [])
    if listener in known:
        known.remove(listener)
        if not known:
            with lock, tf.init_scope():
                _listening.discard(threading.get_ident())
                _remove_callback(context.context())


def _call_listeners(kind, inputs, attributes, outputs, op_name=None, graph=None):
    if graph is None:  # else it is only added to that
        for listener in list(_listeners.__dict__.get("all", ())):
            listener(kind.decode() if isinstance(kind, bytes) else kind, outputs)


def _add_callback(running):
    """Have TensorFlow call the listeners; others may have taken the callback away meanwhile."""
    if hasattr(running, "add_post_execution_callback"):  # TensorFlow 2.0
        if _call_listeners not in running.post_execution_callbacks:
            running.add_post_execution_callback(_call_listeners)
        execute.execute = execute.execute_with_callbacks
    else:
        from tensorflow.python.framework import op_callbacks

        op_callbacks.add_op_callback(_call_listeners)


def _remove_callback(running):
    if hasattr(running, "add_post_execution_callback"):
        # The callback is that of all threads, and others may have taken it away.
        if not _listening and _call_listeners in running.post_execution_callbacks:
            running.post_execution_callbacks.remove(_call_listeners)
        if not running.post_execution_callbacks:
            execute.execute = execute.quick_execute
    else:
        from tensorflow.python.framework import op_callbacks

        op_callbacks.remove_op_callback(_call_listeners)


def is_function(kind):
    """Return whether what was executed is a function: a graph, not a single operation."""
    return kind.startswith("__")
