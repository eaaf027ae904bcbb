"""The check that a rank's model evaluates together with the others, without a framework."""

import types

import pytest

import compat
from compat import _keras
from compat._ranks.rank_usage import RanksCheck
from compat._runtime import work

pytestmark = pytest.mark.usefixtures("process")


class Hook:
    calls, steps, one_of, is_of_keras_steps = 0, ("evaluate",), "", False


class Model:
    name = "net"

    def test_step(self, data):
        """Return metrics alone."""


@pytest.fixture
def hook():
    """Return a method that Keras calls as it traces the function that evaluates."""
    return Hook()


@pytest.fixture
def check(hook, monkeypatch):
    callbacks = types.SimpleNamespace(Callback=object, ModelCheckpoint=Hook)
    keras = types.SimpleNamespace(callbacks=callbacks)
    monkeypatch.setattr(_keras, "keras_of", lambda model: keras)
    monkeypatch.setattr(_keras, "backend_name", lambda keras: "jax")
    model = Model()
    check = RanksCheck(model, "rank 0 of 2", None, lambda: {"test_step": hook})
    yield check
    assert check.model_now() is model  # which the check does not keep alive


def fit(check, logs, trace):
    """Train for an epoch of one step that validates once."""

    def fit(callbacks=None):
        work.count([""], [3], True)
        callbacks[-1].on_batch_end(0)
        trace()
        work.count([""], [3], False)
        callbacks[-1].on_epoch_end(0, logs)

    with check.step("train", name="fit"):
        check.call(fit, (), {})


def evaluate(check):
    """Evaluate by the function that ``fit`` has traced."""
    with check.step("evaluate", name="evaluate"):
        work.count([""], [3], False)


@pytest.mark.parametrize("name", ["loss", "mae"])
def test_an_evaluation_by_the_function_of_a_validation_is_no_alarm(check, hook, recwarn, name):
    """Also of a custom ``test_step`` that returns no loss."""

    def trace():
        hook.calls += 1

    fit(check, {name: 1.0, "val_" + name: 1.0}, trace)
    evaluate(check)
    assert not [str(warning.message) for warning in recwarn]


@pytest.mark.parametrize("name", ["loss", "mae"])
def test_a_validation_that_does_not_call_what_ranks_depend_on_is_reported(check, name):
    with pytest.warns(compat.CompatWarning) as warned:
        fit(check, {name: 1.0, "val_" + name: 1.0}, lambda: None)
    (warning,) = warned
    begin = "In the first epoch of model 'net' (fit()) rank 0 of 2 did not do all that ranks "
    assert str(warning.message).startswith(begin)
