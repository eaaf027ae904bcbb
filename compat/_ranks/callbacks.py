"""Callbacks of ``fit()`` on ranks, which decide the same on all ranks.

compat's own stand around the script's. The first ends each epoch on all ranks at once, so that the
script's callbacks see the results of all ranks. One behind each callback that may change the logs
has all ranks go on with the same numbers, and the last has all ranks stop where one wishes to.
"""

import collections
import itertools
import json
import zlib
from typing import Any, Dict, Set

from .. import _keras, errors
from . import checksum, saving

# Numbers of two ranks that differ by no more than this, relatively, differ by rounding.
_ROUNDING = 1e-5
_COMPARED = 16  # callbacks that may change logs


class FitCallbacks:
    """The callbacks of one ``fit()``.

    Arguments:
        fit: the model's ``RankedFit``.
        callbacks: what the script gave as ``callbacks``, or None.

    Attributes:
        callbacks: those that ``fit()`` gets.
        alone: whether no rank has callbacks of the script's.
        shares: behind how many of those that may change logs the ranks compare them: as many as
            all ranks have in the same order.
    """

    def __init__(self, fit, model, callbacks):
        callbacks = [] if callbacks is None else callbacks
        callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        callbacks = [callback for callback in callbacks if not _broadcasts(callback)]
        self.fit, self.model, self.engine = fit, model, fit.engine
        keras = _keras.keras_of(model)
        scripts = [callback for callback in callbacks if not hasattr(callback, "watches")]
        self.names = [type(callback).__name__ for callback in scripts]
        changing = [callback for callback in callbacks if _may_change_logs(callback)]
        self.changing = [type(callback).__name__ for callback in changing]
        # Whether a callback comes behind the last of these, and sees what it has put into the logs.
        self.is_followed = bool(changing) and scripts[-1] is not changing[-1]
        self.callbacks = [_epochs(keras, fit, model)]
        for callback in callbacks:
            self.callbacks += saving.written_by_rank_0(keras, self.engine.place, [callback])
            if any(callback is other for other in changing):
                self.callbacks.append(_shares(keras, self, len(changing)))
                changing.pop(0)
        self.callbacks.append(_stops(keras, self))
        self.alone, self.shares = not self.names, 0

    def numbers(self):
        """Return the numbers that ranks gather as ``fit()`` begins."""
        kinds = [zlib.crc32(name.encode()) % checksum.LARGEST for name in self.changing]
        return [bool(self.names), self.is_followed, *(kinds + [0] * _COMPARED)[:_COMPARED]]

    def agree(self, rows):
        """Agree on what ranks exchange in each epoch, by the numbers of all of them."""
        of_users, followed, *kinds = zip(*rows)
        self.alone = not any(of_users)
        alike = itertools.takewhile(lambda kind: kind[0] and len(set(kind)) == 1, kinds)
        self.shares = len(list(alike))
        # Where none comes behind the last one, the end of the epoch compares the logs.
        if self.shares and not any(followed) and not any(map(any, kinds[self.shares :])):
            self.shares -= 1

    def share(self, logs):
        """Have all ranks go on with the same logs."""
        shared = self.fit.logs
        shared.agree(logs, self.engine.gather(shared.numbers(logs)))

    def stop(self, logs):
        """Stop all ranks if one of them wants to stop."""
        fit = self.fit
        wished = bool(fit.wished or fit.trainee.stop_training)
        wishes, rows = self.engine.gather_each([[wished], fit.logs.numbers(logs)])
        fit.logs.agree(logs, rows)
        fit.trainee.stop_training = any(wish for (wish,) in wishes)

    def causes(self):
        """Return the likely causes of different weights after callbacks, as sentences."""
        names = list(map(json.loads, self.engine.gather_texts(json.dumps(self.names))))
        shared = collections.Counter(names[0])
        for names_of_rank in names[1:]:
            shared &= collections.Counter(names_of_rank)
        others = [list((collections.Counter(kinds) - shared).elements()) for kinds in names]
        if any(others):
            clauses = [
                f"rank {rank} has {', '.join(names_of_rank)}"
                for rank, names_of_rank in enumerate(others)
                if names_of_rank
            ]
            return (
                f"Not all ranks have the same callbacks: {'; '.join(clauses)}. Give a callback "
                "that sets weights, as EarlyStopping(restore_best_weights=True) does, to all ranks."
            )
        if self.names:
            return (
                f"{checksum.CAUSES} Or a callback ({', '.join(dict.fromkeys(self.names))}) has set "
                "weights by numbers that are each rank's own; those in logs are the same."
            )
        return checksum.CAUSES


def _broadcasts(callback):
    """Return whether a callback is Horovod's that broadcasts all variables after the first batch.

    Weights are rank 0's from the start. In Keras 2.3 it would set the state of metrics, too.
    """
    kind = type(callback)
    return kind.__module__.startswith("horovod.") and kind.__name__.startswith("Broadcast")


