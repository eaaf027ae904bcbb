"""The tests that any backend must pass, and the models they train.

A backend's test file is mostly one subclass::

    from compat.testing import ParallelContract

    class TestMyBackend(ParallelContract):
        backend = "mybackend"

        def placement(self, model, inputs, targets):
            ...

``backend`` is a name or an instance: a backend of another package passes the same tests.

- ``ParallelContract``: Keras models on several devices in one process.
- ``BackendContract``: no more than one device in one process.
- ``NativeContract``: models without Keras on several devices.
- ``compat.testing.ranks``: one process per device.

Run it with the environment variable ``COMPAT_TEST_KERAS`` set to the Keras under test:
``keras`` (the default), ``tensorflow.keras``, ``tf_keras``, or ``tensorflow.compat.v1.keras``
for TensorFlow 2 in v1 mode. Needs pytest and numpy.

All tests are the whole contract. ``-m span`` runs the span contract, a part that takes about a
minute and detects differences between versions of one backend; ``-m "not slow"`` leaves out tests
that take long, whose subject others cover in fewer cases; ``any_backend`` marks tests of subjects
that are the same on all backends. Register the three markers in your pytest's configuration.
"""

from .._verification import largest_difference
from .contract import BackendContract, any_backend, contract_of, in_span, slow, span
from .models import (
    CASES,
    DEVICES,
    SHARDS,
    Case,
    initialise,
    keras_under_test,
    optimizer,
)
from .parallel import ParallelContract
from .several import NativeContract, NativeModels

__all__ = [
    "CASES",
    "DEVICES",
    "SHARDS",
    "BackendContract",
    "Case",
    "NativeContract",
    "NativeModels",
    "ParallelContract",
    "any_backend",
    "contract_of",
    "in_span",
    "initialise",
    "keras_under_test",
    "largest_difference",
    "optimizer",
    "slow",
    "span",
]
