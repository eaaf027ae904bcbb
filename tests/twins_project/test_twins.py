"""``compat_twins`` on three simulated devices; run by ../test_pytest_plugin.py."""

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


@pytest.fixture
def twins(compat_twins):
    return compat_twins(build, weights=weights)


def failure(function, *arguments):
    with pytest.raises(pytest.fail.Exception) as caught:
        function(*arguments)
    return str(caught.value)


def test_same(twins):
    for _ in range(2):
        twins.train(lambda model: model.train_on_batch(x, y))
    assert twins.worked == {"cpu:0": (2, 3), "cpu:1": (2, 3), "cpu:2": (2, 3)}

    def train(model):
        model.train_on_batch(x, y)
        return {"drawn": [np.random.rand()], "empty": []}

    first, second = twins.train(train)
    assert first == second and first["drawn"]


def test_what_differs_is_listed(twins):
    def train(model):
        rate = 0.05 if model is twins.one else 0.06
        model.train_on_batch(x, y, rate=rate)
        numbers = {"rate": rate, "steps": [1] * int(100 * rate), "unknown": np.nan}
        return numbers if model is twins.one else dict(numbers, more=1.0)

    text = failure(twins.train, train)
    print(text)
    lines = text.splitlines()
    assert lines[0] == "model 'Network' trained differently on cpu:0, cpu:1, cpu:2 and on cpu:0"
    for number in range(4):
        start = "  weight {}: differs by 0.0".format(number)
        assert lines[1 + number].startswith(start)
        assert ", the tolerance is 1e-05" in lines[1 + number]
    assert lines[5:9] == [
        "  rate: differs by 0.01, the tolerance is 1e-05 ([0.05] on one device, [0.06] on several)",
        "  steps: its shape is (5,) on one device and (6,) on several",
        "  unknown: differs by nan, the tolerance is 1e-05 ([nan] on one device, [nan] on several)",
        "  more: its shape is None on one device and () on several",
    ]
    assert lines[9].startswith("  verified: 1 training step; ")
    assert lines[11] == (
        "  products ran, forward + backward: cpu:0 2 + 3, cpu:1 2 + 3, cpu:2 2 + 3"
    )


def test_many_differences_are_counted(twins):
    def train(model):
        model.train_on_batch(x, y)
        return {str(n): float(model is twins.one) for n in range(12)}

    lines = failure(twins.train, train).splitlines()
    assert len([line for line in lines if "differs" in line]) == 10
    assert lines[11] == "  and 2 more"


def test_training_that_changes_nothing(twins):
    assert failure(twins.train, lambda model: model.predict(x)).startswith(
        "model 'Network' changed no weight on cpu:0, cpu:1, cpu:2 and on cpu:0\n"
        "  nothing was compared\n"
    )


def test_a_device_that_does_not_work(twins):
    text = failure(twins.train, lambda model: model.train_on_batch(x[:2], y[:2]) and None)
    assert text.startswith("model 'Network' did not run on all devices\n")
    assert text.endswith("cpu:0 2 + 3, cpu:1 2 + 3\n  only 2 of its devices worked")


def test_several_devices_that_are_wrong(twins, monkeypatch):
    from compat_numpy import replicas

    plain = replicas._gradients

    def wrong(*arguments):
        loss, gradients = plain(*arguments)
        return loss, [2 * gradient for gradient in gradients]

    monkeypatch.setattr(replicas, "_gradients", wrong)
    compat.parallelize(twins.several)
    text = failure(twins.train, lambda model: model.train_on_batch(x, y) and None)
    assert "weight 0: differs by" in text


def test_training_that_is_not_seen(twins):
    compat.parallelize(twins.several)  # takes what verifies away
    with pytest.warns(compat.CompatWarning) as warned:
        twins.train(lambda model: model.train_on_batch(x, y))
    assert [str(warning.message) for warning in warned] == [
        "compat_twins: no step of model 'Network' was seen, so it is not known which devices "
        "worked."
    ]


def test_an_iterator(twins):
    with pytest.raises(compat.InvalidArgumentError) as caught:
        twins.fit(iter([x]))
    assert str(caught.value) == (
        "twins.fit() trains two models, but the list_iterator that it was given can be read "
        "only once. Give arrays or a Sequence, or call twins.train() with a function that "
        "makes a new one for each model."
    )


SEEDS = [1, 2]
ONE = Network(8, 4)


@pytest.mark.parametrize(
    "build, weights, error, text",
    [
        (
            lambda: build(SEEDS.pop()),
            weights,
            compat.InvalidArgumentError,
            "compat_twins(<lambda>): <lambda>() gives other weights each time. Seed what draws "
            "them.",
        ),
        (
            lambda: ONE,
            weights,
            compat.InvalidArgumentError,
            "compat_twins(<lambda>): <lambda>() gives the same model each time. Have it build "
            "a new one.",
        ),
        (
            build,
            lambda model: [],
            compat.InvalidArgumentError,
            "compat_twins(build): build() gives a model that has no weights yet, so the two "
            "cannot begin with equal ones. Give its first layer an input shape, or build it "
            "before it is returned.",
        ),
        (
            build,
            None,
            compat.NotAModelError,
            "compat_twins reads the weights of Keras models by itself; for "
            "'compat_numpy.networks.Network' give weights=, a function that returns its arrays "
            "as a list.",
        ),
    ],
)
def test_what_cannot_be_compared(compat_twins, build, weights, error, text):
    with pytest.raises(error) as caught:
        compat_twins(build, weights=weights)
    assert str(caught.value) == text


@pytest.mark.compat(backend="numpy", simulate=2)
def test_in_its_own_process(twins):
    assert twins.devices == ["cpu:0", "cpu:1"]
    twins.train(lambda model: model.train_on_batch(x, y))
