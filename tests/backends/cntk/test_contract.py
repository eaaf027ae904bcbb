"""CNTK under Keras: one device, on which models train as ever."""

import numpy as np
import pytest

import compat
from compat._configuration import packages
from compat.testing import CASES, BackendContract, largest_difference, optimizer


class TestCNTK(BackendContract):
    backend = "cntk"

    # One device: the same object, plain numbers -----------------------------------------------

    @pytest.mark.parametrize("name", ["lstm", "multi"])
    def test_trains_and_is_saved_as_without_compat(self, keras, name, tmp_path):
        """parallelize(gpus=1) changes nothing: same numbers, same files, also for odd batches."""
        plain, model = self.compiled(keras, name), self.build(keras, name)
        assert compat.parallelize(model, gpus=1) is model
        model.compile(optimizer(keras, "sgd"), CASES[name].loss)
        start = plain.get_weights()
        for batch, samples in ((16, 45), (2, 6)):
            inputs, targets = CASES[name].data(samples)
            for each in (plain, model):
                each.fit(inputs, targets, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        assert largest_difference(start, plain.get_weights()) > 1e-3
        self.close(plain.get_weights(), model.get_weights(), 1e-6)
        path = str(tmp_path / "model.h5")
        model.save(path)
        loaded = compat.parallelize(keras.models.load_model(path), gpus=1)
        inputs, _ = CASES[name].data(13)
        predicted = [np.hstack(each.predict(inputs)) for each in (model, loaded)]
        self.close(predicted[:1], predicted[1:], 1e-6)

    def test_several_devices_are_a_clear_error(self, keras):
        model = self.build(keras, "dense")
        for gpus in (None, 2, [1]):
            with pytest.raises(NotImplementedError) as caught:
                compat.parallelize(model, gpus)
            assert type(caught.value) is compat.UnsupportedError
        assert str(caught.value) == (
            "cntk cannot run a model on cpu:1 in one process: all of it runs on cpu:0. Start one "
            "process per device, with compat run -n, or train on that one, with parallelize(model, "
            "gpus=1)."
        )

    def test_parts_of_a_model_cannot_be_placed(self, keras):
        with pytest.raises(compat.UnsupportedError, match="^cntk cannot place parts of a model"):
            compat.device(1)

    if packages.release(packages.version("keras")) >= (2, 2):

        @pytest.mark.row("subclassed models")
        def test_subclassed_model(self, keras):
            """Keras builds it when it is fitted, as without compat."""

            class Mine(keras.Model):
                def __init__(self):
                    super(Mine, self).__init__()
                    self.classes = keras.layers.Dense(4, activation="softmax")

                def call(self, inputs):
                    return self.classes(inputs)

            model = Mine()
            assert compat.parallelize(model, gpus=1) is model
            model.compile("sgd", "categorical_crossentropy")
            history = model.fit(*CASES["dense"].data(16), epochs=3, verbose=0)
            assert history.history["loss"][-1] < history.history["loss"][0]

    else:

        def test_no_subclassed_model(self, keras):
            """Before Keras 2.2 a model has inputs, or is none."""
            with pytest.raises(TypeError):
                type("Mine", (keras.models.Model,), {})()
