"""Merging of the devices' values at cuts, and splitting of their gradients."""

import numpy as np

from ..._rows import Replicated
from ..._rows.merging import NUMPY, merge


def merged(placement, parts, sizes):
    """Return the devices' values as one array."""
    # For an empty shard a row was computed, which is dropped.
    counted = [pair for pair in zip(parts, sizes) if pair[1]]
    return merge(placement, *zip(*counted), operations=NUMPY)


def split_gradient(gradient, placement, parts, sizes):
    """Return each device's shard of the gradient with respect to a merged value."""
    if isinstance(placement, Replicated):  # each device has the value: one gets the gradient
        first = next(index for index, size in enumerate(sizes) if size)
        return [
            np.asarray(gradient) if index == first else np.zeros_like(part)
            for index, part in enumerate(parts)
        ]
    axis = placement.axis
    ends = np.cumsum([part.shape[axis] if size else 0 for part, size in zip(parts, sizes)])
    pieces = np.split(np.asarray(gradient), ends[:-1], axis)
    # A row that was computed for an empty shard has no gradient.
    return [p if size else np.zeros_like(part) for p, part, size in zip(pieces, parts, sizes)]
