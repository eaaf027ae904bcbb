"""Horovod for TensorFlow, in graphs and eagerly."""

from . import horovod
from .tensorflow import TensorFlowEngine


class TensorFlowHorovod(TensorFlowEngine, horovod.HorovodEngine):
    """Horovod for TensorFlow.

    It carries numbers within the user's graphs (``mean``), and for this process itself in a small
    graph of the engine's own.
    """

    framework = "tensorflow"
    mark = "orovod"

    def __init__(self, place):
        super().__init__(place)
        import tensorflow

        tf = self.tf = getattr(tensorflow.compat, "v1", tensorflow)
        graph = tf.Graph()
        with graph.as_default(), tf.device("/cpu:0"):
            self.numbers = tf.placeholder(tf.float64, [None])
            self.summed = self.sum_numbers_in_graph(self.numbers)
            self.bytes = tf.placeholder(tf.uint8, [None])
            self.sent = self.horovod.broadcast(self.bytes, 0, name="horovod_broadcast")
        # Threads of its own: a user's graph may hold all others while it waits for this one.
        config = tf.ConfigProto(use_per_session_threads=True, inter_op_parallelism_threads=1)
        config.device_count["GPU"] = 0
        self.session = tf.Session(graph=graph, config=config)

    def sum_numbers(self, values):
        """Return the sum over all ranks: see ``HorovodEngine.sum_numbers``."""
        return self.session.run(self.summed, {self.numbers: values})

    def broadcast_bytes(self, content):
        """Return rank 0's array: see ``Engine.broadcast_bytes``."""
        return self.session.run(self.sent, {self.bytes: content})

    def state_besides(self, model):
        """Return the running sums of moving averages in graphs.

        assign_moving_average(zero_debias=True), which keras 2 calls, keeps them in variables
        below the average: "moving_mean/biased".
        """
        if self.tf.executing_eagerly():
            return []
        scopes = tuple(weight.op.name + "/" for weight in model.non_trainable_weights)
        return [v for v in self.tf.global_variables() if v.op.name.startswith(scopes)]

    def sum_in_graph(self, tensor, name, before):
        """Return the sum over all ranks: see ``TensorFlowEngine.sum_in_graph``."""
        # The scopes of functions, one in the other, may differ between ranks.
        return self.horovod.allreduce(
            tensor, op=self.horovod.Sum, name="horovod_" + name, ignore_name_scope=True
        )

    def sum_within_step(self, tensor, name, before):
        """Return the sum over all ranks: see ``TensorFlowEngine.sum_within_step``."""

        def arrive():
            self.arrive()
            return 0.0

        if self.tf.executing_eagerly():
            arrive()
            return self.sum_in_graph(tensor, name, before)
        with self.tf.control_dependencies([tensor, *before]):
            arrived = self.called(arrive, [], self.tf.float64)
        with self.tf.control_dependencies([arrived]):
            return self.sum_in_graph(self.tf.identity(tensor), name, before)

    def mean(self, tensors, share, name):
        """Return the mean over all ranks: see ``TensorFlowEngine.mean``."""
        tf = self.tf

        def arrive():
            self.arrive()
            if name.startswith("gradients"):
                self.count("gradients")
            return 0.0

        if tf.executing_eagerly():
            arrive()
            return super().mean(tensors, share, name)
        with tf.control_dependencies(list(tensors)):  # only now it waits for the others
            arrived = self.called(arrive, [], tf.float64)
        results = super().mean(tensors, share, name)
        if results:
            with tf.control_dependencies([arrived]):  # what computes a result calls that, too
                last = tf.nest.map_structure(tf.identity, results[-1], expand_composites=True)
            results[-1] = last
        return results

    def concatenate(self, slices, name, before):
        """Return all ranks' ``IndexedSlices``: see ``TensorFlowEngine.concatenate``."""

        def gather(tensor, part):
            name_of_part = "horovod_{}_{}".format(name, part)
            return self.horovod.allgather(tensor, name=name_of_part, ignore_name_scope=True)

        return self.tf.IndexedSlices(
            gather(slices.values, "values"), gather(slices.indices, "indices"), slices.dense_shape
        )
