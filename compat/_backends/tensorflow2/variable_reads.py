"""Reads of variables within a replica, which get the copies on its device."""

import contextlib
import functools
import importlib
import threading
from typing import Any, Dict, Iterator, Optional, Set, Tuple

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from ..._runtime import patching
from .graph import recording

_VARIABLE = resource_variable_ops.BaseResourceVariable

# Graphs that belong to the graph around them. Those of functions are kept for other calls.
_BODIES = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


class Copies:
    """Copies of variables on one device, made in the present graph, or eagerly.

    Arguments:
        tensors: the copies, by the ids of the variables' handles. Variables are not held.

    Attributes:
        were_read: the keys of those that were read.
    """

    def __init__(self, tensors: "Dict[int, tf.Tensor]") -> None:
        self.tensors = tensors
        self.were_read: "Set[int]" = set()
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def of(self, variable: "Any") -> "Optional[tf.Tensor]":
        """Return the copy of a variable that is read now; None if there is none for this graph."""
        key = id(variable._handle)
        if key not in self.tensors or not self._is_of_this_graph():
            return None
        self.were_read.add(key)
        if self._graph is not None or recording():
            resource_variable_ops.variable_accessed(variable)  # for tapes, as if it had been read
        return self.tensors[key]

    def _is_of_this_graph(self):
        if self._graph is None or tf.executing_eagerly():
            return self._graph is None and tf.executing_eagerly()
        graph = tf.compat.v1.get_default_graph()
        while graph is not self._graph and type(graph).__name__ in _BODIES:
            graph = graph.outer_graph
        return graph is self._graph


class _ThreadCopies(threading.local):
    """State of one thread: the copies that stand for variables."""

    copies: "Optional[Copies]" = None


_thread = _ThreadCopies()


def _reads():
    """Return the functions that read variables, as ``SharedPatches`` takes them."""
    return [(_VARIABLE, "_read_variable_op", _reading), (*fast_path(), _executing)]


_patches = patching.SharedPatches(_reads)


def fast_path() -> "Tuple[Any, str]":
    """Return the module, and the name, of the function that executes an operation eagerly.

    It reads variables among its arguments in C++.
    """
    name = "TFE_Py_FastPathExecute"
    module = importlib.import_module(_VARIABLE.__module__.split(".ops.")[0])
    wrapper = getattr(module, "pywrap_tfe", None)  # from TensorFlow 2.2
    return (wrapper if hasattr(wrapper, name) else module.pywrap_tensorflow), name


@contextlib.contextmanager
def redirected(copies: "Copies") -> "Iterator[None]":
    """Let this thread read copies in place of the variables that have one."""
    if not copies.tensors:
        yield
        return
    before = _thread.copies
    with _patches:
        _thread.copies = copies
        try:
            yield
        finally:
            _thread.copies = before


def _reading(read):
    def _read_variable_op(self, *args, **kwargs):
        copy = _thread.copies and _thread.copies.of(self)
        return read(self, *args, **kwargs) if copy is None else copy

    return _read_variable_op


def _executing(execute):
    def with_copies(*args):
        copies = _thread.copies
        if copies is not None:
            args = [a if _has_none(type(a)) else _with_copies(copies, a) for a in args]
        return execute(*args)

    return with_copies


@functools.lru_cache(maxsize=1000)
def _has_none(kind):
    """Return whether arguments of a type contain no variables: it costs less than isinstance."""
    return not issubclass(kind, (_VARIABLE, list, tuple))


def _with_copies(copies, argument):
    if isinstance(argument, (list, tuple)):
        return [a if _has_none(type(a)) else _with_copies(copies, a) for a in argument]
    copy = copies.of(argument)
    return argument if copy is None else copy
