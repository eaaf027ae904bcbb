"""Keras models on several contexts."""

import contextlib
import functools
from typing import Any, List

import mxnet as mx
from keras.backend import mxnet_backend as K

from ... import _keras
from ..._runtime.patching import InstanceMethod, attach, detach, replaced
from .device_scope import device_with_replicas, place_groups, placed_parts
from .keras_mxnet_fixes import default_contexts
from .keras_phases import Phase
from .locks import making
from .optimizer_states import move_updater, update
from .replicas import Replicas, ReplicatedCall
from .synchronization import wait_for_updates
from .verification import VerifiedStep
from .weight_copies import broadcast, copies, reduced, unite


def parallelize(model, contexts):
    """Run ``model`` on ``contexts``; a single one restores the plain behaviour."""
    if not _keras.wraps_a_model(model):
        _parallelize(model, contexts)
        return
    replicas = getattr(model, "_compat_replicas", None)
    if replicas is not None:
        replicas.remove()
    if contexts == default_contexts():
        if _keras.inner_model(model) is not None:
            _parallelize(_keras.inner_model(model), contexts)
    else:
        InnerReplicas(model, contexts)


def _parallelize(model, contexts):
    replicas = getattr(model, "_compat_replicas", None)
    if len(contexts) > 1:
        if placed_parts(model):
            raise device_with_replicas(model.name)
        (replicas or KerasReplicas(model)).move(contexts)
    elif replicas is not None or model._context != contexts:
        run_plain(model, contexts[0], (replicas or KerasReplicas(model)).remove())


def run_plain(model, context, updater):
    """Have a model run as without ``compat``, on one context, with the optimizer's state."""
    model._context = [context]
    if not model.compiled:
        return  # Keras makes a module for each prediction
    model._module = module = mx.mod.BucketingModule(
        model._module._sym_gen, "pred", context=[context], fixed_param_names=model._fixed_weights
    )
    place_groups(model)
    if updater is not None:
        move_updater(updater, context)
        _InitOptimizerWithState(updater).install(module)


class InnerReplicas:
    """The contexts of a Sequential before Keras 2.2, for the inner models that it has in turn.

    Attributes:
        verification: the ``Verification`` of the inner models' first steps, or None.
    """

    def __init__(self, model, contexts):
        self.model, self.contexts, self.verification = model, contexts, None
        attach(model, "_compat_replicas", self)
        _keras.InnerModel.have_prepared(model, self._prepare)

    def remove(self) -> None:
        """Leave later inner models as they are."""
        _keras.InnerModel.of(self.model).remove(self.model)
        detach(self.model, "_compat_replicas")

    def _prepare(self, inner):
        _parallelize(inner, self.contexts)
        if self.verification is not None:
            VerifiedStep.install_on(inner, self.verification)


class _InitOptimizerWithState(InstanceMethod):
    """Sets the optimizer's state, which a module does not accept before it is bound to shapes."""

    method = "init_optimizer"

    def __init__(self, updater):
        super().__init__([])
        self.updater = updater

    def invoke(self, module, **arguments):
        """Initialize the optimizer, and set its state."""
        self.plain(module)(**arguments)
        module._curr_module._updater = self.updater


class ExportedBuckets(dict):
    """The buckets of the module of a model on several contexts, which runs no batch itself.

    ``save_mxnet_model()`` and ``get_mxnet_model_info()`` read the one that predicts: then the
    module is bound, and gets the weights.
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


class _SyncWeights(ReplicatedCall):
    method = "_sync_weights"

    def invoke(self, model):
        self.replicas.sync_weights()


class _MakeFunction(ReplicatedCall):
    """Makes the function of one of Keras' phases, which the replicas run."""

    phase = ""

    def invoke(self, model):
        setattr(model, f"{self.phase}_function", functools.partial(self.replicas.run, self.phase))


