"""A call's data arguments, their batch dimension, and their shards.

Rows come first in torch, except in its recurrent layers and transformers: their first dimension is
time unless they are made with ``batch_first=True``, and hidden states have the rows second always.
"""

import contextlib
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as tree

from .containers import contents_of, flatten, is_object, set_contents
from .tensors import are_same, changes_of, tensors_in


def first_batch(arguments: Any) -> Any:
    """Return a call's first tensor that has rows, or its packed sequences, or None."""
    for leaf in tree.tree_leaves(arguments, is_leaf=lambda v: isinstance(v, PackedSequence)):
        for batch in [leaf] if isinstance(leaf, PackedSequence) else tensors_in(leaf):
            if isinstance(batch, PackedSequence) or batch.dim():
                return batch
    return None


def rows_of(tensor: torch.Tensor, dim: int, rows: "Sequence[int]") -> torch.Tensor:
    """Return these rows of a tensor, in this order, which has them along a dimension."""
    if isinstance(rows, range):
        return tensor.narrow(dim, rows.start, len(rows))
    return tensor.index_select(dim, torch.tensor(rows, device=tensor.device))


class CallArguments:
    """The arguments of one call.

    Arguments:
        args: the arguments.
        kwargs: those by name.
        convert: a function that is applied to each leaf, or None.

    Attributes:
        leaves: the values in them, whatever they are nested in.
        key: the kind of call, by all but values of tensors and numbers.
        contents: pairs of a container among them and its contents before the call.
        state: the ids of leaves in objects, such as caches, which a call may change in place.
        passed: the arguments of the last call, whose containers and tensors it may have changed.
    """

    def __init__(self, args, kwargs, convert=None):
        seen: "dict[int, Any]" = {}
        self.keywords = list(kwargs)
        leaves, self.unflatten, spec = flatten((args, tuple(kwargs.values())), seen)
        self.leaves = leaves if convert is None else list(map(convert, leaves))
        self.key = str((self.keywords, spec, list(map(_kind, self.leaves))))
        self.contents = list(seen.values())
        self.kept = list(map(Unchanged, self.leaves)) if seen else []
        objects = [contents for container, contents in self.contents if is_object(container)]
        held = tree.tree_leaves(objects)
        self.state = {id(leaf) for leaf in held if isinstance(leaf, torch.Tensor)}

    def copied(self, leaf: Any, value: Any) -> Any:
        """Return a leaf's value, copied if the call may change it in place."""
        return value.clone() if id(leaf) in self.state else value

    def suspended(self) -> "Callable[[], None]":
        """Restore all containers; return a function that puts back what they have had."""
        changed = [(container, contents_of(container)) for container, _ in self.contents]
        self.restore()

        def put_back():
            for container, contents in changed:
                set_contents(container, contents)

        return put_back

    def restore(self) -> None:
        """Restore the contents of all containers."""
        for container, contents in self.contents:
            set_contents(container, contents)

    @contextlib.contextmanager
    def substituted(self, leaves: "List[Any]") -> "Iterator[Tuple[Any, Any]]":
        """Return the context of a call with these leaves: its ``args, kwargs``."""
        try:
            args, values = self.unflatten(leaves)
            kwargs = dict(zip(self.keywords, values))
            self.passed = (args, kwargs) if self.contents else ()
            self.before = flatten(self.passed)
            self.versions = {
                id(leaf): (leaf, changes_of(leaf), kept)
                for leaf, kept in zip(leaves, self.kept)
                if isinstance(leaf, torch.Tensor)
            }
            yield args, kwargs
        finally:
            self.restore()

    def changed(self) -> Any:
        """Return ``passed`` if anything in its containers was changed, else an empty tuple."""
        leaves, _, described = flatten(self.passed)
        before, _, described_before = self.before
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        same = described == described_before and are_same(leaves, before)
        return (
            () if same and all(self.marked(leaf) is not leaf for leaf in tensors) else self.passed
        )

    def marked(self, leaf: Any) -> Any:
        """Return ``Unchanged`` for a tensor that was not changed; any other leaf as it is."""
        _, version, kept = self.versions.get(id(leaf), (None, None, None))
        return leaf if kept is None or changes_of(leaf) != version else kept


class Unchanged:
    """A tensor of the arguments that a call has not changed.

    Arguments:
        value: the caller's tensor, with all rows.
    """

    def __init__(self, value):
        self.value = value


