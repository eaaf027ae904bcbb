"""In the process of a test with the mark ``compat``: runs that test, and sends its reports.

Started by ``own_process``, with a file that says what to do: see ``own_process._job``.
"""

import json
import os
import sys
from typing import Any, Dict, List

import pytest
from _pytest.terminal import TerminalReporter

import compat

from ..._runtime.process import process
from . import simulation


def _capturing(when):
    """A hook for a phase of tests, which adds to its report what the test prints."""

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def captured(self, item):
        for _, stream in self.streams:
            stream.seek(0, os.SEEK_END)
        yield
        for name, stream in self.streams:
            getattr(sys, name).flush()
            item.add_report_section(when, name, stream.read().decode("utf-8", "replace"))

    return captured


class Child:
    """The plugin that makes one run of pytest that process.

    pytest's ``workerinput`` tells other plugins that another process writes the results, as it
    does in a worker of pytest-xdist.
    """

    def __init__(self, job: Dict[str, Any]) -> None:
        self.job = job
        self.config = None  # type: Any
        # A line is sent at once: this process may die.
        self.reports = open(job["reports"], "a", buffering=1, encoding="utf-8")
        self.streams = [(name, open(path, "rb")) for name, path in job["streams"]]

    def send(self, kind: str, data: Dict[str, Any]) -> None:
        self.reports.write(json.dumps([kind, data], default=str) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_parse(self, pluginmanager):
        """Begin with the options of the run that this test is of."""
        self.config = pluginmanager.get_plugin("pytestconfig")
        vars(self.config.option).update(self.job["options"])
        self.config.workerinput = self.job["workerinput"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config):
        """Configure before anything of the project is imported; what fails, fails the test."""
        arguments = self.job["configure"]
        if arguments:
            if arguments.get("simulate"):  # whatever the whole run simulates
                os.environ[simulation.VARIABLE] = str(arguments["simulate"])
            try:
                compat.configure_gpu(**arguments)
                process.configured_by = "@pytest.mark.compat"
            except Exception as error:
                early_config.pluginmanager.register(Unconfigured(error))

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config):
        """Have pytest print nothing. Without a terminal reporter, its assertions fail."""
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)
            silent = TerminalReporter(config, open(os.devnull, "w"))
            config.pluginmanager.register(silent, "terminalreporter")

    def pytest_collectreport(self, report):
        if report.failed:
            sys.stderr.write(f"{report.longreprtext}\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        wanted = self.job["test"]
        chosen = [item for item in items if item.nodeid.partition("::")[2] == wanted]
        if len(chosen) != 1 and items:
            sys.stderr.write(
                f"{len(chosen) or 'No'} tests with the id {wanted!r} were collected. Parameters "
                "of a test that has a process of its own need ids that are the same each time it "
                "is collected.\n"
            )
            del chosen[:]
        items[:] = chosen

    # What a test prints goes to files, which outlive the process; here it becomes a part of the
    # report, as pytest's own capturing would make it.

    pytest_runtest_setup = _capturing("setup")
    pytest_runtest_call = _capturing("call")
    pytest_runtest_teardown = _capturing("teardown")

    def pytest_runtest_logreport(self, report):
        serializable = self.config.hook.pytest_report_to_serializable
        self.send("report", serializable(config=self.config, report=report))

    def pytest_internalerror(self, excrepr):
        sys.stderr.write(f"{excrepr}\n")

    def pytest_keyboard_interrupt(self, excinfo):
        sys.stderr.write(f"{excinfo.exconly()}\n")  # of pytest.exit(), too

    def pytest_warning_recorded(self, warning_message, when, location):
        kind, text = warning_message.category, str(warning_message.message)
        place = warning_message.filename, warning_message.lineno
        if not issubclass(kind, pytest.PytestAssertRewriteWarning):  # of compat, by pytest
            warning = (kind.__module__, kind.__name__, text) + place
            self.send("warning", {"warning": warning, "when": when, "location": location})


class Unconfigured:
    """Makes the test fail because of what ``configure_gpu()`` raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        if isinstance(self.error, compat.CompatError):
            text = f"{type(self.error).__name__}: {self.error}"
            pytest.fail(text, pytrace=False)
        raise self.error


def main(arguments: List[str]) -> int:
    """Do what the file says whose path is the one argument."""
    with open(arguments[0], encoding="utf-8") as file:
        job = json.load(file)
    sys.path[:] = job["path"]
    return pytest.main(job["arguments"], plugins=[Child(job)])
