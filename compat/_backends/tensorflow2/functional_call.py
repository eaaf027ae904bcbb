"""A call as a function of the tensors that its arguments consist of."""

import contextlib

import tensorflow as tf

from ..._rows.splitting import unsplit
from . import side_effects
from .arguments import with_tensors


def as_function(call, scope, given, effects):
    """Return a call as a function of the tensors that its arguments and their masks consist of.

    It returns what the call returns, and lists: "outputs" has that, flat; "logits" and "masks" are
    Keras' attributes of the outputs, or None; "losses" were added within the call; "noted" are the
    tensors that it has left in Python objects, of which ``changes`` tells.

    Arguments:
        scope: makes the context of the call, which yields the losses added in it.
        given: as ``ShardedArguments.given``.
        effects: the ``PythonEffects`` of the model; None: its calls leave nothing.
    """

    def compute(*values):
        (args, kwargs), masks = with_tensors(given, values)
        for value, mask in zip(tf.nest.flatten((args, kwargs)), masks):
            if mask is not None:
                value._keras_mask = mask
        with unsplit, contextlib.ExitStack() as around:
            compute.changes = around.enter_context(effects.taken()) if effects else []
            losses = around.enter_context(scope())
            structure = call(*args, **kwargs)
        outputs = tf.nest.flatten(structure)
        masks = [getattr(output, "_keras_mask", None) for output in outputs]
        logits = [_logits(output) for output in outputs]
        results = dict(outputs=outputs, masks=masks, logits=logits, losses=losses)
        return structure, dict(results, noted=side_effects.tensors(compute.changes))

    return compute


def _logits(output):
    """What went into a final softmax or sigmoid, where Keras' cross-entropy would look for it.

    Keras computes cross-entropy from logits if the output carries them, or comes straight from
    such an operation (``_get_logits`` in its backend).
    """
    logits, operation = getattr(output, "_keras_logits", None), getattr(output, "op", None)
    if logits is None and getattr(operation, "type", None) in ("Softmax", "Sigmoid"):
        return operation.inputs[0]  # never eagerly: there tensors have no operation
    return logits
