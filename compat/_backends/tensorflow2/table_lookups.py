"""Tables in which a call looks up the same rows for any batch, such as those of positions."""

import tensorflow as tf

from ..._rows import Replicated
from .functions import READS, carried, is_random

_OPERATIONS = {"Gather", "GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd"}


class Lookups:
    """What is looked up in variables, and in what is computed from them alone.

    Arguments:
        found: whether the numbers of the rows are the same for any batch, each answer that was
            found, by the variables' keys; is written.
        sources: the keys of the variables that a graph's inputs are computed from, by the names of
            these, and RANDOM where random numbers are in it; is written.
    """

    RANDOM = None

    def __init__(self, found=None, sources=None):
        self.found = {} if found is None else found
        self.sources = {} if sources is None else sources

    def note(self, op, given, handles):
        """Note an operation, with the placements of its inputs and the keys of handles."""
        known = [self.sources.get(tensor.name, set()) for tensor in op.inputs]
        if known and op.inputs[0].name in handles:
            known[0] = {handles[op.inputs[0].name]}
        if op.type in _OPERATIONS:
            is_same = self.RANDOM not in known[1] and isinstance(given[1], Replicated)
            for key in known[0] - {self.RANDOM}:
                self.found.setdefault(key, set()).add(is_same)
        sources = set().union(*known)
        if not all(isinstance(each, Replicated) for each in given):
            sources &= {self.RANDOM}
        if is_random(op) or op.op_def.is_stateful and op.type not in READS:
            sources.add(self.RANDOM)
        self.sources.update((output.name, sources) for output in op.outputs if sources)

    def inside(self, graph, tensors):
        """The same for the graph of a function, which is given these tensors."""
        return Lookups(self.found, carried(self.sources, tensors, graph.inputs))

    def same(self):
        """The keys of the variables in which what is looked up is the same for any batch."""
        return {key for key, answers in self.found.items() if answers == {True}}

    def are_mixed(self):
        """Whether in one variable something else is looked up besides what is the same."""
        return {True, False} in self.found.values()


class TableGradients:
    """The replicas' gradients of tables in which all look up the same rows.

    One device has one gradient for each lookup. TensorFlow would put those of the replicas side by
    side, and Keras 3 squares one by one what there is of a row. So the replica whose gradient is
    computed last has the sum of all, and the others have none.

    TensorFlow never lets go of a gradient's function, so that nothing here may hold the model.

    Arguments:
        keys: those of the variables.
        count: how many replicas there are.
    """

    def __init__(self, keys, count):
        self.keys = keys
        self.count = count
        self.waiting = {}  # type: dict  # id of a variable -> replica -> its gradient

    def joined(self, replica, variable, gradient):
        """What the gradient of a variable is to be of this replica, counted from 0."""
        if not isinstance(gradient, tf.IndexedSlices) or id(variable.handle) not in self.keys:
            return gradient
        found = self.waiting.setdefault(id(variable), {})
        if replica in found:  # of a pass that did not come to its end
            found.clear()
        found[replica] = gradient
        if len(found) < self.count:
            return None
        del self.waiting[id(variable)]
        total = tf.add_n([each.values for each in found.values()])
        return tf.IndexedSlices(total, gradient.indices, gradient.dense_shape)
