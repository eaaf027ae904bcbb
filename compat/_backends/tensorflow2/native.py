"""TensorFlow 2's models without Keras: ``tf.Module``, ``tf.function``, objects with variables.

Python looks up ``__call__`` in an object's class, so the class of the object is changed: to a
subclass of the same name, made for this object.
"""

from typing import Any, Sequence

import tensorflow as tf

from ... import errors
from ..._rows.splitting import unsplit
from ..._runtime import patching
from . import watched_loops
from .arguments import are_arrays
from .graph import recording
from .replicas import ReplicatedCall
from .verification import VerifiedCall


def parallelize(model: "Any", devices: "Sequence[str]", replicated: bool) -> "Any":
    """Give a model the class whose calls have replicas on devices, or its own one back.

    Arguments:
        model: an object with variables.
        devices: those of the replicas.
        replicated: False if the model runs unsplit.
    """
    plain = getattr(type(model), "_compat_plain_class", None)
    if plain is not None:
        type(model)._compat_call.kept.free()
        patching.change_class(model, plain)
    if replicated:
        patching.change_class(model, _replicated_class(type(model), NativeCall(devices)))
    return model


def verify(model: "Any", verification: "Any") -> None:
    """Verify calls of a model, if it runs on several devices; with None, stop that."""
    if "_compat_call" in vars(type(model)):
        type(model)._compat_call.verification = verification


def _replicated_class(plain, replicated_call):
    def __call__(self, *args, **kwargs):
        return watched_loops.called(self, type(self)._compat_call, (self,) + args, kwargs)

    def by_plain_class(name):
        """Return a method that calls that of the plain class, of which the object is meanwhile."""

        def method(self, *args, **kwargs):
            replicated = type(self)
            patching.change_class(self, plain)
            try:
                return getattr(self, name)(*args, **kwargs)
            finally:
                patching.change_class(self, replicated)

        return method

    members = {name: getattr(plain, name) for name in ("__doc__", "__module__", "__qualname__")}
    members.update(__call__=__call__, _compat_plain_class=plain, _compat_call=replicated_call)
    members["autograph_info__"] = {}  # as in ReplicatedCall
    # Copies and pickles are plain, and so is a __call__ that TensorFlow saves, a tf.function.
    for name in ("__reduce_ex__", "_trackable_children", "_list_functions_for_serialization"):
        if hasattr(plain, name):
            members[name] = by_plain_class(name)
    return type(plain)(plain.__name__, (plain,), members)


class NativeCall(ReplicatedCall):
    """The ``__call__`` of a native model, on several devices."""

    is_of_keras = False
    _has_warned = False
    _has_warned_of_function = False
    verification = None

    def invoke(self, model, *args, **kwargs):
        kind, verification = "train" if recording() else "predict", self.verification
        is_wanted = verification is not None and verification.wants(kind)
        if is_wanted and not unsplit.here():
            if tf.executing_eagerly() and verification.is_due(kind):
                return verification.verify(kind, VerifiedCall(self, model, args, kwargs))
            if not (tf.executing_eagerly() or self._has_warned_of_function):
                self._has_warned_of_function = True
                errors.warn(
                    f"verify={verification.requested}: model {verification.record.model!r} is "
                    "called within a tf.function, where there are no numbers to compare yet, so "
                    "those calls are not verified. Call it once outside, within a tf.GradientTape "
                    "for its gradients: model(batch)."
                )
        return super().invoke(model, *args, **kwargs)

    def _converted(self, model, arguments):
        if are_arrays(arguments) and not self._has_warned:
            self._has_warned = True
            errors.warn(
                f"A call of the parallelized {type(model).__name__} was given numpy arrays, which "
                "are not split, so it ran on one device: give it tensors, tf.constant(array)."
            )
        return arguments

    def _trace(self, call, arguments, state, effects):
        if tf.executing_eagerly() and not self.traces:
            # The first call may make variables, which must not happen within a replica.
            args, kwargs = arguments.structure
            with effects.isolated():
                tf.function(call).get_concrete_function(*args, **kwargs)
        return super()._trace(call, arguments, state, effects)

    def plain(self, model):
        plain = type(model)._compat_plain_class
        return plain.__call__.__get__(model, plain)
