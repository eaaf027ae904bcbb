"""Trial of replicas: they must compute the same rows as the whole batch."""

import contextlib
from typing import Any, Dict, List

import numpy as np

from ..._rows import Fallback, Mixed, Placement, Reason, Sharded, Unknown, trial
from . import graph
from .propagation import is_in_order
from .resource_variables import settable
from .side_effects import PythonFunctions


class ReplicasTrial:
    """A trial of replicas on three rows, together and in parts.

    Arguments:
        backend: Keras' backend.
        replicas: the ``Replicas``.
        fed: the values that the function is fed, by tensor.
        phase: the learning phase, if that is a tensor.
    """

    def __init__(self, backend, replicas, fed, phase):
        self.session = backend.get_session()
        self.replicas, self.replica = replicas, replicas.copies[0]
        self.part, self.propagation = replicas.part, replicas.part.propagation
        split = replicas.read_in_shards()
        fed = {t: v for t, v in fed.items() if v is not None}  # one with a default has None
        self._values = {t: v for t, v in fed.items() if not hasattr(v, "op") and hasattr(t, "op")}
        self._fed = {t: v for t, v in self._values.items() if not any(t is s for s in split)}
        if hasattr(phase, "op"):
            self._fed[phase] = False
        self._python = PythonFunctions(self.part.once.union(self.part.needed))

    def _value_of(self, tensor):
        """Return rows of a tensor of which the replica reads a shard, as fed, or made up."""
        if tensor in self._values:
            return self._values[tensor]
        if not tensor.op.type.startswith(("Placeholder", "Iterator", "Queue")):
            return self.session.run(tensor)
        shape = [3 if size is None else size for size in tensor.shape.as_list()]
        if tensor.dtype.is_floating:
            return np.random.RandomState(0).normal(size=shape).astype(tensor.dtype.as_numpy_dtype)
        return np.arange(np.prod(shape)).reshape(shape).astype(tensor.dtype.as_numpy_dtype) % 2

    def differing(self, tensors: "List[Any]") -> "Dict[Any, Fallback]":
        """Return the tensors that are not the replicas' rows in order, each with a ``Fallback``.

        Random tensors are left out where rules give their placements.
        """
        runs: "List[Any]" = []
        try:
            results = self._tried(tensors, runs)
        except Exception:
            if runs:  # it succeeded for all rows, but not for some of them
                return dict.fromkeys(tensors, Fallback(Reason.FAILS_ON_SHARD))
            results = dict.fromkeys(tensors, Unknown())
        fallbacks = {}
        for tensor, placement in results.items():
            if isinstance(placement, Unknown):  # such as that of a random tensor
                if not self.propagation.assumed.isdisjoint(self.part.before(tensor)):
                    fallbacks[tensor] = Fallback(Reason.NO_RULE)
            elif not is_in_order(placement):
                fallbacks[tensor] = Fallback(Reason.TRIAL_DIFFERS)
        changing = {result for op in self._changing() for result in op.outputs}
        if changing:
            after = [t for t in tensors if not changing.isdisjoint(self.part.before(t))]
            fallbacks.update(dict.fromkeys(after, Fallback(Reason.SIDE_EFFECTS)))
        return fallbacks

    def _changing(self):
        """Return the operations of the batch part whose Python functions have side effects."""
        return self._python.changing.intersection(self.part.operations)

    def placements(self, failed: "Dict[Any, Fallback]") -> "Dict[Any, Placement]":
        """Return new placements by which to partition the graph again.

        Arguments:
            failed: the tensors that have failed the trial, as ``differing`` returns them.
        """
        candidates = [
            tensor
            for op in filter(graph.is_outermost, self.part.needed)
            if op in self.part.operations and op.type not in ("Switch", "Assert")
            for tensor in op.outputs
            if tensor not in self.part.averaged
            and tensor.dtype.name not in ("resource", "variant")
            and (self._is_unknown(tensor) or hasattr(tensor, "_keras_history"))
        ]
        results: "Dict[Any, Placement]" = {}
        placements: "Dict[Any, Placement]" = {}
        with contextlib.suppress(Exception):
            results = self._tried(candidates, [])
        for tensor, placement in results.items():
            if self._is_unknown(tensor) and not isinstance(placement, Unknown):
                placements[tensor] = placement
            elif isinstance(placement, Mixed):
                placements[tensor] = Mixed(Fallback(Reason.TRIAL_DIFFERS))
        for tensor, fallback in failed.items():
            if not isinstance(placements.get(tensor), Mixed):
                placements[tensor] = Mixed(fallback)
        for op in self._changing():
            placements.update(dict.fromkeys(op.outputs, Mixed(Fallback(Reason.SIDE_EFFECTS))))
        return {t: p for t, p in placements.items() if self.propagation.tried.get(t) != p}

    def _is_unknown(self, tensor):
        return isinstance(self.propagation.placement_of(tensor), Unknown)

    def _tried(self, tensors, runs):
        """Return placements of tensors by a trial.

        Arguments:
            tensors: the tensors.
            runs: a list to which the results of each run are added, also if a later run fails.
        """
        random = [t for t in self.part.drawn() if graph.is_outermost(t.op)]
        written = list(settable(graph.variables_of(self.part.once)))
        before = self.session.run(written)

        def compute(rows):
            runs.append(self._run(tensors, values, drawn, rows))
            return runs[-1]

        try:
            values = {t: self._value_of(t) for t in self.replicas.read_in_shards()}
            with self._python.unchanged():
                drawn = dict(zip(random, self._run(random, values, {}, trial.WHOLE)))
                reduced = self.replicas.reductions.unconditional + self.replicas.gathered
                drawn.update(zip(reduced, self._run(reduced, values, drawn, trial.WHOLE)))
                return dict(zip(tensors, trial.tried(compute)))
        finally:
            for variable, value in zip(written, before):
                # By an operation that exists: the graph may be finalized.
                initializer = variable.initializer
                self.session.run(initializer, {initializer.inputs[1]: value})

    def _run(self, tensors, values, drawn, rows):
        """Return the arrays that the replica computes of some rows.

        Arguments:
            tensors: the tensors, of Keras' graph.
            values: by tensors of which the replica reads a shard, their values.
            drawn: by random and by reduced tensors, their values for all rows.
            rows: the numbers of the rows.
        """
        feed = dict(self._fed)
        # Where replicas reduce, all get the same rows, of which those of the first one count.
        several = self.replicas.reductions.merged + self.replicas.gathered
        for tensor, value in values.items():
            if self.replicas.gathered:  # maybe computed from the input itself
                feed.update(zip(graph.dense_parts(tensor), _rows_of(value, rows)))
            for replica in self.replicas.copies if several else [self.replica]:
                shards = [replica.replaced[part] for part in graph.dense_parts(tensor)]
                feed.update(zip(shards, _rows_of(value, rows)))
        if several:
            counts = [len(rows)] + [0] * len(self.replicas.devices[1:])
            feed.update(zip(self.replicas.merging.sizes, counts))
        for tensor, value in drawn.items():
            placement = self.propagation.placement_of(tensor)
            if isinstance(placement, Sharded) and rows != trial.WHOLE:
                value = trial.chosen(value, placement, rows)
            feed[self.replica.tensor(tensor)] = value
        fetches = [self.replica.tensor(tensor) for tensor in tensors]
        return list(map(np.asarray, self.session.run(fetches, feed)))


def _rows_of(value, rows):
    """Return rows of an array, or the parts of a sparse one; if it has fewer, they repeat."""
    if hasattr(value, "tocoo"):
        value = value.tocoo()
        indices, values, shape = np.stack([value.row, value.col], 1), value.data, value.shape
    elif hasattr(value, "dense_shape"):
        indices, values, shape = value
    else:
        return [np.asarray(value)[[row % len(value) for row in rows]]]
    taken = [np.flatnonzero(indices[:, 0] == row % shape[0]) for row in rows]
    indices, values = indices[np.concatenate(taken)], values[np.concatenate(taken)]
    indices[:, 0] = np.repeat(range(len(rows)), list(map(len, taken)))
    return [indices.astype("int64"), values, np.array([len(rows)] + list(shape[1:]), "int64")]
