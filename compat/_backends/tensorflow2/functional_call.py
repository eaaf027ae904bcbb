"""A call as a function of the tensors that its arguments consist of."""

import contextlib
from typing import Any, Callable, ContextManager, List, Optional

import tensorflow as tf

from ..._rows.replica_threads import current_turn
from ..._rows.splitting import unsplit
from . import side_effects
from .arguments import with_tensors


def as_function(
    call: "Callable[..., Any]",
    scope: "Callable[[], ContextManager[List[Any]]]",
    tree: "Any",
    effects: "Optional[side_effects.PythonEffects]",
) -> "Any":
    """Return a call as a function of the tensors that its arguments and their masks consist of.

    The function returns the results of the call, and lists: "outputs" are the results, flat;
    "logits" and "masks" are Keras' attributes of the outputs, or None; "losses" were added within
    the call; "noted" are the tensors that it has left in Python objects. Its attribute ``changes``
    has the changes of these objects in the last call.

    Arguments:
        call: what is called with the arguments.
        scope: returns the context of a call, which yields the losses added in it.
        tree: as ``ShardedArguments.tree``.
        effects: the ``PythonEffects`` of the model; None if its calls have no side effects.
    """

    def compute(*values):
        (args, kwargs), masks = with_tensors(tree, values)
        for value, mask in zip(tf.nest.flatten((args, kwargs)), masks):
            if mask is not None:
                value._keras_mask = mask
        with unsplit, contextlib.ExitStack() as around:
            compute.changes = around.enter_context(effects.isolated()) if effects else []
            if effects and current_turn():
                current_turn().suspensions.append(effects.suspended)
            losses = around.enter_context(scope())
            structure = call(*args, **kwargs)
        outputs = tf.nest.flatten(structure)
        masks = [getattr(output, "_keras_mask", None) for output in outputs]
        logits = [_logits(output) for output in outputs]
        results = dict(outputs=outputs, masks=masks, logits=logits, losses=losses)
        return structure, dict(results, noted=side_effects.tensors(compute.changes))

    return compute


def converting() -> "ContextManager[Any]":
    """Return a context in which Keras has autograph convert branches and loops.

    So it is within a tf.function, also for code that ran eagerly so far.
    """
    from tensorflow.python.autograph.core import ag_ctx

    return ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)


def _logits(output):
    """Return the input of a final softmax or sigmoid, which Keras' cross-entropy prefers, or None.

    Keras computes cross-entropy from logits if the output carries them, or is the result of such
    an operation (``_get_logits`` in its backend).
    """
    logits, operation = getattr(output, "_keras_logits", None), getattr(output, "op", None)
    if logits is None and getattr(operation, "type", None) in ("Softmax", "Sigmoid"):
        return operation.inputs[0]  # never eagerly: there tensors have no operation
    return logits
