"""The fixture ``compat_twins``: a model on one device and on all, trained alike and compared."""

import os
import random
from typing import Any, Callable, Dict, List

import numpy as np
import pytest

from ... import _api, _keras, _ranks, _verification, errors
from ..._configuration import settings
from ..._runtime.process import process

SHOWN = 10  # of what differs


class Twins:
    """Two models that ``build`` gives, with equal weights: one on one device, one on all.

    If nothing has called ``configure_gpu()``, it is called, without arguments.

    Arguments:
        build: builds a model and compiles it; called twice. It may call ``parallelize()`` itself.
        weights: for models of no Keras, a function that gives the arrays of a model, as a list.
            ``build`` then has to give equal ones each time.
        tolerance: how far weights and losses may be apart, absolute, or relative to their size
            where that is above 1.

    Attributes:
        one, several: the models.
        devices: where the second one runs.
        worked: the matrix products and convolutions, forward and backward, that each device ran in
            the first training step, as the framework recorded them.

    Raises:
        DevicesNotFoundError: there is one device only.
        NotAModelError: ``build`` gives no model of Keras, and there is no ``weights``.
        InvalidArgumentError: ``build`` gives the same object twice, or other weights each time, or
            none yet.
        UnsupportedError: this process is one of several ranks.
    """

    def __init__(self, build: Callable[[], Any], weights=None, tolerance: float = 1e-5) -> None:
        place = _ranks.own_place()
        if place is not None:
            remedy = "Start pytest without a launcher."
            raise errors.unsupported("compat_twins", f"train in {place}", remedy)
        configuration = process.configuration or _api.configure_gpu()
        backend = _api.configured_backend()
        # Works where nothing has run before this on the framework.
        os.environ.update(backend.recording)
        process.records_operations = True
        self.devices = list(configuration.devices)
        if len(self.devices) < 2:
            raise errors.DevicesNotFoundError(
                "compat_twins compares several devices with one, but this process has "
                f"{self.devices[0]} only. Ask for simulated ones: compat_simulate = 3 in pytest's "
                "configuration, --compat-simulate 3, or @pytest.mark.compat(simulate=3) on the "
                "test."
            )
        self.tolerance = tolerance
        self.one, self.several = build(), build()
        if not weights and _keras.keras_of(self.one) is None:
            raise errors.NotAModelError(
                "compat_twins reads the weights of Keras models by itself; for "
                f"{errors.class_of(self.one)} give weights=, a function that returns its arrays "
                "as a list."
            )
        self._weights = weights or (lambda model: model.get_weights())
        if self.one is self.several:
            raise _refused(build, "the same model each time. Have it build a new one")
        _api.parallelize(self.one, gpus=1)
        _api.parallelize(self.several)
        first, second = self._weights(self.one), self._weights(self.several)
        if not len(first):
            raise _refused(
                build,
                "a model that has no weights yet, so the two cannot begin with equal ones. Give "
                "its first layer an input shape, or build it before it is returned",
            )
        alike = [np.shape(a) for a in first] == [np.shape(a) for a in second]
        if alike and _keras.keras_of(self.one) is not None:
            self.several.set_weights(first)
        elif not alike or _verification.largest_difference(first, second) != 0:
            raise _refused(build, "other weights each time. Seed what draws them")
        self.labels = _labels(self.one, first)
        name = getattr(self.several, "name", type(self.several).__name__)
        self._verification = _verification.Verification(name, self.devices, 1)
        backend.verify(self.several, self._verification)

    @property
    def worked(self) -> Dict[str, Any]:
        return dict(self._verification.record.operations)

    def fit(self, *args: Any, **kwargs: Any) -> List[Any]:
        """Call ``fit()`` of both models; compare their histories and weights.

        Batches are not shuffled, unless ``shuffle`` says so: each Keras has a generator of its
        own for that. Fails as ``train()`` does.

        Returns:
            What both returned.

        Raises:
            InvalidArgumentError: an argument is an iterator, which has data for one model only.
        """
        __tracebackhide__ = True
        for argument in args + tuple(kwargs.values()):
            if hasattr(argument, "__next__"):
                raise errors.InvalidArgumentError(
                    f"twins.fit() trains two models, but the {type(argument).__name__} that it "
                    "was given can be read only once. Give arrays or a Sequence, or call "
                    "twins.train() with a function that makes a new one for each model."
                )
        kwargs.setdefault("shuffle", False)
        return self.train(lambda model: model.fit(*args, **kwargs))

    def train(self, function: Callable[[Any], Any]) -> List[Any]:
        """Call ``function(model)``, which trains, for both models; compare its results and weights.

        The generators of ``random`` and numpy begin anew with the same seed each time. The test
        fails where anything is farther apart than the tolerance, where no weight has changed, and
        where not all devices worked.

        Arguments:
            function: returns what Keras' ``fit()`` or ``train_on_batch()`` does: numbers, lists,
                arrays or a dictionary of these; or None.

        Returns:
            Both results.
        """
        __tracebackhide__ = True
        before = [np.array(array) for array in self._weights(self.one)]
        results = []
        for model in (self.one, self.several):
            random.seed(0)
            np.random.seed(0)
            results.append(function(model))
        first, second = (self._numbers(*pair) for pair in zip((self.one, self.several), results))
        where = f"on {settings.listed(self.devices)} and on {self.devices[0]}"
        labels = dict.fromkeys([*first, *second])
        differences = {
            label: self._difference(first.get(label), second.get(label)) for label in labels
        }
        problems = [
            f"{label}: {difference}" for label, difference in differences.items() if difference
        ]
        if problems:
            more = len(problems) - SHOWN
            lines = problems[:SHOWN] + [f"and {more} more"] * (more > 0)
            pytest.fail(self._text(f"trained differently {where}", lines))
        if not _verification.largest_difference(before, self._weights(self.one)) > 0:
            pytest.fail(self._text(f"changed no weight {where}", ["nothing was compared"]))
        record = self._verification.record
        if not record.operations:
            errors.warn(
                f"compat_twins: no step of model {record.model!r} was seen, so it is not known "
                "which devices worked."
            )
        elif _verification.same(record.as_dict()) is False:
            pytest.fail(self._text("did not run on all devices", []))
        return results

    def _numbers(self, model, result):
        """Return all that is compared, by label."""
        result = getattr(result, "history", result)
        if not isinstance(result, dict):
            result = {} if result is None else {"result": result}
        numbers = {"weight " + n: np.asarray(a) for n, a in zip(self.labels, self._weights(model))}
        numbers.update((str(name), np.asarray(value, "float64")) for name, value in result.items())
        return numbers

    def _difference(self, first, second):
        """By how much two arrays differ, in words; "" where that is rounding."""
        shapes = [None if array is None else np.shape(array) for array in (first, second)]
        if None in shapes or shapes[0] != shapes[1]:
            return "its shape is {} on one device and {} on several".format(*shapes)
        difference = _verification.largest_difference([first], [second]) if np.size(first) else 0.0
        limit = self.tolerance * max(1.0, float(np.abs(first).max()) if np.size(first) else 1.0)
        if difference <= limit:  # NaN is not
            return ""
        text = f"differs by {difference:.3g}, the tolerance is {limit:.3g}"
        if np.size(first) <= 4:
            values = (np.array2string(np.ravel(array), precision=7) for array in (first, second))
            text += " ({} on one device, {} on several)".format(*values)
        return text

    def _text(self, what, lines):
        record = self._verification.record
        lines = [f"model {record.model!r} {what}"] + ["  " + line for line in lines]
        return "\n".join(lines + _verification.shown(record.as_dict())[1:])


def _refused(build, gives):
    name = getattr(build, "__name__", type(build).__name__)
    return errors.InvalidArgumentError(f"compat_twins({name}): {name}() gives {gives}.")


def _labels(model, arrays):
    """Return names for what ``get_weights()`` gives.

    In the order of the layers, or of ``weights``.
    """
    if _keras.keras_of(model) is not None:
        read, _ = _keras.reader_and_writer(model)
        by_layer = [variable for layer in model.layers for variable in layer.weights]
        for variables in (by_layer, list(model.weights)):
            values = read(variables)
            if len(values) == len(arrays) and all(map(np.array_equal, values, arrays)):
                return [getattr(each, "path", None) or each.name for each in variables]
    return [str(number) for number in range(len(arrays))]
