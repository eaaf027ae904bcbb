"""One process per device: this process's place among the ranks, and the calls of their scripts.

A launcher (torchrun, mpirun, horovodrun, ...) starts the same script several times and sets each
process's rank in its environment. ``configure_gpu()`` then takes the device of the local rank,
and ``parallelize()`` trains the model together with the other ranks, through one
of ``engines``. Importing this module imports nothing else.
"""

import os
import sys

from .. import errors
from .._configuration.numeric import whole_number
from .place import Place, stays_alone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Mapping, Optional, Tuple

_ALONE = Place(0, 1, 0, 1, "")


class Job:
    """The ranks that a launcher is to start.

    Arguments:
        size: the number of ranks, 2 or more.
        python: the path of the interpreter that has the framework.
        environ: the environment variables of the launcher, and of its ranks on every machine.
        hosts: the machines, and how many of the ranks each runs: "first:4,second:4"; None: this
            one.
    """

    def __init__(
        self, size: int, python: str, environ: "Mapping[str, str]", hosts: "Optional[str]" = None
    ) -> None:
        self.size = size
        self.python = python
        self.environ = environ
        self.hosts = hosts


def own_place() -> "Optional[Place]":
    """Return this process's place among the ranks, or None where it is alone.

    Raises:
        RankError: as ``launchers.launched``.
    """
    from . import launchers  # for start-up time

    return launchers.launched(os.environ) or _place_in_group()


def evaluator() -> "Optional[Place]":
    """Return the place of the process that evaluates what ranks have saved, or None."""
    from . import tf_config  # for start-up time

    return tf_config.evaluator_in(os.environ)


