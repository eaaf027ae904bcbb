"""\
Run a command as if on the first of several machines, node1, from where `ssh node2` and so on reach
the others. They are network namespaces on this machine (Linux): they share its disk, and their only
network is the one between them. No root privileges are needed, and nothing outside is changed.

exit status: the command's own; 1 where it left processes running, which are named and ended."""

# ``compat machines``: machines on this one, to try ranks on several without having them.
#
# There is no SSH server: ``ssh`` is a script that enters another namespace, with the environment
# and the folder of a fresh login.

import argparse
import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from .._runtime import by_path
from . import number as number_of

USAGE = "compat machines N command [its arguments]"
OUTSIDE = "--user --map-root-user --net --uts --mount --pid --fork --kill-child --mount-proc"


def add_options(parser: argparse.ArgumentParser) -> None:
    machines = number_of("machines, 2 to 249", 2, 249)
    parser.add_argument("machines", metavar="N", type=machines, help="how many, 2 to 249")
    parser.add_argument("first", metavar="command", help="what runs on node1")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def execute(arguments):
    return main([arguments.machines, arguments.first] + arguments.rest)


def command(machines, *arguments):
    """Return the command that runs another one on the first of so many machines."""
    return by_path.command("_commands.machines") + [str(machines)] + list(arguments)


def machine(number):
    """Return its name and its address."""
    return f"node{number}", f"10.77.0.{number}"


def switch_on(number, process=None):
    """Connect a machine, that of a process, to the switch. The first one is the switch.

    Horovod asks that machines call the interface between them alike.
    """
    enter = ["nsenter", "--target", str(process), "--net"] if process else []
    if process:
        port = f"port{number}"
        ip(f"link add {port} type veth peer name eth0 netns {process}")
        ip(f"link set {port} master eth0 up")
    else:
        ip("link add eth0 type bridge")
    ip(f"address add {machine(number)[1]}/24 dev eth0", enter)
    ip("link set eth0 up", enter)
    ip("link set lo up", enter)


def ip(arguments, prefix=()):
    subprocess.check_call(list(prefix) + ["ip"] + arguments.split())


def other_machine(number):
    """Return a process in namespaces of its own."""
    wait = "import socket, sys; socket.sethostname({!r}); print(flush=True); sys.stdin.read()"
    inside = ["unshare", "--net", "--uts", sys.executable, "-c", wait.format(machine(number)[0])]
    process = subprocess.Popen(inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline()
    switch_on(number, process.pid)
    return process.pid


def run(machines, arguments, folder):
    """Make the machines, and run a command on the first. Returns its exit status."""
    # Open MPI names the files that ranks share after the host and a PID. Two commands that run at
    # the same time, each on machines of its own, share the disk and must not share PIDs: those of
    # this PID namespace count from that of the process outside it.
    with contextlib.suppress(OSError), open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(os.environ["COMPAT_TESTING_HOSTS"])
    lines = ["{1} {0}".format(*machine(number)) for number in range(1, machines + 1)]
    names = pathlib.Path(folder, "hosts")
    names.write_text("\n".join(["127.0.0.1 localhost"] + lines + [""]))
    subprocess.check_call(["mount", "--bind", str(names), "/etc/hosts"])
    socket.sethostname(machine(1)[0])
    switch_on(1)
    others = {number: other_machine(number) for number in range(2, machines + 1)}
    cases = [f"{machine(n)[0]}) process={others[n]};;" for n in others]
    ssh = pathlib.Path(folder, "ssh")
    script = pathlib.Path(__file__).with_name("ssh.sh.txt").read_text()
    ssh.write_text(script.format(cases="\n    ".join(cases)))
    ssh.chmod(0o755)
    environ = dict(os.environ, PATH=folder + os.pathsep + os.environ["PATH"])
    del environ["COMPAT_TESTING_HOSTS"]
    status = subprocess.call(arguments, env=environ)
    left = survivors({os.getpid(), os.getppid()}.union(others.values()))
    for line in left:
        print("compat machines: left running: " + line, file=sys.stderr)
    return status or bool(left)


def survivors(known):
    """Return the command lines of all other processes, two seconds from now at the latest."""
    until = time.monotonic() + 2
    while True:
        others = [arguments for number, arguments in processes() if number not in known]
        lines = [" ".join(arguments).strip() for arguments in others]  # empty while it is started
        if not lines or time.monotonic() > until:
            return lines
        time.sleep(0.1)


def processes():
    """Yield the numbers and the arguments of all processes that have not ended."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended since
            state = (process / "stat").read_text(errors="replace").rpartition(") ")[2][0]
            arguments = (process / "cmdline").read_text(errors="replace").split("\0")
            if state not in "XZ":
                yield int(process.name), arguments


def main(arguments):
    """Make so many machines, the first argument, and run what follows on the first of them."""
    missing = [name for name in ("unshare", "nsenter", "mount", "ip") if not shutil.which(name)]
    if missing:
        needs = "compat machines needs {}, which PATH has not. Try: apt-get install {}"
        sys.exit(needs.format(" and ".join(missing), "util-linux mount iproute2"))
    if "COMPAT_TESTING_HOSTS" not in os.environ:
        environ = dict(os.environ, COMPAT_TESTING_HOSTS=str(os.getpid()))
        inside = ["unshare"] + OUTSIDE.split() + command(*arguments)
        return subprocess.call(inside, env=environ)
    with tempfile.TemporaryDirectory() as folder:
        return run(int(arguments[0]), arguments[1:], folder)
