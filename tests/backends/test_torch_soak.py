"""Faults of ranks at random moments, from outside: a few rounds of tests/soak.py."""

import concurrent.futures
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import soak

del sys.path[0]


def test_three_rounds():
    """They mostly wait: two at a time."""
    faults = ["network", "disk", "kill"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rounds = [
            pool.submit(soak.soak, number, 2, random.Random(number), fault, timeout=10)
            for number, fault in enumerate(faults)
        ]
        for each in rounds:
            each.result()
