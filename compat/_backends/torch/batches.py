"""What of a call's arguments is data, and in which dimension it has the rows of the batch.

Rows come first in torch, except in its recurrent layers and transformers: their first dimension is
time unless they are made with ``batch_first=True``, and hidden states have the rows second always.
"""

import copy
import inspect
from collections.abc import MutableMapping

import torch
from torch.nn.utils.rnn import PackedSequence

from ... import errors

tree = torch.utils._pytree

# Arguments that torch's own attention takes one of for all rows.
MASKS = ("attn_mask", "src_mask", "tgt_mask", "memory_mask")


# Containers -----------------------------------------------------------------------------------


def _is_leaf(value):
    return isinstance(value, PackedSequence)


def _contents(value):
    """What is in a container that torch does not look into, or None."""
    if hasattr(type(value), "__dataclass_fields__"):
        return {name: getattr(value, name) for name in type(value).__dataclass_fields__}
    if isinstance(value, MutableMapping):
        return dict(value)
    return None


def _with_contents(value, contents):
    value = copy.copy(value)
    for key, content in contents.items():
        if isinstance(value, MutableMapping):
            value[key] = content
        else:
            object.__setattr__(value, key, content)  # frozen ones, too
    return value


def flatten(value):
    """The leaves of a nested value, a function that nests others like them, and a description."""
    leaves, spec = tree.tree_flatten(value, is_leaf=_is_leaf)
    flat, parts, inside = [], [], []
    for leaf in leaves:
        contents = None if isinstance(leaf, (torch.Tensor, PackedSequence)) else _contents(leaf)
        if contents is None:
            flat.append(leaf)
            parts.append((1, None))
        else:
            found, rebuild, described = flatten(contents)
            flat += found
            parts.append((len(found), lambda new, r=rebuild, v=leaf: _with_contents(v, r(new))))
            inside.append((type(leaf), described))

    def unflatten(values):
        values, nested = list(values), []
        for count, rebuild in parts:
            mine, values = values[:count], values[count:]
            nested.append(mine[0] if rebuild is None else rebuild(mine))
        return tree.tree_unflatten(nested, spec)

    return flat, unflatten, (spec, inside)


# Rows -----------------------------------------------------------------------------------------


class Cut:
    """Where an argument has the rows: dimension ``dim``, ``inner`` neighbours for each."""

    def __init__(self, dim, inner=1):
        self.dim = dim
        self.inner = inner

    def rows(self, value, start, stop):
        return value.narrow(self.dim, start * self.inner, (stop - start) * self.inner)

    def chosen(self, value, rows):
        """These rows, in this order."""
        index = [row * self.inner + offset for row in rows for offset in range(self.inner)]
        return value.index_select(self.dim, torch.tensor(index, device=value.device))


class Packed:
    """Sequences packed into one tensor, cut by sequences."""

    inner = 1
    dim = 0

    def rows(self, value, start, stop):
        return self.chosen(value, range(start, stop))

    def chosen(self, value, rows):
        padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(value, batch_first=True)
        rows = torch.tensor(list(rows))
        return _pack(padded[rows.to(padded.device)], lengths[rows], value)


def _pack(padded, lengths, like):
    return torch.nn.utils.rnn.pack_padded_sequence(
        padded, lengths, batch_first=True, enforce_sorted=like.sorted_indices is None
    )


def cat_packed(values, home):
    """The sequences of all replicas as one."""
    pairs = [
        torch.nn.utils.rnn.pad_packed_sequence(value.to(home), batch_first=True) for value in values
    ]
    longest = max(padded.shape[1] for padded, _ in pairs)
    rows = []
    for padded, _ in pairs:
        missing = longest - padded.shape[1]
        rest = padded.new_zeros((padded.shape[0], missing) + padded.shape[2:])
        rows.append(torch.cat([padded, rest], 1))
    return _pack(torch.cat(rows), torch.cat([lengths for _, lengths in pairs]), values[0])


