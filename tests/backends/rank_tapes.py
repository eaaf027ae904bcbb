"""Ranks of TensorFlow 2: gradients that a step uses before its optimizer applies them.

What a step does with them is the same on both engines, which only add them up. So each engine runs
one half of the steps with tf.keras and the other one with Keras 3: each step runs on each engine,
and with each Keras.
"""

import os
import re

import numpy as np

from . import ranks

MODELS = """
import tensorflow as tf

KERAS3 = hasattr(keras, "ops")


class Model(keras.Model):
    def error(self, data, training=True):
        return tf.reduce_mean(tf.square(self(data[0], training=training) - data[1]))

    def train_step(self, data):
        self.data = data
        with tf.GradientTape() as tape:
            loss = self.error(data)
        gradients = tape.gradient(loss, self.trainable_variables)
        used = self.used(gradients, loss)
        self.optimizer.apply_gradients(zip(used, self.trainable_variables))
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients)}

    def used(self, gradients, loss):
        return gradients


class Clipped(Model):
    def used(self, gradients, loss):
        return tf.clip_by_global_norm(gradients, 0.3)[0]


class Adaptive(Model):
    def used(self, gradients, loss):
        norms = [0.01 * tf.norm(variable) for variable in self.trainable_variables]
        return [tf.clip_by_norm(*pair) for pair in zip(gradients, norms)]


class Sharp(Model):
    "Sharpness-aware: a second gradient at the weights to which the first one leads."

    def used(self, gradients, loss):
        norm = tf.linalg.global_norm(gradients)
        moves = [0.5 * gradient / norm for gradient in gradients]
        for variable, move in zip(self.trainable_variables, moves):
            variable.assign_add(move)
        with tf.GradientTape() as tape:
            loss = self.error(self.data)
        result = tape.gradient(loss, self.trainable_variables)
        for variable, move in zip(self.trainable_variables, moves):
            variable.assign_sub(move)
        return result


class Signs(Model):
    "Applies gradients by no optimizer."

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.error(data)
        named = {str(place): v for place, v in enumerate(self.trainable_variables)}
        gradients = tape.gradient(loss, named)
        for name, variable in named.items():
            variable.assign_sub(0.01 * tf.sign(gradients[name]))
        return {"loss": loss, "norm": tf.linalg.global_norm(list(gradients.values()))}


class Tracked(Model):
    "Sums its loss up in a metric that is the model's attribute."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracked = keras.metrics.Mean(name="norm")

    @property
    def metrics(self):
        return [self.tracked]

    def train_step(self, data):
        rows = tf.cast(tf.shape(data[0])[0], "float32")
        self.tracked.update_state(self.error(data), sample_weight=rows)
        Model.train_step(self, data)
        return {"norm": self.tracked.result()}


class PerRow(Model):
    "The gradient of a vector is that of its sum."

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            losses = tf.reduce_mean(tf.square(self(data[0], training=True) - data[1]), axis=1)
            mean = tf.reduce_mean(losses)
        gradients = tape.gradient([losses, mean], self.trainable_variables)
        gradients = [0.01 * gradient for gradient in gradients]
        means = tape.gradient([mean], self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        norms = [tf.linalg.global_norm(each) for each in (gradients, means)]
        return {"loss": mean, "norm": sum(norms)}


class Penalty(Model):
    "By the inputs' gradients, which each sample has of its own."

    def error(self, data, training=True):
        with tf.GradientTape() as tape:
            tape.watch(data[0])
            outputs = self(data[0], training=training)
        slopes = tape.gradient(outputs, data[0])
        loss = tf.reduce_mean(tf.square(outputs - data[1]))
        return loss + tf.reduce_mean(tf.square(tf.norm(slopes, axis=1) - 1))

    used = Clipped.used


class Accumulated(Model):
    "Applies the sum of two steps' gradients in every second one."

    def build_sums(self):
        with tf.init_scope():
            self.step = tf.Variable(0, trainable=False)
            self.sums = [
                tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_variables
            ]

    def used(self, gradients, loss):
        self.step.assign_add(1)
        for total, gradient in zip(self.sums, gradients):
            total.assign_add(gradient)
        due = tf.cast(self.step % 2 == 0, tf.float32)
        sums = [total * due for total in self.sums]
        clipped = tf.clip_by_global_norm(sums, 0.3)[0]
        for total in self.sums:
            total.assign(total * (1 - due))
        return clipped


class Tokens(Model):
    "Gradients of embeddings are slices."

    used = Clipped.used


class Counted(Model):
    "Has a variable that the step sets, to a decaying sum over rows."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False)

    def used(self, gradients, loss):
        self.seen.assign(0.9 * self.seen + tf.reduce_sum(self.data[1]))
        return gradients


class RowByRow(Model):
    "Clips the gradient of each row: in the function that is mapped it is the rank's own."

    def train_step(self, data):
        def clipped(row):
            with tf.GradientTape() as tape:
                loss = self.error([each[None] for each in row])
            found = tape.gradient(loss, self.trainable_variables)
            return tf.clip_by_global_norm(found, 0.3)[0]

        used = [tf.reduce_mean(each, 0) for each in tf.vectorized_map(clipped, data)]
        self.optimizer.apply_gradients(zip(used, self.trainable_variables))
        return {"norm": tf.constant(1.0)}


class TwoTapes(Model):
    "Two tapes and two optimizers; the second one looks at gradients again."

    def train_step(self, data):
        first, second = self.trainable_variables[:2], self.trainable_variables[2:]
        with tf.GradientTape() as one, tf.GradientTape() as other:
            loss = self.error(data)
        gradients = tf.clip_by_global_norm(one.gradient(loss, first), 0.1)[0]
        self.optimizer.apply_gradients(zip(gradients, first))
        gradients = tf.clip_by_global_norm(other.gradient(loss, second), 0.2)[0]
        self.second.apply_gradients(zip(gradients, second))
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients)}


class Inside(Model):
    "Within a tape's block gradients stay the rank's own; their sum is right all the same."

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            loss = self.error(data)
            gradients = tape.gradient(loss, self.trainable_variables)
            used = self.used(gradients, loss)
        self.optimizer.apply_gradients(zip(used, self.trainable_variables))
        return {"loss": loss, "norm": tf.constant(1.0)}

    def used(self, gradients, loss):
        return [2 * gradient for gradient in gradients]


class Normalizing(keras.optimizers.SGD):
    def compute_gradients(self, loss, var_list, tape=None):
        gradients, variables = zip(*super().compute_gradients(loss, var_list, tape))
        return list(zip(tf.clip_by_global_norm(gradients, 0.3)[0], variables))


if not KERAS3:
    legacy = getattr(keras.optimizers, "legacy", keras.optimizers).SGD

    class OldNormalizing(legacy):
        def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
            pairs = super()._compute_gradients(loss, var_list, grad_loss, tape)
            gradients, variables = zip(*pairs)
            return list(zip(tf.clip_by_global_norm(gradients, 0.3)[0], variables))


def train(kind, optimizer, name, x=x, first=None, **options):
    source = keras.Input((x.shape[1],))
    found = first(source) if first else source
    found = dense(1)(dense(5, activation="tanh")(found))
    model = compat.parallelize(kind(source, found, name=name))
    if hasattr(model, "build_sums"):
        model.build_sums()
    model.second = keras.optimizers.SGD(0.1)
    model.compile(optimizer, "mse", **options)
    data = compat.shard((x, y), BATCH)
    history = {}
    warned = told(
        lambda: history.update(
            model.fit(*data, batch_size=rows, epochs=2, shuffle=False, verbose=0).history
        )
    )
    assert warned == [], warned
    said[name] = list(map(float, history.get("norm", [])))
    model.reset_metrics()  # which are a rank's own
    weights[name] = model.get_weights()


def embedded(source):
    return keras.layers.Flatten()(keras.layers.Embedding(3, 2, "ones")(source))



compat.parallelize(lambda: keras.Sequential([dense(1, input_shape=(6,))]))
"""

