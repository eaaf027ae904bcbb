"""Side effects of the Python functions (``py_func``) that a graph's operations call.

A list that grows, a counter, NumPy's random numbers: each replica's call would change it again, and
so would a trial and a verified step.
"""

import contextlib
import random
from typing import Any, Iterator

from ..._runtime.effects import Effects
from ..._runtime.on_demand import numpy as np


def is_call(op: "Any") -> bool:
    """Return whether an operation calls a Python function."""
    return op.type in ("PyFunc", "PyFuncStateless", "EagerPyFunc")


class PythonFunctions:
    """Python functions that operations call, and a snapshot of the state that they can change.

    Arguments:
        operations: operations of a graph, of any kind.

    Attributes:
        changing: the operations that have had side effects.
    """

    def __init__(self, operations):
        self.changing = set()
        generators = [np.random.mtrand._rand, random._inst]
        self._effects = {
            op: Effects([_function_of(op), *generators], _is_value)
            for op in operations
            if is_call(op)
        }
        self._note()

    def _note(self):
        for effects in self._effects.values():
            effects.note()

    @contextlib.contextmanager
    def unchanged(self) -> "Iterator[None]":
        """Restore all that they can change after a block, and record which have changed it."""
        self._note()
        try:
            yield
        finally:
            for op, effects in self._effects.items():
                if effects.has_drawn() or effects.changes():
                    self.changing.add(op)
            self.put_back()

    def put_back(self) -> None:
        """Restore the state of when this was made, or of when the last such block began."""
        for effects in self._effects.values():
            effects.restore(randoms=True)


def _function_of(op):
    from tensorflow.python.ops import script_ops

    function = script_ops._py_funcs._funcs.get(op.get_attr("token").decode())
    return getattr(function, "_func", function)  # of tf.py_function()


def _is_value(value):
    """Return whether a value is the framework's, which no call changes."""
    package = type(value).__module__.partition(".")[0]
    return package in ("tensorflow", "tensorflow_core", "keras", "google")
