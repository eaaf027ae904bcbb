"""What compat says: the texts of its errors and of its warnings."""

import contextlib
import warnings

import pytest

import compat


def refusal(kind, function, *arguments):
    """Return the text of the error of a class with which a call ends."""
    with pytest.raises(kind) as caught:
        function(*arguments)
    return str(caught.value)


@contextlib.contextmanager
def told():
    """Yield a list that gets the texts of the warnings within."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", compat.CompatWarning)
        yield texts
    texts += [str(w.message) for w in caught if issubclass(w.category, compat.CompatWarning)]
