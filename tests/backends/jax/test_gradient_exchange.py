"""Gradients that a step of JAX's computes are those of all ranks, before the step uses them."""

import re

import pytest

from compat.testing import slow

from .. import ranks

BEGIN = """
import jax
import jax.numpy as jnp
from jax import grad


def clip(gradients, limit=0.3):
    norm = jnp.sqrt(sum(jnp.sum(gradient ** 2) for gradient in gradients))
    return [gradient * jnp.minimum(1.0, limit / norm) for gradient in gradients], norm


class Model(keras.Sequential):
    "With a step in which gradients go through ``change``, before the optimizer gets them."

    def __init__(self):
        super().__init__([dense(4, activation="tanh", input_shape=(6,)), dense(1)])

    def change(self, gradients, weights):
        return gradients

    def gradients(self, weights, others, metrics, x, y, optimizer):
        compute = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (_, found), gradients = compute(
            weights, others, metrics, x, y, None, training=True, optimizer_variables=optimizer
        )
        return gradients, found

    def squares(self, weights, others, x, y):
        return jnp.mean((self.stateless_call(weights, others, x, training=True)[0] - y) ** 2)

    def train_step(self, state, data):
        weights, others, optimizer, metrics = state
        x, y = data[:2]
        gradients, found = self.gradients(weights, others, metrics, x, y, optimizer)
        loss, outputs, others, metrics = found
        weights, optimizer = self.apply(self.change(gradients, weights), weights, optimizer)
        logs, metrics = self._update_metrics_variables(metrics, loss, x, y, outputs, None)
        return dict(logs, **self.logs(gradients)), (weights, others, optimizer, metrics)

    def apply(self, gradients, weights, optimizer):
        return self.optimizer.stateless_apply(optimizer, gradients, weights)

    def logs(self, gradients):
        return {}


def trained(name, kind, **options):
    model = compat.parallelize(kind())
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"], **options)
    history = {}

    def fit():
        found = model.fit(inputs, targets, rows, 1, shuffle=False, verbose=0)
        history.update((each, list(map(float, found.history[each]))) for each in found.history)

    said[name] = told(fit), history
    return model
"""

# Steps that use gradients before the optimizer does.
STEPS = (
    BEGIN
    + """
class Clips(Model):
    "By the norm of all gradients, which is in the logs, too."

    def change(self, gradients, weights):
        return clip(gradients)[0]

    def logs(self, gradients):
        return {"norm": clip(gradients)[1]}


class ClipsEach(Model):
    "By the norms of the weights: adaptive gradient clipping."

    def change(self, gradients, weights):
        limits = [0.01 * jnp.maximum(jnp.linalg.norm(weight), 1e-3) for weight in weights]
        return [clip([each], limit)[0][0] for each, limit in zip(gradients, limits)]


class Sharpness(Model):
    "A second gradient where the loss is larger, and with batch normalization."

    def __init__(self):
        super().__init__()
        self.add(keras.layers.BatchNormalization(trainable=False))

    def gradients(self, weights, others, metrics, x, y, optimizer):
        gradients, _ = super().gradients(weights, others, metrics, x, y, optimizer)
        _, norm = clip(gradients)
        weights = [weight + 0.5 * each / norm for weight, each in zip(weights, gradients)]
        return super().gradients(weights, others, metrics, x, y, optimizer)


class ByName(Model):
    "Functions imported by name, one that is compiled, and an update without the optimizer."

    def gradients(self, weights, others, metrics, x, y, optimizer):
        _, found = super().gradients(weights, others, metrics, x, y, optimizer)

        @jax.jit
        def compiled(weights):
            return clip(grad(self.squares)(weights, others, x, y))[0]

        return compiled(weights), found

    def apply(self, gradients, weights, optimizer):
        return [weight - 0.5 * each for weight, each in zip(weights, gradients)], optimizer


class Penalty(Model):
    "The gradient of inputs, within the loss."

    def gradients(self, weights, others, metrics, x, y, optimizer):
        _, found = super().gradients(weights, others, metrics, x, y, optimizer)

        def loss(weights):
            def outputs(x):
                return self.stateless_call(weights, others, x, training=True)[0]

            slopes = grad(lambda x: outputs(x).sum())(x)
            return jnp.mean((outputs(x) - y) ** 2) + jnp.mean(jnp.sum(slopes ** 2, 1))

        return clip(grad(loss)(weights))[0], found


class Twice(Model):
    "Two updates in a step."

    def train_step(self, state, data):
        _, state = super().train_step(state, data)
        return super().train_step(state, data)

    change = Clips.change


class OneByOne(Model):
    "Gradients of single rows, each clipped, and added up."

    def gradients(self, weights, others, metrics, x, y, optimizer):
        _, found = super().gradients(weights, others, metrics, x, y, optimizer)

        def add(sums, row):
            gradients = grad(self.squares)(weights, others, row[0][None], row[1][None])
            return [one + other for one, other in zip(sums, clip(gradients)[0])], 0

        sums, _ = jax.lax.scan(add, [jnp.zeros_like(weight) for weight in weights], (x, y))
        return [each / x.shape[0] for each in sums], found


for kind in (Clips, ClipsEach, Sharpness, ByName, Penalty, Twice, OneByOne):
    weights[kind.__name__] = trained(kind.__name__, kind).get_weights()
for kind in (Clips, Sharpness):
    name = kind.__name__ + ", not compiled"
    weights[name] = trained(name, kind, run_eagerly=True).get_weights()
"""
)

