"""The tests that any backend must pass, and the models they train.

A backend's test file is mostly one subclass::

    from compat.testing import ParallelContract

    class TestMyBackend(ParallelContract):
        backend = "mybackend"

        def placement(self, model, inputs, targets):
            ...

``backend`` is a name or an instance: what another package brings passes the same tests.

- ``ParallelContract``: Keras models on several devices in one process.
- ``BackendContract``: no more than one device in one process.
- ``NativeContract``: models of the framework's own kind on several devices, without Keras.
- ``compat.testing.ranks``: one process per device.

Run it with the environment variable ``COMPAT_TEST_KERAS`` set to the Keras under test:
``keras`` (the default), ``tensorflow.keras``, ``tf_keras``, or ``tensorflow.compat.v1.keras``
for TensorFlow 2 in v1 mode. Needs pytest and numpy.

Every test is the whole contract. ``-m span`` runs the span contract, a part that takes about a
minute and sees what differs between versions of one backend; ``-m "not slow"`` leaves out what
takes long and is tested in fewer cases besides, and ``any_backend`` is on what is the same on all
backends. Register the three markers in your pytest's configuration.
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
