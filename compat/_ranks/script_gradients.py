"""Gradients that a script of Keras 2 computes itself, besides those of its model's training step.

Gradients of ``model.total_loss`` are the mean over all ranks, wherever they are computed. Gradients
of other tensors stay those of this rank's rows, and results computed from them are reported here.
"""

import weakref
from typing import Any, Set

from .. import errors

_MEAN = "Take gradients of {}: those are the mean over all ranks."
_OF_TOTAL_LOSS = _MEAN.format("model.total_loss, after parallelize() and compile()")
_OF_GIVEN_LOSS = _MEAN.format("the loss that get_updates() or get_gradients() is called with")

_warned: "weakref.WeakKeyDictionary[Any, Set[str]]" = weakref.WeakKeyDictionary()  # of subjects


def _warn_once(model, subject, lines):
    warned = _warned.setdefault(model, set())
    if lines and subject not in warned:
        warned.add(subject)
        errors.warn(
            f"{subject} {model.name!r} is computed from gradients of this rank's rows alone"
            f"{errors.at_lines(lines)}, so that it is not what one process computes. "
            f"{_OF_TOTAL_LOSS}"
        )


def warn_of_metrics(model, outputs, lines_of):
    """Warn of the metrics of a function of Keras' that use gradients of this rank's rows.

    Arguments:
        model: the one that Keras has made the function for.
        outputs: those of the function; the first one is the loss.
        lines_of: a function of tensors: the lines that computed such gradients for them.
    """
    names = list(model.metrics_names)
    names = names[1:] if len(names) == len(outputs) else [None] * len(outputs)
    for name, output in zip(names, outputs[1:]):
        subject = "A metric of" if name is None else f"Metric {name!r} of"
        _warn_once(model, subject, lines_of([output]))


def warn_of_function(model, lines):
    """Warn of a ``K.function()`` of the script that returns gradients of this rank's rows."""
    _warn_once(model, "What K.function() returns of", lines)


def refuse_updates(model, lines):
    """Refuse an optimizer whose updates use gradients of this rank's rows.

    Raises:
        RankError: there are lines at which it computes them.
    """
    if lines:
        raise errors.RankError(
            f"The optimizer of {model.name!r} computes its updates from gradients of this rank's "
            f"rows alone{errors.at_lines(lines)}. The ranks would train to other numbers than "
            f"one process. {_OF_GIVEN_LOSS}"
        )
