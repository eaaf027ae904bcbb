"""The base class of TensorFlow's engines: Horovod, and TensorFlow's own workers."""

import contextlib
import math
import re
from typing import Any, Sequence

from .. import engines
from . import buckets

#: A tensor of so many bytes is sent alone: to concatenate it with others would copy it.
LARGE = 2**20


def _buckets(tf, tensors):
    """Return the places of dense tensors that are sent together, the last tensors first."""
    items = []
    for place, tensor in reversed(list(enumerate(tensors))):
        if not isinstance(tensor, tf.IndexedSlices):
            size = tensor.dtype.size * (tensor.shape.num_elements() or 0)
            items.append((place, math.inf, place) if size >= LARGE else (tensor.dtype, size, place))
    return [places for _, places in buckets.filled(items)]


def _is_alike(tensor):
    """Return whether a tensor of a function's graph is computed from constants alone.

    So it is the same on all ranks, whatever their rows: such as numbers of positions.
    """
    if hasattr(tensor, "numpy"):  # of an eager step, which has no graph to traverse
        return False
    todo, seen = [tensor], set()
    while todo:
        tensor = todo.pop()
        if hasattr(tensor, "numpy") or id(tensor) in seen:  # a value
            continue
        seen.add(id(tensor))
        op = tensor.op
        outside = [
            outer for outer, inside in getattr(tensor.graph, "captures", ()) if inside is tensor
        ]
        # Not so the batch, random numbers, and variables: a seed may be another one on each rank.
        if not outside and op.type != "Const" and not op.inputs or tensor.dtype.name == "resource":
            return False
        if op.op_def.is_stateful or "Random" in op.type or "Multinomial" in op.type:
            return False
        todo += outside or op.inputs
    return True


