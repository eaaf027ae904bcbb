"""What tox.ini beside it cannot say: where interpreters are, a home of their own for the tests.

`compat tox` of keras-gpu-compat wrote this file, and writes it anew while this line is here.
"""

import os
import shutil
import subprocess

from tox.plugin import impl


@impl
def tox_add_core_config(core_conf, state):
    """Offer all of pyenv's interpreters, where pyenv exists; in CI, a missing one is a failure."""
    # uv would download others. UV_PYTHON_DOWNLOADS=automatic lets it.
    os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
    pyenv = shutil.which("pyenv")
    if pyenv is not None:
        # The interpreter in use stays first; the others' python3.x then answer, too.
        names = _lines(pyenv, "version-name") + _lines(pyenv, "versions", "--bare")
        os.environ["PYENV_VERSION"] = ":".join(names)
        os.environ["PYENV_ROOT"] = _lines(pyenv, "root")[0]  # its default lies in HOME
    # Elsewhere tox leaves rows out whose interpreter is missing, and says so.
    if os.environ.get("CI") and state.conf.options.skip_missing_interpreters == "config":
        state.conf.options.skip_missing_interpreters = "false"


def _lines(*command):
    output = subprocess.check_output(command, universal_newlines=True)
    return output.split()


@impl
def tox_before_run_commands(tox_env):
    """Keep the developer's ~/.keras, ~/.theanorc and caches out of the tests.

    Only now: what installs has used the user's caches.
    """
    home = tox_env.env_dir / "home"
    home.mkdir(parents=True, exist_ok=True)
    tox_env.conf["set_env"].update({"HOME": str(home), "USERPROFILE": str(home)})
