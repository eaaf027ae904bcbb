"""What tox.ini cannot say: interpreters, what an environment's name means, how long it takes."""

import configparser
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time

from tox.config.loader.memory import MemoryLoader
from tox.plugin import impl

RUN = time.time()  # tells the environments of one run of tox from those of another
BEGAN = {}  # when each environment began; they run in threads, and each sets its own
PART = "--" in sys.argv  # of the user's choice: no result of an environment
# A framework makes a million objects that stay. Looking through them for garbage takes a fifth of
# the time while it is imported, and up to a third as the process exits, in each of the many that
# tests start. What is frozen is exempt. Pairs of versions (tests/versions.py) and Python 3.6, which
# cannot freeze, exit as Python does by itself.
COLLECT_LESS = "import gc; gc.set_threshold(100000, 50, 100)\n"
FREEZE = "import atexit, gc; hasattr(gc, 'freeze') and atexit.register(gc.freeze)\n"


@impl
def tox_add_core_config(core_conf, state):
    """Offer all of pyenv's interpreters, where pyenv exists, and download none."""
    os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
    # Folders of wheels that pip is told of, such as one with a build of torch for the CPU: the
    # registry's own brings gigabytes of CUDA, and uv reads no configuration of pip's.
    has_pip = importlib.util.find_spec("pip") is not None  # tox itself does without
    settings = _lines(sys.executable, "-m", "pip", "config", "list") if has_pip else []
    folders = [line.partition("=")[2].strip("'") for line in settings if "find-links=" in line]
    os.environ.setdefault("UV_FIND_LINKS", ",".join(sorted(set(folders))))
    pyenv = shutil.which("pyenv")
    if pyenv is not None:
        # The interpreter in use stays first; the others' python3.x then answer, too.
        names = _lines(pyenv, "version-name") + _lines(pyenv, "versions", "--bare")
        os.environ["PYENV_VERSION"] = ":".join(names)
        os.environ["PYENV_ROOT"] = _lines(pyenv, "root")[0]  # its default lies in HOME
    # The core's tests run on the oldest and the newest Python of the matrix; on a machine that has
    # neither, on the one that runs tox.
    environments = core_conf["env_list"].envs
    pythons = [name[2:].partition("-")[0] for name in environments if name.endswith("-core")]
    if not any(_answers("python{}.{}".format(each[0], each[1:])) for each in pythons):
        environments.insert(0, "core")


def _answers(python):
    """Return whether there is such an interpreter.

    A shim of pyenv's can be there without one.
    """
    try:
        return subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def _lines(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.split()


@impl
def tox_add_env_config(env_conf, state):
    """Have an environment install the extras that are parts of its name."""
    setup = configparser.ConfigParser()
    setup.read(state.conf.core["tox_root"] / "setup.cfg", encoding="utf-8")
    extras = set(env_conf.name.split("-")) & set(setup["options.extras_require"])
    if extras:
        env_conf.loaders.insert(0, MemoryLoader(extras=extras))


@impl
def tox_on_install(tox_env):
    """Note when an environment begins: tox calls nothing earlier."""
    _begin(tox_env)


def _begin(tox_env):
    """Note when, and remove what its tests left before: they may not come to an end this time."""
    if tox_env.name not in BEGAN:
        BEGAN[tox_env.name] = time.time()
        if not PART:
            for path in (tox_env.core["work_dir"] / "results").glob(tox_env.name + ".*"):
                path.unlink()


@impl
def tox_before_run_commands(tox_env):
    """Give the commands a home of their own; what installs has used the user's caches."""
    home = tox_env.env_dir / "home"
    home.mkdir(parents=True, exist_ok=True)
    tox_env.conf["set_env"].update({"HOME": str(home), "USERPROFILE": str(home)})
    for folder in tox_env.env_dir.glob("lib/python*/site-packages"):
        # Triton, which torch has for CUDA, prints what is left at exit.
        freeze = "" if (folder / "triton").exists() else FREEZE
        (folder / "collect_less.pth").write_text(COLLECT_LESS + freeze)
        _link_compiled(folder, tox_env.env_dir.parent)
    _begin(tox_env)  # with --skip-env-install nothing was installed
    if PART and tox_env.name != "report":  # run the chosen tests once, and leave the results be
        commands = tox_env.conf["commands"]
        del commands[1:]
        commands[0].args = [each for each in commands[0].args if "--junitxml" not in each]


def _link_compiled(folder, environments):
    """Link the modules that another environment has compiled from the same files.

    uv links what it installs to its cache. A framework has some thousand modules, which take four
    seconds to compile in each environment. Python compares each one with its source before it runs
    it, and sets the path that it shows.

    Arguments:
        folder: the packages of an environment.
        environments: the folder of all environments.
    """
    others = sorted(environments.glob("*/lib/{}/site-packages".format(folder.parent.name)))
    for source in sorted(folder.glob("*/__init__.py")):
        package = source.parent
        for other in [each / package.name for each in others if each != folder]:
            if (package / "__pycache__").exists():
                break
            with contextlib.suppress(OSError):  # there is no such package, or it is removed
                if source.samefile(other / source.name):
                    for path in other.rglob("__pycache__/*.pyc"):
                        _link(path, package / path.relative_to(other))


def _link(compiled, here):
    """Link a compiled module if its source is the same file as here."""
    name = compiled.name.partition(".")[0] + ".py"
    with contextlib.suppress(OSError):  # there is none
        if (compiled.parent.parent / name).samefile(here.parent.parent / name):
            here.parent.mkdir(exist_ok=True)
            os.link(str(compiled), str(here))


def _failure(outcome):
    """Return a command, its exit status, and what it said last, or first where it has crashed."""
    said = (outcome.out + outcome.err).splitlines()
    crash = [n for n, line in enumerate(said) if line.startswith("Fatal Python error")]
    shown = said[crash[0] :][:8] if crash else said[-8:]
    told = "{} (exit status {})".format(outcome.request.shell_cmd, outcome.exit_code)
    return "\n    ".join([told] + [line[:200] for line in shown])


@impl
def tox_after_run_commands(tox_env, outcomes):
    """Leave an environment's times and failed commands, for tests/support_table.py."""
    if PART or tox_env.name == "report":
        return
    began = BEGAN[tox_env.name]
    before = len(tox_env.conf["commands_pre"])
    tests = sum(outcome.elapsed for outcome in outcomes[before:])
    times = {"run": RUN, "began": began, "setup": time.time() - began - tests, "tests": tests}
    failed = [_failure(outcome) for outcome in outcomes if outcome.exit_code]
    results = tox_env.core["work_dir"] / "results"
    results.mkdir(exist_ok=True)
    said = json.dumps(dict(times, failed=failed))
    (results / (tox_env.name + ".json")).write_text(said, encoding="utf-8")
