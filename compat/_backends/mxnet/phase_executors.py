"""Keras' graphs of a phase (train, test, predict) as the executors that replicas run."""

import mxnet as mx
from keras.backend import mxnet_backend as K

from ... import _rows
from ..._rows import split_rows
from ..._runtime import work
from ..._runtime.patching import replaced
from . import symbol_graph


def state_names(model):
    """The variables that hold stateful layers' states, one row for each row of the batch."""
    return {variable.name for variable, _ in model.state_updates}


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
        self.states = sorted(state_names(model) & set(symbol.list_arguments()))
        self.sharded = [tensor.name for tensor in model.inputs] + self.states
        self.parameters = [n for n in symbol.list_arguments() if n not in self.fed]
        fixed = model._fixed_weights if self.is_train else self.parameters
        self.trained = [n for n in self.parameters if n not in fixed]
        self.sparse = graph.sparse_gradients()
        self.bodies, self.shapes, self.across = [], None, None
        self.is_tried = inputs[0].shape[0] > 1
        if not self.divides(inputs):
            self.across = _rows.Across(None)
        elif len(self.contexts) > 1:  # else one runs the whole batch
            self.across = self._follow(graph, inputs)
        self.body, self.head_symbol, self.cuts, self.places = graph.cut()

    def _follow(self, graph, inputs):
        """Find where the outputs' rows are, and try it; return what mixes them, or None."""
        batch = self._batch(inputs)
        given = dict.fromkeys(self.fed, _rows.Mixed())
        given.update(dict.fromkeys(self.sharded, _rows.Sharded(0)))
        batch.update((name, batch[name].asnumpy()) for name in self.states)
        fed = {name: batch[name][: len(_rows.trial.WHOLE)] for name in self.sharded}
        unknown = graph.follow_and_try(given, fed, self.contexts[0], {}, self.arrays[0])
        return unknown or graph.across(graph.outputs)

    def _batch(self, inputs):
        """All that has rows, by name: what is fed, and the states of layers."""
        dense = [x.toarray() if hasattr(x, "toarray") else x for x in inputs]  # of scipy's matrices
        held = self.replicas.model._args
        return dict(zip(self.fed, dense), **{name: held[name] for name in self.states})

    def divides(self, inputs):
        """Whether each input has a row for each of the batch."""
        return len({x.shape[0] for x in inputs[: len(self.replicas.model.inputs)]}) == 1

    def is_for(self, inputs):
        """Whether it can run these, or a new one has to be made."""
        if not self.cuts:
            return True
        # Of a single row a trial tells nothing.
        return self.divides(inputs) and (self.is_tried or inputs[0].shape[0] == 1)

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
        self.computed = [slice(*split_rows.run_bounds(rows, count, i)) for i in range(count)]
        for context, held, size in zip(self.contexts, self.arrays, self.sizes):
            shard = {name: (size or 1,) + shapes[name][1:] for name in self.sharded}
            self.bodies.append(
                symbol_graph.bound(self.body, context, shard, {}, held, self.trained, self.sparse)
            )
        bodies = zip(self.bodies, self.computed, self.sizes)
        self.filled = [(body, part) for body, part, size in bodies if size]
        if self.head_symbol is not None:
            cut = dict(zip(self.cuts, self.bodies[0].outputs))
            whole = {name: (rows,) + tuple(output.shape[1:]) for name, output in cut.items()}
            types = {name: output.dtype for name, output in cut.items()}
            differentiated = self.trained + (self.cuts if self.is_train else [])
            self.head = symbol_graph.bound(
                self.head_symbol, self.contexts[0], dict(shapes, **whole), types, self.arrays[0],
                differentiated, self.sparse,
            )  # fmt: skip
        if self.across is not None:
            owner, first = self.replicas, self.contexts[0]
            reach = _rows.FROM_THERE_ON if self.across.operation else "The model"
            _rows.runs_whole(owner.model.name, self.across, first, reach, owner)
        self.shapes = shapes

    # One batch ----------------------------------------------------------------------------------

    def forward(self, inputs):
        """Run the bodies on their shards and the head on the whole; return Keras' results."""
        batch = self._batch(inputs)
        for body, part in zip(self.bodies, self.computed):
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
            names = [str(context) for context in self.contexts]
            # Without cuts the head computes all.
            sizes = self.sizes if self.cuts else work.undivided(names, sum(self.sizes))
            work.count(names, sizes, self.is_train)
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
