"""What of a call's arguments is data, and in which dimension it has the rows of the batch.

And tensors: found in nested values, compared, handed to numpy; and modules, run without a trace.

Rows come first in torch, except in its recurrent layers and transformers: their first dimension is
time unless they are made with ``batch_first=True``, and hidden states have the rows second always.
"""

import collections
import contextlib
import functools
import inspect
import itertools
import math
import operator
from collections.abc import MutableMapping

import torch
from torch.nn.utils.rnn import PackedSequence

from ... import _rows, _verification
from .calls import is_number, tree

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


def close(value, other):
    """Whether two values are the same, to rounding."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        numbers = is_number(value) and is_number(other)
        same = value is other or value == other
        return same or (numbers and math.isclose(value, other, rel_tol=1e-4))
    if value.dtype == torch.bfloat16:  # numpy does not know that it is coarse
        finite = other[torch.isfinite(other)].abs()
        scale = finite.max().clamp(min=1e-30) if finite.numel() else 1.0
        value, other = [(tensor / scale).half() for tensor in (value, other)]
    return _rows.trial.close(*[to_numpy(tensor.to_dense()) for tensor in (value, other)])


# Containers -----------------------------------------------------------------------------------


#: What an object that can be looked into may have in its attributes, besides others of its kind.
PLAIN = (torch.Tensor, PackedSequence, bool, int, float, complex, str, bytes, type(None), type,
         torch.dtype, torch.device)  # fmt: skip


def _is_leaf(value):
    return type(value) in (list, dict, torch.Size) or isinstance(value, PackedSequence)


def _contents(value, visited=None):
    """What is in a container that keeps its identity, by name; None where it cannot be seen.

    A container is a list, a mapping, a dataclass, or any object of a class written in Python that
    has nothing but numbers, tensors and such containers in its attributes, as caches do.
    """
    if type(value) is list:
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return dict(value)
    if hasattr(type(value), "__dataclass_fields__"):
        own = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
        return {**own, **getattr(value, "__dict__", {})}
    if not is_object(value):
        return None
    visited = {} if visited is None else visited
    if id(value) not in visited:
        visited[id(value)] = value
        for leaf in tree.tree_leaves(vars(value)):
            if not isinstance(leaf, PLAIN) and _contents(leaf, visited) is None:
                return None
    return dict(vars(value))


def _slots(value):
    """The fields of a dataclass that are not in its ``__dict__``, even where it has one."""
    kind = type(value)
    fields = getattr(kind, "__dataclass_fields__", ())
    return [name for name in fields if inspect.ismemberdescriptor(getattr(kind, name, None))]


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
    else:  # frozen dataclasses, too
        contents = dict(contents)
        for name in _slots(value):
            if name in contents:
                object.__setattr__(value, name, contents.pop(name))
        if hasattr(value, "__dict__"):
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
        if isinstance(leaf, torch.Size):
            flat += leaf
            makers.append(functools.partial(_sizes, len(leaf)))
            inside.append((torch.Size, len(leaf)))
        elif contents is None:
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


def _sizes(count, values):
    return torch.Size([int(size) for size in itertools.islice(values, count)])


def _refilled(value, names, rebuild, values):
    return set_contents(value, dict(zip(names, rebuild(values))))


# Rows -----------------------------------------------------------------------------------------


def rows_of(tensor, dim, rows):
    """These rows of a tensor that has them in a dimension, in this order."""
    if isinstance(rows, range):
        return tensor.narrow(dim, rows.start, len(rows))
    return tensor.index_select(dim, torch.tensor(rows, device=tensor.device))


class DividedArguments:
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
        """The value for a leaf, or a copy where the call may change it in place."""
        return value.clone() if id(leaf) in self.state else value

    def restore(self):
        """Give all containers what was in them."""
        for each, contents in self.contents:
            set_contents(each, contents)

    @contextlib.contextmanager
    def given(self, leaves):
        """Within, the containers have these leaves: what a call is given, ``args, kwargs``."""
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
        """What was passed, where anything in its containers is not as it was; else nothing."""
        leaves, _, described = flatten(self.passed)
        before, _, described_before = self.before
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        same = described == described_before and are_same(leaves, before)
        return () if same and all(self.own(leaf) is not leaf for leaf in tensors) else self.passed

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


#: How a call's arguments are cut: ``rows``, for each leaf the dimension of its rows or None; and
#: what is cut of what the model keeps, see ``kept_rows``.
Layout = collections.namedtuple("Layout", "rows cuts kept")


def layout(arguments, dim, dims):
    """Cut whatever has as many rows as the first tensor.

    Arguments:
        dim: where the first tensor has them.
        dims: where others may, the likeliest first.

    Returns:
        A layout, or None where no argument has rows.
    """
    sizes = [size(leaf, dim) for leaf in arguments.leaves]
    rows = next((each for each in sizes if each is not None), None)
    if not rows:
        return None
    first = sizes.index(rows)
    cuts = [_cut_of(leaf, rows, dims) for leaf in arguments.leaves]
    return Layout(rows, (*cuts[:first], dim, *cuts[first + 1 :]), ())


def _cut_of(leaf, rows, dims):
    """The dimension of the rows, if it has any. Masks have them first."""
    dims = sorted(dims) if getattr(leaf, "dtype", None) is torch.bool else dims
    return next((dim for dim in dims if size(leaf, dim) == rows), None)


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
    """What to try: the dimension of the rows, and those of hidden states, masks and lengths.

    A batch of two rows, say, has as many as there are hidden states of two layers.
    """
    own = declared(model)
    found = [(0, (0, 1)), (0, (1, 0)), (1, (1, 0))]
    if own is not None:
        return [choice for choice in found if choice[0] == own]
    inside = any(declared(part) is not None for part in model.modules())
    return found if inside else [(0, (0,))]


# What modules compute without a trace ----------------------------------------------------------


def generators():
    """torch's own generators of random numbers, by device; those of GPUs once CUDA has started."""
    found = {f"cuda:{index}": each for index, each in enumerate(torch.cuda.default_generators)}
    return dict(found, cpu=torch.default_generator)


def random_numbers():
    """A context after which the random numbers that a model may draw are those from now on."""
    afterwards = _verification.random_numbers()
    for generator in generators().values():
        afterwards.callback(generator.set_state, generator.get_state())
    return afterwards


def evaluating(parts):
    """A context in which modules drop nothing and normalise with their averages."""
    afterwards = contextlib.ExitStack()
    for part in parts:
        if part.training:
            part.training = False
            afterwards.callback(setattr, part, "training", True)
    return afterwards


def is_users(module):
    """Whether torch has not made a module: the forward of such may set anything."""
    return not type(module).__module__.startswith("torch.nn")
