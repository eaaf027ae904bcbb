"""A ``compat`` of the user's own, where ``python -m`` and scripts look first."""

import os
import sys

import pytest
from conftest import ROOT
from outcomes import ended

from compat import errors
from compat._commands import script_test
from compat._runtime import by_path

pytestmark = pytest.mark.usefixtures("process")

MINE = "print('my own')\n"


@pytest.fixture
def folder(tmp_path):
    """Return the current folder, with a script and its modules."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "compat.py").write_text(MINE)
    (folder / "script.py").write_text("import compat, sys; print(sys.argv[1:])")
    return folder


def finished(folder, *command, **environ):
    return ended(command, dict({"PYTHONPATH": ROOT}, **environ), cwd=str(folder))


def note(script, path):
    old = path.parent if path.name == "__init__.py" else path
    return (
        "compat run: `import compat` in {} finds {}, not this package. To use "
        "compat.configure_gpu() there, rename that one, also where it is imported: mv {} "
        "{}\n".format(script, path, old, old.parent / ("my_" + old.name))
    )


def test_second_name(folder):
    command = sys.executable, "-m", "keras_gpu_compat"
    assert finished(folder, *command + ("--version",))[1].startswith("compat ")
    status, out, err = finished(
        folder, *command + ("run", "--backend=theano", "--python", sys.executable, "script.py", "a")
    )
    assert (status, out) == (0, "my own\n['a']\n")
    assert err.endswith(note("script.py", folder / "compat.py"))
    help = " ".join(finished(folder, *command + ("--help",))[1].split())
    assert "use `python -m keras_gpu_compat`" in help


def test_installed_command(folder):
    """As pip's own script starts it: what setup.cfg names."""
    with open(os.path.join(ROOT, "setup.cfg")) as file:
        name, function = file.read().partition("\n    compat = ")[2].split("\n")[0].split(":")
    script = folder / "bin" / "compat"
    script.parent.mkdir()
    script.write_text("import sys\nfrom {} import {} as f\nsys.exit(f())\n".format(name, function))
    path = os.pathsep.join([str(folder), ROOT])
    status, out, _ = finished(folder, sys.executable, str(script), "--version", PYTHONPATH=path)
    assert (status, out[:7]) == (0, "compat ")


@pytest.mark.parametrize("shadows", ["file", pytest.param("package", marks=pytest.mark.slow)])
def test_ranks(folder, shadows):
    """The current folder, the first of PYTHONPATH and the script's own are all the user's."""
    if shadows == "package":
        (folder / "compat").mkdir()
        (folder / "compat.py").rename(folder / "compat" / "__init__.py")
    # Without another interpreter compat watches what ranks gain, but not here.
    options = ["jax", "--python", sys.executable] if shadows == "package" else ["numpy"]
    command = by_path.command("__main__") + ["run", "-n", "2", "--backend"] + options
    command += ["script.py", "a"]
    status, out, err = finished(folder, *command, PYTHONPATH=str(folder))
    assert status == 0, err
    assert sorted(out.splitlines()) == [
        "[{}] {}".format(rank, line) for rank in range(2) for line in ("['a']", "my own")
    ]
    mine = folder / ("compat.py" if shadows == "file" else "compat/__init__.py")
    assert err.endswith(note("script.py", mine))


def test_files_with_names_of_python_s_own(folder):
    for name in ("json", "select", "selectors", "argparse"):
        (folder / (name + ".py")).write_text("raise SystemExit(0)\n")
    script = folder / "apart" / "script.py"
    script.parent.mkdir()
    script.write_text("print('here')")
    command = by_path.command("__main__") + ["run", "-n", "2", "--backend", "jax"]
    status, out, err = finished(folder, *command + ["--python", sys.executable, str(script)])
    assert (status, sorted(out.splitlines())) == (0, ["[0] here", "[1] here"]), err
    assert "import compat" not in err


def test_env_names_it(folder):
    status, out, _ = finished(folder, *by_path.command("__main__") + ["env"])
    text = errors.shadowed("scripts in {}".format(folder), folder / "compat.py")
    assert status == 1 and "".join(out.split()).endswith("".join(text.split()))


def test_what_shadows(folder, tmp_path):
    mine = str(folder / "compat.py")
    apart = tmp_path / "apart"
    apart.mkdir()
    shadow = by_path.shadow
    assert shadow(str(folder), {"PYTHONPATH": ROOT}) == mine
    assert shadow(str(apart), {}) is None
    assert shadow(str(apart), {"PYTHONPATH": str(folder)}) == mine
    assert shadow(str(apart), {"PYTHONPATH": os.pathsep.join([ROOT, str(folder)])}) is None
    assert shadow(ROOT, {"PYTHONPATH": str(folder)}) is None
    (apart / "compat").mkdir()  # no package: Python goes on looking
    assert shadow(str(apart), {}) is None
    (apart / "compat" / "__init__.py").write_text("")
    assert shadow(str(apart), {}) == str(apart / "compat" / "__init__.py")


def test_script_behind_a_link_is_at_home_where_the_link_leads(folder, tmp_path):
    (tmp_path / "bin").mkdir(exist_ok=True)
    link = tmp_path / "bin" / "train"
    link.symlink_to(folder / "script.py")
    command = by_path.command("__main__") + ["run", "--backend=theano", "--python"]
    _, out, err = finished(tmp_path, *command + [sys.executable, str(link)])
    assert out == "my own\n[]\n"
    assert err.endswith(note(link, folder / "compat.py"))


def test_test_names_it(folder, toy, capfd, monkeypatch):
    script = str(folder / "script.py")
    monkeypatch.setenv("PYTHONPATH", "")
    assert script_test.verify_script([script], None, None, 0, False, {}) == 3
    out, err = capfd.readouterr()
    assert out == "my own\n[]\n\n" + "-" * 72 + (
        "\n"
        "compat test: script.py on 3 simulated devices of toy\n"
        "\n"
        "Nothing was verified: no step was seen of a model that compat.parallelize() was given "
        "after compat.configure_gpu(). configure_gpu(parallelize=True) parallelizes each Keras "
        "model that the script compiles.\n"
        "Nothing was compared on several devices.\n"
    )
    assert "compat test: {}\n".format(errors.shadowed(script, folder / "compat.py")) in err
