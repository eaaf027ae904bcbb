"""Horovod, the engine of TensorFlow's and MXNet's ranks.

Horovod's own ``DistributedOptimizer`` is another class than the user's, which saved models then
name, and weights all ranks alike. Here Horovod carries numbers only. Rendezvous, waits and failures
are the same for all frameworks; each framework has its own way to hand numbers to Horovod.
"""

import importlib
import math
import os
import sys
import threading
import time
import urllib.error
import urllib.request

from ... import errors
from ..._configuration import packages
from .. import engines


class HorovodEngine(engines.Engine):
    """Horovod, as horovodrun has started it. Subclasses are for one framework each.

    Raises:
        NotInstalledError: Horovod is not installed.
        BrokenInstallError: it is, but not for this framework.
    """

    name = "Horovod"
    #: The framework's name in Horovod: ``horovod.<framework>``.
    framework = ""

    def __init__(self, place):
        super().__init__(place)
        self.deadline = None  # of the wait that goes on
        if packages.version("horovod") is None:
            raise _no_horovod(self.framework)
        name = "horovod." + self.framework
        try:
            self.horovod = importlib.import_module(name)
        except Exception as error:  # it was built without the framework, or with another one
            raise errors.broken_install(name, error) from error
        self._rendezvous()
        # How long it waits for a rank whose machine is gone.
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(int(math.ceil(self.timeout))))
        self.horovod.init()
        self.check_size(self.horovod.size())
        threading.Thread(target=self._watch, name="compat waits for ranks", daemon=True).start()

    def sum(self, values):
        """Return the sum over all ranks: see ``Engine.sum``."""
        with self.waiting("for the others' numbers"):
            self.arrive()
            return self.sum_numbers(values)

    def sum_numbers(self, values):
        """Return the sum over all ranks of lists of numbers, as an array of float64."""

    # Failures ---------------------------------------------------------------------------------

    def arrive(self):
        """Note that this rank waits for the others from now on."""
        self.deadline = time.monotonic() + self.timeout

    def resume(self):
        """Note that it waits no longer."""
        self.deadline = None

    def _watch(self):
        """End a wait that takes too long by shutting Horovod down, which fails it on all ranks.

        Horovod's own check for stalls detects none between CPUs: it iterates over a list of ranks
        that its gloo part leaves empty (0.28.1, ``GlooController::DoInitialization``).
        """
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            time.sleep(min(0.5, self.timeout))
            deadline = self.deadline
        self.horovod.shutdown()

    def _rendezvous(self):
        """Wait until all ranks come: Horovod itself would abort the process if one does not."""
        if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ:  # no horovodrun
            return
        try:
            absent = self._missing("start", self.timeout)
        except OSError as error:
            raise errors.rank_lost(self.place, "to start", [], error) from error
        if absent:
            problem = "nothing was heard of it for {:g} seconds".format(self.timeout)
            raise errors.rank_lost(self.place, "to start", absent, problem)

    def absent(self):
        """Return the ranks that do not report to horovodrun's store, if it is still there."""
        try:
            return self._missing("failure", 2.0)
        except (KeyError, OSError):  # no horovodrun, or it has gone, too
            return []

    def _missing(self, place, seconds):
        """Return the ranks that do not come to a place in time, by horovodrun's store."""
        _in_store("PUT", place, self.place.rank)
        return self.missing(lambda rank: _in_store("GET", place, rank), seconds)


def _in_store(method, place, rank):
    """Record in horovodrun's store that a rank is at a place, or return whether it is."""
    address = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    port = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    url = "http://{}:{}/compat_{}/{}".format(address, port, place, rank)
    request = urllib.request.Request(url, b"1" if method == "PUT" else None, method=method)
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=2.0)
    except urllib.error.HTTPError:
        return False
    return True


def is_missing(python):
    """Return whether Horovod is not installed, which is only known of this interpreter."""
    return python == sys.executable and packages.version("horovod") is None


def launcher(job, framework):
    """Return horovodrun's command, which reaches other machines by ssh.

    Raises:
        NotInstalledError: Horovod is not installed.
        InvalidArgumentError: a machine has a user in front, which horovodrun refuses.
    """
    if is_missing(job.python):
        raise _no_horovod(framework)
    if job.hosts and "@" in job.hosts:
        raise errors.user_of_host(job.hosts, "horovodrun")
    horovodrun = [job.python, "-m", "horovod.runner.launch", "--gloo", "--disable-cache"]
    return horovodrun + ["-np", str(job.size)] + (["-H", job.hosts] if job.hosts else [])


def _no_horovod(framework):
    return errors.NotInstalledError(
        f"Ranks of {framework} train together through Horovod, which is not installed. Build it "
        f"where {framework} is: HOROVOD_WITH_GLOO=1 HOROVOD_WITH_{framework.upper()}=1 pip install "
        "--no-build-isolation --no-cache-dir horovod==0.28.1 (that needs a C++ compiler, "
        "setuptools<60 and cmake<4). Or start the script without a launcher (compat run without "
        "-n)."
    )
