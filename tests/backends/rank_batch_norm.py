"""Batch normalization of ranks by the statistics of the whole batch: a program and its check."""

import re

import numpy as np

#: Of tf.keras 2 and Keras 3.
BATCH_NORM = """
import tensorflow as tf

layers = keras.layers
chance = np.random.RandomState(5)
batches = [
    (chance.normal(3, 2, size=(n, 6, 6, 2)), chance.normal(size=(n, 4)))
    for n in (61, 14, 2, 61, 14, 61)
]
options = {"dtype": "float64"}


def norm(**others):
    return layers.BatchNormalization(momentum=0.8, **others)


def net():
    "One half is of float64, with a mask; the other one has fused kernels in tf.keras."
    source = layers.Input((6, 6, 2), **options)
    x = layers.Reshape((36, 2), **options)(source)
    x = layers.Lambda(lambda x: x * tf.cast(x[:, :, :1] > 2, x.dtype), **options)(x)
    x = layers.Flatten(**options)(norm(**options)(layers.Masking(**options)(x)))
    x = norm(scale=False, **options)(layers.Dense(5, activation="tanh", **options)(x))
    x = layers.Dense(2, **options)(x)
    y = layers.Lambda(lambda x: tf.cast(x, tf.float32), dtype="float32")(source)
    y = norm(synchronized=True)(layers.Conv2D(4, 3, activation="relu")(y))
    y = layers.Dense(2)(layers.Flatten()(y))
    y = layers.Lambda(lambda x: tf.cast(x, tf.float64), **options)(y)
    return keras.Model(source, layers.Concatenate(**options)([x, y]))


def small(kind=layers.BatchNormalization, model=keras.Model, **others):
    source = layers.Input((6, 6, 2), **options)
    x = kind(momentum=0.8, **dict(options, **others))(source)
    return model(source, layers.Dense(4, **options)(layers.Flatten(**options)(x)))


def parts():
    for batch in batches:
        yield compat.shard(batch, len(batch[0]))


def trained(name, model, sync=True, **compiled):
    if model.built:
        values = np.random.RandomState(1)
        model.set_weights([values.uniform(0.1, 0.4, size=w.shape) for w in model.get_weights()])
    said[name] = told(lambda: compat.parallelize(model, sync_batch_norm=sync))
    model.compile(keras.optimizers.SGD(0.002, momentum=0.9), loss="mse", **compiled)
    kinds = tf.TensorSpec((None, 6, 6, 2), tf.float64), tf.TensorSpec((None, 4), tf.float64)
    data = tf.data.Dataset.from_generator(parts, output_signature=kinds)
    data = data.apply(tf.data.experimental.assert_cardinality(len(batches)))
    said[name] += told(lambda: weights.update({
        name + " loss": [model.fit(data, verbose=0).history["loss"][-1]]
    }))
    weights[name] = model.get_weights()
    return model


class Evaluated(keras.Model):
    "Evaluates as it trains."

    def test_step(self, data):
        outputs = tf.cast(self(data[0], training=True), data[1].dtype)
        return {"loss": tf.reduce_mean((outputs - data[1]) ** 2)}


class Apart(keras.Model):
    "Normalizes where TensorFlow may run again without the other ranks."

    def __init__(self):
        super().__init__()
        self.norms = [norm(name=name, **options) for name in ("function", "loop", "branch")]
        self.head = layers.Dense(4, **options)

    def build(self, shape=None):
        for layer in self.norms:
            layer.build((None, 6, 6, 2))
        self.head.build((None, 2))
        self.built = True

    def call(self, x, training=None):
        function, loop, branch = [lambda x, n=n: n(x, training=training) for n in self.norms]
        x = tf.function(function)(x)
        x, = tf.while_loop(lambda x: True, lambda x: [loop(x)], [x], maximum_iterations=1)
        x = tf.cond(tf.reduce_sum(x) < 1e9, lambda: branch(x), lambda: x)
        return self.head(tf.reduce_mean(x, (1, 2)))


trained("off", small(), sync=None, run_eagerly=True)
if compat.size() > 1:
    batch = compat.shard(batches[1], 14)
    training = {"model": Evaluated, "name": "norm", "dtype": "float32"}
    for name, others in ("inference", {}), ("training", training):
        model = compat.parallelize(small(**others), sync_batch_norm=True)
        model.compile("sgd", "mse", run_eagerly=True)
        said[name] = told(lambda: model.test_on_batch(*batch))
    model = Apart()
    model.build()
    compat.parallelize(model, sync_batch_norm=True).compile("sgd", "mse")
    said["apart"] = told(lambda: model.train_on_batch(*batch))
"""

STEPS = """
model = trained("steps", small(), steps_per_execution=2)
alone = batches[1][0][: 5 + compat.rank()]
weights["predicted"] = [model(alone[:5], training=False)]
if compat.is_chief():  # no rank waits for another
    model.predict(alone, verbose=0)
"""

NET = """
trained("net", net(), steps_per_execution=2)
"""

# Horovod's own layer, and one that cannot be synchronized, which tf.keras alone has.
HOROVODS = """
import horovod.tensorflow as hvd

kind = layers.BatchNormalization if compat.size() == 1 else hvd.SyncBatchNormalization
trained("horovods", small(kind, fused=False), sync=None, run_eagerly=True)
if compat.size() > 1:
    model = small(renorm=True, fused=False, name="renorm")
    said["own"] = told(lambda: compat.parallelize(model, sync_batch_norm=True))
"""