def _kind(leaf):
    if isinstance(leaf, torch.Tensor):
        return leaf.dim()
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf).__name__


class Layout(NamedTuple):
    """The way in which a call's arguments are split.

    Arguments:
        rows: how many rows the batch has.
        cuts: for each leaf, the dimension of its rows, or None.
        kept: ``FoundRows`` of values that the model keeps, which are split, too.
    """

    rows: int
    cuts: "Tuple[Optional[int], ...]"
    kept: "Tuple[Any, ...]"


def make_layout(arguments: CallArguments, dim: int, dims: "Sequence[int]") -> "Optional[Layout]":
    """Return the layout that splits all that has as many rows as the first tensor.

    Arguments:
        arguments: those of the call.
        dim: the batch dimension of the first tensor.
        dims: possible ones of others, the likeliest first.

    Returns:
        A layout, or None where no argument has rows.
    """
    sizes = [size_along(leaf, dim) for leaf in arguments.leaves]
    rows = next((size for size in sizes if size is not None), None)
    if not rows:
        return None
    first = sizes.index(rows)
    cuts = [_cut_of(leaf, rows, dims) for leaf in arguments.leaves]
    return Layout(rows, (*cuts[:first], dim, *cuts[first + 1 :]), ())


def _cut_of(leaf, rows, dims):
    """Return the batch dimension, or None. That of a mask is the first one that fits."""
    dims = sorted(dims) if getattr(leaf, "dtype", None) is torch.bool else dims
    return next((dim for dim in dims if size_along(leaf, dim) == rows), None)


def size_along(leaf: Any, dim: Any) -> "Optional[int]":
    """Return the size of a value along a dimension; None where it cannot have rows there."""
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    # torch takes no rows out of the compressed sparse layouts.
    has_rows = isinstance(leaf, torch.Tensor) and leaf.layout in (torch.strided, torch.sparse_coo)
    return leaf.shape[dim] if has_rows and leaf.dim() > dim else None


def declared(module: torch.nn.Module) -> "Optional[int]":
    """Return the batch dimension that one of torch's modules declares; None for any other."""
    nn = torch.nn
    if isinstance(module, nn.Transformer) and type(module).forward is not nn.Transformer.forward:
        return None  # the modules within it do
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention, nn.Transformer)):
        return 0 if module.batch_first else 1
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return declared(module.self_attn)
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
        return declared(module.layers[0])
    return None


def rows_declared(module: torch.nn.Module, first: Any) -> "Optional[int]":
    """Return the number of rows in the first argument, by the module's declared dimension."""
    if isinstance(first, torch.Tensor) and first.dim() == 2:
        return None
    return size_along(first, declared(module))


def dimension_choices(model: torch.nn.Module) -> "List[Tuple[int, Tuple[int, ...]]]":
    """List candidates: the batch dimension, and those of hidden states, masks and lengths.

    A batch of two rows, say, has as many as there are hidden states of two layers.
    """
    dim = declared(model)
    candidates: "List[Tuple[int, Tuple[int, ...]]]" = [(0, (0, 1)), (0, (1, 0)), (1, (1, 0))]
    if dim is not None:
        return [candidate for candidate in candidates if candidate[0] == dim]
    is_inside = any(declared(part) is not None for part in model.modules())
    return candidates if is_inside else [(0, (0,))]


def shard_on(device: Any, where: "Optional[int]", rows: Any, value: Any) -> Any:
    """Return a replica's shard of an argument, on its device.

    Arguments:
        device: the device.
        where: the batch dimension, or None: the whole value.
        rows: the numbers of the rows.
        value: the argument.
    """
    if where is None and not isinstance(value, torch.Tensor):
        return value
    mask = getattr(value, "_keras_mask", None)
    value = (value if where is None else rows_of(value, where, rows)).to(device)
    if mask is not None:
        value = value.view_as(value)  # another object: the mask is not for the argument itself
        value._keras_mask = shard_on(device, where, rows, mask)
    return value


def counting_changes(value: torch.Tensor) -> torch.Tensor:
    """Return a clone of an inference tensor, whose changes in place are counted."""
    clone, mask = value.clone(), getattr(value, "_keras_mask", None)
    if mask is not None:
        clone._keras_mask = mask
    return clone
