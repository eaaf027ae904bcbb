"""State, losses and results of a model's replicas on TensorFlow 2, and how they are merged.

Each replica starts from the same state, and the state is set once, to what one device would have
made of all rows. Generators of random numbers go from replica to replica instead, so that
dropout masks are independent. Moving averages of batch normalization are the mean of the
replicas'. How other variables are put together is read off a ``Trace`` of the call.
"""

import contextlib
import functools
import inspect
import sys

import tensorflow as tf

from ..._rows import Count, Partial, Replicated, Sharded
from ..._runtime import patching
from .graph_walk import Added
from .op_trial import may_be_set


def is_set(variable):
    """Whether the function being traced may set the variable."""
    if tf.executing_eagerly():
        return True
    return may_be_set(tf.compat.v1.get_default_graph().capture(variable.handle))


def type_of(handle):
    """The type of the variable that this is the handle of."""
    return tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)


def read(handle):
    """The variable's value in its own type, whatever mixed precision casts it to."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=type_of(handle))


def is_generator(variable):
    """Whether a variable is the state of a generator of random numbers, by the look of it.

    Up to TensorFlow 2.3 they have no name of their own.
    """
    if "StateVar" in variable.name:
        return True
    named = variable.name.split("/")[-1].split(":")[0]
    plain = variable.dtype.name == "int64" and variable.shape.as_list() == [3]
    return plain and not variable.trainable and named == "Variable"


def normalizations(layers):
    """The layers among these that normalize by statistics of the batch, as each device can.

    Renormalization corrects them by averages over all batches, so that the parts matter.
    """

    def is_one(layer):
        named = any(kind.__name__.startswith("BatchNormalization") for kind in type(layer).__mro__)
        # What is not built yet has no average.
        return (named or hasattr(layer, "moving_mean")) and not getattr(layer, "renorm", False)

    return list(filter(is_one, layers))


def averages(layers):
    """The handles of their moving averages."""
    names = ("moving_mean", "moving_variance")
    found = [getattr(layer, name, None) for layer in normalizations(layers) for name in names]
    # A Keras 3 variable has one of TensorFlow's.
    return [getattr(each, "_value", each).handle for each in found if each is not None]


@contextlib.contextmanager
def normalizing_rows(layers):
    """Within, these layers' batch normalization returns what inference does: each row by itself.

    Then they are called as they would be, so that what they set can be seen.
    """

    def in_inference(call, *args, **kwargs):
        given = dict(zip(inspect.signature(call).parameters, args), **kwargs)
        result = call(**dict(given, training=False))
        call(*args, **kwargs)
        return result

    with contextlib.ExitStack() as stack:
        for layer in layers:
            if hasattr(layer, "_trainable_var"):  # a tensor of the first graph, in TensorFlow 2.0
                stack.callback(setattr, layer, "_trainable_var", layer._trainable_var)
        for layer in normalizations(layers):
            call = functools.partial(in_inference, layer.call)
            stack.enter_context(patching.replaced(layer, call=call))
        yield


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


def joining_tables(lookups, count):
    """A function of the replicas' gradients of tables in which all look up the same rows.

    One device has one gradient for each lookup. TensorFlow would put those of the replicas side by
    side, and Keras 3 squares one by one what there is of a row. So the replica whose gradient is
    computed last has the sum of all, and the others have none.

    TensorFlow never lets go of a gradient's function, so that nothing here may hold the model.

    Arguments:
        lookups: those of the ``Trace``.
        count: how many replicas there are.

    Returns:
        What tells, of a replica, counted from 0, a variable and its gradient, what that is to be.
    """
    keys = {key for key, answers in lookups.items() if answers == {True}}
    waiting = {}  # type: dict  # id of a variable -> replica -> its gradient

    def join(replica, variable, gradient):
        if not isinstance(gradient, tf.IndexedSlices) or id(variable.handle) not in keys:
            return gradient
        found = waiting.setdefault(id(variable), {})
        if replica in found:  # of a pass that did not come to its end
            found.clear()
        found[replica] = gradient
        if len(found) < count:
            return None
        del waiting[id(variable)]
        total = tf.add_n([each.values for each in found.values()])
        return tf.IndexedSlices(total, gradient.indices, gradient.dense_shape)

    return join


def read_kernels():
    """From now on, have Keras 3 hand its convolutions values in place of variables.

    It has XLA compile a convolution in groups, and XLA takes no variable of another device.
    """
    nn = sys.modules.get("keras.src.backend.tensorflow.nn")
    if nn is None or patching.find(nn, "conv") is not None:
        return
    plain = nn.conv

    @functools.wraps(plain)
    def conv(inputs, kernel, *args, **kwargs):
        return plain(inputs, tf.convert_to_tensor(kernel), *args, **kwargs)

    patching.MendingPatch(nn, "conv", conv)


# Merging --------------------------------------------------------------------------------------


def is_merged(placement, dtype):
    """Whether there is a way to the value for all rows from those of the replicas."""
    if isinstance(placement, Sharded):
        return placement.axis == 0 and placement.copies == 1
    if isinstance(placement, Partial) and placement.how == "mean":
        return "float" in str(dtype) or "complex" in str(dtype)
    return isinstance(placement, (Added, Partial, Replicated)) or placement == Count()


_EXTREME = {"max": (tf.reduce_max, tf.reduce_any), "min": (tf.reduce_min, tf.reduce_all)}


class Merging:
    """The replicas' values become those of the whole batch.

    Arguments:
        rows: how many the batch has.
        trace: the ``Trace`` of the plain call; None for a single replica.
    """

    def __init__(self, replicas, rows, trace):
        self.replicas, self.trace = replicas, trace
        total = max(rows, 1) if isinstance(rows, int) else tf.maximum(rows, 1)
        #: What the replicas' means count.
        self.shares = [replica.size / total for replica in replicas]

    def results(self):
        """Those of the call for the whole batch, as ``Replica.values``."""
        if self.trace is None:
            return self.replicas[0].values
        found = {}
        for name, placements in self.trace.placements.items():
            values = zip(*[replica.values[name] for replica in self.replicas])
            found[name] = [self._result(name, *each) for each in zip(placements, values)]
        return found

    def _result(self, name, placement, values):
        if not tf.is_tensor(values[0]):
            return values[0]
        if name in ("masks", "logits") and not isinstance(placement, Sharded):
            return None  # they would belong to its rows
        if isinstance(values[0], (tf.SparseTensor, tf.IndexedSlices)):
            return values[0]  # the same for any rows, and TensorFlow adds up none
        return self.value(list(values), placement)

    def value(self, values, placement, before=None):
        """One value for the whole batch.

        Arguments:
            placement: how it depends on the rows.
            before: the old value, where this is the new value of a variable.
        """
        if isinstance(placement, Sharded):
            return tf.concat(values, axis=0)
        dtype, how = values[0].dtype, getattr(placement, "how", "sum")
        if isinstance(placement, Replicated):
            is_merged = before is None and (dtype.is_floating or dtype.is_complex)
            return self._mean(values) if is_merged else values[0]
        if how == "mean":
            return self._mean(values)
        if how in _EXTREME:
            of_numbers, of_booleans = _EXTREME[how]
            reduce = of_booleans if dtype == tf.bool else of_numbers
            return reduce(tf.stack(values), axis=0)
        relative = isinstance(placement, Added)
        parts = [value - before for value in values] if relative else values
        parts = [self._own(*each) for each in zip(self.replicas, parts)]
        return tf.add_n([before] + parts if relative else parts)

    def _own(self, replica, value):
        """The value; zero where the replica has no rows of its own."""
        if isinstance(replica.size, int):
            return value if replica.size else tf.zeros_like(value)
        return value * tf.cast(tf.minimum(replica.size, 1), value.dtype)

    def _mean(self, values):
        # A number of Python's would be one of 32 bits in between.
        shares = [tf.convert_to_tensor(share, tf.float64) for share in self.shares]
        shares = [tf.cast(share, values[0].dtype) for share in shares]
        return tf.add_n([value * share for value, share in zip(values, shares)])
