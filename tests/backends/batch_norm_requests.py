"""Checks that a request for the whole batch's statistics is fulfilled, or warned about."""

import warnings

import compat
from compat._configuration import registry


def check_said(backend, parallelize, layers):
    """Check that a warning names the layers, unless the backend synchronizes them."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parallelize()
    texts = [str(each.message) for each in said if each.category is compat.CompatWarning]
    texts = [text for text in texts if "statistics of the whole batch" in text]
    if "devices" in registry.find(backend).synchronizes:
        assert texts == []
    else:
        assert [layers in text for text in texts] == [True]
