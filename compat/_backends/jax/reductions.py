"""Values of the whole batch that a rank's step needs while it runs, from those of all ranks.

A sum over ranks is a mark of ``gradient_marks``: the step is cut there into programs, forward and
backward, so that ranks may have batches of different sizes.
"""

import jax.numpy as jnp

from . import gradient_marks
from .inlined_calls import functions_within


def gathered(values, place, mark):
    """Return each array of a rank as an array of those of all ranks.

    They are summed up, with zeros in place of the other ranks' values.

    Arguments:
        values: arrays, of the same shapes on all ranks.
        place: this rank's ``Place``.
        mark: as ``gradient_marks.mark``.
    """
    everyone = range(place.size)
    parts = [
        jnp.stack([value if rank == place.rank else jnp.zeros_like(value) for rank in everyone])
        for value in values
    ]
    return mark(gradient_marks.SUM, [], parts, False)


def within_functions(function):
    """Return an operation of a step (a jaxpr) with a sum over ranks in a function, or None.

    Such as a loop, at whose operations the step cannot be cut.
    """
    for operation in function.eqns:
        if any(map(_has_sums, functions_within(operation))):
            return operation
    return None


def _has_sums(function):
    return within_functions(function) is not None or any(
        operation.primitive is gradient_marks.mark_p
        and operation.params["kind"] == gradient_marks.SUM
        for operation in function.eqns
    )
