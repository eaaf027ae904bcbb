"""Tensors: found in nested values, compared, copied, handed to numpy."""

import operator

import torch

# How deep tensors are looked for in the attributes of objects.
_DEPTH = 3


def first_batch(arguments):
    """The first tensor in a call's arguments that has rows, or packed sequences, or None."""
    packed = torch.nn.utils.rnn.PackedSequence
    leaves = torch.utils._pytree.tree_leaves(arguments, is_leaf=lambda v: isinstance(v, packed))
    found = (each for v in leaves for each in ([v] if isinstance(v, packed) else tensors_in(v)))
    return next((each for each in found if isinstance(each, packed) or each.dim()), None)


def tensors_in(value, depth=_DEPTH):
    """The tensors in nested tuples, lists, dictionaries, and attributes of other objects."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (str, bytes, int, float, type, torch.nn.Module)):
            parts = getattr(leaf, "__dict__", None) or {
                name: getattr(leaf, name, None) for name in getattr(leaf, "__slots__", ())
            }
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
