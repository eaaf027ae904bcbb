"""What the tests of the core share: GPUs that are not there, installations that are not there.

Both are real for the code under test: an executable ``nvidia-smi`` on PATH that answers as the
tool documents, and folders on ``sys.path`` such as pip leaves behind.
"""

import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import uuid

import pytest

from compat import errors
from compat.backend import Backend

pytest.register_assert_rewrite("compat.testing")

# Tests of their own: on the backends that `compat tox` gives them, and of the plugin for pytest.
collect_ignore = ["legacy_project", "twins_project"]
if importlib.util.find_spec("yaml") is None:
    collect_ignore.append("test_jobs.py")  # tox's environment `docs` has it, and runs this file
if "COMPAT_TEST_BROWSER" not in os.environ:
    collect_ignore.append("test_in_browser.py")  # as well
if importlib.util.find_spec("nbclient") is None:
    collect_ignore.append("test_notebook.py")  # tox's environment py313-core has it
if sys.version_info < (3, 8):
    # What they read or run is no part of the package, and the same on any Python: py313-core does.
    collect_ignore += ["test_blocks.py", "test_distribution.py", "test_layout.py", "test_site.py"]
    collect_ignore += ["test_support_table.py", "test_texts.py"]
    # What `compat pins` and `compat tox` print and write is the same on any Python, too.
    collect_ignore += ["test_pins.py", "test_tox_command.py"]
    # compat's own; the contracts of backends and of ranks use the same with Python 3.6.
    collect_ignore += ["test_hosts.py", "test_launch.py", "test_launch_output.py"]
    collect_ignore += ["test_job_findings.py"]
    collect_ignore += ["test_plugin.py", "test_progress.py", "test_pytest_plugin.py"]
elif sys.version_info >= (3, 13):
    # Likewise, and py36-core has them.
    collect_ignore += ["test_plugin_ranks.py", "test_report.py", "test_timeline.py"]

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Tests press Ctrl-C, here and in processes that they start. One that is started in the background
# by a shell ignores it, and so would those.
signal.signal(signal.SIGINT, signal.default_int_handler)

# "nvidia-smi --help-query-gpu" documents the fields; a field that it does not know is an error,
# and one that this GPU does not have reads "[N/A]". Without arguments it prints a table.
NVIDIA_SMI = """\
#!/bin/sh
case "$*" in
"--query-gpu=index,uuid,name,memory.total,memory.used,utilization.gpu \
--format=csv,noheader,nounits")
{gpus}    ;;
"--query-compute-apps=gpu_uuid --format=csv,noheader,nounits")
{processes}    ;;
"")
    echo "| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05   CUDA Version: 12.2     |"
    ;;
*)
    echo "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help."
    exit 2
    ;;
esac
exit {status}
"""


def pytest_collection_modifyitems(config, items):
    """Run tests marked ``gpu`` with ``-m gpu`` only, and fail them without a GPU.

    Those marked ``slow`` run where COMPAT_TEST_SLOW is set, and with ``-m slow``. The rows that
    tests are marked with go to the results, for tests/support_table.py.
    """
    for item in items:
        item.user_properties += [("row", mark.args[0]) for mark in item.iter_markers("row")]
    selected = config.getoption("-m")
    runs_slow = "slow" in selected or os.environ.get("COMPAT_TEST_SLOW", "0") != "0"
    left_out = [] if "gpu" in selected else ["gpu"]
    left_out += [] if runs_slow else ["slow"]
    deselected = {i for i in items if any(i.get_closest_marker(mark) for mark in left_out)}
    config.hook.pytest_deselected(items=[item for item in items if item in deselected])
    items[:] = [item for item in items if item not in deselected]


@pytest.fixture(scope="session", autouse=True)
def record_cpu(record_testsuite_property):
    """Record the seconds of CPU of this process and its children, for tests/support_table.py.

    The outermost conftest.py sets up the first fixture of the session and tears down the last.
    """
    yield
    user, system, children_user, children_system, _ = os.times()
    record_testsuite_property("cpu", user + system + children_user + children_system)


