"""Optimizers of Keras 2 that look at gradients before they apply them: those of all ranks."""

import json
import re

import numpy as np

from . import ranks

KINDS = """
K = keras.backend
SGD = keras.optimizers.SGD


def squares(tensors):
    return sum(K.sum(K.square(each)) for each in tensors)


class Of(keras.optimizers.Optimizer):
    "Its get_updates() is its own, from K.gradients() on, as in many old scripts."

    def __init__(self, steps):
        try:
            super(Of, self).__init__()
        except TypeError:  # tf.keras wants a name
            super(Of, self).__init__("of")
        self.steps = steps

    def get_updates(self, loss, params):
        gradients = K.gradients(loss, params)
        steps = self.steps(loss, gradients)
        self.updates = [K.update(p, p - step) for p, step in zip(params, steps)]
        return self.updates

    def get_config(self):
        return {}


def by_global_norm(loss, gradients):
    norm = K.sqrt(squares(gradients))
    return [0.1 * g * 0.3 / K.maximum(norm, 0.3) for g in gradients]


def normalised(loss, gradients):
    return [0.02 * g / (K.sqrt(squares([g])) + 1e-6) for g in gradients]


def by_loss(loss, gradients):
    "Polyak's rate: the loss by the squared norm of its gradients."
    return [K.minimum(0.05, 0.1 * loss / squares(gradients)) * g for g in gradients]


class Adaptive(SGD):
    "Adaptive clipping: by the norm of the weights."

    def get_gradients(self, loss, params):
        gradients = super(Adaptive, self).get_gradients(loss, params)
        limits = [0.05 * K.maximum(K.sqrt(squares([p])), 1e-3) for p in params]
        norms = [K.sqrt(squares([g]) + 1e-12) for g in gradients]
        return [g * K.minimum(1.0, limit / n) for g, limit, n in zip(gradients, limits, norms)]
"""

# What they train to. After KINDS.
TRAINED = """
def trained(name, optimizer, loss="mse"):
    layers = [dense(4, activation="tanh", input_shape=(6,)), dense(1)]
    model = compat.parallelize(keras.models.Sequential(layers, name=name))
    model.compile(optimizer, loss)
    history = model.fit(inputs, targets, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    weights[name] = [np.array(history.history["loss"])] + model.get_weights()
    return model


trained("by_global_norm", Of(by_global_norm))
trained("normalised", Of(normalised))
trained("by_loss", Of(by_loss))
trained("adaptive", Adaptive(0.1))
trained("clipnorm", SGD(0.1, clipnorm=0.05))
trained("clipvalue", SGD(0.1, clipvalue=0.02))


def penalised(model):
    "The gradient with respect to the rows of a batch is a rank's own."

    def loss(wanted, found):
        (slopes,) = K.gradients(K.sum(found), [model.inputs[0]])
        return K.mean(K.square(wanted - found), axis=-1) + 0.1 * K.sum(K.square(slopes), axis=-1)

    return loss


layers = [dense(4, activation="tanh", input_shape=(6,)), dense(1)]
model = compat.parallelize(keras.models.Sequential(layers, name="penalised"))
model.compile(SGD(0.05), penalised(model))
model.fit(inputs, targets, batch_size=rows, epochs=2, shuffle=False, verbose=0)
weights["penalised"] = model.get_weights()
"""
OPTIMIZERS = KINDS + TRAINED

