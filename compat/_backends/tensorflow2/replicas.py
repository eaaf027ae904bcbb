"""The devices' shares of a call, each with a gradient of its own, and how they are merged."""

import contextlib

import tensorflow as tf

from ..._rows import Count, Partial, Replicated, Sharded, split_rows
from . import sharding
from .graph_walk import Added
from .sharding import tensors_of, with_tensors

# TensorFlow's module for the gradient tapes of a thread, private to it.
try:
    from tensorflow.python.eager import record as tapes
except ImportError:  # up to TensorFlow 2.12
    from tensorflow.python.eager import tape as tapes

#: Whether a gradient tape is recording.
recording = tapes.could_possibly_record


def as_function(call, scope, given):
    """A call as a function of the tensors that its arguments and their masks consist of.

    It returns what the call returns, and lists: "outputs" has that, flat; "logits" and "masks" are
    Keras' attributes of the outputs, or None; "losses" were added within the call.

    Arguments:
        scope: makes the context of the call, which yields the losses added in it.
        given: as ``ShardedArguments.given``.
    """

    def compute(*values):
        (args, kwargs), masks = with_tensors(given, values)
        for value, mask in zip(tf.nest.flatten((args, kwargs)), masks):
            if mask is not None:
                value._keras_mask = mask
        with split_rows.undivided(), scope() as losses:
            structure = call(*args, **kwargs)
        outputs = tf.nest.flatten(structure)
        masks = [getattr(output, "_keras_mask", None) for output in outputs]
        logits = [_logits(output) for output in outputs]
        return structure, dict(outputs=outputs, masks=masks, logits=logits, losses=losses)

    return compute


class Replica:
    """One device's share of a call, computed there.

    Arguments:
        size: how many rows are kept; none of the one row computed where this is 0.
        trace: the ``Trace`` of the call; None for a single replica.
        call, scope, given: as of ``as_function``.
        join: what ``joining_tables`` makes of a variable's gradient.

    Attributes:
        shard: the tensors that it was given.
        structure, values: as the function of ``as_function`` returns them, with the replica's own
            rows of the values.
    """

    def __init__(self, device, size, trace, call, scope, given, join):
        self.device, self.size = device, size
        self.shard = tensors_of(given)
        compute = as_function(call, scope, given)

        def own(value, placement):
            is_of_rows = tf.is_tensor(value) and isinstance(placement, Sharded)
            return sharding.kept(value, size) if is_of_rows else value

        def results_of(*values):
            self.structure, self.values = compute(*values)
            for name, placements in trace.placements.items() if trace else ():
                # An error where there are more, or fewer, than in the trace.
                self.values[name] = tf.nest.map_structure(own, self.values[name], placements)
            return tensors_of(self.values)

        @tf.custom_gradient
        def replica(*values):
            with tf.device(device):
                results, gradients_of = _differentiable(results_of, values)

            def gradient(*upstream, **kwargs):  # up to TensorFlow 2.3 no keyword-only argument
                variables = list(kwargs.get("variables") or ())
                # Integers and booleans have no gradient.
                pairs = [(r, g) for r, g in zip(results, upstream) if r.dtype.is_floating]
                heads, upstream = [r for r, _ in pairs], [g for _, g in pairs]
                with tf.device(device):
                    found = gradients_of(heads, list(values) + variables, upstream)
                    found = [_dense(each) for each in found]
                    inputs, of_variables = found[: len(values)], found[len(values) :]
                    of_variables = list(map(join, variables, of_variables))
                return (inputs, of_variables) if variables else inputs

            return results, gradient

        if recording():
            with _listing_no_variables():
                tensors = replica(*self.shard)
        else:  # predict, evaluate: no gradient to keep intermediate results for
            with tf.device(device):
                tensors = results_of(*self.shard)
        self.values = with_tensors(self.values, tensors)


def joining_tables(keys, count):
    """A function of the replicas' gradients of tables in which all look up the same rows.

    One device has one gradient for each lookup. TensorFlow would put those of the replicas side by
    side, and Keras 3 squares one by one what there is of a row. So the replica whose gradient is
    computed last has the sum of all, and the others have none.

    TensorFlow never lets go of a gradient's function, so that nothing here may hold the model.

    Arguments:
        keys: those of the variables.
        count: how many replicas there are.

    Returns:
        What tells, of a replica, counted from 0, a variable and its gradient, what that is to be.
    """
    waiting = {}  # type: dict  # id of a variable -> replica -> its gradient

    def join(replica, variable, gradient):
        if not isinstance(gradient, tf.IndexedSlices) or id(variable.handle) not in keys:
            return gradient
        found = waiting.setdefault(id(variable), {})
        if replica in found:  # of a pass that did not come to its end
            found.clear()
        found[replica] = gradient
        if len(found) < count:
            return None
        del waiting[id(variable)]
        total = tf.add_n([each.values for each in found.values()])
        return tf.IndexedSlices(total, gradient.indices, gradient.dense_shape)

    return join


@contextlib.contextmanager
def _listing_no_variables():
    """Within, the graph lists no variables.

    TensorFlow 2.0 makes sets of those that layers have made within any tf.function, for a gradient
    of one's own, and fails: they have no hash.
    """
    key = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES
    variables = tf.compat.v1.get_default_graph().get_collection_ref(key)
    before = list(variables)
    del variables[:]
    try:
        yield
    finally:
        variables[:0] = before


