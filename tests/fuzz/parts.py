"""What a program may name, on whichever Keras is under test, and what that Keras lacks."""

import functools
import inspect

from kerases import is_keras_3, runs_eagerly

from compat import _keras


def lacks(keras):
    """Parts of programs that this Keras cannot train, on one device either."""
    backend = _keras.backend_name(keras)
    missing = set()
    if not runs_eagerly(keras):
        missing |= {"row counts", "subclass", "run_eagerly"}
        missing |= {"norm of images"}  # fused, which TensorFlow 1 can do in 32 bits only
        missing |= {"Adam"}  # reads its step counter before or after it grows: never twice the same
        if backend == "tensorflow" and keras.__name__ == "keras":
            missing |= {"batch norm"}  # multiplies 64 bits by 32
    if is_keras_3(keras):
        missing |= {"loss of the model", "weights of sequences"}
    if backend == "torch":
        missing |= {"Conv2DTranspose", "stateful"}  # it cannot take their gradient
    names = ["Conv2DTranspose", "SeparableConv2D", "Softmax", "Bidirectional"]
    missing |= {name for name in names if not hasattr(keras.layers, name)}
    if backend == "jax":
        missing |= {"run_eagerly"}  # slower than compiled, there
    if backend not in ("torch", "mxnet"):
        missing |= {"speed"}
    if backend == "theano":
        missing |= {"loops"}  # they take minutes to compile
    if backend == "mxnet":
        # Its unrolled loops take their input from no layer, and know no number of rows when
        # something is made of theirs and another's output; it normalises images alone.
        missing |= {"RNN", "repeat", "Concatenate"}
        missing |= {"Bidirectional", "Conv2DTranspose", "Dot", "loops", "state"}
    return missing


def namespace(keras, operations=None):
    """Return the names that a program's text uses; ``operations``: where they are drawn from."""
    names = {name: getattr(keras.layers, name) for name in dir(keras.layers)}
    names.update(l1=keras.regularizers.l1, l2=keras.regularizers.l2)
    names.update(Sequential=keras.models.Sequential, Model=keras.models.Model)
    for name, long in (("max_norm", "MaxNorm"), ("non_neg", "NonNeg"), ("unit_norm", "UnitNorm")):
        names[name] = getattr(keras.constraints, name, None) or getattr(keras.constraints, long)
    if "batch_shape" not in inspect.signature(keras.layers.Input).parameters:
        names["Input"] = functools.partial(_input, keras)
    names.update(_own_layers(keras, operations))
    return names


def _input(keras, shape=None, batch_shape=None):
    if batch_shape:
        return keras.layers.Input(shape=batch_shape[1:], batch_size=batch_shape[0])
    return keras.layers.Input(shape=shape)


def _own_layers(keras, operations):
    """Return the layers that tests define, as a user would write them for this Keras."""
    K = keras.ops if is_keras_3(keras) else keras.backend
    eager = runs_eagerly(keras)
    reduce = {"mean": K.mean, "sum": K.sum}

    class Layer(keras.layers.Layer):
        def __init__(self, how="mean"):
            super().__init__()
            self.how = how

        def compute_output_shape(self, input_shape):
            return input_shape

    class AddLoss(Layer):
        """Adds the mean, or the sum, of its input's squares to the loss."""

        def call(self, inputs):
            loss = 0.05 * reduce[self.how](K.square(inputs))
            self.add_loss(loss) if eager else self.add_loss(loss, inputs)
            return inputs * 1.0

    class AcrossRows(Layer):
        """Computes each row from others of the batch, too."""

        def call(self, inputs):
            if self.how == "centre":
                return inputs - K.mean(inputs, axis=0, keepdims=True)
            if self.how == "largest":
                return inputs - K.max(inputs, axis=0, keepdims=True)
            if self.how == "share":
                return inputs / (1.0 + K.sum(K.square(inputs)))
            weights = K.exp(inputs)
            return inputs * weights / K.sum(weights, axis=0, keepdims=True)

    class Operation(keras.layers.Layer):
        """What an operation makes of its input, added to that."""

        def __init__(self, text, kind):
            super().__init__()
            self.text, self.kind = text, kind

        def call(self, inputs):
            return operations.apply(self.text, self.kind, inputs)

        def compute_output_shape(self, input_shape):
            return input_shape

    class Tally(Layer):
        """Adds to its input what it has seen so far, in a variable that is not trained."""

        def build(self, input_shape):
            self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False)
            super().build(input_shape)

        def call(self, inputs):
            rows = K.sum(K.ones_like(inputs[:, 0]))
            seen = {
                "count": lambda: self.seen + 1.0,
                "rows": lambda: self.seen + rows,
                "sum": lambda: self.seen + K.sum(inputs),
                "mean": lambda: K.mean(inputs),
                "moving": lambda: 0.9 * self.seen + 0.1 * K.mean(inputs),
            }[self.how]()
            if not eager:  # and in no order with what reads it
                self.add_update([K.update(self.seen, seen)], inputs)
                return inputs * 1.0
            outputs = inputs + 0.01 * self.seen
            self.seen.assign(seen)
            return outputs

    class Broadcast(Layer):
        """The sum of two inputs, of which one may have a single row."""

        def call(self, inputs):
            return inputs[0] + inputs[1]

        def compute_output_shape(self, input_shape):
            return input_shape[0]

    def total(y_true, y_pred):
        return 0.1 * K.sum(K.square(y_true - y_pred))

    def contrastive(y_true, y_pred):
        centre = K.mean(y_pred, axis=0, keepdims=True)
        return K.mean(K.square(y_pred - centre - y_true), axis=-1) * K.mean(y_pred * y_pred)

    class Subclassed(keras.models.Model):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.inner = keras.models.Model(inputs, outputs)
            self(inputs[0] if len(inputs) == 1 else inputs)  # which builds it

        def call(self, inputs, training=None):
            return self.inner(inputs, training=training)

    def reduced(reduction):
        return lambda tensor: 0.05 * reduction(K.square(tensor))

    own = {"mean": reduced(K.mean), "sum": reduced(K.sum), "total": total}
    own.update(contrastive=contrastive, AddLoss=AddLoss, AcrossRows=AcrossRows, Tally=Tally)
    own.update(Broadcast=Broadcast, Subclassed=Subclassed, Operation=Operation)
    return own
