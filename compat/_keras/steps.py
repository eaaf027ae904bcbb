"""Steps of the user's own (``train_step`` and the like), in tf.keras and Keras 3.

Keras' own steps call the model. A step of one's own may call the model's parts instead, as those
of GANs and autoencoders do. So these parts run on several devices as well, and the first step of
training is watched: it must have reached one of them.
"""

from .. import _keras, errors
from .._runtime import patching

_STEPS = ("train_step", "test_step", "predict_step", "compute_loss")

_reached = [0]  # how often a call that is divided was begun


def note_call():
    """Note that the call of a model that is divided was reached, divided this time or not."""
    _reached[0] += 1


def has_own_steps(model):
    """Whether a step of this model is the user's."""
    return any(_keras.is_users(getattr(type(model), name, None)) for name in _STEPS)


def called_models(model):
    """The models within ``model`` that a step of the user's may call."""
    if not has_own_steps(model):
        return []
    parts = [layer for layer in _keras.all_layers(model) if layer is not model]
    return [part for part in parts if _keras.keras_of(part) is not None]


def install(kind, model, devices, first):
    """Have a model run on several devices, and the models that steps of its own call.

    Arguments:
        kind: the class of the call that does it. It has an attribute ``belongs_to_step``: whether
            the model became replicated with the one whose steps call it.
        first: where a model stays that cannot be divided, for the warning.
    """
    kind(devices).install(model)
    for part in called_models(model):
        reason = _keras.undivided(part)
        if reason:
            _keras.warn_not_divided(part, reason, first)
        elif kind.of(part) is None:
            kind(devices, belongs_to_step=True).install(part)
    if has_own_steps(model):
        WatchedTraining(devices).install(model)


def remove(kind, model):
    """Make a model plain, and the models within that became replicated with it.

    Returns:
        Whether there was one.
    """
    changed = False
    for part in _keras.all_layers(model):
        call = kind.of(part)
        if call is not None and (part is model or call.belongs_to_step):
            call.remove(part)
            changed = True
    watched = WatchedTraining.of(model)
    if watched is not None:
        watched.remove(model)
    return changed


class WatchedTraining(patching.InstanceMethod):
    """The method that makes the function which trains; the first step of that is watched.

    To be installed where ``has_own_steps``.
    """

    method = "make_train_function"

    def invoke(self, model, *args, **kwargs):
        function = self.plain(model)(*args, **kwargs) or model.train_function
        if not isinstance(function, _WatchedFunction):
            function = _WatchedFunction(model, function)
            model.train_function = function
        return function


class _WatchedFunction:
    def __init__(self, model, function):
        self.model = model
        self.function = function
        self.is_watched = True

    def __getattr__(self, name):
        return getattr(self.function, name)

    def __call__(self, *args, **kwargs):
        before, is_first = _reached[0], self.is_watched
        self.is_watched = False
        result = self.function(*args, **kwargs)
        if self.model.train_function is self:
            self.model.train_function = self.function
        if is_first and _reached[0] == before:
            # At the caller of fit(), in whose code this is deep.
            within = {id(part) for part in called_models(self.model)}
            names = [f"model.{n}" for n, value in vars(self.model).items() if id(value) in within]
            errors.warn(
                f"The first step of training {self.model.name!r} ran on one device: its "
                "train_step() calls neither the model nor a model within it "
                f"({', '.join(sorted(names)) or 'there is none'}). Write compat.parallelize(part) "
                "for each model that it calls; put layers that it calls by themselves into a "
                "keras.Model first."
            )
        return result
