"""How a graph of Keras' depends on the rows of a batch, and where it is cut for that.

Into what the devices compute, and what runs once.
"""

import contextlib
import functools
import sys

import numpy as np
from theano import tensor
from theano.compile.ops import Shape, Shape_i
from theano.gof import graph
from theano.ifelse import IfElse

from ... import _rows, errors
from ..._rows import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown
from . import side_effects
from .compilation import depending_on, nearest
from .rules import ARRANGING, OF_SIZES, TABLE, Drawn, drawn, frames_of, unknown

# Sizes of variables, by Theano's own `infer_shape` and `perform`: nothing is compiled, and no row
# is looked at.

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
        """For each dimension a list of sizes, or None. What is no tensor has none."""
        return [self._numbers[symbol] for symbol in self._symbolic(variable) or ()]

    def _symbolic(self, variable):
        """Sizes as ``infer_shape`` takes them; None for what is no tensor."""
        if not hasattr(variable, "ndim"):
            return None
        if variable not in self._symbols:
            is_shared = hasattr(variable, "get_value")
            held = variable.container.storage[0] if is_shared else getattr(variable, "data", ())
            known = len(np.shape(held)) == variable.ndim
            self.set(variable, np.shape(held) if known else None)
        return self._symbols[variable]

    def shape(self, variable):
        """The sizes, None for those that are not known or change with the number of rows."""
        if not hasattr(variable, "ndim"):
            return None
        given = self.dimensions(variable)
        return [sizes[0] if sizes and len(set(sizes)) == 1 else None for sizes in given]

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
        """The second input has the sizes of the last output, unless one is to be found."""
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
        """The values of what follows from sizes alone, for each of ``ROWS``; or None."""
        if variable not in self._numbers:
            self._numbers[variable] = None  # meanwhile
            with contextlib.suppress(Exception):  # it has no `perform`, or refuses these
                self._numbers[variable] = self._computed(variable)
        return self._numbers[variable]

    def constant(self, variable):
        """What follows from sizes alone, and is the same for any number of rows; or None."""
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
        """Whether a slice takes all of a dimension, in order."""
        asked = [part.start, part.stop, part.step]
        ends = [self.numbers(e) if hasattr(e, "owner") else _for_each(e) for e in asked]
        sizes = self.dimensions(variable)[axis] or _for_each(sys.maxsize)  # they are not known
        return None not in ends and all(
            slice(*each).indices(size) == (0, size, 1) for *each, size in zip(*ends, sizes)
        )


def _for_each(number):
    """One for each of ``ROWS``."""
    return number if isinstance(number, list) else [number] * len(ROWS)


_DIRECT = {"IfElse": Sizes._branched, "Reshape": Sizes._asked, "mrg_uniform": Sizes._asked}


# How variables depend on the rows --------------------------------------------------------------


class VariableRows:
    """How the variables of a graph depend on the rows, followed from its inputs on.

    Arguments:
        placements: those of the graph's inputs that have rows.
        sizes: a ``Sizes`` for its inputs.

    Attributes:
        placements: of all variables that were followed, in the order in which they are computed.
        changing: operations of the user's that change more than they return.
    """

    changing = frozenset()  # type: frozenset

    def __init__(self, placements, sizes):
        self.placements = dict(placements)
        self.sizes = sizes

    def follow(self, wanted):
        """Find the placements of what these variables depend on, and return this."""
        for node in graph.io_toposort([], wanted):
            self.sizes.infer(node)
            for variable, placement in zip(node.outputs, self._after(node)):
                if isinstance(placement, Count) and self.sizes.constant(variable) is not None:
                    placement = REPLICATED
                self.placements[variable] = placement
        return self

    def of(self, variable):
        return self.placements.get(variable, REPLICATED)

    def value(self, variable):
        placement = self.of(variable)
        if isinstance(placement, Drawn):
            placement = self.as_drawn(variable)
        return _rows.Value(placement, self.sizes.shape(variable))

    def as_drawn(self, variable):
        """Where random numbers have rows: along the one dimension that grows with them."""
        grown = self.sizes.grown(variable)
        if not grown:
            return REPLICATED
        whole = len(grown) == 1 and self.sizes.in_proportion(variable, grown[0])
        return Sharded(grown[0], inner=None) if whole else Mixed()

    def _after(self, node):
        if node.op in self.changing:
            return [Mixed()] * len(node.outputs)
        name, rule = _entry(node.op)
        given = [self.of(variable) for variable in node.inputs]
        kinds = set(map(type, given))
        if kinds <= {Replicated} and rule is not drawn:
            return [REPLICATED] * len(node.outputs)
        if Drawn in kinds and kinds <= {Replicated, Count, Drawn} and name in ARRANGING:
            return [Drawn()] * len(node.outputs)
        values = [self.value(variable) for variable in node.inputs]
        found = _rows.without_rows([value.placement for value in values])
        if found is None or rule in OF_SIZES:
            found = rule(node, values, self)
        return found if isinstance(found, list) else [found] * len(node.outputs)

    def inside(self, pairs, wanted):
        """Follow the graph inside of an operation.

        Arguments:
            pairs: for its inputs: the variable there, the one here that its values are from, its
                placement, and how many of that one's first dimensions it lacks.
            wanted: variables in there.
        """
        sizes = Sizes(
            {v: self.sizes.dimensions(outer)[lacking:] for v, outer, _, lacking in pairs},
            {v: self.sizes.numbers(outer) for v, outer, _, lacking in pairs if not lacking},
        )
        return VariableRows({v: placement for v, _, placement, _ in pairs}, sizes).follow(wanted)


