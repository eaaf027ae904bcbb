"""TF_CONFIG's workers: the cluster of tf.distribute.MultiWorkerMirroredStrategy, and its sums.

The strategy joins the workers and limits their waits. A model stays as Keras made it: in the
strategy's own scope Keras would weigh all workers alike in an uneven last batch, shuffle
otherwise on each worker the rows that it then deals out, and have rank 0 wait for the others
wherever it reads a moving average, to save it for example. So steps are those of the backend's
``ranks``, and the gradients are summed by the operations that the strategy uses.
"""

import atexit
import contextlib
import faulthandler
import inspect
import multiprocessing
import os
import socket
import sys
import threading
import time
import zlib
from typing import List

import numpy as np

from ... import errors
from ..._runtime import patching
from .. import rendezvous, waiting
from ..place import Place
from ..tf_config import addresses_of, cluster_in
from . import calls
from . import tensorflow as tensorflow_engine

# The devices of sums, and TensorFlow's numbers of their groups; its strategies begin at 1.
_HOST, _GPU = "/cpu:0", "/gpu:0"
_GROUPS = {_HOST: 1000001, _GPU: 1000002}
# How long a rank that fails waits for the others to be notified, in seconds.
_EXIT_TIMEOUT = 3.0
# The flag of a process that exits, in place of that of a rank that closes its epoch.
_EXITS = 2.0


def join_at_start(place: Place) -> None:
    """Have TensorFlow join the other workers as it starts, with its first operation.

    Until then the script may set what TensorFlow fixes as it starts, such as its threads. It may
    also make a strategy of its own, which joins them itself: nothing is done then. Nor is it in
    processes that this one starts, such as those of a pool that prepares data.
    """
    from tensorflow.python.eager import context

    owner = type(context.context())
    started = getattr(context._context, "_context_handle", None) is not None
    if started or patching.find(owner, "ensure_initialized") is not None:
        return
    start, lock = owner.ensure_initialized, threading.RLock()
    begun: List[bool] = []

    def join_and_start(self):
        if getattr(self, "_context_handle", None) is None:
            with lock:  # other threads wait; the calls within start TensorFlow
                if not begun:
                    begun.append(True)
                    join_here(self)
        return start(self)  # at once for threads by which a strategy of TensorFlow 2.5 joins

    def join_here(self):
        try:
            is_main = multiprocessing.current_process().name == "MainProcess"
            is_eager = context.default_execution_mode == context.EAGER_MODE
            if is_main and is_eager and not _has_cluster(self):
                with context.eager_mode():  # also where a graph is being built
                    TensorFlowCollectives.join(place)
        finally:
            patch.take_back()

    patch = patching.MendingPatch(owner, "ensure_initialized", join_and_start)


def _has_cluster(context):
    """Return whether the script has made a strategy for workers, or connected to others."""
    leader = getattr(context, "_collective_leader", None)
    return leader is not None or context.get_server_def() is not None


def _too_late(place, context):
    if _has_cluster(context):
        return errors.RankError(
            f"This process is {place}, and the script has made a strategy of TensorFlow's own, "
            "which has joined the others: a model trains by one or the other. Leave the strategy "
            "out, or do not give the model to compat.parallelize()."
        )
    return errors.RankError(
        f"This process is {place}, but TensorFlow started before it could join the others: a "
        "model, a variable or a tensor was made. Call compat.configure_gpu() before that, at the "
        "top of the script."
    )


