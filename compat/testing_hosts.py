"""Two machines on this one, to try ranks on several without having them.

    python -m compat.testing_hosts COMMAND...

Runs a command on the machine ``alpha``, 10.77.0.1, from where ``ssh beta`` reaches the other one,
10.77.0.2. They are two network namespaces (Linux): they share the disk, and of the network nothing
but the cable between them. Nobody need be root, nothing outside is changed, and what is left
running is told, and ends with the command.

There is no SSH server: ``ssh`` is a script that enters the other namespace, with the environment
and the folder of a fresh login.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time

HOSTS = (("alpha", "10.77.0.1"), ("beta", "10.77.0.2"))
OUTSIDE = "--user --map-root-user --net --uts --mount --pid --fork --kill-child --mount-proc"
SSH = """\
#!/bin/sh
while getopts 46o:p:qTtx option; do :; done
shift $((OPTIND - 1))
if [ "$1" != {name} ]; then
    echo "ssh: connect to host $1 port 22: No route to host" >&2
    exit 255
fi
shift
OPTIND=1  # more of them may follow the machine
while getopts o:p: option; do :; done
shift $((OPTIND - 1))
cd "$HOME"
exec nsenter --target {process} --net --uts env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$*"
"""


def command(*arguments):
    """The command that runs another one on ``alpha``."""
    return [sys.executable, os.path.abspath(__file__)] + list(arguments)


def cable(process):
    """Join this machine and that of a process, and give both their addresses."""
    # Horovod asks that machines call the interface between them alike.
    link(["add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(process)])
    enter = ["nsenter", "--target", str(process), "--net"]
    for prefix, (_, address) in zip(([], enter), HOSTS):
        subprocess.check_call(prefix + ["ip", "address", "add", address + "/24", "dev", "eth0"])
        link(["set", "eth0", "up"], prefix)
        link(["set", "lo", "up"], prefix)


def link(arguments, prefix=()):
    subprocess.check_call(list(prefix) + ["ip", "link"] + arguments)


def other_machine(name):
    """A process in namespaces of its own."""
    wait = "import socket, sys; socket.sethostname({!r}); print(); sys.stdin.read()".format(name)
    process = subprocess.Popen(
        ["unshare", "--net", "--uts", sys.executable, "-c", wait],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout and process.stdout.readline()
    return process


def main(arguments):
    if os.environ.get("COMPAT_TEST_HOSTS") != "inside":
        environ = dict(os.environ, COMPAT_TEST_HOSTS="inside")
        return subprocess.call(["unshare"] + OUTSIDE.split() + command(*arguments), env=environ)
    with tempfile.TemporaryDirectory() as folder:
        names = os.path.join(folder, "hosts")
        with open(names, "w") as file:
            for name, address in (("localhost", "127.0.0.1"),) + HOSTS:
                file.write("{} {}\n".format(address, name))
        subprocess.check_call(["mount", "--bind", names, "/etc/hosts"])
        socket.sethostname(HOSTS[0][0])
        beta = other_machine(HOSTS[1][0])
        cable(beta.pid)
        ssh = os.path.join(folder, "ssh")
        with open(ssh, "w") as file:
            file.write(SSH.format(name=HOSTS[1][0], process=beta.pid))
        os.chmod(ssh, 0o755)
        environ = dict(os.environ, PATH=folder + os.pathsep + os.environ["PATH"])
        del environ["COMPAT_TEST_HOSTS"]
        status = subprocess.call(arguments, env=environ)
        left = survivors({os.getpid(), os.getppid(), beta.pid})
        for line in left:
            print("compat.testing_hosts: left running: " + line, file=sys.stderr)
        return status or bool(left)


def survivors(known):
    """The command lines of all other processes, two seconds from now at the latest."""
    until = time.monotonic() + 2
    while True:
        lines = []
        for process in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open("/proc/{}/cmdline".format(process)) as file:
                line = file.read().replace("\0", " ").strip()  # empty: it has ended
                lines += [line] if line and int(process) not in known else []
        if not lines or time.monotonic() > until:
            return lines
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
