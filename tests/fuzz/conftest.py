"""Eight simulated devices, the options of the fuzz run, and its summary."""

import collections
import os

import kerases
import pytest
from backends.conftest import (  # noqa: F401
    INSTALLED,
    pytest_collection_modifyitems,
    record_versions,
)
from operations import Operations

from compat.testing import keras_under_test, slow
from compat.testing.models import clear_session

#: Programs of a run where nothing is said; none: one, which is slow.
COUNTS = {"tensorflow1": 0, "tensorflow2": 0, "jax": 2, "theano": 0, "mxnet": 20, "torch": 10}


def pytest_addoption(parser):
    group = parser.getgroup("fuzz")
    group.addoption("--seed", type=int, default=0, help="the first program")
    group.addoption("--count", type=int, help="how many programs; default: some seconds of CPU")
    group.addoption("--subject", default="any", help="programs about this alone")
    group.addoption("--floatx", help="float32 or float64; default: 64 bits where it can")
    group.addoption("--verify", type=int, default=0, help="steps that compat itself compares")


def pytest_configure(config):
    config.fuzz_outcomes = []


@pytest.fixture(scope="session")
def configuration(pytestconfig):
    return kerases.configure(INSTALLED[0], *map(pytestconfig.getoption, ("floatx", "verify")))


@pytest.fixture(scope="session")
def operations(configuration):
    return Operations(keras_under_test())


@pytest.fixture
def keras(configuration):
    keras = keras_under_test()
    yield keras
    clear_session(keras)


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        first, count = (metafunc.config.getoption(n) for n in ("seed", "count"))
        marks = []
        if count is None:
            count = COUNTS[INSTALLED[0].name]
            marks = [] if count else [slow]
        seeds = range(first, first + max(count, 1))
        metafunc.parametrize("seed", [pytest.param(seed, marks=marks) for seed in seeds])


def pytest_terminal_summary(terminalreporter, config):
    outcomes = config.fuzz_outcomes
    if not outcomes:
        return
    kinds = collections.Counter(outcome.kind for _, outcome in outcomes)
    terminalreporter.section("fuzz")
    terminalreporter.line(
        "{:.0f} s of CPU, {} programs, {} steps: {}".format(
            sum(os.times()[:4]),
            len(outcomes),
            sum(len(program.steps) for program, _ in outcomes),
            ", ".join("{} {}".format(count, kind) for kind, count in kinds.most_common()),
        )
    )
