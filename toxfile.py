"""What tox.ini cannot say: interpreters, what an environment's name means, how long it takes."""

import configparser
import json
import os
import shutil
import subprocess
import sys
import time

from tox.config.loader.memory import MemoryLoader
from tox.plugin import impl

BEGAN = {}  # when each environment began; they run in threads, and each sets its own


@impl
def tox_add_core_config(core_conf, state):
    """Offer all of pyenv's interpreters, where pyenv exists, and download none."""
    os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
    # Folders of wheels that pip is told of, such as one with a build of torch for the CPU: the
    # registry's own brings gigabytes of CUDA, and uv reads no configuration of pip's.
    settings = _lines(sys.executable, "-m", "pip", "config", "list")
    folders = [line.partition("=")[2].strip("'") for line in settings if "find-links=" in line]
    os.environ.setdefault("UV_FIND_LINKS", ",".join(sorted(set(folders))))
    pyenv = shutil.which("pyenv")
    if pyenv is not None:
        # The interpreter in use stays first; the others' python3.x then answer, too.
        names = _lines(pyenv, "version-name") + _lines(pyenv, "versions", "--bare")
        os.environ["PYENV_VERSION"] = ":".join(names)
        os.environ["PYENV_ROOT"] = _lines(pyenv, "root")[0]  # its default lies in HOME


def _lines(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.split()


@impl
def tox_add_env_config(env_conf, state):
    """The parts of an environment's name that are extras are what it installs."""
    setup = configparser.ConfigParser()
    setup.read(state.conf.core["tox_root"] / "setup.cfg", encoding="utf-8")
    extras = set(env_conf.name.split("-")) & set(setup["options.extras_require"])
    if extras:
        env_conf.loaders.insert(0, MemoryLoader(extras=extras))


@impl
def tox_on_install(tox_env):
    """Note when an environment begins: tox calls nothing earlier."""
    BEGAN.setdefault(tox_env.name, time.time())


@impl
def tox_before_run_commands(tox_env):
    """Give the commands a home of their own; what installs has used the user's caches."""
    home = tox_env.env_dir / "home"
    home.mkdir(parents=True, exist_ok=True)
    tox_env.conf["set_env"].update({"HOME": str(home), "USERPROFILE": str(home)})
    BEGAN.setdefault(tox_env.name, time.time())  # with --skip-env-install nothing was installed
    if "--" in sys.argv:  # tests of the user's choice: run them once
        del tox_env.conf["commands"][1:]


@impl
def tox_after_run_commands(tox_env, outcomes):
    """Leave the times of an environment beside its results, for tests/support_table.py."""
    began = BEGAN[tox_env.name]
    before = len(tox_env.conf["commands_pre"])
    tests = sum(outcome.elapsed for outcome in outcomes[before:])
    times = {"began": began, "setup": time.time() - began - tests, "tests": tests}
    results = tox_env.core["work_dir"] / "results"
    results.mkdir(exist_ok=True)
    (results / (tox_env.name + ".json")).write_text(json.dumps(times), encoding="utf-8")
