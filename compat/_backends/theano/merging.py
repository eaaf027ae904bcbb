"""Values at cuts: merged from those of the devices, and their gradients split again."""

import numpy as np

from ..._rows.merging import NUMPY, merge


def merged(placement, parts, sizes):
    """Return what the devices have computed as one array, their rows in order."""
    # Where a shard is empty, a row was computed that is none of its own.
    counted = [pair for pair in zip(parts, sizes) if pair[1]]
    return merge(placement, *zip(*counted), operations=NUMPY)


def split_gradient(gradient, placement, parts, sizes):
    """Return each device's part of the gradient with respect to what was merged."""
    axis = placement.axis
    ends = np.cumsum([part.shape[axis] if size else 0 for part, size in zip(parts, sizes)])
    pieces = np.split(np.asarray(gradient), ends[:-1], axis)
    # A row computed for an empty shard counts for nothing.
    return [p if size else np.zeros_like(part) for p, part, size in zip(pieces, parts, sizes)]
