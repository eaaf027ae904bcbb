"""Changes to Keras' layers and functions, for traces of a call and for several devices."""

import contextlib
import functools
import inspect
import sys

import tensorflow as tf

from ..._runtime import patching
from .state import normalizations


@contextlib.contextmanager
def normalizing_rows(layers):
    """Within, these layers' batch normalization returns what inference does: each row by itself.

    Then they are called as they would be, so that what they set can be seen.
    """

    def in_inference(call, *args, **kwargs):
        given = dict(zip(inspect.signature(call).parameters, args), **kwargs)
        result = call(**dict(given, training=False))
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


def read_kernels():
    """From now on, have Keras 3 hand its convolutions values in place of variables.

    It has XLA compile a convolution in groups, and XLA takes no variable of another device.
    """
    nn = sys.modules.get("keras.src.backend.tensorflow.nn")
    if nn is None or patching.find(nn, "conv") is not None:
        return
    plain = nn.conv

    @functools.wraps(plain)
    def conv(inputs, kernel, *args, **kwargs):
        return plain(inputs, tf.convert_to_tensor(kernel), *args, **kwargs)

    patching.MendingPatch(nn, "conv", conv)
