"""What replicas are about to give, tried on three rows: together, and as two of them and the third.

The first replica is asked, in inference, at the first call of each of a model's functions, from
what that is fed. Random numbers, and the statistics of batch normalization, are those of the three
rows each time.
"""

import contextlib

from ..._rows import Mixed, Sharded, Unknown, trial
from .graph import dense_parts, is_outermost, variables_of
from .graph_rows import is_in_order


class ReplicasTrial:
    """A trial of replicas.

    Arguments:
        backend: Keras' backend.
        replicas: the ``Replicas``.
        fed: what the function is fed, by its tensors.
        phase: the learning phase, if that is a tensor.
    """

    def __init__(self, backend, replicas, fed, phase):
        self.backend = backend
        self.session = backend.get_session()
        self.replicas = replicas
        self.replica = replicas.copies[0]
        self.rows = replicas.part.rows
        divided = replicas.read_in_shards()
        given = {t: v for t, v in fed.items() if v is not None}  # one with a default has None
        self._given = {t: v for t, v in given.items() if not hasattr(v, "op") and hasattr(t, "op")}
        self._fed = {t: v for t, v in self._given.items() if not any(t is d for d in divided)}
        if hasattr(phase, "op"):
            self._fed[phase] = False

    def _value_of(self, tensor):
        """Rows of a tensor that the replica reads a shard of, from what is fed, or made up."""
        import numpy as np

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
                if self._is_assumed(tensor):
                    whys[tensor] = "unknown"
            elif not is_in_order(placement):
                whys[tensor] = "tried"
        return whys

    def _is_assumed(self, tensor):
        return not self.rows.assumed.isdisjoint(self.replicas.part.before(tensor))

    def placements(self, failed):
        """The placements by which the graph is divided anew, after some tensors failed the trial.

        Arguments:
            failed: as ``differing`` gives.
        """
        part = self.replicas.part
        asked = [
            tensor
            for op in part.needed
            if op in part.operations and is_outermost(op) and op.type not in ("Switch", "Assert")
            for tensor in op.outputs
            if tensor not in part.averaged
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
        return {t: p for t, p in found.items() if self.rows.tried.get(t) != p}

    def _is_untold(self, tensor):
        return isinstance(self.rows.known(tensor), Unknown)

    def _tried(self, tensors, ran):
        """The placements of tensors by a trial, which adds to ``ran`` what it has computed."""
        random = [t for t in self.replicas.part.drawn() if is_outermost(t.op)]

        def compute(rows):
            ran.append(self._run(tensors, values, drawn, rows))
            return ran[-1]

        with self._writing_nothing():
            values = {t: self._value_of(t) for t in self.replicas.read_in_shards()}
            drawn = dict(zip(random, self._run(random, values, {}, trial.WHOLE)))
            return dict(zip(tensors, trial.tried(compute)))

    @contextlib.contextmanager
    def _writing_nothing(self):
        """Within, variables may be written that are, afterwards, as they were."""
        variables = list(variables_of(self.replicas.part.once))
        values = self.session.run(variables) if variables else []
        try:
            yield
        finally:
            self.backend.batch_set_value(list(zip(variables, values)))

    def _run(self, tensors, values, drawn, rows):
        """The arrays that the replica computes of some rows.

        Arguments:
            values: of the tensors that it reads a shard of.
            drawn: of random ones, for all rows.
        """
        import numpy as np

        feed = dict(self._fed)
        for tensor, value in values.items():
            shards = [self.replica.replaced[part] for part in dense_parts(tensor)]
            feed.update(zip(shards, _rows_of(value, rows)))
        for tensor, value in drawn.items():
            placement = self.rows.known(tensor)
            if isinstance(placement, Sharded) and rows != trial.WHOLE:
                value = trial.chosen(value, placement, rows)
            feed[self.replica.tensor(tensor)] = value
        asked = [self.replica.tensor(tensor) for tensor in tensors]
        return list(map(np.asarray, self.session.run(asked, feed) if asked else ()))


def _rows_of(value, rows):
    """Some rows of an array, or the parts of a sparse one; more of them than it has come again."""
    import numpy as np

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
