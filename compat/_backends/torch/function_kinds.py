"""Kinds of torch's functions, by their names."""

import inspect
import re

import torch

DROPOUTS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "feature_dropout", "native_dropout", "rrelu", "rrelu_",
)  # fmt: skip
RANDOM = re.compile(
    "(rand|dropout|bernoulli|normal_?$|uniform_|multinomial|exponential_|rrelu|poisson$)"
)
SORTING = ("index_add", "scatter_add", "scatter_reduce", "index_reduce")
#: What is known of a tensor without a look at its values.
METADATA = frozenset(
    "dim ndimension stride element_size storage_offset data_ptr untyped_storage storage type "
    "get_device result_type can_cast dim_order register_hook retain_grad __hash__ names backward "
    "__dir__ set_ share_memory_ record_stream broadcast_shapes has_names _nnz sparse_dim dense_dim "
    "register_post_accumulate_grad_hook __repr__ __format__ __reduce_ex__ __deepcopy__ "
    "__setstate__ get_default_dtype promote_types __get__ __set__ __delete__".split()
) | {name for name, kind in vars(torch._C.TensorBase).items() if inspect.isgetsetdescriptor(kind)}


def differs(operator, per, number, sizes, total):
    """Whether a comparison has another result for a part of the rows than for all of them."""
    return any(operator(per * size, number) != operator(per * total, number) for size in sizes)


def targets_weight(input, target, weight=None, ignore_index=-100, **_):
    """What the mean of a loss over classes was divided by."""
    if target.is_floating_point():
        return target.numel()
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return (weight.detach()[target.clamp(min=0)] * counted).sum()
