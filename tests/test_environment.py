"""``compat env``: what it finds, its text, its JSON, and what it leaves alone."""

import json
import os
import platform
import re
import sys

import pytest
from test_main import NO_BACKEND, command

import compat
from compat import __main__
from compat._api import environment
from compat._configuration import device_choice, discovery, packages, tested_versions
from compat._ranks.engines import installed
from compat._ranks.tf_config import TF_CONFIG

pytestmark = pytest.mark.usefixtures("alone")

SYSTEM = {
    "platform": "Linux 6.1.0",
    "machine": "x86_64",
    "distribution": "Debian GNU/Linux 12 (bookworm)",
    "libc": "glibc 2.36",
    "cores": 8,
    "usable_cores": 2,
    "memory": 16 * 2**30,
    "memory_limit": 4 * 2**30,
}
HEAD = """\
compat      {}
python      {} ({})
system      Linux 6.1.0 x86_64, Debian GNU/Linux 12 (bookworm), glibc 2.36
            2 of 8 CPU cores, 16.0 GiB memory, limited to 4.0 GiB
""".format(compat.__version__, sys.version.split()[0], sys.executable)


@pytest.fixture
def alone(process, monkeypatch, tmp_path):
    """No settings of compat's, a machine with known numbers, and no files of drivers."""
    monkeypatch.setattr(environment, "_system", lambda: dict(SYSTEM))
    for name in ("_DRIVER_VERSION", "_AMDGPU_VERSION", "_ROCM_VERSION"):
        monkeypatch.setattr(discovery, name, str(tmp_path / name))
    for name in list(os.environ):
        if name.startswith("COMPAT_") or name == "LD_LIBRARY_PATH":
            monkeypatch.delenv(name)


def main(capsys, *arguments):
    """Exit status and output of the command, which must leave the environment as it is."""
    before = dict(os.environ)
    status = __main__.main(["env"] + list(arguments))
    assert dict(os.environ) == before
    out = capsys.readouterr().out
    if not arguments:
        assert [
            line for line in out.split("\n") if len(line) > 80 and not re.search("/|&&", line)
        ] == []
    return status, out


def found(capsys):
    return json.loads(main(capsys, "--json")[1])


def plain(out):
    """Return a text without the breaks of its lines."""
    return " ".join(out.split())


