"""Copies of weights and state on the devices, each made from that of the device before it.

With gradients they belong to autograd's graph: the gradient of a chain of copies is a chain of
sums. So no device sends or receives more than the weights and their gradients once, whatever the
number of devices. Without gradients, copies are kept as long as the values are the same.
"""

import weakref
from typing import Any, Collection, Dict, Iterator, List, Sequence, Tuple

import torch
from torch.utils import _python_dispatch

from . import profiler

#: Integers of the size of an element, for comparisons bit by bit.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def device_of(name: str) -> torch.device:
    """Return the device of a name: on the CPU, "cpu:1" is a name only."""
    return torch.device("cpu" if name.startswith("cpu") else name)


def send(
    values: "Dict[Any, torch.Tensor]", names: "Sequence[str]", copied: "Collection[Any]"
) -> "List[Dict[Any, torch.Tensor]]":
    """Return copies of values on each device, by key; on the first one they may be the values.

    Value by value, so that a device passes on the first ones while it receives others.

    Arguments:
        values: by key.
        names: those of the devices.
        copied: the keys of values that are copied even if they are on the first device.
    """
    first, *others = map(device_of, names)
    sent: "List[Dict[Any, torch.Tensor]]" = [{} for _ in names]
    for key, value in values.items():
        sent[0][key] = value.to(first, copy=key in copied)
        for replica, copy in zip(sent[1:], _chain(sent[0][key], names[1:], others)):
            replica[key] = copy
    return sent


def _chain(
    value: torch.Tensor, names: "Sequence[str]", devices: "Sequence[torch.device]"
) -> "Iterator[torch.Tensor]":
    for name, device in zip(names, devices):
        if torch.autograd._profiler_enabled():
            with torch.profiler.record_function(profiler.REPLICA + name):
                value = value.to(device, copy=True)
        else:
            value = value.to(device, copy=True)
        yield value


class KeptCopies:
    """Copies of a model's weights and state, kept from call to call where gradients are not needed.

    No way to change a value is missed: before each call values are compared, on their own device,
    with a copy of what was sent last.

    Arguments:
        names: those of all devices.
    """

    def __init__(self, names: "Sequence[str]") -> None:
        self.names = names
        self.chains: "Dict[Any, _KeptChain]" = {}  # by key
        self.streams: "List[Any]" = []

    def send(
        self, values: "Dict[Any, torch.Tensor]", count: int, copied: "Collection[Any]"
    ) -> "List[Dict[Any, torch.Tensor]]":
        """Return copies on the first ``count`` devices; see the function ``send``."""
        chains, self.chains = self._unchanged(values), {}
        names = self.names[:count]
        devices = list(map(device_of, names))
        others = {k: v for k, v in values.items() if k not in chains and not is_comparable(v)}
        sent = send(others, names, copied)
        for key in [key for key in values if key not in others]:
            value = values[key]
            chain = self.chains[key] = chains.get(key) or _KeptChain(value)
            is_first = value.device == devices[0]
            copies = chain.on(names[is_first:], devices[is_first:])
            if is_first:
                copies.insert(0, value.to(devices[0], copy=key in copied))
            for replica, copy in zip(sent, copies):
                replica[key] = copy
        return sent

    def _unchanged(self, values: "Dict[Any, torch.Tensor]") -> "Dict[Any, _KeptChain]":
        # Copies are made before they are read only within a stream.
        devices = [device_of(name) for name in self.names if name.startswith("cuda")]
        streams = [torch.cuda.current_stream(device) for device in devices]
        before, self.streams = self.streams, streams
        if streams != before:
            return {}
        pairs = [(key, self.chains[key]) for key in values if key in self.chains]
        pairs = [(key, chain) for key, chain in pairs if chain.is_of(values[key])]
        flags = differ([chain.bits for _, chain in pairs])
        return {key: chain for (key, chain), is_changed in zip(pairs, flags) if not is_changed}


class _KeptChain:
    """The copies of one value.

    Arguments:
        value: the value.
    """

    def __init__(self, value):
        self.memory, self.value = value.data, weakref.ref(value)
        self.sent = self.memory.clone()  # another thread may change the value meanwhile
        self.bits = _bits(self.memory, self.sent)
        self.copies = []

    def on(self, names, devices):
        """Return the copies on these devices, of which each call has the first ones."""
        made = len(self.copies)
        if made < len(names):
            last = self.copies[-1] if self.copies else self.sent
            self.copies += _chain(last, names[made:], devices[made:])
        return [copy.detach() for copy in self.copies[: len(names)]]  # tags are for one call

    def is_of(self, value):
        """Return whether a value lies where this one did, and no call has changed the copies."""
        is_same = self.value() is value and value.dtype is self.memory.dtype
        unchanged = is_same and not any(copy._version for copy in self.copies)
        return unchanged and value.is_set_to(self.memory)


def is_comparable(value: torch.Tensor) -> bool:
    """Return whether the bits of a tensor can be compared: not of sparse or quantized ones."""
    is_plain = value.layout is torch.strided and not value.is_quantized
    is_stored = is_plain and not value.is_conj() and not value.is_neg()
    is_wrapper = _python_dispatch.is_traceable_wrapper_subclass(value)
    return is_stored and not is_wrapper and value.element_size() in _INTEGERS


def differ(pairs: "Sequence[Tuple[torch.Tensor, torch.Tensor]]") -> "List[bool]":
    """Return whether the tensors of each pair differ; a GPU is waited for once."""
    if all(value.device.type == "cpu" for value, _ in pairs):
        return [not torch.equal(value, other) for value, other in pairs]
    flags = [torch.ne(value, other).any() for value, other in pairs]
    return list(map(bool, torch.stack([flag.to(flags[0].device) for flag in flags]).cpu()))


def _bits(*pair):
    """Return two tensors of one shape as integers: words of 8 bytes where that is possible."""
    size = pair[0].element_size()
    sizes = [size * number for each in pair for number in (each.numel(), each.storage_offset())]
    if all(each.is_contiguous() for each in pair) and not any(number % 8 for number in sizes):
        return [each.view(-1).view(torch.int64) for each in pair]
    return [each.view(_INTEGERS[size]) for each in pair]
