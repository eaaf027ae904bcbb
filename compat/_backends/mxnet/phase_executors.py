"""Keras' graphs of a phase (train, test, predict) as the executors that replicas run."""

import mxnet as mx
from keras.backend import mxnet_backend as K

from ... import _rows
from ..._rows import split_rows
from ..._runtime import work
from ..._runtime.patching import replaced
from . import symbol_graph

_UNUSED = "compat_unused"  # a variable that has a gradient, and that nothing depends on


def state_names(model):
    """The variables that hold stateful layers' states, one row for each row of the batch."""
    return {variable.name for variable, _ in model.state_updates}


def _feed(executor, arrays):
    """Give an executor those of the arrays that it takes; sparse inputs are scipy's matrices."""
    for name, array in arrays.items():
        if name in executor.arg_dict:
            dense = array.toarray() if hasattr(array, "toarray") else array
            executor.arg_dict[name][:] = dense


class Phase:
    """One of Keras' graphs (train, test or predict) cut into body and head, and its executors.

    Attributes:
        bodies: an executor for each replica, on its context.
        head: the executor that runs once, or None where bodies give all there is to give.
        updates: (variable, new value), after ``forward``.
        parameters: all weights of the graph, in MXNet's order.
    """

    def __init__(self, replicas, name, inputs):
        self.replicas = replicas
        model = replicas.model
        self.is_train = name == "train"
        updates = model.updates if self.is_train else model.state_updates
        with replaced(K, _LEARNING_PHASE=int(self.is_train)):
            outputs = [output.symbol for output in model.outputs]
            states = [value.symbol for _, value in model.state_updates]
        labels = [] if name == "predict" else model.targets + model.sample_weights
        # All outputs, results, and the updates' values; Keras' own graph that predicts leaves out
        # values that are outputs, too.
        symbol = {
            "train": model._train_mxnet_symbol,
            "test": model._test_mxnet_symbol,
            "predict": mx.sym.Group(outputs + states),
        }[name]
        graph = symbol_graph.Graph(outputs, symbol)
        # Not by the updates: what is trainable may have changed since compile().
        self.results = {
            "train": model._ntrain,
            "test": model._ntest,
            "predict": len(model.outputs),
        }[name]
        self.variables = [variable.name for variable, _ in updates]
        self.fed = [tensor.name for tensor in model.inputs + [t for t in labels if t is not None]]
        self.states = sorted(state_names(model) & set(symbol.list_arguments()))
        self.sharded = [tensor.name for tensor in model.inputs] + self.states
        self.parameters = [n for n in symbol.list_arguments() if n not in self.fed]
        self.trained = [
            n for n in self.parameters if self.is_train and n not in model._fixed_weights
        ]
        self.sparse = graph.sparse_gradients()
        self.bodies, self.shapes, self.across = [], None, None
        self.is_tried = inputs[0].shape[0] > 1
        if not self.divides(inputs):
            self.across = _rows.Across(None)
        elif len(replicas.contexts) > 1:  # else one runs the whole batch
            self._follow(graph, inputs)
        self.body, self.head_symbol, self.cuts, self.places = graph.cut()

    def _follow(self, graph, inputs):
        """Find where the outputs' rows are, and try it: see ``symbol_graph.Graph.follow``."""
        batch = self._batch(inputs)
        shapes = {
            rows: {name: (rows,) + tuple(array.shape[1:]) for name, array in batch.items()}
            for rows in symbol_graph.ROWS
        }
        given = {name: _rows.Sharded(0) for name in self.sharded}
        mixing = self.replicas.mixing.get(self.is_train)
        try:
            if mixing is not None:  # by a graph with the same outputs
                graph.follow(given, shapes, mixing)
            else:
                mixing = graph.follow_and_try(given, shapes, lambda s: self._tried(s, batch))
            self.across = graph.across(graph.outputs)
            if self.is_tried:
                self.replicas.mixing[self.is_train] = mixing
        except Exception:  # whatever operations of the user's do, with other numbers of rows
            symbol_graph.clear_errors()
            graph.placements = {}  # all is left to the head
            self.across = _rows.Across(None, why="unknown")

    def _tried(self, symbol, batch):
        """The placements of a symbol's outputs, on the first context, in inference."""
        first = {name: held[: len(_rows.trial.WHOLE)] for name, held in batch.items()}
        states = {name: array.copy() for name, array in self.replicas.auxs[0].items()}

        def compute(rows):
            fed = {n: first[n][[row % first[n].shape[0] for row in rows]] for n in self.sharded}
            shapes = {name: array.shape for name, array in fed.items()}
            executor = self._executor(symbol, 0, shapes, [], states)
            _feed(executor, fed)
            results = executor.forward(is_train=False)[: len(symbol.list_outputs())]
            return [array.asnumpy() for array in results]

        return _rows.trial.tried(compute)

    def _batch(self, inputs):
        """All that has rows, by name: what is fed, and the states of layers."""
        held = self.replicas.model._args
        return dict(zip(self.fed, inputs), **{name: held[name] for name in self.states})

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

    def executors(self):
        """Those with gradients: a row computed for an empty shard counts for nothing."""
        return [body for body, _ in self.filled] + [self.head]

    def bind(self, inputs):
        """Make executors for inputs of these shapes, unless there are."""
        shapes = {name: tuple(array.shape) for name, array in self._batch(inputs).items()}
        if shapes == self.shapes:
            return
        self.bodies, self.filled, self.head = [], [], None  # give their memory back first
        self.shapes = None  # until all is made, if that is not interrupted
        replicas, rows = self.replicas, inputs[0].shape[0]
        count = len(replicas.contexts)
        self.sizes = split_rows.sizes(rows, count)
        self.computed = [slice(*split_rows.run_bounds(rows, count, i)) for i in range(count)]
        self.bodies = [
            self._executor(
                self.body, i, {n: (size or 1,) + shapes[n][1:] for n in self.sharded}, self.trained
            )
            for i, size in enumerate(self.sizes)
        ]
        bodies = zip(self.bodies, self.computed, self.sizes)
        self.filled = [(body, part) for body, part, size in bodies if size]
        if self.head_symbol is not None:
            outputs = zip(self.cuts, self.bodies[0].outputs)
            whole = {name: (rows,) + tuple(output.shape[1:]) for name, output in outputs}
            cuts = self.cuts if self.is_train else []
            self.head = self._executor(
                self.head_symbol, 0, dict(shapes, **whole), self.trained + cuts
            )
        self.shapes = shapes
        replicas.warn_of_whole_batches(self.across)

    def _executor(self, symbol, replica, shapes, differentiated, states=None):
        """Bind ``symbol`` on a replica's context, to its weights and to new arrays."""
        if not differentiated:
            # Bound without any gradient, MXNet 1.9 runs oneDNN's fused convolutions on cpu(0),
            # which go on with the weights of their first batch (SgMKLDNNConvOperator).
            unused = mx.sym.make_loss(mx.sym.var(_UNUSED, shape=(1,), dtype="float32"))
            symbol = mx.sym.Group([symbol, unused])
            differentiated = [_UNUSED]
        context, weights = self.replicas.contexts[replica], self.replicas.args[replica]
        states = self.replicas.auxs[replica] if states is None else states
        names = symbol.list_arguments()
        types = {n: w.dtype for n, w in weights.items()}
        for body in self.bodies[:1]:  # then this is the head
            types.update((n, output.dtype) for n, output in zip(self.cuts, body.outputs))
        shapes, _, unheld = symbol_graph.inferred(symbol.infer_shape, symbol, shapes)
        types, _, _ = symbol_graph.inferred(symbol.infer_type, symbol, types)
        args = {
            n: weights[n] if n in weights else mx.nd.zeros(shape, context, dtype)
            for n, shape, dtype in zip(names, shapes, types)
        }
        gradients = {
            n: mx.nd.zeros(
                args[n].shape, context, args[n].dtype, "row_sparse" if n in self.sparse else None
            )
            for n in differentiated
            if n in args
        }
        return symbol.bind(
            context,
            args,
            args_grad=gradients,
            grad_req={n: "write" if n in gradients else "null" for n in names},
            aux_states={
                n: states[n]
                if n in states
                else self.replicas.unheld.setdefault(n, mx.nd.zeros(shape, context))
                for n, shape in zip(symbol.list_auxiliary_states(), unheld)
            },
        )

    # One batch ----------------------------------------------------------------------------------

    def forward(self, inputs):
        """Run the bodies on their shards and the head on the whole; return Keras' results."""
        batch = self._batch(inputs)
        for body, part in zip(self.bodies, self.computed):
            _feed(body, {name: batch[name][part] for name in self.sharded})
            body.forward(is_train=self.is_train)
        values = [self._gather(position) for position in range(len(self.cuts))]
        if self.head is not None:
            _feed(self.head, dict(batch, **dict(zip(self.cuts, values))))
            values += self.head.forward(is_train=self.is_train)
        values = [values[place] for place in self.places]
        self.updates = list(zip(self.variables, values[self.results :]))
        if len(self.sizes) > 1:  # else it is verified
            names = [str(context) for context in self.replicas.contexts]
            # Without cuts the head computes all.
            sizes = self.sizes if self.cuts else work.undivided(names, sum(self.sizes))
            work.count(names, sizes, self.is_train)
        return values[: self.results]

    def _gather(self, position):
        """The rows of one output of all bodies, on the first context."""
        first = self.replicas.contexts[0]
        shards = [body.outputs[position].as_in_context(first) for body, _ in self.filled]
        return mx.nd.concat(*shards, dim=0) if len(shards) > 1 else shards[0]

    def backward(self):
        """Gradients: the head's at the cut, and from there on each context its shard's."""
        self.head.backward()
        # Of no rows even zeros would not do, before a loss layer. Without cuts the head does all.
        for body, part in self.filled if self.cuts else ():
            context = body.outputs[0].context
            gradients = [self.head.grad_dict[name][part] for name in self.cuts]
            body.backward([gradient.as_in_context(context) for gradient in gradients])
