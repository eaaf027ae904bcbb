"""TensorFlow 2's models without Keras: ``tf.Module``, ``tf.function``, objects with variables.

An object is called by its type's ``__call__``, so the object gets another type: a subclass of
its own, made for it, of the same name.
"""

import contextlib
import functools
import sys

from ... import errors
from .layer_state import VariableState
from .replicated_call import ReplicatedCall
from .sharding import has_rows


def is_native(model):
    kinds = [(c.__module__.split(".")[0], c.__name__) for c in type(model).__mro__]
    if not callable(model) or isinstance(model, type):
        return False
    if any(top in ("keras", "tf_keras") for top, _ in kinds) or any(
        ".keras." in c.__module__ for c in type(model).__mro__
    ):
        return False
    ours = {name for top, name in kinds if top.startswith("tensorflow")}
    if "Variable" in ours or "Tensor" in ours:
        return False
    return bool(ours & {"Module", "Function"}) or any(map(_is_variable, _held(model)))


def _held(model):
    return list(getattr(model, "__dict__", {}).values())


def _is_array(value):
    return type(value).__module__ == "numpy" and getattr(value, "ndim", 0) > 0


def _is_function(model):
    """Whether what is called is a ``tf.function``, be it the model or its ``__call__``."""
    called = type(model)._compat_plain_class.__call__
    return hasattr(model, "get_concrete_function") or hasattr(called, "get_concrete_function")


def _is_variable(value):
    return any(
        c.__name__ == "Variable" and c.__module__.startswith("tensorflow")
        for c in type(value).__mro__
    )


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
            with _of_class(self, plain):
                return getattr(self, name)(*args, **kwargs)

        return method

    members = {
        "__call__": __call__,
        "__doc__": plain.__doc__,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "_compat_plain_class": plain,
        "_compat_call": replicated_call,  # or what verifies its first calls
        "autograph_info__": {},  # as in ReplicatedCall
        "__reduce_ex__": by_plain_class("__reduce_ex__"),  # copies and pickles are plain
    }
    # What TensorFlow saves: a __call__ that is a tf.function, as the user made it.
    for name in ("_trackable_children", "_list_functions_for_serialization"):
        if hasattr(plain, name):
            members[name] = by_plain_class(name)
    return type(plain)(plain.__name__, (plain,), members)


@contextlib.contextmanager
def _of_class(model, plain):
    replicated = type(model)
    model.__class__ = plain
    try:
        yield
    finally:
        model.__class__ = replicated


class NativeCall(ReplicatedCall):
    """The ``__call__`` of a native model, on several devices."""

    def __init__(self, devices):
        super().__init__(devices)
        self._traced = set()  # whether the first call has made its variables
        self._has_warned = False

    def __call__(self, model, *args, **kwargs):
        tf = sys.modules["tensorflow"]
        leaves = tf.nest.flatten((args, kwargs))
        if any(map(_is_array, leaves)) and not any(has_rows(tf, leaf) for leaf in leaves):
            if _is_function(model):  # which makes tensors of them in any case
                args, kwargs = tf.nest.map_structure(
                    lambda leaf: tf.convert_to_tensor(leaf) if _is_array(leaf) else leaf,
                    (args, kwargs),
                )
            elif not self._has_warned:
                self._has_warned = True
                text = (
                    "A call of the parallelized {} was given numpy arrays, which are not "
                    "split, so it ran on one device: give it tensors, tf.constant(array).".format(
                        type(model).__name__
                    )
                )
                errors.warn(text)
        return super().__call__(model, *args, **kwargs)

    def _only_traced(self, tf, model):
        return False

    def _state_of(self, tf, model):
        return NativeState(tf, model, len(self.devices), self._traced)

    def _unreplicated(self, tf, model, *args, **kwargs):
        plain = type(model)._compat_plain_class
        call = functools.partial(plain.__call__, model)
        if hasattr(plain.__call__, "__get__"):
            call = plain.__call__.__get__(model, plain)
        if not tf.executing_eagerly():
            from tensorflow.python.autograph.core import ag_ctx
            from tensorflow.python.autograph.impl import api

            call = api.tf_convert(call, ag_ctx.control_status_ctx())
        return call(*args, **kwargs)


class NativeState(VariableState):
    """State of a model without Keras: any of its variables may be set by the call."""

    def __init__(self, tf, model, replicas, traced):
        super().__init__(tf, model, replicas)
        self.made = traced

    def prepare(self, call, args, kwargs, trace):
        tf = self.tf
        if tf.executing_eagerly() and not self.made:
            # Variables that the first call makes must not be made within a replica.
            tf.function(call).get_concrete_function(*args, **kwargs)
            self.made.add(True)
        self.watch(self._variables(args, kwargs), trace)

    def _variables(self, args, kwargs):
        if hasattr(self.model, "get_concrete_function"):
            plain = type(self.model)._compat_plain_class
            return plain.get_concrete_function(self.model, *args, **kwargs).graph.variables
        found = list(getattr(self.model, "variables", ()))
        return found + [value for value in _held(self.model) if _is_variable(value)]

    @contextlib.contextmanager
    def replica(self):
        yield []
        self.note()

    @contextlib.contextmanager
    def traced(self):
        yield []

    def add_loss(self, place, loss):
        raise AssertionError("only Keras adds losses within a call")
