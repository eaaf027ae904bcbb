"""Where a graph of Keras' is cut into what the devices compute and what runs once."""

import numpy as np

from .graph_variables import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass


class Cut:
    """A variable that leaves the body.

    Attributes:
        variable: the variable.
        measured: the one whose rows count: itself, or the one whose shape it is.
        axis: where its rows are, or None.
    """

    def __init__(self, variable, measured):
        self.variable = variable
        self.measured = measured
        self.axis = None  # type: Any
        self.is_shape = variable is not measured

    def is_differentiable(self):
        return not self.is_shape and "float" in self.variable.type.dtype

    def has_rows(self):
        return self.is_shape or self.axis is not None

    def merge(self, parts, sizes):
        """What the devices computed, as one, their rows in order."""
        kept = [part for part, size in zip(parts, sizes) if size]
        if self.is_shape:
            shape = np.array(kept[0])
            if self.axis is not None:
                shape[self.axis] = sum(part[self.axis] for part in kept)
            return shape
        return np.concatenate(kept, axis=self.axis)

    def split(self, gradient, parts, sizes):
        """Each device's part of the gradient with respect to what was merged."""
        gradient, result, start = np.asarray(gradient), [], 0
        for part, size in zip(parts, sizes):
            if size:
                stop = start + part.shape[self.axis]
                result.append(gradient[(slice(None),) * self.axis + (slice(start, stop),)])
                start = stop
            else:  # a row computed for an empty shard counts for nothing
                result.append(np.zeros_like(part))
        return result


def frontier(wanted, body, passed):
    """Cuts at the variables in ``body``, those in ``passed`` left out, nearest to ``wanted``."""
    from theano.tensor import Shape

    def is_shape(variable):
        return isinstance(variable.owner.op, Shape) and variable.owner.inputs[0] in body

    def is_cut(variable):
        return is_shape(variable) or (variable in body and variable not in passed)

    return [
        # Its shape alone spares bringing all of its rows.
        Cut(variable, variable.owner.inputs[0] if is_shape(variable) else variable)
        for variable in nearest(wanted, is_cut)
    ]


def find_axes(cuts, body_inputs, sharded, given):
    """Find the axis of each cut that grows with the batch.

    Theano derives shapes from shapes, and computes no value for them where it need not.
    """
    import theano

    if not cuts:
        return
    inputs = [variable.type() for variable in body_inputs]
    measured = theano.clone([cut.measured for cut in cuts], dict(zip(body_inputs, inputs)))
    shapes = theano.function(
        inputs,
        [variable.shape for variable in measured],
        mode=theano.Mode("py", theano.gof.Query(include=["ShapeOpt", "canonicalize"])),
        allow_input_downcast=True,
        on_unused_input="ignore",
        no_default_updates=True,
    )
    found = []
    for rows in (2, 3):
        values = [
            np.zeros((rows,) + given[v].shape[1:], v.dtype) if v in sharded else given[v]
            for v in body_inputs
        ]
        found.append(shapes(*values))
    for cut, two, three in zip(cuts, *found):
        grown = np.flatnonzero(two != three)
        # Of all pairs, or of all rows but the first, the devices' parts do not make the whole.
        if len(grown) == 1 and 3 * two[grown[0]] == 2 * three[grown[0]]:
            cut.axis = int(grown[0])