@pytest.fixture
def whole(toy, site, machine, monkeypatch, tmp_path):
    """Make an environment with something of everything, and return keras.json."""
    machine.add(used=1234, utilization=56)
    machine.add(name="NVIDIA A100-SXM4-40GB", total=40960, used=0)
    machine.plug()
    site.install("Keras", "2.2.4")
    for name in ("nvidia-cudnn-cu12", "jax-cuda12-plugin"):
        site.install(name, "9.1.0.70")
    monkeypatch.setenv("KERAS_BACKEND", "toyframework")
    monkeypatch.setenv("TOY_FLAGS", "a=1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("COMPAT_VERIFY", "0")
    path = tmp_path / ".keras" / "keras.json"
    path.parent.mkdir()
    path.write_text('{"floatx": "float32", "backend": "tensorflow"}')
    return path


def test_text(whole, machine, capsys):
    status, out = main(capsys)
    assert status == 0
    assert "keras.json " + str(whole) + ": backend=tensorflow, floatx=float32" in plain(out)
    # Where that is broken depends on the path.
    assert re.sub(r"keras\.json  (.|\n)*?\ndrivers", "drivers", out) == HEAD + (
        "backend     toy (KERAS_BACKEND=toyframework)\n"
        "versions    toyframework 1.2, keras 2.2.4\n"
        "packages    jax-cuda12-plugin 9.1.0.70, nvidia-cudnn-cu12 9.1.0.70,\n"
        "              toy-framework 1.2\n"
        "variables   CUDA_VISIBLE_DEVICES=1\n"
        "            KERAS_BACKEND=toyframework\n"
        "            TOY_FLAGS=a=1\n"
        "            COMPAT_VERIFY=0\n"
        "            not set: CUDA_DEVICE_ORDER, KERAS_HOME\n"
        "drivers     NVIDIA 535.104.05, runs CUDA up to 12.2\n"
        "GPUs        0: NVIDIA H100 80GB HBM3, 1234 of 81559 MiB used, 56 % busy,\n"
        "              {}\n"
        "            1: NVIDIA A100-SXM4-40GB, 0 of 40960 MiB used, 0 % busy,\n"
        "              {}\n"
        "visible     GPU 1\n"
        "ranks       none: this process is alone\n"
        "engines     none\n"
        "problems    none\n"
    ).format(*machine.uuids)


def test_json(whole, machine, capsys):
    mebi = 2**20
    assert found(capsys) == {
        "compat": compat.__version__,
        "python": {"version": sys.version.split()[0], "executable": sys.executable},
        "system": SYSTEM,
        "backend": {
            "name": "toy",
            "framework": "toyframework",
            "reason": "KERAS_BACKEND=toyframework",
        },
        "versions": {"toyframework": "1.2", "keras": "2.2.4"},
        "tested": {"ranges": {}, "outside": []},
        "packages": {
            "jax-cuda12-plugin": "9.1.0.70",
            "nvidia-cudnn-cu12": "9.1.0.70",
            "toy-framework": "1.2",
        },
        "variables": {
            "CUDA_DEVICE_ORDER": None,
            "CUDA_VISIBLE_DEVICES": "1",
            "KERAS_BACKEND": "toyframework",
            "KERAS_HOME": None,
            "TOY_FLAGS": "a=1",
            "COMPAT_VERIFY": "0",
        },
        "keras_json": {
            "path": str(whole),
            "exists": True,
            "readable": True,
            "content": {"floatx": "float32", "backend": "tensorflow"},
        },
        "drivers": {"nvidia": "535.104.05", "cuda": "12.2", "amdgpu": None, "rocm": None},
        "gpus": [
            {
                "index": index,
                "uuid": machine.uuids[index],
                "name": name,
                "memory_total": total * mebi,
                "memory_used": used * mebi,
                "utilization": busy,
                "variable": "CUDA_VISIBLE_DEVICES",
            }
            for index, name, used, total, busy in [
                (0, "NVIDIA H100 80GB HBM3", 1234, 81559, 56),
                (1, "NVIDIA A100-SXM4-40GB", 0, 40960, 0),
            ]
        ],
        "why_no_gpus": None,
        "visible": {"text": "GPU 1", "entries": ["1"], "variable": "CUDA_VISIBLE_DEVICES"},
        "ranks": None,
        "engines": [],
        "problems": [],
    }
    assert "toyframework" not in sys.modules


def test_what_is_wrong_and_what_to_type(toy, site, machine, capsys, monkeypatch, tmp_path):
    machine.plug(2)
    site.install("Keras", "2.2.4")
    site.install("keras-mxnet", "2.2.4.3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setattr(toy, "problems", lambda environ: ["A toy is broken."], raising=False)
    path = tmp_path / ".keras" / "keras.json"
    path.parent.mkdir()
    path.write_text('{"backend": "toy"')
    move = "mv {} {}".format(path, str(path) + ".wrong")
    both = "pip uninstall -y keras keras-mxnet && pip install keras-mxnet==2.2.4.3"
    variables = ["export CUDA_DEVICE_ORDER=PCI_BUS_ID", "export CUDA_VISIBLE_DEVICES=1,0"]
    answer = found(capsys)
    assert answer["backend"] is None and answer["keras_json"]["readable"] is False
    assert [each["command"] for each in answer["problems"]] == [move, both] + variables
    assert all(each["problem"].endswith(": " + each["command"]) for each in answer["problems"])

    monkeypatch.setenv("KERAS_BACKEND", "toy")
    answer = found(capsys)
    assert answer["backend"]["name"] == "toy"
    assert answer["problems"][0] == {"problem": "A toy is broken.", "command": None}
    commands = [each["command"] for each in answer["problems"][1:]]
    assert commands == [both, move] + variables

    status, out = main(capsys)
    assert status == 1
    assert "keras.json {} (unreadable)".format(path) in plain(out)
    assert (
        "problems    A toy is broken.\n"
        "            keras and keras-mxnet are both installed; they overwrite each\n"
        "              other's files. Uninstall both, then install one:\n"
        "                pip uninstall -y keras keras-mxnet && pip install keras-mxnet==2.2.4.3\n"
    ) in out
    assert out.endswith(
        "            CUDA_DEVICE_ORDER=FASTEST_FIRST: ids may mean other GPUs than in\n"
        "              nvidia-smi's listing. For the same ones:\n"
        "                export CUDA_DEVICE_ORDER=PCI_BUS_ID\n"
        '            CUDA_VISIBLE_DEVICES="1, 0" contains a space, where CUDA stops\n'
        '              reading; compat reads it as "1,0". Corrected:\n'
        "                export CUDA_VISIBLE_DEVICES=1,0\n"
    )


@pytest.mark.parametrize(
    "frameworks, asked, what",
    [
        (["toyframework"], "nothing", "unset KERAS_BACKEND"),
        (["toyframework", "other"], "nothing", "export KERAS_BACKEND=other"),
        (["toyframework", "other"], None, "export KERAS_BACKEND=other"),
    ],
)
def test_how_to_name_another_backend(
    toy, register, site, capsys, monkeypatch, frameworks, asked, what
):
    other = type(toy)()
    other.name = other.framework = "other"
    other.distributions = ("other",)
    register(toy, other)
    if "other" in frameworks:
        site.install("other", "1.0")
    if asked:
        site.install("Keras", "2.2.4")
        monkeypatch.setenv("KERAS_BACKEND", asked)
    assert [each["command"] for each in found(capsys)["problems"]] == [what]


def test_gpus_without_nvidia_smi(toy, capsys, monkeypatch):
    monkeypatch.setattr(device_choice, "discover", lambda: [device_choice.GPU(0)])
    known = "GPUs 0: nvidia-smi is missing or fails, so nothing more is known "
    assert known + "visible GPU 0" in plain(main(capsys)[1])
    monkeypatch.setattr(device_choice, "discover", lambda: None)
    assert "GPUs        unknown: nvidia-smi is missing or fails\n" in main(capsys)[1]


def test_a_driver_that_does_not_work(toy, machine, capsys):
    machine.plug(status=9)
    assert found(capsys)["problems"] == [
        {
            "problem": "nvidia-smi fails (exit status 9): the driver does not work as it should, "
            "and frameworks may find no GPU. Load it, or restart the machine where it was updated.",
            "command": "sudo modprobe nvidia",
        }
    ]
    assert main(capsys)[1].endswith("updated.\n                sudo modprobe nvidia\n")


# Drivers --------------------------------------------------------------------------------------


TABLES = {  # by the driver that printed them
    "470.256.02": "| NVIDIA-SMI 470.256.02   Driver Version: 470.256.02   CUDA Version: 11.4     |",
    "595.45.04": "| NVIDIA-SMI 595.45.04   KMD Version: 595.45.04   CUDA UMD Version: 13.2     |",
}


@pytest.mark.parametrize("driver, cuda", [("470.256.02", "11.4"), ("595.45.04", "13.2")])
def test_drivers_by_nvidia_smi(machine, driver, cuda):
    (machine.folder / "nvidia-smi").write_text("#!/bin/sh\necho '{}'\n".format(TABLES[driver]))
    assert discovery.drivers() == {"nvidia": driver, "cuda": cuda, "amdgpu": None, "rocm": None}


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  (d@c)",
    ],
)
def test_drivers_by_files(machine, line, tmp_path):
    machine.plug(status=9)
    (tmp_path / "_DRIVER_VERSION").write_text(line + "\nGCC version:  gcc version 12.2.0\n")
    (tmp_path / "_AMDGPU_VERSION").write_text("6.10.5\n")
    (tmp_path / "_ROCM_VERSION").write_text("6.3.1-48\n")
    assert discovery.drivers() == {
        "nvidia": "535.104.05",
        "cuda": None,
        "amdgpu": "6.10.5",
        "rocm": "6.3.1-48",
    }