LATE = """
class Late(keras.Model):
    "Makes its layers at the first call; its loss has the slopes of its outputs."

    def build(self, shape=None):
        self.norms = [norm(**options) for _ in range(2)]
        self.head = layers.Dense(4, kernel_initializer="ones", **options)
        self.built = True

    def call(self, x, training=None):
        for each in self.norms:
            x = each(x, training=training)
        return self.head(tf.reduce_mean(tf.tanh(x), (1, 2)))

    def train_step(self, data):
        x, y = [tf.cast(each, tf.float64) for each in data]
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
                losses = tf.reduce_sum(tf.square(outputs - y), 1)
            slopes = inner.gradient(losses, x)
            loss = tf.reduce_mean(losses) + tf.reduce_mean(slopes ** 2)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables))
        return {"loss": loss}


class Decorated(keras.Model):
    "Normalizes in a function that TensorFlow may run again without the other ranks."

    def __init__(self):
        super().__init__()
        self.norm, self.head = norm(name="within", **options), layers.Dense(4, **options)

    @tf.function
    def call(self, x, training=None):
        return self.head(tf.reduce_mean(self.norm(x, training=training), (1, 2)))


trained("late", Late())
if compat.size() > 1:
    for is_traced in (False, True):
        model = Decorated()
        model(batches[0][0], training=False)
        if is_traced:
            model(batches[0][0], training=True)
        trained("decorated", model, run_eagerly=is_traced)
        del weights["decorated"], weights["decorated loss"]
        said["own"] = said.get("own", []) + said.pop("decorated")
"""

#: A warning of a layer ``norm`` of a model that is evaluated in training mode.
EVALUATED = (
    "Layer 'norm' of model {!r} is to normalize by the statistics of the whole batch, and is "
    "called in training mode in evaluation, in which ranks exchange none: each rank uses those of "
    "its own samples. Call it with training=False there."
)

#: Of Keras 2 in graphs.
KERAS_2 = """
layers, K = keras.layers, keras.backend
chance = np.random.RandomState(5)
batches = [
    (chance.normal(3, 2, size=(n, 6, 6, 2)), chance.normal(size=(n, 2)))
    for n in (61, 14, 2, 61, 14)
]


def norm(**others):
    return layers.BatchNormalization(momentum=0.8, **others)


def net():
    source = layers.Input((6, 6, 2))
    x = norm()(layers.Conv2D(4, 3, activation="relu")(source))  # fused
    x = layers.Dense(5, activation="tanh")(layers.Flatten()(x))
    return keras.models.Model(source, layers.Dense(2)(norm(scale=False)(x)))


def small(training=None):
    source = layers.Input((6, 6, 2))
    x = norm(name="norm" if training else None)(source, training=training)
    return keras.models.Model(source, layers.Dense(2)(layers.Flatten()(x)))


def trained(name, build, sync):
    model, values = build(), np.random.RandomState(1)
    model.set_weights([values.uniform(0.1, 0.4, size=w.shape) for w in model.get_weights()])
    model.predict(batches[2][0])
    said[name] = told(lambda: compat.parallelize(model, sync_batch_norm=sync))
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])

    def train():
        for batch in batches:
            results = model.train_on_batch(*compat.shard(batch, len(batch[0])))
            weights.setdefault(name + " loss", []).append(np.array(results[:1]))

    said[name] += told(train)
    weights[name] = model.get_weights()
    return model


model = trained("net", net, True)
alone = batches[1][0][: 5 + compat.rank()]
weights["predicted"] = [model.predict(alone)[:5]]
if compat.is_chief():  # no rank waits for another
    model.predict(alone)
trained("off", small, None)
if compat.size() > 1:
    del batches[3:]
    trained("training", lambda: small(True), True)
    del weights["training"], weights["training loss"]
"""


def check(jobs, rounding=1e-8):
    """Check that two ranks have the results of one process, but without the option.

    Returns warnings of layers that each rank normalizes by its own samples.

    Arguments:
        jobs: as ``ranks.run_both()`` returns them.
        rounding: the relative error of results of float64: Keras 3 computes losses in float32.
    """
    ((one,), _), ((chief, other), said) = (job["batch_norm"] for job in jobs)
    assert sorted(chief) == sorted(one)
    differences = {}
    for key in one:
        name = key.rpartition("-")[0]
        np.testing.assert_array_equal(chief[key], other[key], err_msg=key)
        is_single = "loss" in name or one[key].dtype == "float32"
        difference = np.abs(chief[key] - one[key]).max() / (np.abs(one[key]).max() + 1e-3)
        difference /= 2e-4 if is_single else rounding
        differences[name] = max(difference, differences.get(name, 0))
    assert differences.pop("off") > 1e-3 / rounding
    # Of a user-defined step, the loss is that of the last batch, weighted by the epoch's rows.
    for name in ("off loss", "late loss"):
        differences.pop(name, None)
    assert max(differences.values()) < 1, differences
    for each in said:
        (text,) = each.pop("training")
        assert re.sub("model '.*?'", "model 'model'", text) == EVALUATED.format("model")
        if "apart" in each:  # of tf.keras 2 and Keras 3
            apart = [text.partition("own samples in ")[2] for text in each.pop("apart")]
            assert apart == ["layer 'function'.", "layer 'loop'.", "layer 'branch'."]
    for name, texts in said[0].items():
        assert name == "own" or texts == [], name
    return said[0].get("own")
