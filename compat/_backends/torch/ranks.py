"""torch as one of several ranks: torch.distributed carries the gradients.

torch's own ``DistributedDataParallel`` wraps the model in another one and weights all ranks
alike. Here the model stays itself: its ``call`` or ``forward`` notes how many rows it was given,
and when autograd has finished a backward pass, the gradients of all ranks become their mean
weighted by those rows (``gradient_exchange``).
"""

from typing import Any

from ... import _keras
from ..._ranks import keras_model
from ..._ranks.engines.torch_distributed import TorchDistributed
from . import activation_hooks, backward_passes, gradient_exchange, ranked_batch_norm
from .keras_ranks import RankedKerasCall, RankedTorchTestStep, RankedTrainStep
from .keras_replicas import refuse_torch_compile
from .native_ranks import RankedForward


def distribute(model: Any, place: Any) -> Any:
    """Make a model one of several ranks', in place; again, it changes nothing."""
    refuse_torch_compile(model)
    engine = TorchDistributed.join(place)
    backward_passes.follow(ranked_batch_norm.recomputing)
    activation_hooks.follow(gradient_exchange.is_under_way)
    kind = RankedForward if _keras.keras_of(model) is None else RankedKerasCall
    if kind.of(model) is None:
        kind(engine).install(model)
        if kind is RankedKerasCall:
            keras_model.install(model, engine, (RankedTrainStep, RankedTorchTestStep))
    kind.of(model).follow_batch_norm(model)
    kind.of(model).start(model)
    return model
