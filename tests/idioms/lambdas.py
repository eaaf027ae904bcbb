"""Idioms: Lambda layers, and layers of one's own without state."""

from catalog import model
from kit import WIDTH, Setup


def around(name, *shape):
    """Return an idiom that is a Lambda layer, a function of the operations and a value.

    Arguments:
        name: that of the idiom.
        *shape: that of the layer's outputs, without the rows.
    """

    def add(function):
        model(name)(lambda kit: kit.around(lambda x: function(kit.ops, x), *shape))
        return function

    return add


# Each row by itself ------------------------------------------------------------------------------

#: Functions of the operations and a value, in a Lambda layer.
EACH_ROW = {
    "Lambda: arithmetic": lambda o, x: 2.0 * x / (1.0 + o.exp(-x)),
    "Lambda: random, reparametrized": lambda o, x: x + o.random(x, 0.0),
    "Lambda: K.switch on each row": lambda o, x: o.where(o.greater(x, 0.1), x, 0.5 * x),
}


@model("Lambda: distance of two inputs")
def distance(kit):
    left, right = kit.input(), kit.input()
    shared = kit.layers.Dense(4, activation="tanh")

    def euclidean(both):
        square = kit.ops.square(both[0] - both[1])
        return kit.ops.sqrt(kit.ops.sum(square, axis=1, keepdims=True) + 1e-6)

    return _setup(kit, [left, right], kit.apply(euclidean, [shared(left), shared(right)], 1))


@model("Lambda: steps before rows")
def time_major(kit):
    x = kit.input(4, 3)

    def running(x):
        steps = kit.ops.swap(x)
        early, late = kit.ops.mean(steps[:2], axis=0), kit.ops.mean(steps[2:], axis=0)
        return late - 0.5 * early

    return _setup(kit, x, kit.apply(running, x, 3))


@model("Lambda: all pixels as rows, and back")
def pixels(kit):
    x = kit.input(2, 2, 3)

    def each_pixel(x):
        flat = kit.ops.reshape(x, (-1, 3))
        flat = flat / (1.0 + kit.ops.sum(kit.ops.square(flat), axis=1, keepdims=True))
        return kit.ops.reshape(flat, (-1, 2, 2, 3))

    return _setup(kit, x, kit.layers.Flatten()(kit.apply(each_pixel, x, 2, 2, 3)))


@around("Lambda: normalised over the features")
def layer_norm(o, x):
    mean = o.mean(x, axis=-1, keepdims=True)
    return (x - mean) / o.sqrt(o.mean(o.square(x - mean), axis=-1, keepdims=True) + 0.1)


@model("Lambda: the weights of another layer")
def tied(kit):
    x = kit.input()
    encoder = kit.layers.Dense(4, activation="tanh")
    code = encoder(x)
    return _setup(kit, x, kit.apply(lambda c: kit.ops.similar(c, encoder.kernel), code))


@model("Lambda: map_fn over rows")
def mapped(kit):
    if kit.is_3:
        return kit.around(lambda x: kit.ops.vectorized_map(lambda r: r * kit.ops.sum(r), x))
    return kit.around(lambda x: kit.ops.map_fn(lambda r: r * kit.ops.sum(r), x))


@model("gradient reversal")
def reversal(kit):
    """Of domain-adversarial training."""
    return kit.around(lambda x: kit.with_gradient(x, lambda gradient: -0.5 * gradient))


# Rows that depend on each other ------------------------------------------------------------------

ACROSS = {
    "Lambda: less the mean of the batch": lambda o, x: x - o.mean(x, axis=0, keepdims=True),
    "Lambda: softmax over the batch": lambda o, x: o.over_rows(x, o.softmax),
    "Lambda: attention between rows": lambda o, x: o.matmul(o.softmax(o.similar(x, x)), x),
    "Lambda: rows shifted by one": lambda o, x: o.concatenate([x[1:], x[:1]], axis=0),
    "Lambda: mixup with the rows reversed": lambda o, x: 0.7 * x + 0.3 * o.flip(x, 0),
    "Lambda: cumulative sum over rows": lambda o, x: o.cumsum(x, axis=0),
    "Lambda: divided by the number of rows": lambda o, x: x / o.rows(x),
    "Lambda: the first row added to all": lambda o, x: x + x[:1],
    "Lambda: transposed and reshaped": lambda o, x: o.reshape(o.transpose(x), (-1, 6)),
}


@model("gradient of a fixed length")
def fixed_length(kit):
    """Scale a gradient to a fixed length over all rows."""
    return kit.around(lambda x: kit.with_gradient(x, kit.ops.unit_in_all))


@model("gradient of a weight, of a fixed length")
def fixed_length_of_weight(kit):
    """Scale a weight's gradient, which is a sum over the rows, to a fixed length."""

    def build(layer):
        layer.kernel = kit.weight(layer, "kernel", WIDTH, WIDTH)

    def call(layer, x):
        kernel = kit.tensor(layer.kernel) * 1.0  # a tensor, whatever a variable is
        return kit.ops.matmul(x, kit.with_gradient(kernel, kit.ops.unit_in_all))

    return kit.with_layer(kit.layer(call, build))


@model("Lambda: virtual batches of six")
def virtual(kit):
    def ghosts(x):
        parts = kit.ops.reshape(x, (-1, 6, 6))
        parts = parts - kit.ops.mean(parts, axis=1, keepdims=True)
        return kit.ops.reshape(parts, (-1, 6))

    setup = kit.around(ghosts)
    setup.rows = 12
    return setup


@around("GAN: minibatch discrimination", 7)
def discrimination(o, x):
    pairs = o.expand_dims(x, 0) - o.expand_dims(x, 1)
    near = o.exp(-o.sum(o.abs(pairs), axis=2))
    return o.concatenate([x, o.sum(near, axis=1, keepdims=True)], axis=1)


@around("GAN: minibatch standard deviation", 7)
def deviation(o, x):
    spread = o.mean(o.std(x, axis=0))
    return o.concatenate([x, 0.0 * x[:, :1] + spread], axis=1)


@around("Sinkhorn: normalised over rows and columns")
def sinkhorn(o, x):
    q = o.exp(x)
    for _ in range(2):
        q = q / o.sum(q, axis=0, keepdims=True)
        q = q / o.sum(q, axis=1, keepdims=True)
    return q


@model("graph convolution: a batch is a graph")
def graph(kit):
    """Convolve over a graph whose adjacency has a row and a column for each node."""
    nodes, edges = kit.input(), kit.input(12)
    hidden = kit.apply(lambda both: kit.ops.matmul(both[1], both[0]), [kit.dense(nodes), edges])
    setup = _setup(kit, [nodes, edges], hidden)
    setup.rows = 12
    return setup


def _setup(kit, inputs, hidden):
    return Setup(kit.model(inputs, kit.dense(hidden, 2, None)))


for _name, _function in list(EACH_ROW.items()) + list(ACROSS.items()):
    around(_name)(_function)
