"""Values of the whole batch that replicas need while they run, merged from those of all of them.

The replicas run in threads that take turns: see ``_rows.replica_threads``. Each of them has the
merged value as the result of an operation of its own, whose gradient is merged likewise. So each
replica's gradient is computed on its device, and ends at these operations.
"""

import functools
from typing import Any, Callable, List, Sequence, Set

import tensorflow as tf

from ..._rows import Partial
from ..._rows.merging import merge
from ..._rows.replica_threads import DifferentReductions, TurnTakingThreads, current_turn
from .._tensorflow.merging import TensorOperations
from .differentiation import differentiable
from .refusals import not_differentiable
from .thread_state import callers_state

_INTEGERS = {2: tf.uint16, 4: tf.int32, 8: tf.int64}  # by their bytes


class BatchReductions:
    """The reductions of one call of a model on several devices.

    Arguments:
        devices: those of the replicas.
        sizes: the number of rows of each: integers, or scalar tensors.

    Attributes:
        count: how many reductions the call has made.
    """

    def __init__(self, devices: "Sequence[str]", sizes: "Sequence[Any]") -> None:
        self.devices, self.count = list(devices), 0
        self._sizes = list(sizes)
        # 0 for a replica without rows, which computes one that is not its own.
        self._weights = [min(n, 1) if isinstance(n, int) else tf.minimum(n, 1) for n in sizes]
        self._graph = _graph()
        #: The numbers of replicas that are within the model's call.
        self.calling: "Set[int]" = set()

    def are_here(self) -> bool:
        """Return whether the call was made eagerly, or in the present graph, as this code runs."""
        return _graph() is self._graph

    def applies_to(self, layer: "Any") -> bool:
        """Return whether a layer that is called now is a replica's, in this thread."""
        return current_turn() is not None

    def updates_averages(self) -> bool:
        """Return whether this thread's replica sets the moving averages: the first one does."""
        return _index() == 0

    def weight(self, dtype: "tf.DType") -> "tf.Tensor":
        """Return the factor of this thread's replica in sums: 0 if it has no rows, else 1."""
        return tf.cast(self._weights[_index()], dtype)

    def run(self, functions: "Sequence[Callable[[], Any]]") -> "List[Any]":
        """Return the results of a function for each replica, which take turns."""
        return TurnTakingThreads(functions, callers_state()).run()

    def reduce(self, placement: Partial, value: "tf.Tensor") -> "tf.Tensor":
        """Return the whole batch's value of a sum, mean, maximum or minimum over the rows."""

        def reduced(replicas):
            parts = [part for (part,) in replicas]
            if placement.how == "sum":
                pairs = zip(parts, self._weights)
                parts = [part * tf.cast(weight, part.dtype) for part, weight in pairs]
            return [merge(placement, parts, self._sizes, TensorOperations(tf))]

        (result,) = self.merge(reduced, [value])
        result.set_shape(value.shape)
        return result

    def merge(
        self,
        function: "Callable[[List[List[tf.Tensor]]], List[tf.Tensor]]",
        values: "Sequence[tf.Tensor]",
    ) -> "List[tf.Tensor]":
        """Return values of the whole batch, on the device of this thread's replica.

        Arguments:
            function: a function of the values of each replica, which is called once, on the
                first device.
            values: those of this replica.
        """
        if not self.are_here():  # of a loop, a branch, or a function that it calls
            raise DifferentReductions
        index = _index()  # a gradient's function is kept, and would keep the turn
        device = self.devices[index]

        @tf.custom_gradient
        def merged(*values):
            key = function.__qualname__, tuple(value.shape.rank for value in values)
            meet, merge = current_turn().meet, functools.partial(self._merged, function)
            results, reduction = meet(key, values, merge)

            def gradient(*upstream, **_):
                in_pass = current_turn()
                if in_pass is not None and index in self.calling:
                    # Of tf.gradients() within the call: the others may take the same one.
                    raise DifferentReductions
                if in_pass is None and not (self.are_here() or tf.executing_eagerly()):
                    return _zeros_for_zeros(values, upstream)
                if in_pass is None or in_pass.index != index:
                    raise not_differentiable()
                gradients = in_pass.meet(id(reduction), upstream, reduction.backward)[index]
                with tf.device(device):
                    return [
                        None if g is None else _first_derivative(g, *upstream) for g in gradients
                    ]

            with tf.device(device):
                return [_cut(result) for result in results], gradient

        return list(merged(*values))

    def _merged(self, function, values):
        self.count += 1
        reduction = _Reduction(self.devices[0], function, values)
        return reduction.results, reduction


class _Reduction:
    """A function of values of all replicas, and its gradient."""

    def __init__(self, device, function, values):
        self.device, self.lengths = device, list(map(len, values))
        flat = [value for of_replica in values for value in of_replica]
        with tf.device(device):
            self.results, self.gradients_of = differentiable(
                lambda *tensors: function(self._by_replica(tensors)), flat, flat
            )
        self.values = flat

    def _by_replica(self, tensors):
        remaining = iter(tensors)
        return [[next(remaining) for _ in range(length)] for length in self.lengths]

    def backward(self, upstream):
        """Return the gradients of each replica's values, by the replicas' upstream gradients."""
        heads, sums = [], []
        with tf.device(self.device):
            for result, gradients in zip(self.results, zip(*upstream)):
                gradients = [gradient for gradient in gradients if gradient is not None]
                if gradients and result.dtype.is_floating:
                    heads.append(result)
                    sums.append(tf.add_n(list(map(tf.convert_to_tensor, gradients))))
            return self._by_replica(self.gradients_of(heads, self.values, sums))


def _zeros_for_zeros(values, upstream):
    """Return gradients of zero, which fail where the upstream gradients are not zero.

    For a persistent tape TensorFlow makes gradients of all that a function computes within, though
    none of these is taken: see ``_HigherOrderTapeGradientFunctions``.
    """
    present = [tf.abs(g) > 0 for g in upstream if g is not None and g.dtype.is_floating]
    message = str(not_differentiable())
    checks = [tf.debugging.assert_equal(each, False, message=message) for each in present]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return [tf.zeros_like(v) if v.dtype.is_floating else None for v in values]


@tf.custom_gradient
def _first_derivative(gradient, *upstream):
    """Return a gradient on this device, which has no gradient itself."""

    def refuse(*_):
        raise not_differentiable()

    return _cut(gradient), refuse


def _index():
    """Return the number of this thread's replica."""
    turn: "Any" = current_turn()
    return turn.index


def _graph():
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _cut(tensor):
    """Return a tensor on this device, from which TensorFlow finds no way back to its source.

    A replica's gradient would take it to the other replicas. Integers have none.
    """
    tensor = tf.identity(tensor)
    if tf.executing_eagerly() or tensor.dtype.size not in _INTEGERS:
        return tensor
    return tf.bitcast(tf.bitcast(tensor, _INTEGERS[tensor.dtype.size]), tensor.dtype)
