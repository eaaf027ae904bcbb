"""Ranks of Keras on JAX under torchrun, which has a store of torch's own."""

from ..launchers import Launchers

PROGRAM = """\
import sys
import numpy as np
import compat

configuration = compat.configure_gpu(gpus="cpu")
import keras

keras.utils.set_random_seed(1 + max(compat.rank(), 0))
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
x = np.random.RandomState(0).rand(33, 6).astype("float32")
x, y = compat.shard((x, x.sum(axis=1, keepdims=True)), 10)
compat.parallelize(model)
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, y, batch_size=compat.local_batch_size(10), epochs=2, shuffle=False, verbose=0)
weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
np.save("{}/{}-of-{}".format(sys.argv[1], compat.rank(), compat.size()), weights)
sys.stdout.write("{}\\n".format(configuration.place))
"""


class TestJAXLaunchers(Launchers):
    backend = "jax"
    program = PROGRAM
