"""A plugin for pytest: every Keras model of somebody else's tests runs on several devices."""

import os

import pytest

DEVICES = os.environ.get("PEERS_DEVICES")

if DEVICES:
    import compat
    from compat._runtime import work

    # At once: a conftest of theirs may make JAX's devices, which then stay as they are.
    compat.configure_gpu(simulate=int(DEVICES), parallelize=True)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(item):
        """Note whether the test split a batch among devices."""
        before = _split()
        yield
        if _split() > before:
            item.user_properties.append(("split", "yes"))


def _split():
    return sum(
        number
        for (_, sizes, _), number in work.batches().items()
        if sizes is not None and sum(map(bool, sizes)) > 1
    )
