"""What ``import compat`` and ``configure_gpu()`` cost: whole processes with them and without.

    python benchmarks/import_time.py [--rounds 200]

For an interpreter that has compat installed. Runs ``python -c pass`` and
``python -c "import compat"`` in turn, so that a busy machine slows both, and prints the ratio of
their medians; likewise for importing Keras with and without ``configure_gpu()`` in front, a tenth
as often. Says so where ``import compat`` takes more than LIMIT times as long as nothing.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

from interleaved import MARK

LIMIT = 1.2
IMPORTS = "pass", "import compat"
_KERAS = "from {} import keras; keras.backend.floatx()".format("tensorflow")
CONFIGURES = _KERAS, "import compat; compat.configure_gpu(simulate=2); " + _KERAS


def seconds(program):
    began = time.perf_counter()
    subprocess.check_call([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def compare(programs, rounds):
    """Return the ratio of the medians of the second program to the first, and the medians."""
    for program in programs * (rounds > 1):
        seconds(program)
    times = {program: [] for program in programs}
    for _ in range(rounds):
        for program in programs:
            times[program].append(seconds(program))
    medians = [statistics.median(times[program]) for program in programs]
    for program, median in zip(programs, medians):
        print("median {:8.2f} ms of {}: python -c {!r}".format(1e3 * median, rounds, program))
    ratio = medians[1] / medians[0]
    print("ratio {:.3f}".format(ratio))
    return {"ratio": ratio, "seconds": medians}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, help="for the sake of benchmarks/run.py")
    rounds = parser.parse_args().rounds
    # compat as installed: from another folder than this checkout.
    os.chdir(os.path.dirname(os.path.abspath(sys.executable)))
    # As after any install: byte code written, file cache warm.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.pop("PYTHONPATH", None)
    found = {"import": compare(IMPORTS, rounds)}
    if importlib.util.find_spec("tensorflow") is None:
        print("no TensorFlow here")
    else:
        found["configure"] = compare(CONFIGURES, max(1, rounds // 10))
    print(MARK + json.dumps(found, sort_keys=True))
    if rounds > 1 and found["import"]["ratio"] > LIMIT:  # a single round says nothing
        print("import compat is to take at most {} times as long as nothing".format(LIMIT))


if __name__ == "__main__":
    main()
