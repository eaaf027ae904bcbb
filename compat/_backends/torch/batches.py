"""What of a call's arguments is data, and in which dimension it has the rows of the batch.

And tensors: found in nested values, compared, handed to numpy.

Rows come first in torch, except in its recurrent layers and transformers: their first dimension is
time unless they are made with ``batch_first=True``, and hidden states have the rows second always.
"""

import collections
import contextlib
import functools
import inspect
import operator
from collections.abc import MutableMapping

import torch
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from ... import _rows

tree = torch.utils._pytree

# Arguments that torch's own attention takes one of for all rows.
MASKS = ("attn_mask", "src_mask", "tgt_mask", "memory_mask")


# Tensors --------------------------------------------------------------------------------------


def first_batch(arguments):
    """The first tensor in a call's arguments that has rows, or packed sequences, or None."""
    for leaf in tree.tree_leaves(arguments, is_leaf=lambda v: isinstance(v, PackedSequence)):
        for found in [leaf] if isinstance(leaf, PackedSequence) else tensors_in(leaf):
            if isinstance(found, PackedSequence) or found.dim():
                return found
    return None


def tensors_in(value, depth=3):
    """The tensors in nested tuples, lists, dictionaries, and attributes of other objects.

    Arguments:
        depth: how deep they are looked for in the attributes of objects.
    """
    for leaf in tree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (str, bytes, int, float, type, torch.nn.Module)):
            parts = getattr(leaf, "__dict__", None) or {
                name: getattr(leaf, name, None) for name in getattr(leaf, "__slots__", ())
            }
            if hasattr(leaf, "keys") and hasattr(leaf, "__getitem__"):
                parts = {key: leaf[key] for key in leaf.keys()}
            yield from tensors_in(list(parts.values()), depth - 1)


def are_same(tensors, others):
    """Whether these are the same objects."""
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))


def to_numpy(tensor):
    """As an array; of a sparse tensor the values that it has."""
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided:
        tensor = (tensor.coalesce() if tensor.is_sparse else tensor).values()
    # numpy has no bfloat16, nor floats of 8 bits; float32 has all their values.
    own = not tensor.is_floating_point() or tensor.dtype in (torch.double, torch.float, torch.half)
    return (tensor if own else tensor.float()).resolve_conj().numpy()


# Containers -----------------------------------------------------------------------------------


#: What an object that can be looked into may have in its attributes, besides others of its kind.
PLAIN = (torch.Tensor, PackedSequence, bool, int, float, complex, str, bytes, type(None), type,
         torch.dtype, torch.device)  # fmt: skip


def _is_leaf(value):
    return type(value) in (list, dict) or isinstance(value, PackedSequence)


def _contents(value, visited=None):
    """What is in a container that keeps its identity, by name; None where it cannot be seen.

    A container is a list, a mapping, a dataclass, or any object of a class written in Python that
    has nothing but numbers, tensors and such containers in its attributes, as caches do.
    """
    if type(value) is list:
        return dict(enumerate(value))
    if hasattr(type(value), "__dataclass_fields__"):
        return {name: getattr(value, name) for name in type(value).__dataclass_fields__}
    if isinstance(value, MutableMapping):
        return dict(value)
    if not is_object(value):
        return None
    visited = {} if visited is None else visited
    if id(value) not in visited:
        visited[id(value)] = value
        for leaf in tree.tree_leaves(vars(value)):
            if not isinstance(leaf, PLAIN) and _contents(leaf, visited) is None:
                return None
    return dict(vars(value))


def is_object(value):
    """Whether all that a value has is in its ``__dict__``, as far as its class tells."""
    kind = type(value)
    return (
        kind.__new__ is object.__new__
        and bool(getattr(value, "__dict__", None))
        and not any(getattr(each, "__slots__", ()) for each in kind.__mro__)
        and not isinstance(value, torch.nn.Module)
    )


def set_contents(value, contents):
    """Let a container have these contents, and no others."""
    if type(value) is list:
        value[:] = contents.values()
    elif isinstance(value, MutableMapping):
        for key in set(value).difference(contents):
            del value[key]
        for key, content in contents.items():
            value[key] = content
    elif hasattr(type(value), "__dataclass_fields__"):
        for name, content in contents.items():
            object.__setattr__(value, name, content)  # frozen ones, too
    else:
        vars(value).clear()
        vars(value).update(contents)
    return value


