"""Sizes of a graph's variables, inferred for several numbers of rows.

They are inferred by Theano's ``infer_shape`` and ``perform``, without compiling, and without the
values of a batch.
"""

import contextlib
import functools
import sys
from typing import Any, Dict, List, Optional

import numpy as np
from theano import tensor
from theano.compile.ops import Shape, Shape_i

#: Numbers of rows. A size that is the same for all of these, or in proportion, is so for any.
ROWS = (1, 2, 3, 7, 100003)

#: How many elements a value may have that is computed: it is for sizes, not for samples.
_MOST = 1000

_constant = functools.lru_cache(None)(tensor.constant)  # to make one takes long


class Sizes:
    """Sizes of variables, inferred node by node in the order in which a graph is computed.

    Each size is represented by a *symbol*, a scalar variable or a constant, since ``infer_shape``
    computes with variables. The numbers behind a symbol are kept beside it, one for each of
    ``ROWS``, or None where they are unknown.

    Arguments:
        of_leaves: for variables that are not computed, each dimension's size: a number, a list of
            one for each of ``ROWS``, or None where it is unknown.
        numbers: for such variables their values, one for each of ``ROWS``.
    """

    def __init__(self, of_leaves, numbers=()):
        self._numbers = dict(numbers)
        self._symbols: "Dict[Any, Any]" = {}
        for variable, sizes in of_leaves.items():
            self.set(variable, sizes)

    def dimensions(self, variable: "Any") -> "List[Any]":
        """Return for each dimension a list of sizes, or None; nothing for other than tensors."""
        return [self._numbers[symbol] for symbol in self._symbolic(variable) or ()]

    def _symbolic(self, variable):
        """Return sizes as ``infer_shape`` takes them; None if it is not a tensor."""
        if not hasattr(variable, "ndim"):
            return None
        if variable not in self._symbols:
            is_shared = hasattr(variable, "get_value")
            value = variable.container.storage[0] if is_shared else getattr(variable, "data", ())
            has_value = len(np.shape(value)) == variable.ndim
            self.set(variable, np.shape(value) if has_value else None)
        return self._symbols[variable]

    def shape(self, variable: "Any") -> "Optional[List[Optional[int]]]":
        """Return the sizes, None for those that are unknown or depend on the number of rows."""
        if not hasattr(variable, "ndim"):
            return None
        dimensions = self.dimensions(variable)
        return [sizes[0] if sizes and len(set(sizes)) == 1 else None for sizes in dimensions]

    def grown(self, variable: "Any") -> "List[int]":
        """Return the dimensions whose sizes are unknown or depend on the number of rows."""
        return [axis for axis, size in enumerate(self.shape(variable) or []) if size is None]

    def in_proportion(self, variable: "Any", axis: int) -> bool:
        """Return whether a dimension grows in proportion to the number of rows."""
        sizes = self.dimensions(variable)[axis]
        return sizes is not None and all(n * sizes[0] == s * ROWS[0] for n, s in zip(ROWS, sizes))

    def infer(self, node: "Any") -> None:
        """Infer the sizes of a node's outputs."""
        try:
            direct = _DIRECT.get(type(node.op).__name__)
            shapes = direct and direct(self, node)
            shapes = shapes or node.op.infer_shape(node, list(map(self._symbolic, node.inputs)))
        except Exception:  # it has no infer_shape, or that fails
            shapes = [None] * len(node.outputs)
        for variable, shape in zip(node.outputs, shapes):
            self.set(variable, shape)

    def set(self, variable: "Any", shape: "Any") -> None:
        """Set the sizes of a variable; other values than tensors have none.

        Arguments:
            variable: the variable.
            shape: for each dimension None, a list, a number or a result of ``infer_shape``; or None
                where no size is known.
        """
        if hasattr(variable, "ndim"):
            shape = [None] * variable.ndim if shape is None else shape
            # Whether a sparse matrix has a size of 1 is unknown.
            ones = getattr(variable, "broadcastable", (False,) * len(shape))
            sizes = (1 if is_one else size for size, is_one in zip(shape, ones))
            self._symbols[variable] = tuple(map(self._symbol, sizes))

    def _symbol(self, size):
        numbers = self.numbers(size) if hasattr(size, "owner") else size
        if numbers is not None:
            numbers = list(map(np.int64, _for_each(numbers)))
        constant = numbers is not None and len(set(numbers)) == 1
        symbol = _constant(numbers[0]) if constant else tensor.lscalar()
        self._numbers[symbol] = numbers
        return symbol

    def _from_input(self, node):
        """Return the outputs' sizes; those of the last one are the values of the second input.

        None if a size is -1, which is to be inferred.
        """
        numbers = self.numbers(node.inputs[1])
        if numbers is None or np.less(numbers, 0).any():
            return None
        return [None] * (len(node.outputs) - 1) + [list(map(list, zip(*numbers)))]

    def _branched(self, node):
        """Return sizes that both branches have."""
        dimensions = [self.dimensions(variable) for variable in node.inputs[1:]]
        pairs = zip(dimensions[: node.op.n_outs], dimensions[node.op.n_outs :])
        return [[size if size == other else None for size, other in zip(*pair)] for pair in pairs]

    # Numbers -------------------------------------------------------------------------------------

    def numbers(self, variable: "Any") -> "Any":
        """Return a variable's values for each of ``ROWS`` if it depends on sizes alone, or None."""
        if variable not in self._numbers:
            self._numbers[variable] = None  # meanwhile
            with contextlib.suppress(Exception):  # it has no ``perform``, or refuses these
                self._numbers[variable] = self._computed(variable)
        return self._numbers[variable]

    def constant(self, variable: "Any") -> "Any":
        """Return the value of a variable that is the same for any number of rows, or None."""
        numbers: "Any" = None if self.grown(variable) else self.numbers(variable)
        same = numbers is not None and all(np.array_equal(numbers[0], n) for n in numbers)
        return numbers[0] if same else None

    def _computed(self, variable):
        node = variable.owner
        if node is None:
            return [variable.data] * len(ROWS) if hasattr(variable, "data") else None
        if isinstance(node.op, Shape_i):
            return self.dimensions(node.inputs[0])[node.op.i]
        if isinstance(node.op, Shape):
            dimensions = self.dimensions(node.inputs[0])  # an error where one is not known
            return list(np.array(dimensions, int).reshape(-1, len(ROWS)).T)  # also of a scalar
        inputs = [self.numbers(source) for source in node.inputs]
        if not inputs or None in inputs or any(np.size(v) > _MOST for vs in inputs for v in vs):
            return None
        return [self._performed(variable, values) for values in zip(*inputs)]

    def _performed(self, variable, values):
        """Return the value of a variable, computed of those of its node's inputs."""
        node, done = variable.owner, {output: [False] for output in variable.owner.outputs}
        storage = {source: [value] for source, value in zip(node.inputs, values)}
        storage.update((output, [None]) for output in node.outputs)
        node.op.prepare_node(node, None, None, "py")
        node.op.make_py_thunk(node, storage, done, [])()
        return storage[variable][0]

    def takes_all(self, part: slice, variable: "Any", axis: int) -> bool:
        """Return whether a slice takes all of a dimension, in order."""
        bounds = [part.start, part.stop, part.step]
        numbers = [self.numbers(b) if hasattr(b, "owner") else _for_each(b) for b in bounds]
        sizes = self.dimensions(variable)[axis] or _for_each(sys.maxsize)  # they are unknown
        return None not in numbers and all(
            slice(*ends).indices(size) == (0, size, 1) for *ends, size in zip(*numbers, sizes)
        )


def _for_each(number):
    """Return a list with a number for each of ``ROWS``."""
    return number if isinstance(number, list) else [number] * len(ROWS)


# In place of ``infer_shape``, which gives less.
_DIRECT = {
    "IfElse": Sizes._branched,
    "Reshape": Sizes._from_input,
    "mrg_uniform": Sizes._from_input,
}
