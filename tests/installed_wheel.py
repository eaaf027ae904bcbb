"""Install the wheel alone, on the oldest and the newest Python, and run the README's example.

    python tests/installed_wheel.py FOLDER TESTED

FOLDER/dist has a wheel that was built from the source distribution. It has to have the files of the
wheel in TESTED, which tox built from the tree and installs in its environments. The exit status is
not 0 where it has others, where the example fails and, where CI is set, where a Python is missing.
"""

import glob
import os
import subprocess
import sys
import tempfile
import zipfile

import pages
from sources import ROOT

EXTRAS = {"3.6": "mxnet", "3.13": "tensorflow"}  # what the example runs on


def main(folder, tested):
    (wheel,) = glob.glob(os.path.join(folder, "dist", "*.whl"))
    compare(contents(wheel), contents(max(glob.glob(tested + "/*.whl"), key=os.path.getmtime)))
    for python, extra in EXTRAS.items():
        with tempfile.TemporaryDirectory(dir=folder) as environment:
            if subprocess.call(["uv", "venv", "--clear", "--python", python, environment]) == 0:
                run_example(environment, wheel, extra)
            elif os.environ.get("CI"):
                sys.exit("Python {} is not installed here.".format(python))


def contents(wheel):
    """Return the files of a wheel, without those that name the tool that built it."""
    with zipfile.ZipFile(wheel) as file:
        return {
            name: file.read(name)
            for name in file.namelist()
            if os.path.basename(name) not in ("RECORD", "WHEEL")
        }


def compare(built, tested):
    differing = [name for name in set(built) | set(tested) if built.get(name) != tested.get(name)]
    if differing:
        sys.exit(
            "The source distribution builds another wheel than the tree, whose build/ may be old: "
            "they differ in " + ", ".join(sorted(differing))
        )


def run_example(environment, wheel, extra):
    """As the README says, with a home that no other framework's keras.json is in."""
    python = os.path.join(environment, "bin", "python")
    install = ["uv", "pip", "install", "--quiet", "--python", python]
    subprocess.check_call(install + ["--no-index", wheel])
    subprocess.check_call([os.path.join(environment, "bin", "compat"), "--version"])
    subprocess.check_call(install + ["keras-gpu-compat[{}] @ file://{}".format(extra, wheel)])
    example = os.path.join(ROOT, "examples", "train.py")
    environ = dict(os.environ, HOME=environment)
    printed = subprocess.check_output(
        [python, example], cwd=environment, env=environ, universal_newlines=True
    )
    _, heading, expected = pages.fragment("README.md", "backend    ").partition("\nOn one device")
    if not printed.endswith(heading + expected):
        sys.exit("{} prints other numbers than the README says:\n{}".format(extra, printed))


if __name__ == "__main__":
    main(*sys.argv[1:])
