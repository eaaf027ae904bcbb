"""What ``keras_gpu_compat_pytest`` does when it is asked to: simulation, own processes, twins.

Here: ``--compat-simulate`` and the ini option ``compat_simulate``, COMPAT_SIMULATE for a test run.
"""

import os
import sys
from typing import Any, List

import pytest

from ... import errors
from ..._configuration.settings import simulated_from_outside
from ..._runtime.process import process

VARIABLE = "COMPAT_SIMULATE"


class Simulation:
    """The variable, set from now to the end of pytest.

    The command line takes precedence over the environment, and that over the file: a file says
    what is usual in a project, the environment is of this run, or of this row of a tox.ini.

    Raises:
        pytest.UsageError: it would be no number of devices.
    """

    def __init__(self, config: Any) -> None:
        before = os.environ.get(VARIABLE)
        option = config.known_args_namespace.compat_simulate
        in_file = config.getini("compat_simulate")
        file = config.inipath.name if config.inipath else "-o"
        sources = [
            ("--compat-simulate", option),
            ("the environment", before or None),
            (f"compat_simulate in {file}", in_file),
        ]
        self.source, self.value = next(pair for pair in sources if pair[1] is not None)
        try:
            simulated_from_outside({VARIABLE: self.value})
        except errors.InvalidArgumentError as error:
            raise pytest.UsageError(f"{self.source}: {error}") from None
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv(VARIABLE, self.value)

    def pytest_report_header(self) -> List[str]:
        return [f"compat: {VARIABLE}={self.value} ({self.source})"]

    def pytest_terminal_summary(self, terminalreporter: Any, config: Any) -> None:
        """Tell where tests passed that ran on no simulated device."""
        elsewhere = config.pluginmanager.hasplugin("dsession")  # in workers of pytest-xdist
        elsewhere = elsewhere or __package__ + ".own_process" in sys.modules
        passed = self.value and terminalreporter.stats.get("passed")
        if passed and not elsewhere and process.configuration is None:
            terminalreporter.write_line(
                f"compat: {VARIABLE}={self.value} had no effect on this process: nothing called "
                "compat.configure_gpu()."
            )

    def pytest_unconfigure(self) -> None:
        self.patch.undo()
