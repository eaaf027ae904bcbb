"""How the tensors of a static graph depend on the rows of the batch, operation by operation.

The table of operations is ``row_operations``. What it does not know (loops, functions, unusual
operations) is unknown: the output of a layer is then *assumed* to have rows first, which is Keras'
own convention, and ``ReplicasTrial`` asks before anything is made of it.
"""

import contextlib
import re

import numpy as np

from ..._rows import REPLICATED, Count, Mixed, Replicated, Sharded, Unknown, Value, trial
from . import graph
from .python_functions import PythonFunctions
from .row_operations import ALIGNED, placements
from .row_rules import Positions
from .variables import settable


class TensorRows:
    """What is known of the tensors that depend on a batch.

    Arguments:
        inputs: the tensors whose rows are the batch's.
        operations: the operations that depend on them.
        fixed: the number of rows, where it is fixed.
        normalizing: the names of layers that take statistics of each device's own rows.
        tried: placements of tensors that a trial found.

    Attributes:
        mixing: operations whose results are right only where the whole batch is.
        assumed: tensors taken for rows, since nothing tells.
        statistics: those of the operations of ``normalizing``, and what they normalize at once.
        constants: tensors that have a row for each of a fixed number, but do not depend on them.
        shapes: tensors that tell Reshape to give a fixed number of rows, and those for any number.
    """

    def __init__(self, inputs, operations, fixed, normalizing, tried):
        self.fixed, self.tried = fixed, tried
        self._normalizing = _scopes_of(normalizing)
        self.mixing, self.assumed = [], set()
        self.statistics, self.constants, self.shapes = [], set(), {}
        self._known = {}
        sparse = [Positions(Sharded(0)), Sharded(0, inner=None, even=False), Count([0])]
        for tensor in inputs:
            parts = graph.dense_parts(tensor)
            self._known.update(zip(parts, sparse if len(parts) > 1 else [Sharded(0)]))
        for op in _in_order(operations):
            self._look_at(op)

    def known(self, tensor):
        return self._known.get(tensor, REPLICATED)

    def come_first(self, tensor):
        """Whether the devices' values, one after the other, are those of the whole batch."""
        return graph.is_outermost(tensor.op) and is_in_order(self._assumed(tensor))

    def _assumed(self, tensor):
        """The placement of a tensor, taken for rows where nothing tells."""
        placement = self.known(tensor)
        if not isinstance(placement, Unknown) or not self._may_come_first(tensor):
            return placement
        self.assumed.add(tensor)
        return Sharded(0, inner=None)

    def _may_come_first(self, tensor):
        if tensor.dtype.name in ("resource", "variant"):
            return False
        if tensor.shape.ndims is None:
            return hasattr(tensor, "_keras_history")
        first = graph.sizes_of(tensor)[:1]
        return first == [None] or bool(self.fixed and first and first[0] % self.fixed == 0)

    def _look_at(self, op):
        given = [self.known(tensor) for tensor in op.inputs]
        results = self._results(op, given)
        if self._normalizing is not None and any(map(self._normalizing, op.name.split("/"))):
            # Some take statistics of their rows and normalize by them, all in one.
            normalizes = op.type.startswith("FusedBatchNorm") and op.get_attr("is_training")
            for place, (tensor, result) in enumerate(zip(op.outputs, results)):
                if normalizes or not isinstance(result, (Replicated, Sharded, Count)):
                    self.statistics.append(tensor)
                if not isinstance(result, (Sharded, Count)):
                    results[place] = REPLICATED
        elif self._mixes_back(op, given, results):
            results = [Mixed("gradient")] * len(results)
        for tensor, result in zip(op.outputs, results):
            self._known[tensor] = self.tried.get(tensor, result)
            if hasattr(tensor, "_keras_history"):
                self._known[tensor] = self._assumed(tensor)
        # Whether all rows are so, or any is: RNNs choose among implementations by that.
        if any(map(self._is_mixed, op.outputs)) and not any(map(self._is_mixed, op.inputs)):
            self.mixing.append(op)

    def _mixes_back(self, op, given, results):
        """Whether an operation has a gradient of its own, and that mixes rows."""
        rows = any(isinstance(each, Sharded) for each in results)
        if not rows or graph.loop_of(op) is not None or not graph.has_own_gradient(op):
            return False
        mixing = list(self.mixing)
        try:
            gradient = graph.OwnGradient(op, results)
        except Exception:  # whatever a function of the user's does
            return True
        self._known.update(gradient.upstream)
        for each in gradient.operations:
            self._look_at(each)
        self.mixing = mixing
        return gradient.mixes(given, self.known)

    def _is_mixed(self, tensor):
        known = self.known(tensor)
        mixed = isinstance(known, Mixed) and not isinstance(known, Positions)
        return mixed and tensor.dtype.name != "bool"

    def _results(self, op, given):
        if graph.loop_of(op) is not None:
            mixed = [each for each in given if isinstance(each, Mixed)]
            return [mixed[0] if mixed else Unknown("in a loop")] * len(op.outputs)
        self._look_at_constants(op, given)
        if all(isinstance(each, Replicated) for each in given):
            return [REPLICATED] * len(op.outputs)
        values = [_value(tensor, kind) for tensor, kind in zip(op.inputs, given)]
        return placements(op, values)

    def _look_at_constants(self, op, given):
        """TensorFlow makes constants of zeros and shapes where the number of rows is fixed."""
        if op.type == "Reshape" and isinstance(given[0], Sharded):
            reshaped = all(consumer.type == "Reshape" for consumer in op.inputs[1].consumers())
            if reshaped and self.has_fixed(op.outputs[0]):
                self.shapes[op.inputs[1]] = [-1] + op.outputs[0].shape.as_list()[1:]
                given[1] = Count([0])
        elif op.type in ALIGNED:
            ranks = {
                tensor.shape.ndims
                for tensor, kind in zip(op.inputs, given)
                if isinstance(kind, Sharded) and kind.axis == 0
            }
            for index, tensor in enumerate(op.inputs):
                replicated = given[index] == REPLICATED and tensor.shape.ndims in ranks
                if replicated and self.has_fixed(tensor):
                    given[index] = Sharded(0)
                    self.constants.add(tensor)

    def has_fixed(self, tensor):
        """Whether the first dimension of ``tensor`` has as many rows as are fixed."""
        return self.fixed not in (None, 1) and (graph.sizes_of(tensor) or [])[:1] == [self.fixed]


