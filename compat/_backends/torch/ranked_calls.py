"""The call of a model that trains together with the other ranks, of whatever kind the model is."""

import functools
import weakref

import torch
from torch._C import _functorch
from torch.nn.utils.rnn import PackedSequence

from ... import errors
from ..._ranks import checksum, keras_model
from ..._runtime import patching, work
from . import gradient_exchange
from .arguments import declared, first_batch, rows_declared
from .tensors import are_same, to_numpy


class RankedCall(keras_model.RankedMethod):
    """The ``call`` or ``forward`` of a model that trains together with the other ranks.

    Deep copies of a model share it.
    """

    def __init__(self, engine):
        super().__init__(engine)
        self.exchanges = weakref.WeakKeyDictionary()  # model -> its exchange
        self.is_differentiated = False  # by torch.func, as a warning told
        self.is_alone = False

    def exchange(self, model):
        if model not in self.exchanges:
            self.exchanges[model] = gradient_exchange.Exchange(self.engine, self, model)
        return self.exchanges[model]

    def alone(self):
        """Return a context in which a model trains by itself."""
        return patching.replaced(self, is_alone=True)

    def invoke(self, model, *args, **kwargs):
        batch = first_batch((args, kwargs))
        if self.is_alone or self.is_only_traced(model, batch):
            return self.plain(model)(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.count(model, self.rows_given(model, batch))
            return self.plain(model)(*args, **kwargs)
        in_function = _functorch.maybe_current_level() is not None  # in one of torch.func
        if in_function and any(map(_functorch.is_gradtrackingtensor, model.parameters())):
            self.warn_of_function(model)
            return self.plain(model)(*args, **kwargs)
        exchange = self.start(model)
        exchange.look()
        result, rows = self.run(model, batch, args, kwargs)
        self.count(model, rows)
        if rows is not None:
            exchange.rows.forward(rows, result)
        return result

    def note_unreached(self, model, name):
        """Note that torch did not call what was put in the place of one of its functions."""
        self.engine.unreached[name] = None  # which a ``RanksCheck`` reports

    def warn_of_function(self, model):
        """Say what ``torch.func.grad()`` or its like gives, which differentiates by parameters."""
        if not self.is_differentiated and self.engine.place.rank == 0:
            errors.warn(
                f"Gradients of the parameters of {type(model).__name__} that torch.func computes "
                "are those of each rank's own rows. Before you update parameters with them, "
                "average them over the ranks with torch.distributed.all_reduce(), or use "
                "loss.backward(), whose gradients are averaged."
            )
        self.is_differentiated = True

    def rows_given(self, model, batch):
        """Return the rows of a batch, or None where they are not known."""
        if isinstance(batch, PackedSequence) or declared(model) is not None:
            rows = rows_declared(model, batch)
            return 1 if rows is None and batch is not None else rows  # without a batch
        return None if batch is None else int(batch.shape[0])

    def count(self, model, rows):
        work.count([""], None if rows is None else [rows], torch.is_grad_enabled())

    def has_exchanged(self, model, rows):
        """Act upon the exchange of a backward pass, in which this rank had so many rows."""

    def run(self, model, batch, args, kwargs):
        """Return the model's own result, and its rows."""
        return self.plain(model)(*args, **kwargs), self.rows_given(model, batch)

    def start(self, model):
        """Take rank 0's weights, wherever there are other ones than before.

        Returns:
            The exchange, which notes its parameters and running statistics.
        """
        parameters, exchange = self.parameters(model), self.exchange(model)
        exchange.settled = are_same(parameters, exchange.hooked)
        if exchange.weights is None or not exchange.settled:
            weights = self.weights_made(model)
            if weights != exchange.weights:
                exchange.weights = weights
                self.same_start(model)
        if not exchange.settled:
            exchange.hook(parameters)
            exchange.note(self.averaged(model), lambda tensor: tensor.detach().clone())
        return exchange

    def verify(self, model, when):
        """Compare the model's variables on all ranks. See ``_ranks.checksum.verify``."""
        for named, *causes in self.verified(model):
            names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
            if named or not causes:  # another rank's model may have variables: that is an error
                write, arrays = functools.partial(_set, tensors), map(to_numpy, tensors)
                checksum.verify(self.engine, names, list(arrays), write, when, *causes)


@torch.no_grad()
def _set(tensors, place, value):
    tensors[place].copy_(torch.as_tensor(value))
