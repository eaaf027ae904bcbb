"""The engine through which this process has joined the other ranks."""

import threading

from .. import errors
from .._runtime.process import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def joined() -> "Any":
    """Return the engine that this process has joined, or None."""
    return next(iter(process.engines.values()), None)


def barrier() -> None:
    """Wait until all ranks are here, as ``compat.barrier()`` does."""
    engine = joined()
    if engine is None:
        raise errors.RankError(
            "compat.barrier() was called before the ranks have joined, so none can wait for the "
            "others. Call it after compat.parallelize(), which joins them."
        )
    engine.agree("barrier()")
    engine.gather([0])


def ready(name: str, shuffled: bool) -> "Any":
    """Return the engine, where the ranks can compare now, or None.

    Arguments:
        name: what they would compare, for the warning.
        shuffled: whether the order is drawn at random, so that a warning is due.
    """
    main = threading.current_thread() is threading.main_thread()
    engine = joined()
    if engine is not None and main:
        return engine
    if shuffled:
        errors.warn(
            "The ranks cannot agree on the order of a shuffled {} {}: each may draw another one, "
            "so that they train on some rows several times and on others never. Call "
            "compat.parallelize() first, and iterate in the main thread.".format(
                name, "outside of the main thread" if engine else "before they have joined"
            )
        )
    return None
