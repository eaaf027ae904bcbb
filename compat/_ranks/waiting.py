"""How long ranks wait for each other."""

from .. import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

#: How long ranks wait for each other where the user sets nothing, in seconds.
TIMEOUT = 600.0


def timeout(environ: "Mapping[str, str]", name: str = "COMPAT_TIMEOUT") -> float:
    """Return how long a rank waits for the others, in seconds.

    ``COMPAT_TIMEOUT``, or ``TIMEOUT``.

    Arguments:
        name: of what has set it, for the error.
    """
    text = environ.get("COMPAT_TIMEOUT", str(TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e9:  # more than engines and the system can wait
        raise errors.InvalidArgumentError(
            "{}={} is not understood. Use a number of seconds above 0, at most 1e9: how long a "
            "rank waits for the others.".format(name, text)
        )
    return seconds
