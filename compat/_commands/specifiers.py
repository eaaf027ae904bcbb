"""Version specifiers, ``>=3.6,<3.9``, of what is a release of plain numbers.

The library ``packaging`` knows all of them, but need not be installed.
"""

import re
from operator import eq, ge, gt, le, lt, ne
from typing import Tuple

_CLAUSE = re.compile(r"(~=|==|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?")
_COMPARISONS = {"==": eq, "!=": ne, "<=": le, ">=": ge, "<": lt, ">": gt}


def allow(specifiers: str, release: Tuple[int, ...]) -> bool:
    """Whether a release satisfies all clauses of a specifier.

    Raises:
        ValueError: a clause is not one of those above.
    """
    clauses = [clause.strip() for clause in specifiers.split(",")]
    return all([_allows(clause, release) for clause in clauses if clause])  # reads each of them


def _allows(clause, release):
    match = _CLAUSE.fullmatch(clause)
    if match is None or (match.group(3) and match.group(1) not in ("==", "!=")):
        raise ValueError(clause)
    numbers = tuple(int(number) for number in match.group(2).split("."))
    if match.group(1) == "~=":
        if len(numbers) < 2:
            raise ValueError(clause)
        return release >= numbers and release[: len(numbers) - 1] == numbers[:-1]
    width = len(numbers) if match.group(3) else max(len(numbers), len(release))
    padded = [(each + (0,) * width)[:width] for each in (release, numbers)]
    return _COMPARISONS[match.group(1)](*padded)
