"""Devices of torch that hold their tensors apart, as GPUs do, on a machine that has none.

torch has one CPU device, so that simulated devices find no tensor that is left on another one. A
tensor of these is on a device of torch's type "lazy", which no package claims here and which
autograd serves without a thread of its own: the operations, the engine of autograd and `.to()` see
that device. The numbers are in a tensor of the CPU within. An operation on tensors of several
devices raises, as it does on GPUs, where it is no copy and none is a number.
"""

import torch
from torch.utils._pytree import tree_leaves, tree_map

COPIES = ("aten::_to_copy", "aten::copy_")


class MixedDevicesError(RuntimeError):
    """An operation was given tensors of several devices."""


class Separate(torch.Tensor):
    @staticmethod
    def __new__(cls, inner, device):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner = inner
        return made

    def __init__(self, *arguments):
        pass

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = function._schema.name
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        separate = [tensor for tensor in tensors if isinstance(tensor, cls)]
        devices = {str(tensor.device) for tensor in separate}
        devices.update("cpu" for tensor in tensors if tensor.dim() and type(tensor) is not cls)
        if len(devices) > 1 and name not in COPIES:
            raise MixedDevicesError("{} mixes {}".format(function, ", ".join(sorted(devices))))
        if kwargs.get("device") is not None:
            device, kwargs["device"] = torch.device(kwargs["device"]), "cpu"
        else:
            device = (tensors if name == "aten::copy_" else separate)[0].device
        given = {id(_inner(tensor)): tensor for tensor in tensors}

        def outer(value):
            if not isinstance(value, torch.Tensor) or device.type == "cpu":
                return value
            return given[id(value)] if id(value) in given else cls(value, device)

        args, kwargs = tree_map(_inner, (args, kwargs))
        return tree_map(outer, function(*args, **kwargs))


def _inner(value):
    return value.inner if isinstance(value, Separate) else value


def _made(function):
    def make(*args, **kwargs):
        device = kwargs.pop("device")
        return Separate(function(*args, device="cpu", **kwargs), device)

    return make


# What makes a tensor from none.
LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("empty.memory_format", _made(torch.ops.aten.empty.memory_format), "Lazy")
LIBRARY.impl("empty_strided", _made(torch.ops.aten.empty_strided.default), "Lazy")


def _copy_from(source, target, non_blocking=False):
    _inner(target).copy_(_inner(source))
    return target


LIBRARY.impl("_copy_from", _copy_from, "Lazy")
