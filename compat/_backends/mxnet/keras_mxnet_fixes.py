"""Faults of keras-mxnet that make a model lose its weights or its optimizer's state, fixed."""

import weakref
from numbers import Number

import keras
from keras.backend import mxnet_backend

from ..._runtime.patching import Patch, find
from . import optimizer_state, symbol_executors
from .context_names import context_named
from .group_placement import place_groups


def fix(default_device):
    """Set keras-mxnet's default context, and fix what makes models lose weights.

    Arguments:
        default_device: a function that returns the name of the device of models that are not
            parallelized. Of several calls in a process the first one's counts.

    Returns:
        Lines for the report.
    """
    if find(mxnet_backend, "set_model") is None:
        find_context, models = mxnet_backend._get_mxnet_context, _Models()

        def get_mxnet_context(context):
            if context is None and not mxnet_backend._CURRENT_SCOPE_CTX:
                return [context_named(default_device())]
            return find_context(context)

        def set_value(x, value):  # Keras' own makes float32, and fails under another floatx
            value = [value] if isinstance(value, Number) else value
            array = mxnet_backend.mx.nd.array(value, dtype=x.dtype)
            x.bind(array)
            models.set_weight(x.name, array)

        Patch(mxnet_backend, "set_model", models.add)
        Patch(mxnet_backend, "_get_mxnet_context", get_mxnet_context)
        for module in (mxnet_backend, keras.backend):
            Patch(module, "set_value", set_value)
        optimizer_state.keep(keras.optimizers.SGD.__mro__[1])
    return [
        "keras-mxnet fixed: weights are read and set for every model, not only for the one "
        "compiled last,",
        "and for RNN layers not unrolled; the optimizer's state is saved with its model",
    ]


class _Models:
    """All compiled models, where keras-mxnet keeps only the one compiled last (``_MODEL``).

    With the last one only, ``get_weights()`` of any other model misses what was trained, and
    ``set_weights()`` on it is overwritten by the values trained before. This object stands in
    its place, has no weights of its own, and passes on to all models what is read and set.
    """

    _args = _auxs = ()

    def __init__(self):
        self._models = weakref.WeakSet()

    def add(self, model):
        """Replaces ``set_model``, which is called when a model was compiled, or will predict."""
        before = mxnet_backend._MODEL
        if before is not self:  # at first, and after clear_session() has set it to None
            self._sync_weights()
            # Names start again after clear_session(): not to be taken for those of old models.
            self._models = weakref.WeakSet([] if before is None else [before])
            mxnet_backend._MODEL = self
        _add_missing_weights(model)
        place_groups(model, model._module)
        self._models.add(model)

    def _sync_weights(self):
        if any(model._auxs for model in list(self._models) if model._weights_dirty):
            symbol_executors.wait_for_updates()
        for model in list(self._models):
            model._sync_weights()

    def set_weight(self, name, array):
        if mxnet_backend._MODEL is self:
            for model in list(self._models):
                if name in model._args:
                    model._set_weights({name: array}, {})
                if name in model._auxs:
                    model._set_weights({}, {name: array})


def _add_missing_weights(model):
    """Tell a model the weights that keras-mxnet did not find in its graph.

    It walks the graph by the arguments of Keras functions, and misses what the loop of an RNN
    layer that is not unrolled takes from outside: such a layer began with zeros whatever its
    initialiser, and ``get_weights()`` and ``save()`` missed what it had learnt.
    """
    for weight in model.weights:
        for names, held in ((model._arg_names, model._args), (model._aux_names, model._auxs)):
            if weight.name in (names or ()) and weight.name not in held:
                held[weight.name] = weight.get_bind_values()[weight.name]