def _dense(gradient):
    """The gradient of a table's rows, each looked up once, as that of the whole table.

    Other replicas have looked up some of the same rows. Keras 3 squares what there is of a row one
    by one, as it does where one device looks a row up several times.
    """
    if not isinstance(gradient, tf.IndexedSlices) or tf.executing_eagerly():
        return gradient
    op = gradient.indices.op
    while op.type in ("Cast", "Identity", "Reshape"):
        op = op.inputs[0].op
    return tf.convert_to_tensor(gradient) if op.type.startswith("Unique") else gradient


def _differentiable(compute, values):
    """``compute(*values)``, and the function (results, sources, upstream) -> gradients of it."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    # Loops and branches make their variables inputs of another name; the tape knows them.
    if type(graph).__name__ != "FuncGraph":
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([value for value in values if value.dtype.is_floating])
            results = compute(*values)
        return results, tape.gradient

    # Within the caller's tape another one would have TensorFlow trace gradients of gradients of
    # the functions in the model (an LSTM's): twice the time, and in 2.3 without an end where the
    # number of rows is unknown. So a function's graph is walked. This is what tf.gradients()
    # calls, which has no argument for a graph other than the one that gets the gradients.
    from tensorflow.python.ops import gradients_util

    def gradients_of(results, sources, upstream):
        inner = [graph.capture(getattr(source, "handle", source)) for source in sources]
        return gradients_util._GradientsHelper(results, inner, upstream, src_graph=graph)

    return compute(*values), gradients_of


def _logits(output):
    """What went into a final softmax or sigmoid, where Keras' cross-entropy would look for it.

    Keras computes cross-entropy from logits if the output carries them, or comes straight from
    such an operation (``_get_logits`` in its backend).
    """
    logits = getattr(output, "_keras_logits", None)
    if logits is None and tf.is_tensor(output) and not tf.executing_eagerly():
        operation = getattr(output, "op", None)
        if operation is not None and operation.type in ("Softmax", "Sigmoid"):
            logits = operation.inputs[0]
    return logits


# Merging --------------------------------------------------------------------------------------


def is_merged(placement, dtype):
    """Whether there is a way to the value for all rows from those of the replicas."""
    if isinstance(placement, Sharded):
        return placement.axis == 0 and placement.copies == 1
    if isinstance(placement, Partial) and placement.how == "mean":
        return "float" in str(dtype) or "complex" in str(dtype)
    return isinstance(placement, (Added, Partial, Replicated)) or placement == Count()


_EXTREME = {"max": (tf.reduce_max, tf.reduce_any), "min": (tf.reduce_min, tf.reduce_all)}


class Merging:
    """The replicas' values become those of the whole batch.

    Arguments:
        rows: how many the batch has.
        trace: the ``Trace`` of the plain call; None for a single replica.
    """

    def __init__(self, replicas, rows, trace):
        self.replicas, self.trace = replicas, trace
        total = max(rows, 1) if isinstance(rows, int) else tf.maximum(rows, 1)
        #: What the replicas' means count.
        self.shares = [replica.size / total for replica in replicas]

    def results(self):
        """Those of the call for the whole batch, as ``Replica.values``."""
        if self.trace is None:
            return self.replicas[0].values
        found = {}
        for name, placements in self.trace.placements.items():
            values = zip(*[replica.values[name] for replica in self.replicas])
            found[name] = [self._result(name, *each) for each in zip(placements, values)]
        return found

    def _result(self, name, placement, values):
        if not tf.is_tensor(values[0]):
            return values[0]
        if name in ("masks", "logits") and not isinstance(placement, Sharded):
            return None  # they would belong to its rows
        return self.value(list(values), placement)

    def value(self, values, placement, before=None):
        """One value for the whole batch.

        Arguments:
            placement: how it depends on the rows.
            before: the old value, where this is the new value of a variable.
        """
        if isinstance(placement, Sharded):
            return tf.concat(values, axis=0)
        dtype, how = values[0].dtype, getattr(placement, "how", "sum")
        if isinstance(placement, Replicated):
            is_merged = before is None and (dtype.is_floating or dtype.is_complex)
            return self._mean(values) if is_merged else values[0]
        if how == "mean":
            return self._mean(values)
        if how in _EXTREME:
            of_numbers, of_booleans = _EXTREME[how]
            reduce = of_booleans if dtype == tf.bool else of_numbers
            return reduce(tf.stack(values), axis=0)
        relative = isinstance(placement, Added)
        parts = [value - before for value in values] if relative else values
        parts = [self._own(*each) for each in zip(self.replicas, parts)]
        return tf.add_n([before] + parts if relative else parts)

    def _own(self, replica, value):
        """The value; zero where the replica has no rows of its own."""
        if isinstance(replica.size, int):
            return value if replica.size else tf.zeros_like(value)
        return value * tf.cast(tf.minimum(replica.size, 1), value.dtype)

    def _mean(self, values):
        # A number of Python's would be one of 32 bits in between.
        shares = [tf.convert_to_tensor(share, tf.float64) for share in self.shares]
        shares = [tf.cast(share, values[0].dtype) for share in shares]
        return tf.add_n([value * share for value, share in zip(values, shares)])
