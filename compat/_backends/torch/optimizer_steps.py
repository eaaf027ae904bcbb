"""The first optimizer step of each torch module that is one of several ranks.

torch calls a hook after the steps of all optimizers, whatever called a model, and whatever computed
its gradients. At the first one the gradients have to have been exchanged.
"""

import weakref
from typing import Any, List

from torch.optim.optimizer import register_optimizer_step_post_hook

from ... import errors
from ..._runtime import usage

# Exchanges whose first step is to come.
_awaited: "weakref.WeakSet[Any]" = weakref.WeakSet()
_handles: "List[Any]" = []


def watch(exchange: Any) -> None:
    """Check the first optimizer step of an ``Exchange``'s model."""
    if not _handles:
        _handles.append(register_optimizer_step_post_hook(_stepped))
    _awaited.add(exchange)


def _stepped(optimizer, args, kwargs):
    """Check the models of which an optimizer has parameters, in one order on all ranks."""
    if not _awaited:
        return
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for exchange in sorted(_awaited, key=lambda awaited: awaited.number):
        model = exchange.model()
        if model is None or exchange.source.is_alone:
            continue
        parameters = exchange.source.parameters(model)
        if any(id(p) in ids and p.grad is not None for p in parameters):
            _awaited.discard(exchange)
            if not exchange.count:
                _compare(exchange, model, type(optimizer).__name__ + ".step")


def _compare(exchange, model, name):
    """Compare the weights: the script itself may have averaged the gradients.

    Raises:
        RankError: they differ.
    """
    try:
        exchange.source.verify(model, 1)
    except errors.RankError:
        text = f"{exchange.engine.place} exchanged no gradients with the other ranks. "
        text += usage.unreached([exchange.missed_hook(None)])
        usage.report(type(model).__name__, "the first training step", name, text)
        raise
