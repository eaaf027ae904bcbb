"""Compiled functions within a traced step, inlined where they have marks."""

import jax

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
            inner = operation.params["jaxpr"]
            results = _evaluate(inner.jaxpr, inner.consts, inputs)
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


def _is_call_with_marks(operation):
    return operation.primitive.name in ("jit", "pjit") and _has_marks(operation)


def _has_marks(operation):
    """Return whether an operation is a mark, or a function in which there is one."""
    if operation.primitive is gradient_marks.mark_p:
        return True
    inner = operation.params.get("jaxpr")
    return inner is not None and any(map(_has_marks, inner.eqns))


def jaxpr_with(jaxpr, **attributes):
    """Return a jaxpr with other attributes, such as its operations."""
    try:
        return jaxpr.replace(**attributes)
    except AssertionError:  # JAX before 0.5 expects a name for each input and result
        return jaxpr.replace(debug_info=None, **attributes)


def variables_among(atoms):
    """Return the inputs of an operation that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]
