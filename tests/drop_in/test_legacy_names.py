"""Old scripts' imports, on a Keras that has lost the names: they run unchanged after one call."""

import contextlib
import io
import os

import pytest

import compat
from compat.testing import span

pytestmark = pytest.mark.row("install_legacy_names()")

# The lines that such scripts begin with, and one step.
SCRIPT = """\
import warnings
import numpy as np
import {keras}.backend as K
from {keras}.layers import Dense
from {keras}.models import Sequential
from {keras}.utils import multi_gpu_model
from {keras}.utils.training_utils import multi_gpu_model as elsewhere
import {keras}.backend.tensorflow_backend as KTF
from {keras}.backend.tensorflow_backend import set_session

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    {session}
lost = "{keras}.utils.multi_gpu_model" in names
assert (multi_gpu_model is compat.multi_gpu_model) == lost
also_lost = "{keras}.utils.training_utils.multi_gpu_model" in names
assert (elsewhere is compat.multi_gpu_model) == also_lost
if lost:  # what Keras still has stays, and needs true GPUs
    model = Sequential([Dense(3, input_shape=(4,))])
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse")
    before = model.get_weights()[0]
    parallel.fit(np.ones((5, 4)), np.ones((5, 3)), verbose=0)
    assert abs(before - model.get_weights()[0]).max() > 0
print(sorted(set(str(w.message) for w in caught if "session" in str(w.message))))
"""

NO_SESSION = """\
set_session(object())
    KTF.set_session(object())
    try:
        K.get_session()
    except NotImplementedError as error:
        print(error)
    else:
        raise SystemExit("there is a session")
"""

SESSION = """\
session = K.get_session()
    KTF.set_session(session)
    assert K.get_session() is session
"""


@span
def test_an_old_script(keras, contract):
    """The names stay; no other test looks for them."""
    names = compat.install_legacy_names()
    assert names == sorted(set(names), key=names.index)
    assert compat.install_legacy_names() == []
    name = os.environ.get("COMPAT_TEST_KERAS", "keras")
    session = SESSION if getattr(contract, "in_sessions", False) else NO_SESSION
    script, printed = SCRIPT.format(keras=name, session=session), io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(script, {"compat": compat, "names": names})
    lines = printed.getvalue().splitlines()
    if session is SESSION:
        assert lines[-1] == "[]"
        return
    assert lines[-2] == (
        "get_session() has nothing to return: this Keras runs in no TensorFlow session. Call "
        "models and functions directly; compat.configure_gpu() has what a session's ConfigProto "
        "set."
    )
    expected = [
        "set_session() does nothing here: this Keras runs in no TensorFlow session, and the "
        "session's settings have no effect. Pass them to compat.configure_gpu(), such as "
        'memory="grow" for allow_growth.'
    ]
    assert lines[-1] == str(expected)
