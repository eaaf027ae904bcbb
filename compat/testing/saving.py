"""That a Keras model on several devices is saved and loaded as on one."""

import pytest

import compat

from .contract import BackendContract
from .models import CASES, DEVICES, initialise
from .spans import in_span, span


class SavingContract(BackendContract):
    """Whole models, weights, checkpoints and architectures."""

    def continued(self, model, path, keras, parallel):
        """The model saved, loaded and trained on, with the optimizer's state."""
        model.save(path)
        loaded = keras.models.load_model(path)
        if parallel:
            assert compat.parallelize(loaded) is loaded
        return loaded

    @pytest.mark.parametrize(
        "saved_on, loaded_on",
        in_span([(1, 1), (1, DEVICES), (DEVICES, 1), (DEVICES, DEVICES)], [(DEVICES, DEVICES)]),
    )
    def test_save_and_load_model_with_optimizer_state(self, keras, tmp_path, saved_on, loaded_on):
        inputs, targets = CASES["multi"].data(45)
        options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
        expected = self.compiled(keras, "multi")
        model = self.compiled(keras, "multi", parallel=saved_on > 1)
        for each in (expected, model):
            each.fit(inputs, targets, **options)
        path = str(tmp_path / "model") + self.extension
        loaded = self.continued(model, path, keras, loaded_on > 1)
        self.close(expected.get_weights(), loaded.get_weights())
        for each in (expected, loaded, model):  # saving has not disturbed the model
            each.fit(inputs, targets, **options)
        self.close(expected.get_weights(), loaded.get_weights())
        self.close(expected.get_weights(), model.get_weights())
        if loaded_on > 1:
            assert len(self.placement(loaded, inputs, targets)) == DEVICES

    @span
    def test_weights_go_both_ways(self, keras, tmp_path):
        plain, parallel = self.build(keras, "conv"), self.build(keras, "conv")
        compat.parallelize(parallel)
        path = str(tmp_path / "model") + self.weights_extension
        for source, target in ((parallel, plain), (plain, parallel)):
            initialise(source, seed=id(source) % 1000)
            source.save_weights(path)
            target.load_weights(path)
            self.close(source.get_weights(), target.get_weights(), 1e-12)

    def test_checkpoint_and_resume(self, keras, tmp_path):
        inputs, targets = CASES["dense"].data(45)
        options = {"batch_size": 16, "shuffle": False, "verbose": 0}
        expected = self.compiled(keras, "dense")
        expected.fit(inputs, targets, epochs=4, **options)
        model = self.compiled(keras, "dense", parallel=True)
        path = str(tmp_path / "checkpoint") + self.extension
        checkpoint = keras.callbacks.ModelCheckpoint(path)
        model.fit(inputs, targets, epochs=2, callbacks=[checkpoint], **options)
        resumed = compat.parallelize(keras.models.load_model(path))
        resumed.fit(inputs, targets, epochs=4, initial_epoch=2, **options)
        self.close(expected.get_weights(), resumed.get_weights())

    @span
    def test_json_and_clone_are_plain_models(self, keras):
        plain, parallel = self.build(keras, "multi"), self.build(keras, "multi")
        compat.parallelize(parallel)
        assert parallel.count_params() == plain.count_params()
        clone = keras.models.clone_model(parallel)
        from_json = keras.models.model_from_json(parallel.to_json())
        inputs, _ = CASES["multi"].data(13)
        expected = plain.predict(inputs, verbose=0)
        for copy in (clone, from_json):
            copy.set_weights(parallel.get_weights())
            self.close(expected, copy.predict(inputs, verbose=0), 1e-6)
