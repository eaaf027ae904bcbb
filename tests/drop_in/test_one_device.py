"""The drop-in names where one process cannot drive several devices: an error that says so."""

import numpy as np
import pytest

import compat
from compat.testing import CASES, initialise, optimizer

pytestmark = pytest.mark.row("multi_gpu_model and make_parallel: a clear error")


@pytest.fixture
def template(keras):
    return initialise(CASES["dense"].build(keras))


def test_several_devices(template):
    texts = []
    for call in (compat.multi_gpu_model, compat.make_parallel, compat.parallelize):
        with pytest.raises(NotImplementedError) as caught:
            call(template, 2)
        assert type(caught.value) is compat.UnsupportedError
        texts.append(str(caught.value))
    assert len(set(texts)) == 1
    assert "train on that one, with parallelize(model, gpus=1)" in texts[0]


def test_arguments_are_checked_as_elsewhere(template):
    with pytest.raises(ValueError) as caught:
        compat.multi_gpu_model(template, 1)
    assert str(caught.value) == (
        "For multi-gpu usage to be effective, call `multi_gpu_model` with `gpus >= 2`. Received: "
        "`gpus=1`. On a machine with fewer, `compat run --simulate 2 script.py` lets 2 CPU devices "
        "stand in for GPUs, on all backends but CNTK."
    )
    with pytest.raises(ValueError, match="we expect the following devices to be available"):
        compat.multi_gpu_model(template, 9)


def test_make_parallel_on_one(keras, template):
    parallel = compat.make_parallel(template, 1)
    assert parallel.get_layer(template.name) is template
    parallel.compile(optimizer(keras, "sgd"), "mse")
    before = template.get_weights()
    parallel.fit(*CASES["dense"].data(13), verbose=0)
    assert np.abs(before[0] - template.get_weights()[0]).max() > 0
