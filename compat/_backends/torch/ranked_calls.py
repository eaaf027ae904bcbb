"""The call of a model that is one of several ranks', for both kinds of models."""

import functools
import weakref
from typing import Any, Iterable, List, Optional

import torch
from torch._C import _functorch
from torch.nn.utils.rnn import PackedSequence

from ... import errors
from ..._ranks import checksum, keras_model
from ..._runtime import patching, synchronized, work
from . import gradient_exchange, ranked_batch_norm
from .arguments import declared, first_batch, rows_declared
from .tensors import are_same, to_numpy


class RankedCall(keras_model.RankedMethod):
    """The ``call`` or ``forward`` of a model that is one of several ranks'.

    Deep copies of a model share it.
    """

    def __init__(self, engine):
        super().__init__(engine)
        self.exchanges = weakref.WeakKeyDictionary()  # model -> its exchange
        self.is_differentiated = False  # by torch.func, as a warning has said
        self.is_alone = False

    # What kinds of models differ in -----------------------------------------------------------

    def is_only_traced(self, model: Any, batch: Any) -> bool:
        """Return whether nothing is computed: shapes or a graph are inferred."""
        raise NotImplementedError

    def parameters(self, model: Any) -> "List[torch.Tensor]":
        """List the parameters whose gradients are exchanged."""
        raise NotImplementedError

    def averaged(self, model: Any) -> "List[torch.Tensor]":
        """List the running statistics whose mean is exchanged with the gradients."""
        raise NotImplementedError

    def modules(self, model: Any) -> "Iterable[torch.nn.Module]":
        """Return the layers and modules within a model."""
        raise NotImplementedError

    def follow_batch_norm(self, model: Any) -> None:
        """Have layers that ask for it normalize by all ranks' samples."""
        ranked_batch_norm.follow(self.exchange(model), model, self.modules(model))

    def verified(self, model: Any) -> "List[Any]":
        """List the variables that are the same on all ranks, by kind, and causes of differences."""
        raise NotImplementedError

    def weights_made(self, model: Any) -> "Optional[int]":
        """Return how many weights the model has; None: they are not made yet."""
        raise NotImplementedError

    def same_start(self, model: Any) -> None:
        """Take rank 0's weights."""
        raise NotImplementedError

    def warn_of_means(self, model: Any, exchange: gradient_exchange.Exchange) -> None:
        """Warn of user-defined variables that the exchange has averaged."""
        raise NotImplementedError

    # The call ---------------------------------------------------------------------------------

    def exchange(self, model: Any) -> gradient_exchange.Exchange:
        """Return the exchange of a model, which the first call makes."""
        if model not in self.exchanges:
            self.exchanges[model] = gradient_exchange.Exchange(self.engine, self, model)
        return self.exchanges[model]

    def alone(self):
        """Return a context in which a model trains by itself."""
        return patching.replaced(self, is_alone=True)

    def invoke(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model, and note its rows for the backward pass."""
        batch = first_batch((args, kwargs))
        if self.is_alone or self.is_only_traced(model, batch):
            return self.plain(model)(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.count(model, self.rows_of_batch(model, batch))
            return self.computed(model, args, kwargs)
        in_function = _functorch.maybe_current_level() is not None  # in one of torch.func
        if in_function and any(map(_functorch.is_gradtrackingtensor, model.parameters())):
            self.warn_of_function(model)
            return self.plain(model)(*args, **kwargs)
        exchange = self.start(model)
        exchange.look()
        exchange.first_batch.see((args, kwargs))
        result, rows = self.run(model, batch, args, kwargs)
        if not exchange.settled:
            exchange.hook(self.parameters(model))  # also those that the pass has made
        self.count(model, rows)
        if rows is not None:
            exchange.rows.forward(rows, result, exchange.is_within_call())
        return result

    def note_unreached(self, model, name):
        """Note that torch did not call the replacement of one of its functions."""
        self.engine.unreached[name] = None  # which a ``RanksCheck`` reports

    def warn_of_function(self, model):
        """Warn that gradients by ``torch.func`` are those of the rank's rows alone."""
        if not self.is_differentiated and self.engine.place.rank == 0:
            errors.warn(
                f"Gradients of the parameters of {type(model).__name__} that torch.func computes "
                "are those of each rank's own rows. Before you update parameters with them, "
                "average them over the ranks with torch.distributed.all_reduce(), or use "
                "loss.backward(), whose gradients are averaged."
            )
        self.is_differentiated = True

    def rows_of_batch(self, model: Any, batch: Any) -> "Optional[int]":
        """Return the number of rows of a batch, or None if it is unknown."""
        if isinstance(batch, PackedSequence) or declared(model) is not None:
            rows = rows_declared(model, batch)
            return 1 if rows is None and batch is not None else rows  # without a batch
        return None if batch is None else int(batch.shape[0])

    def count(self, model: Any, rows: "Optional[int]") -> None:
        """Count a batch as computed."""
        work.count([""], None if rows is None else [rows], torch.is_grad_enabled())

    def has_exchanged(self, model, rows):
        """Handle the end of an exchange, in whose pass this rank had so many rows."""

    def run(self, model, batch, args, kwargs):
        """Return the result of the plain model, and the number of rows."""
        return self.computed(model, args, kwargs), self.rows_of_batch(model, batch)

    def computed(self, model, args, kwargs):
        """Return the result of the plain model."""
        return ranked_batch_norm.call(self.exchange(model), model, self.plain(model), args, kwargs)

    def start(self, model):
        """Take rank 0's weights, if the model has new ones.

        Returns:
            The exchange, which notes its parameters and running statistics.
        """
        parameters, exchange = self.parameters(model), self.exchange(model)
        # A layer of batch normalization may come later, and have no parameters.
        parts = set(map(id, self.modules(model))) if synchronized.is_asked(model) else set()
        exchange.settled = are_same(parameters, exchange.hooked) and parts == exchange.parts
        exchange.parts = parts
        if exchange.weights is None or not exchange.settled:
            weights = self.weights_made(model)
            if weights != exchange.weights:
                exchange.weights = weights
                self.same_start(model)
        if not exchange.settled:
            exchange.hook(parameters)
            self.follow_batch_norm(model)
            exchange.note(self.averaged(model), lambda tensor: tensor.detach().clone())
        return exchange

    def verify(self, model, when):
        """Compare the model's variables on all ranks. See ``_ranks.checksum.verify``.

        The first time the ranks' first batches, too.
        """
        name = getattr(model, "name", None) or type(model).__name__
        self.exchange(model).first_batch.compare(name)
        for named, *causes in self.verified(model):
            names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
            if named or not causes:  # another rank's model may have variables: that is an error
                write, arrays = functools.partial(_set, tensors), map(to_numpy, tensors)
                checksum.verify(self.engine, names, list(arrays), write, when, *causes)


@torch.no_grad()
def _set(tensors, place, value):
    tensors[place].copy_(torch.as_tensor(value))
