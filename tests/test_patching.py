"""What compat changes in other people's objects is listed, made once, and taken back."""

import contextlib
import types

import pytest

from compat._runtime import patching


class Base:
    def call(self):
        return "base"


class Owner(Base):
    pass


@pytest.mark.parametrize("owner", [Owner, Owner(), types.ModuleType("owner")])
def test_a_patch_is_listed_and_taken_back(owner):
    before, listed = dict(vars(owner)), patching.patches()
    patch = patching.Patch(owner, "call", lambda *self: "ours")
    assert owner.call() == "ours"
    assert patching.patches() == listed + [patch]
    assert patching.find(owner, "call") is patch
    patch.take_back()
    assert dict(vars(owner)) == before and patching.patches() == listed


def test_an_item_of_a_dictionary_is_patched_alike():
    rules = {"sort": "theirs"}
    with contextlib.ExitStack() as patches:
        for name in ("sort", "top_k"):
            patches.callback(patching.Patch(rules, name, "ours").take_back)
        assert rules == {"sort": "ours", "top_k": "ours"}
    assert rules == {"sort": "theirs"}


def test_nothing_is_patched_twice():
    owner = Owner()
    with patching.replaced(owner, call=lambda: "first"):
        with pytest.raises(RuntimeError, match="compat has replaced call of .* already"):
            patching.Patch(owner, "call", lambda: "second")
        assert owner.call() == "first"
    assert owner.call() == "base"


def test_one_that_fails_takes_back_those_before_it():
    owner = Owner()
    kept = patching.Patch(owner, "other", 1)
    with pytest.raises(RuntimeError), patching.replaced(owner, call=lambda: "ours", other=2):
        pytest.fail("it was patched twice")
    assert owner.call() == "base" and owner.other == 1
    kept.take_back()


def test_what_is_attached_to_an_instance_is_untracked_and_goes_with_it():
    class Tracking:
        def __setattr__(self, name, value):
            pytest.fail("it was tracked")

        def __call__(self):
            return "plain"

    class Replicated(Tracking):
        def __call__(self):
            return "replicated"

    owner, listed = Tracking(), patching.patches()
    patching.attach(owner, "_compat_replicas", "ours")
    assert owner._compat_replicas == "ours" and patching.patches() == listed
    assert patching.detach(owner, "_compat_replicas") == "ours" and not vars(owner)
    with pytest.raises(KeyError):
        patching.detach(owner, "_compat_replicas")
    patching.change_class(owner, Replicated)
    assert owner() == "replicated"
