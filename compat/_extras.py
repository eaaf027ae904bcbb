"""Which extra of keras-gpu-compat brings a backend, on this Python. For the texts of errors."""

import sys

# The oldest and the newest Python on which each installs, as in docs/install.md. Extras that are
# not here are those of third parties.
PYTHONS = {
    "cntk": ((3, 6), (3, 6)),
    "jax": ((3, 11), (3, 13)),
    "keras3": ((3, 11), (3, 13)),
    "mxnet": ((3, 6), (3, 8)),
    "mxnet15": ((3, 6), (3, 6)),
    "mxnet16": ((3, 6), (3, 6)),
    "tensorflow": ((3, 8), (3, 13)),
    "tensorflow1": ((3, 6), (3, 7)),
    "tensorflow112": ((3, 6), (3, 6)),
    "tensorflow14": ((3, 6), (3, 6)),
    "tensorflow20": ((3, 6), (3, 7)),
    "tensorflow23": ((3, 6), (3, 7)),
    "tf_keras": ((3, 11), (3, 13)),
    "theano": ((3, 6), (3, 8)),
    "torch": ((3, 11), (3, 13)),
}


def here():
    """This Python's version, (3, 11)."""
    return sys.version_info[:2]


def installs(extra):
    """Whether pip finds all that an extra names on this Python."""
    oldest, newest = PYTHONS.get(extra, (here(), here()))
    return oldest <= here() <= newest


def pythons(extra):
    """On which Pythons an extra installs, as a phrase."""
    texts = ["{}.{}".format(*each) for each in PYTHONS[extra]]
    word = " to " if PYTHONS[extra][1][1] - PYTHONS[extra][0][1] > 1 else " or "
    return "Python " + word.join(sorted(set(texts), key=texts.index))


def of(backends, keras=(None, None)):
    """The extra that brings one of these backends, all of one framework.

    With the generation of Keras that is installed, as far as an extra with it installs here. Where
    none does, the extra to install on another Python.

    Arguments:
        keras: the first two numbers of the version of Keras that is installed.
    """
    extras = [backend.extra for backend in backends]
    if set(extras) <= {"tensorflow", "tensorflow1"}:
        extras = _of_tensorflow("tensorflow1" in extras, "tensorflow" in extras, keras)
    return next(filter(installs, extras), extras[0])


def _of_tensorflow(one, two, keras):
    """The extras that bring TensorFlow 1, 2 or either, the one that fits that Keras first."""
    old = keras[0] == 2 and keras < (2, 4)
    return (
        ["keras3"] * (two and keras[0] == 3)
        + ["tensorflow14"] * (one and old and keras < (2, 1))
        + ["tensorflow112"] * (one and old and keras < (2, 2))
        + ["tensorflow1"] * (one and (old or not two or keras[0] is None))
        + ["tensorflow", "tensorflow23"] * two
    )
