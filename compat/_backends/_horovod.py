"""Horovod: what the ranks of TensorFlow talk through.

Horovod's own ``DistributedOptimizer`` is another class than the user's, which saved models then
name, and weights all ranks alike. Here Horovod carries numbers, and no more: within the user's
graphs (``Horovod.mean``), and for this process itself in a small graph of the engine's own.
"""

import contextlib
import math
import os
import pickle
import sys
import threading
import time
import urllib.error
import urllib.request

from .. import _detect, _ranks, errors
from . import _tensorflow_engine


class Horovod(_tensorflow_engine.TensorFlowEngine):
    """Horovod, as horovodrun has started it."""

    mark = "orovod"

    def __init__(self, ranks):
        super().__init__(ranks)
        self.timeout = _ranks.timeout(os.environ)
        self.deadline = None  # of the wait that goes on
        self.horovod = _import_horovod()
        import tensorflow

        tf = self.tf = getattr(tensorflow.compat, "v1", tensorflow)
        self._meet()
        # How long it waits for a rank whose machine is gone.
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(int(math.ceil(self.timeout))))
        self.horovod.init()
        self.check_size(self.horovod.size())
        threading.Thread(target=self._watch, name="compat waits for ranks", daemon=True).start()
        graph = tf.Graph()
        with graph.as_default(), tf.device("/cpu:0"):
            self.numbers = tf.placeholder(tf.float64, [None])
            self.summed = self.horovod.allreduce(
                self.numbers, op=self.horovod.Sum, name="horovod_sum"
            )
            self.bytes = tf.placeholder(tf.uint8, [None])
            self.sent = self.horovod.broadcast(self.bytes, 0, name="horovod_broadcast")
        # Threads of its own: a user's graph may hold all others while it waits for this one.
        config = tf.ConfigProto(use_per_session_threads=True, inter_op_parallelism_threads=1)
        config.device_count["GPU"] = 0
        self.session = tf.Session(graph=graph, config=config)

    def sum(self, values):
        with self.waiting("for the others' numbers"):
            self.arrive()
            return self.session.run(self.summed, {self.numbers: values})

    def broadcast(self, value):
        import numpy

        content = pickle.dumps(value, 2) if self.ranks.rank == 0 else b""
        size = int(self.sum([len(content)])[0])
        content = numpy.frombuffer(content or bytes(size), "uint8")
        with self.waiting("for rank 0's weights"):
            self.arrive()
            return pickle.loads(self.session.run(self.sent, {self.bytes: content}).tobytes())

    # In the user's graphs ---------------------------------------------------------------------

    def mean(self, tensors, share, name):
        """The mean over all ranks, weighted by their shares of the rows.

        Arguments:
            tensors: dense ones and ``IndexedSlices``, the same on all ranks.
            share: this rank's, a float64 tensor.
            name: of the operation; the ranks' operations of one name belong together.
        """
        tf, results = self.tf, list(tensors)
        with tf.control_dependencies(results):
            share = self.called(self.arrive, share, tf.float64)
        dense = {}  # places by dtype: a group is of one
        for place, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices):
                results[place] = self._mean_of_rows(tensor, share, "{}_{}".format(name, place))
            else:
                dense.setdefault(tensor.dtype, []).append(place)
        for dtype, places in dense.items():
            weighted = [tensors[place] * tf.cast(share, dtype) for place in places]
            means = self.horovod.grouped_allreduce(
                weighted,
                op=self.horovod.Sum,
                name="horovod_{}_{}".format(name, dtype.name),
                ignore_name_scope=True,  # of functions, one in the other, which ranks may differ in
            )
            for place, mean in zip(places, means):
                results[place] = mean
        return results

    def _mean_of_rows(self, slices, share, name):
        """All ranks' rows one after the other: optimizers sum up those of one index."""

        def gather(tensor, part):
            name_of_part = "horovod_{}_{}".format(name, part)
            return self.horovod.allgather(tensor, name=name_of_part, ignore_name_scope=True)

        values = slices.values * self.tf.cast(share, slices.values.dtype)
        return self.tf.IndexedSlices(
            gather(values, "values"), gather(slices.indices, "indices"), slices.dense_shape
        )

    # Failures ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting(self, what):
        """As the base class's; no wait goes on afterwards."""
        try:
            with super().waiting(what):
                yield
        finally:
            self.deadline = None

    def arrive(self, share=None):
        """Note that this rank waits for the others from now on. Returns its argument."""
        self.deadline = time.monotonic() + self.timeout
        return share

    def _watch(self):
        """End a wait that takes too long: Horovod, shut down, fails it on all ranks.

        Horovod's own check for stalls finds none between CPUs: it goes through a list of ranks
        that its gloo part leaves empty (0.28.1, ``GlooController::DoInitialization``).
        """
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            time.sleep(min(0.5, self.timeout))
            deadline = self.deadline
        self.horovod.shutdown()

    def _meet(self):
        """Wait until all ranks come: Horovod itself would abort the process where one does not."""
        if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ:  # no horovodrun
            return
        try:
            absent = self._not_at("start", self.timeout)
        except OSError as error:
            raise errors.rank_lost(self.ranks, "to start", [], error) from error
        if absent:
            problem = "nothing was heard of it for {:g} seconds".format(self.timeout)
            raise errors.rank_lost(self.ranks, "to start", absent, problem)

    def absent(self):
        """The ranks that do not stand here as well, as far as horovodrun still tells."""
        try:
            return self._not_at("failure", 2.0)
        except (KeyError, OSError):  # no horovodrun, or it has gone, too
            return []

    def _not_at(self, place, seconds):
        """The ranks that do not come to the place in that time: horovodrun keeps a store."""
        others = [rank for rank in range(self.ranks.size) if rank != self.ranks.rank]
        until = time.monotonic() + seconds
        _in_store("PUT", place, self.ranks.rank)
        while others and time.monotonic() < until:
            time.sleep(0.1)
            others = [rank for rank in others if not _in_store("GET", place, rank)]
        return others


def _in_store(method, place, rank):
    """Note in horovodrun's store that a rank is at a place, or ask whether it is."""
    address = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    port = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    url = "http://{}:{}/compat_{}/{}".format(address, port, place, rank)
    request = urllib.request.Request(url, b"1" if method == "PUT" else None, method=method)
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=2.0)
    except urllib.error.HTTPError:
        return False
    return True


def _import_horovod():
    """``horovod.tensorflow``.

    Raises:
        NotInstalledError: Horovod is not installed.
        BrokenInstallError: it is, but not for this TensorFlow.
    """
    if _detect.distribution_version("horovod") is None:
        raise errors.no_horovod()
    try:
        import horovod.tensorflow as horovod
    except Exception as error:  # it was built without TensorFlow, or with another one
        raise errors.broken_install("horovod.tensorflow", error) from error
    return horovod


def launcher(size, python, hosts=None):
    """horovodrun, which needs no ssh on this machine, and reaches others by it.

    Raises:
        NotInstalledError: Horovod is not installed.
    """
    if python == sys.executable and _detect.distribution_version("horovod") is None:
        raise errors.no_horovod()
    horovodrun = [python, "-m", "horovod.runner.launch", "--gloo", "--disable-cache"]
    return horovodrun + ["-np", str(size)] + (["-H", hosts] if hosts else [])