def _may_change_logs(callback):
    """Return whether a callback of a script or a library gets the logs of an epoch."""
    function = getattr(callback, "on_epoch_end", None)
    is_users = _keras.is_users(getattr(function, "__func__", function))
    return is_users and not hasattr(callback, "watches")


# compat's own callbacks -----------------------------------------------------------------------


def _epochs(keras, fit, model):
    """Return the callback that ends every epoch on all ranks at once."""

    class Epochs(keras.callbacks.Callback):  # type: ignore  # any Keras
        def on_train_begin(self, logs=None):
            fit.begun(self.params)

        def on_epoch_begin(self, epoch, logs=None):
            fit.epoch_begun()

        def on_epoch_end(self, epoch, logs=None):
            fit.epoch_ended(model, epoch + 1, self.params, logs)
            fit.logs.begin(logs)

    return Epochs()


def _shares(keras, callbacks, number):
    """Return the callback that stands behind one that may change logs.

    Arguments:
        keras: the Keras of the model.
        callbacks: the ``FitCallbacks``.
        number: how many of those that may change logs follow, that one included.
    """
    place = len(callbacks.changing) - number

    class Shares(keras.callbacks.Callback):  # type: ignore  # any Keras
        _supports_tf_logs = async_safe = True  # as below

        def on_epoch_end(self, epoch, logs=None):
            if place < callbacks.shares:
                callbacks.share(logs)

    return Shares()


def _stops(keras, callbacks):
    """Return the last callback, which stops all ranks together if one of them wants to stop.

    A rank that left its epoch at once would leave the others waiting for its next step.
    """
    fit = callbacks.fit

    class Stops(keras.callbacks.Callback):  # type: ignore  # any Keras
        # It takes no logs of batches, which Keras therefore need not wait for.
        _supports_tf_logs = async_safe = True

        def set_model(self, model):
            # Not as ``self.model``, with which Keras on JAX brings all state to the model. It
            # is the one that callbacks see: before Keras 2.2 another one.
            fit.trainee = model

        def on_batch_end(self, batch, logs=None):
            fit.wished = fit.wished or fit.trainee.stop_training
            fit.trainee.stop_training = False

        def on_epoch_end(self, epoch, logs=None):
            if not callbacks.alone:
                callbacks.stop(logs)

    return Stops()


# Numbers in logs ------------------------------------------------------------------------------


class SharedLogs:
    """The logs of an epoch, which stay the same on all ranks though callbacks change them."""

    def __init__(self, engine):
        self.engine = engine
        self.shared: Dict[str, Any] = {}
        self.warned: Set[str] = set()

    def begin(self, logs):
        """Note logs that are the same on all ranks."""
        self.shared = dict(logs)

    def changed(self, logs):
        """Return the numbers that callbacks have set since, by name."""
        missing = object()
        changed = [(k, v) for k, v in logs.items() if self.shared.get(k, missing) is not v]
        numbers = [(str(name), _number(value)) for name, value in changed]
        return {name: number for name, number in numbers if number is not None}

    def numbers(self, logs):
        """Return the numbers that ranks gather to compare their logs."""
        return checksum.of_text(repr(sorted(self.changed(logs).items())))

    def agree(self, logs, rows):
        """Make the logs the same on all ranks, if they are not by what the ranks have gathered."""
        if not checksum.same(rows):
            self._combine(logs)
        self.begin(logs)

    def _combine(self, logs):
        """Set each number to its mean over the ranks that have it."""
        mine, ranks = self.changed(logs), range(self.engine.place.size)
        texts = self.engine.gather_texts(json.dumps(sorted(mine)))
        names = sorted({name for text in texts for name in json.loads(text)})
        values = [
            mine[name] if rank == self.engine.place.rank and name in mine else 0.0
            for name in names
            for rank in ranks
        ]
        values = iter(self.engine.sum(values).tolist())
        has = [set(json.loads(text)) for text in texts]
        for name in names:
            of_ranks = {rank: v for rank, v in zip(ranks, values) if name in has[rank]}
            mean = sum(of_ranks.values()) / len(of_ranks)
            logs[name] = mean
            self._warn(name, of_ranks, mean)

    def _warn(self, name, of_ranks, mean):
        spread = max(of_ranks.values()) - min(of_ranks.values())
        is_same = len(of_ranks) == self.engine.place.size and spread <= _ROUNDING * abs(mean)
        if is_same or name in self.warned:
            return
        self.warned.add(name)
        values = [
            (f"{of_ranks[rank]:.4g}" if rank in of_ranks else "none") + f" on rank {rank}"
            for rank in range(self.engine.place.size)
        ]
        errors.warn(
            f"A callback of fit() has put {name!r} into the logs, and not the same number on each "
            f"rank: {', '.join(values)}. All ranks go on with the mean, {mean:.4g}, so that "
            "callbacks decide alike; it need not be one process's number. Compute it from the "
            "same data on every rank, or as a metric that is given to compile()."
        )


def _number(value):
    try:
        is_number = not isinstance(value, str) and not getattr(value, "shape", None)
        return float(value) if is_number else None
    except (TypeError, ValueError):
        return None