# Ranks ----------------------------------------------------------------------------------------


def test_a_rank(toy, capsys, monkeypatch):
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE".split()
    for name, value in zip(names, "3412"):
        monkeypatch.setenv(name, value)
    assert found(capsys)["ranks"] == {
        "launcher": "torchrun", "rank": 3, "size": 4, "local_rank": 1, "local_size": 2
    }  # fmt: skip
    assert "\nranks       rank 3 of 4, 1 of 2 on this machine (torchrun)\n" in main(capsys)[1]


def test_the_evaluator(toy, capsys, monkeypatch):
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv(TF_CONFIG, json.dumps(config))
    line = "\nranks       none: this process evaluates what ranks save (TF_CONFIG)\n"
    assert line in main(capsys)[1]


def test_a_launcher_that_contradicts_itself_is_a_problem(toy, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = found(capsys)
    assert set(answer["ranks"].values()) == {None}
    assert answer["problems"] == [
        {
            "problem": "The environment of RANK contradicts itself: RANK=2, WORLD_SIZE=2. Ranks "
            "count from 0 and are fewer than the size. Start the script with its launcher again, "
            "or set COMPAT_ALONE=1 to train alone.",
            "command": "export COMPAT_ALONE=1",
        }
    ]
    status, out = main(capsys)
    assert status == 1 and "\nranks       unknown (see the problems)\n" in out
    monkeypatch.setenv("COMPAT_ALONE", "1")
    monkeypatch.setenv("COMPAT_TIMEOUT", "long")
    answer = found(capsys)
    assert answer["ranks"] is None
    assert [each["command"] for each in answer["problems"]] == ["unset COMPAT_TIMEOUT"]


# Engines --------------------------------------------------------------------------------------


@pytest.fixture
def package(site):
    """Install a package with files of its own, by their contents."""

    def package(name, version, files):
        site.install(name, version)
        for path, content in dict(files, **{"__init__.py": b"raise SystemExit"}).items():
            path = site.folder / name / path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return package


def test_engines(toy, site, package, machine, capsys):
    package("horovod", "0.28.1", {"tensorflow/mpi_lib.cpython-37m-x86_64-linux-gnu.so": b""})
    package("mpi4py", "3.1.6", {"MPI.cpython-37m-x86_64-linux-gnu.so": b"\0libmpi.so.40\0libc.so"})
    package("jax", "0.4.30", {"_src/distributed.py": b""})
    package("tensorflow", "2.21.0", {})
    package("torch", "2.5.1+cu121", {})
    mpirun = machine.folder / "mpirun"
    mpirun.write_text("#!/bin/sh\n")
    mpirun.chmod(0o755)
    assert [str(engine) for engine in installed.engines()] == [
        "Horovod 0.28.1, for tensorflow",
        "jax.distributed 0.4.30, for jax",
        "mpi4py 3.1.6, for theano or cntk, through libmpi.so.40, {}".format(mpirun),
        "TF_CONFIG's cluster 2.21.0, for tensorflow",
        "torch.distributed 2.5.1+cu121, for torch",
    ]
    assert found(capsys)["engines"][2] == {
        "name": "mpi4py",
        "version": "3.1.6",
        "frameworks": ["theano", "cntk"],
        "through": ["libmpi.so.40"],
        "launcher": str(mpirun),
    }


def test_an_engine_that_serves_no_framework(package):
    package("horovod", "0.28.1", {"torch/__init__.py": b""})
    package("tensorflow", "2.3.4", {})
    assert [str(engine) for engine in installed.engines()] == ["Horovod 0.28.1, for no framework"]


# The system -----------------------------------------------------------------------------------


def test_the_real_system(monkeypatch, tmp_path):
    monkeypatch.undo()
    system = environment._system()
    assert set(system) == set(SYSTEM)
    assert system["machine"] == platform.machine()
    assert 1 <= system["usable_cores"] <= system["cores"]
    assert system["memory"] > 2**27
    limit = tmp_path / "limit"
    monkeypatch.setattr(environment, "_CGROUP_LIMITS", (str(tmp_path / "none"), str(limit)))
    for content, expected in [
        ("134217728\n", 2**27),
        ("max\n", None),
        ("9223372036854771712\n", None),  # none, as the first version says it
    ]:
        limit.write_text(content)
        assert environment._system()["memory_limit"] == expected


def test_names_of_packages_match_whole(site):
    site.install("nvidia-cudnn-cu12", "9.1.0.70")
    site.install("not-numpy", "1.0")
    site.install("numpy", "1.26.4")
    assert packages.matching("numpy|nvidia-.+") == {
        "numpy": "1.26.4",
        "nvidia-cudnn-cu12": "9.1.0.70",
    }


# In a process of its own ----------------------------------------------------------------------


def test_tested_versions(site, capsys, monkeypatch):
    oldest, newest = tested_versions.ranges("theano")["theano"]
    site.install("theano", "0.8")
    site.install("keras", "2.3.1")
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    _, out = main(capsys)
    assert f"tested theano {oldest} to {newest}, keras " in plain(out)
    warning = (
        f"theano 0.8 is older than the versions that compat is tested with, {oldest} to {newest}. "
        "`compat test` shows whether a script of yours trains to the same numbers on several "
        "devices with it."
    )
    assert warning in plain(out)
    tested = found(capsys)["tested"]
    assert tested["ranges"]["theano"] == [oldest, newest]
    assert tested["outside"] == [warning]


def test_no_backend_is_installed():
    status, out, err = command("env")
    assert (status, err) == (1, "")
    out = plain(out)
    assert " backend none (see the problems) versions no framework, no Keras packages none " in out
    assert " keras.json {} (not there) ".format(os.path.expanduser("~/.keras/keras.json")) in out
    assert out.endswith(" ranks none: this process is alone engines none problems " + (
        NO_BACKEND.strip()[: -len(".")]  # it ends with what to type
    ))  # fmt: skip


def test_no_framework_is_imported_and_no_gpu_is_initialised(run, package, site):
    """Those here end the process that imports them; numpy is the real one."""
    names = "keras tensorflow theano mxnet cntk jax torch horovod mpi4py".split()
    for name in names:
        package(name, "1.0", {})
    program = """\
        import sys
        sys.path.insert(0, sys.argv[1])
        from compat import __main__
        __main__.main(["env", "--json"])
        assert "compat._ranks.engines.installed" in sys.modules
        assert not set(sys.argv[2:] + ["numpy"]) & set(sys.modules)
        with open("/proc/self/maps") as file:
            assert "libcuda" not in file.read()
        """
    answer = json.loads(run(program, str(site.folder), *names))
    assert {engine["name"] for engine in answer["engines"]} >= {"Horovod", "mpi4py"}


# In a notebook --------------------------------------------------------------------------------


def test_a_problem_is_red_and_called_so(toy, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1")
    found = compat.environment()
    assert found == environment.collect() and len(found["problems"]) == 1
    assert str(found).splitlines()[0] == "compat      " + compat.__version__
    html = found._repr_html_()
    (red,) = re.findall("<tr>((?:(?!</tr>).)*background:#fee2e2.*?)</tr>", html, re.DOTALL)
    assert re.findall(">([^<]+)<", red) == [
        "problems",
        "CUDA_VISIBLE_DEVICES=&quot;0, 1&quot; contains a space, where CUDA stops reading; compat "
        "reads it as &quot;0,1&quot;. Corrected:\n    export CUDA_VISIBLE_DEVICES=0,1",
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "background" not in compat.environment()._repr_html_()
