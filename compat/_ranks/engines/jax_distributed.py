"""jax.distributed, the engine of JAX's ranks."""

import atexit
import contextlib
import inspect
import socket
import time
from typing import Any

import numpy as np

from ... import errors
from .. import engines, rendezvous, waiting
from ..addresses import with_port
from . import calls

# How often a rank that waits checks whether another one has gone, in seconds.
_LOOK = 0.2
# How long it waits for an answer of rank 0, which may be stopped, in seconds.
_ANSWER = 2.0
# How long a rank that gives up waits for the others to do so, in seconds.
_GIVE_UP = 3.0
# How much longer than the other ranks rank 0 waits to start, in seconds.
_LATER = 1.0
# How much longer than compat JAX itself waits to start, in seconds.
_SPARE = 10.0


def is_supported():
    """Return whether ranks can use the JAX that is installed."""
    import jax

    parameters = inspect.signature(jax.distributed.initialize).parameters
    return "coordinator_bind_address" in parameters


class JaxDistributed(engines.Engine):
    """jax.distributed: its coordination service, and sums over an array of one row per process.

    A process has to join before JAX makes its devices.
    """

    def __init__(self, place):
        import jax

        super().__init__(place)
        self.jax = jax
        self.gave_up = False
        #: The class of XLA's errors, for which JAX before 0.4.35 has no public name.
        self.runtime_error: Any = (
            jax.errors.JaxRuntimeError
            if hasattr(jax.errors, "JaxRuntimeError")
            else jax._src.lib.xla_client.XlaRuntimeError
        )
        if not is_supported():
            raise errors.unsupported(
                "jax",
                "train as one of several ranks in this version",
                "Install JAX 0.4.26 or later, or start the script without a launcher (compat run "
                "without -n); parallelize() then uses the devices of one process.",
            )
        host, port = rendezvous.require_rendezvous(place, "jax.distributed")
        addresses = {"coordinator_address": with_port(host, port)}
        if place.rank == 0:
            # JAX would listen at all addresses, and share the port with another job's service.
            with rendezvous.listen(place, host, port) as listening:
                bound = listening.getsockname()[0]
            addresses["coordinator_bind_address"] = with_port(bound, port)
        if not _set_option(jax, "jax_cpu_collectives_implementation", "gloo"):
            _set_option(jax, "jax_cpu_enable_gloo_collectives", True)  # JAX before 0.4.28
        # Else JAX kills a rank when another one fails, and lets none end alone.
        self.end_alone = _set_option(jax, "jax_enable_recoverability", True)  # JAX 0.7 and later
        # It would ignore the signal by which launchers end ranks.
        _set_option(jax, "jax_enable_preemption_service", False)
        # JAX aborts a process when its own timeout is over, so compat's comes first. Rank 0 gives
        # up last: it runs the service, and JAX aborts ranks that lose the service.
        limit = self.timeout + (0.0 if place.rank else _LATER)
        try:
            with self.watched("to start", limit, lambda: _silent(place, host, port)):
                jax.distributed.initialize(
                    num_processes=place.size,
                    process_id=place.rank,
                    local_device_ids=[0],  # the one that configure_gpu() has left visible
                    initialization_timeout=int(limit + _SPARE),
                    **addresses,
                )
        except RuntimeError as error:
            raise errors.rank_lost(place, "to start", [], str(error).split("\n")[0]) from error
        self.check_size(jax.process_count())
        self.store = jax._src.distributed.global_state.client
        firsts = {device.process_index: device for device in reversed(jax.devices())}
        mesh = jax.sharding.Mesh(np.array([firsts[r] for r in range(place.size)]), ("ranks",))
        self.rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self.total = jax.jit(lambda rows: rows.sum(0, dtype=rows.dtype), out_shardings=whole)
        self.all_rows = jax.jit(lambda rows: rows, out_shardings=whole)
        self.calls = calls.Calls(
            self,
            self.store.key_value_set,
            lambda name, seconds: self.store.blocking_key_value_get(name, int(1000 * seconds)),
            self.delete,
        )
        atexit.register(self.end)
        self.look_while_waiting(self.look, _LOOK)

    def sum(self, values):
        """Return the sum over all ranks: see ``Engine.sum``."""
        # By their bytes: by default JAX makes float32 of float64.
        row = np.asarray(values, "float64").view("uint32")
        rows = np.asarray(self.collect(self.all_rows, row, "for the others"))
        return rows.view("float64").sum(0)

    def sum_array(self, array, purpose="for the others' gradients"):
        """Return the sum of an array over all ranks, on this process's device."""
        return self.collect(self.total, array, purpose)

    def collect(self, function, array, purpose):
        """Return a function's result for all ranks' arrays, on this process's device."""
        jax = self.jax
        with self.waiting(purpose):
            row = jax.device_put(array[None], jax.local_devices()[0])
            shape = (self.place.size,) + row.shape[1:]
            rows = jax.make_array_from_single_device_arrays(shape, self.rows, [row])
            return function(rows).addressable_data(0).block_until_ready()

    def broadcast_bytes(self, content):
        """Return rank 0's array: see ``Engine.broadcast_bytes``."""
        return np.asarray(self.sum_array(content, "for the broadcast from rank 0"))

    def delete(self, name):
        """Delete an entry of the store."""
        with contextlib.suppress(TypeError):  # JAX before 0.4.28 cannot report that it has
            self.store.key_value_delete(name)

    # Limited waits ----------------------------------------------------------------------------

    def problem(self, error):
        """Return the message of JAX's error: see ``Engine.problem``."""
        if not isinstance(error, (self.runtime_error, ValueError)):  # gloo's, NCCL's
            return None
        line = str(error).split("\n")[0]
        return line.partition("] ")[2] or line  # "Gloo ... failed: [...pair.cc:547] Conn..."

    def absent(self):
        """Report that this rank gives up, and return the others that do not give up as well."""
        self.inside = None
        self.mark("gave up")
        until = time.monotonic() + _GIVE_UP
        absent = self.others
        while absent and time.monotonic() < until:
            time.sleep(_LOOK)
            marked = self.marked("gave up")
            absent = [0] if marked is None else [r for r in self.others if r not in marked]
        self.gave_up = True
        return absent

    def look(self, inside):
        """End this process if it waits for a rank that has ended, or too long.

        JAX's own collectives have no limit.
        """
        purpose, _, until = inside
        ended = self.marked("ended") or []
        if (ended or time.monotonic() > until) and self.inside is inside:
            problem = "it has ended" if ended else "no answer for {:g} s".format(self.timeout)
            lost = self.absent()
            error = errors.rank_lost(self.place, purpose, ended or lost, problem)
            waiting.end_process(error, self.end)

    def mark(self, state):
        """Record a state of this rank, "gave up" or "ended", in the store of rank 0."""

        def record():
            with contextlib.suppress(self.runtime_error):
                self.store.key_value_set("compat/{}/{}".format(state, self.place.rank), "-")

        waiting.answer(record, _ANSWER, None)

    def marked(self, state):
        """Return the other ranks that have recorded a state, or None if rank 0 does not answer.

        Rank 0 itself is returned where it is gone, since it keeps the store.
        """

        def query():
            try:
                entries = self.store.key_value_dir_get("compat/{}".format(state))
            except self.runtime_error:
                return [0]
            marked = {int(key.rsplit("/", 1)[1]) for key, _ in entries}
            return [rank for rank in self.others if rank in marked]

        return waiting.answer(query, _ANSWER, None)

    def end(self):
        """Leave the ranks at the end of the program, rank 0 after all others.

        Rank 0 keeps their states, and without it JAX ends them before they have recorded any.
        """
        self.mark("ended")
        if self.gave_up:
            time.sleep(0.0 if self.place.rank else _GIVE_UP)
            return
        everyone = list(range(self.place.size))
        until = time.monotonic() + self.timeout
        while self.place.rank == 0 and time.monotonic() < until:
            ended, gave_up = self.marked("ended") or [], self.marked("gave up") or []
            everyone_leaves = len(ended) == self.place.size - 1 and not gave_up
            if everyone_leaves and self.end_alone:
                # The others leave JAX's service: it answers when all have, and not before.
                waiting.answer(lambda: self.store.get_live_nodes(everyone), self.timeout, None)
            if len(set(ended) | set(gave_up)) == self.place.size - 1:
                return
            time.sleep(_LOOK)


def _set_option(jax, name, value):
    """Set an option of JAX, and return whether this version has it."""
    try:
        jax.config.update(name, value)
    except AttributeError:
        return False
    return True


def _silent(place, host, port):
    """Return rank 0 in a list if its service, an HTTP/2 server, does not send the first bytes."""
    if place.rank == 0:
        return []
    try:
        with socket.create_connection((host, port), _ANSWER) as connection:
            return [] if connection.recv(1) else [0]
    except OSError:
        return [0]
