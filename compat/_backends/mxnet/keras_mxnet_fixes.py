"""Faults of keras-mxnet that make a model lose its weights or its optimizer's state, fixed."""

import weakref
from numbers import Number

import keras
import mxnet as mx
from keras.backend import mxnet_backend

from ..._runtime import nested
from ..._runtime.patching import Patch, find
from .configuration import context_named
from .device_scope import place_groups
from .optimizer_states import step_counts
from .synchronization import wait_for_updates


def fix(default_device):
    """Set keras-mxnet's default context, and fix what makes models lose weights.

    Arguments:
        default_device: a function that returns the name of the device of models that are not
            parallelized. Of several calls in a process the first one's counts.

    Returns:
        Lines for the report.
    """
    if find(mxnet_backend, "set_model") is None:
        owner, name = _context_function()
        find_context, models = getattr(owner, name), _Models()

        def get_mxnet_context(context):
            if context is None and not getattr(mxnet_backend, "_CURRENT_SCOPE_CTX", None):
                return [context_named(default_device())]
            return find_context(context)

        def set_value(x, value):  # Keras' own makes float32, and fails under another floatx
            value = [value] if isinstance(value, Number) else value
            array = mx.nd.array(value, dtype=x.dtype)
            x.bind(array)
            # What models train, which keras-mxnet 2.1 no longer reads otherwise.
            x.tensor = x.get_bind_values().get(x.name, array)
            models.set_weight(x.name, array)

        rnn = mxnet_backend.rnn
        named = mxnet_backend.keras_mxnet_symbol(
            lambda state: mxnet_backend.KerasSymbol(mx.sym.identity(state.symbol))
        )

        def rnn_with_named_states(*args, **kwargs):
            # Keras knows outputs by the names of their nodes. Those of a loop have one name, so
            # it took the last one for all states, and did not find any in inference.
            last, outputs, states = rnn(*args, **kwargs)
            return last, outputs, [named(state) for state in states]

        Patch(mxnet_backend, "set_model", models.add)
        is_method = isinstance(owner, type)
        Patch(owner, name, staticmethod(get_mxnet_context) if is_method else get_mxnet_context)
        for module in (mxnet_backend, keras.backend):
            Patch(module, "set_value", set_value)
            Patch(module, "rnn", rnn_with_named_states)
        keep_state(keras.optimizers.SGD.__mro__[1])
    return [
        "keras-mxnet fixed: weights are read and set for every model, not only for the one "
        "compiled last,",
        "and for RNN layers not unrolled, which keep all of their states if they are stateful;",
        "the optimizer's state is saved with its model",
    ]


def _context_function():
    """Return the owner of the function that chooses a model's contexts, and the function's name."""
    name = "_get_mxnet_context"
    if hasattr(mxnet_backend, name):
        return mxnet_backend, name
    return keras.models.Model, "get_mxnet_context"  # of keras-mxnet before 2.2.4.2


def default_contexts():
    """Return the contexts of models for which none is chosen."""
    owner, name = _context_function()
    return getattr(owner, name)(None)


class _Models:
    """All compiled models, where keras-mxnet keeps only the one compiled last (``_MODEL``).

    With the last one alone, ``get_weights()`` of any other model returns untrained weights, and
    values of its ``set_weights()`` are overwritten by those trained before. This object replaces
    that model, has no weights itself, and has all models read and set theirs.
    """

    _args = _auxs = ()

    def __init__(self):
        self._models = weakref.WeakSet()

    def add(self, model):
        """Add a model that was compiled or will predict, in place of ``set_model``."""
        before = mxnet_backend._MODEL
        if before is not self:  # at first, and after clear_session() has set it to None
            self._sync_weights()
            # Names start again after clear_session(): not to be taken for those of old models.
            self._models = weakref.WeakSet([] if before is None else [before])
            mxnet_backend._MODEL = self
        _add_missing_weights(model)
        place_groups(model)
        self._models.add(model)

    def _sync_weights(self):
        if any(model._auxs for model in list(self._models) if model._weights_dirty):
            wait_for_updates()
        for model in list(self._models):
            model._sync_weights()

    def set_weight(self, name, array):
        """Set a weight or auxiliary state in all models that have one of this name."""
        if mxnet_backend._MODEL is self:
            for model in list(self._models):
                replicas = getattr(model, "_compat_replicas", None)
                set_weights = model._set_weights if replicas is None else replicas.set_weights
                if name in model._args:
                    set_weights({name: array}, {})
                if name in model._auxs:
                    set_weights({}, {name: array})


def _add_missing_weights(model):
    """Add the weights that keras-mxnet did not find in a model's graph.

    It traverses the graph by the arguments of Keras functions, and misses weights that are used in
    the loop of an RNN layer that is not unrolled: such a layer began with zeros whatever its
    initializer, and its trained weights were missing in ``get_weights()`` and ``save()``.
    """
    for weight in model.weights:
        for names, held in ((model._arg_names, model._args), (model._aux_names, model._auxs)):
            if weight.name in (names or ()) and weight.name not in held:
                held[weight.name] = weight.get_bind_values()[weight.name]


def keep_state(optimizer_class):
    """Give keras-mxnet's optimizers the ``weights`` that ``save()`` and ``load_model()`` use.

    keras-mxnet's are always empty, so momentum and step count were not saved (keras#9197). The
    first array holds the step count and Nadam's schedule, the others the state of each weight.
    """

    def arrays(self):
        states = getattr(self, "_compat_states", {})
        flat = [a for index in sorted(states) for a in nested.leaves(states[index])]
        restored = [mx.nd.array(value) for value in getattr(self, "_compat_restored", ())]
        if not self.num_update:
            return []
        return [mx.nd.array([self.num_update, getattr(self, "m_schedule", 1.0)])] + flat + restored

    def set_weights(self, weights):
        steps, schedule = weights[0] if len(weights) else (0, 1.0)
        self.num_update = self.begin_num_update = int(steps)
        if hasattr(self, "m_schedule"):
            self.m_schedule = float(schedule)
        for counts in step_counts(self):
            counts.clear()
        # keras-mxnet 2.1 passes datasets of a file that it closes then.
        restored = [weight[:] for weight in weights[1:]]
        for _, state in sorted(getattr(self, "_compat_states", {}).items()):
            for array in nested.leaves(state):
                array[:] = restored.pop(0) if restored else 0
        self._compat_restored = restored  # for states not made yet, in their order

    def create_state_multi_precision(self, index, weight):
        state = super(optimizer_class, self).create_state_multi_precision(index, weight)
        for array in nested.leaves(state):
            if getattr(self, "_compat_restored", ()):
                array[:] = self._compat_restored.pop(0)
        if not hasattr(self, "_compat_states"):
            self._compat_states = {}
        self._compat_states[index] = state
        return state

    Patch(optimizer_class, "weights", property(arrays, lambda self, value: None))
    Patch(optimizer_class, "set_weights", set_weights)
    Patch(optimizer_class, "create_state_multi_precision", create_state_multi_precision)
