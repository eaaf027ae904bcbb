"""Idioms: training loops around Keras models, GANs, functions of graphs."""

import numpy as np
from catalog import script
from kit import STEPS, Observed, Setup


def _small(kit, width=2, activation=None, inputs=6):
    x = kit.input(inputs)
    model = kit.model(x, kit.dense(kit.dense(x), width, activation))
    kit.initialise(model)
    return model


def _compiled(kit, parallel):
    model = _small(kit)
    kit.parallel(model, parallel)
    kit.compile(model, "mse")
    return model


def _normal(kit, seed, rows, width=6):
    return np.random.RandomState([seed, rows]).normal(size=(rows, width)).astype(kit.floatx)


def _weights(models):
    return [weight for model in models for weight in model.get_weights()]


# GANs --------------------------------------------------------------------------------------------


@script("GAN: trainable off and on")
def toggled(kit, parallel):
    """Freeze a discriminator in the model of both, after it was compiled by itself."""
    if kit.backend == "mxnet":
        raise NotImplementedError("of models that share layers, it may return old weights")
    observed = Observed()
    discriminator = _small(kit, 1, "sigmoid")
    kit.parallel(discriminator, parallel)
    kit.compile(discriminator, "binary_crossentropy")
    generator = _small(kit, 6, inputs=3)
    discriminator.trainable = False
    noise = kit.input(3)
    both = kit.model(noise, discriminator(generator(noise)))
    kit.parallel(both, parallel)
    kit.compile(both, "binary_crossentropy")
    observed.note("weights", *_weights([discriminator, generator]))
    rows = kit.rows
    for step in range(STEPS):
        fakes = generator.predict(_normal(kit, step, rows, 3), batch_size=rows, verbose=0)
        real = _normal(kit, 7 + step, rows)
        losses = [
            discriminator.train_on_batch(real, np.ones((rows, 1), kit.floatx)),
            discriminator.train_on_batch(fakes, np.zeros((rows, 1), kit.floatx)),
            both.train_on_batch(_normal(kit, step, rows, 3), np.ones((rows, 1), kit.floatx)),
        ]
        observed.note("losses", *[np.ravel(loss) for loss in losses])
        observed.note("weights", *_weights([discriminator, generator]))
    return observed


@script("WGAN-GP: gradient penalty by K.gradients")
def penalty(kit, parallel):
    """Return a layer that computes the gradient of the critic by its input."""
    K = kit.keras.backend
    x = kit.input()
    critic = kit.model(x, kit.dense(kit.dense(x), 1, None))
    score = critic(x)

    def norm(both):
        (gradient,) = K.gradients(both[0], [both[1]])
        return K.sqrt(K.sum(K.square(gradient), axis=1, keepdims=True) + 1e-6)

    model = kit.model(x, [score, kit.apply(norm, [score, x], 1)])
    losses = [lambda t, p: K.mean(t * p), lambda t, p: K.mean(K.square(p - 1.0 + 0.0 * t))]
    return kit.train(Setup(model, losses), parallel)


@script("freezing layers between two trainings")
def frozen(kit, parallel):
    observed, model = Observed(), _small(kit)
    observed.note("weights", *model.get_weights())
    kit.parallel(model, parallel)
    for trainable in (True, False):
        model.layers[1].trainable = trainable
        kit.compile(model, "mse")
        loss = model.train_on_batch(_normal(kit, 1, kit.rows), _normal(kit, 2, kit.rows, 2))
        observed.note("loss", np.ravel(loss))
        observed.note("weights", *model.get_weights())
    return observed


@script("fit, evaluate and predict, with a callback")
def callbacks(kit, parallel):
    """Averages of the weights, which a callback takes."""
    observed, model = Observed(), _small(kit)
    averages = model.get_weights()

    class Average(kit.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            averages[:] = [0.5 * a + 0.5 * w for a, w in zip(averages, model.get_weights())]

    kit.parallel(model, parallel)
    kit.compile(model, "mse")
    observed.note("weights", *model.get_weights())
    x, y = _normal(kit, 1, 23), _normal(kit, 2, 23, 2)
    history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0,
                        callbacks=[Average()]).history  # fmt: skip
    observed.note("losses", history["loss"])
    observed.note("weights", *model.get_weights())
    observed.note("averages", *averages)
    observed.note("evaluate", np.ravel(model.evaluate(x, y, batch_size=10, verbose=0)))
    return observed


# Graphs ------------------------------------------------------------------------------------------


@script("K.function of a layer's output")
def features(kit, parallel):
    K = kit.keras.backend
    observed, model = Observed(), _compiled(kit, parallel)
    inside = K.function([model.layers[0].input], [model.layers[1].output])
    rows = kit.rows
    for step in range(STEPS):
        model.train_on_batch(_normal(kit, step, rows), _normal(kit, 5 + step, rows, 2))
        observed.note("inside", *inside([_normal(kit, 9, rows)]))
    return observed


