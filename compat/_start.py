"""``python -m compat._start SIZE COMMAND...``: start so many ranks of a command on this machine.

The launcher for engines that have none of their own. One that fails ends all.
"""

import os
import signal
import socket
import subprocess
import sys
import time

from ._rank import die_with_parent

# How long the others may take to end, in seconds.
_GRACE = 8.0


def start(size, command):
    """Start the ranks, wait for them, and return the first exit status that is not 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = "127.0.0.1:{}".format(probe.getsockname()[1])
    processes = []
    for rank in range(size):
        place = {
            "COMPAT_RANK": str(rank),
            "COMPAT_SIZE": str(size),
            "COMPAT_LOCAL_RANK": str(rank),
            "COMPAT_LOCAL_SIZE": str(size),
            "COMPAT_MEETING": meeting,
        }
        environ = dict(os.environ, **place)
        processes.append(subprocess.Popen(command, env=environ, preexec_fn=die_with_parent))
    signal.signal(signal.SIGTERM, lambda *ignored: _end(processes))
    running = processes
    while running:
        time.sleep(0.05)
        running = [process for process in processes if process.poll() is None]
        failed = [process.returncode for process in processes if process.returncode]
        if failed:
            _end(processes)
            return failed[0] if failed[0] > 0 else 128 - failed[0]
    return 0


def _end(processes):
    """End all that still run: politely, then not."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + _GRACE
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(start(int(sys.argv[1]), sys.argv[2:]))
