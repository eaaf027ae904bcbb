"""State of a model: losses that its layers add, and variables, restored for each replica.

Each replica starts from the same state, and the state is set once, to that of one device with the
whole batch. Generators of random numbers advance from replica to replica instead, so that dropout
masks are independent. Moving averages of batch normalization are the mean of those of the replicas,
where it is not synchronized.
Other variables are merged by their placements in a ``Trace`` of the call.
"""

import contextlib
import functools
from typing import Any, Iterable, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..._rows import Placement
from ..._rows.replica_threads import current_turn
from ..._runtime import patching
from . import batch_norm
from .graph import may_be_set


def is_set(variable: "tf.Variable") -> bool:
    """Return whether the function being traced may set the variable."""
    if tf.executing_eagerly():
        return True
    return may_be_set(tf.compat.v1.get_default_graph().capture(variable.handle))


def type_of(handle: "tf.Tensor") -> "tf.DType":
    """Return the type of a variable, by its handle."""
    return tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)


def read(handle: "tf.Tensor") -> "tf.Tensor":
    """Return the value of a variable, by its handle, without the cast of mixed precision."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=type_of(handle))


def is_generator(variable: "tf.Variable") -> bool:
    """Return whether a variable looks like the state of a generator of random numbers.

    Up to TensorFlow 2.3 they have no special name.
    """
    if "StateVar" in variable.name:
        return True
    named = variable.name.split("/")[-1].split(":")[0]
    plain = variable.dtype.name == "int64" and variable.shape.as_list() == [3]
    return plain and not variable.trainable and named == "Variable"


def normalizations(layers: "Iterable[Any]") -> "List[Any]":
    """Return the layers among these that normalize by statistics of each device's shard.

    Renormalization is not among them: it corrects the statistics by averages over all batches, so
    that it matters how a batch is split.
    """

    def is_one(layer):
        named = any(kind.__name__.startswith("BatchNormalization") for kind in type(layer).__mro__)
        # A layer that is not built yet has no average.
        return (named or hasattr(layer, "moving_mean")) and not getattr(layer, "renorm", False)

    return list(filter(is_one, layers))


def averages(layers: "Iterable[Any]") -> "List[tf.Tensor]":
    """Return the handles of the moving averages of layers of batch normalization."""
    names = ("moving_mean", "moving_variance")
    variables = [getattr(layer, name, None) for layer in layers for name in names]
    # A Keras 3 variable has one of TensorFlow's.
    return [getattr(v, "_value", v).handle for v in variables if v is not None]


class ModelState:
    """Losses that layers add, and variables, which are restored after each replica.

    Arguments:
        layers: the Keras layers of the model; TensorFlow 2.0 lists shared ones twice.
        requested: those that are to normalize by the statistics of the whole batch.

    Attributes:
        normalizations: the layers that normalize: each device's shard, or the whole batch.
        synchronized: those of them that normalize the whole batch.
        added: for each loss, the layer to which it was added, and from which it was removed.
        variables, before: those of ``watch``, and their values.
        after: for each replica, the values that it has set.
    """

    def __init__(self, layers: "Iterable[Any]", requested: "Sequence[Any]" = ()) -> None:
        self.layers = list({id(layer): layer for layer in layers}.values())
        self.synchronized = list(filter(batch_norm.is_synchronizable, requested))
        # The others mix rows, like any operation of the whole batch.
        mixing = set(map(id, requested)) - set(map(id, self.synchronized))
        self.normalizations = [n for n in normalizations(self.layers) if id(n) not in mixing]
        self.added: "List[Any]" = []
        self.variables: "Sequence[Tuple[tf.Tensor, Placement]]" = []
        self.before: "List[tf.Tensor]" = []
        self.after: "List[List[tf.Tensor]]" = []
        self._averages: "Sequence[Tuple[tf.Tensor, tf.Tensor]]" = []

    def watch(
        self,
        variables: "Sequence[Tuple[tf.Tensor, Placement]]",
        averages: "Sequence[tf.Tensor]" = (),
    ) -> None:
        """Record the values of variables before the first replica.

        Arguments:
            variables: pairs of the handle of a variable that the call sets, and the placement of
                its new value.
            averages: handles of those that one replica sets for all.
        """
        self.variables = variables
        self.before = self._values()
        self._averages = [(handle, read(handle)) for handle in averages]

    def _values(self):
        return [read(handle) for handle, _ in self.variables]

    def _set(self, values):
        for (handle, _), value in zip(self.variables, values):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    @contextlib.contextmanager
    def replica(self, index: int) -> "Iterator[List[tf.Tensor]]":
        """Surround a replica's call; yield the losses that are added in it.

        Where replicas take turns, what it has set is taken out when another one is to run.
        """
        turn = current_turn()
        suspensions = turn.suspensions if turn else []
        with self._seeded(index, suspensions), self.collected(suspensions) as losses:
            suspensions.append(self._suspended)
            yield losses
        self.after.append(self._values())
        self._set(self.before)

    def _suspended(self):
        values = self._values()
        self._set(self.before)
        return functools.partial(self._set, values)

    @contextlib.contextmanager
    def _seeded(self, index, suspensions):
        """Give seeded layers another seed for each replica, or their masks would repeat.

        Up to TensorFlow 2.3 a layer passes its seed to an operation, whose random numbers start
        from it on every device. Later a layer has a generator, which advances from replica to
        replica.
        """
        further, stack = 104729 * index, contextlib.ExitStack()  # a prime: no neighbour's seed

        def seed_layers():
            for layer in self.layers:
                seed = vars(layer).get("seed")
                if isinstance(seed, int) and hasattr(layer, "_eager_losses"):  # not in Keras 3
                    stack.enter_context(patching.replaced(layer, seed=seed + further))

        def suspended():
            stack.close()
            return seed_layers

        suspensions.append(suspended)
        with stack:
            seed_layers()
            yield

    def restore(self) -> None:
        """Restore all variables."""
        self._set(self.before)
        for handle, before in self._averages:
            tf.raw_ops.AssignVariableOp(resource=handle, value=before)

    def finish(self, merging: "Any") -> None:
        """Set all variables, once, to their values merged by a ``Merging``."""
        for (handle, placement), before, *values in zip(self.variables, self.before, *self.after):
            value = merging.value(values, placement, before)
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def add(self, losses: "Iterable[tf.Tensor]") -> None:
        """Add losses of the whole batch to the layers from which the replicas' were removed."""
        for layer, loss in zip(self.added, losses):
            _losses_of(layer).append(loss)

    @contextlib.contextmanager
    def collected(self, suspensions: "Optional[List[Any]]" = None) -> "Iterator[List[tf.Tensor]]":
        """Move the losses that are added within from the layers to a list.

        Arguments:
            suspensions: as those of a ``ReplicaTurn``; one is added.
        """
        lists = list(map(_losses_of, self.layers))  # of each thread in tf.keras
        lengths = list(map(len, lists))

        def taken():
            losses = [of_layer[length:] for of_layer, length in zip(lists, lengths)]
            for of_layer, length in zip(lists, lengths):
                del of_layer[length:]
            return losses

        def suspended():
            losses = taken()
            return lambda: [of_layer.extend(own) for of_layer, own in zip(lists, losses)]

        if suspensions is not None:
            suspensions.append(suspended)
        losses: "List[tf.Tensor]" = []
        self.added = []
        try:
            yield losses
        finally:
            for layer, own in zip(self.layers, taken()):
                losses += own
                self.added += [layer] * len(own)


def _losses_of(layer):
    """Return the list of the losses added to a layer, of tf.keras or of Keras 3."""
    return getattr(layer, "_eager_losses", layer._losses)