def cat_rows(values, dim, outer, home):
    """The rows of all replicas together, ``outer`` times in dimension ``dim``."""
    values = [value.to(home) for value in values]
    if outer == 1:
        return torch.cat(values, dim)
    parts = [value.unflatten(dim, (outer, -1)) for value in values]
    return torch.cat(parts, dim + 1).flatten(dim, dim + 1)


class Arguments:
    """The arguments of one call.

    Attributes:
        leaves: the values in them, whatever they are nested in.
        names: for each leaf, the parameter of ``function`` that it came by.
        key: what two calls have in common that are alike, but for the numbers.
    """

    def __init__(self, names, args, kwargs, convert=None):
        self.count = len(args)
        self.keywords = list(kwargs)
        self.leaves, self.names, self.parts = [], [], []
        key = []
        named = list(zip(names(args), args)) + list(kwargs.items())
        for name, value in named:
            leaves, unflatten, spec = flatten(value)
            if convert is not None:
                leaves = [convert(leaf) for leaf in leaves]
            self.leaves += leaves
            self.names += [name] * len(leaves)
            self.parts.append((len(leaves), unflatten))
            key.append((name, spec, [_kind(leaf) for leaf in leaves]))
        self.key = str(key)

    def with_leaves(self, leaves):
        """Arguments nested like these: ``args, kwargs``."""
        leaves, values = list(leaves), []
        for count, unflatten in self.parts:
            values.append(unflatten(leaves[:count]))
            leaves = leaves[count:]
        return values[: self.count], dict(zip(self.keywords, values[self.count :]))


def _kind(leaf):
    if isinstance(leaf, torch.Tensor):
        return leaf.dim()
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf).__name__


def names_of(function):
    """A function that names positional arguments as the parameters of ``function``."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            parameters.append(parameter.name)
    return lambda args: (parameters + [None] * len(args))[: len(args)]


class Layout:
    """How a call's arguments are cut: ``rows`` of them, and a ``Cut`` or None for each leaf."""

    def __init__(self, rows, cuts):
        self.rows = rows
        self.cuts = cuts

    def cut(self):
        """The numbers of the arguments that are cut."""
        return [number for number, cut in enumerate(self.cuts) if cut is not None]

    def without(self, whole):
        """The layout in which these arguments are not cut."""
        if not whole:
            return self
        cuts = [None if number in whole else cut for number, cut in enumerate(self.cuts)]
        return Layout(self.rows, cuts)

    def pattern(self):
        return tuple(cut and (cut.dim, cut.inner) for cut in self.cuts)


def layout(arguments, dim=0, states=None):
    """Cut whatever has as many rows as the first tensor, in dimension ``dim``.

    Arguments:
        states: whether tensors of three dimensions that have them in the second, hidden states,
            are cut there: "all", or "other" ones, that do not have as many in ``dim``, too.

    Returns:
        A layout, or None where no argument has rows.
    """
    rows = None
    for leaf in arguments.leaves:
        rows = _size(leaf, dim)
        if rows is not None:
            break
    if not rows:
        return None
    cuts = []
    for leaf, name in zip(arguments.leaves, arguments.names):
        cut = None
        if isinstance(leaf, PackedSequence):
            cut = Packed()
        elif not isinstance(leaf, torch.Tensor) or name in MASKS and leaf.dim() == 2:
            pass
        elif (
            states
            and leaf.dim() == 3
            and leaf.shape[1] == rows
            and (states == "all" and cuts or _size(leaf, dim) != rows)
        ):
            cut = Cut(1)
        elif _size(leaf, dim) == rows:
            cut = Cut(dim)
        cuts.append(cut)
    return Layout(rows, cuts)


def _size(leaf, dim):
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
        return leaf.shape[dim]
    return None


# Modules that declare where the rows are --------------------------------------------------------


