"""Measure compat against what users have without it, and write benchmarks/results.json.

    tox run -e benchmarks [-- --only dense --repeats 3 --rounds 5 --steps 10]

Each row is a script of this folder in the tox environment that has its framework; that
environment has to be there: run the tests once. ``tables.py`` makes tables and plots of the file.
"""

import argparse
import collections
import json
import os
import platform
import shlex
import subprocess
import sys

from interleaved import MARK

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)

#: ``command`` is what runs in the environment; ``goal`` the most that the ratio of compat's time
#: to the peer's should be, for the tests; ``reason`` why it is more, or why compat is slower.
Row = collections.namedtuple("Row", "name title peer goal environment command reason")

#: Rows that measure no peer: ``tables.py`` has a table for each.
FIGURES = {  # name -> environment, command
    "bytes-tensorflow1": ("py37-tensorflow1-tfkeras", "python benchmarks/bytes_tensorflow1.py"),
    "bytes-tensorflow2": ("py311-tensorflow", "python benchmarks/bytes_tensorflow2.py"),
    "bytes-torch": ("py311-torch", "python benchmarks/bytes_torch.py"),
    "bytes-mxnet": ("py37-mxnet", "python benchmarks/bytes_mxnet.py"),
    "building": ("py37-tensorflow1-tfkeras", "python benchmarks/building.py"),
    "many": ("py37-tensorflow1-tfkeras", "python benchmarks/many_models.py"),
    "scaling": ("py311-tensorflow", "python benchmarks/scaling.py"),
    "import": ("py311-tensorflow", "python benchmarks/import_time.py"),
}
#: Batch normalization of the whole batch, by the backends' names in ``batch_norm.py``.
NORMS = {
    "norm-tensorflow1": "py37-tensorflow1-tfkeras",
    "norm-tensorflow2": "py311-tensorflow",
    "norm-jax": "py311-jax",
    "norm-torch": "py311-torch",
    "norm-theano": "py37-theano",
}
#: What trials take of the first step, by the backends' names in ``first_step.py``.
TRIALS = {
    "trial-tensorflow1": "py37-tensorflow1-keras224",
    "trial-tensorflow2": "py311-tensorflow",
    "trial-torch": "py311-torch",
    "trial-mxnet": "py37-mxnet",
    "trial-theano": "py37-theano",
}
#: The first fit() of a new model, by the backends' names in ``first_fit.py``.
FIRST_FITS = {
    "first-tensorflow1": "py37-tensorflow1-tfkeras",
    "first-tensorflow2": "py311-tensorflow",
    "first-keras3": "py311-keras3",
    "first-jax": "py311-jax",
    "first-mxnet": "py37-mxnet",
    "first-theano": "py37-theano",
    "first-torch": "py311-torch",
}
#: The most of the peer's CPU seconds that compat should take, without and with verification.
FIRST_GOALS = {"compat": 1.0, "verified": 1.2}

_TRACES = (
    "One extra trace finds out what depends on rows. Without verification TensorFlow traces the "
    "training step twice, as in plain Keras, because the first trace creates variables."
)
_TRIED = "The model is tried on three rows. "
_VERIFIED = "Verification also {} for one device."

#: Why compat takes longer.
FIRST_REASONS = {
    "first-tensorflow1": _TRIED + _VERIFIED.format("builds the gradients"),
    "first-tensorflow2": _TRACES,
    "first-keras3": _TRACES,
    "first-jax": _VERIFIED.format("compiles the step"),
    "first-mxnet": _TRIED + "Hardly anything is compiled, so that is a large share.",
    "first-theano": _VERIFIED.format("compiles the step"),
    "first-torch": "The first call is traced. " + _TRIED + "Nothing is compiled, so that is a "
    "large share.",
}
for _names, _script in (
    (TRIALS, "first_step"),
    (FIRST_FITS, "first_fit"),
    (NORMS, "batch_norm"),
):
    for _name, _environment in _names.items():
        _command = "python benchmarks/{}.py --backend {}".format(_script, _name.partition("-")[2])
        FIGURES[_name] = _environment, _command

_CHECKSUMS = "Each `fit()`, here of ten steps, compares checksums of 200 variables twice."
_HOOKS = "The hooks of parameters are Python; those of the peer are C++."
_SAME = "compat uses as much CPU time as the peer."
_CHANCE = "The work is the same; the ratio varies as much from process to process."
_IN_TURN = "The devices compute in turn, so that all that shows is what splitting the batch costs."

