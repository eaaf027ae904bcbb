"""Sums of tensors over all ranks, in buckets of memory that is kept from pass to pass.

As in ``DistributedDataParallel`` a bucket is sent as soon as it is full, while the backward pass
goes on. Which tensors are in which bucket, and the order of the buckets, are the same on all ranks,
so that each all-reduce finds its counterparts, whatever a rank's batch has used: what is left at
the end of the pass is sent then.

A header goes with the last bucket: what the ranks have to know of each other. It tells, too, which
buckets were sent before a tensor in them had its last value; these are sent again.
"""

import torch

from ..._ranks import engines


class Sums:
    """The sums of a header and of tensors, which the sum of the weights divides.

    Arguments:
        tensors: in the order in which their values are expected.
        numbers: how many of them a header has: the weight, whether it is unknown, rows, whether
            they are not the weight, whether a gradient is sparse, each rank's flag, and whether
            each parameter has a gradient.
    """

    def __init__(self, engine, tensors, numbers):
        self.engine = engine
        self.tensors = tensors
        self.numbers = numbers
        *groups, last = engines.buckets(map(_item, tensors)) or [((torch.float32, "cpu"), [])]
        self.buckets = [_Bucket(*group) for group in groups]
        self.buckets.append(_Bucket(*last, front=numbers + len(groups) + 1))
        # Id of a tensor -> its slot.
        self.slots = {slot.key: slot for bucket in self.buckets for slot in bucket.slots}
        # Ids of those that may be sent before the end of the pass. The last bucket, which has the
        # header, is not: what a script does to gradients by ``data`` until then counts, and does
        # not show.
        self.leaving = {slot.key for bucket in self.buckets[:-1] for slot in bucket.slots}
        self.sent = 0  # buckets that are on their way

    def put(self, tensor, value, weight):
        """Write what is summed up in a tensor's place while it is in the cache; send what is full.

        Only of those that are ``leaving``.
        """
        slot = self.slots[id(tensor)]
        bucket = slot.bucket
        if bucket.work is not None:
            return
        bucket.missing -= slot.written is None
        slot.write(value, weight)
        while self.sent < len(self.buckets) - 1 and self.buckets[self.sent].missing == 0:
            self._send()

    def complete(self, header, values):
        """Sum up the header and all values; afterwards ``mean`` and ``mean_into`` have the means.

        Arguments:
            values: by the ids of the tensors, each with its weight; zeros in the place of what is
                not there, or None.

        Returns:
            Whether a value was sent too early on this rank.
        """
        early = []
        for bucket in self.buckets:
            others = [slot for slot in bucket.slots if not slot.has(*values.get(slot.key, ABSENT))]
            early.append(bucket.work is not None and bool(others))
            for slot in others if bucket.work is None else ():
                slot.write(*values.get(slot.key, ABSENT))
        front = self.buckets[-1].front
        front.copy_(torch.tensor(header + early, dtype=front.dtype))
        while self.sent < len(self.buckets):
            self._send()
        for bucket in self.buckets:
            self.engine.end_sum(bucket.work)
        again = self._read(front.tolist())
        for bucket, count in zip(self.buckets, again):
            if count and not self.ended:
                for slot in bucket.slots:
                    slot.write(*values.get(slot.key, ABSENT))
                self.engine.end_sum(self.engine.begin_sum(bucket.flat))
            bucket.clear()
        self.sent = 0
        return any(early)

    def _send(self):
        bucket = self.buckets[self.sent]
        bucket.work = self.engine.begin_sum(bucket.flat)
        self.sent += 1

    def _read(self, sums):
        used = 5 + self.engine.place.size
        self.total, self.unknown, self.rows, self.divided, self.sparse = sums[:5]
        self.factor = 1 / self.total if self.total else float("nan")
        self.ended = [rank for rank, flag in enumerate(sums[5:used]) if flag]
        self.used = sums[used : self.numbers]
        return sums[self.numbers :]

    def mean(self, tensor):
        """The mean of what was summed up for a tensor, in the tensor's type of number."""
        mean = self.slots[id(tensor)].view * self.factor
        mean = torch.view_as_complex(mean) if tensor.is_complex() else mean
        return mean.to(tensor.dtype)

    def mean_into(self, tensor, result):
        """Write the mean into a tensor that is there."""
        torch.mul(self.slots[id(tensor)].view, self.factor, out=_real(result))


#: What is held of a tensor that has no value, and its weight.
ABSENT = None, 0


class _Bucket:
    """Tensors of one type of number and device, which are sent together."""

    def __init__(self, kind, tensors, front=0):
        dtype, device = kind
        shapes = [_real(tensor.detach()).shape for tensor in tensors]
        counts = [shape.numel() for shape in shapes]
        self.flat = torch.zeros(front + sum(counts), dtype=dtype, device=device)
        self.front = self.flat[:front]
        self.slots = [
            _Slot(self, tensor, part.view(shape))
            for tensor, shape, part in zip(tensors, shapes, self.flat[front:].split(counts))
        ]
        self.clear()

    def clear(self):
        self.work = None  # its all-reduce, which has begun
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.written = None


class _Slot:
    """A tensor's place in a bucket."""

    def __init__(self, bucket, tensor, view):
        self.bucket = bucket
        self.key = id(tensor)
        self.view = view

    def write(self, value, weight):
        """Write a value times its weight, in one pass over the memory."""
        if value is None:
            self.view.zero_()
            self.written = ABSENT + (None,)
        else:
            self.written = value, weight, value._version
            value = value.detach() if value.requires_grad else value  # under create_graph=True
            torch.mul(_real(value).to(self.view.dtype), weight, out=self.view)

    def has(self, value, weight):
        """Whether this was written, as it is now."""
        written, written_weight, version = self.written or (self, 0, None)
        now = None if value is None else value._version
        return written is value and written_weight == weight and version == now


def _item(tensor):
    """As ``engines.buckets`` takes it: a bucket is of one type of number and device."""
    is_double = tensor.dtype in (torch.float64, torch.complex128)
    dtype = torch.float64 if is_double else torch.float32
    size = _real(tensor.detach()).numel() * (8 if is_double else 4)
    return (dtype, tensor.device), size, tensor


def _real(tensor):
    """A tensor of real numbers, two for each complex one."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