# Each of these steps trains to the numbers of one process.
STEPS = """
SGD = keras.optimizers.SGD
kinds = [Clipped, Adaptive, Sharp, Signs, Tracked, PerRow, Penalty, Accumulated, Counted]
kinds += [RowByRow, TwoTapes, Inside]
trials = [(kind, SGD(0.1, momentum=0.9), kind.__name__, {}) for kind in kinds]
trials.append((Clipped, SGD(0.1), "Eager", {"run_eagerly": True}))
trials.append((Sharp, SGD(0.1), "EagerSharp", {"run_eagerly": True}))
trials.append((Tokens, SGD(0.1), "Tokens", {"x": abs(x) % 3, "first": embedded}))
if not KERAS3:
    if hasattr(SGD, "compute_gradients"):
        trials.append((keras.Model, Normalizing(0.1), "Normalizing", {}))
    trials.append((keras.Model, OldNormalizing(0.1), "OldNormalizing", {}))
for kind, optimizer, name, options in trials[HALF]:
    train(kind, optimizer, name, **options)
"""

# Horovod's own tape, left in a script: of ranks it exchanges nothing more.
HOROVODS_TAPE = (
    MODELS
    + """
import horovod.tensorflow as hvd

hvd.init()
called = []


class Distributed(Model):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.error(data)
        tape = hvd.DistributedGradientTape(tape)
        exchange = tape._allreduce_grads
        tape._allreduce_grads = lambda *given: called.append(given) or exchange(*given)
        gradients = tf.clip_by_global_norm(
            tape.gradient(loss, self.trainable_variables), 0.3
        )[0]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"norm": tf.linalg.global_norm(gradients)}


train(Distributed, keras.optimizers.SGD(0.1), "Distributed")
assert bool(called) == (compat.size() == 1)
"""
)