class TensorFlowEngine(engines.Engine):
    """An engine whose waits may be in a graph of the user's, while TensorFlow runs it.

    Subclasses set ``tf``.
    """

    #: A pattern in the messages of TensorFlow's errors that mean the loss of a rank.
    mark = ""
    #: Whether exchanges within a step have to begin in one order on all ranks.
    is_ordered = False
    failure = None  # noted last
    order: Sequence[Any] = ()  # see order_of_steps()

    def mean(self, tensors, share, name):
        """Return the mean of tensors over all ranks, weighted by their shares of the rows.

        They are sent in buckets, each of which leaves as soon as it is computed.

        Arguments:
            tensors: dense ones and ``IndexedSlices``, the same on all ranks, in the order of the
                layers; gradients are computed in the reverse order.
            share: this rank's, a float64 tensor.
            name: of the operation; the ranks' operations of one name belong together.
        """
        tf, originals, before = self.tf, tensors, []
        # Where all ranks look the same rows up, one process has one gradient for each of them.
        # Keras 3 would square duplicates one by one.
        alike = [isinstance(t, tf.IndexedSlices) and _is_alike(t.indices) for t in tensors]
        tensors = [t.values if same else t for t, same in zip(tensors, alike)]
        results = list(tensors)
        for number, places in enumerate(_buckets(tf, tensors)):
            flat = tf.concat([tf.reshape(tensors[place], [-1]) for place in places], 0)
            weighted = flat * tf.cast(share, flat.dtype)
            total = self.sum_in_graph(weighted, "{}_bucket_{}".format(name, number), before)
            before = [total]
            parts = tf.split(total, [tf.size(tensors[place]) for place in places])
            for place, part in zip(places, parts):
                results[place] = tf.reshape(part, tf.shape(tensors[place]))
                results[place].set_shape(tensors[place].shape)
        for place, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices):
                weighted = tf.scalar_mul(tf.cast(share, tensor.values.dtype), tensor)
                results[place] = self.concatenate(weighted, "{}_{}".format(name, place), before)
                before = [results[place]]
        return [
            tf.IndexedSlices(result, one.indices, one.dense_shape) if same else result
            for result, one, same in zip(results, originals, alike)
        ]

    def sum_in_graph(self, tensor, name, before):
        """Return the sum over all ranks of a tensor of one axis.

        Arguments:
            tensor: this rank's.
            name: that of the operation, the same on all ranks.
            before: tensors that were exchanged before, for which engines that need an order wait.
        """

    def sum_within_step(self, tensor, name, before):
        """Return a sum as ``sum_in_graph``, for which this rank waits before its gradients."""
        return self.sum_in_graph(tensor, name, before)

    def concatenate(self, slices, name, before):
        """Return all ranks' ``IndexedSlices``, concatenated: optimizers sum rows of one index."""

    def sum_numbers_in_graph(self, numbers):
        """Return the sum over all ranks of a float64 tensor of one axis: ``sum`` in a graph."""
        return self.sum_in_graph(numbers, "numbers", [])

    def share_in_graph(self, rows, count, seen=()):
        """Return this rank's share of the step that all ranks begin, as a float64 tensor.

        This is ``share()`` in a graph, where only operations that need the share wait for it: the
        ranks' rows, and whether they have more batches, are exchanged while the step computes.

        Arguments:
            rows: this rank's, a tensor or a number.
            count: a function that is called with them, and with the values of ``seen``, as the
                step begins.
            seen: further tensors.
        """
        tf = self.tf

        def begin(rows, *seen):
            count(int(rows), *seen)
            self.arrive()
            return float(rows)

        def share(rows, sums):
            self.resume()
            total, ended = self.rows_and_ended(sums)
            self.stepped(ended)
            return rows / total

        if tf.executing_eagerly():
            return tf.constant(self.share(begin(rows, *seen)), tf.float64)
        order = self.order_of_steps()
        with tf.control_dependencies([variable.read_value() for variable in order]):
            mine = self.called(begin, [rows, *seen], tf.float64)
            numbers = tf.concat([[mine], tf.zeros([self.place.size], tf.float64)], 0)
            result = self.called(share, [mine, self.sum_numbers_in_graph(numbers)], tf.float64)
        with tf.control_dependencies([result]):
            for variable in order:
                variable.assign_add(1)
        return result

    def order_of_steps(self):
        """Return variables that steps read and set, so that TensorFlow 2 runs them in turn.

        It may have several in a graph (``steps_per_execution``); TensorFlow 1 has one.
        """
        tf = self.tf
        with tf.init_scope():
            if not self.order and tf.executing_eagerly():
                with tf.device("/cpu:0"):
                    self.order = [tf.Variable(0, trainable=False, dtype=tf.int64)]
        return self.order

    def called(self, function, arguments, dtype, shape=()):
        """Return a tensor with a Python function's result for values of tensors in a graph."""

        def call(*values):
            with self.noting():
                return function(*values)

        result = self.tf.numpy_function(call, arguments, dtype)
        result.set_shape(shape)
        return result

    def total(self, values):
        """Return the sums over all ranks of scalars of a graph, in float64."""
        tf = self.tf
        mine = tf.stack([tf.cast(value, tf.float64) for value in values])
        shape = [len(values)]
        sums = self.called(lambda mine: self.sum(mine.tolist()), [mine], tf.float64, shape)
        return tf.unstack(sums)

    @contextlib.contextmanager
    def noting(self):
        """Keep the exception that is raised within, which TensorFlow replaces by another."""
        try:
            yield
        except Exception as error:
            self.failure = error
            raise

    def waiting(self, purpose):
        """Wait for other ranks within: see ``Engine.waiting``."""
        self.failure = None
        return super().waiting(purpose)

    def problem(self, error):
        """Return a phrase for TensorFlow's error, or raise the exception that it stands for."""
        failure, self.failure = self.failure, None
        if failure is not None and failure is not error:
            raise failure from error
        if failure is not None or not isinstance(error, self.tf.errors.OpError):
            return None
        return problem_of(error) if re.search(self.mark, str(error)) else None


def problem_of(error):
    """Return the problem that an error of TensorFlow's reports, in a line."""
    # The place where the node was made stands before it, and the node and its reports behind it.
    message = error.message.partition("[[")[0].partition("\nAdditional")[0]
    message = message.partition("\nThe error could be from a previous operation")[0]
    return message.strip().split("\n")[-1].split(". ")[0].rstrip(".")
