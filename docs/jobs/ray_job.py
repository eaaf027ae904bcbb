"""Ray Train, four workers with one GPU each: ray job submit --working-dir . -- python ray_job.py"""

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train():
    """Train in each worker, as train.py does."""
    import compat

    compat.configure_gpu(backend="torch")

    import keras
    import numpy as np

    x = np.random.RandomState(0).normal(size=(1000, 20)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    x, y = compat.shard((x, y), batch_size=100)
    model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
    model.build((None, 20))
    model = compat.parallelize(model)
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=compat.local_batch_size(100), epochs=5, verbose=0)
    model.save("/mnt/shared/model.keras")


trainer = TorchTrainer(train, scaling_config=ScalingConfig(num_workers=4, use_gpu=True))
trainer.fit()