def _place_in_group():
    """Return the place in the process group of torch.distributed that the script made, if any."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if size < 2 or stays_alone(os.environ):
        return None
    here = whole_number(os.environ.get("LOCAL_RANK", "")) or 0
    return Place(rank, size, here, here + 1, "torch.distributed", False)


def parse_hosts(text: str) -> "List[Tuple[str, int]]":
    """Return machines and how many ranks each runs, of a text such as ``"first:4,second:4"``. Pure.

    A machine is a name or an IPv4 address, ``user@`` in front where ssh is to log in as another
    user. It runs one rank where there is no number. Launchers hand it to ssh, some through a shell:
    whatever else it may hold is refused.

    Raises:
        InvalidArgumentError: the text is not understood, or a machine comes twice.
    """
    import re  # for start-up time

    hosts = []
    for part in text.split(","):
        name, _, slots = part.strip().partition(":")
        problem = ""
        if part.count(":") > 1:
            problem = " looks like an IPv6 address, and launchers take none"
        elif name and not re.fullmatch(r"(\w[\w.-]*@)?\w[\w.-]*", name):
            problem = " is not the name of a machine"
        if problem:
            raise errors.InvalidArgumentError(
                f"--hosts {text}: {part.strip()!r}{problem}. Use a name of letters, digits, '.', "
                "'-' and '_' that does not begin with '-', or an IPv4 address; user@name logs in "
                "as another user."
            )
        hosts.append((name, whole_number(slots or "1") or 0))
    from . import addresses  # for start-up time

    names = [host_address(name) for name, _ in hosts]
    is_valid = all(name and number for name, number in hosts) and len(set(names)) == len(names)
    if not is_valid or (len(names) > 1 and any(map(addresses.is_loopback, names))):
        raise errors.InvalidArgumentError(
            "--hosts {} is not understood. Use machines, by the names that all of them know, and "
            "how many ranks each is to run: --hosts first:4,second:4.".format(text)
        )
    return hosts


def host_address(host: str) -> str:
    """Return the name or address of a host of ``parse_hosts``, without the user who logs in."""
    return host.rpartition("@")[2]


def fill_hosts(text: str, size: "Optional[int]") -> "Tuple[int, str]":
    """Return the number of ranks, and the machines that they fill in turn. Pure.

    Arguments:
        text: as for ``parse_hosts``.
        size: the number of ranks; None: as many as the machines have room for.

    Raises:
        InvalidArgumentError: as ``parse_hosts``, or they have no room for so many.
    """
    hosts = parse_hosts(text)
    room = sum(slots for _, slots in hosts)
    size = left = room if size is None else size
    if size > room:
        raise errors.InvalidArgumentError(
            "-n {}: --hosts {} has room for {}. Use fewer ranks, or give the machines more: "
            "--hosts first:4,second:4.".format(size, text, room)
        )
    filled = []
    for name, slots in hosts:
        if left:
            filled.append("{}:{}".format(name, min(slots, left)))
            left -= min(slots, left)
    return size, ",".join(filled)


# The public calls -----------------------------------------------------------------------------


def rank() -> int:
    """Return the number of this process among all that train together, from 0.

    It is 0 where the process is alone, and -1 in the evaluator of ``TF_CONFIG``, which does not
    train.

    Like all calls here it reads the launcher's environment and imports no framework.

    Raises:
        RankError: the launcher's variables contradict each other (a ``RuntimeError``).
    """
    return (own_place() or evaluator() or _ALONE).rank


def size() -> int:
    """Return how many processes train together: 1 where this one is alone.

    Raises:
        RankError: as ``rank()``.
    """
    return (own_place() or _ALONE).size


def local_rank() -> int:
    """Return the number of this process among those on its machine, from 0.

    It is the number of its device, too.

    Raises:
        RankError: as ``rank()``.
    """
    return (own_place() or _ALONE).local_rank


def is_chief() -> bool:
    """Return whether this is rank 0, which prints and saves.

    True where the process is alone.

    Raises:
        RankError: as ``rank()``.
    """
    return rank() == 0


def local_batch_size(batch_size: int) -> int:
    """Return the ``batch_size`` for ``fit()`` on this rank: its share of a batch of all ranks.

    This gives the results of one process with that batch size, and keeps its learning rate::

        x, y = compat.shard((x, y), batch_size=256)
        model.fit(x, y, batch_size=compat.local_batch_size(256), shuffle=False)

    Arguments:
        batch_size: rows of a batch, of all ranks together.

    Raises:
        InvalidArgumentError: less than one row per rank (a ``ValueError``).
        RankError: as ``rank()``.
    """
    place = own_place()
    return place.rows_of_batch(batch_size) if place else batch_size


def scaled_learning_rate(learning_rate: float) -> float:
    """Return the learning rate times the number of ranks, if each rank keeps the old batch size.

    N ranks with batches of 64 rows make batches of N * 64; the "linear scaling rule" (Goyal et
    al., "Accurate, Large Minibatch SGD", 2017) then uses N times the learning rate, after some
    epochs of warm-up. Nothing in compat changes a learning rate by itself.

    Arguments:
        learning_rate: the one for a single device.
    """
    return learning_rate * size()


def shard(data: "Any", batch_size: "Optional[int]" = None) -> "Any":
    """Return this rank's shard of the data, and the data themselves where the process is alone.

    Every rank gets the same number of batches, since ranks with more than others would wait for
    them. A remainder of fewer rows than there are ranks is left out on all ranks, with a warning.

    What comes in batches (a ``Sequence`` or ``PyDataset``, a generator, a ``DataLoader``, an
    iterator of MXNet's, a dataset of batches) becomes the same kind of object, whose k-th batch is
    this rank's rows of the k-th batch. It has to give the same batches, in the same order, on all
    ranks: seed what is shuffled or made at random. The ranks compare them where they wait for each
    other anyway: when ``fit()`` begins and at the end of its epochs, and when an iteration over a
    shuffled loader or over an iterator of MXNet's begins.

    Arguments:
        data: an array, or anything else with ``shape`` and slices along its first axis, also a
            ``DataFrame`` or ``Series`` of pandas; a tuple, list or dictionary of those, which have
            the same number of rows (None stays None); a ``tf.data.Dataset``, of rows or of
            batches; a ``Sequence`` or ``PyDataset`` of Keras; a generator or another iterator of
            batches; a ``DataLoader`` of torch or Gluon; an ``mx.io.DataIter``.
        batch_size: rows of a batch of all ranks together. With it a rank's k-th batch of
            ``local_batch_size(batch_size)`` rows is its part of the k-th batch that one process
            would see, also where a batch does not divide evenly. Without it each rank gets a run
            of an array's rows, and every N-th element of a dataset of rows. What comes in batches
            has a batch size of its own, and needs none here.

    Returns:
        The same structure, or an object of the same kind.

    Raises:
        InvalidArgumentError: the data has fewer rows than there are ranks, parts of it have
            different numbers of rows, or it is of another kind (a ``ValueError``).
        RankError: as ``rank()``.
    """
    place = own_place()
    if place is None:
        return data
    from .._runtime.process import process  # for start-up time
    from . import sharding  # for start-up time

    process.has_sharded = True
    return sharding.shard(place, data, batch_size)


def barrier() -> None:
    """Wait until all ranks are here. Does nothing where the process is alone.

    All ranks call it, in the main thread, after ``parallelize()``: that is where ranks join. The
    wait is one of the engine's own; like all others, it is limited by ``COMPAT_TIMEOUT``.

    Raises:
        RankError: the ranks have not joined yet.
        RankLostError: a rank did not arrive, or has ended (a ``RankError``).
    """
    if own_place() is None:
        return
    from . import joined_engine  # for start-up time

    joined_engine.barrier()
