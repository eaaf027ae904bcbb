"""Run what ``compat tox`` writes for tests/legacy_project, as its owner would.

The first backend's row where there is no configuration of tox, the others' beside one.

    python tests/generated_matrix.py FOLDER WHEELS BACKENDS

FOLDER gets a copy of the project; WHEELS is where tox has built the wheel of this package. The exit
status is not 0 where a row fails and, where CI is set, where one is skipped: its interpreter is
missing.
"""

import functools
import glob
import json
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main(folder, wheels, backends):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(os.path.join(ROOT, "tests", "legacy_project"), folder)
    wheel = max(glob.glob(os.path.join(wheels, "*.whl")), key=os.path.getmtime)
    first, _, others = backends.partition(",")
    status = run_rows(folder, wheel, first)
    with open(os.path.join(folder, "tox.ini"), "w") as file:
        file.write("[tox]\nenv_list = mine\n")
    return run_rows(folder, wheel, others, "-c", "compat-tox") or status


def run_rows(folder, wheel, backends, *options):
    # tox would take the outer one's, such as TOX_WORK_DIR, for options.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TOX_")}
    run = functools.partial(subprocess.run, cwd=folder, env=environ)
    compat, tox = [[sys.executable, "-m", name] for name in ("compat", "tox")]
    run(compat + ["tox", "--compat", wheel, "--backends", backends], check=True)
    results = os.path.join(folder, "results.json")
    status = run(tox + ["run", "--result-json", results] + list(options)).returncode
    with open(results) as file:
        rows = json.load(file)["testenvs"].values()
    # To tox it is a failure that nothing was run; where CI is set, a row is never skipped.
    if all(row["result"].get("skipped") for row in rows):
        print("None of these Pythons is installed here.")
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
