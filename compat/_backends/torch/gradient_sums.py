"""Sums over all ranks, in buckets of memory that is kept from pass to pass."""

import itertools

import torch

from ..._ranks.engines import buckets

#: The value and the weight of a tensor without a gradient.
ABSENT = None, 0


class Sums:
    """The sums of a header and of tensors, which the sum of the weights divides.

    Arguments:
        engine: the engine of the ranks.
        tensors: in the order in which their values are expected.
        count: how many of them are parameters.

    Attributes, of the last sums:
        total: of the weights; ``unknown``, ``rows``, ``divided`` and ``sparse`` likewise of the
            rest of the header.
        ended: the ranks that have no more batches.
        used: for each parameter, how many ranks have a gradient.
        reached: likewise, how many have come to it in this pass.
    """

    def __init__(self, engine, tensors, count):
        self.engine, self.tensors, self.count = engine, tensors, count
        *groups, last = buckets.filled(map(_item, tensors)) or [((torch.float32, "cpu"), [])]
        self.buckets = [_Bucket(*group) for group in groups]
        header = 5 + engine.place.size + count + len(groups) + 1
        self.buckets.append(_Bucket(*last, front=header))
        # By the ids of the tensors.
        self.bucket_of = {key: bucket for bucket in self.buckets for key in bucket.views}

    def put(self, tensor, value, weight):
        """Write a value into its bucket while it is in the cache; send buckets that are full.

        Not the last bucket, which has the header: a script may change gradients by ``data`` until
        the end of the pass, which does not show.
        """
        bucket, others = self.bucket_of.get(id(tensor)), self.buckets[:-1]
        if bucket not in others or bucket.work is not None:
            return
        bucket.write(id(tensor), value, weight)
        for other in others:  # in their order
            if other.work is None and len(other.written) < len(other.views):
                break
            self._send(other)

    def complete(self, header, ended, used, reached, values):
        """Sum up the header and all values; afterwards ``write_mean`` has the means.

        Arguments:
            header: the weight, whether it is unknown, rows, whether they are not the weight, and
                whether a gradient is sparse.
            ended: whether this rank has no more batches.
            used: of each parameter, whether it has a gradient.
            reached: of each parameter, whether this pass has come to it.
            values: by the ids of the tensors, pairs of a value and its weight. A value that is
                missing, or None, counts as zeros.

        Returns:
            Whether a value was sent too early on this rank.
        """
        early = []
        for bucket in self.buckets:
            keys = [k for k in bucket.views if not bucket.has(k, *values.get(k, ABSENT))]
            early.append(bucket.work is not None and bool(keys))
            if bucket.work is None:
                bucket.write_all(keys, values)
        front = self.buckets[-1].front
        base = self.engine.place.size + 1  # of a number that has both counts
        counts = [has + base * came for has, came in zip(used, reached)]
        numbers = header + self.engine.flags(ended) + counts + early
        front.copy_(torch.tensor(numbers, dtype=front.dtype))
        for bucket in self.buckets:
            self._send(bucket)
        *_, numbers = [self.engine.end_sum(each.work, each.front) for each in self.buckets]
        sums = iter(numbers)
        self.total, self.unknown, self.rows, self.divided, self.sparse = itertools.islice(sums, 5)
        flags = itertools.islice(sums, self.engine.place.size)
        self.ended = [rank for rank, flag in enumerate(flags) if flag]
        counts = list(itertools.islice(sums, self.count))
        self.used = [count % base for count in counts]
        self.reached = [count // base for count in counts]
        for bucket, again in zip(self.buckets, sums):
            if again and not self.ended:
                bucket.write_all(bucket.views, values)
                self.engine.end_sum(self.engine.begin_sum(bucket.flat), bucket.flat[:0])
            bucket.clear()
        return any(early)

    def _send(self, bucket):
        """Send it, unless it is on its way."""
        bucket.work = bucket.work or self.engine.begin_sum(bucket.flat)

    def write_mean(self, tensor, result):
        """Write the mean for a tensor into another one, and return that."""
        factor = 1 / self.total if self.total else float("nan")
        torch.mul(self.bucket_of[id(tensor)].views[id(tensor)], factor, out=_real(result))
        return result


class _Bucket:
    """Tensors of one type of number and device, which are sent together."""

    def __init__(self, kind, tensors, front=0):
        dtype, device = kind
        shapes = [_real(tensor.detach()).shape for tensor in tensors]
        counts = [shape.numel() for shape in shapes]
        self.flat = torch.zeros(front + sum(counts), dtype=dtype, device=device)
        self.front = self.flat[:front]
        parts = zip(tensors, shapes, self.flat[front:].split(counts))
        # By the ids of the tensors, as are written values, their weights and versions.
        self.views = {id(tensor): part.view(shape) for tensor, shape, part in parts}
        self.clear()

    def clear(self):
        """Forget the values of the last pass."""
        self.work, self.written = None, {}  # work: its all-reduce, which has begun

    def write_all(self, keys, values):
        """Write several values, by the ids of their tensors."""
        for key in keys:
            self.write(key, *values.get(key, ABSENT))

    def write(self, key, value, weight):
        """Write a value times its weight, in one pass over the memory."""
        self.written[key] = value, weight, getattr(value, "_version", None)
        if value is None:
            self.views[key].zero_()
        else:
            value = value.detach() if value.requires_grad else value  # under create_graph=True
            torch.mul(_real(value).to(self.flat.dtype), weight, out=self.views[key])

    def has(self, key, value, weight):
        """Return whether this was written, as it is now."""
        written, *others = self.written.get(key, (self, 0, None))
        return written is value and others == [weight, getattr(value, "_version", None)]


def _item(tensor):
    """Return a tensor as ``buckets.filled`` takes it: a bucket has one type and device."""
    is_double = tensor.dtype in (torch.float64, torch.complex128)
    dtype = torch.float64 if is_double else torch.float32
    size = _real(tensor.detach()).numel() * (8 if is_double else 4)
    return (dtype, tensor.device), size, tensor


def _real(tensor):
    """Return a tensor of real numbers, two for each complex one."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
