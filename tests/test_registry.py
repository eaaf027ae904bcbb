"""Backends of third parties: register(), and entry points."""

import functools
import sys

import pytest
from conftest import TOY_FRAMEWORK, Toy, refusal

import compat
from compat._configuration import detection, registry

pytestmark = [
    pytest.mark.usefixtures("process"),
    pytest.mark.row("third parties' backends"),
]

PACKAGE = """\
from compat import Backend

class Tpu(Backend):
    name = "tpu"
    framework = "xla_tpu"
    distributions = ("xla-tpu",)
    options = ("tpu_topology",)

    def initialised(self):
        return None

    def configure(self, settings):
        return ["topology " + settings.options.get("tpu_topology", "none")], []

    def devices(self):
        return ["tpu:0", "tpu:1"]

    def is_native(self, model):
        return type(model).__module__ == "xla_tpu"

    def parallelize(self, model, devices):
        model.devices = devices
        return model

    def verify(self, model, verification):
        pass

backend = Tpu()
"""

FRAMEWORK = "class Program:\n    devices = None\n"

ENTRY_POINTS = """\
[keras_gpu_compat.backends]
tpu = tpu_keras:{}

[console_scripts]
tpu = tpu_keras:main
"""


@pytest.fixture
def plugin(site):
    """Installs a package that brings a backend, and the backend's framework."""

    def install():
        site.install("tpu-keras", "1", "tpu_keras", PACKAGE, ENTRY_POINTS.format("backend"))
        site.install("xla-tpu", "3.1", "xla_tpu", FRAMEWORK)

    return install


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def test_register(site):
    backend = Toy()
    assert compat.register(backend) is backend
    site.install("toy-framework", "1.2", "toyframework", TOY_FRAMEWORK)
    assert detection.installed() == [backend]
    assert compat.configure_gpu(simulate=2).backend == "toy"


def test_registering_the_name_again_replaces(site):
    compat.register(Toy())
    last = compat.register(Toy())
    assert [b for b in registry.backends() if b.name == "toy"] == [last]


class Nameless(Toy):
    name = ""


class Empty(compat.Backend):
    pass


class Shadow(Toy):
    name = "theano"


@pytest.mark.parametrize(
    "backend, name, problem",
    [
        (3, "'builtins.int'", "it is no instance of a subclass of compat.Backend"),
        (Toy, "the class 'Toy' itself", "it is no instance of a subclass of compat.Backend"),
        (Nameless(), "'test_registry.Nameless'", "it has no name"),
        (Empty(), "'test_registry.Empty'", "it has no name, framework, distributions"),
        (Shadow(), "'theano'", "compat has a backend of that name"),
    ],
)
def test_what_cannot_be_registered(backend, name, problem):
    assert refusal(compat.InvalidArgumentError, compat.register, backend) == (
        "register() cannot take {}: {}. Pass an instance of a subclass of compat.Backend that "
        "has a name of its own.".format(name, problem)
    )
    assert registry._registered == {}


def test_entry_points_are_looked_at_on_a_miss_only(site, plugin):
    plugin()
    site.install("theano", "1.0.5")
    assert detection.choose("theano")[0].name == "theano"
    assert detection.choose()[0].name == "theano"
    assert "log_device_placement" in registry.options(["log_device_placement"])
    assert "tpu_keras" not in sys.modules
    configuration = compat.configure_gpu(backend="tpu")
    assert (configuration.backend, configuration.devices) == ("tpu", ["tpu:0", "tpu:1"])


def test_a_plug_in_is_chosen_by_its_framework_and_where_it_is_the_only_backend(plugin):
    plugin()
    chosen, reason = detection.choose()
    assert (chosen.name, reason) == ("tpu", "the only backend installed")
    assert detection.choose("xla_tpu")[0] is chosen
    assert detection.choose(None, {"KERAS_BACKEND": "xla_tpu"})[0] is chosen


def test_options_of_a_plug_in_are_known(plugin):
    plugin()
    call = functools.partial(compat.configure_gpu, backend="tpu")
    assert "tpu_topology" in refusal(compat.UnknownOptionError, call, tpu_topologie="2x2")
    assert call(tpu_topology="2x2").applied == ["topology 2x2"]


def test_models_of_a_plug_in_are_known(plugin):
    plugin()
    import xla_tpu

    program = xla_tpu.Program()
    assert compat.parallelize(program) is program
    assert program.devices == ["tpu:0", "tpu:1"]
    assert compat.parallelize(lambda: xla_tpu.Program(), gpus=1).devices == ["tpu:0"]


def test_a_plug_in_without_its_framework(site):
    site.install("tpu-keras", "1", "tpu_keras", PACKAGE, ENTRY_POINTS.format("backend"))
    assert refusal(compat.NotInstalledError, compat.configure_gpu, backend="tpu") == (
        "xla_tpu is not installed, but backend='tpu' was asked for. Choose another backend, or "
        "install it: pip install xla-tpu."
    )


@pytest.mark.parametrize(
    "name, attribute, problem",
    [
        ("tpu", "absent", "module 'tpu_keras' has no attribute 'absent'"),
        ("tpu", "Tpu", "it is no instance of a subclass of compat.Backend"),
        ("npu", "backend", "its name is 'tpu'"),
    ],
)
def test_a_broken_plug_in_troubles_only_who_asks_for_it(site, name, attribute, problem):
    listed = ENTRY_POINTS.format(attribute).replace("tpu =", name + " =")
    site.install("tpu-keras", "1", "tpu_keras", PACKAGE, listed)
    site.install("theano", "1.0.5")
    assert detection.choose()[0].name == "theano"
    assert registry.plugins() == []
    assert refusal(compat.BrokenInstallError, detection.choose, name) == (
        "An installed package names tpu_keras:{} as the backend {!r} in its entry points, but "
        "that gives no backend: {}. Repair or uninstall that package.".format(
            attribute, name, problem
        )
    )


def test_entry_points_that_cannot_be_read_are_none(site, plugin):
    plugin()
    for name, content in ("a", b"\xff"), ("b", b"[keras_gpu_compat.backends\ntpu"):
        (site.folder / (name + "-1.dist-info")).mkdir()
        (site.folder / (name + "-1.dist-info") / "entry_points.txt").write_bytes(content)
    assert registry.plugin_names() == ["tpu"]


def test_an_unknown_name_is_still_unknown(plugin):
    plugin()
    text = refusal(compat.InvalidArgumentError, detection.choose, "npu")
    assert "compat does not know that backend" in text and ", torch, tpu." in text
