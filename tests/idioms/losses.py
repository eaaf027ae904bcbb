"""Idioms: losses of one's own."""

import numpy as np
from catalog import model
from kit import Setup


def loss(name, width=4, activation=None, targets=None):
    """Return an idiom that is a loss, a function of operations, targets and predictions.

    Arguments:
        name: that of the idiom.
        width: that of the model's last layer.
        activation: that of the model's last layer.
        targets: makes them of a ``RandomState`` and a number of rows; default: any numbers.
    """

    def add(function):
        def make(kit):
            def data(random, rows):
                x = random.normal(size=(rows, 6)).astype(kit.floatx)
                return [x], [targets(random, rows).astype(kit.floatx)]

            def applied(t, p):
                return function(kit.ops, t, p)

            return kit.with_loss(applied, width, activation, targets and data)

        model(name)(make)
        return function

    return add


# Each row by itself ------------------------------------------------------------------------------


@loss("loss: a value for each row")
def by_row(o, t, p):
    return o.mean(o.log(1.0 + o.square(t - p)), axis=-1)


@loss("loss: sum of everything")
def total(o, t, p):
    return 0.1 * o.sum(o.square(t - p))


@loss("loss: triplets in one output", width=6)
def triplets(o, t, p):
    near = o.sum(o.square(p[:, :2] - p[:, 2:4]), axis=1)
    far = o.sum(o.square(p[:, :2] - p[:, 4:]), axis=1)
    return o.maximum(near - far + 0.5, 0.0 * near) + 0.0 * o.sum(t, axis=1)


@model("loss: of every layer's weights")
def weights(kit):
    setup = kit.with_loss("mse")
    kernel = setup.model.layers[1].kernel
    setup.loss = lambda t, p: (
        kit.ops.mean(kit.ops.square(t - p), axis=-1) + 0.1 * kit.ops.sum(kit.ops.square(kernel))
    )
    return setup


# Over the batch ----------------------------------------------------------------------------------


def _some_unknown(random, rows):
    return random.randint(-1, 2, size=(rows, 4))


def _classes(random, rows):
    return (np.arange(rows) % 3).reshape(-1, 1)


@loss("loss: masked mean", targets=_some_unknown)
def masked(o, t, p):
    """Targets of -1 do not count."""
    known = o.cast(o.greater(t, -0.5), o.floatx)
    return o.sum(known * o.square(t - p)) / (o.sum(known) + 1e-6)


@loss("loss: Dice coefficient of the batch", activation="sigmoid")
def dice(o, t, p):
    both = o.sum(o.abs(t) * p)
    return 1.0 - 2.0 * both / (o.sum(o.abs(t)) + o.sum(p) + 1.0)


@loss("loss: correlation with the targets")
def correlation(o, t, p):
    t, p = t - o.mean(t), p - o.mean(p)
    return 1.0 - o.sum(t * p) / o.sqrt(o.sum(o.square(t)) * o.sum(o.square(p)) + 1e-3)


@loss("loss: hardest triplets of the batch", targets=_classes)
def hardest(o, t, p):
    pairs = o.expand_dims(p, 0) - o.expand_dims(p, 1)
    apart = o.sum(o.square(pairs), axis=2)
    same = o.cast(o.equal(o.transpose(t), t), o.floatx)
    far = o.max(apart * same, axis=1)
    near = o.min(apart + 100.0 * same, axis=1)
    return o.mean(o.maximum(far - near + 1.0, 0.0 * far))


@loss("loss: in-batch negatives")
def negatives(o, t, p):
    """Each row's target is its own; those of all other rows are wrong."""
    scores = o.similar(p, t)
    return o.log(o.sum(o.exp(scores), axis=1)) - o.sum(p * t, axis=1)


@loss("loss: pairwise ranking", width=1)
def ranking(o, t, p):
    right = o.cast(o.greater(t - o.transpose(t), 0.0), o.floatx)
    return o.mean(right * o.log(1.0 + o.exp(o.transpose(p) - p)))


