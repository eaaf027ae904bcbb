"""Places by the values of the environment variables that launchers set."""

from typing import Any, Callable, List, Mapping, Optional, Sequence

from .. import errors
from .._configuration.numeric import whole_number
from .addresses import host_of, is_loopback
from .place import Place

# Errors of text that is not JSON, is nested too deeply, or has unexpected types.
_MALFORMED = ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError


def number(name: str, environ: Mapping[str, str]) -> Optional[int]:
    """Return a variable's number from 0, or None where it is not set.

    Raises:
        RankError: it is something else.
    """
    text = environ.get(name, "").strip()
    value = whole_number(text)
    if text and value is None:
        raise not_a_rank(name, text)
    return value


def not_a_rank(name: str, text: str, problem: Any = None) -> errors.RankError:
    """Return the error for a variable from whose text no rank can be read."""
    return errors.RankError(
        "{}={} does not tell the rank of this process in a way that compat understands. Set "
        "COMPAT_RANK, COMPAT_SIZE, COMPAT_LOCAL_RANK and COMPAT_LOCAL_SIZE instead, or "
        "COMPAT_ALONE=1 to train alone.".format(name, text)
    )


def from_json(
    name: str,
    environ: Mapping[str, str],
    read: Callable[[Any], Any],
    invalid: Callable[[str, str, Any], Exception],
) -> Any:
    """Return a value read from a variable's JSON, or None where the variable is not set.

    Arguments:
        name: that of the variable.
        environ: the environment.
        read: a function of the JSON's value that returns the result.
        invalid: a function of the variable's name, its text and the problem that returns the error.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    import json  # not at start-up

    try:
        return read(json.loads(text))
    except _MALFORMED as error:
        raise invalid(name, text, error) from error


def texts(value: Any) -> List[str]:
    """Return a list of texts, such as addresses, as it is.

    Raises:
        TypeError: the value is not such a list.
    """
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"not a list of texts: {value!r}")
    return value


def from_values(
    launcher: str,
    names: Sequence[str],
    values: Sequence[Any],
    on_one_machine: Optional[bool] = None,
) -> Place:
    """Return the place with a rank, a size, a local rank and a local size, which may be texts.

    Arguments:
        launcher: its name, for reports.
        names: those of the variables that have the first of these values.
        values: the four.
        on_one_machine: as ``Place`` takes it.

    Raises:
        RankError: they are no numbers, or contradict each other.
    """
    numbers: List[Any] = [whole_number(str(value)) for value in values]
    rank, size, local_rank, local_size = numbers
    if None in numbers or not (rank < size and local_rank < local_size <= size):
        raise errors.RankError(
            "The environment of {} contradicts itself: {}. Ranks count from 0 and are fewer than "
            "the size. Start the script with its launcher again, or set COMPAT_ALONE=1 to train "
            "alone.".format(launcher, ", ".join(map("{}={}".format, names, values)))
        )
    return Place(rank, size, local_rank, local_size, launcher, on_one_machine)


def from_addresses(launcher: str, addresses: Sequence[str], rank: int) -> Place:
    """Return the place among ranks whose addresses are known, in the order of ranks."""
    hosts = [host_of(address) for address in addresses]
    mine = hosts[rank]
    return Place(rank, len(hosts), hosts[:rank].count(mine), hosts.count(mine), launcher)


def from_rank_and_size(
    launcher: str, names: Sequence[str], environ: Mapping[str, str]
) -> Optional[Place]:
    """Return a place by rank and size alone: one rank on each machine, or all on this one.

    Arguments:
        launcher: its name, for reports.
        names: the variables of the rank, of the size, and of rank 0's address, or all addresses. If
            it is on this machine's loopback interface, so are all ranks; but on Kubernetes,
            PyTorchJob has "localhost" for rank 0 itself, and its name for the others.
        environ: the environment.
    """
    *names, address = names
    rank, size = (number(name, environ) for name in names)
    if rank is None or size is None:
        return None
    where = environ.get(address, "").partition(",")[0].strip()
    here = is_loopback(host_of(where)) and "KUBERNETES_SERVICE_HOST" not in environ
    local = (rank, size) if here else (0, 1)
    return from_values(launcher, names, (rank, size) + local)