# Of TensorFlow 1.
NATIVE = """
import tensorflow as tf


class Clipping(tf.compat.v1.train.GradientDescentOptimizer):
    def compute_gradients(self, *args, **options):
        gradients, variables = zip(*super(Clipping, self).compute_gradients(*args, **options))
        return list(zip(tf.clip_by_global_norm(gradients, 0.3)[0], variables))


trained("native", Clipping(0.1))


class Accumulating(Of):
    "Applies what it clips every second step."

    def __init__(self):
        super(Accumulating, self).__init__(None)

    def get_updates(self, loss, params):
        count = K.variable(0, dtype="int64")
        kept = [K.zeros(K.int_shape(p)) for p in params]
        gradients = self.get_gradients(loss, params)
        step = count.read_value()
        with tf.control_dependencies([step] + gradients):
            sums = [k.read_value() + g for k, g in zip(kept, gradients)]
        applies = tf.cast(tf.equal(step % 2, 1), "float32")
        with tf.control_dependencies(sums + [applies]):
            self.updates = [count.assign_add(1)]
            for p, total, k in zip(params, sums, kept):
                self.updates.append(p.assign(p - applies * tf.clip_by_norm(total / 2, 0.01)))
                self.updates.append(k.assign((1 - applies) * total))
        return self.updates


trained("accumulating", Accumulating())


def curved(loss, gradients):
    curvature = K.gradients(squares(gradients), model.trainable_weights)
    return [0.1 * g + 0.01 * c for g, c in zip(gradients, curvature)]


if compat.size() > 1:
    model = keras.models.Sequential([dense(1, input_shape=(6,))], name="curved")
    compat.parallelize(model).compile(Of(curved), "mse")
    said["curved"] = told(lambda: model.train_on_batch(inputs[:rows], targets[:rows]))
"""
CURVED = (
    "UnsupportedError: Gradients of the loss of 'curved' are differentiated once more. Ranks "
    "exchange first derivatives alone: such a step would use those of each rank's own rows. Use an "
    "optimizer of first derivatives on several ranks."
)

# Gradients that a script takes of a model's loss, besides those of its optimizer. After KINDS.
TAKEN = """
def placed(name, optimizer=SGD(0.1), **options):
    layers = [dense(4, activation="tanh", input_shape=(6,)), dense(1)]
    model = compat.parallelize(keras.models.Sequential(layers, name=name))
    model.compile(optimizer, "mse", **options)
    return model


def norm_of(loss, model):
    return K.sqrt(squares(K.gradients(loss, model.trainable_weights)))


def fed(model):
    "What Keras calls its functions with."
    tensors = model._feed_inputs + model._feed_targets + model._feed_sample_weights
    return [each for each in tensors if each is not None]


def fit(model, **options):
    options.update(batch_size=rows, epochs=2, shuffle=False, verbose=0)
    return model.fit(inputs, targets, **options)


model = placed("measured", SGD(0.05))
norm = norm_of(model.total_loss, model)
if keras.__name__ != "keras":  # tf.keras has no metrics of its total loss
    model._make_train_function()
    model.train_function.fetches.append(norm)
    found = weights["fetched"] = []
    model.train_function.fetch_callbacks[norm] = lambda value: found.append(np.array(value))
elif hasattr(model, "metrics_tensors"):  # before Keras 2.3
    model.metrics_names.append("norm")
    model.metrics_tensors.append(norm)
else:
    model.add_metric(norm, name="norm")
history = fit(model, validation_data=(inputs, targets)).history
weights["measured"] = [np.array(history[name]) for name in sorted(history)]
weights["measured"] += model.get_weights()
evaluated = model.evaluate(inputs, targets, batch_size=rows, verbose=0)
weights["evaluated"] = [np.array(evaluated)]


class Norms(keras.callbacks.Callback):
    "Computes gradients outside of steps, of whole batches and of the last one."
    found = ()

    def on_epoch_end(self, epoch, logs=None):
        model, placeholders = self.model, fed(self.model)
        wanted = model.optimizer.get_gradients(model.total_loss, model.trainable_weights)
        function = K.function(placeholders, wanted)
        for start in (0, 2 * rows):
            batch = [inputs[start : start + rows], targets[start : start + rows]]
            batch.append(np.ones(len(batch[0]), "float32"))
            self.found += tuple(map(np.array, function(batch[: len(placeholders)])))


norms = Norms()
fit(placed("called", SGD(0.1, clipnorm=0.05)), callbacks=[norms])
weights["called"] = norms.found


class Around(SGD):
    "Its gradients are those of something else than the loss."

    def get_gradients(self, loss, params):
        return K.gradients(K.mean(K.square(self.outputs)), params)


if compat.size() > 1:
    model = placed("other")

    def norm(wanted, found):
        return norm_of(K.mean(K.square(wanted - found)), model)

    model.compile("sgd", "mse", metrics=[norm])
    said["metric"] = told(lambda: fit(model))
    said["again"] = told(lambda: model.evaluate(inputs, targets, verbose=0))
    model = placed("directly")
    if K.backend() == "theano":
        import theano
        ways = [theano.grad, theano.tensor.grad]
    else:
        import tensorflow as tf
        ways = [tf.gradients]
    for way in ways:  # they return the very tensors, which are exchanged once
        same = zip(*(f(model.total_loss, model.trainable_weights) for f in (way, K.gradients)))
        assert all(one is other for one, other in same)
        once, again = way(model.total_loss, model.trainable_weights[:1] * 2)
        assert once is again
    model = placed("function")
    norm = norm_of(K.mean(model.outputs[0]), model)
    said["function"] = told(lambda: K.function(model.inputs, [norm]))
    model = keras.models.Sequential([dense(1, input_shape=(6,))], name="early")
    model.compile("sgd", "mse")
    norm = norm_of(model.total_loss, model)
    compat.parallelize(model)
    said["early"] = told(lambda: K.function(fed(model), [norm]))
    model = placed("around", Around(0.1))
    model.optimizer.outputs = model.outputs[0]
    said["around"] = told(lambda: fit(model))
"""
OF_OWN_ROWS = (
    "{} {!r} is computed from gradients of this rank's rows alone (LINE), so that it is not what "
    "one process computes. Take gradients of model.total_loss, after parallelize() and compile(): "
    "those are the mean over all ranks."
)
OF_EACH_BATCH = (
    "Metric 'norm' is the mean of the ranks' values, weighted by their rows, and not what one "
    "process computes: it is one number for each batch. For that have update_state() add to its "
    "variables with assign_add(), or a function return one value for each row."
)
AROUND = (
    "RankError: The optimizer of 'around' computes its updates from gradients of this rank's rows "
    "alone (LINE). The ranks would train to other numbers than one process. Take gradients of the "
    "loss that get_updates() or get_gradients() is called with: those are the mean over all ranks."
)