class Machine:
    """GPUs as nvidia-smi lists them: ``add`` some, then ``plug`` them in."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.uuids = []
        self.lines = []
        self.busy = []

    def add(self, used=3, total=81559, utilization=0, name="NVIDIA H100 80GB HBM3", busy=False):
        """One more GPU; its memory in MiB. Returns its UUID, which no other test has."""
        identity = "GPU-{}".format(uuid.uuid4())
        fields = len(self.lines), identity, name, total, used, utilization
        self.uuids.append(identity)
        self.lines.append(", ".join(map(str, fields)))
        if busy:
            self.busy.append(identity)
        return identity

    def plug(self, gpus=0, status=0):
        for _ in range(gpus):
            self.add()
        script = self.folder / "nvidia-smi"
        script.write_text(
            NVIDIA_SMI.format(
                gpus="".join("    echo '{}'\n".format(line) for line in self.lines) or "    :\n",
                processes="".join("    echo '{}'\n".format(u) for u in self.busy) or "    :\n",
                status=status,
            )
        )
        script.chmod(0o755)
        self.monkeypatch.setenv("PATH", str(self.folder))
        return self


@pytest.fixture
def machine(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    return Machine(folder, monkeypatch)


@pytest.fixture
def process(tmp_path, monkeypatch, machine):
    """Yield this process as if new: no GPU, nothing configured, a new environment and home."""
    from compat._configuration import discovery
    from compat._runtime.process import process

    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("CUDA_", "HIP_", "KERAS_", "ROCR_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    process.start_afresh()
    for name in ("_DRIVER", "_WSL"):  # what a driver has left
        monkeypatch.setattr(discovery, name, str(tmp_path / name))
    machine.plug()
    yield
    process.start_afresh()
    os.environ.clear()
    os.environ.update(before)


def refusal(kind, call, *args, **kwargs):
    """Return the text of the error, of exactly this class, that a call raises."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.fixture
def imitate(monkeypatch):
    """Put a function in a framework's place that takes what the framework's own takes."""

    def imitate(owner, name, function):
        def parameters(function):
            return [p for p in inspect.signature(function).parameters if p != "self"]

        assert parameters(function) == parameters(getattr(owner, name)), name
        monkeypatch.setattr(owner, name, function)

    return imitate


class Site:
    """A folder on ``sys.path``, where distributions are installed."""

    def __init__(self, folder):
        self.folder = folder

    def install(self, distribution, version, module=None, source="", entry_points=""):
        """Leave what pip leaves: a ``.dist-info`` folder, and the module."""
        name = "{}-{}.dist-info".format(distribution.replace("-", "_"), version)
        (self.folder / name).mkdir()
        (self.folder / name / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: {}\nVersion: {}\n".format(distribution, version)
        )
        if entry_points:
            (self.folder / name / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        if module:
            (self.folder / (module + ".py")).write_text(textwrap.dedent(source))

    def install_all(self, **versions):
        for distribution, version in versions.items():
            self.install(distribution, version)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a Python with no packages but those that a test installs there."""
    folder = tmp_path / "site"
    folder.mkdir()
    others = [path for path in sys.path if "-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(folder)] + others)
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def run(tmp_path):
    """Run a Python program in a process of its own and return what it printed."""

    def run(program, *arguments, **environ):
        completed = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)] + list(arguments),
            env=dict(os.environ, PYTHONPATH=ROOT, **environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    return run


class Toy(Backend):
    """A whole backend, small: its framework reads its variables once, when it is imported."""

    name = "toy"
    framework = "toyframework"
    distributions = ("toy-framework", "toy-framework-gpu")
    extra = "toy"
    options = ("toy_seed",)
    strategies = {"mirrored": "a mirror"}
    variables = ("TOY_FLAGS",)

    def environ(self, settings, environ):
        variables = super().environ(settings, environ)
        if settings.memory:
            variables["TOY_FLAGS"] = "memory={}".format(settings.memory)
        return variables

    def initialised(self):
        return "toyframework was imported" if self.framework in sys.modules else None

    def configure(self, settings):
        toy = self.import_framework()
        visible = settings.devices.environ({}).get("CUDA_VISIBLE_DEVICES")
        if toy.visible != visible and settings.devices.undecided is None:
            raise errors.too_late(self.framework, "it shows {}".format(toy.visible), "Call first.")
        toy.simulated = settings.devices.simulated
        toy.seed = settings.options.get("toy_seed")
        return ["toyframework.seed = {}".format(toy.seed)], []

    def devices(self):
        return self.import_framework().devices()

    def parallelize(self, model, devices):
        model.devices = list(devices)
        return model


TOY_FRAMEWORK = """\
import os
__version__ = "1.2"
visible = os.environ.get("CUDA_VISIBLE_DEVICES")
flags = os.environ.get("TOY_FLAGS")
simulated = 0
broken = ()  # GPUs that do not come up

def devices():
    if simulated:
        return ["cpu:%d" % i for i in range(simulated)]
    gpus = [e for e in (visible or "-1").split(",") if e != "-1" and e not in broken]
    return ["gpu:%d" % i for i, _ in enumerate(gpus)] or ["cpu:0"]
"""


@pytest.fixture
def register(monkeypatch):
    """Make these backends the registered ones."""
    from compat._configuration import registry

    def register(*backends):
        by_name = {backend.name: backend for backend in backends}
        monkeypatch.setattr(registry, "names", lambda: sorted(by_name))
        monkeypatch.setattr(registry, "load", by_name.__getitem__)

    return register


@pytest.fixture
def toy(site, register):
    """Return the toy backend, registered and installed."""
    backend = Toy()
    register(backend)
    site.install("toy-framework", "1.2", "toyframework", TOY_FRAMEWORK)
    return backend
