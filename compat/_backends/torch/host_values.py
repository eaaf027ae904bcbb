"""Values of a replica's rows that Python reads, and the control flow that depends on them."""

import itertools
from typing import Any, List, NamedTuple

from ... import _rows
from .merging import is_one_devices


class HostValue(NamedTuple):
    """A value of a replica's rows that Python has read, and may branch on.

    Arguments:
        fallback: the function that gave it, a ``Fallback``.
        tag: that of the tensor it was taken from: an expression, or ``Mixed``.
        value: the number.
    """

    fallback: Any
    tag: Any
    value: Any


class Choices(NamedTuple):
    """Data-dependent control flow of the replicas of one call.

    Arguments:
        by_values: whether Python may have chosen by values of rows, as it may in later calls.
        inconclusive: where one device may have chosen otherwise: a ``Fallback`` for each place.
        lines: those of these places, as text, that have chosen by totals over the rows.
    """

    by_values: bool
    inconclusive: "List[Any]"
    lines: "List[str]"


def choices_of(propagations, plan, total, home):
    """Return the ``Choices`` that the replicas of one call have shown.

    Arguments:
        propagations: the ``Propagation`` of each replica.
        plan: the ``CallPlan``, which has the choices that do not affect the result.
        total: how many rows the batch has.
        home: the device of the results.
    """
    by_values, lines, inconclusive = False, [], []
    for values in itertools.zip_longest(*[propagation.host_values for propagation in propagations]):
        first = next(value for value in values if value is not None)
        if str(first.fallback) in plan.harmless:
            continue
        by_values = True
        if None in values or not is_one_devices(values, home):
            inconclusive.append(first.fallback)
            if not isinstance(first.tag, _rows.Mixed):  # that may be chance
                lines.append(str(first.fallback))
    if total not in plan.totals:
        by_count = [propagation.by_count for propagation in propagations]
        inconclusive += [fallback for fallback in by_count if fallback is not None]
    return Choices(by_values, inconclusive, lines)
