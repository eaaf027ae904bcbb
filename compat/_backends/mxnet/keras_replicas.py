"""Keras models on several contexts, for the MXNet backend."""

import contextlib
import functools

import mxnet as mx
from keras.backend import mxnet_backend as K

from ..._runtime.patching import replaced
from . import symbol_graph
from .keras_mxnet_fixes import device_with_replicas, groups_of, make_states_anew, place_groups
from .phase_executors import Phase, state_names


def parallelize(model, contexts):
    """Run ``model`` on ``contexts``; one context gives the plain behaviour back."""
    replicas = getattr(model, "_compat_replicas", None)
    if len(contexts) > 1:
        if groups_of(model):
            raise device_with_replicas(model.name)
        (replicas or ModelReplicas(model)).move(contexts)
    elif replicas is not None or model._context != contexts:
        (replicas or ModelReplicas(model)).remove()
        model._context = contexts
        if model.compiled:  # else Keras makes a module for each prediction
            model._module = mx.mod.BucketingModule(
                model._module._sym_gen, "pred", context=contexts,
                fixed_param_names=model._fixed_weights,
            )  # fmt: skip
            place_groups(model, model._module)


class ExportedBuckets(dict):
    """The buckets of the module of a model on several contexts, which runs no batch itself.

    ``save_mxnet_model()`` and ``get_mxnet_model_info()`` read the one that predicts: the module
    is bound then, and takes the weights.
    """

    def __init__(self, model, inputs):
        self.model = model
        pairs = zip(model.inputs, inputs)
        self.shapes = [mx.io.DataDesc(s.name, array.shape, dtype=s.dtype) for s, array in pairs]

    def __getitem__(self, key):
        module = self.model._module
        self.model._sync_weights()
        if not module.binded:
            module.bind(data_shapes=self.shapes, for_training=False)
        module.set_params(self.model._args, self.model._auxs, allow_missing=True)
        return super().__getitem__(key)


# Replicas -------------------------------------------------------------------------------------


