"""All idioms by name: what was written around Keras, TensorFlow, torch and MXNet for years."""

import collections

#: ``run(kit, parallel)`` gives what was observed; ``native`` are those without Keras.
Idiom = collections.namedtuple("Idiom", "name run native")

IDIOMS = collections.OrderedDict()  # by name


def _add(name, run, native=False):
    assert name not in IDIOMS, name
    IDIOMS[name] = Idiom(name, run, native)


def model(name):
    """Return an idiom that is a model: a function makes its ``Setup`` of a ``Kit``."""

    def add(function):
        _add(name, lambda kit, parallel: kit.train(function(kit), parallel))
        return function

    return add


def script(name):
    """Return an idiom that does more than ``fit``: a function of whether to parallelize."""

    def add(function):
        _add(name, function)
        return function

    return add


def native(name):
    """Return an idiom without Keras; see natives.py."""

    def add(function):
        _add(name, lambda kit, parallel: kit.run(function, parallel), native=True)
        return function

    return add
