"""The exceptions that callers catch, and what no failure in the other tests shows of a text."""

import inspect

import pytest

import compat
from compat import errors


def test_a_command_to_paste_is_quoted():
    """Texts are compared whole where a test raises them: see test_texts.py."""
    assert errors.shadowed("train.py", "/home/a b/compat/__init__.py") == (
        "`import compat` in train.py finds /home/a b/compat/__init__.py, not this package. To use "
        "compat.configure_gpu() there, rename that one, also where it is imported: "
        "mv '/home/a b/compat' '/home/a b/my_compat'"
    )


def test_the_line_of_the_user_is_found():
    """In any folder: what is not the user's is installed, Python's own or compat's."""
    users = ("/home/me/keras/tensorflow/compat/train.py", 12)
    others = [
        (inspect.__file__, 1),
        (errors.__file__, 2),
        (pytest.__file__, 3),
        ("/usr/lib/python3/dist-packages/keras/engine.py", 4),
        ("<string>", 5),
    ]
    assert errors.innermost_line([("main.py", 1), users] + others) == "train.py, line 12"
    assert errors.innermost_line(others) is None


BUILT_IN = {
    "InvalidArgumentError": ValueError,
    "UnknownOptionError": TypeError,
    "UnsupportedError": NotImplementedError,
    "NotInstalledError": ImportError,
    "PythonNotFoundError": OSError,
    "BrokenInstallError": ImportError,
    "AmbiguousBackendError": RuntimeError,
    "TooLateError": RuntimeError,
    "AlreadyConfiguredError": RuntimeError,
    "DevicesNotFoundError": RuntimeError,
    "DeviceFailedError": RuntimeError,
    "DevicesNotUsedError": RuntimeError,
    "NotAModelError": TypeError,
    "RankError": RuntimeError,
    "RankLostError": RuntimeError,
    "ResultsDifferError": ArithmeticError,
    "ConfigurationFileError": OSError,
    "ModelFileError": OSError,
}


def test_every_error_is_public_and_the_built_in_that_a_caller_would_catch():
    classes = {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind is not errors.CompatError
    }
    warning = classes.pop("CompatWarning")
    assert issubclass(warning, UserWarning)
    assert set(classes) == set(BUILT_IN)
    for name, kind in classes.items():
        assert issubclass(kind, errors.CompatError) and issubclass(kind, BUILT_IN[name])
    for name in ["CompatError", "CompatWarning"] + list(classes):
        assert getattr(compat, name) is getattr(errors, name)
        assert name in compat.__all__
