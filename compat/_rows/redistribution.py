"""Values of the whole batch that an operation needs: reduced over the devices before it.

This is what DTensor calls ``redistribute`` from ``Partial`` to ``Replicated``: a mean of the batch,
say, is added up over the devices, and each goes on with its own rows and the mean of all of them.
"""

from typing import Callable, List, Sequence, Tuple

from .placements import REPLICATED, Mixed, Partial, Placement, Unknown, Value


def redistributed(
    rule: "Callable[[Sequence[Value]], Placement]", values: "Sequence[Value]"
) -> "Tuple[Placement, List[int]]":
    """Return the placement of an operation's result, and the inputs to reduce over devices first.

    Arguments:
        rule: the operation's rule, of all its inputs.
        values: these inputs.

    Returns:
        The placement that the rule gives, with the positions of inputs that are ``Partial`` if it
        is right only where these are the same on every device; else without any.
    """
    result = rule(values)
    partial = [n for n, value in enumerate(values) if isinstance(value.placement, Partial)]
    if not isinstance(result, Mixed) or not partial:
        return result, []
    whole = [Value(REPLICATED, v.shape) if n in partial else v for n, v in enumerate(values)]
    reduced = rule(whole)
    return (result, []) if isinstance(reduced, (Mixed, Unknown)) else (reduced, partial)
