"""Keras' graphs of a phase (train, test, predict) as the executors that replicas run."""

from ... import _replicas, _work, errors
from . import running_statistics, symbol_graph

_UNUSED = "compat_unused"  # a variable that has a gradient, and that nothing depends on


def state_names(model):
    """The variables that hold stateful layers' states, one row for each row of the batch."""
    return {variable.name for variable, _ in model.state_updates}


class Phase:
    """One of Keras' graphs (train, test or predict) cut into body and head, and its executors.

    Attributes:
        bodies: an executor for each replica, on its context.
        head: the executor that runs once, or None where bodies give all there is to give.
        updates: (variable, new value), after ``forward``.
        parameters: all weights of the graph, in MXNet's order.
    """

    def __init__(self, replicas, name, inputs):
        from keras.backend import mxnet_backend as K

        self.replicas = replicas
        model = replicas.model
        symbol, results, updates = {
            "train": (model._train_mxnet_symbol, model._ntrain, model.updates),
            "test": (model._test_mxnet_symbol, model._ntest, model.state_updates),
            "predict": (model._pred_mxnet_symbol, model._npred, model.state_updates),
        }[name]
        labels = [] if name == "predict" else model.targets + model.sample_weights
        self.fed = [tensor.name for tensor in model.inputs + [t for t in labels if t is not None]]
        self.is_train = name == "train"
        learning_phase = K.learning_phase()
        K.set_learning_phase(int(self.is_train))
        try:
            outputs = [output.symbol for output in model.outputs]
        finally:
            K.set_learning_phase(learning_phase)
        self.states = sorted(state_names(model) & set(symbol.list_arguments()))
        self.sharded = [tensor.name for tensor in model.inputs] + self.states
        self.parameters = [n for n in symbol.list_arguments() if n not in self.fed]
        fixed = self.parameters if not self.is_train else model._fixed_weights
        self.trained = [n for n in self.parameters if n not in fixed]
        # Where the values stand among the heads: outputs, results, then the updates' values.
        graph = symbol_graph.Graph(outputs, symbol)
        self.sparse = graph.sparse_gradients()
        values = graph.heads[len(outputs) :]
        self.variables = [variable.name for variable, _ in updates]
        if name == "predict":  # Keras leaves out values that are outputs, too
            others = [value for _, value in updates if value not in model.outputs]
            order = [
                model.outputs.index(value)
                if value in model.outputs
                else results + others.index(value)
                for _, value in updates
            ]
        else:
            order = range(results, results + len(updates))
        self.results = results
        wanted = values[:results] + [values[position] for position in order]
        # A stateful model knows only its own batch size.
        counts = [len(inputs[0])] if self.states else symbol_graph.ROWS
        shapes = {
            count: {n: (count,) + tuple(x.shape[1:]) for n, x in zip(self.fed, inputs)}
            for count in counts
        }
        self._check_rows(inputs)
        with symbol_graph.shape_errors(model.name, counts[0]):
            self.body, self.head_symbol, self.cuts, self.places = graph.cut(
                graph.heads[: len(outputs)], wanted, self.sharded, shapes
            )
        replicas.warn_of_whole_batches(graph.across_rows)
        states = self.body.list_auxiliary_states()
        running_statistics.check(graph.states(states), model.name)
        self.shapes = None

    def _check_rows(self, inputs):
        """Refuse inputs whose rows are not those of one batch."""
        rows = [len(x) for x in inputs[: len(self.replicas.model.inputs)]]
        if len(set(rows)) > 1:
            named = ", ".join("{} of {}".format(*pair) for pair in zip(rows, self.fed))
            problem = "its inputs have rows: " + named
            raise errors.rows_cannot_be_cut(self.replicas.model.name, problem)

    # Executors ----------------------------------------------------------------------------------

    def executors(self):
        return self.bodies + ([self.head] if self.head is not None else [])

    def bind(self, inputs):
        """Make executors for inputs of these shapes, unless there are."""
        shapes = {name: tuple(x.shape) for name, x in zip(self.fed, inputs)}
        if shapes == self.shapes:
            return
        self._check_rows(inputs)
        self.bodies, self.head = [], None  # give their memory back first
        self.rows = rows = len(inputs[0])
        replicas = self.replicas
        count = len(replicas.contexts)
        self.kept = [_replicas.bounds(rows, count, i) for i in range(count)]
        self.computed = [_replicas.run_bounds(rows, count, i) for i in range(count)]
        held = replicas.model._args
        whole = dict(shapes, **{name: held[name].shape for name in self.states})
        self.bodies = [
            self._executor(
                self.body,
                i,
                {n: (stop - start,) + tuple(whole[n][1:]) for n in self.sharded},
                self.trained,
            )
            for i, (start, stop) in enumerate(self.computed)
        ]
        if self.head_symbol is not None:
            for name, output in zip(self.cuts, self.bodies[0].outputs):
                whole[name] = (rows,) + tuple(output.shape[1:])
            cuts = self.cuts if self.is_train else []
            self.head = self._executor(self.head_symbol, 0, whole, self.trained + cuts)
        self.shapes = shapes

    def _executor(self, symbol, replica, shapes, differentiated):
        """Bind ``symbol`` on a replica's context, to its weights and to new arrays."""
        import mxnet as mx

        is_head = symbol is self.head_symbol
        if not differentiated:
            # Bound without any gradient, MXNet 1.9 runs oneDNN's fused convolutions on cpu(0),
            # which go on with the weights of their first batch (SgMKLDNNConvOperator).
            unused = mx.sym.make_loss(mx.sym.var(_UNUSED, shape=(1,), dtype="float32"))
            symbol = mx.sym.Group([symbol, unused])
            differentiated = [_UNUSED]
        context, weights = self.replicas.contexts[replica], self.replicas.args[replica]
        names = symbol.list_arguments()
        types = {n: w.dtype for n, w in weights.items() if n in names}
        if is_head:
            types.update((n, o.dtype) for n, o in zip(self.cuts, self.bodies[0].outputs))
        shapes = {n: shape for n, shape in shapes.items() if n in names}
        types = {n: t for n, t in types.items() if n in names}
        rows = next(iter(shapes.values()))[0] if shapes else 0
        with symbol_graph.shape_errors(self.replicas.model.name, rows):
            inferred, typed = symbol_graph.inferred(symbol, shapes, types)
        args = {
            n: weights[n] if n in weights else mx.nd.zeros(shape, context, dtype)
            for n, shape, dtype in zip(names, inferred, typed)
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
            aux_states={n: self.replicas.auxs[replica][n] for n in symbol.list_auxiliary_states()},
        )

    # One batch ----------------------------------------------------------------------------------

    def forward(self, inputs, is_train):
        """Run the bodies on their shards and the head on the whole; return Keras' results."""
        held = self.replicas.model._args
        fed = dict(zip(self.fed, inputs))
        fed.update((name, held[name]) for name in self.states)
        for body, (start, stop) in zip(self.bodies, self.computed):
            for name in self.sharded:
                if name in body.arg_dict:
                    body.arg_dict[name][:] = fed[name][start:stop]
            body.forward(is_train=is_train)
        gathered = [self._gather(position) for position in range(len(self.cuts))]
        computed = []
        if self.head is not None:
            for name, value in list(fed.items()) + list(zip(self.cuts, gathered)):
                if name in self.head.arg_dict:
                    self.head.arg_dict[name][:] = value
            computed = self.head.forward(is_train=is_train)
        values = [
            (gathered if where == "cut" else computed)[position] for where, position in self.places
        ]
        self.updates = list(zip(self.variables, values[self.results :]))
        if len(self.kept) > 1:  # else it is verified
            names = [str(context) for context in self.replicas.contexts]
            sizes = [stop - start for start, stop in self.kept]
            # Without cuts the head computes all.
            split = sizes if self.cuts else _work.undivided(names, self.rows)
            _work.count(names, split, is_train)
        return values[: self.results]

    def _gather(self, position):
        """The rows of one output of all bodies, on the first context."""
        import mxnet as mx

        first = self.replicas.contexts[0]
        shards = [
            body.outputs[position][: stop - start].as_in_context(first)
            for body, (start, stop) in zip(self.bodies, self.kept)
            if stop > start
        ]
        return mx.nd.concat(*shards, dim=0) if len(shards) > 1 else shards[0]

    def backward(self):
        """Gradients: the head's at the cut, and from there on each context its shard's."""
        import mxnet as mx

        self.head.backward()
        if not self.cuts:  # the head computes all
            return
        for body, (start, stop) in zip(self.bodies, self.kept):
            context = body.outputs[0].context
            body.backward(
                [
                    self.head.grad_dict[name][start:stop].as_in_context(context)
                    if stop > start  # a row computed for an empty shard counts for nothing
                    else mx.nd.zeros_like(output)
                    for name, output in zip(self.cuts, body.outputs)
                ]
            )