def flatten(value, seen=None):
    """The leaves of a nested value, a function that nests others like them, and a description.

    That function sets the contents of the containers that ``seen`` lists, with what was in them,
    rather than copy them.
    """
    seen = {} if seen is None else seen
    leaves, spec = tree.tree_flatten(value, is_leaf=_is_leaf)
    flat, makers, inside = [], [], []  # of each leaf: what takes it from an iterator of new ones
    for leaf in leaves:
        contents = None if isinstance(leaf, PLAIN) else _contents(leaf)
        if contents is None:
            flat.append(leaf)
            makers.append(next)
        elif id(leaf) in seen:
            makers.append(lambda values, same=leaf: same)
            inside.append(type(leaf))
        else:
            seen[id(leaf)] = leaf, contents
            names = list(contents)
            found, rebuild, described = flatten(tuple(contents.values()), seen)
            flat += found
            makers.append(functools.partial(_refilled, leaf, names, rebuild))
            inside.append((type(leaf), names, described))

    def unflatten(values):
        values = iter(values)
        return tree.tree_unflatten([make(values) for make in makers], spec)

    return flat, unflatten, (spec, inside)


def _refilled(value, names, rebuild, values):
    return set_contents(value, dict(zip(names, rebuild(values))))


# Rows -----------------------------------------------------------------------------------------


def rows_of(value, placement, rows):
    """These rows of an argument, in this order; of packed sequences, these sequences."""
    if isinstance(value, PackedSequence):
        padded, lengths = rnn.pad_packed_sequence(value, batch_first=True)
        rows = torch.tensor(list(rows))
        return _pack(padded[rows.to(padded.device)], lengths[rows], value)
    axis, inner = placement.axis, placement.inner
    if isinstance(rows, range):
        return value.narrow(axis, rows.start * inner, len(rows) * inner)
    index = [row * inner + offset for row in rows for offset in range(inner)]
    return value.index_select(axis, torch.tensor(index, device=value.device))


# By padding, not by torch's pack_sequence(): that takes one operation for each sequence.
def _pack(padded, lengths, like):
    is_sorted = like.sorted_indices is None
    return rnn.pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=is_sorted)


def cat_packed(values, home):
    """The sequences of all replicas as one."""
    longest = max(len(value.batch_sizes) for value in values)
    pairs = [rnn.pad_packed_sequence(v.to(home), True, total_length=longest) for v in values]
    padded, lengths = map(torch.cat, zip(*pairs))
    return _pack(padded, lengths, values[0])


class DividedArguments:
    """The arguments of one call.

    Attributes:
        leaves: the values in them, whatever they are nested in.
        names: for each leaf, the parameter of ``function`` that it came by.
        key: what two calls have in common that are alike, but for the numbers.
        contents: of each container among them, it and what was in it.
        state: the leaves in objects, such as caches, which a call may change in place.
    """

    def __init__(self, names, args, kwargs, convert=None):
        self.count = len(args)
        self.keywords = list(kwargs)
        self.leaves, self.names, self.parts = [], [], []
        key, seen = [], {}  # type: list, dict
        names = names + [None] * len(args)
        for name, value in list(zip(names, args)) + list(kwargs.items()):
            leaves, unflatten, spec = flatten(value, seen)
            leaves = leaves if convert is None else list(map(convert, leaves))
            self.leaves += leaves
            self.names += [name] * len(leaves)
            self.parts.append(unflatten)
            key.append((name, spec, [_kind(leaf) for leaf in leaves]))
        self.key = str(key)
        self.contents = list(seen.values())
        self.kept = list(map(Unchanged, self.leaves)) if seen else []
        found = tree.tree_leaves([contents for each, contents in self.contents if is_object(each)])
        self.state = {id(leaf) for leaf in found if isinstance(leaf, torch.Tensor)}

    def copied(self, leaf, value):
        """The value for a leaf, or a copy where the call may change it in place."""
        return value.clone() if id(leaf) in self.state else value

    def restore(self):
        """Give all containers what was in them."""
        for each, contents in self.contents:
            set_contents(each, contents)

    @contextlib.contextmanager
    def given(self, leaves):
        """Within, the containers have these leaves: ``args, kwargs`` and what they were given."""
        try:
            rest = iter(leaves)
            values = [unflatten(rest) for unflatten in self.parts]
            args, kwargs = values[: self.count], dict(zip(self.keywords, values[self.count :]))
            yield args, kwargs, Given(self, leaves, args, kwargs)
        finally:
            self.restore()