#: Why, as far as it is known, by the rows' names.
REASONS = {
    "horovod-dense": "Cause unknown: CPU time and all-reduces are the same.",
    "horovod-deep": _CHECKSUMS,
    "workers-dense": "The work is the same. The peer exchanges gradients once, compat in buckets.",
    "workers-deep": _CHECKSUMS,
    "ddp-dense": _HOOKS,
    "ddp-deep": _HOOKS,
    "tf1-dense": _SAME,
    "tf1-conv": _SAME,
    "tf2-conv": "What runs before and after the replicas uses one core.",
    "jax-conv": _CHANCE,
    "jax-dense": _CHANCE,
    "theano-dense": _IN_TURN,
    "torch-dense": _IN_TURN,
}

_OF_FITS = (
    "`fit()`: Before the first step and after the last, all weights are read to compare checksums. "
    "What that takes is the same however many steps there are."
)
_OF_TORCH = "Keras 3 on torch, 20 steps and more: " + _HOOKS
_OF_BATCHES = (
    "`train_on_batch()`: After each step the ranks exchange the loss and the metrics that it "
    "returns; the peer returns those of a rank's own rows."
)

_RANKS = "python -m compat run -n 2 benchmarks/"


def _rows():
    def row(name, title, peer, goal, environment, command):
        return Row(name, title, peer, goal, environment, command, REASONS.get(name, ""))

    horovod, strategy = "py311-tensorflow-horovod", "py311-tensorflow-workers"
    for work, goal in (("dense", 1.02), ("deep", 1.02)):
        command = _RANKS + "ranks_tensorflow.py --peer horovod --work " + work
        title = "2 ranks, TF 2.15, Horovod, " + work
        yield row("horovod-" + work, title, "hvd.DistributedOptimizer", goal, horovod, command)
    for work, goal in (("dense", 0.95), ("deep", 0.95)):
        command = _RANKS + "ranks_tensorflow.py --peer strategy --work " + work
        title = "2 workers of TF_CONFIG, TF 2.15, " + work
        yield row("workers-" + work, title, "MultiWorkerMirroredStrategy", goal, strategy, command)
    for work, goal in (("dense", 1.02), ("deep", 0.95)):
        command = _RANKS + "ranks_torch.py --work " + work
        title = "2 ranks, torch, " + work
        yield row("ddp-" + work, title, "DistributedDataParallel", goal, "py311-torch", command)
    peers = (
        ("tf1", "TF 1.15", "py37-tensorflow1-tfkeras", "multi_gpu_model", (0.95, 0.95, 0.95)),
        ("tf2", "TF 2.15", "py311-tensorflow", "MirroredStrategy", (0.70, 0.70, 0.35)),
        ("keras3-tf", "Keras 3 on TF", "py311-keras3", "MirroredStrategy", (0.51, 0.49, 0.30)),
    )
    for short, title, environment, peer, goals in peers:
        for work, goal in zip(("dense", "conv", "lstm"), goals):
            command = "python benchmarks/replicas_tensorflow.py --work " + work
            name = "{}-{}".format(short, work)
            title_of_row = "2 replicas, {}, {}".format(title, work)
            yield row(name, title_of_row, peer, goal, environment, command)
    for work in ("dense", "conv", "lstm"):
        command = "python benchmarks/replicas_jax.py --work " + work
        title = "2 replicas, Keras 3 on JAX, " + work
        yield row("jax-" + work, title, "DataParallel", 1.00, "py311-jax", command)
    for work, goal in (("dense", 0.61), ("conv", 0.68)):
        command = "python benchmarks/replicas_mxnet.py --peer contexts --work " + work
        title = "2 replicas, MXNet, " + work
        yield row("mxnet-" + work, title, "keras-mxnet's contexts", goal, "py37-mxnet", command)
    for work in ("dense", "conv"):
        command = "python benchmarks/replicas_mxnet.py --peer one --work " + work
        title = "2 replicas, MXNet, {}, CPU seconds".format(work)
        yield row("mxnet-cpu-" + work, title, "one device", 1.05, "py37-mxnet", command)
    command = "python benchmarks/replicas_theano.py --work dense"
    title = "2 replicas, Theano, dense"
    yield row("theano-dense", title, "one device", 1.10, "py37-theano", command)
    command = _RANKS + "ranks_theano.py --work dense"
    title = "2 ranks, Theano, MPI, dense"
    yield row("theano-mpi", title, "one process", 0.62, "py37-theano-mpi", command)
    for work in ("conv", "dense"):
        command = "python benchmarks/replicas_torch.py --work " + work
        title = "2 replicas, torch, " + work
        yield row("torch-" + work, title, "one device", 1.05, "py311-torch", command)


