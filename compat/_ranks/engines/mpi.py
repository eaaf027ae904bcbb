"""MPI, by mpi4py, the engine of Theano's and CNTK's ranks.

MPI has no timeouts, and in its own ``MPI_Finalize`` a rank waits for all others, also for those
that wait for it elsewhere. So everything here is non-blocking and polled in a loop that

- gives up after ``COMPAT_TIMEOUT`` seconds, after a query which of the others wait as well,
- notices at once that a rank has come to its end: the rank reports that, and how far it got, before
  it waits for the others to come to theirs.

A rank that fails does not call ``MPI_Finalize``: the launcher then ends the others.
"""

import atexit
import ctypes
import os
import shutil
import sys
import time
import zlib
from typing import Dict, Set

from ... import errors
from ..._configuration import packages
from ..._runtime.on_demand import numpy
from .. import engines
from ..launch import starter
from . import calls

# Notes between ranks: that one has come to its end; a query which others wait; and the answer.
_LEFT, _QUERIES, _WAITS = range(3)
# How long a rank that ended too early stays, for those that wait for it to report it, in seconds.
_HOLD = 0.5
# Bytes of a message. MPI makes progress only while it is polled, a little at each time, and
# ``_wait`` polls the less often the longer it has waited: 26 MB took two ranks 4 seconds at once,
# and 0.01 in pieces.
_PIECE = 2**18
# Bytes of a text that describes a wait.
_LONGEST = 200


class MPI(engines.Engine):
    """The processes of an MPI launcher (mpirun, mpiexec, srun)."""

    def __init__(self, place):
        super().__init__(place)
        self.mpi = _import(place)
        self.done = 0  # calls of the others that have come to their ends
        self.left: Dict[int, int] = {}  # rank that has come to its end -> its ``done``
        self.waiters: Set[int] = set()  # ranks that answered that they wait
        self.notes = None  # the communicator of the notes above
        self.lost = False
        self.process = os.getpid()
        if not self.mpi.Is_initialized():
            provided = ctypes.c_int()
            start = ctypes.CDLL(self.mpi.__file__).MPI_Init_thread
            with self.watched("to start"):  # mpi4py's own call would let no other thread run
                start(None, None, self.mpi.THREAD_MULTIPLE, ctypes.byref(provided))
        world = self.mpi.COMM_WORLD
        self.check_size(world.Get_size())
        # The framework, or the script, may use the world as well.
        with self.waiting("to start"):
            self.comm = self._duplicate(world)
            self.notes = self._duplicate(world)
        atexit.register(self._leave)

    def sum(self, values):
        """Return the sum over all ranks: see ``Engine.sum``."""
        return self.sum_array(numpy.array(values, "float64"), "for the others")

    def sum_array(self, array, purpose="for the others' gradients"):
        """Sum an array over all ranks, in place, to the same bits on all of them."""
        flat = array.view()
        flat.shape = -1  # no copy, or an error
        with self.waiting(purpose):
            self._in_pieces(flat, lambda piece: self.comm.Iallreduce(self.mpi.IN_PLACE, piece))
        return array

    def broadcast_bytes(self, content):
        """Return rank 0's array: see ``Engine.broadcast_bytes``."""
        received = content.copy()  # may be written to
        self._in_pieces(received, self.comm.Ibcast)
        return received

    def _in_pieces(self, array, begin):
        """Exchange an array, piece by piece."""
        self._agree(self.inside[0], len(array))
        size = _PIECE // array.itemsize
        for start in range(0, len(array), size):
            self._wait(begin(array[start : start + size]))

    def _agree(self, purpose, size):
        """Refuse to exchange where ranks wait for different things.

        MPI adds up whatever has one size, and ends the process silently where sizes differ.
        """
        code = zlib.crc32("{} {}".format(purpose, size).encode())
        codes = numpy.array([code, -code], "int64")
        self._wait(self.comm.Iallreduce(self.mpi.IN_PLACE, codes, self.mpi.MAX))
        if codes[0] == -codes[1]:
            return
        mine = (purpose + errors.users_line()).encode()[:_LONGEST].ljust(_LONGEST)
        gathered = numpy.empty([self.place.size, _LONGEST], "uint8")
        self._wait(self.comm.Iallgather(numpy.frombuffer(mine, "uint8"), gathered))
        waits = [row.tobytes().decode("utf-8", "replace").rstrip() for row in gathered]
        raise calls.different_calls(enumerate(waits))

    # Joining and leaving ----------------------------------------------------------------------

    def _duplicate(self, world):
        comm, request = world.Idup()
        self._wait(request)
        comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        return comm

    def _leave(self):
        """Leave the ranks at the end of this process."""
        if os.getpid() != self.process or self.mpi.Is_finalized():  # a fork is no rank
            return
        failed = self.lost or hasattr(sys, "last_type")  # of an exception that ended the script
        if not failed:
            self._send(_LEFT, self.others)
            while len(self.left) < len(self.others) and not self.waiters:
                self._listen()
                time.sleep(0.01)
            if not self.waiters:
                self.mpi.Finalize()
                return
            time.sleep(_HOLD)
        import mpi4py

        if mpi4py.rc.finalize is not False:  # the script imported it before
            for stream in (sys.stdout, sys.stderr):
                print(end="", file=stream, flush=True)  # works, too, where it is closed
            self.mpi.COMM_WORLD.Abort(1)

    # Waiting ----------------------------------------------------------------------------------

    def _wait(self, request):
        """Wait until all ranks have taken part in a request."""
        purpose, *_ = self.inside
        start = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - start
            self._listen()
            ended = sorted(rank for rank, done in self.left.items() if done <= self.done)
            if ended:
                self._send(_WAITS, ended)
                raise errors.rank_lost(self.place, purpose, ended, "its script has ended")
            if waited > self.timeout:
                problem = f"{self.timeout:g} seconds are over"
                raise errors.rank_lost(self.place, purpose, self.absent(), problem)
            # At first without a pause; later the less often the longer it takes.
            time.sleep(0 if waited < 0.002 else min(waited / 50, 0.01))
        self.done += 1

    def problem(self, error):
        """Return MPI's message: see ``Engine.problem``."""
        self.lost = True  # whatever it is, this rank has left an exchange
        return str(error) if isinstance(error, self.mpi.Exception) else None

    def absent(self):
        """Return the ranks that do not answer that they wait, too."""
        if self.notes is None or self.lost:
            return []
        self._send(_QUERIES, self.others)
        return self.missing(lambda rank: self._listen() or rank in self.waiters)

    def _send(self, kind, ranks):
        note = numpy.array([kind, self.done])
        for rank in ranks:
            self.notes.Isend(note, rank).Free()
        self._sent = note  # kept until it has left

    def _listen(self):
        """Receive the notes of others, and answer queries."""
        if self.notes is None:
            return
        status = self.mpi.Status()
        while self.notes.Iprobe(status=status):
            note = numpy.empty(2, int)
            sender = status.Get_source()
            self.notes.Recv(note, sender)
            if note[0] == _LEFT:
                self.left[sender] = int(note[1])
            elif note[0] == _QUERIES:
                self._send(_WAITS, [sender])
            else:
                self.waiters.add(sender)


