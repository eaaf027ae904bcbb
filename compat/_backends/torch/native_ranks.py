"""torch modules as one of several ranks: their forward, and their buffers."""

import contextlib
import weakref

import torch
from torch.nn.parameter import is_lazy

from ... import errors
from ..._ranks import data_samples
from ..._runtime import usage
from . import optimizer_steps, ranked_buffers
from .arguments import declared, rows_declared
from .native import ForwardMethod
from .ranked_calls import RankedCall

# The causes of different buffers.
_BUFFERS = (
    "Each rank computes this buffer from its own rows; ranks merge what forward() sets buffers to, "
    "unless it calls torch.distributed by itself. Sum or average the buffer by "
    "torch.distributed.all_reduce(), or, if it is each rank's own, register it with "
    "persistent=False."
)


class RankedForward(ForwardMethod, RankedCall):
    """The ``forward`` of a torch module."""

    def run(self, model, batch, args, kwargs):
        """Return the result, and rows as recurrent layers and transformers within count them."""
        if batch is not None:
            self.buffers_of(model).forward(model, self.plain(model), args, kwargs)
        parts = [part for part in model.modules() if declared(part) is not None]
        if not parts or model in parts or not isinstance(batch, torch.Tensor):
            return super().run(model, batch, args, kwargs)
        sizes_within = []

        def note(module, args, kwargs):
            sizes_within.append(rows_declared(module, (list(args) + list(kwargs.values()))[0]))

        with contextlib.ExitStack() as stack:
            for part in parts:
                hook = part.register_forward_pre_hook(note, with_kwargs=True)
                stack.callback(hook.remove)
            result = self.computed(model, args, kwargs)
        counts = [size for size in sizes_within if size is not None]
        sizes = [int(size) for size in batch.shape[:2]]
        equal = [size for size in sizes if size in counts]
        multiple = [size for size in sizes if size and all(n % size == 0 for n in counts)]
        return result, (equal + multiple + sizes)[0]

    def __init__(self, engine):
        super().__init__(engine)
        self.buffers = weakref.WeakKeyDictionary()  # model -> its ``RankedBuffers``

    def buffers_of(self, model: torch.nn.Module) -> ranked_buffers.RankedBuffers:
        """Return the buffers of a model that are merged."""
        if model not in self.buffers:
            self.buffers[model] = ranked_buffers.RankedBuffers(self.engine)
        return self.buffers[model]

    def has_exchanged(self, model, rows):
        """Merge buffers, when a pass of so many rows has ended."""
        self.buffers_of(model).merge(rows)

    def exchange(self, model):
        """Return the exchange of a model, whose first optimizer step is checked."""
        if model not in self.exchanges:
            optimizer_steps.watch(super().exchange(model))
        return super().exchange(model)

    def note_unreached(self, model, name):
        """Report that torch did not call the replacement of one of its functions."""
        exchange = self.exchange(model)
        if name not in exchange.warned:
            exchange.warned.add(name)
            text = f"{self.engine.place} did not do all that ranks depend on. "
            text += usage.unreached([name])
            usage.report(type(model).__name__, "the first training step", "backward", text)

    def weights_made(self, model):
        """Return how many parameters the model has; None while some are lazy."""
        parameters = list(model.parameters())
        return None if any(is_lazy(parameter) for parameter in parameters) else len(parameters)

    def same_start(self, model):
        """Take rank 0's parameters and buffers. An optimizer has no state before a step."""
        state = model.state_dict()
        tensors = {n: value for n, value in state.items() if isinstance(value, torch.Tensor)}
        chief = self.engine.broadcast({name: tensor.cpu() for name, tensor in tensors.items()})
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in chief.items()}:
            raise errors.ranks_differ(self.engine.place, type(model).__name__)
        state.update(chief)
        model.load_state_dict(state)

    def verify(self, model, when):
        """Compare the ranks' data, and the model's variables."""
        place = self.engine.place
        data_samples.compare(self.engine, self.engine.gather(data_samples.numbers(place)))
        super().verify(model, when)

    def parameters(self, model):
        """List the parameters whose gradients are exchanged."""
        return [p for p in model.parameters() if p.requires_grad and not is_lazy(p)]

    def modules(self, model):
        """Return the modules within a module."""
        return model.modules()

    def averaged(self, model):
        """List running statistics. Their update does not change their version."""
        kind = torch.nn.modules.batchnorm._NormBase
        parts = [part for part in model.modules() if isinstance(part, kind)]
        tensors = [tensor for part in parts for tensor in (part.running_mean, part.running_var)]
        return [tensor for tensor in tensors if tensor is not None and not is_lazy(tensor)]

    def warn_of_means(self, model, exchange):
        """Warn of nothing: running statistics of torch's layers are means."""

    def verified(self, model):
        """List parameters and buffers; buffers that are not saved belong to the rank."""
        saved = model.state_dict()
        buffers = [
            (name, buffer)
            for name, buffer in model.named_buffers()
            if name in saved and buffer.layout is torch.strided and not buffer.is_quantized
        ]
        return [(list(model.named_parameters()),), (buffers, _BUFFERS)]
