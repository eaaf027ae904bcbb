"""What the engines of ranks on TensorFlow share: calls out of graphs, and the errors of those."""

import contextlib

from .. import engines


class TensorFlowEngine(engines.Engine):
    """An engine whose waits may be in a graph of the user's, while TensorFlow runs it.

    Subclasses set ``tf``.
    """

    #: What stands in the messages of TensorFlow's errors that mean the loss of a rank.
    mark = ""

    def __init__(self, place):
        super().__init__(place)
        self.failure = None  # noted last
        self.order = []  # type: list  # see order_of_steps()

    def mean(self, tensors, share, name):
        """The mean over all ranks, weighted by their shares of the rows.

        Each tensor leaves as soon as it is computed, or the few that it leaves together with.

        Arguments:
            tensors: dense ones and ``IndexedSlices``, the same on all ranks, in the order of the
                layers; gradients are computed in the reverse order.
            share: this rank's, a float64 tensor.
            name: of the operation; the ranks' operations of one name belong together.
        """
        raise NotImplementedError

    def sum_numbers_in_graph(self, numbers):
        """The sum over all ranks of a float64 tensor of one axis: what ``sum`` does, in a graph."""
        raise NotImplementedError

    def share_in_graph(self, rows, count):
        """This rank's share of the step that all ranks begin, as a float64 tensor.

        As ``share()``, but nothing waits for it besides what needs it: the ranks' rows, and
        whether they have more batches, are exchanged while the step computes.

        Arguments:
            rows: this rank's, a tensor or a number.
            count: a function that is called with them as the step begins.
        """
        tf = self.tf

        def begin(rows):
            count(int(rows))
            self.arrive()
            return float(rows)

        def share(rows, sums):
            self.resume()
            total, flags = self.rows_and_flags(sums)
            self.stepped(engines.ranks_of(flags))
            return rows / total

        if tf.executing_eagerly():
            return tf.constant(self.share(begin(rows)), tf.float64)
        order = self.order_of_steps()
        with tf.control_dependencies([each.read_value() for each in order]):
            mine = self.called(begin, [rows], tf.float64)
            numbers = tf.concat([[mine], tf.zeros([self.place.size], tf.float64)], 0)
            result = self.called(share, [mine, self.sum_numbers_in_graph(numbers)], tf.float64)
        with tf.control_dependencies([result]):
            for each in order:
                each.assign_add(1)
        return result

    def order_of_steps(self):
        """A variable that steps read and set, so that TensorFlow 2 runs one after the other.

        It may have several in a graph (``steps_per_execution``); TensorFlow 1 has one.
        """
        tf = self.tf
        with tf.init_scope():
            if not self.order and tf.executing_eagerly():
                with tf.device("/cpu:0"):
                    self.order = [tf.Variable(0, trainable=False, dtype=tf.int64)]
        return self.order

    def called(self, function, arguments, dtype, shape=()):
        """A tensor: what ``function`` returns for values of tensors, as the graph runs."""

        def call(*values):
            with self.noting():
                return function(*values)

        result = self.tf.numpy_function(call, arguments, dtype)
        result.set_shape(shape)
        return result

    def total(self, values):
        """Scalars of a graph summed up over all ranks, in float64."""
        tf = self.tf
        mine = tf.stack([tf.cast(value, tf.float64) for value in values])
        shape = [len(values)]
        sums = self.called(lambda mine: self.sum(mine.tolist()), [mine], tf.float64, shape)
        return tf.unstack(sums)

    @contextlib.contextmanager
    def noting(self):
        """Keep the exception that is raised within: TensorFlow replaces it by another."""
        try:
            yield
        except Exception as error:
            self.failure = error
            raise

    @contextlib.contextmanager
    def waiting(self, what):
        """As the base class's, or the exception noted last."""
        self.failure = None
        try:
            with super().waiting(what):
                yield
        except Exception as error:
            failure, self.failure = self.failure, None
            if failure is None or failure is error:
                raise
            raise failure from error

    def problem(self, error):
        if self.failure is not None or not isinstance(error, self.tf.errors.OpError):
            return None
        return problem_of(error) if self.mark in str(error) else None


def problem_of(error):
    """What one of TensorFlow's errors says has happened, in a line."""
    # TensorFlow puts before it where the node was made, and the node and its reports behind it.
    message = error.message.partition("[[")[0].partition("\nAdditional")[0]
    message = message.partition("\nThe error could be from a previous operation")[0]
    return message.strip().split("\n")[-1].split(". ")[0].rstrip(".")
