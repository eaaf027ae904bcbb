"""The devices' shares of a call: some rows of its arguments, computed there, with a gradient."""

import contextlib
import weakref

import numpy as np
import tensorflow as tf

from ..._rows import REPLICATED, Count, Sharded, Unknown, split_rows
from . import side_effects
from .between_outputs import InnerGradients

# TensorFlow's module for the gradient tapes of a thread, private to it.
try:
    from tensorflow.python.eager import record as tapes
except ImportError:  # up to TensorFlow 2.12
    from tensorflow.python.eager import tape as tapes

#: Whether a gradient tape is recording.
recording = tapes.could_possibly_record


def tensors_of(structure):
    """All tensors that a structure consists of."""
    values = tf.nest.flatten(structure, expand_composites=True)
    return [value for value in values if tf.is_tensor(value)]


def with_tensors(structure, tensors):
    """The structure with these tensors in place of its ``tensors_of``."""
    others = iter(tensors)

    def other(value):
        return next(others) if tf.is_tensor(value) else value

    return tf.nest.map_structure(other, structure, expand_composites=True)


def has_rows(value):
    return tf.is_tensor(value) and value.shape.rank != 0


def _is_array(value):
    return type(value).__module__ == "numpy" and value.shape != () and value.dtype != object


def are_arrays(given):
    """Whether arrays of numpy's are the only values with rows that a call was given."""
    leaves = tf.nest.flatten(given)
    return any(map(_is_array, leaves)) and not any(has_rows(leaf) for leaf in leaves)


def as_tensors(given):
    return tf.nest.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if _is_array(leaf) else leaf, given
    )


def rows_of(batch):
    """The number of rows: an integer where it is known, else a scalar tensor (int32)."""
    if batch.shape.rank is not None and batch.shape[0] is not None:
        return batch.shape[0]
    if isinstance(batch, tf.RaggedTensor):
        return tf.cast(batch.nrows(), tf.int32)
    if isinstance(batch, tf.SparseTensor):
        return tf.cast(batch.dense_shape[0], tf.int32)
    return tf.shape(batch)[0]


