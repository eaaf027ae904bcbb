"""Backends of third parties: register(), and entry points."""

import sys

import pytest
from conftest import TOY_FRAMEWORK, Toy

import compat
from compat import _detect, _registry

pytestmark = [
    pytest.mark.usefixtures("process"),
    pytest.mark.row("third parties' backends"),
]

PACKAGE = """\
from compat import Backend

class Tpu(Backend):
    name = framework = extra = "tpu"
    distributions = ("tpu",)

    def initialised(self):
        return None

    def configure(self, settings):
        return []

    def devices(self):
        return ["tpu:0", "tpu:1"]

    def parallelize(self, model, devices):
        return model

backend = Tpu()
"""

ENTRY_POINTS = """\
[keras_gpu_compat.backends]
tpu = tpu_keras:{}

[console_scripts]
tpu = tpu_keras:main
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(_registry, "_registered", {})


def test_register(site):
    backend = Toy()
    assert compat.register(backend) is backend
    site.install("toy-framework", "1.2", "toyframework", TOY_FRAMEWORK)
    assert _detect.installed() == [backend]
    assert compat.configure_gpu(simulate=2).backend == "toy"


def test_registering_the_name_again_replaces(site):
    compat.register(Toy())
    last = compat.register(Toy())
    assert [b for b in _registry.backends() if b.name == "toy"] == [last]


class Nameless(Toy):
    name = ""


class Shadow(Toy):
    name = "theano"


@pytest.mark.parametrize(
    "backend, text",
    [
        (Toy, "'toy': it is no instance of a subclass of compat.Backend"),
        (Nameless(), "'test_registry.Nameless': its name is empty"),
        (Shadow(), "'theano': compat has a backend of that name"),
    ],
)
def test_what_cannot_be_registered(backend, text):
    with pytest.raises(ValueError) as caught:
        compat.register(backend)
    assert type(caught.value) is compat.InvalidArgumentError
    assert str(caught.value) == (
        "register() cannot take {}. Pass an instance of a subclass of compat.Backend that has a "
        "name of its own.".format(text)
    )
    assert _registry._registered == {}


def test_entry_points_are_looked_at_on_a_miss_only(site):
    site.install("tpu-keras", "1", "tpu_keras", PACKAGE, ENTRY_POINTS.format("backend"))
    site.install("tpu", "3.1")
    site.install("theano", "1.0.5")
    assert _detect.choose("theano")[0].name == "theano"
    assert "tpu_keras" not in sys.modules
    configuration = compat.configure_gpu(backend="tpu")
    assert (configuration.backend, configuration.devices) == ("tpu", ["tpu:0", "tpu:1"])


@pytest.mark.parametrize(
    "attribute, problem",
    [
        ("absent", "module 'tpu_keras' has no attribute 'absent'"),
        ("Tpu", "it is no instance of a subclass of compat.Backend"),
    ],
)
def test_a_broken_plug_in_troubles_only_who_asks_for_it(site, attribute, problem):
    site.install("tpu-keras", "1", "tpu_keras", PACKAGE, ENTRY_POINTS.format(attribute))
    site.install("theano", "1.0.5")
    assert _detect.choose()[0].name == "theano"
    with pytest.raises(ImportError) as caught:
        _detect.choose("tpu")
    assert type(caught.value) is compat.BrokenInstallError
    assert str(caught.value) == (
        "An installed package names tpu_keras:{} as the backend 'tpu' in its entry points, but "
        "that gives no backend: {}. Mend or uninstall that package.".format(attribute, problem)
    )


def test_an_unknown_name_is_still_unknown():
    with pytest.raises(compat.InvalidArgumentError) as caught:
        _detect.choose("tpu")
    assert "compat does not know that backend" in str(caught.value)
