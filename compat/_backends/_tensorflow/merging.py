"""TensorFlow's operations on tensors, with which values of replicas are merged."""

from ..._rows.merging import Operations


class TensorOperations(Operations):
    """Operations on dense tensors.

    Arguments:
        tf: TensorFlow. Its scalars, as sizes, last as long as this object.
    """

    def __init__(self, tf):
        self.tf = tf
        self._shares = {}  # weights of means, by sizes and type

    def concatenate(self, parts, axis):
        return self.tf.concat(parts, axis=axis)

    def add(self, parts):
        return self.tf.add_n(parts)

    def maximum(self, parts):
        is_boolean = parts[0].dtype == self.tf.bool
        reduce = self.tf.reduce_any if is_boolean else self.tf.reduce_max
        return reduce(self.tf.stack(parts), axis=0)

    def minimum(self, parts):
        is_boolean = parts[0].dtype == self.tf.bool
        reduce = self.tf.reduce_all if is_boolean else self.tf.reduce_min
        return reduce(self.tf.stack(parts), axis=0)

    def mean(self, parts, sizes):
        dtype = parts[0].dtype
        key = dtype, tuple(size if isinstance(size, int) else id(size) for size in sizes)
        if key not in self._shares:
            self._shares[key] = [self.tf.cast(share, dtype) for share in self._in_64_bits(sizes)]
        return self.add([part * share for part, share in zip(parts, self._shares[key])])

    def _in_64_bits(self, sizes):
        """Return each size as a share of their sum, which may be 0 if they are tensors."""
        tf = self.tf
        if all(isinstance(size, int) for size in sizes):
            return [tf.constant(size / float(sum(sizes)), tf.float64) for size in sizes]
        total = tf.maximum(sum(sizes), 1)
        return [tf.cast(size, tf.float64) / tf.cast(total, tf.float64) for size in sizes]