class KerasReplicas(Replicas):
    """The replicas of one model, each on its own context.

    Keras' graph of a phase (train, test, predict) is cut in two. The *body*, all that the
    model's outputs depend on, runs on each context with its shard of the batch. The *head*, the
    rest, runs once, on the first context, with the whole batch gathered from the bodies: losses,
    metrics, penalties, masks' means. Its gradients at the cut are the upstream gradients of the
    bodies. So any loss, even one that compares rows with one another, and every metric equals that
    of one device, however uneven the shards, and so do the gradients, summed over the replicas. One
    optimizer updates the first context's weights, which are then copied to the others.

    Differs from one device:

    - BatchNormalization normalises each shard by its own statistics, unless it is asked for those
      of the whole batch: see ``joined_executors``. The moving averages take one step to the mean
      of the replicas' new values, weighted by shard size, as tf.distribute.MirroredStrategy does.
    - Dropout draws an independent mask in each replica.

    Cross-batch operations, and all that depend on them, belong to the head, with a warning, since
    they run on one device; so do operations with states other than moving averages. Sums and other
    states that layers update belong to the head, too.

    Stateful RNNs do not differ: each replica has the states of its rows. Values on which no output
    depends (a loss or averages of a layer) are computed by the head.

    keras-mxnet calls a few methods of a model. These are replaced on the instance, so it stays the
    same object, and a ``compile()`` takes effect at the next batch.
    """

    calls = (_SyncWeights,) + tuple(
        type(
            "_MakeFunction", (_MakeFunction,), {"method": f"_make_{phase}_function", "phase": phase}
        )
        for phase in ("train", "test", "predict")
    )

    def __init__(self, model):
        self.model = model
        self._source = None  # the symbol, or the outputs, that arrays and phases were made for
        self._updater = None  # of the optimizer, with this model's state
        self._forget()
        if model.compiled:
            K.set_model(model)  # it may have been compiled before keras-mxnet was fixed
            self._source = model._pred_mxnet_symbol
            if model._module.optimizer_initialized:
                self._updater = model._module._curr_module._updater
        model._sync_weights()
        self.install_on(model)

    def move(self, contexts: "List[Any]") -> None:
        """Go on with other contexts."""
        self.sync_weights()
        self._forget()
        self.contexts = contexts
        if self._updater is not None:
            move_updater(self._updater, contexts[0])

    def remove(self) -> "Any":
        """Restore the model's own methods; return the updater."""
        self.sync_weights()
        self._follow()
        self.remove_from(self.model)
        return self._updater

    @contextlib.contextmanager
    def unsplit(self):
        """Have the first replica run the whole batch within a block."""
        self._hold_arrays()
        first = {"contexts": self.contexts[:1], "arrays": self.arrays[:1]}
        try:
            with replaced(self, phases=self._unsplit_phases, **first):
                yield
                self.sync_weights()
        finally:
            self._stale = True

    def _forget(self):
        """Drop arrays and executors, which are made again for the next batch."""
        self.arrays = None  # of weights and auxiliary states by name, for each replica
        self.phases, self._unsplit_phases = {}, {}
        self._stale = False  # whether Keras' variables have newer values than the arrays
        self._is_newer = False  # whether the arrays have; compile() forgets Keras' own flag

    # Called by Keras ----------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Copy trained weights to the arrays of Keras' variables, which Keras reads."""
        if self.arrays is not None and self._is_newer:
            _copy(self.arrays[0], dict(self.model._args, **self.model._auxs))
            self._is_newer = self.model._weights_dirty = False

    def set_weights(self, arg_params=None, auxs_params=None):
        """Set Keras' variables; the replicas get the values before the next batch."""
        self.sync_weights()
        arrays = dict(self.model._args, **self.model._auxs)
        for name, value in dict(arg_params or {}, **(auxs_params or {})).items():
            arrays[name][:] = value
        self._stale = True

    def run(self, kind: str, inputs: "List[Any]") -> "List[Any]":
        """Run a batch, as Keras' function of a phase does: "train", "test" or "predict"."""
        with self._calling:
            return self._run(kind, inputs)

    def _run(self, kind, inputs):
        if kind == "train":
            self.model._check_trainable_weights_consistency()
        phase = self._prepared(kind, inputs)
        results = phase.forward(inputs)
        if kind == "train":
            phase.backward()
            # If that is interrupted, replicas may differ: then they get the first one's weights.
            self.model._weights_dirty = self._is_newer = self._stale = True
            self._update_weights(phase)
            self._average_auxiliary_states(phase)
            self._stale = False
        if phase.updates:  # of RNN states, or a layer's own averages
            for held in (self.arrays[0], self.model._args):  # the latter has the states
                _copy(phase.updates, held)
            self._broadcast(phase.updates)
            self.model._weights_dirty = self._is_newer = True
        arrays = [array.asnumpy() for array in results]
        return arrays if kind == "predict" else [array.mean() for array in arrays]

    # Arrays -------------------------------------------------------------------------------------

    def _follow(self):
        """Start again if the model was compiled or its layers changed since the last batch."""
        model = self.model
        if model.compiled:
            if self._source is not model._pred_mxnet_symbol:
                self.sync_weights()
                self._source, self._updater = model._pred_mxnet_symbol, None
                self._forget()
        elif self._source != model.outputs:
            self.sync_weights()
            model._create_predict_module()
            self._source = list(model.outputs)
            self._forget()
            K.set_model(model)

    def _hold_arrays(self):
        """Give each replica the current weights and auxiliary states."""
        self._follow()
        held = dict(self.model._args, **self.model._auxs)
        if self.arrays is None:
            states = {variable.name for variable, _ in self.model.state_updates}
            weights = {name: array for name, array in held.items() if name not in states}
            made = {name: copies(array, self.contexts) for name, array in weights.items()}
            numbers = range(len(self.contexts))
            self.arrays = [{name: arrays[i] for name, arrays in made.items()} for i in numbers]
        elif self._stale:
            self.sync_weights()
            _copy(held, self.arrays[0])
            self._broadcast(held)
        self._stale = False

    def _broadcast(self, names):
        """Copy the first replica's arrays of some names to the others, where they have them."""
        for name in names:
            broadcast([held[name] for held in self.arrays if name in held])

    def _prepared(self, name, inputs):
        """Return the phase of that name, with executors for these inputs and current weights."""
        self._hold_arrays()
        if self.model.compiled and not isinstance(self.model._module._buckets, ExportedBuckets):
            self.model._module._buckets = ExportedBuckets(self.model, inputs)
        if name not in self.phases or not self.phases[name].is_for(inputs):
            with making:
                self.phases[name] = Phase(self, name, inputs)
        self.phases[name].bind(inputs)
        return self.phases[name]

    def _update_weights(self, phase):
        if self._updater is None:
            self._updater = mx.optimizer.get_updater(self.model.optimizer)
        self._take_written_weights(phase)
        gradients, updated = {}, {}  # by the number that a plain module gives a weight; by name
        executors = [phase.head] + [body for body, _ in phase.filled]
        for number, name in enumerate(phase.parameters):
            parts = [executor.grad_dict.get(name) for executor in executors]
            parts = [part for part in parts if part is not None]
            if parts:
                gradients[number] = reduced(parts).as_in_context(self.contexts[0])
                updated[name] = self.arrays[0][name]
        if updated:
            update(self._updater, gradients, list(updated.values()))
        self._broadcast(updated)

    def _take_written_weights(self, phase):
        """Take to the first replica the weights that a body writes, where the first had no rows.

        MXNet sets the scale of a batch normalization with ``fix_gamma`` to one when it runs. The
        head runs on the first context.
        """
        if not phase.sizes[0]:
            wait_for_updates()
            body, _ = phase.filled[0]
            held = self.arrays[0]
            weights = {name: held[name] for name in phase.parameters if name in held}
            _copy(body.arg_dict, weights)

    def _average_auxiliary_states(self, phase):
        """Update moving averages once, to the means of the replicas', weighted by shard size."""
        names = phase.body.list_auxiliary_states()
        unite([[held[name] for held in self.arrays] for name in names], phase.sizes)
        if phase.head.aux_dict:  # of the whole batch
            wait_for_updates()
            self._broadcast(phase.head.aux_dict)


def _copy(arrays, others):
    """Copy arrays to the others of the same names."""
    for name, array in others.items():
        if name in arrays:
            arrays[name].copyto(array)
