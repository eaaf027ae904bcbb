"""The graphs of a Keras model on several contexts: cut in two, and their executors."""

from typing import Any, Dict, List

import mxnet as mx
from keras.backend import mxnet_backend as K

from ... import _rows
from ..._rows import Fallback, Reason, splitting
from ..._runtime import work
from . import joined_executors, partition
from .executors import arrays_for, bound
from .graph import Graph
from .joined_executors import JoinedExecutor, Replica
from .propagation import Propagation
from .trial import propagate_and_try


class Phase:
    """One of Keras' graphs (train, test or predict) cut into body and head, and its executors.

    Attributes:
        bodies: an executor for each replica, on its context.
        head: the executor that runs once, or None where the bodies compute all results.
        updates: new values by variable, after ``forward``.
        parameters: all weights of the graph, in MXNet's order.
    """

    def __init__(self, replicas, name, inputs):
        self.replicas, self.contexts, self.arrays = replicas, replicas.contexts, replicas.arrays
        model = replicas.model
        self.is_train = name == "train"
        updates = model.updates if self.is_train else model.state_updates
        outputs, states = _symbols(model, self.is_train)
        # All outputs, results, and the updates' values. The number of results cannot be derived
        # from that of updates: layers may have become trainable since compile().
        if name == "predict":  # Keras' own graph leaves out values that are outputs, too
            symbol, self.results, labels = mx.sym.Group(outputs + states), len(outputs), []
        else:
            symbol = getattr(model, f"_{name}_mxnet_symbol")
            self.results = getattr(model, "_n" + name)
            labels = model.targets + model.sample_weights
        graph = Graph(outputs, symbol)
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
        self.bodies, self.shapes = [], None
        propagation, fallback = Propagation(graph), None
        self.is_tried = inputs[0].shape[0] > 1
        if not self._divides(inputs):
            fallback = Fallback(Reason.CROSS_BATCH)
        elif len(self.contexts) > 1:  # else one runs the whole batch
            propagation, fallback = self._propagate(graph, inputs)
        # Batch normalization by the statistics of the whole batch: see ``joined_executors``.
        self.wanted, self.is_joined = joined_executors.requested(model), False
        if self.is_train and fallback is None:
            types = {name: array.dtype for name, array in self.arrays[0].items()}
            refused = joined_executors.refused(graph, self.wanted, types)
            if refused and len(self.contexts) > 1:
                name = graph.nodes[refused[0]]["name"]
                propagation, fallback = Propagation(graph), Fallback(Reason.CROSS_BATCH, name)
        if fallback is not None:
            reach = _rows.DOWNSTREAM if fallback.operation else "The model"
            context = self.contexts[0]
            _rows.warn_unsplit(model, model.name, fallback, context, reach, replicas)
        self.body, self.head_symbol, self.cuts, self.places = partition.cut(propagation)
        if self.is_train and self.cuts:
            nodes = joined_executors.synchronized(Graph([], self.body), self.wanted)
            self.is_joined = bool(nodes)

    def _propagate(self, graph, inputs):
        """Infer placements, and try them.

        Returns:
            The ``Propagation``; and a ``Fallback`` if outputs mix rows, or None.
        """
        batch = self._batch(inputs)
        placements = dict.fromkeys(self.fed, _rows.Mixed())
        placements.update(dict.fromkeys(self.sharded, _rows.Sharded(0)))
        # As arrays of NumPy: MXNet 1.5 refuses to slice past the end.
        batch.update((name, batch[name].asnumpy()) for name in self.states)
        fed = {name: batch[name][: len(_rows.trial.WHOLE)] for name in self.sharded}
        propagation, fallback = propagate_and_try(
            graph, placements, fed, self.contexts[0], {}, self.arrays[0]
        )
        return propagation, fallback or propagation.fallback(graph.outputs)

    def _batch(self, inputs):
        """Return all arrays with a batch dimension by name: inputs, and the states of layers."""
        dense = [x.toarray() if hasattr(x, "toarray") else x for x in inputs]  # of scipy's matrices
        held = self.replicas.model._args
        return dict(zip(self.fed, dense), **{name: held[name] for name in self.states})

    def _divides(self, inputs):
        """Return whether all inputs have the same number of rows."""
        return len({x.shape[0] for x in inputs[: len(self.replicas.model.inputs)]}) == 1

    def is_for(self, inputs: "List[Any]") -> bool:
        """Return whether this phase can run these inputs; a new one has to be made otherwise."""
        # A trial on a single row is inconclusive.
        is_tried = self.is_tried or inputs[0].shape[0] == 1
        if self.is_train and self.wanted != joined_executors.requested(self.replicas.model):
            return False
        return not self.cuts or (self._divides(inputs) and is_tried)

    # Executors ----------------------------------------------------------------------------------

    def bind(self, inputs: "List[Any]") -> None:
        """Make executors for inputs of these shapes, unless there are some."""
        shapes = {name: tuple(array.shape) for name, array in self._batch(inputs).items()}
        if shapes == self.shapes:
            return
        self.bodies, self.filled, self.head = [], [], None  # release their memory first
        self.shapes = None  # until all are made, in case that is interrupted
        rows, count = inputs[0].shape[0], len(self.contexts)
        self.sizes = splitting.sizes(rows, count)
        is_joined = self.is_joined and min(rows, count) > 1
        made: "List[Any]" = []
        for size, context, held in zip(self.sizes, self.contexts, self.arrays):
            # With a row, whose results are not used, where the shard is empty.
            shard = {name: (size or 1,) + shapes[name][1:] for name in self.sharded}
            types: "Dict[str, Any]" = {}
            arguments = self.body, context, shard, types, held, self.trained, self.sparse
            if is_joined:
                made.append(Replica(context, shard, *arrays_for(*arguments)))
            else:
                made.append(bound(*arguments))
        filled = [replica for replica, size in enumerate(self.sizes) if size]
        if is_joined:
            running = [made[replica] for replica in filled]
            made = running = JoinedExecutor(self.body, self.wanted, running, {}).replicas
        else:
            running = [made[replica] for replica in filled]
        self.bodies = made
        for replica, body in zip(filled, running):
            self.filled.append((body, slice(*splitting.bounds(rows, count, replica))))
        if self.head_symbol is not None:
            cut = dict(zip(self.cuts, self.bodies[0].outputs))
            whole = {name: (rows,) + tuple(output.shape[1:]) for name, output in cut.items()}
            types = {name: output.dtype for name, output in cut.items()}
            differentiated = self.trained + (self.cuts if self.is_train else [])
            self.head = bound(
                self.head_symbol, self.contexts[0], dict(shapes, **whole), types, self.arrays[0],
                differentiated, self.sparse,
            )  # fmt: skip
        self.shapes = shapes

    # One batch ----------------------------------------------------------------------------------

    def forward(self, inputs: "List[Any]") -> "List[Any]":
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
            sizes = self.sizes if self.cuts else work.unsplit_sizes(self.sizes, sum(self.sizes))
            work.count(list(map(str, self.contexts)), sizes, self.is_train)
        return values[: self.results]

    def _run(self, executor, arrays):
        fed = {name: array for name, array in arrays.items() if name in executor.arg_dict}
        return executor.forward(is_train=self.is_train, **fed)

    def backward(self):
        """Compute gradients: the head's at the cut, and from there each body's, of its shard."""
        self.head.backward()
        # Bodies without rows are left out: even zeros at the cut would not do, before a loss layer.
        # Without cuts the head computes all gradients.
        for body, part in self.filled if self.cuts else ():
            context = body.outputs[0].context
            gradients = [self.head.grad_dict[name][part] for name in self.cuts]
            body.backward([gradient.as_in_context(context) for gradient in gradients])


def _symbols(model, is_train):
    """Return the symbols of a model's outputs, and of the new values of its states, in a phase."""
    before = K.learning_phase()
    K.set_learning_phase(int(is_train))
    try:
        outputs = [output.symbol for output in model.outputs]
        return outputs, [value.symbol for _, value in model.state_updates]
    finally:
        K.set_learning_phase(before)
