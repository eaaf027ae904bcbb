"""Where a graph of Keras' is cut into what the devices compute and what runs once."""

import os

import numpy as np

from ... import _rows
from ..._rows import Mixed, Partial, Sharded, Unknown
from .graph_rows import VariableRows
from .graph_sizes import ROWS, Sizes
from .graph_variables import ancestors_of, depending_on, frames_of, nearest


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
        kept = [part for part, size in zip(parts, sizes) if size]
        return np.concatenate(kept, axis=self.placement.axis)

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
            random = isinstance(found, Unknown)
            return random or rows and found.axis == self.placement.axis
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
        sizes = {
            variable: [
                [n if axis == 0 and variable in sharded else size for n in ROWS]
                for axis, size in enumerate(np.shape(value))
            ]
            for variable, value in given.items()
        }
        self._rows = VariableRows({variable: Sharded(0) for variable in sharded}, Sizes(sizes))
        self._rows.follow(outputs)
        self._tries = tries

    def body(self):
        """The variables that a device can compute of its own rows, with their placements."""
        return {
            variable: placement
            for variable, placement in self._rows.placements.items()
            if variable.owner is not None and self._can_be_cut(variable, placement)
        }

    def _can_be_cut(self, variable, placement):
        if isinstance(placement, Unknown):
            return self._tries and bool(self._rows.sizes.grown(variable))
        whole = isinstance(placement, Sharded) and placement.copies == 1
        return whole and placement.per is None and hasattr(variable, "broadcastable")

    def across(self, why):
        """What computes across rows and has the rows' number of results, the first; or None.

        Arguments:
            why: of what no rule knows, as ``_rows.Across`` has it.
        """
        kinds, needed = Mixed if self._tries else (Mixed, Unknown), ancestors_of(self.outputs)
        lost = [v for v, p in self._rows.placements.items() if isinstance(p, kinds) and v in needed]
        if not any(self._rows.sizes.grown(variable) for variable in lost):
            return None
        first, united = lost[0], lost
        known = isinstance(self._rows.of(first), Mixed)
        while united:  # a sum over the rows, from where it is one
            first = united[0]
            united = [v for v in first.owner.inputs if isinstance(self._rows.of(v), Partial)]
        return _rows.Across(
            first.owner.op, self._layer(first), _line(first), "mixed" if known else why
        )

    def _layer(self, variable):
        """The first layer of Keras whose output depends on a variable."""
        following = depending_on([variable], self.outputs)
        made = [v for v in self._rows.placements if v in following and hasattr(v, "_keras_history")]
        return "layer {!r}".format(made[0]._keras_history[0].name) if made else None


def _line(variable):
    """The user's line that a variable was made at: the innermost one outside of packages."""
    library = os.path.dirname(os.__file__) + os.sep
    for path, line in reversed(frames_of(variable)):
        if not (path.startswith((library, "<")) or "-packages" + os.sep in path):
            return "{}, line {}".format(os.path.basename(path), line)
    return None


def frontier(wanted, body):
    """Cuts at the variables in ``body`` that are nearest to ``wanted``.

    Arguments:
        body: placements of variables.
    """
    return [Cut(v, body[v]) for v in nearest(wanted, lambda variable: variable in body)]


def own_gradient(cuts):
    """The first operation before cuts whose gradient is the user's, as an ``Across``, or None."""
    from theano.gof import graph

    for node in graph.io_toposort([], [cut.variable for cut in cuts]):
        kind = type(node.op)
        if kind.__module__.partition(".")[0] != "theano" or kind.__name__ == "OpFromGraph":
            return _rows.Across(node.op, None, _line(node.outputs[0]), "gradient")
    return None


def is_normalized(cut, learning_phase):
    """Whether a layer before a cut normalizes by the batch in inference: each device by its own.

    Arguments:
        learning_phase: the variable that tells training from inference, or a number.
    """
    from theano.ifelse import IfElse

    stack, seen = [cut.variable] if isinstance(cut.placement, Sharded) else [], set()
    while stack:
        node = stack.pop().owner
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node.op).__name__ == "AbstractBatchNormTrain":
            return True
        inputs = node.inputs
        if isinstance(node.op, IfElse) and inputs[0] is learning_phase:
            inputs = inputs[1 + node.op.n_outs :]
        stack += inputs
    return False
