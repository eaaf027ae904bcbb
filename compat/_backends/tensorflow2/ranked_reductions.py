"""Values of the whole batch that a rank's step needs while it runs, reduced over all ranks.

The counterpart of ``reductions``, whose replicas are in one process. The gradient of a reduction is
a reduction again, so that it has gradients of any order.
"""

import contextlib
from _thread import get_ident
from typing import Any, Callable, Iterator, List, Optional, Sequence

import tensorflow as tf


class RankedReductions:
    """The reductions of one step, in the order in which all ranks make them.

    Arguments:
        engine: that of the ranks.
        share: this rank's fraction of the rows of all ranks, a float64 tensor.
        graph: the graph of the step; None: the one in which the first layer is called.

    Attributes:
        applied, missed: the layers that were called where reductions apply to them, and elsewhere.
    """

    def __init__(self, engine: "Any", share: "tf.Tensor", graph: "Any") -> None:
        self.engine, self.graph = engine, graph
        self.thread, self.count = get_ident(), 0
        self.applied: "List[Any]" = []
        self.missed: "List[Any]" = []
        self._share = self._weight = share
        self._last: "List[tf.Tensor]" = []

    def applies_to(self, layer: "Any") -> bool:
        """Return whether a layer that is called now uses the statistics of all ranks' samples.

        It does not in other threads, which may evaluate the model, nor in a loop, a branch or a
        function of the script's own, which TensorFlow may run again without the other ranks.
        """
        if get_ident() != self.thread:
            return False
        if self.graph is None:
            self.graph = present_graph()
        is_applied = present_graph() is self.graph
        (self.applied if is_applied else self.missed).append(layer)
        return is_applied

    def have_missed(self, layer: "Any", averages: "Callable[[], bool]") -> bool:
        """Return whether a layer has normalized a batch, or may have, where they do not apply.

        Arguments:
            layer: the layer.
            averages: a function that returns whether the step has set moving averages of it.
        """
        if any(layer is missed for missed in self.missed):
            return True
        # A function that was traced before calls no layer.
        return not any(layer is applied for applied in self.applied) and averages()

    def updates_averages(self) -> bool:
        """Return whether this rank sets moving averages: each sets its own, to the same values."""
        return True

    def weight(self, dtype: "tf.DType") -> "tf.Tensor":
        """Return the factor of this rank in sums."""
        return tf.ones([], dtype)

    def merge(
        self,
        function: "Callable[[List[List[tf.Tensor]]], List[tf.Tensor]]",
        values: "Sequence[tf.Tensor]",
    ) -> "List[tf.Tensor]":
        """Return values of the whole batch.

        Arguments:
            function: a function of the values of each rank.
            values: those of this rank, of one type.
        """
        place = self.engine.place
        flat = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
        # A rank without rows has no mean.
        flat = tf.math.multiply_no_nan(flat, tf.cast(self._share > 0, flat.dtype))
        length = tf.size(flat)
        others = [[place.rank * length, (place.size - 1 - place.rank) * length]]
        gathered = self._reduced(tf.pad(flat, others), None)
        return function([self._like(values, part) for part in tf.split(gathered, place.size)])

    def _like(self, values, flat):
        parts = tf.split(flat, [tf.size(value) for value in values])
        shaped = [tf.reshape(part, tf.shape(value)) for part, value in zip(parts, values)]
        for tensor, value in zip(shaped, values):
            tensor.set_shape(value.shape)
        return shaped

    @contextlib.contextmanager
    def weighted(self, weight: "tf.Tensor") -> "Iterator[None]":
        """Compute gradients within that count with a weight in those of all ranks."""
        before, self._weight = self._weight, weight
        try:
            yield
        finally:
            self._weight = before

    def before_gradients(self) -> "List[tf.Tensor]":
        """Return tensors for which the exchange of gradients waits: engines may need an order."""
        is_due = self._last and self.engine.is_ordered and self._is_here()
        return self._last if is_due else []

    def finish(self) -> None:
        """Let the next step in the same graph, whose reductions have the same names, wait."""
        if self._last and self._is_here() and not tf.executing_eagerly():
            with tf.control_dependencies(self._last):
                for variable in self.engine.order_of_steps():
                    variable.assign_add(0)

    def _is_here(self):
        return self.graph is None or present_graph() is self.graph

    def _reduced(self, tensor, weight: "Optional[tf.Tensor]"):
        """Return the sum over all ranks of tensors times their weights, over this one's weight.

        The ranks' gradients are summed with weights later on, too, so that this rank's gradient has
        to contain those of the others over this one's weight.
        """

        @tf.custom_gradient
        def reduced(tensor):
            factor = None if weight is None else tf.cast(weight, tensor.dtype)
            total = self._sum(tensor if factor is None else tensor * factor)
            result = total if factor is None else tf.math.divide_no_nan(total, factor)

            def gradient(upstream):
                outer = self._weight
                if weight is not None:
                    outer = tf.math.divide_no_nan(outer, weight)
                return self._reduced(upstream, outer)

            return result, gradient

        return reduced(tensor)

    def _sum(self, tensor):
        name = "moments_{}".format(self.count)
        self.count += 1
        before = self._last if self._last and self._is_here() else [self._share]
        total = self.engine.sum_within_step(tensor, name, before)
        total.set_shape(tensor.shape)
        if self._is_here():
            self._last = [total]
        return total


def present_graph() -> "Any":
    """Return the present graph; False in eager execution."""
    return not tf.executing_eagerly() and tf.compat.v1.get_default_graph()
