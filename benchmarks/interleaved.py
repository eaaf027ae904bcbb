"""Step times of several models in one process, measured in turn.

On a busy machine only ratios mean anything, and only of what was measured side by side: each
round runs every candidate once, and what counts is the best round of each.
"""

import argparse
import gc
import json
import os
import sys
import time

# The checkout that this file is in, wherever compat is installed.
sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Python's own: in the environments of the tests garbage is collected less often.
gc.set_threshold(700, 10, 10)

#: What a line begins with that holds the measurements of a script, for ``benchmarks/run.py``.
MARK = "measured: "


def parser(description, work="dense"):
    """Return a parser of the options that all scripts have."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--work", default=work, help="a model of works.py")
    made.add_argument("--rounds", type=int, default=10)
    made.add_argument("--steps", type=int, default=4, help="of each round, or of each fit")
    made.add_argument("--fits", type=int, default=1, help="of each round")
    return made


def measure(candidates, steps, rounds, fits=1):
    """Return wall-clock and CPU seconds per step.

    Arguments:
        candidates: name -> a function that does training steps.
        steps: how many each call does.
        rounds: how often each is measured, after two times that build and are not counted.
        fits: how often each is called in a round.

    Returns:
        name -> {"wall": [seconds per step of each round], "cpu": the same of CPU seconds of all
        threads of this process}
    """
    for step in 2 * list(candidates.values()):
        step()
    found = {name: {"wall": [], "cpu": []} for name in candidates}
    for _ in range(rounds):
        for name, step in candidates.items():
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(fits):
                step()
            found[name]["wall"].append((time.perf_counter() - began) / (steps * fits))
            found[name]["cpu"].append((time.process_time() - cpu) / (steps * fits))
    return found


def publish(found, bound=None, **notes):
    """Print what was measured, as one line for ``benchmarks/run.py`` and ratios for people.

    Arguments:
        found: what ``measure`` returns, of "compat" and of one peer.
        bound: the seconds of a step that costs nothing beyond the model's own operations; no
            library can be faster on these cores.
        notes: more to keep with it: rows of a batch, launches of kernels per step, ...
    """
    (peer,) = [name for name in found if name != "compat"]
    for kind in ("wall", "cpu"):
        ours, theirs = min(found["compat"][kind]), min(found[peer][kind])
        print(
            "{:4} per step: compat {:.1f} ms, {} {:.1f} ms, ratio {:.2f}".format(
                kind, 1e3 * ours, peer, 1e3 * theirs, ours / theirs
            )
        )
    if bound is not None:
        notes["bound"] = bound
        print("no step can take less than {:.1f} ms".format(1e3 * bound))
    print(MARK + json.dumps(dict(notes, seconds=found), sort_keys=True), flush=True)
