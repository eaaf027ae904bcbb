"""torch.distributed, the engine of torch's ranks."""

import atexit
import contextlib
import datetime
import os
import re
import sys
from typing import Any

from .. import engines, rendezvous, waiting
from . import calls

_STATISTICS = "for the others' batch statistics"


class TorchDistributed(engines.Engine):
    """The process group of torch.distributed: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, place):
        import torch.distributed as distributed

        super().__init__(place)
        self.distributed = distributed
        self.last = None  # the exchange that all ranks did last
        self.store: "Any" = None
        self.made = False  # this class, and not the script, has made the default group
        self.limit = datetime.timedelta(seconds=self.timeout)
        cuda = sys.modules["torch"].cuda.is_available()
        if place.on_one_machine and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # where gloo listens
        # A stopped rank 0 still accepts connections but never answers, which the store's own
        # timeouts do not cover.
        with self.watched("to start", 2 * self.timeout, self._keeper), self.waiting("to start"):
            if not distributed.is_initialized():
                self._make_default_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
            self.check_size(distributed.get_world_size())
            # Sums that ranks begin during a backward pass keep their order in a separate group,
            # whatever layers or the script exchange meanwhile, as SyncBatchNorm does.
            self.group = distributed.new_group(timeout=self.limit)
        self.statistics = None  # likewise: of what ranks gather while a model runs
        self.closed = 0  # how often this rank has run out of batches
        if not cuda:
            # One of gloo's threads that still lets go of a tensor while Python finalizes ends the
            # process: "terminate called without an active exception".
            atexit.register(self._leave)

    def _make_default_group(self, backends):
        place = self.place
        store = self.store = self._store_of_all()
        # All come to the store first, so that it knows which have not.
        store.set("compat/came/{}".format(place.rank), "")
        store.wait(["compat/came/{}".format(r) for r in range(place.size)], self.limit)
        prefixed = self.distributed.PrefixStore("compat", store)
        self.distributed.init_process_group(
            backends, store=prefixed, rank=place.rank, world_size=place.size, timeout=self.limit
        )
        self.made = True

        def read(name, seconds):
            if seconds < 1 and not store.check([name]):  # wait() would warn on stderr each time
                raise LookupError(name)
            store.wait([name], datetime.timedelta(seconds=seconds))
            return store.get(name).decode()

        self.calls = calls.Calls(self, store.set, read, store.delete_key)
        atexit.register(self.calls.end)
        self.look_while_waiting(self._look_for_ended, 1.0)

    def _store_of_all(self):
        """Return the store that is the rendezvous."""
        distributed, place = self.distributed, self.place
        if rendezvous.torchrun_keeps_store(os.environ):  # it outlives every rank
            stores = distributed.rendezvous("env://", place.rank, place.size, timeout=self.limit)
            return next(stores)[0]
        host, port = rendezvous.require_rendezvous(place, "torch.distributed")
        # This class names the ranks that do not come; the store would only count them.
        options = {"is_master": place.rank == 0, "timeout": self.limit, "wait_for_workers": False}
        if place.rank == 0:
            # By itself the store would listen at all addresses.
            options["master_listen_fd"] = rendezvous.listen(place, host, port).detach()
        return distributed.TCPStore(host, port, place.size, **options)

    def _leave(self):
        """Destroy the groups made here as this process ends, unless the script has done so."""
        groups = [None] if self.made else [self.statistics, self.group]
        self.group = self.statistics = None
        for group in groups:
            if self.distributed.is_initialized() and (group is not None or self.made):
                with contextlib.suppress(
                    ValueError
                ):  # the script has destroyed it, and made others
                    self.distributed.destroy_process_group(group)

    def sum(self, values):
        """Return the sum over all ranks: see ``Engine.sum``."""
        torch = sys.modules["torch"]
        tensor = torch.tensor(values, dtype=torch.float64)
        with self.waiting("for the others' gradients"):
            self.distributed.all_reduce(tensor)
        return tensor.numpy()

    def begin_sum(self, tensor):
        """Begin to sum up a tensor over all ranks, in its place, which ``end_sum`` waits for."""
        with self.waiting("for the others' gradients"):
            return self.distributed.all_reduce(tensor, group=self.group, async_op=True)

    def end_sum(self, work, front):
        """Wait for a sum that ``begin_sum`` has begun.

        Arguments:
            work: the sum.
            front: numbers at the front of the tensor, or none.

        Returns:
            These, as a list: NCCL's work is not awaited by the host before it reads a result.
        """
        with self.waiting("for the others' gradients"):
            work.wait()
            return front.tolist()

    def prepare_statistics(self):
        """Make the group in which ranks gather statistics. All ranks do so at once."""
        if self.statistics is None:
            with self.waiting("to start"):
                self.statistics = self.distributed.new_group(timeout=self.limit)

    def gather_rows(self, tensor, group, count):
        """Return the flat tensors of a group's ranks, which have one size, as rows of one.

        Their first numbers, so many, are returned as lists: see ``end_sum``.
        """
        rows = tensor.new_empty((self.distributed.get_world_size(group), *tensor.shape))
        with self.waiting(_STATISTICS):
            self.distributed.all_gather(list(rows), tensor, group=group)
            return rows[:, :count].tolist(), rows[:, count:]

    def concatenate(self, tensor):
        """Return all ranks' tensors, of any numbers of rows, concatenated."""
        torch = sys.modules["torch"]
        sizes = [size for (size,) in self.gather([len(tensor)])]
        padded = tensor.new_zeros((max(sizes),) + tensor.shape[1:])
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in sizes]
        with self.waiting("for the others' gradients"):
            self.distributed.all_gather(gathered, padded)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes)])

    def _look_for_ended(self, inside):
        """End this process if it waits for statistics of a rank that has no more batches.

        Such a rank is in the exchange that ends a step, and in no other.
        """
        if inside[0] != _STATISTICS:
            return
        with contextlib.suppress(RuntimeError):  # the store has gone
            closed = {rank: self._closed(rank) for rank in self.others}
            ended = [rank for rank, count in closed.items() if count > self.closed]
            if ended and self.inside is inside:
                waiting.end_process(self.has_more_batches(ended))

    def _closed(self, rank):
        name = "compat/closed/{}".format(rank)
        return int(self.store.get(name)) if self.store.check([name]) else 0

    def _close(self, flag=True):
        self.closed += 1
        if self.statistics is not None and self.calls is not None:
            self.store.set("compat/closed/{}".format(self.place.rank), str(self.closed))
        # Others that have more batches are in an exchange like the last one.
        return super()._close(flag) if self.last is None else self.last.close()

    def broadcast(self, value):
        """Return the value that rank 0 passes: see ``Engine.broadcast``."""
        box = [value]
        with self.waiting("for the broadcast from rank 0"):
            self.distributed.broadcast_object_list(box, device="cpu")
        return box[0]

    def problem(self, error):
        """Return the message of gloo, NCCL or the store: see ``Engine.problem``."""
        if not isinstance(error, RuntimeError):  # of gloo, NCCL and the store
            return None
        # "[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [...]. This is ...", or
        # "wait timeout after 25000ms, keys: /compat/came/0, ..."
        line = re.sub(r"^\[\S*\] ", "", str(error)).strip().split("\n")[0]
        return line.split(". ")[0].partition(", keys: ")[0]

    def absent(self):
        """Return the ranks that do not report to the store, or the one whose store is gone."""
        store = self.store
        if store is None:  # it could not be reached, or the script has made the group
            return [] if self.distributed.is_initialized() else self._keeper()

        def not_waiting():
            try:
                store.set("compat/waits/{}".format(self.place.rank), "")
                return self.missing(lambda rank: store.check(["compat/waits/%d" % rank]))
            except RuntimeError:  # the store has gone, too
                return self._keeper()

        return waiting.answer(not_waiting, 4.0, self._keeper())

    def _keeper(self):
        """Return the rank that keeps the store in a list, if it is another one."""
        return [0] if self.place.rank and not rendezvous.torchrun_keeps_store(os.environ) else []
