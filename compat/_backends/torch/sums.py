"""Sums of tensors over all ranks, in one all-reduce for each type of number and device."""

import sys


class Sums:
    """The sums over all ranks of a header and of tensors, which the rows divide.

    Arguments:
        header: rows, whether they are unknown, each rank's flag, and two numbers for each
            parameter.
        values: pairs of a tensor and what is summed in its place, or None for zeros.
        weight: what the values are multiplied by.
    """

    def __init__(self, engine, header, values, weight):
        torch = sys.modules["torch"]
        self.weight = weight
        self.means = {}  # by the ids of the tensors
        buckets = {}  # type of number and device -> pairs
        for target, value in values:
            key = sum_dtype(target.dtype), target.device
            buckets.setdefault(key, []).append((target, value))
        sums = None
        for (dtype, device), pairs in buckets.items():
            front = torch.tensor(header if sums is None else [], dtype=dtype, device=device)
            parts = [_flat(target, value if weight else None, dtype) for target, value in pairs]
            bucket = torch.cat([front] + parts)
            numbers = bucket[len(front) :]
            numbers *= weight
            engine.sum_tensor(bucket)
            if sums is None:
                sums = front.copy_(bucket[: len(front)]).tolist()
            numbers /= sums[0]
            for (target, _), mean in zip(pairs, numbers.split([len(part) for part in parts])):
                self.means[id(target)] = _shaped(mean, target)
        self.total, self.unknown = sums[:2]
        flags, rest = sums[2 : 2 + engine.place.size], sums[2 + engine.place.size :]
        self.ended = [rank for rank, flag in enumerate(flags) if flag]
        self.used, self.sparse = rest[: len(rest) // 2], rest[len(rest) // 2 :]


def sum_dtype(dtype):
    """The type of number in which tensors of a type are summed up."""
    torch = sys.modules["torch"]
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _flat(target, value, dtype):
    """The numbers of a tensor in a row; zeros where there is no tensor."""
    torch = sys.modules["torch"]
    if value is None:
        count = target.numel() * (2 if target.is_complex() else 1)
        return torch.zeros(count, dtype=dtype, device=target.device)
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.reshape(-1).to(dtype)


def _shaped(flat, target):
    if target.is_complex():
        # A copy: the numbers may begin at an odd place.
        return sys.modules["torch"].view_as_complex(flat.clone().view(target.shape + (2,)))
    return flat.view(target.shape)
