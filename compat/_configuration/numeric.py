"""Numbers that people write in arguments and environment variables."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

# No count or id has more digits; Python converts at most 4300 (sys.set_int_max_str_digits).
_MOST_DIGITS = 18


def whole_number(text: str) -> "Optional[int]":
    """Return the value of a text of ASCII digits, or None.

    CUDA reads no other digits, either.
    """
    if 0 < len(text) <= _MOST_DIGITS and set(text) <= set("0123456789"):
        return int(text)
    return None
