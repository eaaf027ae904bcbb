"""One device's share of a call, with a gradient of its own."""

import sys

from ... import _replicas
from . import sharding
from .sharding import has_rows


class Results:
    """What a call returns, flat, and what belongs to that.

    ``structure`` is what the model returned, ``outputs`` that, flat; ``logits`` and ``masks`` are
    Keras' attributes of the outputs, or None; ``losses`` were added within the call.
    """

    def __init__(self, tf, structure, losses):
        self.tf = tf
        self.structure = structure
        self.losses = losses
        self.outputs = tf.nest.flatten(structure)
        self.masks = [getattr(output, "_keras_mask", None) for output in self.outputs]
        self.logits = [_logits(tf, output) for output in self.outputs]

    def differentiable(self):
        """All that may get a gradient: the tensors that ``outputs``, ... consist of."""
        values = self.tf.nest.flatten(self._values(), expand_composites=True)
        return [value for value in values if self.tf.is_tensor(value)]

    def take(self, tensors):
        """Put the tensors back where ``differentiable`` found them."""
        tf, tensors = self.tf, iter(tensors)
        values = self._values()
        flat = tf.nest.flatten(values, expand_composites=True)
        flat = [next(tensors) if tf.is_tensor(value) else value for value in flat]
        self.outputs, self.logits, self.losses = tf.nest.pack_sequence_as(
            values, flat, expand_composites=True
        )

    def _values(self):
        return [self.outputs, self.logits, self.losses]


def as_function(tf, call, scope, structure):
    """A call as a function of the tensors that its arguments and their masks consist of.

    Arguments:
        scope: makes the context of the call, which yields the losses added in it.

    Returns:
        The tensors, all tensors and what else is among them, and the function, which returns
        ``Results``.
    """
    masks = [getattr(value, "_keras_mask", None) for value in tf.nest.flatten(structure)]
    flat = tf.nest.flatten((structure, masks), expand_composites=True)
    places = [place for place, value in enumerate(flat) if tf.is_tensor(value)]

    def compute(*values):
        given = list(flat)
        for place, value in zip(places, values):
            given[place] = value
        (args, kwargs), given_masks = tf.nest.pack_sequence_as(
            (structure, masks), given, expand_composites=True
        )
        for value, mask in zip(tf.nest.flatten((args, kwargs)), given_masks):
            if mask is not None:
                value._keras_mask = mask
        with _replicas.undivided(), scope() as losses:
            outputs = call(*args, **kwargs)
        return Results(tf, outputs, losses)

    return [flat[place] for place in places], places, compute


class Replica:
    """One device's share of a call, and its results."""

    def __init__(self, tf, call, state, size):
        self.tf = tf
        self.call = call
        self.state = state
        self.size = size  # rows kept; none of the one row computed where this is 0

    def run(self, device, arguments, check_rows):
        """Compute.

        Arguments:
            check_rows: make sure that the outputs follow the rows of the batch.
        """
        tf = self.tf
        self.device = device
        self.batch = next(v for v in tf.nest.flatten(arguments) if has_rows(tf, v))
        self.shard, _, compute = as_function(tf, self.call, self.state.replica, arguments)

        def results_of(*values):
            self.results = compute(*values)
            if check_rows:
                self._check_rows()
            self._keep()
            return self.results.differentiable()

        @tf.custom_gradient
        def replica(*values):
            with tf.device(device):
                results, gradients_of = _differentiable(tf, results_of, values)

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
                if not variables:
                    return gradients
                return gradients[: len(values)], gradients[len(values) :]

            return results, gradient

        if recording():
            tensors = replica(*self.shard)
        else:  # predict, evaluate: no gradient to keep intermediate results for
            with tf.device(device):
                tensors = results_of(*self.shard)
        self.results.take(tensors)

    def _keep(self):
        """Keep this replica's own rows here, where their number is not known before."""
        if isinstance(self.size, int):
            return
        results = self.results
        for values in (results.outputs, results.masks, results.logits):
            for place, value in enumerate(values):
                if self.tf.is_tensor(value) and self.has_same_rows(value):
                    values[place] = sharding.kept(self.tf, value, self.size)

    def kept(self, value):
        """A result's rows that are this replica's own."""
        if isinstance(self.size, int):
            return sharding.kept(self.tf, value, self.size)
        return value  # see _keep

    def _check_rows(self):
        for place, output in enumerate(self.results.outputs):
            if self.tf.is_tensor(output) and self.has_same_rows(output):
                self.results.outputs[place] = sharding.checked(self.tf, output, self.batch)

    def has_same_rows(self, value):
        return sharding.has_same_rows(value, self.batch)


def _differentiable(tf, compute, values):
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


def recording():
    """Whether a gradient tape is recording: TensorFlow's own test, private to it."""
    for name in ("tensorflow.python.eager.record", "tensorflow.python.eager.tape"):
        test = getattr(sys.modules.get(name), "could_possibly_record", None)
        if test is not None:
            return test()
    return True


def _logits(tf, output):
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
