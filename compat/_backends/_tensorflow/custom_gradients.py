"""User-defined gradients of a graph's operations.

They come by ``tf.custom_gradient`` and ``Graph.gradient_override_map``, and may compute across
rows whatever their operation does. What such a function makes of what comes back to the operation
is a part of the graph as any other, and is followed as that.
"""

from ..._rows import Mixed, Partial, Replicated, Sharded
from .graph import attribute, v1_names


def has_custom_gradient(op):
    """Return whether an operation's gradient is not TensorFlow's."""
    from tensorflow.python.framework import ops

    if not op.inputs or not attribute(op, "_gradient_op_type"):
        return False
    try:
        function = ops.get_gradient_function(op)
    except LookupError:  # none is known by this name
        return False
    # What tf.custom_gradient registers calls the function that it was given. Those of TensorFlow
    # and Keras themselves are gradients of what they belong to, as in tf.recompute_grad.
    for name in ("tape_grad_fn", "grad_fn"):
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if name in names:
            function = function.__closure__[names.index(name)].cell_contents
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return package not in ("tensorflow", "tensorflow_core", "keras", "tf_keras")


class CustomGradient:
    """What an operation's gradient computes, in the operation's graph.

    Arguments:
        results: the placements of its outputs.

    Attributes:
        upstream: for each of its outputs a placeholder for what comes back to it, and how that
            depends on the rows.
        operations: those that compute the gradients of its inputs, in order.
        downstream: these gradients, None where there is none.
    """

    def __init__(self, op, results):
        from tensorflow.python.framework import ops

        tf = v1_names()
        with op.graph.as_default(), ops.control_dependencies(None):
            upstream = [tf.placeholder(each.dtype, each.shape) for each in op.outputs]
            before = len(op.graph.get_operations())
            found = ops.get_gradient_function(op)(op, *upstream)
            found = found if isinstance(found, (list, tuple)) else [found]
            self.downstream = [g if g is None else tf.convert_to_tensor(g) for g in found]
            self.operations = op.graph.get_operations()[before:]
        kinds = [Partial("sum") if isinstance(each, Replicated) else each for each in results]
        self.upstream = list(zip(upstream, kinds))

    def mixes(self, given, placement):
        """Return whether the devices' gradients are not those of the whole batch.

        Arguments:
            given: the placements of the operation's inputs.
            placement: a function that tells that of a tensor.
        """
        return not all(
            gradient is None or not gradient.dtype.is_floating or _fits(before, placement(gradient))
            for before, gradient in zip(given, self.downstream)
        )


def _fits(before, after):
    if isinstance(before, Sharded):
        return isinstance(after, Sharded) and after.replace(inner=before.inner) == before
    if isinstance(before, Replicated):
        return after == Partial("sum")
    return not isinstance(after, Mixed)
