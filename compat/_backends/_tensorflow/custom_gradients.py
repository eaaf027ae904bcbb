"""User-defined gradients of a graph's operations.

They are defined by ``tf.custom_gradient`` and ``Graph.gradient_override_map``, and may mix rows
even if their operation does not. The operations that such a function makes of the upstream
gradients are a part of the graph, through which placements are propagated as through any other.
"""

from typing import Any, Callable, Sequence

from ..._rows import Mixed, Partial, Placement, Replicated, Sharded
from .graph import attribute, v1_names


def has_custom_gradient(op: "Any") -> bool:
    """Return whether an operation's gradient is not TensorFlow's."""
    function = _gradient_function(op)
    if function is None:
        return False
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return package not in ("tensorflow", "tensorflow_core", "keras", "tf_keras")


def recomputes(op: "Any") -> bool:
    """Return whether an operation is the end of a function of ``tf.recompute_grad``.

    In the backward pass it is called again, where nothing is reduced.
    """
    return "recompute_grad" in getattr(_gradient_function(op), "__qualname__", "")


def _gradient_function(op):
    """Return the gradient of an operation, if the graph gives it another one, or None."""
    from tensorflow.python.framework import ops

    if not op.inputs or not attribute(op, "_gradient_op_type"):
        return None
    try:
        function = ops.get_gradient_function(op)
    except LookupError:  # none is registered by this name
        return None
    # tf.custom_gradient registers a function that calls its argument. Those of TensorFlow and Keras
    # compute the true gradient, as that of tf.recompute_grad.
    for name in ("tape_grad_fn", "grad_fn"):
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if name in names:
            function = function.__closure__[names.index(name)].cell_contents
    return function


class CustomGradient:
    """The backward pass of an operation with a user-defined gradient, in the operation's graph.

    Arguments:
        op: the operation.
        results: the placements of its outputs.

    Attributes:
        upstream: for each of its outputs a placeholder for the upstream gradient, and the placement
            of that.
        operations: those that compute the gradients of its inputs, in order.
        downstream: these gradients, or None.
    """

    def __init__(self, op: "Any", results: "Sequence[Placement]") -> None:
        from tensorflow.python.framework import ops

        tf = v1_names()
        with op.graph.as_default(), ops.control_dependencies(None):
            upstream = [tf.placeholder(output.dtype, output.shape) for output in op.outputs]
            before = len(op.graph.get_operations())
            gradients = ops.get_gradient_function(op)(op, *upstream)
            gradients = gradients if isinstance(gradients, (list, tuple)) else [gradients]
            self.downstream = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
            self.operations = op.graph.get_operations()[before:]
        placements = [Partial("sum") if isinstance(p, Replicated) else p for p in results]
        self.upstream = list(zip(upstream, placements))

    def mixes(
        self, inputs: "Sequence[Placement]", placement_of: "Callable[[Any], Placement]"
    ) -> bool:
        """Return whether the devices' gradients cannot be merged into those of the whole batch.

        Arguments:
            inputs: the placements of the operation's inputs.
            placement_of: a function that returns the placement of a tensor.
        """
        return not all(
            gradient is None
            or not gradient.dtype.is_floating
            or _fits(placement, placement_of(gradient))
            for placement, gradient in zip(inputs, self.downstream)
        )


def _fits(placement, of_gradient):
    if isinstance(placement, Sharded):
        is_sharded = isinstance(of_gradient, Sharded)
        return is_sharded and of_gradient.replace(inner=placement.inner) == placement
    if isinstance(placement, Replicated):
        return of_gradient == Partial("sum")
    return not isinstance(of_gradient, Mixed)
