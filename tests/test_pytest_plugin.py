"""The plugin for pytest, in runs of pytest on the sample backend of tests/plugin.

pytest finds it by its entry point: this package is installed in each environment of tox.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import types

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def project(pytester, monkeypatch):
    """Return a folder in which pytest runs in a subprocess."""
    for name in ("COMPAT_SIMULATE", "PYTEST_ADDOPTS", "COMPAT_VERIFY", "CI"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def test_reports_have_pairs_as_pytest_makes_them(tmp_path):
    """Once they came from another process, as JSON, which has no tuples."""
    from compat._commands.pytest_plugin import own_process

    del sys.modules[own_process.__name__]  # it would say that tests run in other processes
    pairs = {"sections": [["Captured stdout call", "text"]], "user_properties": [["name", 1]]}
    (tmp_path / "reports").write_text(json.dumps(["report", dict(pairs, longrepr=None)]) + "\n")
    hook = types.SimpleNamespace(
        pytest_report_from_serializable=lambda config, data: types.SimpleNamespace(**data)
    )
    config = types.SimpleNamespace(hook=hook)
    item = types.SimpleNamespace(config=config, nodeid="test", location=None)
    (report,) = own_process._received(item, tmp_path)
    assert report.sections == [("Captured stdout call", "text")]
    assert report.user_properties == [("name", 1)]


def run(project, *arguments):
    return project.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def run_here(project, *arguments):
    """Likewise, but pytest runs in this process: for tests that neither end nor configure it."""
    return project.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


def test_nothing_of_compat_is_imported_until_it_is_asked_for(project):
    project.makepyfile(
        """
        import sys

        def test():
            assert "keras_gpu_compat_pytest" in sys.modules
            assert not {"compat", "numpy"}.intersection(sys.modules)
        """
    )
    # A module of the project's own with that name is no obstacle, also where it is found first.
    project.makepyfile(compat="raise ValueError")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error"], stdout=subprocess.PIPE
    )
    assert result.returncode == 0, result.stdout.decode()
    assert "compat:" not in result.stdout.decode()


# --compat-simulate -----------------------------------------------------------------------------

DEVICES = """
    import os, subprocess, sys

    def test():
        assert os.environ.get("COMPAT_SIMULATE") == {expected!r}
        code = "import os, sys; sys.exit(os.environ.get('COMPAT_SIMULATE') != {expected!r})"
        assert subprocess.call([sys.executable, "-S", "-c", code]) == 0
    """


@pytest.mark.parametrize(
    "option, environment, file, expected, source",
    [
        (None, None, "4", "4", "compat_simulate in tox.ini"),
        (None, "2", None, "2", "the environment"),
        (None, "2", "4", "2", "the environment"),
        ("3", "2", "4", "3", "--compat-simulate"),
        ("", "2", None, "", "--compat-simulate"),
    ],
)
def test_simulated_devices(project, monkeypatch, option, environment, file, expected, source):
    if environment is not None:
        monkeypatch.setenv("COMPAT_SIMULATE", environment)
    if file is not None:
        project.makefile(".ini", tox="[pytest]\ncompat_simulate = {}\n".format(file))
    project.makeconftest("import os\nassert os.environ['COMPAT_SIMULATE'] == {!r}".format(expected))
    project.makepyfile(DEVICES.format(expected=expected))
    result = run_here(project, *[] if option is None else ["--compat-simulate", option])
    result.assert_outcomes(passed=1)
    assert "compat: COMPAT_SIMULATE={} ({})".format(expected, source) in result.outlines
    no_effect = (
        "compat: COMPAT_SIMULATE={} had no effect on this process: nothing called "
        "compat.configure_gpu().".format(expected)
    )
    assert (no_effect in result.outlines) == bool(expected)


def test_simulation_ends_with_pytest(project):
    program = (
        "import os, pytest\n"
        "for before in (None, '2'):\n"
        "    if before: os.environ['COMPAT_SIMULATE'] = before\n"
        "    pytest.main(['--compat-simulate', '3', '-q'])\n"
        "    assert os.environ.get('COMPAT_SIMULATE') == before\n"
    )
    assert subprocess.call([sys.executable, "-c", program], stdout=subprocess.DEVNULL) == 0


@pytest.mark.parametrize(
    "arguments, source",
    [
        (["--compat-simulate", "x"], "--compat-simulate"),
        (["-o", "compat_simulate=x"], "compat_simulate in tox.ini"),
    ],
)
def test_what_is_no_number_of_devices_is_a_usage_error(project, arguments, source):
    project.makefile(".ini", tox="[pytest]\n")
    result = run_here(project, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        "ERROR: {}: COMPAT_SIMULATE='x' is not a number of devices, 1 or more. Set it to one, for "
        "example COMPAT_SIMULATE=3, or remove it.".format(source)
    ) in result.errlines


# @pytest.mark.compat ---------------------------------------------------------------------------

REPORTED = """
    import os
    import unittest
    import warnings

    import pytest

    pytestmark = pytest.mark.compat
    HERE = os.getpid()

    @pytest.fixture(scope="module")
    def module():
        yield
        assert int(os.environ["PARENT"]) != os.getpid()

    def test_passes(module, record_property, tmp_path, request):
        assert int(os.environ["PARENT"]) != os.getpid()
        assert request.config.getoption("--animal") == "cat"
        record_property("number", 3)
        warnings.warn("an old thing", DeprecationWarning)

    def test_fails():
        print("printed")
        os.write(2, b"written\\n")
        assert [1, 2] == [1, 3]

    def test_skips():
        pytest.skip("for a reason")

    @pytest.mark.xfail(reason="is known")
    def test_known():
        assert 0

    @pytest.mark.xfail(reason="is no more", strict=True)
    def test_known_no_more():
        pass

    @pytest.mark.parametrize("value", ["x[y]::\\u00e4"])
    def test_parameters(value, capsys, caplog):
        print(value)
        assert capsys.readouterr().out == "{}\\n".format(value)

    class TestOfUnittest(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            cls.pid = os.getpid()

        def test(self):
            assert self.pid == os.getpid() != int(os.environ["PARENT"])

    @pytest.fixture
    def broken():
        print("in the fixture")
        raise ValueError("broken")

    def test_with_a_broken_fixture(broken):
        pass
    """

CONFTEST = """
    def pytest_addoption(parser):
        parser.addoption("--animal")
    """


def test_outcomes_are_as_if_the_test_ran_here(project, monkeypatch):
    monkeypatch.setenv("PARENT", str(os.getpid()))
    project.makeconftest(CONFTEST)
    project.makefile(".ini", tox="[pytest]\naddopts = --animal cat --strict-markers\n")
    project.makepyfile(REPORTED)
    result = run_here(project, "-ra", "--junitxml=junit.xml", "--durations=2", "-v")
    result.assert_outcomes(passed=3, failed=2, skipped=1, xfailed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*test_passes PASSED*",
            "*ERROR at setup of test_with_a_broken_fixture*",
            "E * ValueError: broken",
            "*Captured stdout setup*",
            "in the fixture",
            "*_ test_fails _*",
            ">       assert [[]1, 2] == [[]1, 3]",
            "E * At index 1 diff: 2 != 3",
            "*Captured stdout call*",
            "printed",
            "*Captured stderr call*",
            "written",
            "*[[]XPASS(strict)[]] is no more*",
            "*DeprecationWarning: an old thing",
            "*slowest 2 durations*",
            "SKIPPED [[]1[]] *: for a reason",
        ],
    )
    junit = (project.path / "junit.xml").read_text(encoding="utf-8")
    assert '<property name="number" value="3"' in junit
    assert junit.count("<testcase ") == 8


ENDS = """
    import os, signal, threading, time
    import pytest

    @pytest.mark.compat
    def test_dies():
        print("before it")
        os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.compat
    def test_exits_pytest():
        pytest.exit("enough")

    @pytest.mark.compat
    @pytest.mark.timeout(1000, method="signal")
    def test_hangs():
        open("hangs", "w").close()
        time.sleep(100)

    def end_what_hangs():
        "The time is up as soon as it hangs: to start takes longer where others use the cores."
        while not os.path.exists("hangs"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGALRM)

    if os.environ.setdefault("STARTED_BY", str(os.getpid())) == str(os.getpid()):
        threading.Thread(target=end_what_hangs, daemon=True).start()

    @pytest.fixture
    def deadly():
        yield
        os._exit(0)

    @pytest.mark.compat
    def test_dies_in_teardown(deadly):
        pass

    @pytest.mark.compat
    @pytest.mark.parametrize("value", [object()], ids=[str(os.getpid())])
    def test_changes_its_name(value):
        pass

    @pytest.mark.compat
    def test_what_is_written_late_fails(request):
        import atexit
        atexit.register(os._exit, 9)

    class Unruly:
        def pytest_runtest_call(self):
            raise SystemError("of a plugin")

        def pytest_runtest_logreport(self):
            raise SystemError("of a plugin")

    @pytest.mark.compat
    def test_with_an_unruly_plugin(request):
        request.config.pluginmanager.register(Unruly())

    def test_is_as_before():
        pass
    """


NOTHING = "It printed nothing.\n"
TIME_IS_UP = "was killed: Timeout (>1000.0s) from pytest-timeout."
TIME_WAS_UP = "was killed: Timeout >1000.0s."  # of Python 3.6's pytest-timeout
IN_TEARDOWN = "ERROR at teardown of test_"


def test_a_process_that_ends_is_a_failed_test(project):
    project.makepyfile(ENDS)
    result = run(project, "-rfE")
    result.assert_outcomes(passed=3, failed=5, errors=2)
    text = re.sub(r"^_+ (.*?) _+$", r"* \1", result.stdout.str(), flags=re.M)
    text = text.replace(TIME_WAS_UP, TIME_IS_UP)
    for name, how, output in (
        ("test_dies", "was killed by signal 9 (SIGKILL).", "Its stdout:\nbefore it\n"),
        ("test_with_an_unruly_plugin", "ended with exit status 3.", "Its stderr:\nTraceback"),
        ("test_exits_pytest", "ended with exit status 2.", "Its stderr:\n_pytest.outcomes.Exit"),
        ("test_hangs", TIME_IS_UP, "Its stderr:\nFatal Python"),
        (IN_TEARDOWN + "dies_in_teardown", "ended before it had run the test.", NOTHING),
        (IN_TEARDOWN + "what_is_written_late_fails", "ended with exit status 9.", NOTHING),
    ):
        assert "* {}\nThe process of this test {}\n\n{}".format(name, how, output) in text
    assert "test_hangs\n" in text  # the line where it hung
    assert (
        "The process of this test ended with exit status 5.\n\nIts stderr:\n"
        "No tests with the id 'test_changes_its_name[N]' were collected. Parameters of a test that "
        "has a process of its own need ids that are the same each time it is collected.\n"
    ) in re.sub(r"\[\d+\]", "[N]", text)


CONFIGURED = """
    import sys

    import pytest

    assert "compat_numpy" in sys.modules or "numpy" not in sys.modules

    @pytest.mark.compat(simulate=2, backend="numpy", numpy_errors="raise")
    class TestTwo:
        def test_configured_before(self):
            import compat
            from compat._runtime.process import process
            assert process.configuration is not None
            assert len(compat.configure_gpu(backend="numpy", numpy_errors="raise").devices) == 2
            assert len(compat.configure_gpu(1, backend="numpy").devices) == 2  # changes nothing

        @pytest.mark.compat(backend="numpy", strict="no")
        def test_the_nearest_mark_counts(self):
            import compat
            configuration = compat.configure_gpu(backend="numpy")
            assert len(configuration.devices) == 4
            assert configuration.settings.strict is False  # as the text says

    @pytest.mark.compat(sinulate=2)
    def test_misspelled():
        pass

    @pytest.mark.compat(3)
    def test_without_a_name():
        pass

    @pytest.mark.compat(gpus={1})
    def test_no_text():
        pass

    def test_here():
        from compat._runtime.process import process
        assert process.configuration is None
    """


def test_arguments_of_configure_gpu(project):
    project.makepyfile(CONFIGURED)
    result = run(project, "--compat-simulate", "4")
    result.assert_outcomes(passed=3, failed=2, errors=1, warnings=1)
    lines = result.stdout.str()
    for text in (
        "\nUnknownOptionError: configure_gpu() has no argument 'sinulate', and no backend has an "
        "option of that name. Did you mean simulate",
        "\n@pytest.mark.compat takes keyword arguments, those of configure_gpu(), but it was given "
        "3. Name it, as in @pytest.mark.compat(simulate=3).\n",
        "\n@pytest.mark.compat(gpus={1}) cannot be passed to another process. Use texts, numbers, "
        "True, False, None, and lists of these.\n",
        "CompatWarning: configure_gpu() of the script changes nothing: @pytest.mark.compat has "
        "configured this process (",
    ):
        assert text in lines


STACK = """
    import pytest

    @pytest.fixture(scope="module")
    def module():
        yield
        raise ValueError("module fixture")

    def test_with_it(module):
        pass

    @pytest.mark.compat
    def test_between():
        pass
    """


def test_fixtures_of_tests_before_end_on_time(project):
    """The last test of a module that uses a fixture of it runs elsewhere."""
    project.makepyfile(test_1=STACK, test_2="def test(): pass")
    result = run_here(project)
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_between*", "E * module fixture"])


def test_the_first_failure_ends_the_run(project):
    project.makepyfile(
        """
        import pytest

        @pytest.mark.compat
        def test_1():
            assert 0

        @pytest.mark.compat
        def test_2():
            pass
        """
    )
    run(project, "-x", "--pdb").assert_outcomes(failed=1)


def test_ctrl_c_ends_the_process(project):
    project.makepyfile(
        """
        import os, time, pytest

        @pytest.mark.compat
        def test():
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            time.sleep(100)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        stdout=subprocess.PIPE,
        start_new_session=True,
        # Where the tests run in the background, a shell has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    file = project.path / "pid"
    until = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out.decode()
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


# compat_twins ----------------------------------------------------------------------------------


def read(name):
    """Return a file of tests that pytest does not find here."""
    with open(os.path.join(os.path.dirname(__file__), "twins_project", name)) as file:
        return file.read()


def test_twins(project):
    project.makepyfile(read("test_twins.py"))
    result = run(project, "--compat-simulate", "3", "--strict-markers")
    result.assert_outcomes(passed=13)
    assert "had no effect" not in result.stdout.str()


def test_where_there_are_no_several_devices(project):
    project.makepyfile(read("test_alone.py"))
    run(project).assert_outcomes(passed=2)
