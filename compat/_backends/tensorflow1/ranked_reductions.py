"""Values of the whole batch that a rank's graph needs on the way, reduced over all ranks.

The counterpart of ``reductions``, whose replicas are in one graph. The gradient of a reduction is a
reduction again.
"""

import itertools
from typing import Any, List


class RankedReductions:
    """The reductions in the graph of one model, which all ranks make in one order.

    Arguments:
        engine: that of the ranks.
        rows: the number of this rank's rows in the batch, a tensor.
        number: that of the model: reductions of models with the same number belong together.
    """

    def __init__(self, engine: "Any", rows: "Any", number: int) -> None:
        self.engine, self.tf, self.rows = engine, engine.tf, rows
        self._names = (f"moments_{number}_{count}" for count in itertools.count())

    def gather(self, values: "List[Any]") -> "List[List[Any]]":
        """Return the values of each rank: tensors of one type, whose shapes all ranks share."""
        tf, place = self.tf, self.engine.place
        rows = tf.cast(tf.reshape(self.rows, [1]), values[0].dtype)
        flat = tf.concat([tf.reshape(value, [-1]) for value in values] + [rows], 0)
        length = tf.size(flat)
        others = [[place.rank * length, (place.size - 1 - place.rank) * length]]
        gathered = self._exchanged(tf.pad(flat, others))
        shares = tf.split(gathered, place.size)
        return [self._like(values, share) for share in shares]

    def _like(self, values, flat):
        tf, parts, first = self.tf, [], 0
        for value in values:
            size = tf.size(value)
            part = tf.reshape(flat[first : first + size], tf.shape(value))
            part.set_shape(value.shape)
            parts.append(part)
            first += size
        return parts

    def _exchanged(self, mine):
        """Return the sum of all ranks' tensors.

        The ranks' gradients are averaged later on, weighted by their rows. So this rank's gradient
        has to contain those of the others, over its own weight.
        """
        tf, place = self.tf, self.engine.place

        @tf.custom_gradient
        def exchanged(mine):
            total = self._sum(mine)
            rows = tf.stop_gradient(tf.reshape(total, [place.size, -1])[:, -1])
            weight = rows[place.rank] / tf.reduce_sum(rows)
            return total, lambda upstream: self._reduced(upstream, weight)

        result = exchanged(mine)
        result.set_shape(mine.shape)
        return result

    def _reduced(self, upstream, weight):
        tf = self.tf

        @tf.custom_gradient
        def reduced(upstream):
            total = self._sum(upstream * weight)
            # Of first derivatives, in a loss, that are weighted by rows as well.
            return total / weight, self._sum

        return reduced(upstream)

    def _sum(self, tensor):
        return self.engine.sum_within_step(tensor, next(self._names), [])
