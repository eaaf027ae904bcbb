"""What ``import compat`` costs: a whole process with it against a whole process without.

    python benchmarks/import_time.py [ROUNDS]

For an interpreter that has compat installed. Runs ``python -c pass`` and
``python -c "import compat"`` in turn, so that a busy machine slows both, and prints the ratio of
their medians. Fails above LIMIT.
"""

import os
import statistics
import subprocess
import sys
import time

LIMIT = 1.2


def seconds(program):
    began = time.perf_counter()
    subprocess.check_call([sys.executable, "-c", program])
    return time.perf_counter() - began


def main(rounds):
    # compat as installed: from another folder than this checkout.
    os.chdir(os.path.dirname(os.path.abspath(sys.executable)))
    programs = "pass", "import compat"
    # As after any install: byte code written, file cache warm.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for program in programs:
        seconds(program)
    times = {program: [] for program in programs}
    for _ in range(rounds):
        for program in programs:
            times[program].append(seconds(program))
    for program in programs:
        print(
            "python -c {!r:16} median {:.2f} ms, best {:.2f} ms of {}".format(
                program,
                1e3 * statistics.median(times[program]),
                1e3 * min(times[program]),
                rounds,
            )
        )
    ratio = statistics.median(times[programs[1]]) / statistics.median(times[programs[0]])
    print("ratio {:.3f} (at most {})".format(ratio, LIMIT))
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 200))
