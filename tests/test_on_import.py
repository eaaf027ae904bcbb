"""Calls when a module has been imported."""

import sys

import pytest

from compat._runtime import on_import


@pytest.fixture
def called(tmp_path, monkeypatch):
    """Return a list of the modules for which there was a call, in order."""
    (tmp_path / "toy_package").mkdir()
    (tmp_path / "toy_package" / "__init__.py").write_text("from . import late\n")
    (tmp_path / "toy_package" / "late.py").write_text("value = 5\n")
    (tmp_path / "toy_broken.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []
    yield names
    on_import.forget()
    for name in [name for name in sys.modules if name.startswith("toy_")]:
        del sys.modules[name]


def test_is_called_once_when_it_has_been_imported(called):
    on_import.call(
        lambda module: called.append((module.__name__, module.value)), "toy_package.late"
    )
    assert not called
    import toy_package

    assert called == [("toy_package.late", 5)]
    module = toy_package.late
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__).__module__ != "compat._runtime.on_import"


def test_a_module_has_a_call_of_each_function(called):
    """Of one function, the last: a process may be configured again."""

    def first(module):
        called.append("first")

    def wait():
        def second(module):
            called.append(second)

        on_import.call(second, "toy_package.late")
        return second

    on_import.call(first, "toy_package.late")
    wait()
    last = wait()
    import toy_package  # noqa: F401

    assert called == ["first", last]


def test_is_called_now_where_it_was_imported_before(called):
    import toy_package.late

    on_import.call(lambda module: called.append(module), "toy_package.late")
    assert called == [toy_package.late]


def test_a_module_that_is_missing_or_fails_does_so_as_ever(called):
    for name in ("toy_missing", "toy_broken"):
        on_import.call(called.append, name)
    with pytest.raises(ImportError, match="No module named 'toy_missing'"):
        import toy_missing  # noqa: F401
    with pytest.raises(RuntimeError, match="^broken$"):
        import toy_broken  # noqa: F401
    assert not called
