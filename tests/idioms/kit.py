"""What idioms are written in: one vocabulary for every Keras, and how a model is trained."""

import contextlib

import numpy as np
from kerases import is_keras_3, one, optimizer, randomized, runs_eagerly

import compat
from compat import _keras

#: Rows of a batch, which three devices cannot divide evenly.
ROWS = 13
STEPS = 2
DEVICES = 3
WIDTH = 6


class Setup:
    """A model to train, and how.

    Arguments:
        model: not compiled.
        loss: for ``compile``.
        data: a function of a ``RandomState`` and a number of rows: inputs and targets.
        fit: options of ``train_on_batch``, from the same.
        compile: more options of ``compile``.
        rows: of each batch, where the model has them fixed.
    """

    def __init__(self, model, loss="mse", data=None, fit=None, rows=None, **compile):
        self.model = model
        self.loss = loss
        self.data = data
        self.fit = fit
        self.rows = rows
        self.compile = compile


class Observed(list):
    """What a run has shown: names and arrays."""

    def note(self, what, *values):
        self.append((what, [np.array(value, dtype="float64") for value in values]))


class Ops:
    """The names of ``keras.ops``, also where a Keras 2 calls them otherwise."""

    renamed = {"matmul": "dot", "transpose": "transpose", "flip": "reverse", "where": "switch"}

    def __init__(self, keras):
        self.is_3 = is_keras_3(keras)
        self.all = keras.ops if self.is_3 else keras.backend
        self.floatx = keras.backend.floatx()

    def __getattr__(self, name):
        return getattr(self.all, name if self.is_3 else self.renamed.get(name, name))

    def take(self, x, indices):
        return self.all.take(x, indices, axis=0) if self.is_3 else self.all.gather(x, indices)

    def rows(self, x):
        """How many there are, as a float."""
        return self.all.cast(self.all.shape(x)[0], self.floatx)

    def swap(self, x):
        """Return an array with its first two axes exchanged."""
        axes = (1, 0) + tuple(range(2, len(x.shape) if self.is_3 else self.all.ndim(x)))
        return self.all.transpose(x, axes) if self.is_3 else self.all.permute_dimensions(x, axes)

    def unit(self, x):
        """Rows of length 1."""
        square = self.all.sum(self.all.square(x), axis=-1, keepdims=True)
        return x / self.all.sqrt(square + 1e-6)

    def unit_in_all(self, x):
        """All rows together as one vector of length 1."""
        return x / self.all.sqrt(self.all.sum(self.all.square(x)) + 1e-6)

    def similar(self, x, y):
        """Return the products of all rows of ``x`` with all rows of ``y``."""
        return self.matmul(x, self.all.transpose(y))

    def over_rows(self, x, function):
        """Return a softmax or the like over the rows of each column."""
        return self.all.transpose(function(self.all.transpose(x)))

    def random(self, x, stddev):
        """As many random numbers as ``x`` has, of no consequence where ``stddev`` is 0."""
        if self.is_3:
            import keras

            return keras.random.normal(self.all.shape(x), stddev=stddev, dtype=x.dtype)
        return self.all.random_normal(self.all.shape(x), stddev=stddev)