@loss("loss: Cox partial likelihood", width=1)
def cox(o, t, p):
    """Return Cox's loss, of rows that are sorted by time."""
    at_risk = o.log(o.cumsum(o.exp(p), axis=0))
    return o.mean((at_risk - p) * o.abs(t))


@loss("loss: cross-correlation of features (Barlow Twins)")
def barlow(o, t, p):
    t, p = t - o.mean(t, axis=0, keepdims=True), p - o.mean(p, axis=0, keepdims=True)
    return o.mean(o.square(o.matmul(o.transpose(t), p) / o.rows(p)))


@loss("loss: the hardest rows alone (OHEM)")
def hard_rows(o, t, p):
    each = o.mean(o.square(t - p), axis=1)
    above = o.cast(o.greater(each, o.mean(each)), o.floatx)
    return o.sum(each * above) / (o.sum(above) + 1e-6)


@loss("loss: K.switch on the batch")
def switched(o, t, p):
    error = o.mean(o.square(t - p))
    return o.where(o.greater(error, 100.0), 0.5 * error, o.square(error))


# Layers that hold the loss -----------------------------------------------------------------------


@model("CTC")
def ctc(kit):
    """Return a loss that a layer computes, with targets as inputs, as in Keras' own example."""
    x, labels = kit.input(5, 4), kit.input(2)
    soft = kit.layers.Dense(4, activation="softmax")(x)

    def cost(both):
        p, labels = both
        long = 0.0 * labels[:, :1] + 5.0
        short = 0.0 * labels[:, :1] + 2.0
        if kit.is_3:
            lengths = [kit.ops.cast(each[:, 0], "int32") for each in (short, long)]
            codes = kit.ops.cast(labels, "int32")
            found = kit.ops.ctc_loss(codes, kit.ops.log(p), *lengths, mask_index=3)
            return kit.ops.expand_dims(found, 1)
        return kit.ops.ctc_batch_cost(labels, p, long, short)

    def data(random, rows):
        codes = np.stack([np.arange(rows) % 2, np.arange(rows) % 3], axis=1)
        inputs = [random.normal(size=(rows, 5, 4)), codes]
        return [each.astype(kit.floatx) for each in inputs], [np.zeros((rows, 1), kit.floatx)]

    cost = kit.apply(cost, [soft, labels], 1)
    return Setup(kit.model([x, labels], cost), lambda t, p: kit.ops.mean(p + 0.0 * t), data)


@model("CRF, unrolled")
def crf(kit):
    """Return the partition function of a linear chain, with its transitions as weights."""
    o = kit.ops

    def build(layer):
        layer.moves = kit.weight(layer, "moves", 3, 3, initializer="ones")

    def call(layer, x):
        alpha = x[:, 0]
        for step in range(1, 4):
            paths = o.expand_dims(alpha, 2) + o.expand_dims(layer.moves, 0)
            alpha = x[:, step] + o.log(o.sum(o.exp(paths), axis=1))
        return alpha

    x = kit.input(4, 3)
    chain = kit.layer(call, build, (None, 3))(kit.layers.Dense(3)(x))
    return Setup(kit.model(x, chain), lambda t, p: o.mean(o.log(o.sum(o.exp(p), axis=1)) - p[:, 0]
                                                          + 0.0 * t[:, 0]))  # fmt: skip


@model("CRF, by K.rnn")
def looped(kit):
    K = kit.keras.backend

    def forward(x):
        start = [K.sum(x[:, :1], axis=1)]  # keras-mxnet keeps the axis of x[:, 0]

        def step(emitted, states):
            alpha = emitted + 0.5 * states[0] + K.log(K.sum(K.exp(states[0]), 1, keepdims=True))
            return alpha, [alpha]

        return K.rnn(step, x, start)[0]

    x = kit.input(4, 3)
    chain = kit.apply(forward, kit.layers.Dense(3)(x), 3)

    def loss(t, p):
        return K.mean(K.log(K.sum(K.exp(p), axis=1)) - K.sum((p + 0.0 * t)[:, :1], axis=1))

    return Setup(kit.model(x, chain), loss)


