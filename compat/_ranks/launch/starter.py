"""``_ranks.launch.starter WHERE [--cluster] COMMAND...``, by ``by_path``: start ranks of a command.

The launcher for engines without one, or without one for several machines. ``WHERE`` is the number
of ranks on this machine, or machines and how many each runs: ``first:4,second:4``. Other machines
are reached by ssh, and have the same folders. One rank that fails ends all.

Each machine's ranks are children of one process there, which reads from its standard input what to
start. When that input ends, for whatever reason, it ends them; a line "interrupt" interrupts them.
"""

import contextlib
import itertools
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Dict, List, Mapping, Sequence

from ... import _ranks
from ..._runtime import by_path
from .. import launchers
from ..tf_config import environ_of_worker
from .processes import dies_with_this_process

# How long the others may take to end, in seconds.
_GRACE = 8.0
# Variables of a machine, or of a login there, that mean nothing on another one.
_OWN = set("HOME HOST HOSTNAME LOGNAME MAIL OLDPWD PWD SHELL SHLVL TMPDIR USER _".split())
_OWN_PREFIXES = "BASH_FUNC_", "DBUS_", "DISPLAY", "SSH_", "XDG_"


def launcher(job: "_ranks.Job", *options: str) -> List[str]:
    """Return this launcher's command for a job: see ``Backend.launcher``."""
    return by_path.command("_ranks.launch.starter") + [job.hosts or str(job.size)] + list(options)


