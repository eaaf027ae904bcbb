"""State of a model on TensorFlow 2: losses of its layers, and variables, set back and set once.

Each replica starts from the same state, and the state is set once, to what one device would have
made of all rows. Generators of random numbers go from replica to replica instead, so that
dropout masks are independent. Moving averages of batch normalization are the mean of the
replicas'. How other variables are put together is read off a ``Trace`` of the call.
"""

import contextlib

import tensorflow as tf

from ..._runtime import patching
from .graph import may_be_set


def is_set(variable):
    """Return whether the function being traced may set the variable."""
    if tf.executing_eagerly():
        return True
    return may_be_set(tf.compat.v1.get_default_graph().capture(variable.handle))


def type_of(handle):
    """Return the type of the variable that this is the handle of."""
    return tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)


def read(handle):
    """Return the variable's value in its own type, whatever mixed precision casts it to."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=type_of(handle))


def is_generator(variable):
    """Return whether a variable is the state of a generator of random numbers, by the look of it.

    Up to TensorFlow 2.3 they have no name of their own.
    """
    if "StateVar" in variable.name:
        return True
    named = variable.name.split("/")[-1].split(":")[0]
    plain = variable.dtype.name == "int64" and variable.shape.as_list() == [3]
    return plain and not variable.trainable and named == "Variable"


def normalizations(layers):
    """Return the layers among these that normalize by statistics of the batch, as each device can.

    Renormalization corrects them by averages over all batches, so that the parts matter.
    """

    def is_one(layer):
        named = any(kind.__name__.startswith("BatchNormalization") for kind in type(layer).__mro__)
        # What is not built yet has no average.
        return (named or hasattr(layer, "moving_mean")) and not getattr(layer, "renorm", False)

    return list(filter(is_one, layers))


def averages(layers):
    """Return the handles of their moving averages."""
    names = ("moving_mean", "moving_variance")
    found = [getattr(layer, name, None) for layer in normalizations(layers) for name in names]
    # A Keras 3 variable has one of TensorFlow's.
    return [getattr(each, "_value", each).handle for each in found if each is not None]


class ModelState:
    """Losses that layers add, and variables, which are set back after each replica.

    Arguments:
        layers: those of Keras that the model consists of; TensorFlow 2.0 lists shared ones twice.
    """

    def __init__(self, layers):
        self.layers = list({id(layer): layer for layer in layers}.values())
        self.added = []  # type: list  # for each loss, the list of its layer's that it was in
        self.variables, self.before, self.after = [], [], []  # type: list, list, list

    def watch(self, variables):
        """Note the values as they are before the first replica.

        Arguments:
            variables: pairs of the handle of one that the call sets, and how its new value depends
                on the rows.
        """
        self.variables = variables
        self.before = [read(handle) for handle, _ in variables]

    @contextlib.contextmanager
    def replica(self):
        """Give seeded layers other masks in each replica; up to TensorFlow 2.3 they would repeat.

        There a layer hands its seed to an operation, whose random numbers start from it on every
        device. Later it starts a generator of the layer's, which goes on from replica to replica.
        """
        further = 104729 * len(self.after)  # a prime: no neighbour's seed
        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                seed = vars(layer).get("seed")
                if isinstance(seed, int) and hasattr(layer, "_eager_losses"):  # not in Keras 3
                    stack.enter_context(patching.replaced(layer, seed=seed + further))
            yield stack.enter_context(self.collected())
        self.after.append([read(handle) for handle, _ in self.variables])
        self.take_back()

    def take_back(self):
        """Set all back to what it was before a replica."""
        for (handle, _), before in zip(self.variables, self.before):
            tf.raw_ops.AssignVariableOp(resource=handle, value=before)

    def finish(self, merging):
        """Set the state, once."""
        for (handle, placement), before, *values in zip(self.variables, self.before, *self.after):
            value = merging.value(values, placement, before)
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    @contextlib.contextmanager
    def collected(self):
        """Take the losses that are added within from the layers into a list."""
        # In tf.keras and in Keras 3.
        lists = [getattr(each, "_eager_losses", each._losses) for each in self.layers]
        before = list(map(len, lists))
        losses, self.added = [], []  # type: list, list
        try:
            yield losses
        finally:
            for each, count in zip(lists, before):
                losses += each[count:]
                self.added += [each] * (len(each) - count)
                del each[count:]
