"""Eight simulated devices, the backend that is installed here, and its Keras."""

import importlib

import pytest
from backends.conftest import INSTALLED, pytest_collection_modifyitems, record_versions  # noqa: F401

import compat
from compat.testing import BackendContract, ParallelContract, keras_under_test
from compat.testing.models import clear_session

DEVICES = 8


@pytest.fixture(scope="session")
def configuration():
    return compat.configure_gpu(simulate=DEVICES)


@pytest.fixture
def keras(configuration):
    keras = keras_under_test()
    yield keras
    clear_session(keras)


def _contract():
    (backend,) = INSTALLED
    module = importlib.import_module("backends.{}.test_contract".format(backend.name))
    (subclass,) = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, BackendContract)
        and value.__module__ == module.__name__
    ]
    return subclass()


CONTRACT = _contract()
several = isinstance(CONTRACT, ParallelContract)
collect_ignore = ["test_one_device.py" if several else "test_multi_gpu_model.py"]


@pytest.fixture
def contract():
    """Return the contract's subclass of the tested backend, which reads where operations ran."""
    return CONTRACT
