"""What the engines of ranks on TensorFlow share: calls out of graphs, and the errors of those."""

import contextlib

from .. import _engines


class TensorFlowEngine(_engines.Engine):
    """An engine whose waits may be in a graph of the user's, while TensorFlow runs it.

    Subclasses set ``tf``.
    """

    #: What stands in the messages of TensorFlow's errors that mean the loss of a rank.
    mark = ""

    def __init__(self, place):
        super().__init__(place)
        self.failure = None  # noted last

    def mean(self, tensors, share, name):
        """The mean over all ranks, weighted by their shares of the rows.

        Arguments:
            tensors: dense ones and ``IndexedSlices``, the same on all ranks.
            share: this rank's, a float64 tensor.
            name: of the operation; the ranks' operations of one name belong together.
        """
        raise NotImplementedError

    def called(self, function, argument, dtype, shape=()):
        """A tensor: what ``function`` returns for the value of ``argument``, as the graph runs."""

        def call(value):
            with self.noting():
                return function(value)

        result = self.tf.numpy_function(call, [argument], dtype)
        result.set_shape(shape)
        return result

    def total(self, values):
        """Scalars of a graph summed up over all ranks, in float64."""
        tf = self.tf
        mine = tf.stack([tf.cast(value, tf.float64) for value in values])
        shape = [len(values)]
        sums = self.called(lambda mine: self.sum(mine.tolist()), mine, tf.float64, shape)
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