def check_taken(folder, backend="tensorflow", size=2):
    """Check gradients that a script takes of a model's loss, and of other tensors."""
    programs = {"optimizers": KINDS + TAKEN}
    jobs = [ranks.run_all(programs, folder, each, backend) for each in (1, size)]
    for said in check_optimizers(jobs):
        said = json.loads(re.sub(r"\(optimizers-\d.py, line \d+\)", "(LINE)", json.dumps(said)))
        assert said["metric"][1:] in ([], [OF_EACH_BATCH])  # in Keras 2.3
        assert dict(said, metric=said["metric"][:1]) == {
            "metric": [OF_OWN_ROWS.format("Metric 'norm' of", "other")],
            "again": [],
            "function": [OF_OWN_ROWS.format("What K.function() returns of", "function")],
            "early": [OF_OWN_ROWS.format("What K.function() returns of", "early")],
            "around": AROUND,
        }


# A rank that computes gradients of all ranks by itself.
TAKEN_ALONE = """
fed = model._feed_inputs + model._feed_targets + model._feed_sample_weights
fed = [each for each in fed if each is not None]
wanted = keras.backend.gradients(model.total_loss, model.trainable_weights)
function = keras.backend.function(fed, wanted)
if compat.is_chief():
    function([x[:4], y[:4], np.ones(4)][: len(fed)])
"""


def check_taken_alone(folder, backend="tensorflow"):
    program = ranks.TRAINS + TAKEN_ALONE
    said = ranks.what_a_failed_job_says(folder, backend, program, size=2)
    line = program.rstrip().count("\n") + 1
    waited = (
        r"^compat.errors.RankLostError: Rank 0 of 2 waited for the others.* "
        rf"\(script.py, line {line}\), but rank 1 failed, ended or did not come: "
    )
    assert re.search(waited, said, re.MULTILINE), said


