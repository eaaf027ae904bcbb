"""Trial of user-defined gradients: those of shards must add up to those of the batch."""

from typing import Any, Dict

import numpy as np
from theano.gof import graph

from ... import _rows
from ..._rows import Fallback, Reason
from . import trial
from .graph import is_custom, line_of
from .side_effects import HasEffectsError


def are_right(plan: "Any", values: "Dict[Any, Any]", rows: int) -> bool:
    """Return whether user-defined gradients are those of the whole batch, by a trial.

    Arguments:
        plan: the ``CompiledPlan``.
        values: those of the function's inputs, and of states that have rows, by variable.
        rows: how many rows these have.
    """
    fallback = _first_before([plan.cuts[index] for index in plan.differentiated])
    if fallback is None:
        return True

    def compute(parts):
        step = trial.in_inference(plan, values, rows, parts)
        merged = plan.merged(step)
        return plan.gradients(step, [merged[i] + np.float32(0.5) for i in plan.differentiated])

    # Whatever an operation of the user's does.
    try:
        with plan.owner.devices[0].randomness_kept():
            whole, of_parts = map(compute, [(_rows.trial.WHOLE,), _rows.trial.PARTS])
        if all(map(_rows.trial.close, of_parts, whole)):
            return True
    except HasEffectsError:
        fallback = fallback._replace(reason=Reason.SIDE_EFFECTS)
    except Exception:
        pass
    plan.owner.fallback = fallback
    return False


def _first_before(cuts):
    """Return the first operation before cuts with a custom gradient, a ``Fallback``; or None."""
    for node in graph.io_toposort([], [cut.variable for cut in cuts]):
        if is_custom(node.op) or type(node.op).__name__ == "OpFromGraph":
            return Fallback(Reason.CUSTOM_GRADIENT, node.op, None, line_of(node.outputs[0]))
    return None