class TensorFlowCollectives(tensorflow_engine.TensorFlowEngine):
    """The strategy's cluster. It has to be joined as TensorFlow starts: see ``join_at_start``."""

    mark = "ollective|compat/call"
    is_ordered = True
    means = None  # a variable that counts the means of gradients

    def __init__(self, place):
        import tensorflow as tf
        from tensorflow.python.eager import context

        super().__init__(place)
        if getattr(context._context, "_context_handle", None) is not None:
            raise _too_late(place, context._context)
        self.tf = tf
        self.lost = False
        options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=self.timeout)
        # In TensorFlow 2's terms, which have no "master".
        cluster, kind, index = cluster_in(os.environ)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), task_type=kind, task_id=index, rpc_layer="grpc"
        )
        self._await_all(addresses_of(cluster)[0])
        # One that is lost again ends this process: TensorFlow would wait for it for ever.
        faulthandler.dump_traceback_later(self.timeout, exit=True)
        try:
            # It must live as long as the workers do.
            self.strategy = tf.distribute.MultiWorkerMirroredStrategy(
                cluster_resolver=resolver, communication_options=options
            )
        except tf.errors.OpError as error:
            problem = tensorflow_engine.problem_of(error)
            raise errors.rank_lost(place, "to start", [], problem) from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        # The one that configure_gpu() has left visible.
        self.device = _GPU if tf.config.get_visible_devices("GPU") else _HOST
        store = context.context()
        # The oldest have no store, then one without limited waits.
        get = getattr(store, "get_config_key_value", None)
        if get is not None and "timeout_in_ms" in inspect.signature(get).parameters:
            self.calls = calls.Calls(
                self,
                store.set_config_key_value,
                lambda name, seconds: get(name, int(1000 * seconds)),
                store.delete_config_key_value,
            )
        atexit.register(self.leave)

    def sum(self, values):
        """Return the sum over all ranks: see ``Engine.sum``."""
        with self.waiting("for the others"):
            return self._sum(np.asarray(values, "float64"))

    def _sum(self, array):
        """Return the sum of an array over all ranks, on the host, at once."""
        with self.tf.init_scope(), self.tf.device(_HOST):
            return self.sum_numbers_in_graph(self.tf.convert_to_tensor(array)).numpy()

    def broadcast_bytes(self, content):
        """Return rank 0's array: see ``Engine.broadcast_bytes``."""
        words = np.zeros(-(-content.size // 4), "int32")  # a type that all sum operations take
        words.view("uint8")[: content.size] = content
        return self._sum(words).view("uint8")[: content.size]

    # In the user's graphs ---------------------------------------------------------------------

    def reduce(self, tensor, device, name):
        """Return the sum of the ranks' tensors, of one shape."""
        with self.tf.device(device):
            return self.tf.raw_ops.CollectiveReduceV2(
                input=tensor, merge_op="Add", final_op="Id", **self._options(tensor, device, name)
            )

    def _options(self, tensor, device, name):
        """Return the attributes that the ranks' operations of one name have in common.

        The strategy numbers operations as they are traced; ranks may trace differently often.
        TensorFlow takes tensors of one shape and type for each number.
        """
        with self.tf.device(_HOST):
            kind = "{} {}".format(name, tensor.dtype.name)
            number = (zlib.crc32(kind.encode()) & 0x3FFFFFFF) + self.tf.size(tensor)
        options = {
            "group_size": self.place.size,
            "group_key": _GROUPS[device],
            "instance_key": number,
            "communication_hint": "auto" if device == _HOST else "nccl",
            "timeout_seconds": self.timeout,
        }
        # TensorFlow 2.4 has none.
        if "ordering_token" in inspect.signature(self.tf.raw_ops.CollectiveReduceV2).parameters:
            options["ordering_token"] = []
        return options

    def sum_numbers_in_graph(self, numbers):
        """Return the sum over all ranks: see ``TensorFlowEngine.sum_numbers_in_graph``."""
        # By the name of the sums outside of graphs.
        return self.reduce(numbers, _HOST, "at once " + numbers.dtype.name)

    def sum_in_graph(self, tensor, name, before):
        """Return the sum over all ranks: see ``TensorFlowEngine.sum_in_graph``."""
        with self.tf.control_dependencies(before):  # one after the other, on all ranks
            return self.reduce(tensor, self.device, name)

    def mean(self, tensors, share, name):
        """Return the mean over all ranks: see ``TensorFlowEngine.mean``."""
        tf, results = self.tf, super().mean(tensors, share, name)
        if name.startswith("gradients") and results:
            # Counted by the graph, which calls nothing of Python's for that.
            with tf.init_scope(), tf.device(_HOST):
                if self.means is None:
                    self.means = tf.Variable(0, trainable=False, dtype=tf.int64)
            with tf.control_dependencies(list(results)):
                self.means.assign_add(1)
        return results

    def exchanged(self, kind):
        """Return how often this rank has exchanged values: see ``Engine.exchanged``."""
        if kind == "gradients" and self.means is not None:
            return int(self.means.numpy())
        return super().exchanged(kind)

    def concatenate(self, slices, name, before):
        """Return all ranks' ``IndexedSlices``: see ``TensorFlowEngine.concatenate``."""
        tf, values = self.tf, slices.values
        with tf.control_dependencies(before):
            mine = tf.one_hot(self.place.rank, self.place.size, dtype=tf.int32)
            counts = self.reduce(mine * tf.shape(values)[0], _HOST, name + " counts")
        longest = tf.reduce_max(counts)
        kept = tf.reshape(tf.sequence_mask(counts, longest), [-1])

        def of_all(tensor, part, before):
            rows = [[0, longest - tf.shape(tensor)[0]]]
            columns = tf.zeros([tf.rank(tensor) - 1, 2], tf.int32)
            padded = tf.pad(tensor, tf.concat([rows, columns], 0))
            with tf.control_dependencies(before), tf.device(self.device):
                options = self._options(padded, self.device, "{} {}".format(name, part))
                gathered = tf.raw_ops.CollectiveGatherV2(input=padded, **options)
            return tf.boolean_mask(gathered, kept)

        indices = of_all(slices.indices, "indices", [])
        return tf.IndexedSlices(of_all(values, "values", [indices]), indices, slices.dense_shape)

    # Limited waits ----------------------------------------------------------------------------

    def _await_all(self, address):
        """Wait until all workers have connected.

        TensorFlow would wait for them for an hour, or forever, and holds Python's lock meanwhile.
        """
        host, _, port = address.rpartition(":")
        connect = self._await_ranks if self.place.rank == 0 else self._find_rank_0
        absent = connect(host.strip("[]"), int(port), time.monotonic() + self.timeout)
        if absent:
            problem = "no answer for {:g} s".format(self.timeout)
            raise errors.rank_lost(self.place, "to start", absent, problem)

    def _await_ranks(self, host, port, deadline):
        """Listen where TensorFlow will; return the ranks that do not connect in time."""
        connected = {}
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(rendezvous.listen(self.place, host, port))
            while len(connected) < len(self.others) and time.monotonic() < deadline:
                with contextlib.suppress(OSError, ValueError):
                    listener.settimeout(max(0.1, deadline - time.monotonic()))
                    other = stack.enter_context(listener.accept()[0])
                    other.settimeout(_EXIT_TIMEOUT)
                    connected[int(other.recv(16))] = other
            absent = [rank for rank in self.others if rank not in connected]
            for other in () if absent else connected.values():
                with contextlib.suppress(OSError):
                    other.sendall(b"ready")
                    other.recv(16)  # it goes first, so that the port is free at once
        return absent

    def _find_rank_0(self, host, port, deadline):
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                with socket.create_connection((host, port), deadline - time.monotonic()) as other:
                    other.sendall(str(self.place.rank).encode())
                    if other.recv(16):
                        return []
            time.sleep(0.1)
        return [0]

    def rows_and_ended(self, sums):
        """Return the rows and the ranks without more batches, unless a process has exited."""
        left = [rank for rank in range(self.place.size) if sums[1 + rank] == _EXITS]
        if left:
            self.lost = True
            raise errors.rank_lost(self.place, "for the others", left, "it has ended")
        return super().rows_and_ended(sums)

    def leave(self):
        """Notify ranks that go on, and wait for them, at the end of the program."""

        def announce():
            if self.calls is not None:
                self.calls.end()
            with contextlib.suppress(errors.RankLostError):
                self._close(_EXITS)

        if not self.lost:
            failed = hasattr(sys, "last_type")
            waiting.answer(announce, _EXIT_TIMEOUT if failed else self.timeout, None)

    def absent(self):
        """Return no ranks: TensorFlow does not know which are missing."""
        self.lost = True
        return []
