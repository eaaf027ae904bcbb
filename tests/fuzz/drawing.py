"""Choices from a seed, and the lines of a model that they make."""

import collections
import random

# An output of a layer: the name of the variable that holds it, its shape without the rows, and
# whether it carries a mask.
Tensor = collections.namedtuple("Tensor", "name shape masked")
Tensor.__new__.__defaults__ = (False,)


def call_of(kind, *arguments):
    """Return the text of a call, without empty arguments."""
    return "{}({})".format(kind, ", ".join(str(a) for a in arguments if a != ""))


class Drawing:
    """Draws from a seed, and writes down layers.

    Attributes: ``lines`` of the model, and the ``tensors`` that they make; ``eager``: whether
    nothing is compiled, which takes most of the time where it is optional.
    """

    def __init__(self, seed, lacks):
        self.seed = seed
        self.lacks = set(lacks)
        self.random = random.Random(seed)
        self.lines = []
        self.tensors = []
        self.eager = "run_eagerly" not in self.lacks and self.chance(0.8)

    def chance(self, probability):
        return self.random.random() < probability

    def pick(self, *choices):
        """One of these; a choice that the Keras under test lacks is never drawn."""
        return self.random.choice([c for c in choices if c not in self.lacks])

    def few(self, *numbers):
        """One of these numbers, of the first half where each costs time."""
        slow = "speed" in self.lacks and not self.eager
        return self.random.choice(numbers[: (len(numbers) + 1) // 2] if slow else numbers)

    def layer(self, kind, arguments, shape, *tensors, **options):
        """Write down one more layer, applied to these tensors; the tensor that comes out."""
        text = call_of(kind, *arguments)
        masked = options.pop("masked", False)
        return self.apply(text, shape, *tensors, masked=masked, **options)

    def apply(self, layer, shape, *tensors, **options):
        """Write down the call of something that is a layer."""
        name = "t{}".format(len(self.tensors))
        names = [tensor.name for tensor in tensors]
        call = [names[0] if len(names) == 1 else "[{}]".format(", ".join(names))]
        masked = options.pop("masked", False)
        call += ["{}={}".format(key, value) for key, value in sorted(options.items())]
        self.lines.append("{} = {}({})".format(name, layer, ", ".join(call)))
        self.tensors.append(Tensor(name, tuple(shape), masked))
        return self.tensors[-1]

    def activation(self):
        return "activation={!r}".format(self.pick("tanh", "relu", "sigmoid", "linear", "softplus"))

    def weights(self, name="kernel"):
        """Return a regularizer or a constraint of a layer's weights, or nothing."""
        if self.chance(0.7):
            return ""
        return name + self.pick(
            "_regularizer=l2(0.1)", "_regularizer=l1(0.05)",
            "_constraint=max_norm(0.8)", "_constraint=non_neg()", "_constraint=unit_norm()",
        )  # fmt: skip
