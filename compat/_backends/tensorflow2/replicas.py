"""One device's share of a call, with a gradient of its own."""

import contextlib
import functools

import tensorflow as tf

from ..._rows import Sharded, split_rows
from . import sharding
from .sharding import has_rows


class CallResults:
    """What a call returns, flat, and what belongs to that.

    ``structure`` is what the model returned. ``values`` has lists: "outputs" is that, flat;
    "logits" and "masks" are Keras' attributes of the outputs, or None; "losses" were added within
    the call.
    """

    def __init__(self, structure, losses):
        self.structure = structure
        outputs = tf.nest.flatten(structure)
        self.values = {
            "outputs": outputs,
            "masks": [getattr(output, "_keras_mask", None) for output in outputs],
            "logits": [_logits(output) for output in outputs],
            "losses": losses,
        }

    def tensors(self):
        """All tensors that the values consist of."""
        values = tf.nest.flatten(self.values, expand_composites=True)
        return [value for value in values if tf.is_tensor(value)]

    def take(self, tensors):
        """Put the tensors back where ``tensors`` found them."""
        tensors = iter(tensors)
        flat = tf.nest.flatten(self.values, expand_composites=True)
        flat = [next(tensors) if tf.is_tensor(value) else value for value in flat]
        self.values = tf.nest.pack_sequence_as(self.values, flat, expand_composites=True)


def as_function(call, scope, given):
    """A call as a function of the tensors that its arguments and their masks consist of.

    Arguments:
        scope: makes the context of the call, which yields the losses added in it.
        given: as ``ShardedArguments.given``.

    Returns:
        The tensors, and the function, which returns ``CallResults``.
    """
    flat = tf.nest.flatten(given, expand_composites=True)
    places = [place for place, value in enumerate(flat) if tf.is_tensor(value)]

    def compute(*values):
        parts = list(flat)
        for place, value in zip(places, values):
            parts[place] = value
        (args, kwargs), masks = tf.nest.pack_sequence_as(given, parts, expand_composites=True)
        for value, mask in zip(tf.nest.flatten((args, kwargs)), masks):
            if mask is not None:
                value._keras_mask = mask
        with split_rows.undivided(), scope() as losses:
            outputs = call(*args, **kwargs)
        return CallResults(outputs, losses)

    return [flat[place] for place in places], compute


class Replica:
    """One device's share of a call, and its results."""

    def __init__(self, device, size, trace):
        self.device = device
        self.size = size  # rows kept; none of the one row computed where this is 0
        self.trace = trace  # None for a single replica

    def run(self, call, scope, given, check_rows, join):
        """Compute.

        Arguments:
            call, scope, given: as of ``as_function``.
            check_rows: make sure that the outputs follow the rows of the batch.
            join: what ``TableGradients`` make of a variable's gradient.
        """
        device = self.device
        self.batch = next(v for v in tf.nest.flatten(given) if has_rows(v))
        self.shard, compute = as_function(call, scope, given)

        def results_of(*values):
            self.results = compute(*values)
            if self.trace is not None:
                self._keep(check_rows)
            return self.results.tensors()

        @tf.custom_gradient
        def replica(*values):
            with tf.device(device):
                results, gradients_of = _differentiable(results_of, values)

            def gradient(*upstream, **kwargs):  # up to TensorFlow 2.3 no keyword-only argument
                variables = list(kwargs.get("variables") or ())
                # Integers and booleans have no gradient.
                pairs = [(r, g) for r, g in zip(results, upstream) if r.dtype.is_floating]
                with tf.device(device):
                    gradients = gradients_of(
                        [result for result, _ in pairs],
                        list(values) + variables,
                        [gradient for _, gradient in pairs],
                    )
                    gradients = [_dense(each) for each in gradients]
                    of_variables = list(map(join, variables, gradients[len(values) :]))
                if not variables:
                    return gradients
                return gradients[: len(values)], of_variables

            return results, gradient

        if recording():
            with _listing_no_variables():
                tensors = replica(*self.shard)
        else:  # predict, evaluate: no gradient to keep intermediate results for
            with tf.device(device):
                tensors = results_of(*self.shard)
        self.results.take(tensors)

    def _keep(self, check_rows):
        """Keep this replica's own rows of the results."""
        for name, values in self.results.values.items():
            for place, (value, kind) in enumerate(zip(values, self.trace.placements[name])):
                if tf.is_tensor(value) and isinstance(kind, Sharded):
                    if check_rows and name == "outputs":
                        value = sharding.checked(value, self.batch)
                    values[place] = sharding.kept(value, self.size)


@contextlib.contextmanager
def _listing_no_variables():
    """Within, the graph lists no variables.

    TensorFlow 2.0 makes sets of those that layers have made within any tf.function, for a gradient
    of one's own, and fails: they have no hash.
    """
    variables = []  # type: list
    if not tf.executing_eagerly():
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


@functools.lru_cache(None)  # to look for what is not there takes long, and each call asks
def tapes():
    """TensorFlow's module for the gradient tapes of a thread, private to it."""
    try:
        from tensorflow.python.eager import record
    except ImportError:  # up to TensorFlow 2.12
        from tensorflow.python.eager import tape as record
    return record


def recording():
    """Whether a gradient tape is recording."""
    return tapes().could_possibly_record()


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
