"""State that TensorFlow and Keras keep for each thread, carried over to another one."""

import contextlib
import copy
import sys
from typing import Any, Callable, ContextManager, Dict, Iterator

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.ops import summary_ops_v2, variable_scope

from . import op_callbacks

# Attributes of TensorFlow's state of a thread, which has no dictionary from 2.4 on.
_EAGER = (
    "device_spec", "device_name", "is_eager", "mode", "scope_name", "function_call_options",
    "executor", "op_callbacks", "invoking_op_callbacks", "summary_writer", "summary_recording",
    "summary_recording_distribution_strategy", "summary_step",
)  # fmt: skip

# Modules of Keras, with the names of their ``threading.local`` objects.
_KERAS = [
    (package + module, name)
    for package in ("keras.src.", "keras.", "tf_keras.src.", "tensorflow.python.keras.")
    for module, name in (
        ("backend", "_DUMMY_EAGER_GRAPH"),
        ("engine.base_layer_utils", "_call_context"),
        ("mixed_precision.autocast_variable", "_autocast_dtype"),
        ("backend.common.global_state", "GLOBAL_STATE_TRACKER"),
        ("backend.common.global_state", "GLOBAL_SETTINGS_TRACKER"),
    )
]


def callers_state() -> "Callable[[], ContextManager[None]]":
    """Return a function that returns the context in which a thread has this one's state.

    Gradient tapes do not belong to it: TensorFlow has no way to carry them over.
    """
    running = context.context()
    eager = running._thread_local_data
    of_eager = {name: getattr(eager, name) for name in _EAGER if hasattr(eager, name)}
    of_eager = _copies(of_eager)
    policy = running.device_policy
    values = [(local, _copies(vars(local))) for local in _locals()]

    @contextlib.contextmanager
    def entered():
        for name, value in _copies(of_eager).items():
            setattr(eager, name, value)
        running.device_policy = policy
        for local, attributes in values:
            for name, value in _copies(attributes).items():
                setattr(local, name, value)
        yield

    return entered


def _locals() -> "Iterator[Any]":
    """Yield ``threading.local`` objects."""
    yield from (ops._default_graph_stack, context.context().context_switches, ag_ctx.stacks)
    graphs = list(ops._default_graph_stack.stack) + [tf.compat.v1.get_default_graph()]
    yield from {id(graph): graph._thread_local for graph in graphs}.values()
    yield from (variable_scope.get_variable_scope_store(), op_callbacks.of_threads)
    if hasattr(summary_ops_v2, "_summary_state"):
        yield summary_ops_v2._summary_state
    for module, name in _KERAS:
        local = getattr(sys.modules.get(module), name, None)
        if local is not None:
            yield local


def _copies(attributes: "Dict[str, Any]") -> "Dict[str, Any]":
    """Return attributes with copies of what a thread changes while it runs: stacks, contexts."""
    return {name: _copy(value) for name, value in attributes.items()}


def _copy(value):
    if type(value).__name__ == "TraceableStack":
        return value.copy()
    return copy.copy(value) if isinstance(value, list) or _is_context(value) else value


def _is_context(value):
    return type(value).__name__ == "CallContext"  # of Keras