def _import(place):
    if not leave_to_engine():
        raise _no_mpi4py(f"{str(place).capitalize()} needs")
    try:
        from mpi4py import MPI as mpi
    except ImportError as error:  # linked with an MPI that is not there
        raise errors.broken_install("mpi4py", error) from error
    return mpi


def _no_mpi4py(needs):
    return errors.NotInstalledError(
        f"{needs} mpi4py, which is not installed here, to train with the others. Install it for "
        "the MPI of the launcher: pip install mpi4py, which compiles it where there is no wheel "
        "(on Debian and Ubuntu that needs apt-get install libopenmpi-dev openmpi-bin)."
    )


def leave_to_engine():
    """Keep the import of ``mpi4py.MPI``, wherever it is, from starting and finalizing MPI.

    Returns:
        Whether mpi4py is installed.
    """
    try:
        import mpi4py
    except ImportError:
        return False
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    return True


def launcher(job):
    """Return mpirun's command for a job: see ``Backend.launcher``.

    Open MPI refuses more ranks than cores, ties each rank with all its threads to one core or
    socket, and refuses root; torchrun and horovodrun do none of that. Other MPIs do not read this.
    It starts its own programs on other machines, from the folder it is in itself if it is called
    by its path, and hands over variables that are named.

    Raises:
        NotInstalledError: there is no mpirun, or no mpi4py. In another interpreter than this one
            the ranks find out whether there is.
        InvalidArgumentError: a machine has a user in front: mpirun would not find it again.
    """
    if job.hosts and "@" in job.hosts:
        raise errors.user_of_host(job.hosts, "mpirun")
    mpirun = shutil.which("mpirun", path=job.environ.get("PATH"))
    if mpirun is None:
        raise errors.NotInstalledError(
            "Ranks of Theano and CNTK are started by mpirun, which is not on PATH. Install the MPI "
            "that mpi4py was compiled with: on Debian and Ubuntu, apt-get install openmpi-bin."
        )
    if job.python == sys.executable and packages.version("mpi4py") is None:
        raise _no_mpi4py("Each rank needs")
    command = ["env", "OMPI_MCA_rmaps_base_oversubscribe=1"]
    command += ["OMPI_MCA_hwloc_base_binding_policy=none"]
    command += ["OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
    command += [mpirun, "-n", str(job.size)]
    if job.hosts is not None:
        command += ["--host", job.hosts]
        for name in sorted(starter.exported(job.environ)):
            command += ["-x", name]
    return command
