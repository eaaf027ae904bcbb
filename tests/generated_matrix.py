"""Run what ``compat tox`` writes for tests/legacy_project, as its owner would.

    python tests/generated_matrix.py FOLDER WHEELS BACKENDS

FOLDER gets a copy of the project; WHEELS is where tox has built the wheel of this package. The exit
status is that of tox: not 0 where a row fails and, where CI is set, where one is skipped.
"""

import glob
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main(folder, wheels, backends):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(os.path.join(ROOT, "tests", "legacy_project"), folder)
    wheel = max(glob.glob(os.path.join(wheels, "*.whl")), key=os.path.getmtime)
    # tox would take the outer one's, such as TOX_WORK_DIR, for options.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TOX_")}
    for module, *arguments in (
        ["compat", "tox", "--compat", wheel, "--backends", backends],
        ["tox", "run"],
    ):
        subprocess.run(
            [sys.executable, "-m", module] + arguments, cwd=folder, env=environ, check=True
        )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