def _fits():
    """Short fits, whose beginning and end count, and steps without any."""
    engines = (
        (
            "horovod",
            "TF 2.15, Horovod",
            "hvd.DistributedOptimizer",
            "py311-tensorflow-horovod",
            "ranks_tensorflow.py --peer horovod",
            ("", " --on-batch"),
        ),
        (
            "workers",
            "workers of TF_CONFIG, TF 2.15",
            "MultiWorkerMirroredStrategy",
            "py311-tensorflow-workers",
            "ranks_tensorflow.py --peer strategy",
            ("", " --on-batch"),
        ),
        (
            "ddp",
            "Keras 3 on torch",
            "DistributedDataParallel",
            "py311-torch",
            "ranks_torch.py",
            (" --keras fit", " --keras on-batch"),
        ),
    )
    for engine, title, peer, environment, script, (fit, on_batch) in engines:
        for work in ("dense-128", "deep"):
            for steps, fits, goal in ((1, 20, 1.10), (4, 5, 1.10), (20, 1, 1.05), (60, 1, 1.02)):
                name = "{}-{}-fit-{}".format(engine, work, steps)
                how = "{} --work {} --steps {} --fits {}".format(fit, work, steps, fits)
                what = "{}, {}, `fit()` of {} step{}".format(title, work, steps, "s" * (steps > 1))
                why = _OF_TORCH if engine == "ddp" and steps >= 20 else _OF_FITS
                yield Row(name, what, peer, goal, environment, _RANKS + script + how, why)
            name = "{}-{}-on-batch".format(engine, work)
            how = "{} --work {} --steps 10".format(on_batch, work)
            what = "{}, {}, `train_on_batch()`".format(title, work)
            yield Row(name, what, peer, 1.02, environment, _RANKS + script + how, _OF_BATCHES)


ROWS = list(_rows())
#: Rows of a table of their own.
FITS = list(_fits())


def scripts(environment):
    """Return a command for each script that measures something in an environment."""
    commands = [row.command for row in ROWS + FITS if row.environment == environment]
    commands += [command for place, command in FIGURES.values() if place == environment]
    of_scripts = {}
    for command in commands:
        (script,) = [word for word in command.split() if word.endswith(".py")]
        of_scripts.setdefault(script, command)
    return sorted(of_scripts.values())


def measured(environment, command):
    """Return the measurement in the last line of a script's output, or None; print its output."""
    tox = [sys.executable, "-m", "tox", "exec", "-q", "-e", environment, "--"]
    done = subprocess.run(
        tox + shlex.split(command),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout, end="", flush=True)
    # compat run puts the rank in front of each line.
    lines = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not lines:
        print("FAILED with status {}: {}".format(done.returncode, command), flush=True)
        return None
    return json.loads(lines[-1])


def ratios(runs):
    """Of each run, compat's best time per step to the peer's.

    Returns:
        {"wall": seconds by the clock, "cpu": of all threads, "bound": by the clock, of a step that
        costs nothing beyond the model's operations; each a sorted list}; no "bound" where the
        script has none.
    """
    found = {"wall": [], "cpu": [], "bound": []}
    for run in runs:
        (peer,) = [name for name in run["seconds"] if name != "compat"]
        best = {name: {k: min(taken[k]) for k in taken} for name, taken in run["seconds"].items()}
        for kind in ("wall", "cpu"):
            found[kind].append(best["compat"][kind] / best[peer][kind])
        if "bound" in run:
            found["bound"].append(run["bound"] / best[peer]["wall"])
    return {kind: sorted(each) for kind, each in found.items() if each}


def write(results, path):
    with open(path + ".part", "w") as file:
        json.dump(results, file, indent=1, sort_keys=True)
        file.write("\n")
    os.replace(path + ".part", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="measure rows whose name contains this")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each row")
    parser.add_argument("--rounds", type=int, default=4, help="rounds in each process")
    parser.add_argument("--steps", type=int, default=10, help="steps of each round")
    parser.add_argument("--output", default=os.path.join(HERE, "results.json"))
    arguments = parser.parse_args()

    results = {"rows": {}, "figures": {}}
    if os.path.exists(arguments.output):  # rows that are not measured now are kept
        with open(arguments.output) as file:
            results = json.load(file)
    results["machine"] = {"cores": os.cpu_count(), "processor": platform.machine()}
    failed = []
    for row in ROWS + FITS:
        options = " --rounds {}".format(arguments.rounds)
        if "--steps" not in row.command:
            options += " --steps {}".format(arguments.steps)
        if arguments.only in row.name:
            print("== {}: {}, against {}".format(row.name, row.title, row.peer), flush=True)
            times = range(arguments.repeats)
            runs = [measured(row.environment, row.command + options) for _ in times]
            if None in runs:
                failed.append(row.name)
            else:
                results["rows"][row.name] = ratios(runs)
                write(results, arguments.output)
    for name, (environment, command) in FIGURES.items():
        if arguments.only in name:
            print("== " + name, flush=True)
            found = measured(environment, command)
            if found is None:
                failed.append(name)
            else:
                results["figures"][name] = found
                write(results, arguments.output)
    if failed:
        print("not measured: " + ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
