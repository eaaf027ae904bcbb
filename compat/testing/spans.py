"""The parts of the contract: what rows of another version of a backend run, and what takes long."""

import pytest

#: Marks the tests of the span contract.
span = pytest.mark.span
#: Marks tests that take long, and whose subject other tests cover in fewer cases.
slow = pytest.mark.slow
#: Marks tests of what is the same on all backends, so that one with each Keras may run them.
any_backend = pytest.mark.any_backend


def contract_of(config):
    """The contract that this run of pytest tests: "span", or "whole"."""
    return "span" if config.getoption("-m") == "span" else "whole"


def in_span(values, chosen):
    """Values for ``parametrize``, of which those chosen are in the span contract, too."""
    given = [(value if isinstance(value, tuple) else (value,), value in chosen) for value in values]
    return [pytest.param(*each, marks=[span] if is_chosen else []) for each, is_chosen in given]
