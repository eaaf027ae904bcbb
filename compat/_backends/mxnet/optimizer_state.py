"""The state of keras-mxnet's optimizers: saved with a model, and moved between contexts."""

import mxnet as mx

from ..._ranks.arrays import parts_of
from ..._runtime.patching import Patch


def keep(optimizer_class):
    """Give keras-mxnet's optimizers the ``weights`` that ``save()`` and ``load_model()`` use.

    Its own are always empty, so momentum and step count were lost on the way (keras#9197). The
    first array holds the step count and Nadam's schedule; then come the arrays of each weight.
    """

    def arrays(self):
        states = getattr(self, "_compat_states", {})
        flat = [a for index in sorted(states) for a in parts_of(states[index])]
        restored = [mx.nd.array(value) for value in getattr(self, "_compat_restored", ())]
        if not self.num_update:
            return []
        return [mx.nd.array([self.num_update, getattr(self, "m_schedule", 1.0)])] + flat + restored

    def set_weights(self, weights):
        steps, schedule = weights[0] if len(weights) else (0, 1.0)
        self.num_update = self.begin_num_update = int(steps)
        if hasattr(self, "m_schedule"):
            self.m_schedule = float(schedule)
        for counts in self._all_index_update_counts.values():
            counts.clear()
        restored = list(weights[1:])
        for _, state in sorted(getattr(self, "_compat_states", {}).items()):
            for array in parts_of(state):
                array[:] = restored.pop(0) if restored else 0
        self._compat_restored = restored  # for states not made yet, in their order

    def create_state_multi_precision(self, index, weight):
        state = super(optimizer_class, self).create_state_multi_precision(index, weight)
        for array in parts_of(state):
            if getattr(self, "_compat_restored", ()):
                array[:] = self._compat_restored.pop(0)
        self.__dict__.setdefault("_compat_states", {})[index] = state
        return state

    Patch(optimizer_class, "weights", property(arrays, lambda self, value: None))
    Patch(optimizer_class, "set_weights", set_weights)
    Patch(optimizer_class, "create_state_multi_precision", create_state_multi_precision)


# Moving it ------------------------------------------------------------------------------------


def updater_of(model):
    """The updater, which holds the optimizer's state, of a plain model; None before training."""
    was_trained = model.compiled and model._module.optimizer_initialized
    return model._module._curr_module._updater if was_trained else None


def take_to(updater, context):
    """Move the optimizer's state and step counts to ``context``."""
    optimizer = updater.optimizer
    updater.set_states(updater.get_states())  # copies, which move when they are next used
    optimizer._compat_states = updater.states
    # Steps are counted per device id: Adam would begin anew on another one.
    optimizer._all_index_update_counts[context.device_id] = dict(optimizer._index_update_count)
    optimizer._set_current_context(context.device_id)
