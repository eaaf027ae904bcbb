"""Programs of a test's own, as ranks."""

import json
import os
import subprocess
import sys

import numpy as np

import compat

# What each program begins with, and ends with.
BEGIN = """
import json, os, sys
import numpy as np
import compat
from compat import testing
compat.configure_gpu(gpus="cpu")
keras = testing.keras_under_test()
# Two whole batches and one of 5 rows.
BATCH = 8
random = np.random.RandomState(0)
x = random.normal(size=(21, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)
inputs, targets = compat.shard((x, y), BATCH)
rows = compat.local_batch_size(BATCH)
weights, said = {}, {}


def dense(units, **options):
    "A layer with other weights on each rank."
    initializer = keras.initializers.RandomUniform(-0.5, 0.5, seed=units + 100 * compat.rank())
    return keras.layers.Dense(units, kernel_initializer=initializer, **options)
"""
END = """
np.savez(sys.argv[1] + "-%d" % compat.rank(), **{
    "{}-{}".format(name, place): value
    for name, values in weights.items() for place, value in enumerate(values)
})
print("SAID " + json.dumps(said))
"""

# Batches of generators.
GENERATOR = """
model = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))]))
model.compile("sgd", "mse")


def batches():
    while True:
        for start in range(0, len(inputs), rows):
            yield inputs[start : start + rows], targets[start : start + rows]


history = model.fit_generator(
    batches(), 3, 2, verbose=0, validation_data=batches(), validation_steps=3
)
said.update((name, list(map(float, values))) for name, values in history.history.items())
said["evaluated"] = float(model.evaluate_generator(batches(), 3))
weights["generator"] = model.get_weights()
"""


def run(program, folder, size, backend="tensorflow"):
    """Run a program as so many ranks, and give each rank's arrays, and what they said."""
    path = os.path.join(str(folder), "of{}".format(size))
    with open(path + ".py", "w") as file:
        file.write(BEGIN + program + END)
    command = [sys.executable, "-m", "compat", "run", "--backend", backend, "--gpus", "cpu"]
    if size > 1:
        command += ["-n", str(size), "--timeout", "60"]
    job = subprocess.run(
        command + [path + ".py", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=300,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    lines = sorted(line for line in job.stdout.split("\n") if "SAID " in line)  # by rank
    said = [json.loads(line.partition("SAID ")[2]) for line in lines]
    assert len(said) == size
    arrays = []
    for rank in range(size):
        with np.load("{}-{}.npz".format(path, rank)) as file:
            arrays.append(dict(file))
    return arrays, said


def check_same(program, folder, tolerance=1e-5):
    """Two ranks end with the same bits, and as one process does. Gives what the ranks said."""
    (one,), _ = run(program, folder, 1)
    (chief, other), said = run(program, folder, 2)
    assert sorted(chief) == sorted(one)
    check_arrays(one, chief, other, tolerance)
    return said


def check_arrays(one, chief, other, tolerance=1e-5):
    """Two ranks have the same bits in all that one process left, and its numbers."""
    assert one
    for key in one:
        np.testing.assert_array_equal(chief[key], other[key], err_msg=key)
        np.testing.assert_allclose(chief[key], one[key], rtol=0, atol=tolerance, err_msg=key)


def refused_alone(program):
    """What a program dies of that mpirun has started, though Horovod knows no MPI."""
    place = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    job = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        env=dict(os.environ, **{"OMPI_COMM_WORLD_" + name: place[name] for name in place}),
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=300,
    )
    assert job.returncode == 1
    return job.stderr.rstrip().split("\n")[-1]


def disagreement(size):
    ranks = compat._ranks.Ranks(1, size, 1, size, "mpirun")
    return "compat.errors.RankError: " + str(compat.errors.ranks_disagree(ranks, "Horovod", 1))
