"""Rounds of training on several ranks in which one rank, chosen at random, has a fault.

    python tests/soak.py --rounds 200 --seed 1

Each round is a job of ``compat run`` with Keras on torch, or on another backend with ranks. The
fault comes from outside, at a random moment while the rank starts or trains: it is killed, stopped,
slow, interrupted, made to exit, has a full disk, or loses the network between its machine and the
other one (``compat machines``). Whatever it is, the job ends within a bound, says which rank had
it, leaves no process behind, and leaves checkpoints that are whole.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from compat import errors
from compat._commands import machines

#: In the environment of each process of a job, with a value of its own.
VARIABLE = "COMPAT_SOAK_ROUND"
#: How long ranks wait for each other, in seconds, and how long a round may take in all.
TIMEOUT, BOUND = 25, 300
#: A rank that is slow stops for a second, so often.
STOPS = 5
#: Bytes that a checkpoint may have where the disk is full; it has more.
ROOM = 2000
#: The endings of checkpoints by backend; ``.h5`` for the others.
EXTENSIONS = {"torch": ".keras", "jax": ".keras"}

PROGRAM = """\
import os
import signal
import sys
import time

import compat

folder, extension, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
signal.signal(signal.SIGINT, signal.default_int_handler)  # "&" in a shell has it ignored


def mark(name):
    path = os.path.join(folder, "{}-{}".format(name, compat.rank()))
    with open(path + "~", "w") as file:
        file.write(str(os.getpid()))
    os.replace(path + "~", path)


mark("started")
compat.configure_gpu(gpus="cpu")
import numpy as np
from compat.testing import keras_under_test

keras = keras_under_test()


