"""Idioms do on three simulated devices what they do on one: split, unsplit or refused.

    COMPAT_TEST_SLOW=1 python -m pytest tests/idioms -k "loss and negatives"

docs/idioms.md has the verdicts, as support_table.py writes them from the results of this test. A
difference without a warning, or an error that is not compat's, is never accepted. MXNet and torch,
where they take least, run all. An idiom that these cannot run is tested in the environment that
takes the next least, and is slow in others.
"""

import os

import lambdas  # noqa: F401  (each file adds its idioms)
import losses  # noqa: F401
import natives
import pytest
import scripts  # noqa: F401
import states  # noqa: F401
import support_table
from backends.conftest import INSTALLED
from catalog import IDIOMS
from comparing import ALONE, REFUSED, SPLIT, TOLERANCES, UNSPLIT, UNUSABLE, verdict
from kerases import is_keras_3
from kit import Kit

from compat.testing import slow
from compat.testing.models import clear_session

NOT_HERE, ONE_DEVICE = "-", "one device"
#: What compat sees nothing of: computed outside of the model, and right, on one device.
OUTSIDE = ("K.function with an optimizer's updates",)
ENVIRONMENT = os.environ.get("TOX_ENV_NAME")
VERDICTS = support_table.verdicts()
EXPECTED = VERDICTS.get(ENVIRONMENT)
#: The environments with Keras 2 and with Keras 3, those first that take the least time.
BY_TIME = (
    ("py37-mxnet", "py37-theano", "py37-tensorflow1-keras224"),
    ("py311-torch", "py311-jax", "py311-tensorflow", "py311-keras3"),
)
#: Those with loops, which Theano compiles in thrice the time of TensorFlow 1.
LOOPS = "seq2seq: states of an encoder", "stateful RNN"


def idioms():
    """Parameters of the test: all idioms; those that a faster environment can run are slow."""
    (environments,) = [each for each in BY_TIME if ENVIRONMENT in each] or [()]
    for name in IDIOMS:
        able = [each for each in environments if VERDICTS[each].get(name, NOT_HERE) != NOT_HERE]
        if name in LOOPS:
            able.sort(key=lambda each: "theano" in each)
        faster = able[: able.index(ENVIRONMENT)] if ENVIRONMENT in able else []
        yield pytest.param(name, marks=[slow] if faster else [])


def found(name, keras):
    """Return the verdict on an idiom, and the reason."""
    idiom, (backend,) = IDIOMS[name], INSTALLED
    if idiom.native:
        make = natives.NATIVES.get(backend.name)
        if make is None or (backend.name == "tensorflow2" and is_keras_3(keras)):
            return NOT_HERE, "it has no models of its own, or those of another environment"
        native = make()
        kind, reason = verdict(
            lambda parallel: idiom.run(native, parallel), TOLERANCES[native.floatx]
        )
    else:

        def run(parallel):
            clear_session(keras)
            return idiom.run(Kit(keras), parallel)

        kind, reason = verdict(run, TOLERANCES[keras.backend.floatx()])
    outside = {ALONE: ONE_DEVICE} if name in OUTSIDE else {}
    return {UNUSABLE: NOT_HERE, **outside}.get(kind, kind), reason


def test_the_page_has_no_other_idioms():
    assert not EXPECTED or set(EXPECTED) <= set(IDIOMS)


@pytest.mark.parametrize("name", idioms())
def test_same_as_one_device_or_loud(keras, record_property, name):
    kind, reason = found(name, keras)
    record_property("verdict", "{}: {}".format(kind, name))
    print("verdict: {}\t{}\t{}".format(kind, name, " ".join(reason.split())))
    assert kind in (SPLIT, UNSPLIT, REFUSED, ONE_DEVICE, NOT_HERE), reason
    if EXPECTED:
        assert kind == EXPECTED[name], "docs/idioms.md says {}: {}".format(EXPECTED[name], reason)
