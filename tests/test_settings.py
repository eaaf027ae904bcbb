"""``memory=``, ``floatx=`` and ``simulate=``: every form, and every wrong one; the report."""

import pytest

import compat
from compat._configuration.device_choice import Devices
from compat._configuration.settings import (
    Configuration,
    Memory,
    Settings,
    parse_floatx,
    parse_memory,
    parse_simulate,
)

pytestmark = pytest.mark.usefixtures("process")


@pytest.mark.parametrize(
    "memory, expected, shown",
    [
        ("grow", Memory(grow=True), "grow"),
        ("growth", Memory(grow=True), "grow"),
        (" GROW ", Memory(grow=True), "grow"),
        (0.5, Memory(fraction=0.5), "0.5 of each GPU"),
        (1, Memory(fraction=1.0), "1 of each GPU"),
        (1.0, Memory(fraction=1.0), "1 of each GPU"),
        ("4GiB", Memory(size=4 * 2**30), "4096 MiB per GPU"),
        ("4 GiB", Memory(size=4 * 2**30), "4096 MiB per GPU"),
        ("4gib", Memory(size=4 * 2**30), "4096 MiB per GPU"),
        ("0.5GiB", Memory(size=2**29), "512 MiB per GPU"),
        ("512MiB", Memory(size=512 * 2**20), "512 MiB per GPU"),
        ("1024KiB", Memory(size=2**20), "1 MiB per GPU"),
        ("1GB", Memory(size=10**9), "953.6743164 MiB per GPU"),
        ("100MB", Memory(size=10**8), "95.36743164 MiB per GPU"),
        ("2000KB", Memory(size=2 * 10**6), "1.907348633 MiB per GPU"),
        ("1048576B", Memory(size=2**20), "1 MiB per GPU"),
    ],
)
def test_memory(memory, expected, shown):
    parsed = parse_memory(memory)
    assert parsed == expected
    assert str(parsed) == shown


def test_no_memory_is_the_backends_default():
    assert parse_memory(None) is None


def test_amounts_differ_where_their_texts_do_not():
    assert Memory(size=2**50) != Memory(size=2**50 + 1)
    assert Memory(fraction=0.5) != Memory(grow=True)
    assert Memory(grow=True) != "grow"


FRACTION = "a number is a fraction, above 0 and at most 1"
SIZE = "it is no size with a unit"


@pytest.mark.parametrize(
    "memory, shown, problem",
    [
        (True, "True", "True and False name no amount"),
        (False, "False", "True and False name no amount"),
        (0, "0", FRACTION),
        (-0.5, "-0.5", FRACTION),
        (1.5, "1.5", FRACTION),
        (4096, "4096", FRACTION),
        (float("nan"), "nan", FRACTION),
        (float("inf"), "inf", FRACTION),
        ([0.5], "[0.5]", "it is a list"),
        (b"4GiB", "b'4GiB'", "it is a bytes"),
        ("", "''", SIZE),
        ("0.5", "'0.5'", SIZE),
        ("50%", "'50%'", SIZE),
        ("4", "'4'", SIZE),
        ("4G", "'4G'", SIZE),
        ("GiB", "'GiB'", SIZE),
        ("four GiB", "'four GiB'", SIZE),
        ("4GiB 2MiB", "'4GiB 2MiB'", SIZE),
        ("nanGiB", "'nanGiB'", SIZE),
        ("infGiB", "'infGiB'", SIZE),
        ("0GiB", "'0GiB'", "a size is above 0"),
        ("-4GiB", "'-4GiB'", "a size is above 0"),
    ],
)
def test_wrong_memory(memory, shown, problem):
    with pytest.raises(ValueError) as caught:
        compat.configure_gpu(memory=memory)
    assert type(caught.value) is compat.InvalidArgumentError
    assert str(caught.value) == (
        'memory={} is not understood: {}. Use "grow" (take memory as it is needed), a fraction of '
        'each GPU such as 0.5, a size per GPU such as "4GiB" or "512MiB", or None (the backend\'s '
        "default).".format(shown, problem)
    )


@pytest.mark.parametrize("floatx", [None, "float16", "float32", "float64"])
def test_floatx(floatx):
    assert parse_floatx(floatx) == floatx


