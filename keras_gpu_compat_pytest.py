"""What pytest loads of keras-gpu-compat in each project; docs/ci.md says what it does when asked.

It imports nothing of ``compat`` until then. It lies beside that package: a project may have a
``compat`` of its own, and ``python -m pytest`` would look for the plugin in that one.
"""

import os

import pytest

MARK = (
    "compat(**arguments): run the test in a process of its own, where configure_gpu(**arguments) "
    "of keras-gpu-compat is called first, if there are any."
)


def pytest_addoption(parser):
    parser.getgroup("keras-gpu-compat").addoption(
        "--compat-simulate",
        metavar="N",
        help="each configure_gpu() is one of N simulated devices, as with COMPAT_SIMULATE=N",
    )
    parser.addini("compat_simulate", "what --compat-simulate is where it is not given")


@pytest.hookimpl(tryfirst=True)  # a conftest.py may configure
def pytest_load_initial_conftests(early_config):
    option = early_config.known_args_namespace.compat_simulate
    asked = early_config.getini("compat_simulate") or os.environ.get("COMPAT_SIMULATE")
    if option is not None or asked:
        from compat._commands import pytest_plugin

        begun = pytest_plugin.Simulation(early_config)
        early_config.pluginmanager.register(begun, "compat_simulation")


def pytest_configure(config):
    config.addinivalue_line("markers", MARK)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if item.get_closest_marker("compat") is None or "compat" in _workerinput(item.config):
        return None
    from compat._commands.pytest_plugin import own_process

    return own_process.run(item, nextitem)


def _workerinput(config):
    """Return the values from the process that started this one as a worker, if one did."""
    return getattr(config, "workerinput", {})


@pytest.fixture
def compat_twins():
    """Return a function that makes a model on one device, and its twin on all, by another function.

    ``twins = compat_twins(build)``, then ``twins.fit(x, y, batch_size=61)`` trains both and fails
    where they differ. See docs/ci.md.
    """
    from compat._commands.pytest_plugin import twins

    return twins.Twins
