"""Keras models on several contexts, for the MXNet backend."""

import contextlib
import functools

import mxnet as mx
from keras.backend import mxnet_backend as K

from ... import _rows
from ..._rows import split_rows
from ..._runtime import work
from ..._runtime.patching import replaced
from . import symbol_graph
from .keras_mxnet_fixes import device_with_replicas, groups_of, run_plain, take_to


def parallelize(model, contexts):
    """Run ``model`` on ``contexts``; one context gives the plain behaviour back."""
    replicas = getattr(model, "_compat_replicas", None)
    if len(contexts) > 1:
        if groups_of(model):
            raise device_with_replicas(model.name)
        (replicas or ModelReplicas(model)).move(contexts)
    elif replicas is not None or model._context != contexts:
        run_plain(model, contexts[0], (replicas or ModelReplicas(model)).remove())


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
        methods = ("compile", "_sync_weights", "_set_weights")
        self._replaced = dict({n: getattr(self, n) for n in methods}, _compat_replicas=self)
        for kind in ("train", "test", "predict"):
            self._replaced[f"_make_{kind}_function"] = functools.partial(self._make, kind)
        vars(model).update(self._replaced)

    def move(self, contexts):
        """Go on with other contexts."""
        self._sync_weights()
        self._forget()
        self.contexts = contexts
        if self._updater is not None:
            take_to(self._updater, contexts[0])

    def remove(self):
        """Leave the model without replicas; return the updater."""
        self._sync_weights()
        self._follow()
        for name in self._replaced:
            delattr(self.model, name)
        return self._updater

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
        self._stale = False  # whether Keras' variables have newer values than the arrays

    # Called by Keras ----------------------------------------------------------------------------

    def compile(self, *args, **kwargs):
        self._sync_weights()  # compiling begins with the values that Keras has
        return type(self.model).compile(self.model, *args, **kwargs)

    def _make(self, kind):
        setattr(self.model, kind + "_function", functools.partial(self.run, kind))

    def _sync_weights(self):
        """Bring what was trained to the arrays of Keras' variables, where Keras reads it."""
        if self.arrays is not None and self.model._weights_dirty:
            _copy(self.arrays[0], dict(self.model._args, **self.model._auxs))
            self.model._weights_dirty = False

    def _set_weights(self, arg_params=None, auxs_params=None):
        """Take values for Keras' variables; the replicas take them before the next batch."""
        self._sync_weights()
        arrays = dict(self.model._args, **self.model._auxs)
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
        if phase.updates:  # of RNN states, or a layer's own averages
            for held in self.arrays + [self.model._args]:  # the latter has the states
                _copy(phase.updates, held)
            self.model._weights_dirty = True
        arrays = [array.asnumpy() for array in results]
        return arrays if kind == "predict" else [array.mean() for array in arrays]

    # Arrays -------------------------------------------------------------------------------------

    def _follow(self):
        """Begin anew where the model was compiled since the last batch, or its layers changed."""
        model = self.model
        if model.compiled:
            if self._source is not model._pred_mxnet_symbol:
                self._source, self._updater = model._pred_mxnet_symbol, None
                self._forget()
        elif self._source != model.outputs:
            model._create_predict_module()
            self._source = list(model.outputs)
            self._forget()
            K.set_model(model)

    def _hold_arrays(self):
        """See that each replica has the values of the weights and auxiliary states."""
        self._follow()
        held = dict(self.model._args, **self.model._auxs)
        if self.arrays is None:
            states = {variable.name for variable, _ in self.model.state_updates}
            weights = {name: array for name, array in held.items() if name not in states}
            self.arrays = [{n: a.copyto(c) for n, a in weights.items()} for c in self.contexts]
        elif self._stale:
            self._sync_weights()
            for arrays in self.arrays:
                _copy(held, arrays)
        self._stale = False

    def _prepared(self, name, inputs):
        """The phase of that name, with executors for these inputs and current weights."""
        self._hold_arrays()
        if self.model.compiled and not isinstance(self.model._module._buckets, ExportedBuckets):
            self.model._module._buckets = ExportedBuckets(self.model, inputs)
        if name not in self.phases or not self.phases[name].is_for(inputs):
            self.phases[name] = Phase(self, name, inputs)
        self.phases[name].bind(inputs)
        return self.phases[name]

    def _update_weights(self, phase):
        if self._updater is None:
            self._updater = mx.optimizer.get_updater(self.model.optimizer)
        gradients, updated = {}, {}  # by the number that a plain module gives a weight; by name
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
        names = phase.body.list_auxiliary_states()
        symbol_graph.unite([[held[name] for held in self.arrays] for name in names], phase.sizes)
        if phase.head.aux_dict:  # of the whole batch
            symbol_graph.wait_for_updates()
            for held in self.arrays[1:]:
                _copy(phase.head.aux_dict, held)