class Given:
    """What a call was given, which may change the containers in it, and tensors in place."""

    def __init__(self, arguments, leaves, args, kwargs):
        self.values = (args, kwargs) if arguments.contents else ()
        self.before = flatten(self.values)
        self.known = {
            id(leaf): (leaf, leaf._version, kept)
            for leaf, kept in zip(leaves, arguments.kept)
            if isinstance(leaf, torch.Tensor)
        }

    def changed(self):
        """The containers, where anything in them is not as it was given; else nothing."""
        leaves, _, described = flatten(self.values)
        before, _, described_before = self.before
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        same = described == described_before and are_same(leaves, before)
        return () if same and all(self.own(leaf) is not leaf for leaf in tensors) else self.values

    def own(self, leaf):
        """``Unchanged`` for a tensor that is as it was given; any other leaf as it is."""
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


def names_of(function):
    """The parameters of ``function`` that positional arguments come by."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]


#: How a call's arguments are cut: ``rows``, and a placement or None for each leaf.
Layout = collections.namedtuple("Layout", "rows cuts")


def layout(arguments, dim=0, states=None):
    """Cut whatever has as many rows as the first tensor, in dimension ``dim``.

    Arguments:
        states: whether tensors of three dimensions that have them in the second, hidden states,
            are cut there: "all", or "other" ones, that do not have as many in ``dim``, too.

    Returns:
        A layout, or None where no argument has rows.
    """
    sizes = [size(leaf, dim) for leaf in arguments.leaves]
    rows = next((each for each in sizes if each is not None), None)
    if not rows:
        return None
    cuts = []
    for leaf, name in zip(arguments.leaves, arguments.names):
        is_state = (
            states
            and getattr(leaf, "ndim", 0) == 3
            and leaf.shape[1] == rows
            and (states == "all" and any(cuts) or leaf.shape[dim] != rows)
        )
        cuts.append(_cut_of(leaf, name or "", rows, 1 if is_state else dim))
    return Layout(rows, tuple(cuts))


def _cut_of(leaf, name, rows, dim):
    """The rows of what has them in ``dim``, if it has any. Masks have them first."""
    if isinstance(leaf, PackedSequence):
        return _rows.Sharded(0, inner=None, even=False)
    if not isinstance(leaf, torch.Tensor) or name in MASKS and leaf.dim() == 2:
        return None
    if name.endswith("mask") and leaf.dim() == 3 and leaf.shape[0] % rows == 0:
        return _rows.Sharded(0, leaf.shape[0] // rows)  # one for each head
    dim = 0 if name.endswith("key_padding_mask") else dim
    return _rows.Sharded(dim) if size(leaf, dim) == rows else None


def size(leaf, dim):
    """How much a value that may have rows has in a dimension, or None."""
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    # torch takes no rows out of the compressed sparse layouts.
    has_rows = isinstance(leaf, torch.Tensor) and leaf.layout in (torch.strided, torch.sparse_coo)
    return leaf.shape[dim] if has_rows and leaf.dim() > dim else None


# Modules that declare where the rows are --------------------------------------------------------


def declared(module):
    """The dimension of the rows that one of torch's modules declares; None for any other."""
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
    """The rows in the first argument of a module that declares their dimension, or None."""
    if isinstance(first, torch.Tensor) and first.dim() == 2:
        return None
    return size(first, declared(module))


def choices(model):
    """What to try: where the rows are, and where those of hidden states (see ``layout``)."""
    own = declared(model)
    if own is not None:
        return [(own, "all" if isinstance(model, torch.nn.RNNBase) else None)]
    inside = any(declared(part) is not None for part in model.modules())
    return [(0, "other"), (0, "all"), (1, "other")] if inside else [(0,)]
