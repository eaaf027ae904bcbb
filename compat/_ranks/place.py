"""A process's place among the ranks, and what makes one of the values of variables.

TensorFlow's workers find the cluster and their task in ``TF_CONFIG``. Vertex AI tells other
containers the same by ``CLUSTER_SPEC``, SageMaker its hosts by ``SM_HOSTS``.
"""

from .. import errors
from .._configuration.numeric import whole_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

#: How long ranks wait for each other where the user sets nothing, in seconds.
TIMEOUT = 600.0
#: The variable that tells TensorFlow's workers the cluster and their task in it, as JSON.
TF_CONFIG = "TF_CONFIG"
#: The same of Vertex AI's containers: one process a machine.
CLUSTER_SPEC = "CLUSTER_SPEC"

# What AI Platform and SageMaker, and Vertex AI, call a kind of task.
_KINDS = {"master": "chief", "workerpool0": "chief", "workerpool1": "worker",
          "workerpool2": "ps", "workerpool3": "evaluator"}  # type: dict  # fmt: skip
# What JSON raises that is none, or is nested too deeply, or has other types than are expected.
_MALFORMED = ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError


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
        self.on_one_machine = local_size == size if on_one_machine is None else on_one_machine

    def __str__(self):
        return "rank {0.rank} of {0.size} ({0.launcher})".format(self)

    def part_of(self, rows, first=0):
        """This rank's run of so many rows, (start, stop): the first ranks have one row more.

        Not as replicas are dealt theirs: here no rank has more rows of a smaller batch.
        """
        each, more = divmod(rows, self.size)
        start = first + self.rank * each + min(self.rank, more)
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


def from_rank_and_size(launcher, names, environ):
    """A place by rank and size alone: one rank a machine, or all on this one.

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


# Clusters that a variable describes ------------------------------------------------------------


def evaluator_in(environ: "Mapping[str, str]") -> "Optional[Place]":
    """The place of the process of ``TF_CONFIG`` that evaluates what the others have saved.

    It is none of the ranks: its number is -1. None: this is another process.
    """
    if stays_alone(environ) or _read(TF_CONFIG, environ, _kind) != "evaluator":
        return None
    return Place(-1, 1, 0, 1, TF_CONFIG)


def environ_of_worker(addresses: "Sequence[str]", index: int) -> "Dict[str, str]":
    """The variable that tells a worker its cluster and its number in it."""
    import json  # not at start-up

    tells = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    return {TF_CONFIG: json.dumps(tells)}


def worker(environ):
    """As ``_worker``, of the first variable that tells."""
    return _worker(TF_CONFIG, environ) or _worker(CLUSTER_SPEC, environ)


def _worker(name, environ):
    """The place of one of a cluster's workers, or None: alone, or the one that evaluates.

    The chief, where there is one, is rank 0.
    """
    if not environ.get(name, "").strip() or _read(name, environ, _kind) == "evaluator":
        return None
    cluster, kind, index = tf_cluster(environ, name)
    addresses = tf_addresses(cluster)
    if len(addresses) < 2 and (kind or name == TF_CONFIG):
        return None
    if kind not in ("chief", "worker") or not 0 <= index < len(cluster.get(kind, [])):
        raise _invalid(name, environ[name], f"the cluster has no task {kind} {index}")
    rank = index + (len(cluster.get("chief", [])) if kind == "worker" else 0)
    return from_addresses(name, addresses, rank)


def tf_cluster(environ: "Mapping[str, str]", name: str = TF_CONFIG) -> "Tuple[Any, Any, int]":
    """A cluster as lists of addresses by kind, and this task's kind and index.

    Raises:
        RankError: it has parameter servers, or is not understood.
    """
    text = environ[name]

    def read(config):
        found = config.get("cluster")
        if found is None and config.get("sparseCluster"):
            # TFJob's dynamic workers know themselves and the parameter servers, and no other.
            raise _sparse_cluster(text)
        cluster = {}  # type: dict
        for kind, part in (found or {}).items():
            cluster.setdefault(_KINDS.get(kind, kind), []).extend(_addresses(part, text))
        if cluster.get("ps"):
            raise errors.RankError(
                f"{name}={text} names parameter servers, which compat does not use: ranks train in "
                "step. Give all machines as workers, or set COMPAT_ALONE=1 to train alone."
            )
        return cluster, _kind(config), int((config.get("task") or {}).get("index") or 0)

    return _read(name, environ, read)


def _kind(config):
    kind = (config.get("task") or {}).get("type")
    return _KINDS.get(kind, kind)


def tf_addresses(cluster: "Mapping[str, List[str]]") -> "List[str]":
    """The addresses of a cluster's ranks, in their order: the chief is rank 0."""
    return cluster.get("chief", []) + cluster.get("worker", [])


def _addresses(part, text):
    """A part of a cluster as a list: TensorFlow takes a dictionary by index, too."""
    if isinstance(part, dict):
        by_index = {int(index): address for index, address in part.items()}
        if sorted(by_index) != list(range(len(by_index))):
            raise _sparse_cluster(text)
        part = [address for _, address in sorted(by_index.items())]
    return _texts(part or [])


def _texts(found):
    """A list of texts, such as addresses, as it is."""
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"not a list of texts: {found!r}")
    return found


def sagemaker(environ):
    """SageMaker's script mode: one process a machine."""
    hosts = sagemaker_hosts(environ)
    if len(hosts) < 2:
        return None
    mine = environ.get("SM_CURRENT_HOST", "")
    if mine not in hosts:
        raise not_a_rank("SM_CURRENT_HOST", mine)
    return Place(hosts.index(mine), len(hosts), 0, 1, "SageMaker")


def sagemaker_hosts(environ):
    return _read("SM_HOSTS", environ, lambda hosts: sorted(_texts(hosts))) or []


def _read(name, environ, read):
    """What ``read`` makes of a variable's JSON, or None where it is not set."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    import json  # not at start-up

    try:
        return read(json.loads(text))
    except _MALFORMED as error:
        raise _invalid(name, text, error) from error


def _sparse_cluster(text):
    return errors.RankError(
        f"TF_CONFIG={text} names only some of the workers, so that nothing tells how many there "
        "are. Name all of them (in a TFJob, without enableDynamicWorker), or set COMPAT_ALONE=1 "
        "to train alone."
    )


def _invalid(name, text, problem):
    if name != TF_CONFIG:
        return not_a_rank(name, text)
    return errors.RankError(
        'TF_CONFIG={} is not understood: {}. Use JSON such as {{"cluster": {{"worker": '
        '["host1:2222", "host2:2222"]}}, "task": {{"type": "worker", "index": 0}}}}, or set '
        "COMPAT_ALONE=1 to train alone.".format(text, problem)
    )


def timeout(environ: "Mapping[str, str]", name: str = "COMPAT_TIMEOUT") -> float:
    """How long a rank waits for the others, in seconds: ``COMPAT_TIMEOUT``, or ``TIMEOUT``.

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
