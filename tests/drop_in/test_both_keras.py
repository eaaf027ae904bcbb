"""What docs/migration.md says to write for Keras 2 and Keras 3, on the Keras that is installed."""

import os

import numpy as np
import pages

import compat
from compat.testing import ParallelContract, any_backend


def batches():
    """Yield the batches of the page's script."""
    random = np.random.RandomState(0)
    while True:
        x = random.normal(size=(20, 8)).astype("float32")
        yield x, (x[:, :1] > 0).astype("float32")


@any_backend
def test_forms_that_every_keras_takes(keras, contract, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = pages.fragment("docs/migration.md", "from keras.layers import BatchNormalization")
    name = os.environ.get("COMPAT_TEST_KERAS", "keras")
    if not isinstance(contract, ParallelContract):  # eight devices are an error there
        script = script.replace("outputs))", "outputs), gpus=1)")
    names = {"compat": compat, "batches": batches}
    saves = name != "tensorflow.compat.v1.keras"  # where Keras' own code cannot write such a file
    script = script if saves else script.rpartition("model.save_weights")[0]
    exec(script.replace("from keras", "from " + name), names)
    loss = names["model"].test_on_batch(*next(batches()))[0]
    assert loss > keras.backend.epsilon()
    assert len(names["history"]) == 2
    assert (tmp_path / "model.weights.h5").exists() == saves
