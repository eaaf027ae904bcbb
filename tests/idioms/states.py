"""Idioms: what layers keep, sequences, and models made of models."""

from catalog import model
from kit import Setup

# State -------------------------------------------------------------------------------------------


def keeping(name, use, *shape, **weight):
    """Return an idiom that is a layer with a variable: its next value, of operations, it and ``x``.

    Arguments:
        name: that of the idiom.
        use: a function of the same that returns the layer's outputs.
        *shape: that of the variable.
        **weight: options of ``add_weight()``.
    """

    def add(value):
        def make(kit):
            def build(layer):
                layer.held = kit.weight(layer, "held", *shape, trainable=False, **weight)

            def call(layer, x):
                held = layer.held * 1.0  # torch assigns in place
                found = use(kit.ops, held, x)
                kit.update(layer, layer.held, value(kit.ops, held, x), x)
                # Without an order between reading and assigning, what is read would be random.
                return found if kit.eager else x * 1.0

            return kit.with_layer(kit.layer(call, build))

        model(name)(make)
        return value

    return add


@keeping("state: a counter of steps", lambda o, held, x: x + 0.1 * held)
def counter(o, held, x):
    return held + 1.0


@keeping("state: moving average of the batch's mean", lambda o, held, x: x - held, 6)
def moving(o, held, x):
    return 0.9 * held + 0.1 * o.mean(x, axis=0)


@keeping("state: moving maximum", lambda o, held, x: x / (1.0 + held), 6)
def maximum(o, held, x):
    return o.maximum(held, o.max(o.abs(x), axis=0))


def _attended(o, held, x):
    return o.matmul(o.softmax(o.similar(x, held)), held) + x


@keeping("state: memory queue (MoCo)", _attended, 16, 6, initializer="ones")
def queue(o, held, x):
    return o.concatenate([x, held], axis=0)[:16]


def _with_mean(o, held, x):
    return x + 0.1 * o.mean(held)


@keeping("state: moving averages of a codebook (VQ-VAE)", _with_mean, 4, 6, initializer="ones")
def codebook(o, held, x):
    apart = o.sum(o.square(o.expand_dims(x, 1) - o.expand_dims(held, 0)), axis=2)
    near = o.softmax(-10.0 * apart)
    counts = o.expand_dims(o.sum(near, axis=0), 1)
    return 0.9 * held + 0.1 * o.matmul(o.transpose(near), x) / (counts + 1.0)


@model("VQ-VAE: straight-through")
def straight_through(kit):
    o = kit.ops

    def build(layer):
        layer.codes = kit.weight(layer, "codes", 4, 6, initializer="ones")

    def call(layer, x):
        apart = o.sum(o.square(o.expand_dims(x, 1) - o.expand_dims(layer.codes, 0)), axis=2)
        chosen = o.matmul(o.cast(o.one_hot(o.argmax(-apart, axis=1), 4), kit.floatx), layer.codes)
        kit.add_loss(layer, 0.1 * o.mean(o.square(o.stop_gradient(x) - chosen)), x)
        return x + o.stop_gradient(chosen - x)

    return kit.with_layer(kit.layer(call, build))


@model("spectral norm")
def spectral(kit):
    """One step of power iteration for each step: state that does not depend on the rows."""
    o = kit.ops

    def build(layer):
        layer.kernel = kit.weight(layer, "kernel", 6, 6, initializer="ones")
        layer.u = kit.weight(layer, "u", 1, 6, trainable=False, initializer="ones")

    def call(layer, x):
        v = o.unit(o.matmul(layer.u, o.transpose(layer.kernel)))
        u = o.stop_gradient(o.unit(o.matmul(v, layer.kernel)))
        sigma = o.sum(o.matmul(o.stop_gradient(v), layer.kernel) * u)
        found = o.matmul(x, layer.kernel) / (0.1 + sigma)
        if kit.eager:
            kit.update(layer, layer.u, u, x)
        return found

    return kit.with_layer(kit.layer(call, build))


@model("frozen batch normalization")
def frozen(kit):
    x = kit.input()
    frozen = kit.eager or kit.backend == "mxnet"  # there by no argument of the call
    norm = kit.layers.BatchNormalization(**({"trainable": False} if frozen else {}))
    hidden = norm(kit.dense(x)) if kit.is_3 else norm(kit.dense(x), training=False)
    return Setup(kit.model(x, kit.dense(hidden, 2, None)))


# Sequences ---------------------------------------------------------------------------------------


def _padded(kit, *shape):
    def data(random, rows):
        x = random.normal(size=(rows,) + shape)
        for row, length in enumerate(random.randint(1, shape[0] + 1, size=rows)):
            x[row, length:] = 0
        return [x.astype(kit.floatx)], [random.normal(size=(rows, 2)).astype(kit.floatx)]

    return data


def _words(kit):
    def data(random, rows):
        words = random.randint(0, 9, size=(rows, 4))
        words[:, 0] = 1
        return [words.astype(kit.floatx)], [random.normal(size=(rows, 2)).astype(kit.floatx)]

    return data


@model("masked sequences")
def masked(kit):
    x = kit.input(4, 3)
    hidden = kit.layers.SimpleRNN(3, unroll=kit.backend == "theano")(kit.layers.Masking()(x))
    return Setup(kit.model(x, kit.dense(hidden, 2, None)), data=_padded(kit, 4, 3))


