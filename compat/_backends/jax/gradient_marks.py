"""Gradients that a training step computes, marked for the ranks to average.

While a step is traced, ``jax.grad()`` and its like mark the gradients that they return, and their
primals, with a primitive that is the identity. There the step is cut into programs with an exchange
in between (``ranked_programs``). A step that is not compiled exchanges at once.
"""

import contextlib

import jax
from jax._src import api
from jax.interpreters import ad, batching, mlir
from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from ..._ranks import step_functions
from ..._runtime.within import Within
from .configuration import Primitive

#: What ``jax.grad()`` and ``jax.value_and_grad()`` call.
VJP = "_vjp" if hasattr(api, "_vjp") else "vjp"

# A gradient; one within a function that is differentiated; an optimizer's inputs; values that are
# summed over ranks in any case.
GRADIENT, INNER, APPLIED, SUM = "gradient", "inner", "applied", "sum"

mark_p = Primitive("mean_over_ranks")
mark_p.multiple_results = True


@mark_p.def_impl
def _values(*operands, primals, **_):
    return list(operands[primals:])


mark_p.def_abstract_eval(_values)
mlir.register_lowering(mark_p, lambda _, *operands, **options: _values(*operands, **options))


def _derive(operands, tangents, **options):
    return mark_p.bind(*operands, **options), _values(*tangents, **options)


def _batched(operands, dimensions, **options):
    """Return gradients of single rows, under ``jax.vmap()``, as they are: they are not means."""
    return _values(*operands, **options), _values(*dimensions, **options)


ad.primitive_jvps[mark_p] = _derive
batching.primitive_batchers[mark_p] = _batched

_differentiated = Within()  # a function, by another call of ``jax.grad()``


@contextlib.contextmanager
def marked(engine, is_due, mark, is_scaled):
    """Mark the gradients that are computed within a block.

    Arguments:
        engine: the ranks' engine.
        is_due: as ``step_functions.replaced`` has it.
        mark: as ``mark`` below.
        is_scaled: a function that returns how many losses were scaled by the share of rows already.
    """
    plain = getattr(api, VJP)

    def vjp(function, *primals, **options):
        kind = INNER if _differentiated.here() else GRADIENT
        scaled = is_scaled()
        with _differentiated:
            value, backward, *others = plain(function, *primals, **options)
        is_weighted = is_scaled() == scaled

        def marking(*cotangents):
            leaves, tree = tree_flatten(backward(*cotangents))
            by = tree_leaves(primals)
            are_floats = [jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) for leaf in leaves]
            if not leaves or not all(are_floats):
                return tree_unflatten(tree, leaves)
            return tree_unflatten(tree, mark(kind, by, leaves, is_weighted))

        return (value, marking, *others)

    with step_functions.replaced(engine, api, is_due, **{VJP: vjp}):
        yield


def mark(kind, primals, values, is_weighted=True):
    """Mark values in a step that is traced.

    Arguments:
        kind: ``GRADIENT``, for example.
        primals: of the function, if the values are gradients.
        values: to exchange.
        is_weighted: whether a rank's values are weighted by its share of the rows.
    """
    options = {"primals": len(primals), "kind": kind, "is_weighted": is_weighted}
    return mark_p.bind(*primals, *values, **options)
