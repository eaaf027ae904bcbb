"""A process's place among the ranks, and what makes one of the values of variables."""

from .. import errors
from .._configuration.numeric import whole_number


class Place:
    """A process's place among the ranks of its job, and among those on its own machine.

    Arguments:
        rank: its number among all ranks, from 0.
        size: how many ranks there are, 2 or more.
        local_rank: its number among the ranks on its machine, from 0: that of its device.
        local_size: how many ranks its machine has; where the launcher does not tell, how many
            there must be at least.
        launcher: what told the place, for reports: "torchrun".
        on_one_machine: whether all ranks are known to be on one; None: where the sizes say so.
    """

    def __init__(self, rank, size, local_rank, local_size, launcher, on_one_machine=None):
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.launcher = launcher
        same = local_size == size
        self.on_one_machine = same if on_one_machine is None else on_one_machine

    def __str__(self):
        return "rank {0.rank} of {0.size} ({0.launcher})".format(self)

    def part_of(self, rows):
        """This rank's run of so many rows, (start, stop): the first ranks have one row more.

        Not as replicas are dealt theirs: here no rank has more rows of a smaller batch.
        """
        each, more = divmod(rows, self.size)
        start = self.rank * each + min(self.rank, more)
        return start, start + each + (self.rank < more)

    def rows_of_batch(self, batch_size):
        """How many rows of a batch of all ranks are this rank's.

        Raises:
            InvalidArgumentError: less than one row per rank.
        """
        if batch_size < self.size:
            raise errors.InvalidArgumentError(
                f"A batch of {batch_size} rows is too small for {self.size} ranks. Use {self.size} "
                "rows or more."
            )
        start, stop = self.part_of(batch_size)
        return stop - start


def stays_alone(environ):
    """Whether the user says so, whatever the environment has besides: ``COMPAT_ALONE=1``."""
    return environ.get("COMPAT_ALONE", "").strip() not in ("", "0")


def from_values(launcher, names, values, on_one_machine=None):
    """The place of this rank, size, local rank and local size, which may be texts.

    Arguments:
        names: of the variables that tell the first of them.

    Raises:
        RankError: they are no numbers, or contradict each other.
    """
    numbers = [whole_number(str(value)) for value in values]
    rank, size, local_rank, local_size = numbers
    if None in numbers or not (rank < size and local_rank < local_size <= size):
        raise errors.RankError(
            "The environment of {} contradicts itself: {}. Ranks count from 0 and are fewer than "
            "the size. Start the script with its launcher again, or set COMPAT_ALONE=1 to train "
            "alone.".format(launcher, ", ".join(map("{}={}".format, names, values)))
        )
    return Place(rank, size, local_rank, local_size, launcher, on_one_machine)


def number(name, environ):
    """A variable's number from 0, or None where it is not set.

    Raises:
        RankError: it is something else.
    """
    text = environ.get(name, "").strip()
    found = whole_number(text)
    if text and found is None:
        raise not_a_rank(name, text)
    return found


def from_addresses(launcher, addresses, rank):
    """A place among ranks whose addresses are known, in the order of ranks."""
    hosts = [host_of(address) for address in addresses]
    mine = hosts[rank]
    return Place(rank, len(hosts), hosts[:rank].count(mine), hosts.count(mine), launcher)


def from_rank_and_size(launcher, names, environ, where):
    """A place by rank and size alone: one rank a machine, or all on this one.

    Arguments:
        names: the variables of the rank and of the size.
        where: rank 0's address: on this machine's loopback interface, so are all. But on
            Kubernetes, PyTorchJob tells rank 0 "localhost" and the others its name.
    """
    rank, size = (number(name, environ) for name in names)
    if rank is None or size is None:
        return None
    here = is_loopback(host_of(where.strip())) and "KUBERNETES_SERVICE_HOST" not in environ
    local = (rank, size) if here else (0, 1)
    return from_values(launcher, names, (rank, size) + local)


def not_a_rank(name, text):
    return errors.RankError(
        "{}={} does not tell the rank of this process in a way that compat understands. Set "
        "COMPAT_RANK, COMPAT_SIZE, COMPAT_LOCAL_RANK and COMPAT_LOCAL_SIZE instead, or "
        "COMPAT_ALONE=1 to train alone.".format(name, text)
    )


# Addresses of hosts and ports, as texts -------------------------------------------------------


def with_port(host, port):
    """``host:port``, or ``[IPv6]:port``."""
    return "[{}]:{}".format(host, port) if ":" in host else "{}:{}".format(host, port)


def host_of(address):
    """The host of ``host``, ``host:port`` or ``[IPv6]:port``."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address


def is_loopback(host):
    return host in ("localhost", "::1") or host.startswith("127.")