UNPROVEN_STEPS = """
class ClippedInside(Inside):
    used = Clipped.used


class Looped(Model):
    def train_step(self, data):
        def clipped(step, *_):
            with tf.GradientTape() as tape:
                loss = self.error(data)
            found = tape.gradient(loss, self.trainable_variables)
            return [step + 1, *tf.clip_by_global_norm(found, 0.3)[0]]

        begin = [0, *map(tf.zeros_like, self.trainable_variables)]
        _, *gradients = tf.while_loop(lambda step, *_: step < 1, clipped, begin)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"norm": tf.constant(1.0)}


class OfFour(Inside):
    def used(self, gradients, loss):
        rows = tf.shape(self.data[0])[0]
        with tf.control_dependencies([tf.debugging.assert_equal(rows, 4, "four rows")]):
            return tf.nest.map_structure(tf.identity, gradients)

    def train_step(self, data):
        self.data = data
        return super().train_step(data)


class Random(Inside):
    "What differs from one time to the next cannot be compared."

    def used(self, gradients, loss):
        return [gradient + tf.random.normal(gradient.shape) for gradient in gradients]


class Contrastive(Model):
    "Compares the rows of a batch with one another."

    def error(self, data, training=True):
        outputs = self(data[0], training=training)
        return tf.reduce_mean(tf.square(outputs - tf.transpose(outputs)))


class MixedUp(Model):
    "Mixes each row with another one of the batch."

    def error(self, data, training=True):
        x, y = [0.7 * each + 0.3 * tf.reverse(each, [0]) for each in data]
        return super().error((x, y), training)


class Summed(Model):
    def error(self, data, training=True):
        return tf.reduce_sum(tf.square(self(data[0], training=training) - data[1]))


class ComputesLoss(keras.Model):
    "Keras' own step."

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **options):
        return tf.reduce_mean(tf.square(y_pred - tf.transpose(y_pred)))


class RowByRow(Model):
    "Can be tried with no other number of rows."

    def error(self, data, training=True):
        with tf.control_dependencies(
            [tf.debugging.assert_equal(tf.shape(data[0])[0], 4, "four rows")]
        ):
            return super().error(data, training)


class Noisy(Model):
    "What is random cannot be compared."

    def error(self, data, training=True):
        x, y = data
        return super().error((x + tf.random.normal(tf.shape(x)), y), training)


kinds = [ClippedInside, Looped, OfFour, Random, Contrastive, MixedUp, Summed, ComputesLoss]
kinds += [RowByRow, Noisy, Clipped]
for kind in kinds[HALF]:
    source = keras.Input((6,))
    model = compat.parallelize(kind(source, dense(1)(source), name=kind.__name__))
    model.compile("sgd", "mse")
    batch = inputs[:rows], targets[:rows]
    said[kind.__name__] = told(lambda: model.fit(*batch, rows, verbose=0))
"""


def half(number):
    """Return a slice of trials, for the programs: the first or the second of two halves.

    It is of all where COMPAT_TEST_SLOW is set.
    """
    if os.environ.get("COMPAT_TEST_SLOW", "0") != "0":
        return slice(None)
    return slice(number, None, 2)


