"""TensorFlow 2's models without Keras: ``tf.Module``, ``tf.function``, objects with variables.

An object is called by its type's ``__call__``, so the object gets another type: a subclass of
its own, made for it, of the same name.
"""

import tensorflow as tf

from ... import errors
from .replicated_call import ReplicatedCall
from .sharding import are_arrays, as_tensors


def _is_function(model):
    """Whether what is called is a ``tf.function``, be it the model or its ``__call__``."""
    called = type(model)._compat_plain_class.__call__
    return hasattr(model, "get_concrete_function") or hasattr(called, "get_concrete_function")


def parallelize(model, devices, replicated):
    plain = getattr(type(model), "_compat_plain_class", None)
    if plain is not None:
        model.__class__ = plain
    if replicated:
        model.__class__ = _replicated_class(type(model), NativeCall(devices))
    return model


def _replicated_class(plain, replicated_call):
    def __call__(self, *args, **kwargs):
        return type(self)._compat_call(self, *args, **kwargs)

    def by_plain_class(name):
        """The method of the plain class, while the object is one of it."""

        def method(self, *args, **kwargs):
            replicated, self.__class__ = type(self), plain
            try:
                return getattr(self, name)(*args, **kwargs)
            finally:
                self.__class__ = replicated

        return method

    members = {name: getattr(plain, name) for name in ("__doc__", "__module__", "__qualname__")}
    members.update(__call__=__call__, _compat_plain_class=plain)
    members["_compat_call"] = replicated_call  # or what verifies its first calls
    members["autograph_info__"] = {}  # as in ReplicatedCall
    # Copies and pickles are plain, and what TensorFlow saves: a __call__ that is a tf.function.
    for name in ("__reduce_ex__", "_trackable_children", "_list_functions_for_serialization"):
        if hasattr(plain, name):
            members[name] = by_plain_class(name)
    return type(plain)(plain.__name__, (plain,), members)


class NativeCall(ReplicatedCall):
    """The ``__call__`` of a native model, on several devices."""

    _has_warned = False

    def _given(self, model, given):
        if are_arrays(given) and _is_function(model):  # which makes tensors in any case
            return as_tensors(given)
        if are_arrays(given) and not self._has_warned:
            self._has_warned = True
            errors.warn(
                f"A call of the parallelized {type(model).__name__} was given numpy arrays, which "
                "are not split, so it ran on one device: give it tensors, tf.constant(array)."
            )
        return given

    def _only_traced(self, model):
        return False

    def _layers(self, model):
        return []  # only Keras adds losses within a call

    def _trace(self, call, arguments, state):
        if tf.executing_eagerly() and not self.traces:
            # Variables that the first call makes must not be made within a replica.
            args, kwargs = arguments.structure
            tf.function(call).get_concrete_function(*args, **kwargs)
        return super()._trace(call, arguments, state)

    def plain(self, model):
        plain = type(model)._compat_plain_class
        return plain.__call__.__get__(model, plain)

    def _is_converted(self, model):
        return True
