"""Divisors of losses before Keras 2.3 besides the number of rows: masks and sample weights.

The loss of an output is divided by the share of its rows that a mask leaves, and by that of the
sample weights that are not zero. A rank knows both of its own rows before it runs a function.
"""

import numpy as np

from .. import _keras, errors

# In place of weights that are all zero, by whose number Keras would divide: adds nothing.
_NEXT_TO_NOTHING = 1e-30


class Divisors:
    """The divisors of the losses of a model, and their correction to those of all ranks.

    Arguments:
        model: the one that Keras has made a function for.

    Attributes:
        places: those of the sample weights among the inputs of the function.
        masks: of outputs with a loss, by their places among these.
    """

    def __init__(self, model):
        self.model = model
        self.places, self.masks = range(0), {}
        if knows_divisors(model):
            before = len(model._feed_inputs) + len(model._feed_targets)
            self.places = range(before, before + len(model._feed_sample_weights))
            self.masks = masks_of(model)
        self._masked_means = None  # the function of ``_unmasked``
        self._factors = None  # in a step: by which each output's unweighted metrics are too large

    def of_inputs(self, inputs):
        """Return the share that masks leave, and that of nonzero weights, for each output.

        Raises:
            UnsupportedError: a mask leaves no rows.
        """
        unmasked = [1.0] * len(self.places)
        for output, mean in zip(sorted(self.masks), self._unmasked(inputs) if self.masks else ()):
            unmasked[output] = float(mean)
            if not unmasked[output]:
                raise errors.UnsupportedError(
                    "All rows of a batch on one rank are masked in output {!r} of {!r}: this "
                    "Keras divides by the number of those left. Shuffle the rows, or use "
                    "larger batches.".format(self.model.output_names[output], self.model.name)
                )
        return unmasked + [float(np.mean(inputs[place] != 0)) for place in self.places]

    def _unmasked(self, inputs):
        model = self.model
        K = _keras.keras_of(model).backend
        rest = list(inputs[self.places[-1] + 1 :])
        if self._masked_means is None:
            masks = [self.masks[output] for output in sorted(self.masks)]
            means = [K.mean(K.cast(mask, K.floatx())) for mask in masks]
            phase = [K.learning_phase()] * bool(rest)
            self._masked_means = K.function(model._feed_inputs + phase, means)
        return self._masked_means(list(inputs[: len(model._feed_inputs)]) + rest)

    def corrected(self, inputs, divisors, all_ranks):
        """Return inputs whose sample weights make each loss a part of that of all ranks.

        Arguments:
            inputs: of the function, in this step.
            divisors: what ``of_inputs`` has returned for them.
            all_ranks: the same of the rows of all ranks.
        """
        outputs = len(self.places)
        ratios = [m / a if a else 1.0 for m, a in zip(divisors, all_ranks)]
        self._factors = ratios[:outputs]
        if all(ratio == 1.0 for ratio in ratios):
            return inputs
        inputs = list(inputs)
        for place, unmasked, weighted in zip(self.places, ratios[:outputs], ratios[outputs:]):
            weights = np.asarray(inputs[place])
            if weighted:
                inputs[place] = (weights * (unmasked * weighted)).astype(weights.dtype)
            else:
                inputs[place] = np.full_like(weights, _NEXT_TO_NOTHING)
        return inputs

    def corrected_results(self, results):
        """Return the results of a step, with the metrics without weights corrected as well.

        Keras divides these by masks, too, and no sample weight corrects them.
        """
        if not self.masks or self._factors is None or not isinstance(results, (list, tuple)):
            return results
        results = list(results)
        names = getattr(self.model, "output_names", [])
        place = 1 + (len(names) if len(names) > 1 else 0)  # after the losses
        for output, (plain, weighted) in enumerate(_numbers_of_metrics(self.model)):
            for metric in range(place, place + plain):
                results[metric] = results[metric] * self._factors[output]
            place += plain + weighted
        self._factors = None
        return results


def knows_divisors(model):
    """Return whether this Keras divides by more than the number of rows, as before 2.3."""
    return hasattr(model, "_feed_sample_weights") and not hasattr(model, "_prepare_total_loss")


def divides(model, weighted):
    """Return whether losses are divided by numbers of which each rank knows its own part.

    Arguments:
        model: the one that is evaluated.
        weighted: whether that is done with sample weights.
    """
    maker = _keras.inner_model(model)
    if maker is None or not knows_divisors(maker) or not maker._feed_sample_weights:
        return False
    return weighted or bool(masks_of(maker))


def masks_of(model):
    """Return the masks of the outputs that have a loss, by their places among those."""
    masks = model.compute_mask(model.inputs, mask=None) if model.inputs else None
    masks = masks if isinstance(masks, list) else [masks]
    trained = [place for place, weight in enumerate(model.sample_weights) if weight is not None]
    return {
        number: masks[place]
        for number, place in enumerate(trained)
        if place < len(masks) and masks[place] is not None
    }


def _numbers_of_metrics(model):
    """Return how many plain and weighted metrics each output has."""

    def of(metrics, name):
        if isinstance(metrics, dict):
            metrics = metrics.get(name, [])
        return len(metrics) if isinstance(metrics, (list, tuple)) else int(bool(metrics))

    return [
        (of(model.metrics, name), of(getattr(model, "weighted_metrics", None), name))
        for name in model.output_names
    ]
