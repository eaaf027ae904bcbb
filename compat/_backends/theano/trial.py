"""Trials of cuts: the placements there, checked with what one device computes of some rows."""

from typing import Any, Dict, List

from theano.ifelse import IfElse

from ... import _rows
from ..._rows import Fallback, Reason, Replicated, Sharded, Unknown
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
            results: "List[Any]" = _rows.trial.tried(_computing(plan, values, rows))
        except HasEffectsError:
            return False
        except Exception:
            plan.compute_on_first(values, [range(rows)])
            results = [None] * len(plan.cuts)
    # Where rows meet rows, sizes may have to be those of a batch.
    is_known = plan.numbers is not None and not any(
        isinstance(cut.placement, Unknown) for cut in plan.cuts
    )
    if is_known and None in results:
        return True
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


def _computing(plan, values, rows):
    """Return a function that computes some rows, as ``tried`` takes it.

    What is computed in parts is reduced over these.
    """
    steps: "Dict[Any, Any]" = {}

    def compute(chosen):
        together = [
            parts for parts in (_rows.trial.PARTS, _rows.trial.OTHER_PARTS) if chosen in parts
        ]
        parts = together[0] if together else (chosen,)
        if parts not in steps or not together:  # all rows are computed twice
            steps[parts] = in_inference(plan, values, rows, parts)
        return [of_cut[parts.index(chosen)] for of_cut in steps[parts].parts]

    return compute


def in_inference(plan: "Any", values: "Dict[Any, Any]", rows: int, parts: "Any") -> "Any":
    """Return the ``ForwardPass`` in which the first device computes some rows of the batch.

    Arguments:
        plan: the ``CompiledPlan``.
        values: those of the function's inputs, and of states that have rows, by variable.
        rows: how many rows these have.
        parts: the numbers of the rows of each part, which may be more than there are.
    """
    from keras import backend as K

    phase = K.learning_phase()
    values = {v: 0 if v is phase else value for v, value in values.items()}
    chosen = [[row % rows for row in part] for part in parts]
    return plan.compute_on_first(values, chosen, parts)


def _confirms(result, cut):
    """Return whether a trial found what was inferred at a cut.

    Where nothing was inferred, the cut gets the placement that was found.

    Arguments:
        result: the placement that the trial found; None where it failed.
        cut: the ``Cut``.
    """
    has_rows = isinstance(result, Sharded) and result.copies == 1
    if isinstance(cut.placement, Replicated):
        return isinstance(result, (Replicated, Unknown))
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