def is_in_order(placement):
    """Whether devices' values of this placement, put together in order, are the whole's."""
    return isinstance(placement, Sharded) and (placement.axis, placement.copies) == (0, 1)


def _scopes_of(layers):
    """A function that tells the scopes of layers of these names, used once or more often."""
    names = "|".join(map(re.escape, layers))
    return re.compile(rf"(?:{names})(_\d+)?$").match if names else None


def _value(tensor, placement):
    shape = graph.sizes_of(tensor)
    if shape and isinstance(placement, Sharded):
        shape[placement.axis] = None
    return Value(placement, shape)


def _in_order(operations):
    """Operations after those whose results they take; ways back in loops left out.

    The Switch that lets a tensor into a condition is made after the operation that takes it.
    """
    pending = sorted(operations, key=lambda op: op._id, reverse=True)
    ordered, entered = {}, set()  # type: Any, Any
    while pending:
        op = pending[-1]
        entered.add(op)
        before = [t.op for t in op.inputs if t.op in operations and t.op not in entered]
        pending += before
        if not before:
            ordered[pending.pop()] = None
    return ordered


class ReplicasTrial:
    """A trial of replicas.

    Arguments:
        backend: Keras' backend.
        replicas: the ``Replicas``.
        fed: what the function is fed, by its tensors.
        phase: the learning phase, if that is a tensor.
    """

    def __init__(self, backend, replicas, fed, phase):
        self.session = backend.get_session()
        self.replicas, self.replica = replicas, replicas.copies[0]
        self.part, self.rows = replicas.part, replicas.part.rows
        divided = replicas.read_in_shards()
        given = {t: v for t, v in fed.items() if v is not None}  # one with a default has None
        self._given = {t: v for t, v in given.items() if not hasattr(v, "op") and hasattr(t, "op")}
        self._fed = {t: v for t, v in self._given.items() if not any(t is d for d in divided)}
        if hasattr(phase, "op"):
            self._fed[phase] = False
        self._python = PythonFunctions(self.part.once.union(self.part.needed))

    def _value_of(self, tensor):
        """Rows of a tensor that the replica reads a shard of, from what is fed, or made up."""
        if tensor in self._given:
            return self._given[tensor]
        if not tensor.op.type.startswith(("Placeholder", "Iterator", "Queue")):
            return self.session.run(tensor)
        shape = [3 if size is None else size for size in tensor.shape.as_list()]
        if tensor.dtype.is_floating:
            return np.random.RandomState(0).normal(size=shape).astype(tensor.dtype.as_numpy_dtype)
        return np.arange(np.prod(shape)).reshape(shape).astype(tensor.dtype.as_numpy_dtype) % 2

    def differing(self, tensors):
        """The tensors that are not the replicas' rows in order, and why, as ``Across`` says it.

        Random ones are not among them where rules tell.
        """
        ran = []
        try:
            found = self._tried(tensors, ran)
        except Exception:
            if ran:  # of all rows, but not of some of them
                return dict.fromkeys(tensors, "fails")
            found = dict.fromkeys(tensors, Unknown())
        whys = {}
        for tensor, placement in found.items():
            if isinstance(placement, Unknown):  # also where it is random
                if not self.rows.assumed.isdisjoint(self.part.before(tensor)):
                    whys[tensor] = "unknown"
            elif not is_in_order(placement):
                whys[tensor] = "tried"
        changing = {result for op in self._changing() for result in op.outputs}
        if changing:
            after = [t for t in tensors if not changing.isdisjoint(self.part.before(t))]
            whys.update(dict.fromkeys(after, "effects"))
        return whys

    def _changing(self):
        """The operations of the batch part whose Python functions change more than they return."""
        return self._python.changing.intersection(self.part.operations)

    def placements(self, failed):
        """The placements by which the graph is divided anew, after some tensors failed the trial.

        Arguments:
            failed: as ``differing`` gives.
        """
        asked = [
            tensor
            for op in filter(graph.is_outermost, self.part.needed)
            if op in self.part.operations and op.type not in ("Switch", "Assert")
            for tensor in op.outputs
            if tensor not in self.part.averaged
            and tensor.dtype.name not in ("resource", "variant")
            and (self._is_untold(tensor) or hasattr(tensor, "_keras_history"))
        ]
        tried, found = {}, {}
        with contextlib.suppress(Exception):
            tried = self._tried(asked, [])
        for tensor, placement in tried.items():
            if self._is_untold(tensor) and not isinstance(placement, Unknown):
                found[tensor] = placement
            elif isinstance(placement, Mixed):
                found[tensor] = Mixed("tried")
        for tensor, why in failed.items():
            if not isinstance(found.get(tensor), Mixed):
                found[tensor] = Mixed(why)
        for op in self._changing():
            found.update(dict.fromkeys(op.outputs, Mixed("effects")))
        return {t: p for t, p in found.items() if self.rows.tried.get(t) != p}

    def _is_untold(self, tensor):
        return isinstance(self.rows.known(tensor), Unknown)

    def _tried(self, tensors, ran):
        """The placements of tensors by a trial, which adds to ``ran`` what it has computed."""
        random = [t for t in self.part.drawn() if graph.is_outermost(t.op)]
        written = list(settable(graph.variables_of(self.part.once)))
        before = self.session.run(written)

        def compute(rows):
            ran.append(self._run(tensors, values, drawn, rows))
            return ran[-1]

        try:
            values = {t: self._value_of(t) for t in self.replicas.read_in_shards()}
            with self._python.unchanged():
                drawn = dict(zip(random, self._run(random, values, {}, trial.WHOLE)))
                return dict(zip(tensors, trial.tried(compute)))
        finally:
            for variable, value in zip(written, before):
                # By an operation that is there: the graph may be finalized.
                initializer = variable.initializer
                self.session.run(initializer, {initializer.inputs[1]: value})

    def _run(self, tensors, values, drawn, rows):
        """The arrays that the replica computes of some rows.

        Arguments:
            values: of the tensors that it reads a shard of.
            drawn: of random ones, for all rows.
        """
        feed = dict(self._fed)
        for tensor, value in values.items():
            shards = [self.replica.replaced[part] for part in graph.dense_parts(tensor)]
            feed.update(zip(shards, _rows_of(value, rows)))
        for tensor, value in drawn.items():
            placement = self.rows.known(tensor)
            if isinstance(placement, Sharded) and rows != trial.WHOLE:
                value = trial.chosen(value, placement, rows)
            feed[self.replica.tensor(tensor)] = value
        asked = [self.replica.tensor(tensor) for tensor in tensors]
        return list(map(np.asarray, self.session.run(asked, feed)))


def _rows_of(value, rows):
    """Some rows of an array, or the parts of a sparse one; more of them than it has come again."""
    if hasattr(value, "tocoo"):
        value = value.tocoo()
        places, values, shape = np.stack([value.row, value.col], 1), value.data, value.shape
    elif hasattr(value, "dense_shape"):
        places, values, shape = value
    else:
        return [np.asarray(value)[[row % len(value) for row in rows]]]
    taken = [np.flatnonzero(places[:, 0] == row % shape[0]) for row in rows]
    places, values = places[np.concatenate(taken)], values[np.concatenate(taken)]
    places[:, 0] = np.repeat(range(len(rows)), list(map(len, taken)))
    return [places.astype("int64"), values, np.array([len(rows)] + list(shape[1:]), "int64")]
