"""Side effects of a graph's operations: what Python functions (``py_func``) change besides.

A list that grows, a counter, random numbers of numpy's: each replica's call would change it again,
and so would a trial and a verified step.
"""

import contextlib
import random

from ..._runtime.effects import Effects
from ..._runtime.on_demand import numpy as np


def is_call(op):
    """Return whether ``op`` calls a Python function."""
    return op.type in ("PyFunc", "PyFuncStateless", "EagerPyFunc")


class PythonFunctions:
    """The Python functions that some operations call, and what they can change as it is now.

    Arguments:
        operations: operations of a graph, of any kind.

    Attributes:
        changing: operations that have changed more than they return.
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
    def unchanged(self):
        """A block after which all that they can change is as it was before."""
        self._note()
        try:
            yield
        finally:
            for op, effects in self._effects.items():
                if effects.has_drawn() or effects.changes():
                    self.changing.add(op)
            self.put_back()

    def put_back(self):
        """Restore what was there when this was made, or when the last such block began."""
        for effects in self._effects.values():
            effects.restore(randoms=True)


def _function_of(op):
    from tensorflow.python.ops import script_ops

    function = script_ops._py_funcs._funcs.get(op.get_attr("token").decode())
    return getattr(function, "_func", function)  # of tf.py_function()


def _is_value(value):
    """Return whether it is the framework's, which no call changes."""
    package = type(value).__module__.partition(".")[0]
    return package in ("tensorflow", "tensorflow_core", "keras", "google")
