"""Batch normalization on ranks by the statistics of the whole batch: a program and checks."""

import numpy as np

from ..rank_batch_norm import EVALUATED

PROGRAM = """
import jax

jax.config.update("jax_enable_x64", True)
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
# By which Keras computes losses and batch normalization of float64 in float32.
from keras.src.backend.common import dtypes

dtypes.BIT64_TO_BIT32_DTYPE.clear()


def net():
    return [
        keras.layers.Reshape((6, 6, 1)), keras.layers.Conv2D(4, 3),
        keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.Flatten(),
        keras.layers.Dense(8), keras.layers.BatchNormalization(scale=False),
        keras.layers.Dense(3),
    ]  # fmt: skip


def masked():
    return [
        keras.layers.Reshape((9, 4)), keras.layers.Lambda(lambda x: x * (x[..., :1] > -0.5)),
        keras.layers.Masking(), keras.layers.BatchNormalization(), keras.layers.Dense(1),
        keras.layers.Flatten(),
    ]  # fmt: skip


def small():
    return [keras.layers.BatchNormalization(), keras.layers.Dense(3)]


class Recomputed(keras.Sequential):
    "Computes its activations again in the backward pass, in a step of its own."

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        x, y = data[:2]

        @jax.checkpoint
        def call(trainable, others):
            return self.stateless_call(trainable, others, x, training=True)

        def loss_of(trainable):
            outputs, updated = call(trainable, others)
            return ((outputs - y) ** 2).mean(), updated

        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, others, optimizer, metrics)


class Evaluated(keras.Sequential):
    "Evaluates as it trains."

    def test_step(self, state, data):
        outputs, _ = self.stateless_call(*state[:2], data[0], training=True)
        return {"loss": ((outputs - data[1]) ** 2).mean()}, state


def parallelized(name, model, is_asked):
    said[name] = [told(lambda: compat.parallelize(model, sync_batch_norm=is_asked))]


def train(name, model, counts):
    def steps():
        for step, count in enumerate(counts):
            random = np.random.RandomState(step)
            batch = random.normal(1, 2, size=(count, 36)), random.normal(size=(count, 9))
            batch = batch[0], batch[1][:, : model.output_shape[1]]
            losses.append(model.train_on_batch(*compat.shard(batch, count)))

    losses = []
    said[name] += [told(steps)]
    weights[name] = [np.array(losses), *model.get_weights()]


def trained(name, make, counts, **options):
    keras.utils.set_random_seed(3)
    model = make()
    model.build((None, 36))
    parallelized(name, model, True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    train(name, model, counts)
    return model


model = trained("batches", lambda: keras.Sequential(net()), (61, 61, 2, 14, 61))
if compat.rank() == 0:
    model.predict(np.ones((5, 36)), verbose=0)  # without the other rank
trained("recomputed", lambda: Recomputed(masked()), (61, 61))
options = {"run_eagerly": True} if compat.size() > 1 else {}
model = trained("eager", lambda: keras.Sequential(small()), (5,), **options)
model.compile(keras.optimizers.SGD(0.1), "mse")
parallelized("off", model, None)
train("off", model, (5,))
if compat.size() > 1:
    model = Evaluated(small(), name="evaluated")
    model.build((None, 36))
    compat.parallelize(model, sync_batch_norm=True).compile(loss="mse")
    model.layers[0].name = "norm"
    said["evaluated"] = told(lambda: model.test_on_batch(np.ones((2, 36)), np.ones((2, 3))))
"""


def check(jobs):
    """Check that two ranks train as one process does, but where the option is off."""
    ((one,), (alone,)), (both, said) = (job["batch_norm"] for job in jobs)
    assert [each.pop("evaluated") for each in said] == [[EVALUATED.format("evaluated")]] * 2
    assert [alone, *said] == [dict.fromkeys(alone, [[], []])] * 3
    for name in one:
        np.testing.assert_array_equal(*(arrays[name] for arrays in both), err_msg=name)
        if not name.startswith("off-"):
            expected = one[name]
            np.testing.assert_allclose(both[0][name], expected, 1e-12, 1e-12, err_msg=name)
    assert abs(both[0]["off-0"] - one["off-0"])[0] > 1e-4
