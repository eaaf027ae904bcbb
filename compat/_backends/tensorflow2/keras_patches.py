"""Patches of Keras' layers and functions, for traces of a call and for several devices."""

import contextlib
import functools
import inspect
import sys
import types
from typing import Any, Iterable, Iterator

import tensorflow as tf

from ..._runtime import patching
from .call_reductions import uncounted
from .graph import TRACE, is_within


@contextlib.contextmanager
def normalizing_rows(layers: "Iterable[Any]", normalizations: "Iterable[Any]") -> "Iterator[None]":
    """Let layers of batch normalization return the results of inference, row by row.

    Then they are called as usual, so that the trace contains the variables that they set. In a
    function of the model's own, which TensorFlow keeps, they are only called as usual.

    Arguments:
        layers: those of the model.
        normalizations: those of them that are meant.
    """

    def in_inference(call, *args, **kwargs):
        if not is_within(TRACE):
            return call(*args, **kwargs)
        arguments = dict(zip(inspect.signature(call).parameters, args), **kwargs)
        result = uncounted(call, **dict(arguments, training=False))
        uncounted(call, *args, **kwargs)
        return result

    with contextlib.ExitStack() as stack:
        for layer in layers:
            if hasattr(layer, "_trainable_var"):  # a tensor of the first graph, in TensorFlow 2.0
                stack.callback(setattr, layer, "_trainable_var", layer._trainable_var)
        for layer in normalizations:
            call = functools.partial(in_inference, layer.call)
            stack.enter_context(patching.replaced(layer, call=call))
        yield


def read_kernels() -> None:
    """Make Keras 3 pass values to its convolutions in place of variables, from now on.

    Keras has XLA compile a grouped convolution, and XLA accepts no variable of another device.
    """
    nn = sys.modules.get("keras.src.backend.tensorflow.nn")
    if nn is None or patching.find(nn, "conv") is not None:
        return
    plain = nn.conv

    @functools.wraps(plain)
    def conv(inputs, kernel, *args, **kwargs):
        return plain(inputs, tf.convert_to_tensor(kernel), *args, **kwargs)

    patching.MendingPatch(nn, "conv", conv)


@contextlib.contextmanager
def custom_gradient_without_tape() -> "Iterator[None]":
    """Let a custom gradient in a function note the variables that are read without a tape.

    Before TensorFlow 2.3 it makes a tape for that. Within the caller's tape TensorFlow then traces
    gradients of gradients of the functions in a model, without an end for an LSTM's loop.
    """
    from tensorflow.python.ops import custom_gradient

    names = custom_gradient._graph_mode_decorator.__code__.co_names
    if "GradientTape" not in names or tf.executing_eagerly():
        yield
        return

    from tensorflow.python.eager import tape

    plain, accessed = custom_gradient.backprop, tape.variable_accessed
    due, variables = [True], []

    def note(variable):
        variables.append(variable)
        accessed(variable)

    def tape_or_watcher(*args, **kwargs):
        if not due:  # for a custom gradient in the model
            return plain.GradientTape(*args, **kwargs)
        due.clear()
        watcher = contextlib.ExitStack()
        watcher.watched_variables = lambda: variables
        tape.variable_accessed = note
        watcher.callback(setattr, tape, "variable_accessed", accessed)
        return watcher

    custom_gradient.backprop = types.SimpleNamespace(**vars(plain))
    custom_gradient.backprop.GradientTape = tape_or_watcher
    try:
        yield
    finally:
        custom_gradient.backprop = plain