class ShardedArguments:
    """The arguments of a call: which of them are data, of which each replica gets some rows.

    ``given`` is the structure of the arguments, and the masks of all that they consist of.
    The first tensor is the batch. The argument that it stands in, alone or in a list or a
    dictionary, is the model's input, and has to have as many rows everywhere. Other arguments
    are data if they have as many rows as the batch; what TensorFlow knows the rows of only when
    it runs has to have as many. Variables are no data, nor are constants and tensors of a known
    length beside a batch that has none.
    """

    def __init__(self, args, kwargs, replicas):
        self.structure = (args, kwargs)
        leaves = tf.nest.flatten(self.structure)
        masks = [getattr(value, "_keras_mask", None) for value in leaves]
        self.given = self.structure, masks
        self.leaves = leaves + masks
        self.batch = next(filter(has_rows, leaves), None)
        if self.batch is None:
            return
        self.rows = rows_of(self.batch)
        self.has_values = tf.executing_eagerly()  # which an initialization scope always is
        self.why = None  # it cannot be split, as in ``Across``
        if replicas == 1:
            self.is_data = [False] * len(self.leaves)
            return
        if any(isinstance(value, tf.RaggedTensor) for value in leaves):
            self.why = "unknown"
            return
        self.constant_batch = _is_constant(self.batch)
        self.is_data = []
        for argument in list(args) + [kwargs[name] for name in sorted(kwargs)]:
            is_input = not any(self.is_data)  # the first one with rows
            self.is_data += [self._is_data(each, is_input) for each in tf.nest.flatten(argument)]
        self.is_data *= 2  # and their masks'

    def _is_data(self, value, is_input):
        if value is self.batch:
            return True
        is_constant = _is_constant(value) and not self.constant_batch
        if is_constant or not has_rows(value) or isinstance(value, tf.Variable):
            return False
        rows, of_batch = rows_of(value), rows_of(self.batch)
        if isinstance(rows, int) and isinstance(of_batch, int):
            self.why = "mixed" if is_input and rows != of_batch else self.why
            return rows == of_batch
        if isinstance(rows, int) and not is_input:
            return False
        message = _DIFFERENT_INPUTS if is_input else _DIFFERENT_ARGUMENTS
        check = tf.debugging.assert_equal(rows, self.rows, message=message)
        # None where TensorFlow knew it to hold.
        with tf.control_dependencies([] if check is None else [check]):
            self.rows = tf.identity(self.rows)
        return True

    def shard(self, bounds):
        """What a replica is ``given`` that has the rows from ``bounds[0]`` to ``bounds[1]``."""
        leaves = [
            _rows(value, *bounds) if is_data and value is not None else value
            for value, is_data in zip(self.leaves, self.is_data)
        ]
        return tf.nest.pack_sequence_as(self.given, leaves)

    def _tensors(self):
        """Pairs of a tensor and whether it is data: of the arguments, then of their masks."""
        return [pair for pair in zip(self.leaves, self.is_data) if tf.is_tensor(pair[0])]

    def placements(self):
        """For each tensor that the arguments, and their masks, consist of how it has rows."""
        found, uneven = [], Sharded(0, inner=None, even=False)
        for value, is_data in self._tensors():
            if not is_data:
                found += [REPLICATED] * len(tensors_of(value))
            elif isinstance(value, tf.SparseTensor):
                found += [Unknown(), uneven, Count([0])]
            else:
                found.append(Sharded(0))
        return found

    def kind(self):
        """What calls with arguments of the same kinds have in common."""
        plain = [value for value in self.leaves if not tf.is_tensor(value)]
        kinds = [(str(each.dtype), str(each.shape[1:])) for each in tensors_of(self.leaves)]
        return repr((kinds, self.placements(), plain))

    def three_rows(self):
        """For each of these tensors its values: of three rows, of two of them and of the third.

        None for those that have no value yet and no rows.
        """
        real, found = self.has_values and int(self.rows) >= 3, []
        for value, is_data in self._tensors():
            if not is_data:
                parts = tensors_of(value)
                found += [[part] * 3 if hasattr(part, "numpy") else None for part in parts]
            else:
                whole = _rows(value, 0, 3) if real else _made_up(value)
                parts = [whole, _rows(whole, 0, 2), _rows(whole, 2, 3)]
                found += map(list, zip(*map(tensors_of, parts)))
        return found


_DIFFERENT_INPUTS = (
    "parallelize() cuts each batch by rows, and this model's inputs have different numbers of "
    "rows. Give inputs with one row for each sample, pass what all samples share as another "
    "argument of the call or as the model's own attribute, or run this model on one device, with "
    "parallelize(model, gpus=1)."
)
_DIFFERENT_ARGUMENTS = (
    "parallelize() cuts each batch by rows, and another argument of this model's call has other "
    "rows than the first, which TensorFlow did not know when it traced the call. Make it the "
    "model's own attribute, have tf.function's input_signature say how many rows it has, or run "
    "this model on one device, with parallelize(model, gpus=1)."
)


def _is_constant(value):
    from tensorflow.python.framework import tensor_util

    if tf.executing_eagerly() or isinstance(value, tf.SparseTensor) or not tf.is_tensor(value):
        return False
    return hasattr(value, "numpy") or tensor_util.constant_value(value) is not None


def _made_up(tensor):
    """Three rows of a tensor's shape and type, where the batch has no values yet."""
    sizes, dtype = [16 if size is None else size for size in tensor.shape.as_list()], tensor.dtype
    values = np.random.RandomState(0).normal(size=[3] + sizes[1:])
    if dtype == tf.string and not isinstance(tensor, tf.SparseTensor):  # those raise below
        return tf.strings.as_string(values)
    values = tf.cast(values if dtype.is_floating or dtype.is_complex else values > 0, dtype)
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.from_dense(tf.where(values > 0, values, tf.zeros_like(values)))
    return values


