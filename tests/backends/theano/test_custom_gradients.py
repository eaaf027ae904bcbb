"""User-defined gradients."""

import numpy as np
import pytest

import compat
from compat.testing import initialise

from ..messages import told
from . import test_contract, test_replicas
from .test_replicas import INPUTS, TARGETS
from .test_side_effects import Kept, as_op, line_of, trained, with_operation

keras, profiles_not_printed = test_replicas.keras, test_contract.profiles_not_printed


def with_gradient(keras, kept, is_on):
    """Return a model with an operation that has a custom gradient."""

    def count(values):
        return kept.counts(values) if is_on else values.copy()

    operation = as_op(lambda values: values.copy(), as_op(count))
    return with_operation(keras, operation)


def test_gradient_that_changes_something(keras):
    """It is tried with the first batch: the model runs on one device."""

    def build(parallel):
        kept = Kept()
        return lambda: with_gradient(keras, kept, [True]), parallel, kept

    one, results, left = trained(keras, *build(False))
    with told() as said:
        model, several, state = trained(keras, *build(True))
    assert left == state
    for value, other in zip(results, several):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)
    line = line_of(with_operation, "between = ")
    assert said == [
        f"The operation FromFunctionOp{{<lambda>}} ({line}) of {model.name!r} has side effects (on "
        "a list, a counter, random numbers), which each device would repeat. The model runs "
        "unsplit on cpu:0."
    ]


def test_gradient_that_changes_something_from_a_later_step_on(keras):
    """It is put back; by then the step may have changed weights."""
    kept, is_on = Kept(), []
    model = compat.parallelize(initialise(with_gradient(keras, kept, is_on)))
    model.compile("sgd", "mse")
    model.train_on_batch(INPUTS, TARGETS)
    is_on.append(True)
    with pytest.raises(compat.UnsupportedError) as caught:
        model.train_on_batch(INPUTS, TARGETS)
    assert str(caught.value).splitlines()[0] == (
        f"theano cannot train {model.name!r} on several devices: the gradient of an operation has "
        "side effects, which each device would repeat. Run the model on one device: "
        "parallelize(model, gpus=1)."
    )
    assert kept.log == {"calls": 0, "rows": 0}
