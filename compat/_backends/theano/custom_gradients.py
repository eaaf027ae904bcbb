"""User-defined gradients: whether those of parts of a batch add up to those of the whole."""

import numpy as np
from theano.gof import graph

from ... import _rows
from . import trial
from .graph import is_custom, line_of
from .side_effects import HasEffectsError


def are_right(function, values, rows):
    """Return whether user-defined gradients are those of the whole batch, by a trial.

    Arguments:
        function: a ``ReplicatedFunction``.
        values: those of its inputs, and of states that have rows, by variable.
        rows: how many rows these have.
    """
    across = _first_before([function.cuts[place] for place in function.back])
    if across is None:
        return True

    def compute(chosen):
        at_cut, handed_over = trial.in_inference(function, values, rows, chosen)
        upstream = [at_cut[place] + np.float32(0.5) for place in function.back]
        return list(
            map(np.asarray, function.run(function.backward[:1], [handed_over + upstream])[0])
        )

    # Whatever an operation of the user's does.
    try:
        with function.owner.devices[0].randomness_kept():
            whole, *parts = map(compute, (_rows.trial.WHOLE,) + _rows.trial.PARTS)
        if all(map(_rows.trial.close, map(sum, zip(*parts)), whole)):
            return True
    except HasEffectsError:
        across = across._replace(why="effects")
    except Exception:
        pass
    function.owner.across = across
    return False


def _first_before(cuts):
    """Return the first operation before cuts with a custom gradient, an ``Across``; or None."""
    for node in graph.io_toposort([], [cut.variable for cut in cuts]):
        if is_custom(node.op) or type(node.op).__name__ == "OpFromGraph":
            return _rows.Across(node.op, None, line_of(node.outputs[0]), "gradient")
    return None
