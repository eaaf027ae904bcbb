"""Methods of a rank's model: those that its class lacks, and those that hide one another."""

import pytest

import compat
from compat._ranks import keras_model
from compat._ranks.ranked_methods import RankedMethod, install
from compat._runtime import patching


class Fits(RankedMethod):
    method = "fit"

    def invoke(self, model, *args, **kwargs):
        return "ranked " + self.plain(model)(*args, **kwargs)


class Watches(patching.InstanceMethod):
    method = "fit"
    watches = True

    def invoke(self, model, *args, **kwargs):
        return "watched " + self.plain(model)(*args, **kwargs)


class Model:
    def fit(self):
        return "fitted"


def test_a_method_that_the_class_lacks_is_an_error():
    """As where a version of Keras has renamed it; but for those that old or new ones lack."""
    kinds = [kind for kind in keras_model._KINDS if not kind.is_optional and kind.method != "fit"]
    assert {kind.method for kind in kinds} == {"evaluate", "test_on_batch", "train_on_batch"}
    for kind in kinds:
        with pytest.raises(compat.UnsupportedError) as raised:
            install(Model(), None, [kind])
        assert str(raised.value) == (
            f"compat cannot make a Model one of several ranks: it has no method {kind.method}(), "
            "which they depend on. Use a version of Keras that compat is tested with, or one "
            "process: COMPAT_ALONE=1."
        )


def test_a_method_is_found_beneath_the_one_that_watches_it():
    model = Model()
    install(model, None, [Fits])
    Watches([]).install(model)
    assert model.fit() == "watched ranked fitted"
    assert Fits.of(model).calls == Watches.of(model).calls == 1
    assert patching.InstanceMethod.all_of(model) == {"fit": [Watches.of(model), Fits.of(model)]}
    install(model, None, [Fits])  # a second time changes nothing
    assert model.fit() == "watched ranked fitted"
    Watches.of(model).remove(model)
    assert model.fit() == "ranked fitted" and Watches.of(model) is None
