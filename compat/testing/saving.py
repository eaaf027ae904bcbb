"""That a Keras model on several devices is saved, loaded and freed as on one."""

import gc
import weakref

import compat

from .contract import BackendContract
from .models import CASES, DEVICES, fit_in_order, initialise
from .spans import contract_of, span


class SavingContract(BackendContract):
    """Whole models, weights, checkpoints and architectures."""

    @span
    def test_save_and_load_model_with_optimizer_state(self, keras, tmp_path, pytestconfig):
        """What a callback saved of several devices goes on as if nothing had been, on one, too."""
        whole = contract_of(pytestconfig) == "whole"
        name = "multi" if whole else "dense"
        inputs, targets = CASES[name].data(48)
        plain, parallel = models = self.both(keras, name)
        path = str(tmp_path / "model") + self.extension
        fit_in_order(plain, inputs, targets)
        checkpoint = keras.callbacks.ModelCheckpoint(path)
        fit_in_order(parallel, inputs, targets, callbacks=[checkpoint])
        for devices in [DEVICES, 1] if whole else [DEVICES]:
            loaded = keras.models.load_model(path)
            if devices > 1:
                assert compat.parallelize(loaded) is loaded
            self.close(plain.get_weights(), loaded.get_weights())
            models.append(loaded)
        for each in models:  # saving has not disturbed the one that was saved
            fit_in_order(each, inputs, targets)
            self.close(plain.get_weights(), each.get_weights())

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

    def test_it_is_freed_once_nobody_holds_it(self, keras):
        """What a process trains one after the other must not fill its memory."""
        model, inputs, targets = self.parallel_and_data(keras, "dense", 13)
        model.fit(inputs, targets, verbose=0)
        model.predict(inputs, verbose=0)
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None

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
