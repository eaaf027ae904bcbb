"""Gradients that a training step computes, marked for the ranks to average; and sums over ranks.

While a step is traced, ``jax.grad()`` and its like mark the gradients that they return, and their
primals, with a primitive that is the identity. There the step is cut into programs with an exchange
in between (``ranked_programs``). A step that is not compiled exchanges at once.

Sums may stand in a differentiated function, such as the statistics of batch normalization. They are
linear: their derivatives are sums over ranks, too.
"""

import contextlib

import jax
from jax._src import api
from jax.interpreters import ad, batching, mlir
from jax.tree_util import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ... import errors
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


def _values(*operands, primals, **_):
    return list(operands[primals:])


@mark_p.def_impl
def _run(*operands, **options):
    """Run a mark that is not traced: a sum in a step that is not compiled."""
    values = _values(*operands, **options)
    exchange = options["exchange"]
    return values if exchange is None else exchange(values, options["is_weighted"])


def _lower(_, *operands, **options):
    if options["exchange"] is not None:
        errors.warn(_COMPILED)
    return _values(*operands, **options)


mark_p.def_abstract_eval(_values)
mlir.register_lowering(mark_p, _lower)


def _derive(operands, tangents, **options):
    results = mark_p.bind(*operands, **options)
    is_sum = options["kind"] == SUM
    return results, _sums(tangents, **options) if is_sum else _values(*tangents, **options)


def _sums(derivatives, *_, **options):
    """Return the sums of tangents or cotangents, of which some are known to be zero."""
    others = [each for each in derivatives if type(each) is not ad.Zero]
    sums = iter(mark_p.bind(*others, **options) if others else ())
    return [each if type(each) is ad.Zero else next(sums) for each in derivatives]


def _batched(operands, dimensions, **options):
    """Return gradients of single rows, under ``jax.vmap()``, as they are: they are not means."""
    if options["kind"] == SUM:
        return mark_p.bind(*operands, **options), list(dimensions)
    return _values(*operands, **options), _values(*dimensions, **options)


ad.primitive_jvps[mark_p] = _derive
ad.primitive_transposes[mark_p] = _sums
batching.primitive_batchers[mark_p] = _batched

_COMPILED = (
    "A function that the script compiles, in a step that is not compiled, has a sum over ranks, as "
    "of batch normalization by the statistics of the whole batch. It takes that of each rank's own "
    "rows. Compile the step: leave out run_eagerly=True and jit_compile=False."
)
_differentiated = Within()  # a function, by another call of ``jax.grad()``


@contextlib.contextmanager
def marked(engine, is_due, mark, is_scaled, share=None):
    """Mark the gradients that are computed within a block.

    Arguments:
        engine: the ranks' engine.
        is_due: as ``step_functions.replaced`` has it.
        mark: as ``mark`` below.
        is_scaled: a function that returns how many losses were scaled by the share of rows already.
        share: a function that returns this rank's share of the rows, where differentiated functions
            have sums over ranks. In their backward pass each rank's loss has to weigh as much as
            it does in the mean over all ranks.
    """
    plain = getattr(api, VJP)

    def vjp(function, *primals, **options):
        kind = INNER if _differentiated.here() else GRADIENT
        scaled = is_scaled()
        with _differentiated:
            value, backward, *others = plain(function, *primals, **options)
        is_weighted = is_scaled() == scaled
        weighs = share is not None and is_weighted and kind == GRADIENT

        def marking(*cotangents):
            if weighs:
                cotangents = _multiplied(cotangents, share())
            leaves, tree = tree_flatten(backward(*cotangents))
            by = tree_leaves(primals)
            are_floats = [jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) for leaf in leaves]
            if not leaves or not all(are_floats):
                return tree_unflatten(tree, leaves)
            if weighs:
                leaves = _multiplied(leaves, 1 / share())
            return tree_unflatten(tree, mark(kind, by, leaves, is_weighted))

        return (value, marking, *others)

    with step_functions.replaced(engine, api, is_due, **{VJP: vjp}):
        yield


def _multiplied(arrays, factor):
    return tree_map(lambda array: array * jax.numpy.asarray(factor, array.dtype), arrays)


def mark(kind, primals, values, is_weighted=True, exchange=None):
    """Mark values in a step that is traced.

    Arguments:
        kind: ``GRADIENT``, for example.
        primals: of the function, if the values are gradients.
        values: to exchange.
        is_weighted: whether a rank's values are weighted by its share of the rows.
        exchange: a function of the values and ``is_weighted`` that returns the sums over ranks, in
            a step that is not compiled; or None.
    """
    options = {"primals": len(primals), "kind": kind, "is_weighted": is_weighted}
    return mark_p.bind(*primals, *values, exchange=exchange, **options)
