"""Trials of cuts: the placements there, checked with what one device computes of some rows."""

from typing import Any, Dict, List, Tuple

import numpy as np
from theano.ifelse import IfElse

from ... import _rows
from ..._rows import Fallback, Reason, Sharded, Unknown
from .graph import nearest
from .side_effects import HasEffectsError


def is_right(plan: "Any", values: "Dict[Any, Any]", rows: int) -> bool:
    """Return whether a trial, in inference, finds the placements that were inferred at the cuts.

    Otherwise operations without a rule are not split from now on; without any at the cuts, the
    model is not.

    Arguments:
        plan: the ``CompiledPlan``.
        values: those of the function's inputs, and of states that have rows, by variable.
        rows: how many rows these have.
    """
    if not plan.cuts:
        return True
    owner, device = plan.owner, plan.owner.devices[0]
    device.take_weights()
    with device.randomness_kept():
        try:
            results: "List[Any]" = _rows.trial.tried(
                lambda chosen: in_inference(plan, values, rows, chosen)[0]
            )
        except HasEffectsError:
            return False
        except Exception:
            plan.compute_on_one(values)
            results = [None] * len(plan.cuts)
    wrong = [result for cut, result in zip(plan.cuts, results) if not _confirms(result, cut)]
    if not wrong:
        return True
    inconclusive = all(result is None or isinstance(result, Unknown) for result in wrong)
    reason = Reason.NO_RULE if inconclusive else Reason.TRIAL_DIFFERS
    if any(isinstance(cut.placement, Unknown) for cut in plan.cuts):
        owner.doubt = reason
    else:
        owner.fallback = Fallback(reason)
    return False


def in_inference(plan, values, rows, chosen) -> "Tuple[List[Any], List[Any]]":
    """Return what the first device computes of some rows of the batch.

    Arguments:
        plan: the ``CompiledPlan``.
        values: those of the function's inputs, and of states that have rows, by variable.
        rows: how many rows these have.
        chosen: the numbers of the rows, which may be more than there are.

    Returns:
        The values at the cuts, and what a backward function takes besides upstream gradients.
    """
    from keras import backend as K

    phase, count = K.learning_phase(), len(plan.cuts)
    values = {v: 0 if v is phase else value for v, value in values.items()}
    shard = plan.given_to_body(values, [row % rows for row in chosen])
    (computed,) = plan.run(plan.forward[:1], [shard])
    return list(map(np.asarray, computed[:count])), shard + computed[count:]


def _confirms(result, cut):
    """Return whether a trial found what was inferred at a cut.

    Where nothing was inferred, the cut gets the placement that was found.

    Arguments:
        result: the placement that the trial found; None where it failed.
        cut: the ``Cut``.
    """
    has_rows = isinstance(result, Sharded) and result.copies == 1
    if isinstance(cut.placement, Sharded):
        same = has_rows and result.axis == cut.placement.axis
        return same or isinstance(result, Unknown) or _is_normalized(cut.variable)
    if has_rows:
        cut.placement = result
    return has_rows


def _is_normalized(variable):
    """Return whether a layer before a variable normalizes by the batch in inference, per device."""
    from keras import backend as K

    def in_inference(node):
        by_phase = isinstance(node.op, IfElse) and node.inputs[0] is K.learning_phase()
        return node.inputs[1 + node.op.n_outs :] if by_phase else node.inputs

    def normalizes(variable):
        return type(variable.owner.op).__name__ == "AbstractBatchNormTrain"

    return bool(nearest([variable], normalizes, in_inference))
