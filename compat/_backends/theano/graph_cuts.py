"""Where a graph of Keras' is cut into what the devices compute and what runs once."""

import numpy as np
from theano.gof import graph
from theano.ifelse import IfElse

from ... import _rows
from ..._rows import Mixed, Partial, Sharded, Unknown
from .graph_rows import VariableRows
from .graph_sizes import ROWS, Sizes
from .graph_variables import depending_on, line_of, nearest


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


class ModelGraph:
    """The graph of a model's outputs, and how it depends on the rows of a batch.

    Arguments:
        outputs: the model's.
        sharded: the variables that are given to the model in parts, whose rows come first.
        given: the values of these, and of other variables that the outputs depend on.
        tries: whether what no rule knows may be tried.
    """

    def __init__(self, outputs, sharded, given, tries=True):
        self.outputs = outputs
        sizes = {variable: list(np.shape(value)) for variable, value in given.items()}
        for variable in sharded:
            sizes[variable][0] = list(ROWS)
        self._rows = VariableRows({variable: Sharded(0) for variable in sharded}, Sizes(sizes))
        self._rows.follow(outputs)
        self._tries = tries

    def cuts(self, wanted):
        """Cuts at what is nearest to these variables that a device can compute of its own rows."""
        return [Cut(v, self._rows.of(v)) for v in nearest(wanted, self._can_be_cut)]

    def _can_be_cut(self, variable):
        placement = self._rows.of(variable)
        if isinstance(placement, Unknown):
            return self._tries and bool(self._rows.sizes.grown(variable))
        whole = isinstance(placement, Sharded) and placement.copies == 1
        return whole and hasattr(variable, "broadcastable")

    def across(self, why):
        """What computes across rows and has the rows' number of results, the first; or None.

        Arguments:
            why: of what no rule knows, as ``_rows.Across`` has it.
        """
        kinds = Mixed if self._tries else (Mixed, Unknown)
        needed = set(graph.ancestors(self.outputs))
        lost = [v for v, p in self._rows.placements.items() if isinstance(p, kinds) and v in needed]
        if not any(self._rows.sizes.grown(variable) for variable in lost):
            return None
        first, united = lost[0], lost
        why = "mixed" if isinstance(self._rows.of(first), Mixed) else why
        while united:  # a sum over the rows, from where it is one
            first = united[0]
            united = [v for v in first.owner.inputs if isinstance(self._rows.of(v), Partial)]
        return _rows.Across(first.owner.op, self._layer(first), line_of(first), why)

    def _layer(self, variable):
        """The first layer of Keras whose output depends on a variable."""
        following = depending_on([variable], self.outputs)
        made = [v for v in self._rows.placements if v in following and hasattr(v, "_keras_history")]
        return f"layer {made[0]._keras_history[0].name!r}" if made else None


def own_gradient(cuts):
    """The first operation before cuts whose gradient is the user's, as an ``Across``, or None."""
    for node in graph.io_toposort([], [cut.variable for cut in cuts]):
        kind = type(node.op)
        if kind.__module__.partition(".")[0] != "theano" or kind.__name__ == "OpFromGraph":
            return _rows.Across(node.op, None, line_of(node.outputs[0]), "gradient")
    return None


def _is_normalized(variable):
    """Whether a layer before it normalizes by the batch in inference: each device by its own."""
    from keras import backend as K

    def in_inference(node):
        if isinstance(node.op, IfElse) and node.inputs[0] is K.learning_phase():
            return node.inputs[1 + node.op.n_outs :]
        return node.inputs

    def normalizes(variable):
        return type(variable.owner.op).__name__ == "AbstractBatchNormTrain"

    return bool(nearest([variable], normalizes, in_inference))