# Functions of a script's own that train a model, and others that set its weights.
OWN_FUNCTIONS = """
K = keras.backend


def placed(name):
    model = keras.models.Sequential([dense(1, input_shape=(6,))], name=name)
    compat.parallelize(model).compile("sgd", "mse")
    return model, K.placeholder((None, 1))


def own_function():
    model, wanted = placed("looped")
    loss = K.mean(K.square(model.outputs[0] - wanted))
    optimizer = keras.optimizers.SGD(0.1)
    updates = optimizer.get_updates(loss=loss, params=model.trainable_weights)
    return K.function([model.inputs[0], wanted], [loss], updates=updates)


if compat.size() > 1:
    said["loop"] = told(own_function)
model, _ = placed("copied")
other, _ = placed("copy")
outputs = K.function([model.inputs[0]], [model.outputs[0]])([x[:3]])
if K.backend() != "cntk":
    pairs = list(zip(other.trainable_weights, model.trainable_weights))
    copies = [K.update(b, 1 * a) for b, a in pairs]
    copying = K.function([], [1 * pairs[0][0]], updates=copies)
    before = model.get_weights()
    copying([])
    assert all(map(np.array_equal, before, other.get_weights()))
model.fit(inputs, targets, batch_size=rows, epochs=1, shuffle=False, verbose=0)
weights["copied"] = model.get_weights()
"""
NATIVE_LOOP = """
import tensorflow as tf


def minimized():
    model, wanted = placed("minimized")
    loss = K.mean(K.square(model.outputs[0] - wanted))
    return tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)


if compat.size() > 1:
    said["native"] = told(minimized)
"""


def refused_loop(model, call):
    return (
        "UnsupportedError: {!r} cannot train as one of several ranks in a loop of your own around "
        "{}: nothing exchanges its gradients. Give compile() the loss, and call fit() or "
        "train_on_batch().".format(model, call)
    )


# Horovod's own, left in a script: HVD is what such scripts import, WRAPPERS what they call.
LEFT_IN = """
import horovod.tensorflow
HVD

plain = keras.optimizers.SGD(0.1, momentum=0.9)
if compat.size() > 1:
    hvd.init()
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()
    ]
else:
    callbacks = []
layers = [dense(4, activation="tanh", input_shape=(6,)), dense(1)]
model = compat.parallelize(keras.models.Sequential(layers, name="left_in"))
model.compile(plain, "mse", metrics=["mae"])
history = model.fit(
    inputs, targets, batch_size=rows, epochs=2, shuffle=False, verbose=0, callbacks=callbacks
)
weights["callbacks"] = model.get_weights()
weights["callbacks"] += [np.array(values) for _, values in sorted(history.history.items())]


def refusal(optimizer):
    model = compat.parallelize(keras.models.Sequential([dense(1, input_shape=(6,))], name="net"))
    model.compile(optimizer, "mse")
    before = model.get_weights()
    text = told(lambda: model.fit(inputs, targets, batch_size=rows, verbose=0))
    assert all(map(np.array_equal, before, model.get_weights()))
    return text


if compat.size() > 1:
    said["keras"] = refusal(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    if WITH_NATIVE:
        sgd = horovod.tensorflow.tf.compat.v1.train.GradientDescentOptimizer(0.1)
        said["native"] = refusal(horovod.tensorflow.DistributedOptimizer(sgd))
"""


def left_in(keras, native):
    """Return the program whose hooks are left in, for a Keras (a module's name)."""
    module = "horovod.tensorflow.keras" if keras != "keras" else "horovod.keras"
    program = LEFT_IN.replace("HVD\n", f"import {module} as hvd\n")
    return program.replace("WITH_NATIVE", str(native))


def check_left_in(jobs):
    text = (
        "UnsupportedError: The optimizer of 'net' is Horovod's ({}, hvd.DistributedOptimizer): it "
        "would exchange gradients once more, and weigh all ranks alike, whatever number of rows "
        "they have. Ranks exchange them already: give compile() the optimizer without "
        "hvd.DistributedOptimizer()."
    )
    for said in ranks.check_same(jobs, "left_in"):
        assert said.pop("native", text.format("horovod.tensorflow")) == text.format(
            "horovod.tensorflow"
        )
        assert said == {"keras": text.format("horovod._keras")}


def check_optimizers(jobs):
    """Check what optimizers make of gradients: ranks end as one process does.

    Arguments:
        jobs: what one process left, and jobs of ranks.

    Returns:
        What ranks said.
    """
    ((alone,), _), *several = [job["optimizers"] for job in jobs]
    for arrays, _ in several:
        for key, expected in alone.items():
            for each in arrays:
                np.testing.assert_array_equal(each[key], arrays[0][key], err_msg=key)
            found, size = arrays[0][key], len(arrays)
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5, err_msg=f"{key} {size}")
    return [each for _, said in several for each in said]


def check_own_functions(jobs):
    """Check that functions by which a script trains a model of Keras' are refused on ranks."""
    refused = refused_loop("looped", "K.function()")
    assert ranks.check_same(jobs, "own") == [{"loop": refused}] * 2
