"""How the replicas' values are merged into those of the whole batch."""

from ... import errors
from .row_kinds import COUNT, FIXED, MIXED_MEAN, OLD, SUM, Rows, Sizes, Whole

ONCE, ADD, AVERAGE = "once", "add", "average"


def rule_of(kind, state=False):
    """How the replicas' values become the one for all rows.

    Arguments:
        state: whether the value is a variable's.

    Returns:
        One of ``ONCE``, ``ADD`` and ``AVERAGE``, the weight of the average (None: the rows), and
        None; or None, None and the reason why there is no such way, as a phrase.
    """
    if isinstance(kind, Whole):
        return None, None, kind.why
    if isinstance(kind, Rows):
        return None, None, "as rows that are not the first dimension"
    if isinstance(kind, Sizes):
        return None, None, "from the shape of the batch"
    parts = kind.parts - {OLD, FIXED}
    if not parts:
        return ONCE, None, None
    if parts <= {SUM, COUNT}:
        if FIXED in kind.parts or OLD in kind.parts and not state:
            return None, None, "by adding to a sum over the rows what counts once"
        return ADD, None, None
    if parts == {MIXED_MEAN} and state:
        return AVERAGE, None, None
    if MIXED_MEAN in parts:
        return None, None, "from rows that have a statistic of the whole batch in them"
    weights = {part.weight for part in parts}
    if all(part.name == "mean" for part in parts) and len(weights) == 1:
        if OLD in kind.parts and FIXED not in kind.parts and not state:
            return None, None, "by adding a mean to a variable"
        return AVERAGE, weights.pop(), None
    return None, None, "by adding sums and means over the rows, or means with different weights"


class Merging:
    """The replicas' values become those of the whole batch.

    Arguments:
        name: the model's.
        rows: how many the batch has; ``sizes``: how many each replica has.
        trace: returns the ``Trace`` of the plain call.
    """

    def __init__(self, tf, name, replicas, rows, trace):
        self.tf = tf
        self.name = name
        self.replicas = replicas
        self.rows = rows
        self.trace = trace
        self._weights = {}  # Denominator -> the replicas' parts, and all

    def concatenated(self, values):
        """The replicas' rows, one after the other."""
        tf = self.tf
        values = [replica.kept(value) for replica, value in zip(self.replicas, values)]
        if isinstance(values[0], tf.SparseTensor):
            return tf.sparse.concat(0, values, expand_nonconcat_dims=True)
        return tf.concat(values, axis=0)

    def mean(self, values):
        """The mean weighted by the replicas' rows."""
        tf = self.tf
        shares = [tf.cast(replica.size, values[0].dtype) for replica in self.replicas]
        rows = tf.cast(self.rows, values[0].dtype)
        return tf.add_n([value * (share / rows) for value, share in zip(values, shares)])

    def value(self, values, kind_in, what, before=None):
        """One value for the whole batch.

        Arguments:
            kind_in: how it depends on the rows, as a function of the ``Trace``.
            what: its name in an error.
            before: the old value, where this is the new value of a variable.

        Raises:
            UnsupportedError: there is no way to get it from those of the replicas.
        """
        tf = self.tf
        if len(values) == 1:
            return values[0]
        kind = kind_in(self.trace())
        rule, weight, why = rule_of(kind, before is not None)
        floating = values[0].dtype.is_floating or values[0].dtype.is_complex
        if rule == AVERAGE and not floating:
            rule, why = None, "as a mean of whole numbers"
        if rule is None:
            raise errors.UnsupportedError(
                "parallelize() cannot put {} of model {!r} together from the devices' parts: it "
                "is computed from the whole batch, {}. Compute it from each row by itself, as one "
                "sum or one mean over the rows, or in the loss, which sees the whole batch; or "
                "run this model on one device, with parallelize(model, gpus=1).".format(
                    what, self.name, why
                )
            )
        if rule == ONCE:
            return values[0] if before is not None or not floating else self.mean(values)
        if rule == AVERAGE:
            return self._mean_by(values, weight) if weight else self.mean(values)
        if not values[0].dtype.is_floating and not values[0].dtype.is_integer:
            raise errors.UnsupportedError("{} cannot be added up".format(what))
        parts = values if before is None else [value - before for value in values]
        parts = [self._own(replica, part) for replica, part in zip(self.replicas, parts)]
        return tf.add_n(parts if before is None else [before] + parts)

    def _own(self, replica, value):
        """The value; zero where the replica has no rows of its own."""
        if isinstance(replica.size, int):
            return value if replica.size else self.tf.zeros_like(value)
        return value * self.tf.cast(self.tf.minimum(replica.size, 1), value.dtype)

    def _mean_by(self, values, weight):
        """The mean whose denominator is not the number of rows (a mask's sum, for example)."""
        tf = self.tf
        if weight not in self._weights:
            trace, parts, sums = self.trace(), [], []
            for replica in self.replicas:
                with tf.device(replica.device):
                    part, total = trace.weights(weight, replica.shard)
                parts.append(self._own(replica, part))
                sums.append(self._own(replica, total))
            self._weights[weight] = parts, trace.total(weight, sums)
        parts, total = self._weights[weight]
        dtype = values[0].dtype
        weighted = [value * tf.cast(part, dtype) for value, part in zip(values, parts)]
        return tf.math.divide_no_nan(tf.add_n(weighted), tf.cast(total, dtype))
