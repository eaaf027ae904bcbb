"""Faults of ranks at random moments, from outside: a few rounds of tests/soak.py."""

import os
import random
import sys

import pytest

from compat.testing import slow

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import soak

del sys.path[0]


@slow
@pytest.mark.parametrize(
    "number, fault",
    [(0, "network"), (1, "disk"), (2, "kill")],
)
def test_a_round(number, fault):
    soak.soak(number, 2, random.Random(number), fault, timeout=10)