def _copy(arrays, others):
    """Copy to the others what there is of them, by name."""
    for name, array in others.items():
        if name in arrays:
            arrays[name].copyto(array)


# Phases ---------------------------------------------------------------------------------------


class Phase:
    """One of Keras' graphs (train, test or predict) cut into body and head, and its executors.

    Attributes:
        bodies: an executor for each replica, on its context.
        head: the executor that runs once, or None where bodies give all there is to give.
        updates: new values by variable, after ``forward``.
        parameters: all weights of the graph, in MXNet's order.
    """

    def __init__(self, replicas, name, inputs):
        self.replicas, self.contexts, self.arrays = replicas, replicas.contexts, replicas.arrays
        model = replicas.model
        self.is_train = name == "train"
        updates = model.updates if self.is_train else model.state_updates
        with replaced(K, _LEARNING_PHASE=int(self.is_train)):
            outputs = [output.symbol for output in model.outputs]
            states = [value.symbol for _, value in model.state_updates]
        # All outputs, results, and the updates' values. How many results there are is not told by
        # the updates: what is trainable may have changed since compile().
        if name == "predict":  # Keras' own graph leaves out values that are outputs, too
            symbol, self.results, labels = mx.sym.Group(outputs + states), len(outputs), []
        else:
            symbol = getattr(model, f"_{name}_mxnet_symbol")
            self.results = getattr(model, "_n" + name)
            labels = model.targets + model.sample_weights
        graph = symbol_graph.Graph(outputs, symbol)
        self.variables = [variable.name for variable, _ in updates]
        self.fed = [tensor.name for tensor in model.inputs + labels if tensor is not None]
        # Of stateful layers, one row for each row of the batch.
        states = {variable.name for variable, _ in model.state_updates}
        self.states = sorted(states & set(symbol.list_arguments()))
        self.sharded = [tensor.name for tensor in model.inputs] + self.states
        self.parameters = [n for n in symbol.list_arguments() if n not in self.fed]
        trained = [n for n in self.parameters if n not in model._fixed_weights]
        self.trained = trained if self.is_train else []
        self.sparse = graph.sparse_gradients()
        self.bodies, self.shapes, across = [], None, None
        self.is_tried = inputs[0].shape[0] > 1
        if not self._divides(inputs):
            across = _rows.Across(None)
        elif len(self.contexts) > 1:  # else one runs the whole batch
            across = self._follow(graph, inputs)
        if across is not None:
            reach = _rows.FROM_THERE_ON if across.operation else "The model"
            _rows.runs_whole(model.name, across, self.contexts[0], reach, replicas)
        self.body, self.head_symbol, self.cuts, self.places = graph.cut()

    def _follow(self, graph, inputs):
        """Find where the outputs' rows are, and try it; return what mixes them, or None."""
        batch = self._batch(inputs)
        given = dict.fromkeys(self.fed, _rows.Mixed())
        given.update(dict.fromkeys(self.sharded, _rows.Sharded(0)))
        fed = {name: batch[name][: len(_rows.trial.WHOLE)] for name in self.sharded}
        fed.update((name, fed[name].asnumpy()) for name in self.states)
        unknown = graph.follow_and_try(given, fed, self.contexts[0], {}, self.arrays[0])
        return unknown or graph.across(graph.outputs)

    def _batch(self, inputs):
        """All that has rows, by name: what is fed, and the states of layers."""
        dense = [x.toarray() if hasattr(x, "toarray") else x for x in inputs]  # of scipy's matrices
        held = self.replicas.model._args
        return dict(zip(self.fed, dense), **{name: held[name] for name in self.states})

    def _divides(self, inputs):
        """Whether each input has a row for each of the batch."""
        return len({x.shape[0] for x in inputs[: len(self.replicas.model.inputs)]}) == 1

    def is_for(self, inputs):
        """Whether it can run these, or a new one has to be made."""
        # Of a single row a trial tells nothing.
        is_tried = self.is_tried or inputs[0].shape[0] == 1
        return not self.cuts or (self._divides(inputs) and is_tried)

    # Executors ----------------------------------------------------------------------------------

    def bind(self, inputs):
        """Make executors for inputs of these shapes, unless there are."""
        shapes = {name: tuple(array.shape) for name, array in self._batch(inputs).items()}
        if shapes == self.shapes:
            return
        self.bodies, self.filled, self.head = [], [], None  # give their memory back first
        self.shapes = None  # until all is made, if that is not interrupted
        rows, count = inputs[0].shape[0], len(self.contexts)
        self.sizes = split_rows.sizes(rows, count)
        for replica, (context, held) in enumerate(zip(self.contexts, self.arrays)):
            # An executor with a row, whose results are not used, where the shard is empty.
            shard = {name: (self.sizes[replica] or 1,) + shapes[name][1:] for name in self.sharded}
            body = symbol_graph.bound(
                self.body, context, shard, {}, held, self.trained, self.sparse
            )
            self.bodies.append(body)
            if self.sizes[replica]:
                self.filled.append((body, slice(*split_rows.bounds(rows, count, replica))))
        if self.head_symbol is not None:
            cut = dict(zip(self.cuts, self.bodies[0].outputs))
            whole = {name: (rows,) + tuple(output.shape[1:]) for name, output in cut.items()}
            types = {name: output.dtype for name, output in cut.items()}
            differentiated = self.trained + (self.cuts if self.is_train else [])
            self.head = symbol_graph.bound(
                self.head_symbol, self.contexts[0], dict(shapes, **whole), types, self.arrays[0],
                differentiated, self.sparse,
            )  # fmt: skip
        self.shapes = shapes

    # One batch ----------------------------------------------------------------------------------

    def forward(self, inputs):
        """Run the bodies on their shards and the head on the whole; return Keras' results."""
        batch = self._batch(inputs)
        for body, part in self.filled:
            self._run(body, {name: batch[name][part] for name in self.sharded})
        values = []  # of the bodies' outputs, all rows, on the first context
        for _, *shards in zip(self.cuts, *[body.outputs for body, _ in self.filled]):
            shards = [shard.as_in_context(self.contexts[0]) for shard in shards]
            values.append(mx.nd.concat(*shards, dim=0) if len(shards) > 1 else shards[0])
        if self.head is not None:
            values += self._run(self.head, dict(batch, **dict(zip(self.cuts, values))))
        values = [values[place] for place in self.places]
        self.updates = dict(zip(self.variables, values[self.results :]))
        if len(self.sizes) > 1:  # else it is verified
            # Without cuts the head computes all.
            sizes = self.sizes if self.cuts else work.undivided(self.sizes, sum(self.sizes))
            work.count(list(map(str, self.contexts)), sizes, self.is_train)
        return values[: self.results]

    def _run(self, executor, arrays):
        fed = {name: array for name, array in arrays.items() if name in executor.arg_dict}
        return executor.forward(is_train=self.is_train, **fed)

    def backward(self):
        """Gradients: the head's at the cut, and from there on each context its shard's."""
        self.head.backward()
        # Of no rows even zeros would not do, before a loss layer. Without cuts the head does all.
        for body, part in self.filled if self.cuts else ():
            context = body.outputs[0].context
            gradients = [self.head.grad_dict[name][part] for name in self.cuts]
            body.backward([gradient.as_in_context(context) for gradient in gradients])
