"""State of a model: losses that its layers add, and variables, restored for each replica.

Each replica starts from the same state, and the state is set once, to that of one device with the
whole batch. Generators of random numbers advance from replica to replica instead, so that dropout
masks are independent. Moving averages of batch normalization are the mean of those of the replicas.
Other variables are merged by their placements in a ``Trace`` of the call.
"""

import contextlib
from typing import Any, Iterable, Iterator, List, Sequence, Tuple

import tensorflow as tf

from ..._rows import Placement
from ..._runtime import patching
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
    """Return the handles of the moving averages of ``normalizations``."""
    names = ("moving_mean", "moving_variance")
    variables = [getattr(layer, name, None) for layer in normalizations(layers) for name in names]
    # A Keras 3 variable has one of TensorFlow's.
    return [getattr(v, "_value", v).handle for v in variables if v is not None]


class ModelState:
    """Losses that layers add, and variables, which are restored after each replica.

    Arguments:
        layers: the Keras layers of the model; TensorFlow 2.0 lists shared ones twice.

    Attributes:
        added: for each loss, its layer's list of losses, from which it was removed.
        variables, before: those of ``watch``, and their values.
        after: for each replica, the values that it has set.
    """

    def __init__(self, layers: "Iterable[Any]") -> None:
        self.layers = list({id(layer): layer for layer in layers}.values())
        self.added: "List[List[tf.Tensor]]" = []
        self.variables: "Sequence[Tuple[tf.Tensor, Placement]]" = []
        self.before: "List[tf.Tensor]" = []
        self.after: "List[List[tf.Tensor]]" = []

    def watch(self, variables: "Sequence[Tuple[tf.Tensor, Placement]]") -> None:
        """Record the values of variables before the first replica.

        Arguments:
            variables: pairs of the handle of a variable that the call sets, and the placement of
                its new value.
        """
        self.variables = variables
        self.before = [read(handle) for handle, _ in variables]

    @contextlib.contextmanager
    def replica(self) -> "Iterator[List[tf.Tensor]]":
        """Surround a replica's call; yield the losses that are added in it.

        Up to TensorFlow 2.3 a layer passes its seed to an operation, whose random numbers start
        from it on every device. So seeded layers get another seed for each replica, else their
        masks would repeat. Later a layer has a generator, which advances from replica to replica.
        """
        further = 104729 * len(self.after)  # a prime: no neighbour's seed
        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                seed = vars(layer).get("seed")
                if isinstance(seed, int) and hasattr(layer, "_eager_losses"):  # not in Keras 3
                    stack.enter_context(patching.replaced(layer, seed=seed + further))
            yield stack.enter_context(self.collected())
        self.after.append([read(handle) for handle, _ in self.variables])
        self.restore()

    def restore(self) -> None:
        """Restore all variables."""
        for (handle, _), before in zip(self.variables, self.before):
            tf.raw_ops.AssignVariableOp(resource=handle, value=before)

    def finish(self, merging: "Any") -> None:
        """Set all variables, once, to their values merged by a ``Merging``."""
        for (handle, placement), before, *values in zip(self.variables, self.before, *self.after):
            value = merging.value(values, placement, before)
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    @contextlib.contextmanager
    def collected(self) -> "Iterator[List[tf.Tensor]]":
        """Move the losses that are added within from the layers to a list."""
        # In tf.keras and in Keras 3.
        lists = [getattr(layer, "_eager_losses", layer._losses) for layer in self.layers]
        lengths = list(map(len, lists))
        losses: "List[tf.Tensor]" = []
        self.added = []
        try:
            yield losses
        finally:
            for of_layer, length in zip(lists, lengths):
                losses += of_layer[length:]
                self.added += [of_layer] * (len(of_layer) - length)
                del of_layer[length:]
