"""How a value depends on the rows of a batch: one theory for all backends.

``placements`` has the words, ``arithmetic``, ``views`` and ``lookups`` the rules, by kind of
operation. ``trial`` asks what no rule knows, and ``policy`` says what becomes of what cannot be
split. Nothing here imports a framework.
"""

from . import trial
from .arithmetic import (
    added,
    along,
    contracted,
    divided,
    extreme,
    multiplied,
    pointwise,
    product,
    reduced,
    selected,
)
from .lookups import (
    by_row,
    chosen,
    counted,
    gathered,
    made,
    scattered,
    shape_of,
    size_of,
)
from .placements import (
    REPLICATED,
    Count,
    Mixed,
    Partial,
    Placement,
    Replicated,
    Sharded,
    Unknown,
)
from .policy import FROM_THERE_ON, REASONS, Across, nearest, runs_whole
from .values import Value, have_own_rows, settled, shared, without_rows
from .views import (
    broadcast,
    concatenated,
    expanded,
    repeated,
    reshaped,
    resized,
    sliced,
    squeezed,
    stacked,
    tiled,
    transposed,
)
