"""A call's data arguments, their batch dimension, and their shards.

Rows come first in torch, except in its recurrent layers and transformers: their first dimension is
time unless they are made with ``batch_first=True``, and hidden states have the rows second always.
"""

import collections
import contextlib

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as tree

from .containers import flatten, is_object, set_contents
from .tensors import are_same, tensors_in


def first_batch(arguments):
    """Return a call's first tensor that has rows, or its packed sequences, or None."""
    for leaf in tree.tree_leaves(arguments, is_leaf=lambda v: isinstance(v, PackedSequence)):
        for found in [leaf] if isinstance(leaf, PackedSequence) else tensors_in(leaf):
            if isinstance(found, PackedSequence) or found.dim():
                return found
    return None


def rows_of(tensor, dim, rows):
    """Return these rows of a tensor that has them in a dimension, in this order."""
    if isinstance(rows, range):
        return tensor.narrow(dim, rows.start, len(rows))
    return tensor.index_select(dim, torch.tensor(rows, device=tensor.device))


class CallArguments:
    """The arguments of one call.

    Attributes:
        leaves: the values in them, whatever they are nested in.
        key: what two calls have in common that are alike, but for the numbers.
        contents: of each container among them, it and what was in it.
        state: the leaves in objects, such as caches, which a call may change in place.
        passed: what the last call was given of them, which may change containers and tensors.
    """

    def __init__(self, args, kwargs, convert=None):
        seen = {}  # type: dict
        self.keywords = list(kwargs)
        leaves, self.unflatten, spec = flatten((args, tuple(kwargs.values())), seen)
        self.leaves = leaves if convert is None else list(map(convert, leaves))
        self.key = str((self.keywords, spec, list(map(_kind, self.leaves))))
        self.contents = list(seen.values())
        self.kept = list(map(Unchanged, self.leaves)) if seen else []
        found = tree.tree_leaves([contents for each, contents in self.contents if is_object(each)])
        self.state = {id(leaf) for leaf in found if isinstance(leaf, torch.Tensor)}

    def copied(self, leaf, value):
        """Return the value for a leaf, or a copy where the call may change it in place."""
        return value.clone() if id(leaf) in self.state else value

    def restore(self):
        """Give all containers what was in them."""
        for each, contents in self.contents:
            set_contents(each, contents)

    @contextlib.contextmanager
    def given(self, leaves):
        """Let containers have these leaves in this context: a call's ``args, kwargs``."""
        try:
            args, values = self.unflatten(leaves)
            kwargs = dict(zip(self.keywords, values))
            self.passed = (args, kwargs) if self.contents else ()
            self.before = flatten(self.passed)
            self.known = {
                id(leaf): (leaf, leaf._version, kept)
                for leaf, kept in zip(leaves, self.kept)
                if isinstance(leaf, torch.Tensor)
            }
            yield args, kwargs
        finally:
            self.restore()

    def changed(self):
        """Return what was passed, where anything in its containers was changed; else nothing."""
        leaves, _, described = flatten(self.passed)
        before, _, described_before = self.before
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        same = described == described_before and are_same(leaves, before)
        return () if same and all(self.own(leaf) is not leaf for leaf in tensors) else self.passed

    def own(self, leaf):
        """Return ``Unchanged`` for a tensor that was not changed; any other leaf as it is."""
        _, version, kept = self.known.get(id(leaf), (None, None, None))
        return leaf if kept is None or leaf._version != version else kept


class Unchanged:
    """A tensor of the arguments as it was given, all of whose rows the caller has in ``value``."""

    def __init__(self, value):
        self.value = value


def _kind(leaf):
    if isinstance(leaf, torch.Tensor):
        return leaf.dim()
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf).__name__


#: How a call's arguments are cut: ``rows``, for each leaf the dimension of its rows or None; and
#: what is cut of what the model keeps, see ``kept_rows``.
Layout = collections.namedtuple("Layout", "rows cuts kept")


def make_layout(arguments, dim, dims):
    """Cut whatever has as many rows as the first tensor.

    Arguments:
        dim: where the first tensor has them.
        dims: where others may, the likeliest first.

    Returns:
        A layout, or None where no argument has rows.
    """
    sizes = [size_along(leaf, dim) for leaf in arguments.leaves]
    rows = next((each for each in sizes if each is not None), None)
    if not rows:
        return None
    first = sizes.index(rows)
    cuts = [_cut_of(leaf, rows, dims) for leaf in arguments.leaves]
    return Layout(rows, (*cuts[:first], dim, *cuts[first + 1 :]), ())


def _cut_of(leaf, rows, dims):
    """Return the batch dimension, if there is one. Masks have it first."""
    dims = sorted(dims) if getattr(leaf, "dtype", None) is torch.bool else dims
    return next((dim for dim in dims if size_along(leaf, dim) == rows), None)


def size_along(leaf, dim):
    """Return the size of a value in a dimension; None where it cannot have rows there."""
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    # torch takes no rows out of the compressed sparse layouts.
    has_rows = isinstance(leaf, torch.Tensor) and leaf.layout in (torch.strided, torch.sparse_coo)
    return leaf.shape[dim] if has_rows and leaf.dim() > dim else None


def declared(module):
    """Return the batch dimension that one of torch's modules declares; None for any other."""
    nn = torch.nn
    if isinstance(module, nn.Transformer) and type(module).forward is not nn.Transformer.forward:
        return None  # what is within it tells
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention, nn.Transformer)):
        return 0 if module.batch_first else 1
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return declared(module.self_attn)
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
        return declared(module.layers[0])
    return None


def rows_declared(module, first):
    """Return the rows in the first argument of a module that declares its batch dimension."""
    if isinstance(first, torch.Tensor) and first.dim() == 2:
        return None
    return size_along(first, declared(module))


def dimension_choices(model):
    """List what to try: the batch dimension, and that of hidden states, masks and lengths.

    A batch of two rows, say, has as many as there are hidden states of two layers.
    """
    own = declared(model)
    found = [(0, (0, 1)), (0, (1, 0)), (1, (1, 0))]
    if own is not None:
        return [choice for choice in found if choice[0] == own]
    inside = any(declared(part) is not None for part in model.modules())
    return found if inside else [(0, (0,))]


def shard_on(device, where, rows, value):
    """Return a replica's shard of an argument, on its device."""
    if where is None and not isinstance(value, torch.Tensor):
        return value
    mask = getattr(value, "_keras_mask", None)
    value = (value if where is None else rows_of(value, where, rows)).to(device)
    if mask is not None:
        value = value.view_as(value)  # another object: the mask is not for the argument itself
        value._keras_mask = shard_on(device, where, rows, mask)
    return value
