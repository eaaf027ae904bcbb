"""Values of the whole batch are gathered, and devices go on with their own rows of results."""

import numpy as np
import pytest

from . import test_contract, test_reductions, test_replicas
from .test_reductions import around, assert_split, plan_of, reductions

keras, profiles_not_printed = test_replicas.keras, test_contract.profiles_not_printed
float64 = test_reductions.float64


def attention(K, x):
    return K.dot(K.softmax(K.dot(x, K.transpose(x))), x)


def twice(K, x):
    """Return what is split in between, and mixed again."""
    product = K.dot(x[::-1], K.eye(5))
    return product[::-1] + 0.02 * K.cumsum(x, axis=0)


#: Layers, with the number of values that they gather, and that they add up in the backward pass.
LAYERS = {
    "attention": (attention, 2, 2),
    "reversed": (lambda K, x: 0.7 * x + 0.3 * x[::-1], 1, 1),
    "shifted": (lambda K, x: K.concatenate([x[1:], x[:1]], axis=0), 1, 1),
    "of means": (lambda K, x: (x - K.mean(x, axis=0))[::-1], 2, 2),
    "twice": (twice, 2, 2),
}


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_what_follows_an_operation_on_all_rows_is_split(float64, name):
    """Devices with uneven shards, or without rows, have the numbers of one, and all products."""
    function, forward, backward = LAYERS[name]
    K = float64.backend
    model = assert_split(float64, lambda: around(float64, lambda x: function(K, x)))
    assert reductions(model) == forward
    assert reductions(model, "backward") == backward
    assert plan_of(model).body_weights == model.trainable_weights
    assert test_contract.number_of_products(plan_of(model).head) == 0


def test_results_without_a_row_for_each_sample_are_an_error(keras):
    """Where no number of rows for which sizes were inferred has shown it."""
    import theano

    from compat._backends.theano.reductions import BodyGraph

    rows = theano.tensor.fmatrix()
    body = BodyGraph(None, rows)
    checked = theano.function([rows, body.rows], body.checked(rows))
    assert checked(np.ones((3, 2), "float32"), 3).shape == (3, 2)
    with pytest.raises(AssertionError) as raised:
        checked(np.ones((3, 2), "float32"), 4)
    assert str(raised.value).startswith(
        "A layer has a result without one row for each sample of this batch, as it has for others. "
        "Use one device: parallelize(model, gpus=1)."
    )