@pytest.mark.parametrize(
    "floatx, shown",
    [
        ("float", "'float'"),
        ("FLOAT32", "'FLOAT32'"),
        ("float8", "'float8'"),
        ("", "''"),
        (32, "32"),
        (float, "<class 'float'>"),
        (["float32"], "['float32']"),
    ],
)
def test_wrong_floatx(floatx, shown):
    with pytest.raises(ValueError) as caught:
        compat.configure_gpu(floatx=floatx)
    assert type(caught.value) is compat.InvalidArgumentError
    assert str(caught.value) == (
        'floatx={} is not understood. Use "float16", "bfloat16" (Keras 3), "float32", "float64", '
        "or None (what Keras is set to).".format(shown)
    )


@pytest.mark.parametrize("simulate", [None, 1, 8])
def test_simulate(simulate):
    assert parse_simulate(simulate) == simulate


@pytest.mark.parametrize(
    "simulate, shown",
    [(0, "0"), (-1, "-1"), (2.0, "2.0"), ("2", "'2'"), (True, "True"), ([0, 1], "[0, 1]")],
)
def test_wrong_simulate(simulate, shown):
    with pytest.raises(ValueError) as caught:
        compat.configure_gpu(simulate=simulate)
    assert type(caught.value) is compat.InvalidArgumentError
    assert str(caught.value) == (
        "simulate={} is not understood. Use the number of CPU devices that shall stand in for "
        "GPUs, 1 or more, or None (no simulation).".format(shown)
    )


def test_what_was_asked_stays_whatever_became_of_it():
    settings = Settings(Devices(), Memory(grow=True), gpus="gpus=2")
    assert settings.asked() == "gpus=2, memory: grow"
    assert str(settings) == "devices: CPU, memory: grow"
    assert settings == Settings(Devices(), Memory(grow=True), gpus="gpus=[0, 1]")


@pytest.mark.parametrize(
    "devices, outcome",
    [
        (Devices(declined=True), "CPU, as asked"),
        (Devices(simulated=2), "2 simulated on the CPU"),
        (Devices(["0", "2"]), "GPU 0,2"),
        (Devices(reason="no GPU is visible"), "CPU: no GPU is visible"),
    ],
)
def test_what_became_of_it(devices, outcome):
    assert devices.outcome() == outcome


def test_settings_show_what_was_asked_and_nothing_else():
    assert str(Settings(Devices())) == "devices: CPU"
    settings = Settings(
        Devices(["0", "2"]), Memory(grow=True), "float32", True, True, {"b": 1, "a": "x"}
    )
    assert str(settings) == (
        "devices: GPU 0,2, memory: grow, floatx: float32, persist, strict, a='x', b=1"
    )


@pytest.mark.parametrize(
    "other",
    [
        Settings(Devices(["0"])),
        Settings(Devices(["0", "1"]), Memory(grow=True)),
        Settings(Devices(["0", "1"]), None, "float32"),
        Settings(Devices(["0", "1"]), None, None, True),
        Settings(Devices(["0", "1"]), None, None, False, True),
        Settings(Devices(["0", "1"]), options={"a": 1}),
        Settings(Devices(simulated=2)),
    ],
)
def test_settings_are_equal_where_all_of_them_are(other):
    assert Settings(Devices(["0", "1"])) == Settings(Devices(["0", "1"]))
    assert Settings(Devices(["0", "1"])) != other


def test_a_configuration_prints_as_a_report():
    configuration = Configuration(
        "toy",
        "the only backend installed",
        {"toyframework": "1.2", "keras": "2.2.4"},
        ["gpu:0", "gpu:1"],
        Settings(Devices(["0", "1"]), Memory(fraction=0.5), gpus="gpus=2"),
        {"CUDA_VISIBLE_DEVICES": "0,1", "TOY_FLAGS": None},
        ["toyframework.grow = True", "toyframework.seed = 1"],
        [],
    )
    assert str(configuration) == (
        "backend    toy (the only backend installed)\n"
        "versions   toyframework 1.2, keras 2.2.4\n"
        "asked      gpus=2, memory: 0.5 of each GPU\n"
        "chosen     GPU 0,1\n"
        "devices    gpu:0, gpu:1\n"
        "variables  CUDA_VISIBLE_DEVICES=0,1\n"
        "           TOY_FLAGS removed\n"
        "applied    toyframework.grow = True\n"
        "           toyframework.seed = 1\n"
        "warnings   none"
    )
    assert repr(configuration) == "<Configuration toy on gpu:0, gpu:1>"
