"""The span contract: the part of the contract that rows of another version of a backend run."""

import pytest

#: Marks the tests of the span contract.
span = pytest.mark.span


def contract_of(config):
    """The contract that this run of pytest tests: "span", or "whole"."""
    return "span" if config.getoption("-m") == "span" else "whole"


def in_span(values, chosen):
    """Values for ``parametrize``, of which those chosen are in the span contract, too."""
    found = []
    for value in values:
        parameters = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*parameters, marks=[span] if value in chosen else []))
    return found