def steps(number):
    """Return the program of steps that train: a half of them."""
    return "HALF = {}\n{}{}".format(half(number), MODELS, STEPS)


def unproven_steps(number):
    """Return the program of steps that are refused or warned of: a half of them."""
    return "HALF = {}\n{}{}".format(half(number), MODELS, UNPROVEN_STEPS)


def check_steps(alone, *jobs):
    """Check that steps which use gradients in any way train to the results of one process.

    Arguments:
        alone: the arrays and reports of one process.
        *jobs: those of several ranks.
    """
    (one,), (expected,) = alone
    for arrays, said in jobs:
        for rank, norms in zip(arrays, said):
            ranks.check_arrays(one, arrays[0], rank)
            for name, values in expected.items():
                np.testing.assert_allclose(norms[name], values, rtol=1e-4, err_msg=name)


def check_unproven(said, number):
    """Gradients of a rank's own rows that are not used linearly are an error.

    Arguments:
        said: what the ranks said.
        number: that of the half, as ``unproven_steps()`` takes it.
    """
    checks = {
        "ClippedInside": _is_refused,
        "Looped": _is_refused,
        "OfFour": _could_not_be_tried,
        "Random": _is_silent,
        "Contrastive": _mixes_rows,
        "MixedUp": _mixes_rows,
        "Summed": _mixes_rows,
        "ComputesLoss": _mixes_rows,
        "RowByRow": _could_not_be_checked,
        "Noisy": _is_silent,
        "Clipped": _is_silent,
    }
    names = list(checks)[half(number)]
    for one in said:
        assert list(one) == names
        for name in names:
            checks[name](name, one[name])


def _is_silent(name, told):
    assert told == [], name


def _is_refused(name, text):
    places = re.findall(r"[^ (;]+, line \d+", text)
    off = re.search("up to ([^ ]+) from", text).group(1)
    assert len(places) == 2 and float(off) > 0.01
    assert text == UNPROVEN_ERROR.format(name, "; ".join(places), off)


def _could_not_be_tried(name, told):
    (text,) = told
    found = re.search(r"gradients \((.*)\) where.* linearly: (\w+): (.*)\. If", text)
    assert text == UNPROVEN_WARNING.format(name, *found.groups())
    assert "four rows" in found.group(3)


def _mixes_rows(name, told):
    (text,) = told
    place, off = re.search(r"\((.*, line \d+)\) are .* up to ([^ ]+) from", text).groups()
    assert float(off) > 0.01
    assert text == MIXING_WARNING.format(name, place, off)


def _could_not_be_checked(name, told):
    (text,) = told
    place, kind, problem = re.search(r"\((.*)\) could.* batch: (\w+): (.*)\. If", text).groups()
    assert text == UNTRIED_WARNING.format(name, place, kind, problem)
    assert "four rows" in problem and "line " in place


UNPROVEN_ERROR = (
    "RankError: The train_step of {!r} takes gradients ({}) where they are those of this rank's "
    "samples alone, and does not use them linearly (clipping, for example): of a batch of 4 "
    "samples they differ by up to {} from their mean over its halves. The ranks would train to "
    "other numbers than one process. Call tf.GradientTape.gradient() for the model's weights "
    "outside of the blocks of all tapes, and outside of TensorFlow's loops: there it returns the "
    "mean over all ranks."
)
UNPROVEN_WARNING = (
    "The train_step of {!r} takes gradients ({}) where they are those of this rank's samples "
    "alone. It could not be tried whether it uses them linearly: {}: {}. If it clips them, for "
    "example, the ranks train to other numbers than one process."
)
MIXING_WARNING = (
    "The gradients that the training step of {!r} computes ({}) are no mean over the rows of a "
    "batch: those of 4 rows differ by up to {} from the mean over two parts of them. Its loss is "
    "a sum, or compares rows with one another, as contrastive losses and mixup do. Each rank "
    "computes it of its own rows, so that the ranks train to other numbers than one process."
)
UNTRIED_WARNING = (
    "The gradients that the training step of {!r} computes ({}) could not be checked on parts of a "
    "batch: {}: {}. If its loss is a sum, or compares rows with one another, the ranks train to "
    "other numbers than one process."
)
