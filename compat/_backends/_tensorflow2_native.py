"""TensorFlow 2's models without Keras: ``tf.Module``, ``tf.function``, objects with variables.

An object is called by its type's ``__call__``, so the object gets another type: a subclass of
its own, made for it, of the same name.
"""

import contextlib
import functools

from .tensorflow2 import ReplicatedCall, _mean


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
        return replicated_call(self, *args, **kwargs)

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
        self._traced = set()

    def _only_traced(self, tf, model):
        return False

    def _state_of(self, tf, model):
        return NativeState(tf, model, self._traced)

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


class NativeState:
    """State that a call sets: each replica starts from the same, and it is set once.

    Floats that are not trained become the mean weighted by the replicas' rows; integers
    (counters) what one replica made of them.
    """

    def __init__(self, tf, model, traced):
        self.tf = tf
        self.model = model
        self.traced = traced

    def prepare(self, call, args, kwargs):
        tf = self.tf
        if tf.executing_eagerly() and not self.traced:
            # Variables that the first call makes must not be made within a replica.
            tf.function(call).get_concrete_function(*args, **kwargs)
            self.traced.add(True)
        self.variables = [v for v in self._variables(args, kwargs) if self._is_state(v)]
        self.before = [variable.read_value() for variable in self.variables]
        self.after = []  # type: list

    def _variables(self, args, kwargs):
        if hasattr(self.model, "get_concrete_function"):
            plain = type(self.model)._compat_plain_class
            return plain.get_concrete_function(self.model, *args, **kwargs).graph.variables
        found = list(getattr(self.model, "variables", ()))
        found += [value for value in _held(self.model) if _is_variable(value)]
        return list({id(variable): variable for variable in found}.values())

    def _is_state(self, variable):
        if variable.dtype.is_floating:
            return not variable.trainable
        return variable.shape.rank == 0  # others are random generators', which go on

    @contextlib.contextmanager
    def replica(self):
        yield []
        self.after.append([variable.read_value() for variable in self.variables])
        for variable, before in zip(self.variables, self.before):
            variable.assign(before)

    def finish(self, shares):
        for variable, values in zip(self.variables, zip(*self.after)):
            floating = variable.dtype.is_floating
            variable.assign(_mean(self.tf, values, shares) if floating else values[-1])

    def add_loss(self, place, loss):
        raise AssertionError("only Keras adds losses within a call")
