"""Patches of Keras' layers and functions, for traces of a call and for several devices."""

import contextlib
import functools
import inspect
import sys
from typing import Any, Iterable, Iterator

import tensorflow as tf

from ..._runtime import patching
from .state import normalizations


@contextlib.contextmanager
def normalizing_rows(layers: "Iterable[Any]") -> "Iterator[None]":
    """Let layers of batch normalization return the results of inference, row by row.

    Then they are called as usual, so that the trace contains the variables that they set.
    """

    def in_inference(call, *args, **kwargs):
        arguments = dict(zip(inspect.signature(call).parameters, args), **kwargs)
        result = call(**dict(arguments, training=False))
        call(*args, **kwargs)
        return result

    with contextlib.ExitStack() as stack:
        for layer in layers:
            if hasattr(layer, "_trainable_var"):  # a tensor of the first graph, in TensorFlow 2.0
                stack.callback(setattr, layer, "_trainable_var", layer._trainable_var)
        for layer in normalizations(layers):
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
