"""The names of ``splitting`` until all modules use that."""

from .splitting import bounds, run_bounds, sizes, unsplit

__all__ = ["bounds", "run_bounds", "runs_undivided", "sizes", "undivided"]
runs_undivided = unsplit.here


def undivided():
    return unsplit
