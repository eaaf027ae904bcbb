"""HDF5 files of Keras damaged at random, and what ``compat unwrap`` says of each.

    python tests/backends/damaged_files.py 10000 FILE...

Prints the cases in which it is not a documented error, takes longer than a second or says more than
2,000 characters. Each is read in a process of its own, which HDF5's library may end, or never
leave; such a case counts if h5py alone can read the file.
"""

import contextlib
import copy
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback

import h5py
import numpy as np

from compat import __main__

#: Seconds of CPU until a case counts as hanging.
PATIENCE = 1.5

VALUES = [
    0, -1, 2.5, 10**18, "", "x", "a/b/c", "/" * 3000, b"\xff\xfe", "{}", "[]", "null", "3",
    "[" * 5000, [], ["a", "b"], [b"\xff"], ["dense/" * 3000 + "kernel:0"], [1, 2],
    np.zeros((2, 3)), np.zeros((0,), "S1"), "x" * 30000,
]  # fmt: skip
NAMES = ["", "/", "x", "dense", "dense/kernel:0", "../x", "dense/" * 3000 + "k", "a_1" * 3000]
JSONS = [
    None, True, 0, -1, 1e400, "", "x", "/" * 3000, [], {}, [[]], [None], {"config": {}}, "y" * 9000,
]  # fmt: skip


def bytes_changed(draw, path):
    """Change some bytes of a file."""
    with open(path, "r+b") as file:
        size = os.path.getsize(path)
        for _ in range(draw.choice([1, 3, 30])):
            file.seek(draw.randrange(8, size))
            file.write(bytes([draw.randrange(256)]))


def cut_off(draw, path):
    """Remove the end of a file, or clear a part in the middle."""
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        if draw.random() < 0.5:
            file.truncate(draw.randrange(size))
        else:
            file.seek(draw.randrange(8, size))
            file.write(b"\0" * draw.randrange(1, 4096))


def parts_replaced(draw, path):
    """Remove or replace an attribute, a group or an array."""
    with h5py.File(path, "r+") as file:
        found = [file]
        file.visititems(lambda _, item: found.append(item))
        for _ in range(draw.choice([1, 1, 3])):
            item = draw.choice(found)
            if not item.name or item.name not in file:  # gone, maybe with its group
                continue
            if len(item.attrs) and draw.random() < 0.7:
                name = draw.choice(sorted(item.attrs))
                del item.attrs[name]
                if draw.random() < 0.8:
                    item.attrs[name] = draw.choice(VALUES)
            elif item.name != "/":
                name = item.name
                del file[name]
                if draw.random() < 0.7:
                    file[name] = draw.choice([3, np.zeros((2, 3)), "text"])


def names_changed(draw, path):
    """Change some names of weights or layers."""
    with h5py.File(path, "r+") as file:
        found = [file]
        file.visititems(lambda _, item: found.append(item))
        lists = [
            (item, name) for item in found for name in sorted(item.attrs) if name.endswith("_names")
        ]
        item, name = draw.choice([each for each in lists if len(each[0].attrs[each[1]])])
        names = [name.decode() if isinstance(name, bytes) else name for name in item.attrs[name]]
        for _ in range(draw.choice([1, 1, len(names)])):
            names[draw.randrange(len(names))] = draw.choice(NAMES)
        del item.attrs[name]
        item.attrs.create(name, names, dtype=h5py.special_dtype(vlen=str))


def configuration_replaced(draw, path):
    """Something in one of the configurations, which are JSON, is something else."""
    with h5py.File(path, "r+") as file:
        names = [name for name in ("model_config", "training_config") if name in file.attrs]
        if not names:
            return parts_replaced(draw, path)
        name = draw.choice(names)
        text = file.attrs[name]
        config = json.loads(text.decode() if isinstance(text, bytes) else text)
        for _ in range(draw.choice([1, 1, 4])):
            inner = config
            while True:
                keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
                if not keys:
                    break
                key = draw.choice(keys)
                if isinstance(inner[key], (dict, list)) and draw.random() < 0.8:
                    inner = inner[key]
                    continue
                inner[key] = copy.deepcopy(draw.choice(JSONS))
                break
        text = json.dumps(config)
        if draw.random() < 0.1:
            text = text[: draw.randrange(len(text))]
        file.attrs[name] = text.encode()


DAMAGES = [bytes_changed, cut_off, parts_replaced, names_changed, configuration_replaced]


def problem(folder, original, number):
    """Return the problem of a case, or None."""
    draw = random.Random(number)
    path = os.path.join(folder, "damaged.h5")
    shutil.copyfile(original, path)
    damage = draw.choice(DAMAGES)
    damage(draw, path)
    out, err = io.StringIO(), io.StringIO()
    began = time.perf_counter()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = __main__.main(["unwrap", path, "--force"])
    except BaseException:
        return "{}: {}".format(damage.__name__, traceback.format_exc())
    took = time.perf_counter() - began
    if took > 1:  # of which HDF5's library may take more
        began = time.perf_counter()
        read_all(path)
        took -= time.perf_counter() - began
    text = err.getvalue()
    left = sorted(set(os.listdir(folder)) - {"damaged.h5", "damaged.unwrapped.h5"})
    wrong = [
        status not in (0, 2) and "status {}".format(status),
        took > 1 and "{:.1f} s".format(took),
        len(text) > 2000 + len("compat unwrap: ") and "{} characters".format(len(text)),
        status == 2 and not text.startswith("compat unwrap: ") and "no error in words",
        left and "left {}".format(left),
    ]
    told = ", ".join(filter(None, wrong))
    return "{}: {}: {}".format(damage.__name__, told, text[:300]) if told else None


def read_all(path):
    """Read what can be read of a file, by h5py alone."""
    tried = contextlib.suppress(Exception)
    in_memory = {"driver": "core", "backing_store": False}
    with tried, h5py.File(path, "r") as file, h5py.File("copy", "w", **in_memory) as copy:
        items = [file]
        for name in ("model_config", "layer_names", "keras_version", "training_config"):
            with tried:
                name in file.attrs and file.attrs[name]
        for name in list(file):
            with tried:
                file.copy(name, copy)
        with tried:
            file.visititems(lambda _, item: items.append(item))
        for item in items:
            for name in ("weight_names", "layer_names"):
                with tried:
                    name in item.attrs and item.attrs[name]
            with tried:
                dict(item.attrs)


def all_problems(cases, files):
    """Return the problems of all cases, in lines."""
    found = []
    with contextlib.redirect_stderr(io.StringIO()):
        __main__.main(["unwrap", ""])  # imports what all children need
    for number in range(cases):
        with tempfile.TemporaryDirectory() as folder:
            told, status = in_a_child(problem, folder, files[number % len(files)], number)
            if status and in_a_child(read_all, os.path.join(folder, "damaged.h5"))[1] == 0:
                told = "ended with status {}".format(status)
        if told:
            found.append("{}: {}".format(number, told))
    return found


def in_a_child(function, *arguments):
    """Return the text that a function returns in a subprocess, and how that ended."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.setitimer(signal.ITIMER_PROF, PATIENCE)
            os.write(writes, (function(*arguments) or "").encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        told = pipe.read()
    return told, os.waitpid(child, 0)[1]


if __name__ == "__main__":
    print("\n".join(all_problems(int(sys.argv[1]), sys.argv[2:])))