class Kit:
    """What a Keras has for idioms: its layers, its operations, and models around them."""

    def __init__(self, keras):
        self.keras = keras
        self.layers = keras.layers
        self.ops = Ops(keras)
        self.backend = _keras.backend_name(keras)
        self.is_3 = is_keras_3(keras)
        self.eager = runs_eagerly(keras)
        self.floatx = keras.backend.floatx()
        self.rows = ROWS

    # Models --------------------------------------------------------------------------------------

    def input(self, *shape, **options):
        return self.layers.Input(shape=shape or (WIDTH,), **options)

    def dense(self, x, width=WIDTH, activation="tanh", **options):
        return self.layers.Dense(width, activation=activation, **options)(x)

    def apply(self, function, x, *shape):
        """Return a Lambda layer; ``shape`` is that of its outputs, without the rows."""
        return self.layers.Lambda(function, output_shape=shape or (WIDTH,))(x)

    def model(self, inputs, outputs):
        return self.keras.models.Model(inputs, outputs)

    def around(self, function, *shape):
        """Return a model with a Lambda layer between two others."""
        x = self.input()
        found = self.apply(function, self.dense(x), *shape)
        if len(shape) > 1:
            found = self.layers.Flatten()(found)
        return Setup(self.model(x, self.dense(found, 2, None)))

    def with_layer(self, layer):
        """Return a model with this layer between two others."""
        x = self.input()
        return Setup(self.model(x, self.dense(layer(self.dense(x)), 2, None)))

    def with_loss(self, loss, width=4, activation=None, data=None, **options):
        """Return a model that is trained on a custom loss."""
        x = self.input()
        return Setup(self.model(x, self.dense(self.dense(x), width, activation)), loss, data,
                     **options)  # fmt: skip

    def layer(self, call, build=None, output_shape=None):
        """Return a layer whose ``call(layer, x)`` and ``build(layer)`` are these functions."""

        class Own(self.layers.Layer):
            def build(self, input_shape):
                if build:
                    build(self)
                super().build(input_shape)

            def call(self, x):
                return call(self, x)

            def compute_output_shape(self, input_shape):
                return output_shape or input_shape

        return Own()

    def weight(self, layer, name, *shape, **options):
        """Make a variable of a layer in its ``build``, and return it."""
        options.setdefault("initializer", "zeros")
        return layer.add_weight(name=name, shape=shape, **options)

    def update(self, layer, variable, value, x):
        """Assign to a variable at each step, as each Keras has it."""
        if self.eager:
            variable.assign(value)
        else:
            layer.add_update([self.keras.backend.update(variable, value)], x)

    def add_loss(self, layer, loss, x):
        layer.add_loss(loss) if self.eager else layer.add_loss(loss, x)

    def with_gradient(self, x, function):
        """``x`` itself, whose gradient is a function of what comes back."""
        if self.is_3:

            def gradient(*given, **named):  # JAX gives it by position
                return function(named.get("upstream", given[-1] if given else None))

            return self.ops.custom_gradient(lambda y: (y * 1.0, gradient))(x)
        if self.backend == "tensorflow":
            import tensorflow as tf

            return tf.custom_gradient(lambda y: (tf.identity(y), function))(x)
        if self.backend == "theano":
            import theano

            class Turned(theano.compile.ViewOp):
                def grad(self, inputs, gradients):
                    return [function(gradients[0])]

            return Turned()(x)
        raise NotImplementedError("not by what Keras has")

    def tensor(self, values):
        """Keras 3 on torch hands arrays to steps of one's own."""
        return self.ops.convert_to_tensor(values) if self.is_3 else values

    def gradients(self, model, loss_of):
        """Return a loss, and pairs of gradient and weight, by a tape or autograd."""
        if self.backend == "torch":
            model.zero_grad()
            loss = loss_of()
            loss.backward()
            return loss, [(weight.value.grad, weight) for weight in model.trainable_weights]
        import tensorflow

        with tensorflow.GradientTape() as tape:
            loss = loss_of()
        variables = model.trainable_variables
        return loss, list(zip(tape.gradient(loss, variables), variables))

    def untracked(self):
        """Return the context in which autograd does not track computations."""
        if self.backend != "torch":
            return contextlib.ExitStack()
        import torch

        return torch.no_grad()

    # Data ----------------------------------------------------------------------------------------

    def shapes(self, tensors):
        shapes = (t.shape if self.is_3 else self.keras.backend.int_shape(t) for t in tensors)
        return [tuple(shape)[1:] for shape in shapes]

    def normal(self, random, model, rows):
        """Return random inputs and targets for a model."""
        return tuple(
            [random.normal(size=(rows,) + shape).astype(self.floatx) for shape in shapes]
            for shapes in (self.shapes(model.inputs), self.shapes(model.outputs))
        )

    # Training ------------------------------------------------------------------------------------

    def initialise(self, model):
        """Random weights; state stays as it is made."""
        model.set_weights(randomized(model, np.random.RandomState(5)))

    def compile(self, model, loss, **options):
        if self.eager and self.backend == "tensorflow":
            options.setdefault("run_eagerly", True)
        model.compile(optimizer(self.keras, "SGD", "momentum=0.5"), loss, **options)

    def parallel(self, model, parallel):
        """Return the model, on several devices if it is to be."""
        if parallel:
            compat.parallelize(model, gpus=DEVICES)
        return model

    def batch(self, setup, seed, rows):
        random = np.random.RandomState([seed, rows])
        inputs, targets = (setup.data or self._normal(setup))(random, rows)
        options = setup.fit(random, rows) if setup.fit else {}
        return one(inputs), one(targets), options

    def _normal(self, setup):
        return lambda random, rows: self.normal(random, setup.model, rows)

    def train(self, setup, parallel):
        """Train some steps of a model, and return what was observed."""
        observed, model = Observed(), setup.model
        self.initialise(model)
        self.parallel(model, parallel)
        self.compile(model, setup.loss, **setup.compile)
        observed.note("weights", *model.get_weights())
        rows = setup.rows or self.rows
        for step in range(STEPS):
            inputs, targets, options = self.batch(setup, step, rows)
            observed.note("loss", np.ravel(model.train_on_batch(inputs, targets, **options)))
            observed.note("weights", *model.get_weights())
        inputs, _, _ = self.batch(setup, STEPS, rows)
        found = model.predict(inputs, batch_size=rows, verbose=0)
        observed.note("predict", *(found if isinstance(found, list) else [found]))
        return observed
