"""Ranks of torch, of which a random one has a random fault at a random moment, again and again.

    python tests/soak.py --rounds 200 --seed 1

Each round is a job of ``compat run -n``. It has to end in time, with an exit status that tells
whether a rank was lost, name that rank, leave no process, and leave a checkpoint that loads.
"""

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TIMEOUT = 10  # seconds that ranks wait for each other
LIMIT = 200  # seconds that a round may take, start and all waits included
FAULTS = ("kill", "stop", "slow", "disk")
SAID = {
    "kill": "rank {} of {} was killed by signal 9; the others were ended.",
    "stop": "rank {} of {} did not come to the others, which waited for it",
    "disk": "rank {} of {} failed with exit status 1; the others were ended.",
}

TRAIN = """\
import os, sys
import compat
compat.configure_gpu()
import keras
import numpy as np

folder, epochs = sys.argv[1], int(sys.argv[2])
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
compat.parallelize(model)
model.compile("sgd", "mse")

class Save(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.save(os.path.join(folder, "model.keras"))
        place = os.path.join(folder, "pid-{}".format(compat.rank()))
        if not os.path.exists(place):
            with open(place + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.replace(place + ".new", place)

x, y = compat.shard((np.ones((64, 4)), np.ones((64, 1))), batch_size=16)
model.fit(x, y, batch_size=compat.local_batch_size(16), epochs=epochs, verbose=0,
          callbacks=[Save()])
"""


def with_mark(mark):
    """The processes, zombies left out, that have this variable in their environment."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open("/proc/{}/environ".format(process), "rb") as file:
                if mark.encode() in file.read().split(b"\0"):
                    found.append(int(process))
        except OSError:  # another user's, or it has ended
            pass
    return found


def all_began(folder, size, job):
    """The processes of all ranks, once each has trained a step."""
    until = time.monotonic() + LIMIT
    names = [os.path.join(folder, "pid-{}".format(rank)) for rank in range(size)]
    while not all(map(os.path.exists, names)):
        assert job.poll() is None, "the job ended before its fault"
        assert time.monotonic() < until, "the job did not begin to train"
        time.sleep(0.05)
    return [int(open(name).read()) for name in names]


def injure(fault, process, draw, job):
    if fault == "kill":
        os.kill(process, signal.SIGKILL)
    elif fault == "stop":
        os.kill(process, signal.SIGSTOP)
    elif fault == "disk":  # no file grows any more: nobody need be root for that
        resource.prlimit(process, resource.RLIMIT_FSIZE, (1000, 1000))
    else:
        for _ in range(6):
            if job.poll() is None:
                os.kill(process, signal.SIGSTOP)
                time.sleep(draw.uniform(0.1, 0.5))
                os.kill(process, signal.SIGCONT)
                time.sleep(0.1)


def play(fault, size, draw):
    """One round. Returns what it was, in words; AssertionError where it went wrong."""
    rank = 0 if fault == "disk" else draw.randrange(size)  # rank 0 writes the checkpoint
    mark = "COMPAT_SOAK={}".format(draw.getrandbits(64))
    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "train.py")
        with open(script, "w") as file:
            file.write(TRAIN)
        name, _, value = mark.partition("=")
        environ = dict(
            os.environ, KERAS_BACKEND="torch", OMP_NUM_THREADS="1", PYTHONPATH=ROOT, **{name: value}
        )
        command = [sys.executable, "-m", "compat", "run", "-n", str(size)]
        command += ["--timeout", str(TIMEOUT), "--backend", "torch", "--gpus", "cpu", script]
        epochs = "10" if fault == "slow" else "100000"
        said = os.path.join(folder, "said")
        began = time.monotonic()
        with open(said, "wb") as file:
            job = subprocess.Popen(
                command + [folder, epochs], env=environ, stdout=file, stderr=file
            )
        try:
            process = all_began(folder, size, job)[rank]
            time.sleep(draw.uniform(0, 2 if fault != "slow" else 0.1))
            injure(fault, process, draw, job)
            status = job.wait(LIMIT - min(LIMIT - 1, time.monotonic() - began))
            until = time.monotonic() + 5
            while with_mark(mark) and time.monotonic() < until:
                time.sleep(0.1)
            left = with_mark(mark)
            text = open(said, errors="replace").read()
            assert (status == 0) == (fault == "slow"), "exit status {}\n{}".format(status, text)
            if fault != "slow":
                assert SAID[fault].format(rank, size) in text, text
            assert not left, "processes {} are left".format(left)
        finally:
            for process in with_mark(mark):  # of this round alone
                os.kill(process, signal.SIGKILL)
            job.wait()
        load = "import keras, sys; keras.models.load_model(sys.argv[1]).predict"
        saved = os.path.join(folder, "model.keras")
        subprocess.run([sys.executable, "-c", load, saved], env=environ, check=True)
    return "{} rank {}: {:.0f} s, exit status {}".format(
        fault, rank, time.monotonic() - began, status
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--faults", default=",".join(FAULTS))
    arguments = parser.parse_args()
    failed = 0
    for number in range(arguments.rounds):
        draw = random.Random("{} {}".format(arguments.seed, number))
        fault = draw.choice(arguments.faults.split(","))
        try:
            print(number, play(fault, arguments.ranks, draw), flush=True)
        except (AssertionError, subprocess.SubprocessError) as error:
            failed += 1
            print(number, fault, "FAILED:", error, flush=True)
    print("{} rounds, {} failed".format(arguments.rounds, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