# Steps that ranks cannot do as one process does.
REFUSED = (
    BEGIN
    + """
class Decides(Model):
    "By the loss of the rank's rows."

    def gradients(self, weights, others, metrics, x, y, optimizer):
        gradients, found = super().gradients(weights, others, metrics, x, y, optimizer)
        return [jnp.where(found[0] < 3, gradient, 0) for gradient in gradients], found


class Within(Model):
    "Clips what a loop adds up."

    def gradients(self, weights, others, metrics, x, y, optimizer):
        _, found = super().gradients(weights, others, metrics, x, y, optimizer)

        def add(sums, row):
            gradients = grad(self.squares)(weights, others, row[0][None], row[1][None])
            return [one + other for one, other in zip(sums, gradients)], 0

        sums, _ = jax.lax.scan(add, [jnp.zeros_like(weight) for weight in weights], (x, y))
        return clip(sums)[0], found


class Unchecked(Within):
    def __init__(self):
        super().__init__()
        self.add(keras.layers.Dropout(0.5))


class Adapts(Model):
    "A gradient of weights within a loss, of what they are after a step."

    def gradients(self, weights, others, metrics, x, y, optimizer):
        _, found = super().gradients(weights, others, metrics, x, y, optimizer)

        def loss(weights):
            gradients = grad(self.squares)(weights, others, x, y)
            adapted = [weight - 0.01 * each for weight, each in zip(weights, gradients)]
            return self.squares(adapted, others, x, y)

        return grad(loss)(weights), found


class Compiled(Model):
    "Clips in a function that is compiled, in a step that is not."

    def gradients(self, weights, others, metrics, x, y, optimizer):
        _, found = super().gradients(weights, others, metrics, x, y, optimizer)
        compiled = jax.jit(lambda weights: clip(grad(self.squares)(weights, others, x, y))[0])
        return compiled(weights), found


class Contrasts(Model):
    "Compares the rows of a batch with one another."

    def gradients(self, weights, others, metrics, x, y, optimizer):
        _, found = super().gradients(weights, others, metrics, x, y, optimizer)

        def loss(weights):
            outputs = self.stateless_call(weights, others, x, training=True)[0]
            return jnp.mean((outputs - outputs.T) ** 2)

        return jax.jit(grad(loss))(weights), found


class Sums(Model):
    def squares(self, weights, others, x, y):
        return len(x) * super().squares(weights, others, x, y)

    def gradients(self, weights, others, metrics, x, y, optimizer):
        _, found = super().gradients(weights, others, metrics, x, y, optimizer)
        return grad(self.squares)(weights, others, x, y), found


class OfOneSize(Sums):
    "Can be tried with no other number of rows."

    def squares(self, weights, others, x, y):
        return Model.squares(self, weights, others, x.reshape(rows, 6), y)


class Draws(Sums):
    "What is random cannot be compared."

    def squares(self, weights, others, x, y):
        noise = jax.random.normal(jax.random.PRNGKey(0), x.shape)
        return super().squares(weights, others, x + noise, y)


class ComputesLoss(keras.Sequential):
    "Keras' own step."

    def __init__(self):
        super().__init__([dense(4, activation="tanh", input_shape=(6,)), dense(1)])

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y_pred - keras.ops.transpose(y_pred)) ** 2)


for kind in (Decides, Within, Unchecked, Adapts, Contrasts, Sums, Draws, ComputesLoss):
    trained(kind.__name__, kind)
trained("Compiled", Compiled, run_eagerly=True)
inputs, targets = inputs[:rows], targets[:rows]
trained("OfOneSize", OfOneSize)
"""
)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return the results of one process for the first program, and of two ranks for both."""
    programs = {"steps": STEPS, "refused": REFUSED}
    folder = tmp_path_factory.mktemp("jobs")
    return ranks.run_both(programs, folder, "jax", ranks_alone=["refused"])


def test_steps_use_gradients_of_all_ranks(jobs):
    """With an uneven last batch; losses, metrics and norms of gradients are one process's."""
    check(*(job["steps"] for job in jobs))


