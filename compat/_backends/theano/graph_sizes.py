"""The sizes of a graph's variables for several numbers of rows, and numbers computed from them.

By Theano's own ``infer_shape`` and ``perform``: nothing is compiled, and no row is looked at.
"""

import contextlib

import numpy as np

#: Numbers of rows. What is the same for all of these, or in proportion, is so for any.
ROWS = (1, 2, 3, 7, 100003)

_MOST = 1000  # elements of what is computed: sizes, not rows


class Sizes:
    """Sizes of variables, which are given in the order in which they are computed.

    Arguments:
        given: for variables that are not computed, the sizes of each dimension: a list, a size for
            each of ``ROWS``; or None where it is not known.
        numbers: for such variables their values, one for each of ``ROWS``.
    """

    def __init__(self, given, numbers=()):
        self._sizes = dict(given)
        self._numbers = dict(numbers)
        self._symbols = {}  # type: dict

    def dimensions(self, variable):
        """For each dimension a list of sizes, or None. What is no tensor has none."""
        if variable not in self._sizes:
            self._sizes[variable] = self._of_leaf(variable)
        return self._sizes[variable]

    def _of_leaf(self, variable):
        shape = np.shape(getattr(variable, "data", ()))
        if hasattr(variable, "get_value"):
            shape = np.shape(variable.container.storage[0])
        pattern = _pattern(variable)
        known = len(shape) == len(pattern)
        return [
            [shape[axis]] * len(ROWS) if known else [1] * len(ROWS) if is_one else None
            for axis, is_one in enumerate(pattern)
        ]

    def shape(self, variable):
        """The sizes, None for those that are not known or change with the number of rows."""
        if not hasattr(variable, "ndim"):
            return None
        return [
            sizes[0] if sizes is not None and len(set(sizes)) == 1 else None
            for sizes in self.dimensions(variable)
        ]

    def grown(self, variable):
        """The dimensions whose sizes are not known or change with the number of rows."""
        return [axis for axis, size in enumerate(self.shape(variable) or []) if size is None]

    def in_proportion(self, variable, axis):
        sizes = self.dimensions(variable)[axis]
        return sizes is not None and all(n * sizes[0] == s * ROWS[0] for n, s in zip(ROWS, sizes))

    def infer(self, node):
        """Find the sizes of a node's outputs."""
        try:
            direct = _DIRECT.get(type(node.op).__name__)
            found = None if direct is None else direct(self, node)
            if found is None:
                found = node.op.infer_shape(node, list(map(self._symbolic, node.inputs)))
        except Exception:  # it has none, or cannot tell
            found = [None] * len(node.outputs)
        for variable, shape in zip(node.outputs, found):
            if hasattr(variable, "ndim"):
                self.set(variable, [None] * variable.ndim if shape is None else shape)

    def set(self, variable, shape):
        """Keep sizes: for each dimension None, a list, or what ``infer_shape`` gives."""
        self._sizes[variable] = [
            [1] * len(ROWS) if is_one else size if isinstance(size, list) else self._size(size)
            for size, is_one in zip(shape, _pattern(variable))
        ]

    def _asked(self, node):
        """The second input has the sizes of the last output, unless one is to be found."""
        numbers = self.numbers(node.inputs[1])
        if numbers is None or any(np.min(each) < 0 for each in numbers if np.size(each)):
            return None
        shape = [list(map(int, sizes)) for sizes in zip(*numbers)]
        return [None] * (len(node.outputs) - 1) + [shape]

    def _branched(self, node):
        dimensions = [self.dimensions(variable) for variable in node.inputs[1:]]
        pairs = zip(dimensions[: node.op.n_outs], dimensions[node.op.n_outs :])
        return [[size if size == other else None for size, other in zip(*pair)] for pair in pairs]

    def _symbolic(self, variable):
        """Sizes as ``infer_shape`` takes them; None for what is no tensor."""
        from theano import tensor

        if variable not in self._symbols and hasattr(variable, "ndim"):
            symbols = []
            for sizes, size in zip(self.dimensions(variable), self.shape(variable)):
                known = size is not None
                symbols.append(tensor.constant(size, dtype="int64") if known else tensor.lscalar())
                self._numbers[symbols[-1]] = None if sizes is None else list(map(np.int64, sizes))
            self._symbols[variable] = tuple(symbols)
        return self._symbols.get(variable)

    def _size(self, symbol):
        if symbol is None or not hasattr(symbol, "owner"):
            return symbol if symbol is None else [int(symbol)] * len(ROWS)
        numbers = self.numbers(symbol)
        return None if numbers is None else [int(number) for number in numbers]

    # Numbers -------------------------------------------------------------------------------------

    def numbers(self, variable):
        """The values of what follows from sizes alone, for each of ``ROWS``; or None."""
        if variable not in self._numbers:
            self._numbers[variable] = None  # meanwhile
            with contextlib.suppress(Exception):  # it has no `perform`, or refuses these
                self._numbers[variable] = self._computed(variable)
        return self._numbers[variable]

    def is_constant(self, variable):
        """Whether this follows from sizes alone, and is the same for any number of rows."""
        if None in (self.shape(variable) or ()):
            return False
        numbers = self.numbers(variable)
        return numbers is not None and all(np.array_equal(numbers[0], each) for each in numbers)

    def _computed(self, variable):
        from theano.compile.ops import Shape, Shape_i

        node = variable.owner
        if node is None:
            return [variable.data] * len(ROWS) if hasattr(variable, "data") else None
        if isinstance(node.op, (Shape, Shape_i)):
            dimensions = self.dimensions(node.inputs[0])
            if isinstance(node.op, Shape_i):
                sizes = dimensions[node.op.i]
                return None if sizes is None else [np.array(size) for size in sizes]
            return None if None in dimensions else list(map(np.array, zip(*dimensions)))
        given = [self.numbers(each) for each in node.inputs]
        if None in given or any(np.size(e) > _MOST for each in given for e in each):
            return None
        place = node.outputs.index(variable)
        return [self._performed(node, list(inputs))[place] for inputs in zip(*given)]

    def _performed(self, node, inputs):
        from theano.gof.graph import NoParams

        storage = [[None] for _ in node.outputs]
        node.op.prepare_node(node, None, None, "py")
        params = node.run_params()
        params = () if params is NoParams else (node.params_type.filter(params),)
        node.op.perform(node, inputs, storage, *params)
        return [value for (value,) in storage]


def _pattern(variable):
    """For each dimension, whether its size is 1. Of sparse matrices that is not known."""
    return getattr(variable, "broadcastable", (False,) * getattr(variable, "ndim", 0))


_DIRECT = {
    "IfElse": Sizes._branched,
    "Reshape": Sizes._asked,
    "mrg_uniform": Sizes._asked,
}