@model("center loss")
def centres(kit):
    """Train on the distance to the centre of each row's class, which an Embedding learns."""
    x, label = kit.input(), kit.input(1)
    code = kit.dense(x, 4)
    centre = kit.layers.Flatten()(kit.layers.Embedding(3, 4)(label))

    def apart(both):
        return kit.ops.sum(kit.ops.square(both[0] - both[1]), axis=1, keepdims=True)

    model = kit.model([x, label], [kit.dense(code, 3, "softmax"),
                                   kit.apply(apart, [code, centre], 1)])  # fmt: skip

    def data(random, rows):
        label = (np.arange(rows) % 3).reshape(-1, 1).astype(kit.floatx)
        inputs = [random.normal(size=(rows, 6)).astype(kit.floatx), label]
        return inputs, [label, np.zeros((rows, 1), kit.floatx)]

    losses = ["sparse_categorical_crossentropy", lambda t, p: kit.ops.mean(p + 0.0 * t)]
    return Setup(model, losses, data, loss_weights=[1.0, 0.2])


@model("VAE: divergence by add_loss")
def vae(kit):
    def call(layer, both):
        mean, spread = both[:, :2], both[:, 2:]
        o = kit.ops
        divergence = 1.0 + spread - o.square(mean) - o.exp(spread)
        kit.add_loss(layer, -0.05 * o.mean(o.sum(divergence, axis=1)), both)
        return mean + o.exp(0.5 * spread) * o.random(mean, 0.0)

    x = kit.input()
    code = kit.layer(call, output_shape=(None, 2))(kit.dense(x, 4, None))
    return Setup(kit.model(x, kit.dense(kit.dense(code), 6, None)))


@model("VAE: divergence by model.add_loss")
def vae_of_model(kit):
    o = kit.ops
    x = kit.input()
    mean, spread = kit.dense(x, 2, None), kit.dense(x, 2, None)
    sample = kit.apply(lambda both: both[0] + o.exp(0.5 * both[1]) * o.random(both[0], 0.0),
                       [mean, spread], 2)  # fmt: skip
    model = kit.model(x, kit.dense(sample, 6, None))
    divergence = 1.0 + spread - o.square(mean) - o.exp(spread)
    model.add_loss(-0.05 * o.mean(o.sum(divergence, axis=-1)))
    return Setup(model)


def _adding(kit, loss):
    def call(layer, x):
        kit.add_loss(layer, 0.05 * loss(x), x)
        return x * 1.0

    return kit.with_layer(kit.layer(call))


@model("add_loss: sum over rows")
def added_sum(kit):
    return _adding(kit, lambda x: kit.ops.sum(kit.ops.square(x)))


@model("add_loss: covariance of the batch (DeCov)")
def added_covariance(kit):
    def covariance(x):
        x = x - kit.ops.mean(x, axis=0, keepdims=True)
        return kit.ops.mean(kit.ops.square(kit.ops.matmul(kit.ops.transpose(x), x)))

    return _adding(kit, covariance)


@model("add_loss: importance of experts")
def experts(kit):
    """Add a loss for the equal use of experts: the variance of their sums over the batch."""

    def importance(x):
        sums = kit.ops.sum(kit.ops.softmax(x), axis=0)
        return kit.ops.mean(kit.ops.square(sums - kit.ops.mean(sums)))

    return _adding(kit, importance)


@model("activity regularizer")
def activity(kit):
    x = kit.input()
    hidden = kit.dense(x, activity_regularizer="l2")
    return Setup(kit.model(x, kit.dense(hidden, 2, None)))