def _rows(value, start, stop):
    """Some rows of a tensor of any kind."""
    if not isinstance(value, tf.SparseTensor):
        return value[start:stop]
    shape = tf.unstack(value.dense_shape, num=value.shape.rank)
    sizes = [tf.cast(stop - start, tf.int64)] + shape[1:]
    starts = [tf.cast(start, tf.int64)] + [0] * (len(shape) - 1)
    return tf.sparse.slice(value, tf.stack(starts), tf.stack(sizes))


def as_function(call, scope, given, effects):
    """A call as a function of the tensors that its arguments and their masks consist of.

    It returns what the call returns, and lists: "outputs" has that, flat; "logits" and "masks" are
    Keras' attributes of the outputs, or None; "losses" were added within the call; "noted" are the
    tensors that it has left in Python objects, of which ``changes`` tells.

    Arguments:
        scope: makes the context of the call, which yields the losses added in it.
        given: as ``ShardedArguments.given``.
        effects: the ``PythonEffects`` of the model; None: its calls leave nothing.
    """

    def compute(*values):
        (args, kwargs), masks = with_tensors(given, values)
        for value, mask in zip(tf.nest.flatten((args, kwargs)), masks):
            if mask is not None:
                value._keras_mask = mask
        with split_rows.undivided(), contextlib.ExitStack() as around:
            compute.changes = around.enter_context(effects.taken()) if effects else []
            losses = around.enter_context(scope())
            structure = call(*args, **kwargs)
        outputs = tf.nest.flatten(structure)
        masks = [getattr(output, "_keras_mask", None) for output in outputs]
        logits = [_logits(output) for output in outputs]
        results = dict(outputs=outputs, masks=masks, logits=logits, losses=losses)
        return structure, dict(results, noted=side_effects.tensors(compute.changes))

    return compute


class Replica:
    """One device's share of a call, computed there.

    Arguments:
        size: how many rows are kept; none of the one row computed where this is 0.
        trace: the ``Trace`` of the call; None for a single replica.
        call, scope, given, effects: as of ``as_function``.
        join: what ``joining_tables`` makes of a variable's gradient.

    Attributes:
        structure, values: as the function of ``as_function`` returns them, with the replica's own
            rows of the values.
        changes: those that its call made in Python objects, which are taken back.
    """

    def __init__(self, device, size, trace, call, scope, given, effects, join):
        self.size = size
        compute, shard = as_function(call, scope, given, effects), tensors_of(given)

        def own(value, placement):
            """Of a result with rows the replica's own: all of them, or none where it has none."""
            if not (tf.is_tensor(value) and isinstance(placement, Sharded)):
                return value
            if isinstance(size, int):
                return value if size else _rows(value, 0, 0)
            return _rows(value, 0, rows_of(value) * tf.minimum(size, 1))

        self.inner = None  # its ``InnerGradients``, where a tape records

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
            inner = InnerGradients(device, results, gradients_of)
            self.inner = weakref.ref(inner)  # as long as the tape needs it

            def gradient(*upstream, **kwargs):  # up to TensorFlow 2.3 no keyword-only argument
                variables = list(kwargs.get("variables") or ())
                # Integers and booleans have no gradient.
                pairs = [(r, g) for r, g in zip(inner.results, upstream) if r.dtype.is_floating]
                heads, upstream = [r for r, _ in pairs], [g for _, g in pairs]
                with tf.device(device):
                    found = gradients_of(heads, list(values) + variables, upstream)
                    found = list(map(_dense, found))
                    of_variables = list(map(join, variables, found[len(values) :]))
                inputs = found[: len(values)]
                return (inputs, of_variables) if variables else inputs

            return results, gradient

        if recording():
            with _listing_no_variables():
                tensors = replica(*shard)
        else:  # predict, evaluate: no gradient to keep intermediate results for
            with tf.device(device):
                if tf.executing_eagerly():  # the shard moves there, also where nothing is computed
                    shard = list(map(tf.identity, shard))
                tensors = results_of(*shard)
        self.values = with_tensors(self.values, tensors)
        self.changes = compute.changes


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
    logits, operation = getattr(output, "_keras_logits", None), getattr(output, "op", None)
    if logits is None and getattr(operation, "type", None) in ("Softmax", "Sigmoid"):
        return operation.inputs[0]  # never eagerly: there tensors have no operation
    return logits
