"""Old scripts' imports, whether Keras has lost the names or not: they run after one call."""

import contextlib
import io
import os

import pytest

import compat
from compat.testing import ParallelContract

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

def trained():
    return [each.training_rows for each in compat.report().devices]

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    {session}
assert multi_gpu_model is elsewhere is compat.multi_gpu_model
for module in ("utils", "utils.training_utils"):
    assert "{keras}." + module + ".multi_gpu_model" in names
if several:
    model = Sequential([Dense(3, input_shape=(4,))])
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse")
    before, rows = model.get_weights()[0], trained()
    parallel.fit(np.ones((5, 4)), np.ones((5, 3)), verbose=0)
    assert abs(before - model.get_weights()[0]).max() > 0
    assert all(now > then for now, then in zip(trained()[:2], rows))
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


def test_an_old_script(keras, contract):
    """The names stay; no other test looks for them."""
    names = compat.install_legacy_names()
    assert names == sorted(set(names), key=names.index)
    assert compat.install_legacy_names() == []
    name = os.environ.get("COMPAT_TEST_KERAS", "keras")
    session = SESSION if getattr(contract, "in_sessions", False) else NO_SESSION
    script, printed = SCRIPT.format(keras=name, session=session), io.StringIO()
    with contextlib.redirect_stdout(printed):
        several = isinstance(contract, ParallelContract)
        exec(script, {"compat": compat, "names": names, "several": several})
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