@slow
def test_steps_use_gradients_of_three_ranks(jobs, tmp_path):
    """All batches are uneven."""
    check(jobs[0]["steps"], ranks.run(STEPS, tmp_path, 3, "jax"))


def check(alone, job):
    """Check that ranks have trained as one process has."""
    ((one,), (expected,)), (arrays, said) = alone, job
    for other in arrays[1:]:
        ranks.check_arrays(one, arrays[0], other)
    for each in said:
        for name, (warned, history) in each.items():
            assert warned == [], name
            assert sorted(history) == sorted(expected[name][1])
            for key, values in history.items():
                if key != "norm":
                    wanted = pytest.approx(expected[name][1][key], rel=1e-4)
                    assert values == wanted, (name, key)


def of_program(text):
    """Return a text without the numbers of lines in it."""
    return re.sub(r"(refused-2.py, line) \d+", r"\1 N", text)


def test_steps_that_train_each_rank_by_its_own_rows_are_named(jobs):
    for each in jobs[1]["refused"][1]:
        found = {name: told for name, (told, _) in each.items()}
        assert of_program(found["Decides"]) == (
            "UnsupportedError: jax cannot train model 'decides' as one of several ranks: what "
            "train_step() computes in refused-2.py, line N is that of each rank's own rows, and "
            "weights or the optimizer's state depend on it. Let them depend on gradients of "
            "jax.grad() or jax.value_and_grad(), which are those of all ranks where they are not "
            "within jax.lax.scan(), jax.vmap() or the like."
        )
        assert of_program(found["Within"]) == (
            "RankError: What the optimizer of model 'within' is given is computed in refused-2.py, "
            "line N from gradients of each rank's own rows, and is no mean over rows. Take "
            "gradients by jax.grad() or jax.value_and_grad() outside of jax.lax.scan(), jax.vmap() "
            "or the like: those are of all ranks."
        )
        for name in "unchecked", "compiled":
            assert list(map(of_program, found[name.title()])) == [
                f"What the optimizer of model {name!r} is given is computed in refused-2.py, line "
                "N from gradients of each rank's own rows, of which ranks take the mean. Whether "
                "that is what one process computes could not be checked. It is not if it clips or "
                "normalises gradients: take these by jax.grad() or jax.value_and_grad() outside "
                "of jax.lax.scan(), jax.vmap() or the like."
            ]
        assert list(map(of_program, found["Adapts"])) == [
            "The gradient of weights in refused-2.py, line N, within a function of which model "
            "'adapts' takes the gradient, is that of each rank's own rows. Where the loss is not "
            "linear in it, ranks train to other numbers than one process."
        ]
        names = {"Contrasts": "contrasts", "Sums": "sums", "ComputesLoss": "computes_loss"}
        for kind, name in names.items():
            (text,) = map(of_program, found[kind])
            rows, off = re.search(r"of (\d+) rows .* up to ([^ ]+) from", text).groups()
            assert int(rows) > 1 and float(off) > 0.01
            assert text == MIXING.format(name, "refused-2.py, line N", rows, off)
        assert found["Draws"] == []
        (text,) = map(of_program, found["OfOneSize"])
        problem = re.search(r"of a batch: (.*)\. If its", text).group(1)
        assert problem.startswith("TypeError: cannot reshape array of shape (2, 6)")
        assert text == (
            "The gradients that the training step of 'of_one_size' computes (refused-2.py, line N; "
            "refused-2.py, line N) could not be checked on parts of a batch: "
            f"{problem}. If its loss is a sum, or compares rows with one another, the ranks train "
            "to other numbers than one process."
        )


MIXING = (
    "The gradients that the training step of {!r} computes ({}) are no mean over the rows of a "
    "batch: those of {} rows differ by up to {} from the mean over two parts of them. Its loss is "
    "a sum, or compares rows with one another, as contrastive losses and mixup do. Each rank "
    "computes it of its own rows, so that the ranks train to other numbers than one process."
)
