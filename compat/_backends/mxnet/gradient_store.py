"""The KVStore of a ``Module`` whose contexts exchange gradients by themselves ("device").

MXNet's own copies all gradients of a parameter to one context, and its weights from there. In the
chain each context adds its gradients to its neighbour's; the first one updates the weights.
"""

import ctypes
import os

import mxnet as mx

from .weight_copies import broadcast, reduced

_FEW = 3  # contexts, of which none sends more to all others than in the chain


def store_for(module, kvstore):
    """Return the KVStore for a module that was asked for one by name or object.

    Left as they are: stores in the host's memory ("local"), with which each context exchanges the
    weights and gradients once; few contexts; compressed gradients; and MXNet's tree of GPUs.
    """
    is_tree = os.environ.get("MXNET_KVSTORE_USETREE", "0") != "0"
    is_compressed = bool(getattr(module, "_compression_params", None))
    if kvstore != "device" or len(module._context) <= _FEW or is_tree or is_compressed:
        return kvstore
    handle = mx.base.KVStoreHandle()
    name = mx.base.c_str(kvstore)
    mx.base.check_call(mx.base._LIB.MXKVStoreCreate(name, ctypes.byref(handle)))
    return ChainedStore(handle)


class ChainedStore(mx.kvstore.KVStore):
    """A store with which the first context alone exchanges sums of gradients, and weights."""

    def broadcast(self, key, value, out, priority=0):
        """Store a value, and copy it to arrays."""
        self.init(key, value)
        self.pull(key, out, priority)

    def push(self, key, value, priority=0):
        """Sum up the gradients of all contexts, and push the sum."""
        is_one = isinstance(value, list) and not isinstance(key, (list, tuple))
        super().push(key, reduced(value) if is_one else value, priority)

    def pull(self, key, out=None, priority=0, *args, **kwargs):
        """Pull weights to the first context's array, and copy them to the others."""
        is_one = isinstance(out, list) and not isinstance(key, (list, tuple))
        if not is_one or any(array.stype != "default" for array in out):
            super().pull(key, out, priority, *args, **kwargs)
        else:
            super().pull(key, out[0], priority, *args, **kwargs)
            broadcast(out)

    def pushpull(self, key, value, out=None, priority=0):
        """Push gradients, and pull weights or the sum."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority)
