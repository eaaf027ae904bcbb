"""How a value depends on the rows of a batch: one theory for all backends. Imports no framework.

``placements`` has the words, ``rules`` the placements of results by kind of operation, ``trial``
finds placements by computing, ``splitting`` splits a batch, ``merging`` merges the values of its
shards, ``redistribution`` finds what has to be reduced or gathered before an operation, and where
what one device has computed is split again, and ``fallback`` is for what cannot be split.
"""

from . import merging, trial
from .fallback import DOWNSTREAM, IN_BETWEEN, Fallback, Reason, warn_unsplit
from .graph_search import nearest
from .placements import (
    REPLICATED,
    Count,
    Mixed,
    Partial,
    Placement,
    Replicated,
    Sharded,
    Unknown,
    Value,
    have_own_rows,
    listed,
    settled,
    shared,
    without_rows,
)
from .redistribution import LARGEST, SAMPLES, gathering, redistributed, resharding
from .rules import (
    added,
    along,
    broadcast,
    by_row,
    chosen,
    concatenated,
    contracted,
    counted,
    divided,
    expanded,
    extreme,
    gathered,
    made,
    multiplied,
    pointwise,
    product,
    reduced,
    repeated,
    reshaped,
    resized,
    scattered,
    selected,
    shape_of,
    size_of,
    sliced,
    squeezed,
    stacked,
    tiled,
    transposed,
)
