"""The one module that knows the Kerases apart: keras 2, keras-mxnet, tf.keras and Keras 3."""

import os
import sys

from . import _detect, errors


def keras_of(model):
    """The Keras (its top module) whose class ``model`` is an instance of, or None.

    Only modules that are imported already are looked at: a model's Keras is.
    """
    for parent in type(model).__mro__:
        if parent.__name__ not in ("Model", "Network", "Container"):
            continue
        for prefix, keras in (
            ("tensorflow.python.keras.", "tensorflow.keras"),
            ("tensorflow_core.python.keras.", "tensorflow.keras"),  # TensorFlow 1.15 and 2.0
            ("tf_keras.", "tf_keras"),
            ("keras.", "keras"),
        ):
            if parent.__module__.startswith(prefix):
                return _module(keras)
    return None


def _module(name):
    if name == "tensorflow.keras":  # a lazily loaded attribute, not always in sys.modules
        return sys.modules["tensorflow"].keras
    return sys.modules[name]


def backend_name(keras):
    """What this Keras calls the backend it runs on."""
    return keras.backend.backend() if hasattr(keras.backend, "backend") else "tensorflow"


def output_names(model):
    """The names that a functional or Sequential model's losses go by."""
    names = getattr(model, "output_names", None)
    return list(names or [model.layers[-1].name])  # Keras 3's Sequential has none


def identity(keras, name):
    """A layer that gives its input, unchanged, another name."""
    if backend_name(keras) == "mxnet":
        # There any layer that returns its input itself fails: K.identity() evaluates it.
        return keras.layers.LeakyReLU(1.0, name=name)
    return keras.layers.Activation("linear", name=name)


def set_floatx(floatx, backend):
    """Set the float type of every Keras on this backend, importing those that are installed.

    Keras reads its float type from its own file when it is imported, whatever the backend was
    told, so the two would disagree (keras#3772).

    Returns:
        Lines for the report.
    """
    lines = []
    for name in kerases(backend):
        keras = _import(name)
        keras.backend.set_floatx(floatx)
        lines.append("{}.backend.set_floatx({!r})".format(name, floatx))
    return lines


def versions(backend):
    """Versions of the backend's framework and of the standalone Keras, as installed."""
    found = [
        (backend.framework, _detect.installed_version(backend)),
        ("keras", _detect.distribution_version("keras")),
        ("keras-mxnet", _detect.distribution_version("keras-mxnet")),
    ]
    return {name: version for name, version in found if version}


def kerases(backend):
    """The installed Kerases that run on this backend, the standalone one first."""
    running, _ = _detect.keras_backend(os.environ)
    names = ["keras"] if running in (backend.name, backend.framework) else []
    if backend.framework == "tensorflow":
        names.append("tensorflow.keras")
    return names


def _import(name):
    import importlib

    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever an installation can do wrong
        if name == "tensorflow.keras":
            return _module(name)
        raise errors.broken_install(name, error) from error


def import_keras(backend):
    """Import the Keras that runs on this backend: the standalone one where it does.

    Raises:
        NotInstalledError: none does.
        BrokenInstallError: it is installed, but importing it fails.
    """
    names = kerases(backend)
    if not names:
        raise errors.no_keras(backend.name, backend.extra)
    return _import(names[0])
