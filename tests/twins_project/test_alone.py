"""``compat_twins`` where there is one device; run by ../test_pytest_plugin.py."""

import numpy as np
import pytest
from compat_numpy.networks import Network

import compat

compat.configure_gpu(backend="numpy", verify=0)
random = np.random.RandomState(0)
x, y = random.normal(size=(61, 8)), random.normal(size=(61, 4))


def build(seed=0):
    return Network(8, 16, 4, seed=seed)


def weights(model):
    return model.weights


def test_one_device(compat_twins):
    with pytest.raises(compat.DevicesNotFoundError) as caught:
        compat_twins(build, weights=weights)
    assert str(caught.value) == (
        "compat_twins compares several devices with one, but this process has cpu:0 only. Ask "
        "for simulated ones: compat_simulate = 3 in pytest's configuration, "
        "--compat-simulate 3, or @pytest.mark.compat(simulate=3) on the test."
    )


def test_rank(compat_twins, monkeypatch):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "2000")
    with pytest.raises(compat.UnsupportedError) as caught:
        compat_twins(build, weights=weights)
    assert str(caught.value) == (
        "compat_twins cannot train in rank 0 of 2 (RANK). Start pytest without a launcher."
    )
