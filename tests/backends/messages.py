"""What compat says: the texts of its errors and of its warnings."""

import contextlib
import warnings

import pytest

import compat


def refusal(kind, function, *arguments):
    """The text of the error of this kind with which a call ends."""
    with pytest.raises(kind) as caught:
        function(*arguments)
    return str(caught.value)


@contextlib.contextmanager
def told():
    """A list, to which the texts of the warnings within are added at the end."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", compat.CompatWarning)
        yield texts
    texts += [str(w.message) for w in caught if issubclass(w.category, compat.CompatWarning)]