def declared(module):
    """The dimension of the rows that one of torch's modules declares; None for any other."""
    nn = torch.nn
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention, nn.Transformer)):
        return 0 if module.batch_first else 1
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return declared(module.self_attn)
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
        return declared(module.layers[0])
    return None


def declared_layout(module, arguments):
    """The layout of a call of a module that declares one; None for a call without a batch."""
    dim = declared(module)
    first = arguments.leaves[0]
    if isinstance(first, torch.Tensor) and first.dim() == 2:
        return None
    rows = _size(first, dim)
    cuts = []
    for leaf, name in zip(arguments.leaves, arguments.names):
        cut = None
        if isinstance(leaf, PackedSequence):
            cut = Packed()
        elif not isinstance(leaf, torch.Tensor):
            pass
        elif name.endswith("key_padding_mask"):
            cut = Cut(0)
        elif name in MASKS or name == "mask":
            cut = Cut(0, leaf.shape[0] // rows) if leaf.dim() == 3 else None
        else:
            cut = Cut(1 if name == "hx" else dim)
        cuts.append(cut)
    return Layout(rows, cuts)


class Seen:
    """What reaches the modules within a model that declare a dimension for the rows.

    Within its context a replica of ``rows`` rows runs; afterwards ``fits`` says whether each of
    them found so many (or as many for each) where it declares them.
    """

    def __init__(self, model, rows):
        self.rows = rows
        self.model = model
        self.sizes = []

    def __enter__(self):
        self.handles = [
            part.register_forward_pre_hook(self.note, with_kwargs=True)
            for part in self.model.modules()
            if part is not self.model and declared(part) is not None
        ]
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()

    def note(self, module, args, kwargs):
        given = list(args) + list(kwargs.values())
        first = given[0]
        if isinstance(first, torch.Tensor) and first.dim() == 2:
            self.sizes.append(None)  # a sequence without a batch
        else:
            self.sizes.append(_size(first, declared(module)))
        if isinstance(module, torch.nn.RNNBase) and len(given) > 1 and given[1] is not None:
            states = given[1] if isinstance(given[1], tuple) else (given[1],)
            self.sizes += [_size(state, 1) for state in states if state.dim() == 3]

    def fits(self):
        return all(size is not None and size % self.rows == 0 for size in self.sizes)


def has_declared(model):
    """Whether a module within ``model`` declares a dimension for the rows."""
    return any(part is not model and declared(part) is not None for part in model.modules())


# What to try: where the rows are, and where those of hidden states (see ``layout``).
CHOICES = ((0, "other"), (0, "all"), (1, "other"))


def telling_rows(arguments):
    """A number of rows that no other size in the arguments can be taken for."""
    tensors = [leaf for leaf in arguments.leaves if isinstance(leaf, torch.Tensor)]
    sizes = {size for tensor in tensors for size in tensor.shape}
    numbers = (3, 2, 5, 7, 11, 13)
    fitting = [n for n in numbers if all(size % n for size in sizes)]
    return (fitting or [n for n in numbers if n not in sizes] or [17])[0]


def no_layout(model, arguments):
    """The error for a model whose sequences have the rows nowhere that can be found."""
    parts = [
        "{} ({})".format(name, type(part).__name__)
        for name, part in model.named_modules()
        if part is not model and declared(part) == 1
    ] or [
        "{} ({})".format(name, type(part).__name__)
        for name, part in model.named_modules()
        if part is not model and declared(part) is not None
    ]
    shapes = [tuple(leaf.shape) for leaf in arguments.leaves if isinstance(leaf, torch.Tensor)]
    return errors.UnsupportedError(
        "parallelize() cannot tell which dimension of the arguments of {} has the rows of the "
        "batch: given tensors of the shapes {}, neither their first nor their second dimension "
        "reaches {} as the rows of its batch. Make such layers with batch_first=True and pass "
        "the model rows first, or parallelize them alone.".format(
            type(model).__name__, ", ".join(map(str, shapes)), ", ".join(parts[:3])
        )
    )