def exported(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the environment variables that ranks on other machines need."""
    names = set(environ) - _OWN
    return {name: environ[name] for name in names if not name.startswith(_OWN_PREFIXES)}


# All machines ---------------------------------------------------------------------------------


def start(where: str, cluster: bool, command: Sequence[str]) -> int:
    """Start the ranks, wait for them, and return the first exit status that is not 0.

    Arguments:
        where: as the command takes it.
        cluster: whether each rank gets the addresses of all ranks, as TensorFlow's workers need.
        command: what to start in each rank.
    """
    machines = [("127.0.0.1", int(where))] if where.isdigit() else _ranks.parse_hosts(where)
    task = {"command": command, "directory": os.getcwd(), "environ": exported(os.environ)}
    agents: List[Any] = []
    size = sum(slots for _, slots in machines)
    with _reserved_ports(size if cluster else 1) as ports:
        for (host, _), ranks in zip(machines, _places(machines, ports, cluster)):
            agents.append(subprocess.Popen(_agent(host), stdin=subprocess.PIPE))
            _send(agents[-1:], json.dumps(dict(task, ranks=ranks)))
        signal.signal(signal.SIGTERM, lambda *ignored: sys.exit(128 + signal.SIGTERM))
        # ssh passes no signal on.
        signal.signal(signal.SIGINT, lambda *ignored: _send(agents, "interrupt"))
        try:
            return _watch(agents)
        finally:
            for agent in agents:
                with contextlib.suppress(BrokenPipeError):
                    agent.stdin.close()
            wait(agents, 2 * _GRACE)


def _send(agents, line):
    """Write a line to the processes of machines."""
    for agent in agents:
        with contextlib.suppress(BrokenPipeError):  # ssh has failed, and says why
            agent.stdin.write(line.encode("ascii") + b"\n")
            agent.stdin.flush()


def _places(machines, ports, cluster):
    """Yield for each machine a list of the environment variables of its ranks.

    Arguments:
        machines: pairs of a host and its number of ranks.
        ports: one for each rank of a cluster; otherwise that of the rendezvous, in a list.
        cluster: as ``start`` takes it.
    """
    size = sum(slots for _, slots in machines)
    hosts = [host for host, slots in machines for _ in range(slots)]
    addresses = [f"{_ranks.host_address(host)}:{port}" for host, port in zip(hosts, ports)]
    names = "COMPAT_RANK", "COMPAT_SIZE", "COMPAT_LOCAL_RANK", "COMPAT_LOCAL_SIZE"
    ranks = itertools.count()
    for _, slots in machines:
        places = []
        for local_rank, rank in zip(range(slots), ranks):
            if cluster:
                places.append(environ_of_worker(addresses, rank))
            else:
                place = dict(zip(names, map(str, (rank, size, local_rank, slots))))
                places.append(dict(place, COMPAT_RENDEZVOUS=addresses[0]))
        yield places


@contextlib.contextmanager
def _reserved_ports(count):
    """Yield ports that are free here; on another machine they are likely to be.

    On Linux they stay free until a rank listens, which takes the seconds in which it imports its
    framework: the kernel gives a port to nobody else while a socket is bound to it, and lets
    servers, which set SO_REUSEADDR, listen at it as long as that socket does not (tcp(7)).
    """
    with contextlib.ExitStack() as reserved:
        sockets = [reserved.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("", 0))
        ports = [bound.getsockname()[1] for bound in sockets]
        if sys.platform != "linux":
            reserved.close()
        yield ports


def _agent(host):
    """Return the command that starts the process which starts a machine's ranks."""
    agent = by_path.command("_ranks.launch.starter")
    if _is_here(host):
        return agent
    # It must not ask for a password; a machine that is gone is noticed in half a minute.
    ssh = "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=10".split()
    return ssh + ["--", host, " ".join(map(shlex.quote, agent))]


def _is_here(host):
    """Return whether this machine has the host's address, at which only it can listen."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as listening:
            listening.bind(address)
    except OSError:  # or a name that only ssh knows
        return False
    return True


# One machine ----------------------------------------------------------------------------------


def start_here() -> int:
    """Start the ranks of this machine that standard input describes; return as ``start()``."""
    lines = os.fdopen(0, "rb", 0)  # unbuffered: select() sees the next line even if both are there
    task = json.loads(lines.readline().decode("ascii"))
    os.chdir(task["directory"])
    os.environ.update(task["environ"])
    options: Any = {"stdin": subprocess.DEVNULL, "preexec_fn": dies_with_this_process()}
    environs = [dict(os.environ, **place) for place in task["ranks"]]
    processes = [subprocess.Popen(task["command"], env=environ, **options) for environ in environs]
    try:
        status = _watch(processes, lines)
        for place, process in zip(task["ranks"], processes):
            if process.returncode:  # shown where the rank itself does not report its end
                rank = getattr(launchers.launched(place), "rank", None)
                # One write: print() may write the newline separately, and ranks write here, too.
                text = f"Rank {rank} was the first to end, with exit status {status}.\n"
                sys.stdout.write(text)
                break
        return status
    finally:
        for process in processes:
            process.terminate()  # unless it is known to have ended
        wait(processes, _GRACE)


def _watch(processes, lines=None):
    """Wait until all processes have ended, or one has failed; return an exit status.

    Arguments:
        processes: those that run.
        lines: a file whose end is that of the processes, too. A line "interrupt" interrupts them.
    """
    while True:
        ends = [process.poll() for process in processes]
        failed = [status for status in ends if status]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in ends:
            return 0
        if select.select([lines] if lines else [], [], [], 0.05)[0]:
            if lines.readline() != b"interrupt\n":
                return 128 + signal.SIGTERM
            for process in processes:
                process.send_signal(signal.SIGINT)


def wait(processes: Sequence[Any], seconds: float) -> None:
    """Wait for processes that were asked to end, and kill those that do not."""
    until = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(0.02)
    for process in processes:
        process.kill()  # unless it has ended
        process.wait()


def main(arguments: List[str]) -> int:
    """Start ranks, on this machine alone where there are no arguments, and return the status."""
    if not arguments:
        return start_here()
    where, command = arguments[0], arguments[1:]
    cluster = command[0] == "--cluster"
    return start(where, cluster, command[cluster:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
