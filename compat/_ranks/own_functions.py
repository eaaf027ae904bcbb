"""Functions that a script of Keras 2 makes by K.function(): on ranks they may not train a model.

``K.function(inputs, outputs, updates)`` with an optimizer's updates makes a step of which Keras'
models know nothing, so that no gradients would be exchanged. One that computes gradients exchanges
those of a model's loss, and a warning names others.
"""

import contextlib
import functools
import weakref
from typing import Any

from .. import _keras, errors
from .._runtime import patching
from . import script_gradients

_trained: "weakref.WeakSet[Any]" = weakref.WeakSet()  # the models of the ranks


@contextlib.contextmanager
def by_keras():
    """Allow functions that Keras makes within for a model, which all ranks run together."""
    watching = [patch for patch in patching.patches() if isinstance(patch, _Refusal)]
    for patch in watching:
        patch.take_back()
    try:
        yield
    finally:
        for patch in watching:
            _Refusal(patch.owner, patch.name, patch.value)


class _Refusal(patching.WatchingPatch):
    def __init__(self, owner, name, value):
        super().__init__(owner, name, value)
        self.value = value


def watch(model, kind):
    """Refuse, from now on, functions that a script makes to train this model.

    Arguments:
        model: one of the ranks'.
        kind: a subclass of ``keras2.MakeFunction``, which knows what functions compute.
    """
    _trained.add(model)
    backend = _keras.keras_of(model).backend
    if patching.find(backend, "function") is None:
        _Refusal(backend, "function", _refusing(backend.function, kind))


def models():
    """Return the models of the ranks, each as the one that makes its functions."""
    return [model for model in map(_keras.inner_model, list(_trained)) if model is not None]


def watch_optimizers(kinds):
    """Refuse steps in which a script applies gradients by an optimizer, such as TensorFlow's.

    Arguments:
        kinds: classes of optimizers; those without ``apply_gradients`` are left out.
    """
    for kind in kinds:
        plain = getattr(kind, "apply_gradients", None)
        if plain is not None and patching.find(kind, "apply_gradients") is None:
            _Refusal(kind, "apply_gradients", _refusing_to_apply(plain))


def _refusing_to_apply(plain):
    @functools.wraps(plain)
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        trained = [variable for gradient, variable in pairs if gradient is not None]
        refuse(f"{type(self).__name__}.apply_gradients()", trained)
        return plain(self, pairs, *args, **kwargs)

    return apply_gradients


def refuse(call, variables):
    """Check that no variable that a call in the script trains belongs to a model of the ranks.

    Arguments:
        call: the name of the call.
        variables: those that it trains.

    Raises:
        UnsupportedError: one of them does.
    """
    ids = set(map(id, variables))
    for model in list(_trained):
        if not ids.isdisjoint(map(id, model.trainable_weights)):
            raise errors.UnsupportedError(
                f"{model.name!r} cannot train as one of several ranks in a loop of your own around "
                f"{call}: nothing exchanges its gradients. Give compile() the loss, and call fit() "
                "or train_on_batch()."
            )


def _refusing(plain, kind):
    @functools.wraps(plain)
    def function(inputs, outputs, updates=None, *args, **kwargs):
        for model in models():
            script_gradients.warn_of_function(model, kind.lines_of_gradients(model, outputs))
        if updates is None:
            made = plain(inputs, outputs, *args, **kwargs)
        else:
            made = plain(inputs, outputs, updates, *args, **kwargs)
        # To set weights from others, or to values that are fed, is not training.
        if updates and any(map(_has_rows, inputs)):
            weights = [weight for model in _trained for weight in model.trainable_weights]
            refuse("K.function()", kind.written(made, updates, weights))
        return kind.waiting_for_others(made, outputs)

    return function


def _has_rows(placeholder):
    """Return whether a placeholder has a batch dimension."""
    shape = getattr(placeholder, "_keras_shape", None) or getattr(placeholder, "shape", ()) or ()
    try:
        first = list(shape)[0]
    except (TypeError, ValueError, IndexError):  # a number, or of any shape
        return False
    return not isinstance(getattr(first, "value", first), int) or first < 0
