"""``@pytest.mark.compat(...)``: a test in a process of its own, reported as if it ran here.

What a framework has configured stays so until its process ends. ``main()`` is what runs there.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from typing import Any, Dict, List

import pytest
from _pytest.terminal import TerminalReporter

import compat

from ... import errors
from ..._ranks.launch import starter
from ..._ranks.launch.processes import dies_with_this_process
from ..._runtime import by_path
from ..._runtime.process import process
from . import VARIABLE

# Seconds that a process has to end by itself after it was told to, before it is killed.
GRACE = 5.0

# Options of this run that the other process begins without: which tests to run and where, since it
# is told so by itself; what pytest-xdist and pytest-cov start; files that it would overwrite;
# debuggers, which have no terminal there.
NOT_PASSED_ON = """
    basetemp capture collectonly compat_simulate cov_source dist failedfirst file_or_dir inifilename
    lf log_file looponfail maxprocesses newfirst numprocesses plugins px rootdir stepwise
    stepwise_skip trace tx usepdb
""".split()

STREAMS = "stdout", "stderr"


def run(item: Any, nextitem: Any) -> bool:
    """Do what pytest's ``pytest_runtest_protocol`` does."""
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = _reports(item)
    # Fixtures that tests before this one made, and no test after it uses, end now.
    end_fixtures = item.session._setupstate.teardown_exact
    call = pytest.CallInfo.from_call(lambda: end_fixtures(nextitem), when="teardown")
    if call.excinfo is not None:
        reports.append(pytest.TestReport.from_item_and_call(item, call))
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(item):
    """Return the reports of the test's phases."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="compat-test-"))
    try:
        ended = _run_child(item, _job(item, folder, _requested(item)), folder)
        reports = _received(item, folder)
        if ended is not None or [r.when for r in reports][-1:] != ["teardown"]:
            ended = ended or "ended before it had run the test"
            text = f"The process of this test {ended}.\n\n{_output(folder)}"
            reports = _with_failure(item, reports, text)
        return reports
    except errors.InvalidArgumentError as error:
        return _with_failure(item, [], str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _requested(item: Any) -> Dict[str, Any]:
    """Return the arguments of ``configure_gpu()`` that the mark has."""
    mark = item.get_closest_marker("compat")
    if mark.args:
        raise errors.InvalidArgumentError(
            "@pytest.mark.compat takes keyword arguments, those of configure_gpu(), but it was "
            f"given {mark.args[0]!r}. Name it, as in @pytest.mark.compat(simulate=3)."
        )
    for name, value in mark.kwargs.items():
        if not _is_plain(value):
            raise errors.InvalidArgumentError(
                f"@pytest.mark.compat({name}={value!r}) cannot be passed to another process. Use "
                "texts, numbers, True, False, None, and lists of these."
            )
    return mark.kwargs


def _is_plain(value):
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _job(item, folder, configure):
    """Return what ``Child`` reads: the test, the run that it is of, and where to write."""
    config = item.config
    arguments = ["--rootdir", str(config.rootpath), "--capture=no"]
    for plugin in config.option.plugins or []:
        arguments += ["-p", plugin]
    if config.inipath:
        arguments += ["-c", str(config.inipath)]
    temporary = getattr(config, "_tmp_path_factory", None)  # without which there is no tmp_path
    if temporary is not None:
        arguments += ["--basetemp", str(temporary.mktemp("own_process"))]
    # Files and options are those of this run already.
    arguments += ["-o", "addopts=", "-o", "log_file=", str(item.path)]
    options = {name: value for name, value in vars(config.option).items() if _is_plain(value)}
    for name in NOT_PASSED_ON:
        options.pop(name, None)
    worker = getattr(config, "workerinput", {"workerid": "master", "workercount": 1})
    worker = {name: value for name, value in worker.items() if _is_plain(value)}
    captures = config.getoption("capture", "fd") != "no"
    return {
        "arguments": arguments,
        "configure": configure,
        "options": options,
        "path": sys.path,
        "reports": str(folder / "reports"),
        "streams": [(name, str(folder / name)) for name in (STREAMS if captures else ())],
        "test": item.nodeid.partition("::")[2],
        "workerinput": dict(worker, compat=True),
    }


def _run_child(item, job, folder):
    """Run the process; how it ended, as a phrase, where that was not well; else None."""
    path = folder / "job"
    path.write_text(json.dumps(job), encoding="utf-8")
    environ = dict({"PYTHONIOENCODING": "utf-8"}, **os.environ)
    environ.pop("PYTEST_ADDOPTS", None)
    command = by_path.command("_commands.pytest_plugin.own_process") + [str(path)]
    folder_of_run = str(item.config.invocation_params.dir)
    command.insert(1, "-u")  # what is printed is there, however the process ends
    options: Dict[str, Any] = {"stdin": subprocess.DEVNULL} if job["streams"] else {}
    # In a group of its own, so that what it has started ends with it.
    options.update(start_new_session=True, preexec_fn=dies_with_this_process())
    with contextlib.ExitStack() as stack:
        options.update((n, stack.enter_context(open(p, "ab"))) for n, p in job["streams"])
        child = subprocess.Popen(command, cwd=folder_of_run, env=environ, **options)
    try:
        status = child.wait()
    except BaseException as error:
        interrupted = isinstance(error, (KeyboardInterrupt, pytest.exit.Exception))
        # pytest's faulthandler tells where a process is that gets SIGABRT.
        child.send_signal(signal.SIGINT if interrupted else signal.SIGABRT)
        starter.wait([child], GRACE)
        if interrupted:
            raise
        return "was killed: " + str(error).rstrip(".")  # by another plugin's timeout
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    if status < 0:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    return None if status in (0, 1) else f"ended with exit status {status}"


def _received(item: Any, folder: pathlib.Path) -> List[Any]:
    """Return the reports that came; warnings are passed on."""
    reports = []
    lines = _content(folder / "reports").split("\n")
    for line in lines[:-1]:  # the process may have died in the last one
        kind, data = json.loads(line)
        if kind == "warning":
            _pass_on(item, **data)
            continue
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        report.nodeid, report.location = item.nodeid, item.location
        if isinstance(report.longrepr, list):  # of a skipped test; JSON has no tuples
            report.longrepr = tuple(report.longrepr)
        for name in ("sections", "user_properties"):
            setattr(report, name, [tuple(pair) for pair in getattr(report, name)])
        reports.append(report)
    return reports


def _content(path):
    """Return what a file has: nothing where the process did not come to make it."""
    return path.read_bytes().decode("utf-8", "replace") if path.exists() else ""


def _pass_on(item, warning, when, location):
    """Have a warning shown at the end, as pytest does with those of this process."""
    module, name, text, *place = warning
    kind = type(name, (Warning,), {"__module__": module})  # which need not be imported here
    message = warnings.WarningMessage(kind(text), kind, *place)
    location = location and tuple(location)
    arguments = dict(warning_message=message, when=when, nodeid=item.nodeid, location=location)
    item.config.hook.pytest_warning_recorded.call_historic(kwargs=arguments)


def _output(folder: pathlib.Path) -> str:
    """Return all that the process printed, for a person."""
    texts = [(name, _content(folder / name).rstrip()) for name in STREAMS]
    parts = [f"Its {name}:\n{text}\n" for name, text in texts if text]
    return "\n".join(parts) or "It printed nothing.\n"


def _with_failure(item: Any, reports: List[Any], text: str) -> List[Any]:
    """Return the reports, and a failure of the phase in which the process ended, for all phases."""
    by_phase = {report.when: report for report in reports}
    began = "setup" not in by_phase or by_phase["setup"].passed
    failed = "call" if began and "call" not in by_phase else "teardown"
    about = item.nodeid, item.location, dict.fromkeys(item.keywords, 1)
    for when in {"setup", "teardown"}.difference(by_phase):
        by_phase[when] = pytest.TestReport(*about, "passed", None, when)
    by_phase[failed] = pytest.TestReport(*about, "failed", text, failed)
    return [by_phase[when] for when in ("setup", "call", "teardown") if when in by_phase]


# In the other process, which runs that test, and sends its reports ------------------------------


def _capturing(when):
    """Return a hook for a phase of tests, which adds to its report what the test prints."""

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
        self.config: Any = None
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
                os.environ[VARIABLE] = str(arguments["simulate"])
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