class ModelReplicas:
    """The replicas of one model, each on its own context.

    Keras' graph of a phase (train, test, predict) is cut in two. The *body*, all that the
    model's outputs depend on, runs on each context with its shard of the batch. The *head*, the
    rest, runs once, on the first context, with the whole batch gathered from there: losses,
    metrics, penalties, masks' means. Its gradient at the cut is what the bodies go back from.
    So any loss, also one that compares rows with one another, and every metric is that of one
    device, however uneven the shards; summed over the replicas, the gradients are, too. One
    optimizer updates the first context's weights, which are then copied to the others.

    Differs from one device:

    - BatchNormalization normalises each shard by its own statistics. The moving averages take
      one step to the mean of the replicas' new values, weighted by shard size, as
      tf.distribute.MirroredStrategy does.
    - Dropout draws an independent mask in each replica.

    What computes across the rows of a batch, and all that follows from it, is the head's, with a
    warning, since it runs on one device; so is an operation with states other than moving
    averages. Sums and other states that layers update are the head's, too.

    Stateful RNNs do not differ: each replica has the states of its rows. What no output depends
    on (a layer's own loss or averages) is computed by the head.

    keras-mxnet calls a model's own methods at a few points. These are replaced on the instance,
    so it stays the same object, and compile(), whenever it comes, is followed at the next batch.
    """

    METHODS = ("compile", "_sync_weights", "_set_weights")

    def __init__(self, model):
        self.model = model
        self._source = None  # the symbol, or the outputs, that arrays and phases were made for
        self._forget()
        if model.compiled:
            K.set_model(model)  # it may have been compiled before keras-mxnet was fixed
            self._source = model._pred_mxnet_symbol
            if model._module.optimizer_initialized:
                self._updater = model._module._curr_module._updater
        model._sync_weights()
        self._replaced = {name: getattr(self, name) for name in self.METHODS}
        for kind in ("train", "test", "predict"):
            self._replaced[f"_make_{kind}_function"] = functools.partial(self._make, kind)
        vars(model).update(self._replaced, _compat_replicas=self)

    def move(self, contexts):
        """Go on with other contexts."""
        self._keep_what_was_trained()
        self._forget()
        self.contexts = contexts

    def remove(self):
        """Leave the model without replicas."""
        self._keep_what_was_trained()
        for name in list(self._replaced) + ["_compat_replicas"]:
            delattr(self.model, name)

    def _keep_what_was_trained(self):
        self._sync_weights()
        if self._updater is not None and self._source is self.model._pred_mxnet_symbol:
            make_states_anew(self._updater.optimizer)

    @contextlib.contextmanager
    def undivided(self):
        """Within, the first replica runs the whole batch."""
        self._hold_arrays()
        first = {"contexts": self.contexts[:1], "arrays": self.arrays[:1]}
        try:
            with replaced(self, phases=self._undivided_phases, **first):
                yield
                self._sync_weights()
        finally:
            self._stale = True

    def _forget(self):
        """Drop arrays and executors; they are made again when a batch comes."""
        self.arrays = None  # of weights and auxiliary states by name, for each replica
        self.phases, self._undivided_phases = {}, {}
        self._updater = None  # of the optimizer, which has its state
        self._stale = False  # whether Keras' variables have newer values than the arrays

    def _keras_arrays(self):
        """Those of Keras' variables."""
        return dict(self.model._args, **self.model._auxs)

    # Called by Keras ----------------------------------------------------------------------------

    def compile(self, *args, **kwargs):
        self._sync_weights()  # compiling begins with the values that Keras has
        return type(self.model).compile(self.model, *args, **kwargs)

    def _make(self, kind):
        setattr(self.model, kind + "_function", functools.partial(self.run, kind))

    def _sync_weights(self):
        """Bring what was trained to the arrays of Keras' variables, where Keras reads it."""
        if self.arrays is None or not self.model._weights_dirty:
            return
        _copy(self.arrays[0], self._keras_arrays())
        self.model._weights_dirty = False

    def _set_weights(self, arg_params=None, auxs_params=None):
        """Take values for Keras' variables; the replicas take them before the next batch."""
        self._sync_weights()
        arrays = self._keras_arrays()
        for name, value in dict(arg_params or {}, **(auxs_params or {})).items():
            arrays[name][:] = value
        self._stale = True

    def run(self, kind, inputs):
        """What the function of a phase does: "train", "test" or "predict"."""
        if kind == "train":
            self.model._check_trainable_weights_consistency()
        phase = self._prepared(kind, inputs)
        results = phase.forward(inputs)
        if kind == "train":
            phase.backward()
            # If that is interrupted, replicas may differ, and take what the first has.
            self.model._weights_dirty = self._stale = True
            self._update_weights(phase)
            self._average_auxiliary_states(phase)
            self._stale = False
        self._assign(phase.updates)
        arrays = [array.asnumpy() for array in results]
        return arrays if kind == "predict" else [array.mean() for array in arrays]

    # Arrays -------------------------------------------------------------------------------------

    def _follow(self):
        """Begin anew where the model was compiled since the last batch, or its layers changed."""
        model = self.model
        if model.compiled:
            if self._source is not model._pred_mxnet_symbol:
                self._source = model._pred_mxnet_symbol
                self._forget()
        elif self._source != model.outputs:
            model._create_predict_module()
            self._source = list(model.outputs)
            self._forget()
            K.set_model(model)

    def _hold_arrays(self):
        """Make each replica's arrays of the weights and auxiliary states."""
        self._follow()
        if self.arrays is None:
            held, states = self._keras_arrays(), state_names(self.model)
            self.arrays = [
                {name: array.copyto(c) for name, array in held.items() if name not in states}
                for c in self.contexts
            ]
            self._stale = False

    def _prepared(self, name, inputs):
        """The phase of that name, with executors for these inputs and current weights."""
        self._hold_arrays()
        if self._stale:
            self._sync_weights()
            for held in self.arrays:
                _copy(self._keras_arrays(), held)
            self._stale = False
        if self.model.compiled and not isinstance(self.model._module._buckets, ExportedBuckets):
            self.model._module._buckets = ExportedBuckets(self.model, inputs)
        phase = self.phases.get(name)
        if phase is None or not phase.is_for(inputs):
            self.phases[name] = Phase(self, name, inputs)
        self.phases[name].bind(inputs)
        return self.phases[name]

    def _update_weights(self, phase):
        if self._updater is None:
            self._updater = mx.optimizer.get_updater(self.model.optimizer)
        gradients, updated = {}, {}  # by the number that a plain module gives a weight; by name
        # A row computed for an empty shard counts for nothing.
        executors = [body for body, _ in phase.filled] + [phase.head]
        for number, name in enumerate(phase.parameters):
            parts = [executor.grad_dict.get(name) for executor in executors]
            parts = [part.as_in_context(self.contexts[0]) for part in parts if part is not None]
            if parts:
                gradients[number], updated[name] = mx.nd.add_n(*parts), self.arrays[0][name]
        if updated:
            self._updater(list(gradients), list(gradients.values()), list(updated.values()))
        for others in self.arrays[1:]:
            _copy(updated, others)

    def _average_auxiliary_states(self, phase):
        """Moving averages: one update, to the mean of the replicas' weighted by shard size."""
        symbol_graph.unite(
            [[held[name] for held in self.arrays] for name in phase.body.list_auxiliary_states()],
            phase.sizes,
        )
        if phase.head.aux_dict:  # of the whole batch
            symbol_graph.wait_for_updates()
            for held in self.arrays[1:]:
                _copy(phase.head.aux_dict, held)

    def _assign(self, updates):
        """Store new values of variables that layers update: RNN states, a layer's own averages."""
        if updates:
            for held in self.arrays + [self.model._args]:  # the latter has the states
                _copy(updates, held)
            self.model._weights_dirty = True


def _copy(arrays, others):
    """Copy to the others what there is of them, by name."""
    for name, array in others.items():
        if name in arrays:
            arrays[name].copyto(array)
