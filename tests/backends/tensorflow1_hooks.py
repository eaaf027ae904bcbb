"""Hooks of TensorFlow 1 that no step depends on: see ``hooks``."""

from compat._backends.tensorflow1 import profiler


def exempt(keras):
    """Their names, each with the reason: what runs is noted twice, by functions and sessions."""
    found = {"BaseSession._do_run": "Keras' functions note the same"}
    made = type(keras.backend.function([], [keras.backend.constant(1.0)]))
    for kind in profiler.keras_functions():
        if kind is not made:
            found[f"{kind.__name__}.__call__"] = "this Keras has other functions"
    if hasattr(made, "_make_callable"):
        found.pop(f"{made.__name__}.__call__", None)
    else:  # it runs a session each time
        found[f"{made.__name__}.__call__"] = "sessions note the same"
    return found