def _entry(op):
    """The name and the rule of an operation: of Theano's own, not of a user's class."""
    if type(op).__module__.partition(".")[0] == "theano":
        for kind in type(op).__mro__:
            if kind.__name__ in TABLE:
                return kind.__name__, TABLE[kind.__name__]
    return type(op).__name__, unknown


# Where the graph is cut ------------------------------------------------------------------------


class Cut:
    """A variable that leaves the body.

    Attributes:
        variable: the variable.
        placement: how it depends on the rows: ``Sharded``, or ``Unknown`` until it is tried.
    """

    def __init__(self, variable, placement):
        self.variable = variable
        self.placement = placement

    def merge(self, parts, sizes):
        """What the devices computed, as one, their rows in order."""
        return np.concatenate([p for p, size in zip(parts, sizes) if size], self.placement.axis)

    def split(self, gradient, parts, sizes):
        """Each device's part of the gradient with respect to what was merged."""
        axis = self.placement.axis
        ends = np.cumsum([part.shape[axis] if size else 0 for part, size in zip(parts, sizes)])
        pieces = np.split(np.asarray(gradient), ends[:-1], axis)
        # A row computed for an empty shard counts for nothing.
        return [p if size else np.zeros_like(part) for p, part, size in zip(pieces, parts, sizes)]

    def is_right(self, found):
        """Whether a trial found what was thought.

        Arguments:
            found: a placement; None where the trial failed. That of what no rule knows is kept.
        """
        rows = isinstance(found, Sharded) and found.copies == 1
        if isinstance(self.placement, Sharded):
            same = rows and found.axis == self.placement.axis
            return same or isinstance(found, Unknown) or _is_normalized(self.variable)
        if rows:
            self.placement = found
        return rows


class ModelGraph(VariableRows):
    """The graph of a model's outputs, and how it depends on the rows of a batch.

    Arguments:
        outputs: the model's.
        sharded: the variables that are given to the model in parts, whose rows come first.
        given: the values of these, and of other variables that the outputs depend on.
        tries: whether what no rule knows may be tried.
        changing: operations that run once for the whole batch, as ``PythonOperations`` has them.
    """

    def __init__(self, outputs, sharded, given, tries=True, changing=frozenset()):
        self.changing = changing
        sizes = {variable: list(np.shape(value)) for variable, value in given.items()}
        for variable in sharded:
            sizes[variable][0] = list(ROWS)
        super().__init__({variable: Sharded(0) for variable in sharded}, Sizes(sizes))
        self.follow(outputs)
        self._outputs = outputs
        self._tries = tries

    def cuts(self, wanted):
        """Cuts at what is nearest to these variables that a device can compute of its own rows."""
        return [Cut(v, self.of(v)) for v in nearest(wanted, self._can_be_cut)]

    def _can_be_cut(self, variable):
        placement = self.of(variable)
        if isinstance(placement, Unknown):
            return self._tries and bool(self.sizes.grown(variable))
        whole = isinstance(placement, Sharded) and placement.copies == 1
        return whole and hasattr(variable, "broadcastable")

    def across(self, why):
        """What computes across rows and has the rows' number of results, the first; or None.

        Arguments:
            why: of what no rule knows, as ``_rows.Across`` has it.
        """
        kinds = Mixed if self._tries else (Mixed, Unknown)
        needed = set(graph.ancestors(self._outputs))
        lost = [v for v, p in self.placements.items() if isinstance(p, kinds) and v in needed]
        if not any(map(self.sizes.grown, lost)):
            return None
        why, united = "mixed" if isinstance(self.of(lost[0]), Mixed) else why, lost
        why = "effects" if lost[0].owner.op in self.changing else why
        while united:  # a sum over the rows, from where it is one
            first = united[0]
            united = [v for v in first.owner.inputs if isinstance(self.of(v), Partial)]
        following = depending_on([first], self._outputs)
        layers = [v for v in self.placements if v in following and hasattr(v, "_keras_history")]
        name = f"layer {layers[0]._keras_history[0].name!r}" if layers else None
        return _rows.Across(first.owner.op, name, line_of(first), why)


def line_of(variable):
    """The user's line that a variable was made at: "train.py, line 12", or None."""
    return errors.innermost_line(frames_of(variable))


def own_gradient(cuts):
    """The first operation before cuts whose gradient is the user's, as an ``Across``, or None."""
    for node in graph.io_toposort([], [cut.variable for cut in cuts]):
        if side_effects.is_users(node.op) or type(node.op).__name__ == "OpFromGraph":
            return _rows.Across(node.op, None, line_of(node.outputs[0]), "gradient")
    return None


def _is_normalized(variable):
    """Whether a layer before it normalizes by the batch in inference: each device by its own."""
    from keras import backend as K

    def in_inference(node):
        by_phase = isinstance(node.op, IfElse) and node.inputs[0] is K.learning_phase()
        return node.inputs[1 + node.op.n_outs :] if by_phase else node.inputs

    def normalizes(variable):
        return type(variable.owner.op).__name__ == "AbstractBatchNormTrain"

    return bool(nearest([variable], normalizes, in_inference))
