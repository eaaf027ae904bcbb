"""Places made of the values of environment variables, as launchers set them."""

from typing import Any, List

from .. import errors
from .._configuration.numeric import whole_number
from .addresses import host_of, is_loopback
from .place import Place

# What JSON raises that is none, or is nested too deeply, or has other types than are expected.
_MALFORMED = ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError


def number(name, environ):
    """Return a variable's number from 0, or None where it is not set.

    Raises:
        RankError: it is something else.
    """
    text = environ.get(name, "").strip()
    found = whole_number(text)
    if text and found is None:
        raise not_a_rank(name, text)
    return found


def not_a_rank(name, text, problem=None):
    """Return the error of a variable that does not tell a rank."""
    return errors.RankError(
        "{}={} does not tell the rank of this process in a way that compat understands. Set "
        "COMPAT_RANK, COMPAT_SIZE, COMPAT_LOCAL_RANK and COMPAT_LOCAL_SIZE instead, or "
        "COMPAT_ALONE=1 to train alone.".format(name, text)
    )


def from_json(name, environ, read, invalid):
    """Return what ``read`` makes of a variable's JSON, or None where it is not set.

    Arguments:
        invalid: makes the error of the variable's name, its text and the problem.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    import json  # not at start-up

    try:
        return read(json.loads(text))
    except _MALFORMED as error:
        raise invalid(name, text, error) from error


def texts(found):
    """Return a list of texts, such as addresses, as it is."""
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"not a list of texts: {found!r}")
    return found


def from_values(launcher, names, values, on_one_machine=None):
    """Return the place of this rank, size, local rank and local size, which may be texts.

    Arguments:
        names: of the variables that tell the first of them.

    Raises:
        RankError: they are no numbers, or contradict each other.
    """
    numbers: "List[Any]" = [whole_number(str(value)) for value in values]
    rank, size, local_rank, local_size = numbers
    if None in numbers or not (rank < size and local_rank < local_size <= size):
        raise errors.RankError(
            "The environment of {} contradicts itself: {}. Ranks count from 0 and are fewer than "
            "the size. Start the script with its launcher again, or set COMPAT_ALONE=1 to train "
            "alone.".format(launcher, ", ".join(map("{}={}".format, names, values)))
        )
    return Place(rank, size, local_rank, local_size, launcher, on_one_machine)


def from_addresses(launcher, addresses, rank):
    """Return the place among ranks whose addresses are known, in the order of ranks."""
    hosts = [host_of(address) for address in addresses]
    mine = hosts[rank]
    return Place(rank, len(hosts), hosts[:rank].count(mine), hosts.count(mine), launcher)


def from_rank_and_size(launcher, names, environ):
    """Return a place by rank and size alone: one rank a machine, or all on this one.

    Arguments:
        names: the variables of the rank, of the size, and of rank 0's address, or all addresses. If
            it is on this machine's loopback interface, so are all. But on Kubernetes, PyTorchJob
            tells rank 0 "localhost" and the others its name.
    """
    *names, address = names
    rank, size = (number(name, environ) for name in names)
    if rank is None or size is None:
        return None
    where = environ.get(address, "").partition(",")[0].strip()
    here = is_loopback(host_of(where)) and "KUBERNETES_SERVICE_HOST" not in environ
    local = (rank, size) if here else (0, 1)
    return from_values(launcher, names, (rank, size) + local)
