"""Buffers that the forward pass of a torch module sets, merged over all ranks' rows.

How their values are merged is found by a trial (see ``_ranks.state``) before the first forward
pass. They are merged when the backward pass has ended. Left alone are running statistics of
torch's own layers, whose mean is exchanged with the gradients, and buffers that are not saved.
"""

import contextlib
from typing import Any, List, Optional

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..._ranks import merging
from ..._ranks import state as rank_state
from .arguments import first_batch
from .ranked_state import exchanged
from .tensors import to_numpy

_STEADY = torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase


class RankedBuffers:
    """The buffers of one module that are merged, and how."""

    def __init__(self, engine):
        self.engine = engine
        self.tried: "List[Any]" = []  # pairs of a module and a name in it
        self.merges: "List[merging.Merge]" = []
        # Their values before the forward passes since the last merge; and how many these are.
        self.before: "Optional[List[torch.Tensor]]" = None
        self.passes = 0

    def forward(self, model, plain, args, kwargs):
        """Note the values before a forward pass. Before the first one, find their merges."""
        if not model.training:
            return
        tried = _tried(model)
        if tried != self.tried:
            self.tried, self.merges, self.before = tried, [], None
            if tried:
                self._decide(model, plain, args, kwargs)
        if self.before is None and any(merge.is_exchanged for merge in self.merges):
            self.before, self.passes = [tensor.detach().clone() for tensor in self._values()], 0
        self.passes += 1

    def merge(self, rows):
        """Set the buffers to one process's values: a backward pass of so many rows has ended."""
        if not any(merge.is_exchanged for merge in self.merges):
            return
        after = [tensor.detach() for tensor in self._values()]
        before, self.before = self.before or after, None
        merges = [
            merging.Merge(merge.placement, merge.is_float, merge.decay**self.passes)
            for merge in self.merges
        ]
        for tensor, value in zip(after, exchanged(self.engine, merges, before, after, rows)):
            tensor.data.copy_(value)  # no change for autograd

    def _values(self):
        return [module._buffers[name] for module, name in self.tried]

    def _decide(self, model, plain, args, kwargs):
        rows = int(first_batch((args, kwargs)).shape[0])
        held = [
            (kept, name, tensor, tensor.detach().clone())
            for module in model.modules()
            for kept in (module._buffers, module._parameters)
            for name, tensor in kept.items()
            if tensor is not None
        ]

        def run(numbers, values):
            def chosen(leaf):
                has_rows = isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,)
                return leaf[list(numbers)] if has_rows else leaf

            some_args, some_kwargs = _pytree.tree_map(chosen, (args, kwargs))
            try:
                for tensor, value in zip(self._values(), values):
                    tensor.copy_(torch.as_tensor(value))
                plain(*some_args, **some_kwargs)
                return [to_numpy(tensor).copy() for tensor in self._values()]
            finally:
                for kept, name, tensor, value in held:
                    kept[name] = tensor
                    tensor.data.copy_(value)

        names = dict((id(buffer), name) for name, buffer in model.named_buffers())
        values = self._values()
        state = rank_state.StepState(
            self.engine,
            [names[id(tensor)] for tensor in values],
            [tensor.dtype for tensor in values],
            range(len(values)),
        )
        values = [to_numpy(tensor).copy() for tensor in values]
        with _steady(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                with _Collectives():
                    run(range(rows), values)
            except _Collectives.Found:
                return  # the forward pass itself sums over all ranks
            except Exception:
                pass  # ``decide`` meets it again, and reports it
            state.decide(rows, values, run)
        self.merges = state.merges


@contextlib.contextmanager
def _steady(model):
    """Return the context of a trial: dropout and normalization are those of inference."""
    changed = [m for m in model.modules() if isinstance(m, _STEADY) and m.training]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True


class _Collectives(TorchDispatchMode):
    """Context in which an operation of torch.distributed raises ``Found``."""

    class Found(Exception):
        """It was called."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            raise self.Found
        return function(*args, **kwargs or {})


def _tried(model):
    """List the saved buffers of custom modules, as pairs of a module and a name."""
    return [
        (module, name)
        for module in model.modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name, tensor in module._buffers.items()
        if tensor is not None
        and name not in module._non_persistent_buffers_set
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_complex()
    ]
