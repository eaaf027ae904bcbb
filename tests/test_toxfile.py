"""toxfile.py, and the one that `compat tox` writes, which tox loads: what they do to environments.

tox is not installed in these.
"""

import compileall
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types

import pytest
import support_table


@pytest.fixture
def load(monkeypatch):
    """Load toxfile.py, with what it takes from tox, as ``tox run`` with these arguments does."""

    def load(*arguments, path="toxfile.py"):
        loader = types.ModuleType("tox.config.loader.memory")
        loader.MemoryLoader = dict
        plugin = types.ModuleType("tox.plugin")
        plugin.impl = lambda hook: hook
        for module in (loader, plugin):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(sys, "argv", ["tox", "run"] + list(arguments))
        spec = importlib.util.spec_from_file_location(
            "toxfile", os.path.join(support_table.ROOT, *path.split("/"))
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def environment(tmp_path, name="py37-theano"):
    """As the hooks see one: ``tox.tox_env.api.ToxEnv``."""
    (tmp_path / "results").mkdir()
    for ending in (".xml", ".again.xml", ".models.xml", ".json"):
        (tmp_path / "results" / (name + ending)).write_text("of before")
    commands = [
        types.SimpleNamespace(args=["pytest", "tests/backends", "--junitxml=a.xml"]),
        types.SimpleNamespace(args=["pytest", "tests/drop_in", "--junitxml=a.again.xml"]),
    ]
    return types.SimpleNamespace(
        name=name,
        env_dir=tmp_path / name,
        core={"work_dir": tmp_path},
        conf={"set_env": {}, "commands": commands, "commands_pre": []},
    )


def results(tmp_path):
    return sorted(path.name for path in (tmp_path / "results").iterdir())


def test_an_environment_begins_without_its_old_results(load, tmp_path):
    tox, env = load("-e", "py37-theano"), environment(tmp_path)
    (tmp_path / "results" / "py38-theano.xml").write_text("of another")
    tox.tox_on_install(env)
    assert results(tmp_path) == ["py38-theano.xml"]
    (tmp_path / "results" / "py37-theano.xml").write_text("new")
    tox.tox_before_run_commands(env)
    tox.tox_after_run_commands(env, [])
    assert results(tmp_path) == ["py37-theano.json", "py37-theano.xml", "py38-theano.xml"]
    assert len(env.conf["commands"]) == 2


def test_an_environment_leaves_its_times_and_what_failed(load, tmp_path):
    tox, env = load("-e", "py37-theano"), environment(tmp_path)
    tox.tox_before_run_commands(env)
    crash = "Fatal Python error: Segmentation fault\n\nCurrent thread:\n" + 20 * "  File\n"
    outcomes = [
        types.SimpleNamespace(
            elapsed=1,
            exit_code=code,
            request=types.SimpleNamespace(shell_cmd="pytest tests/" + folder),
            out="".join("line {}\n".format(n) for n in range(20)),
            err=err,
        )
        for folder, code, err in (
            ("backends", 0, ""),
            ("drop_in", 1, "last\n"),
            ("fuzz", -11, "before\n" + crash),
        )
    ]
    tox.tox_after_run_commands(env, outcomes)
    left = json.loads((tmp_path / "results" / "py37-theano.json").read_text())
    assert sorted(left) == ["began", "failed", "run", "setup", "tests"]
    assert left["tests"] == 3
    failed, crashed = (each.split("\n    ") for each in left["failed"])
    last = ["line {}".format(n) for n in range(13, 20)] + ["last"]
    assert failed == ["pytest tests/drop_in (exit status 1)"] + last
    assert crashed == ["pytest tests/fuzz (exit status -11)"] + crash.split("\n")[:8]


def test_what_tests_start_collects_garbage_less_often(load, tmp_path):
    env = environment(tmp_path)
    packages = env.env_dir / "lib" / "python3.7" / "site-packages"
    packages.mkdir(parents=True)
    load("-e", "py37-theano").tox_before_run_commands(env)
    threshold = "import gc, site; site.addsitedir({!r}); print(gc.get_threshold()[0])"
    command = [sys.executable, "-c", threshold.format(str(packages))]
    assert int(subprocess.check_output(command)) == 100000


def test_modules_that_another_environment_has_compiled_are_linked(load, tmp_path):
    """They are if the sources are the same file; what Python shows of them has the path here."""
    env = environment(tmp_path)
    python = "python{}.{}".format(*sys.version_info)
    here, other = (tmp_path / n / "lib" / python / "site-packages" for n in (env.name, "py37"))
    for folder in other / "same" / "inner", other / "different":
        folder.mkdir(parents=True)
        for package in {folder, other / "same"}:
            (package / "__init__.py").write_text("def function(): pass\n")
    (other / "other").mkdir()
    (other / "other" / "module.py").write_text("")
    compileall.compile_dir(str(other), quiet=1)
    shutil.copytree(
        str(other), str(here), copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__")
    )
    (here / "different" / "__init__.py").unlink()
    (here / "different" / "__init__.py").write_text("def another(): pass\n")
    (here / "other" / "__init__.py").write_text("")
    load("-e", env.name).tox_before_run_commands(env)
    program = """if True:
        import os, sys
        sys.path.insert(0, sys.argv[1])
        import different, same, same.inner
        for module in same, same.inner:
            assert module.function.__code__.co_filename == module.__file__
            assert module.__file__.startswith(sys.argv[1])
            assert os.stat(module.__cached__).st_nlink == 2
        different.another()
        assert os.stat(different.__cached__).st_nlink == 1
    """
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, "-c", program, str(here)], env=environ, check=True)


