"""Findings about a job of ranks that has ended: what it gained, and what it lost."""

import collections
from typing import Any, Dict, List, Mapping

from .. import errors


def findings(
    outcomes: "Mapping[int, Mapping[str, Any]]", size: int, is_reported: bool, failed: bool
) -> "List[str]":
    """Return a sentence or two for each thing that is wrong with a job that has ended.

    Arguments:
        outcomes: what ``reported_script`` has left of each rank, by rank.
        size: the number of ranks.
        is_reported: whether a report is printed, too, which says so where nothing was trained.
        failed: whether a rank has failed, which may be why nothing was trained.
    """
    # Ranks of which nothing is known may have done anything.
    is_known = not (is_reported or failed or len(outcomes) < size)
    apart = _apart(list(outcomes.values())) if is_known else []
    return [*apart, *_saved_over(outcomes)]


def _apart(outcomes):
    """Yield that the ranks have trained no model together."""
    if any(outcome["together"] for outcome in outcomes):
        return
    refused = {name: error for outcome in outcomes for name, error in outcome["refused"].items()}
    is_compiled = outcomes[0]["parallelizes_compiled"]
    remedy = "" if is_compiled else " With --parallelize, its Keras models train together."
    if refused:
        problem, remedy = errors.not_parallelized(refused), ""
    elif is_compiled:
        problem = "no model was compiled or given to compat.parallelize()"
    else:
        problem = "no model was given to compat.parallelize()"
    yield (
        f"{problem}, so the {len(outcomes)} ranks trained nothing together: each has run all of "
        f"the script by itself.{remedy}"
    )


def _saved_over(outcomes):
    """Yield that ranks of one machine have saved to the same file."""
    ranks: "Dict[Any, List[int]]" = collections.defaultdict(list)
    for rank, outcome in sorted(outcomes.items()):
        for path in outcome["saved"]:
            ranks[outcome["host"], path].append(rank)
    shared = [(path, several) for (_, path), several in ranks.items() if len(several) > 1]
    if shared:
        path, several = shared[0]
        word = "both" if len(several) == 2 else "all"
        more = len(shared) - 1
        others = f" and {more} other file{'s' * (more > 1)}" if more else ""
        yield (
            f"{errors.numbered_ranks(several)} {word} save to {path}{others}: each overwrites what "
            "another one has saved, or finds the file locked. Save under compat.is_chief(). Keras "
            "models that were given to compat.parallelize() are saved by rank 0 alone."
        )