@model("masked mean over steps")
def masked_mean(kit):
    """Use the mask of an Embedding in a custom layer."""

    class Mean(kit.layers.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True

        def call(self, x, mask=None):
            known = kit.ops.expand_dims(kit.ops.cast(mask, kit.floatx), 2)
            return kit.ops.sum(x * known, axis=1) / kit.ops.sum(known, axis=1)

        def compute_mask(self, x, mask=None):
            return None

        def compute_output_shape(self, shape):
            return (shape[0], shape[2])

    words = kit.input(4)
    hidden = Mean()(kit.layers.Embedding(9, 3, mask_zero=True)(words))
    return Setup(kit.model(words, kit.dense(hidden, 2, None)), data=_words(kit))


@model("mask of the loss: a sequence of targets")
def masked_targets(kit):
    x = kit.input(4, 3)
    hidden = kit.layers.TimeDistributed(kit.layers.Dense(2))(kit.layers.Masking()(x))

    def data(random, rows):
        inputs, _ = _padded(kit, 4, 3)(random, rows)
        return inputs, [random.normal(size=(rows, 4, 2)).astype(kit.floatx)]

    return Setup(kit.model(x, hidden), data=data)


@model("stateful RNN")
def stateful(kit):
    name = "batch_shape" if kit.is_3 or not kit.eager else None
    shape = {"batch_shape": (12, 4, 3)} if name else {"shape": (4, 3), "batch_size": 12}
    x = kit.layers.Input(**shape)
    hidden = kit.layers.SimpleRNN(3, stateful=True)(x)
    return Setup(kit.model(x, kit.dense(hidden, 2, None)), rows=12)


@model("seq2seq: states of an encoder")
def encoder(kit):
    source, target = kit.input(4, 3), kit.input(3, 3)
    options = {"unroll": True}
    _, state = kit.layers.SimpleRNN(3, return_state=True, **options)(source)
    decoded = kit.layers.SimpleRNN(3, return_sequences=True, **options)(target, initial_state=state)
    out = kit.layers.TimeDistributed(kit.layers.Dense(2))(decoded)
    return Setup(kit.model([source, target], out))


# Models of models --------------------------------------------------------------------------------


@model("nested models")
def nested(kit):
    inner = kit.input()
    block = kit.model(inner, kit.dense(kit.dense(inner)))
    x = kit.input()
    return Setup(kit.model(x, kit.dense(block(kit.dense(x)), 2, None)))


@model("several outputs, losses and weights")
def outputs(kit):
    x = kit.input()
    hidden = kit.dense(x)
    model = kit.model(x, [kit.dense(hidden, 2, None), kit.dense(hidden, 1, "sigmoid")])
    return Setup(model, ["mse", "mae"], loss_weights=[1.0, 0.3])


@model("teacher and student")
def distillation(kit):
    """Train a model on the outputs of a frozen one."""
    x = kit.input()
    teacher = kit.model(x, kit.dense(x, 2))
    teacher.trainable = False
    both = kit.layers.Concatenate()([teacher(x), kit.dense(kit.dense(x), 2, None)])

    def loss(t, p):
        apart = kit.ops.square(p[:, 2:] - p[:, :2]) + kit.ops.square(p[:, 2:] - t[:, 2:])
        return kit.ops.mean(apart, axis=1)

    return Setup(kit.model(x, both), loss)


@model("sample weights")
def weighted(kit):
    setup = kit.with_loss("mse")
    setup.fit = lambda random, rows: {
        "sample_weight": random.uniform(0.2, 2.0, size=rows).astype(kit.floatx)
    }
    return setup


@model("metric of one's own over the batch")
def metric(kit):
    def share(t, p):
        return kit.ops.mean(kit.ops.cast(kit.ops.greater(p, t), kit.floatx))

    setup = kit.with_loss("mse")
    setup.compile["metrics"] = [share]
    return setup


@model("add_metric in a layer")
def added_metric(kit):
    def call(layer, x):
        layer.add_metric(kit.ops.mean(x), name="mean_of_x", aggregation="mean")
        return x * 1.0

    return kit.with_layer(kit.layer(call))


@model("embedding by a sparse gradient")
def embedding(kit):
    words = kit.input(4)
    hidden = kit.layers.Flatten()(kit.layers.Embedding(9, 3)(words))
    return Setup(kit.model(words, kit.dense(hidden, 2, None)), data=_words(kit))


@model("sparse input")
def sparse(kit):
    x = kit.input(sparse=True)

    def data(random, rows):
        dense = random.normal(size=(rows, 6)) * random.randint(2, size=(rows, 6))
        targets = [random.normal(size=(rows, 2)).astype(kit.floatx)]
        if kit.eager:
            import tensorflow

            return tensorflow.sparse.from_dense(dense.astype(kit.floatx)), targets
        import scipy.sparse

        return scipy.sparse.csr_matrix(dense.astype(kit.floatx)), targets

    return Setup(kit.model(x, kit.dense(kit.dense(x), 2, None)), data=data)


@model("ragged input")
def ragged(kit):
    import tensorflow

    x = kit.layers.Input(shape=(None, 3), ragged=True)

    def data(random, rows):
        lengths = random.randint(1, 4, size=rows)
        values = random.normal(size=(lengths.sum(), 3)).astype(kit.floatx)
        inputs = tensorflow.RaggedTensor.from_row_lengths(values, lengths)
        return inputs, [random.normal(size=(rows, 2)).astype(kit.floatx)]

    hidden = kit.layers.Lambda(lambda x: tensorflow.reduce_mean(x, axis=1))(x)
    return Setup(kit.model(x, kit.dense(hidden, 2, None)), data=data)