@script("K.gradients: saliency of the inputs")
def saliency(kit, parallel):
    K = kit.keras.backend
    observed, model = Observed(), _compiled(kit, parallel)
    model.train_on_batch(_normal(kit, 1, kit.rows), _normal(kit, 2, kit.rows, 2))
    gradient = K.gradients(K.sum(model.output[:, 0]), [model.input])[0]
    observed.note("saliency", *K.function([model.input], [gradient])([_normal(kit, 9, kit.rows)]))
    return observed


@script("K.function with an optimizer's updates")
def updates(kit, parallel):
    """Make a training function, as agents of reinforcement learning do."""
    K = kit.keras.backend
    observed, model = Observed(), _compiled(kit, parallel)
    advantage = K.placeholder(shape=(None, 2))
    loss = K.mean(K.square(model.output) * advantage)
    optimizer = kit.keras.optimizers.SGD(lr=0.05)
    changes = optimizer.get_updates(loss=loss, params=model.trainable_weights)
    train = K.function([model.input, advantage], [loss], changes)
    observed.note("weights", *model.get_weights())
    rows = kit.rows
    for step in range(STEPS):
        observed.note("loss", *train([_normal(kit, step, rows), _normal(kit, 5, rows, 2)]))
        observed.note("weights", *model.get_weights())
    return observed


# Steps of one's own ------------------------------------------------------------------------------


@script("train_step of one's own")
def train_step(kit, parallel):
    """Two losses in a step: of the outputs, and of the batch as a whole."""
    if kit.backend not in ("tensorflow", "torch") or not kit.eager:
        raise NotImplementedError("no train_step, or one that takes the state as arguments")
    o = kit.ops

    class Own(kit.keras.models.Model):
        def train_step(self, data):
            x, y = data[:2]
            loss, pairs = kit.gradients(self, lambda: self.own(y, self(x, training=True)))
            with kit.untracked():
                self.optimizer.apply_gradients(pairs)
            return {"loss": loss}

        def own(self, y, p):
            return o.mean(o.square(kit.tensor(y) - p)) + 0.1 * o.square(o.mean(p))

    x = kit.input()
    return kit.train(Setup(Own(x, kit.dense(kit.dense(x), 2, None))), parallel)


@script("compute_loss of one's own")
def compute_loss(kit, parallel):
    o = kit.ops

    class Own(kit.keras.models.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **options):
            return o.mean(o.square(kit.tensor(y) - y_pred)) + 0.1 * o.mean(o.abs(y_pred))

    if not hasattr(kit.keras.models.Model, "compute_loss"):
        raise NotImplementedError("this Keras calls no compute_loss")
    x = kit.input()
    return kit.train(Setup(Own(x, kit.dense(kit.dense(x), 2, None))), parallel)


@script("subclassed model with add_loss")
def subclassed(kit, parallel):
    if not kit.eager:
        raise NotImplementedError("subclassed models take no losses")
    o = kit.ops

    class Own(kit.keras.models.Model):
        def __init__(self):
            super().__init__()
            self.first = kit.layers.Dense(6, activation="tanh")
            self.second = kit.layers.Dense(2)

        def call(self, x):
            hidden = self.first(x)
            self.add_loss(0.1 * o.mean(o.square(hidden)))
            return self.second(hidden)

    model = Own()
    model(_normal(kit, 0, 4))

    def data(random, rows):
        return tuple([random.normal(size=(rows, w)).astype(kit.floatx)] for w in (6, 2))

    return kit.train(Setup(model, data=data), parallel)


@script("loop of one's own around a Keras model")
def loop(kit, parallel):
    """Train by a tape or autograd, with a loss over the whole batch outside of the model."""
    o, observed, model = kit.ops, Observed(), _small(kit, 4)
    kit.parallel(model, parallel)

    def loss_of(x):
        p = model(x)
        scores = o.similar(p, p)
        return o.mean(o.log(o.sum(o.exp(scores), axis=1)) - o.sum(p * p, axis=1))

    def step(x):
        loss, pairs = kit.gradients(model, lambda: loss_of(kit.tensor(x)))
        with kit.untracked():
            for gradient, variable in pairs:
                variable.assign(variable - 0.05 * gradient)
            return float(loss)

    if kit.backend not in ("tensorflow", "torch") or not kit.eager:
        raise NotImplementedError("nothing is computed outside of graphs")
    observed.note("weights", *model.get_weights())
    rows = kit.rows
    for number in range(STEPS):
        observed.note("loss", step(_normal(kit, number, rows)))
        observed.note("weights", *model.get_weights())
    return observed
