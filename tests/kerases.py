"""Whichever Keras is under test, for models that are written once."""

import os

import numpy as np

import compat
from compat import _keras
from compat._configuration import packages

#: Devices that are simulated: as many as any test has models on.
SIMULATED = 8

# Theano runs what it has in Python, which takes less time than compiling it in C. Its optimizer is
# the default one, with which most scripts run.
os.environ.setdefault("THEANO_FLAGS", "optimizer_excluding=conv_gemm:AbstractConvCheck,cxx=")


def configure(backend, floatx=None, verify=0):
    """Simulate devices, with floats of 64 bits where this Keras can."""
    if floatx is None:
        # In 64 bits keras-mxnet fails, as do the oldest; Keras on torch and JAX sums in 32.
        version = packages.version("keras") or ""
        few = backend.name in ("mxnet", "torch", "jax") or version.startswith(("2.0.", "2.1."))
        floatx = "float32" if few else "float64"
    devices = compat.configure_gpu(simulate=SIMULATED, floatx=floatx, verify=verify)
    if backend.name == "theano":
        # It draws from 15,360 streams, each of which takes a call of Python without a compiler.
        from theano.sandbox.rng_mrg import MRG_RandomStreams

        MRG_RandomStreams.n_streams = lambda self, size: 60
    return devices


def is_keras_3(keras):
    return hasattr(keras, "ops")


def runs_eagerly(keras):
    """Whether a model can be called with arrays, and state be assigned where it is computed."""
    if is_keras_3(keras):
        return True
    if _keras.backend_name(keras) != "tensorflow":
        return False
    import tensorflow

    return getattr(tensorflow, "executing_eagerly", bool)()


def variables(model):
    """Return the variables of a model, in the order of ``get_weights()``."""
    if "keras.engine" in str(type(model).__mro__):  # Keras 2 lists those that are trained first
        return [variable for layer in model.layers for variable in layer.weights]
    return model.weights


def randomized(model, random):
    """Random values for the weights of a model; variances and other state stay as they are made."""
    kept = {id(weight) for weight in model.non_trainable_weights}
    return [
        value if id(weight) in kept and np.ndim(value) < 2
        else (random.normal(size=value.shape) * 0.4).astype(value.dtype)
        for weight, value in zip(variables(model), model.get_weights())
    ]  # fmt: skip


def one(values):
    """Keras takes a list of one as well; what most people write is the one."""
    return values[0] if isinstance(values, list) and len(values) == 1 else values


def optimizer(keras, kind, options):
    """Return an optimizer from its text, whatever this Keras calls the learning rate."""
    cls = getattr(keras.optimizers, kind)
    for name in ("learning_rate", "lr"):
        try:
            return eval("cls({}=0.02, {})".format(name, options), {"cls": cls})
        except (KeyError, TypeError, ValueError):
            if name == "lr":
                raise
