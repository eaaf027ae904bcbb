"""``memory=``, ``floatx=`` and ``simulate=``: what only examples show of them, and all refusals.

test_grammars.py reads random texts; test_api.py compares whole reports.
"""

import pytest
from conftest import refusal

import compat
from compat._configuration.device_choice import Devices
from compat._configuration.settings import Memory, Settings, parse_memory

pytestmark = pytest.mark.usefixtures("process")


def test_what_backends_are_given_takes_the_same_arguments_as_ever():
    """Plug-ins' tests make it."""
    settings = Settings(Devices((), (), (), 2), None, "float64")
    assert (settings.floatx, settings.devices.simulated) == ("float64", 2)
    assert settings == Settings(Devices(simulated=2), floatx="float64", verify=0, strict=False)
    for make in (lambda: Settings(Devices(), flaotx="float64"), lambda: Devices(simulate=2)):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            make()


@pytest.mark.parametrize(
    "memory, expected, shown",
    [
        ("growth", Memory(grow=True), "grow"),
        (0.5, Memory(fraction=0.5), "0.5 of each GPU"),
        (1, Memory(fraction=1.0), "1 of each GPU"),
        ("0.5GiB", Memory(size=2**29), "512 MiB per GPU"),
        ("1GB", Memory(size=10**9), "953.6743164 MiB per GPU"),
    ],
)
def test_memory(memory, expected, shown):
    parsed = parse_memory(memory)
    assert parsed == expected
    assert str(parsed) == shown


def test_amounts_differ_where_their_texts_do_not():
    assert Memory(size=2**50) != Memory(size=2**50 + 1)
    assert Memory(fraction=0.5) != Memory(grow=True)
    assert Memory(grow=True) != "grow"


FRACTION = "a number is a fraction, above 0 and at most 1"
SIZE = "it is no size with a unit"


@pytest.mark.parametrize(
    "memory, problem",
    [
        (True, "True and False name no amount"),
        (4096, FRACTION),
        (b"4GiB", "it is a bytes"),
        ("0.5", SIZE),
        ("50%", SIZE),
        ("4G", SIZE),
        ("GiB", SIZE),
        ("4GiB 2MiB", SIZE),
        ("nanGiB", SIZE),
        ("infGiB", SIZE),
        ("0GiB", "a size is above 0"),
        ("-4GiB", "a size is above 0"),
    ],
)
def test_wrong_memory(memory, problem):
    assert refusal(compat.InvalidArgumentError, compat.configure_gpu, memory=memory) == (
        'memory={!r} is not understood: {}. Use "grow" (take memory as it is needed), a fraction '
        'of each GPU such as 0.5, a size per GPU such as "4GiB" or "512MiB", or None (the '
        "backend's default).".format(memory, problem)
    )


@pytest.mark.parametrize("floatx", ["float", "FLOAT32", "float8", "", 32, float, ["float32"]])
def test_wrong_floatx(floatx):
    assert refusal(compat.InvalidArgumentError, compat.configure_gpu, floatx=floatx) == (
        'floatx={!r} is not understood. Use "float16", "bfloat16" (Keras 3), "float32", "float64", '
        "or None (what Keras is set to).".format(floatx)
    )


@pytest.mark.parametrize("simulate", [0, -1, 2.0, "2", True, [0, 1]])
def test_wrong_simulate(simulate):
    assert refusal(compat.InvalidArgumentError, compat.configure_gpu, simulate=simulate) == (
        "simulate={!r} is not understood. Use the number of CPU devices that shall stand in for "
        "GPUs, 1 or more, or None (no simulation).".format(simulate)
    )
