"""Functions that a traced step calls, such as compiled ones, inlined where they have marks."""

import jax
from jax.tree_util import tree_leaves

from . import gradient_marks
from .configuration import Literal


def inlined(closed):
    """Return a step in which calls of compiled functions that have marks are inlined."""
    if not any(map(_is_call_with_marks, closed.jaxpr.eqns)):
        return closed

    def evaluate(*args):
        return _evaluate(closed.jaxpr, closed.consts, args)

    return jax.make_jaxpr(evaluate)(*[variable.aval for variable in closed.jaxpr.invars])


def _evaluate(jaxpr, constants, args):
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args]))

    def read(atoms):
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]

    for operation in jaxpr.eqns:
        inputs = read(operation.invars)
        if _is_call_with_marks(operation):
            (inner,) = functions_within(operation)
            if operation.params.get("prevent_cse") and operation.params.get("differentiated"):
                inputs = _barrier(inputs)  # recomputed in the backward pass, and not earlier
            jaxpr_within = getattr(inner, "jaxpr", inner)
            results = _evaluate(jaxpr_within, getattr(inner, "consts", ()), inputs)
        else:
            names = dict.fromkeys(variables_among(operation.invars))
            one = jaxpr_with(
                jaxpr,
                eqns=[operation],
                constvars=[],
                invars=list(names),
                outvars=operation.outvars,
            )
            results = jax.core.eval_jaxpr(one, [], *[values[name] for name in names])
        values.update(zip(operation.outvars, results))
    return read(jaxpr.outvars)


def _barrier(values):
    """Return values of which none is used in a compiled program before all are known."""
    barrier = getattr(jax.lax, "optimization_barrier", None)  # JAX 0.4.36 and later
    if barrier is None:
        return values
    arrays = iter(barrier([value for value in values if isinstance(value, jax.Array)]))
    return [next(arrays) if isinstance(value, jax.Array) else value for value in values]


#: Operations that call one function as it is: by ``jax.jit``, ``jax.checkpoint`` and the like.
_CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat2"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


def _is_call_with_marks(operation):
    functions = functions_within(operation) if operation.primitive.name in _CALLS else []
    return len(functions) == 1 and _has_marks(*functions)


def _has_marks(function):
    return any(
        operation.primitive is gradient_marks.mark_p
        or any(map(_has_marks, functions_within(operation)))
        for operation in function.eqns
    )


def functions_within(operation):
    """Return the functions (jaxprs) among an operation's parameters."""
    values = tree_leaves(list(operation.params.values()), is_leaf=_is_function)
    return list(filter(_is_function, values))


def _is_function(value):
    return hasattr(value, "eqns")


def jaxpr_with(jaxpr, **attributes):
    """Return a jaxpr with other attributes, such as its operations."""
    try:
        return jaxpr.replace(**attributes)
    except AssertionError:  # JAX before 0.5 expects a name for each input and result
        return jaxpr.replace(debug_info=None, **attributes)


def variables_among(atoms):
    """Return the inputs of an operation that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]