def test_chosen_tests_run_once_and_leave_the_results_be(load, tmp_path):
    tox, env = load("-e", "py37-theano", "--", "-k", "masked"), environment(tmp_path)
    before = results(tmp_path)
    tox.tox_on_install(env)
    tox.tox_before_run_commands(env)
    tox.tox_after_run_commands(env, [])
    assert results(tmp_path) == before
    assert [command.args for command in env.conf["commands"]] == [["pytest", "tests/backends"]]


@pytest.mark.parametrize(
    "here, listed", [(["3.11"], True), (["3.6"], False), (["3.13", "3.11"], False)]
)
def test_core_is_run_where_the_pythons_of_its_rows_are_missing(
    load, tmp_path, monkeypatch, here, listed
):
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")  # or the hook sets it for later tests
    monkeypatch.setenv("UV_FIND_LINKS", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    for python in here:
        program = tmp_path / ("python" + python)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    envs = ["py36-core", "py313-core", "lint"]
    tox = load()
    # As where tox is installed without pip.
    monkeypatch.setattr(tox.importlib.util, "find_spec", {}.get)
    tox.tox_add_core_config({"env_list": types.SimpleNamespace(envs=envs)}, None)
    assert ("core" in envs) == listed


# The one that `compat tox` writes --------------------------------------------------------------

GENERATED = "compat/_commands/toxfile.py"
PYENV = """\
#!/bin/sh
case "$*" in
version-name) echo 3.13.0;;
"versions --bare") echo 3.7.16; echo 3.13.0;;
root) echo /pyenv;;
*) exit 1;;
esac
"""


def configured(skip):
    options = types.SimpleNamespace(skip_missing_interpreters=skip)
    return types.SimpleNamespace(conf=types.SimpleNamespace(options=options))


@pytest.mark.parametrize(
    "ci, asked, skips",
    [("true", "config", "false"), ("", "config", "config"), ("true", "true", "true")],
)
def test_a_missing_interpreter_is_a_failure_in_ci(load, tmp_path, monkeypatch, ci, asked, skips):
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    state = configured(asked)
    load(path=GENERATED).tox_add_core_config(None, state)
    assert state.conf.options.skip_missing_interpreters == skips


def test_all_interpreters_of_pyenv_are_offered(load, tmp_path, monkeypatch):
    for name in ("UV_PYTHON_DOWNLOADS", "PYENV_VERSION", "PYENV_ROOT"):
        monkeypatch.setenv(name, "")  # so that they are as before after the test
        monkeypatch.delenv(name)
    program = tmp_path / "pyenv"
    program.write_text(PYENV)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    load(path=GENERATED).tox_add_core_config(None, configured("config"))
    assert os.environ["PYENV_VERSION"] == "3.13.0:3.7.16:3.13.0"
    assert os.environ["PYENV_ROOT"] == "/pyenv"
    assert os.environ["UV_PYTHON_DOWNLOADS"] == "never"


def test_tests_of_a_row_have_a_home_of_their_own(load, tmp_path):
    env = environment(tmp_path)
    load(path=GENERATED).tox_before_run_commands(env)
    home = str(tmp_path / env.name / "home")
    assert os.path.isdir(home)
    assert env.conf["set_env"] == {"HOME": home, "USERPROFILE": home}
