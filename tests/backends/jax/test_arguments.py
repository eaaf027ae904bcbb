"""Arguments of which the first is not always a dense array."""

from jax.experimental import sparse

import compat
from compat._backends.jax import backend
from compat._backends.jax.arguments import rows_of
from compat._runtime import work

from .. import verification_cases
from . import test_replicas
from .test_replicas import ROWS, TARGETS

keras = test_replicas.keras


def test_sparse_batches_have_rows_and_stay_whole(keras):
    table = ROWS[:30] * (ROWS[:30] > 0)
    inputs = [keras.layers.Input((8,), sparse=is_sparse) for is_sparse in (True, False)]
    outputs = keras.layers.add([keras.layers.Dense(4)(each) for each in inputs])
    model = compat.parallelize(keras.Model(inputs, outputs))
    model.compile("sgd", "mse")
    kind = ("cpu:0", "cpu:1", "cpu:2"), (10, 10, 10), True
    before = work.batches().get(kind, 0)
    batch = [sparse.BCOO.fromdense(table), table]
    model.train_on_batch(batch, TARGETS[:30])
    assert rows_of(model, (batch, TARGETS[:30])) == 30
    assert work.batches().get(kind, 0) == before + 1


def test_an_optional_input_that_is_not_given(keras):
    verification_cases.check_an_optional_input_that_is_not_given(keras, backend)