class Progress(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        if not batch:
            mark("trains")
        time.sleep(0.05)


def build():
    layers = [keras.layers.Dense(5, activation="tanh", input_shape=(6,)), keras.layers.Dense(1)]
    return keras.models.Sequential(layers)


model = compat.parallelize(build)
x = np.random.RandomState(0).rand(16 * steps, 6).astype("float32")
x, y = compat.shard((x, x.sum(axis=1, keepdims=True)), 16)
model.compile(keras.optimizers.SGD(0.1), "mse")
checkpoint = keras.callbacks.ModelCheckpoint(os.path.join(folder, "{epoch:03d}" + extension))
model.fit(
    x, y, batch_size=compat.local_batch_size(16), epochs=12, verbose=0,
    callbacks=[checkpoint, Progress()],
)
"""

LOADING = """\
import sys
import compat

compat.configure_gpu(gpus="cpu")
from compat.testing import keras_under_test

for path in sys.argv[1:]:
    keras_under_test().models.load_model(path)
"""


def _slow(pid):
    for _ in range(STOPS):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)


def _fill_disk(pid):
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (ROOM, ROOM))


def _cut_network(pid):
    """Take the second machine off the switch, which is the first machine: that of the process."""
    inside = ["nsenter", "--user", "--net", "--target", str(pid)]
    subprocess.check_call(inside + "ip link set port2 down".split())


def _on_the_switch(value):
    """Return the process on the first of a job's two machines, by its number outside of them."""
    for pid in processes(value):
        with open("/proc/{}/net/dev".format(pid)) as file:
            if "port2:" in file.read():
                return pid
    raise ProcessLookupError(value)


FAULTS = {
    "kill": lambda pid: os.kill(pid, signal.SIGKILL),
    "stop": lambda pid: os.kill(pid, signal.SIGSTOP),
    "slow": _slow,
    "interrupt": lambda pid: os.kill(pid, signal.SIGINT),
    "exit": lambda pid: os.kill(pid, signal.SIGUSR1),  # see the program
    "disk": _fill_disk,
    "network": _cut_network,
}


def processes(value):
    """Return the other processes that have ``VARIABLE`` with this value in their environment."""
    wanted = "{}={}".format(VARIABLE, value).encode()
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open("/proc/{}/environ".format(pid), "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:  # another user's, or ended
            pass
    return found


def _wait_for(path, process, until):
    """Wait for the process id that a rank writes, and return it; None: the job has ended."""
    while not os.path.exists(path):
        if process.poll() is not None:
            return None
        if time.monotonic() > until:
            raise TimeoutError(path)
        time.sleep(0.01)
    with open(path) as file:
        return int(file.read())


class Failed(AssertionError):
    """What a round did that it must not."""


def soak(number, ranks, draw, fault=None, timeout=TIMEOUT, backend="torch", say=print):
    """One round.

    Arguments:
        number: of the round.
        ranks: how many the job has.
        draw: a ``random.Random``.
        fault: one of ``FAULTS``; None: one of them at random.
        timeout: how long ranks wait for each other.
        backend: as Keras names it.
        say: is called with a line about what happened.

    Raises:
        Failed: what was wrong, and all that the job printed.
    """
    fault = fault or draw.choice(sorted(FAULTS))
    rank = draw.randrange(ranks)
    if fault == "disk":
        rank = 0  # which saves
    elif fault == "network":
        rank = ranks - 1 - rank // 2  # one of the second machine's
    # A disk is full for checkpoints; a rank that starts writes none. Imports of frameworks have an
    # "except:" that swallows an interrupt.
    starts = fault not in ("disk", "interrupt") and draw.random() < 0.25
    when = "started" if starts else "trains"
    delay = draw.uniform(0, 3)
    folder = tempfile.mkdtemp(prefix="soak-")
    try:
        took = _round(number, ranks, fault, rank, when, delay, timeout, backend, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(
        "round {}: {} of rank {}, {:.1f} s after it {}: right, in {:.0f} s".format(
            number, fault, rank, delay, when, took
        )
    )


def _round(number, ranks, fault, rank, when, delay, timeout, backend, folder):
    value = "{}-{}".format(os.getpid(), number)
    script = os.path.join(folder, "train.py")
    with open(script, "w") as file:
        file.write(PROGRAM)
    command = [sys.executable, "-m", "compat", "run", "-n", str(ranks), "--timeout", str(timeout)]
    lost = [rank]
    if fault == "network":
        first = ranks // 2
        lost = range(first, ranks)  # any of them may be named
        command += ["--hosts", "node1:{},node2:{}".format(first, ranks - first)]
        command = machines.command(2, *command)
    extension = EXTENSIONS.get(backend, ".h5")
    command += ["--backend", backend, "--gpus", "cpu", script, folder, extension, "6"]
    environ = dict(os.environ, KERAS_BACKEND=backend, OMP_NUM_THREADS="1", **{VARIABLE: value})
    output = os.path.join(folder, "output")
    began = time.monotonic()
    with open(output, "wb") as file:
        job = subprocess.Popen(command, env=environ, stdout=file, stderr=file)
    wrong = []
    done = None
    try:
        pid = _wait_for(
            os.path.join(folder, "{}-{}".format(when, rank)), job, time.monotonic() + BOUND
        )
        if pid is None:
            wrong.append("the job ended before the fault")
        else:
            time.sleep(delay)
            done = _whole(folder, extension)
            FAULTS[fault](_on_the_switch(value) if fault == "network" else pid)
        status = job.wait(timeout=BOUND)
    except (subprocess.TimeoutExpired, TimeoutError, ProcessLookupError) as error:
        wrong.append("it did not end: {!r}".format(error))
        status = None
    took = time.monotonic() - began
    left = processes(value)
    until = time.monotonic() + 5
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left = processes(value)
    if left:
        wrong.append("processes are left: {}".format(left))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    job.wait()
    with open(output, errors="replace") as file:
        said = file.read()
    if (status == 0) != (fault == "slow"):
        wrong.append("its exit status is {}".format(status))
    verdicts = [line for line in said.splitlines() if line.startswith("compat run: ")]
    named = ["rank {} of {} ".format(each, ranks) for each in lost]
    named.append("waited for {}, which".format(errors.numbered_ranks(lost)))
    if fault != "slow" and not any(
        "; the others were ended." in line and name in line for line in verdicts for name in named
    ):
        wrong.append("it does not name {}".format(" or ".join(named)))
    wrong += _broken(folder, done or [], extension, environ)
    if wrong:
        raise Failed(
            "round {}, {} of rank {} {:.1f} s after it {}: {}\n{}".format(
                number, fault, rank, delay, when, "; ".join(wrong), said[-4000:]
            )
        )
    return took


def _whole(folder, extension):
    return sorted(
        name for name in os.listdir(folder) if name.endswith(extension) and name[0] != "."
    )


def _broken(folder, before, extension, environ):
    """Return the problems of checkpoints: those before the fault must exist, and all must load."""
    there = _whole(folder, extension)
    wrong = ["{} is gone".format(name) for name in before if name not in there]
    if there:
        command = [sys.executable, "-c", LOADING] + [os.path.join(folder, name) for name in there]
        loading = subprocess.run(command, env=environ, stderr=subprocess.PIPE)
        if loading.returncode:
            wrong.append("not all checkpoints load:\n{}".format(loading.stderr.decode()))
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--fault", choices=sorted(FAULTS), help="always this one")
    parser.add_argument("--backend", default="torch", help="as Keras names it")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    failed = []
    for number in range(1, arguments.rounds + 1):
        try:
            soak(number, arguments.ranks, draw, arguments.fault, backend=arguments.backend)
        except Failed as error:
            print(error, flush=True)
            failed.append(number)
        sys.stdout.flush()
    print("rounds: " + json.dumps({"rounds": arguments.rounds, "failed": failed}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
