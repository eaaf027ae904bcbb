"""Sizes of a graph's variables, inferred for several numbers of rows.

By Theano's own `infer_shape` and `perform`: nothing is compiled, and no row is looked at.
"""

import contextlib
import functools
import sys

import numpy as np
from theano import tensor
from theano.compile.ops import Shape, Shape_i

#: Numbers of rows. What is the same for all of these, or in proportion, is so for any.
ROWS = (1, 2, 3, 7, 100003)


_MOST = 1000  # elements of what is computed: sizes, not rows


_constant = functools.lru_cache(None)(tensor.constant)  # to make one takes long


class Sizes:
    """Sizes of variables, which are given in the order in which they are computed.

    Arguments:
        given: for variables that are not computed, the size of each dimension, or a list, a size
            for each of ``ROWS``; or None where it is not known.
        numbers: for such variables their values, one for each of ``ROWS``.
    """

    def __init__(self, given, numbers=()):
        self._numbers = dict(numbers)
        self._symbols = {}  # type: dict
        for variable, sizes in given.items():
            self.set(variable, sizes)

    def dimensions(self, variable):
        """Return a list of sizes for each dimension, or None. What is not a tensor has none."""
        return [self._numbers[symbol] for symbol in self._symbolic(variable) or ()]

    def _symbolic(self, variable):
        """Return sizes as ``infer_shape`` takes them; None for what is not a tensor."""
        if not hasattr(variable, "ndim"):
            return None
        if variable not in self._symbols:
            is_shared = hasattr(variable, "get_value")
            held = variable.container.storage[0] if is_shared else getattr(variable, "data", ())
            known = len(np.shape(held)) == variable.ndim
            self.set(variable, np.shape(held) if known else None)
        return self._symbols[variable]

    def shape(self, variable):
        """Return the sizes, None for those that are unknown or change with the number of rows."""
        if not hasattr(variable, "ndim"):
            return None
        given = self.dimensions(variable)
        return [sizes[0] if sizes and len(set(sizes)) == 1 else None for sizes in given]

    def grown(self, variable):
        """Return the dimensions whose sizes are unknown or change with the number of rows."""
        return [axis for axis, size in enumerate(self.shape(variable) or []) if size is None]

    def in_proportion(self, variable, axis):
        sizes = self.dimensions(variable)[axis]
        return sizes is not None and all(n * sizes[0] == s * ROWS[0] for n, s in zip(ROWS, sizes))

    def infer(self, node):
        """Find the sizes of a node's outputs."""
        try:
            direct = _DIRECT.get(type(node.op).__name__)
            found = direct and direct(self, node)
            found = found or node.op.infer_shape(node, list(map(self._symbolic, node.inputs)))
        except Exception:  # it has none, or cannot tell
            found = [None] * len(node.outputs)
        for variable, shape in zip(node.outputs, found):
            self.set(variable, shape)

    def set(self, variable, shape):
        """Keep sizes: for each dimension None, a list, a number, or what ``infer_shape`` gives.

        None: no size is known. What is no tensor has none.
        """
        if hasattr(variable, "ndim"):
            shape = [None] * variable.ndim if shape is None else shape
            # Of sparse matrices it is not known whether a size is 1.
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

    def _asked(self, node):
        """Return the last output's sizes, the second input's values, unless one is to be found."""
        numbers = self.numbers(node.inputs[1])
        if numbers is None or np.less(numbers, 0).any():
            return None
        return [None] * (len(node.outputs) - 1) + [list(map(list, zip(*numbers)))]

    def _branched(self, node):
        dimensions = [self.dimensions(variable) for variable in node.inputs[1:]]
        pairs = zip(dimensions[: node.op.n_outs], dimensions[node.op.n_outs :])
        return [[size if size == other else None for size, other in zip(*pair)] for pair in pairs]

    # Numbers -------------------------------------------------------------------------------------

    def numbers(self, variable):
        """Return the values of what follows from sizes alone, for each of ``ROWS``; or None."""
        if variable not in self._numbers:
            self._numbers[variable] = None  # meanwhile
            with contextlib.suppress(Exception):  # it has no `perform`, or refuses these
                self._numbers[variable] = self._computed(variable)
        return self._numbers[variable]

    def constant(self, variable):
        """Return what follows from sizes alone and is the same for any number of rows; or None."""
        numbers = None if self.grown(variable) else self.numbers(variable)
        same = numbers is not None and all(np.array_equal(numbers[0], each) for each in numbers)
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
        given = [self.numbers(each) for each in node.inputs]
        if not given or None in given or any(np.size(e) > _MOST for each in given for e in each):
            return None
        return [self._performed(variable, inputs) for inputs in zip(*given)]

    def _performed(self, variable, inputs):
        node, done = variable.owner, {each: [False] for each in variable.owner.outputs}
        storage = {each: [value] for each, value in zip(node.inputs, inputs)}
        storage.update((each, [None]) for each in node.outputs)
        node.op.prepare_node(node, None, None, "py")
        node.op.make_py_thunk(node, storage, done, [])()
        return storage[variable][0]

    def takes_all(self, part, variable, axis):
        """Return whether a slice takes all of a dimension, in order."""
        asked = [part.start, part.stop, part.step]
        ends = [self.numbers(e) if hasattr(e, "owner") else _for_each(e) for e in asked]
        sizes = self.dimensions(variable)[axis] or _for_each(sys.maxsize)  # they are not known
        return None not in ends and all(
            slice(*each).indices(size) == (0, size, 1) for *each, size in zip(*ends, sizes)
        )


def _for_each(number):
    """Return a list with a number for each of ``ROWS``."""
    return number if isinstance(number, list) else [number] * len(ROWS)


_DIRECT = {"IfElse": Sizes._branched, "Reshape": Sizes._asked, "mrg_uniform": Sizes._asked}
