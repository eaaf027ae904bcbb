"""What a launcher tells: a process's place among the ranks, and where ranks find each other.

Both are read from the environment alone.

Each launcher has variables of its own. Most tell a rank, a size, and the same two among the
processes of one machine: ``LAUNCHERS``. Every other one has a function, below or in ``place``.
Where a variable says that there are several processes but nothing says which of them this is,
that is an error: each would train alone. docs/launchers.md is the table for users;
tests/test_launchers.py has the environment that each launcher documents.
"""

import errno
import os
import re
import zlib
from typing import Any, Iterator, Mapping, Optional, Tuple

from .. import errors
from .._configuration.numeric import whole_number
from . import place as places

_FOUR = "{0}_RANK {0}_SIZE {0}_LOCAL_RANK {0}_LOCAL_SIZE"
#: Launchers, and their variables for the rank, the number of ranks, and the same two among the
#: processes of one machine. The first whose four are set tells.
LAUNCHERS = (
    ("compat run", _FOUR.format("COMPAT")),
    ("horovodrun", _FOUR.format("HOROVOD")),
    # Ray Train, Spark's TorchDistributor and SageMaker's torch_distributed set the same four.
    ("torchrun", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"),
    ("deepspeed", "RANK WORLD_SIZE LOCAL_RANK LOCAL_SIZE"),
    ("mpirun", _FOUR.format("OMPI_COMM_WORLD")),  # Open MPI, and so Kubeflow's MPIJob
    ("mpiexec", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("PALS", _FOUR.format("PMI")),  # Cray's mpiexec and aprun
    ("mpirun_rsh", _FOUR.format("MV2_COMM_WORLD")),  # MVAPICH2
    ("jsrun", _FOUR.format("JSM_NAMESPACE")),
)

# Variables that say that there are several processes, where none of the launchers here tells which
# of them this is: sizes of 2 or more, and ranks of 1 or more.
_SIZES = [names.split()[1] for _, names in LAUNCHERS] + [
    "FLUX_JOB_SIZE", "JAX_NUM_PROCESSES", "KERAS_DISTRIBUTION_NUM_PROCESSES", "PET_NNODES",
]  # fmt: skip
_RANKS = [names.split()[0] for _, names in LAUNCHERS] + [
    "ALPS_APP_PE", "FLUX_TASK_RANK", "JAX_PROCESS_ID", "KERAS_DISTRIBUTION_PROCESS_ID",
    "LOCAL_RANK", "PET_NODE_RANK", "PMIX_RANK",
]  # fmt: skip
#: All of these.
NAMES = {name for _, names in LAUNCHERS for name in names.split()}.union(_SIZES, _RANKS)


def launched(environ):
    """The place that a launcher gave this process, or None where it is alone. Pure.

    Raises:
        RankError: the launcher's variables contradict each other, or tell of several processes
            and not which of them this is.
    """
    if places.stays_alone(environ):
        return None
    for launcher, names in LAUNCHERS:
        four = names.split()
        if all(name in environ for name in four):
            place = places.from_values(launcher, four, [environ[name].strip() for name in four])
            return place if place.size > 1 else None
    # A scheduler comes after what may have been started within one of its tasks.
    in_cluster = places.worker, places.sagemaker
    for find in (_jax, _keras, _jaxjob) + in_cluster + (srun, _torch_alike):
        place = find(environ)
        if place is not None and place.size > 1:
            return place
    if places.evaluator_in(environ) is None:
        _refuse_unknown_place(environ)
    return None


# Launchers by their own ways ------------------------------------------------------------------


def _jax(environ):
    """The variables of ``jax.distributed.initialize()``."""
    names = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"
    return places.from_rank_and_size("JAX's variables", names, environ)


def _keras(environ):
    """The variables of ``keras.distribution.initialize()``."""
    names = map("KERAS_DISTRIBUTION_{}".format, ("PROCESS_ID", "NUM_PROCESSES", "JOB_ADDRESSES"))
    place = places.from_rank_and_size("Keras' variables", names, environ)
    addresses = _keras_addresses(environ)
    if place is None or len(addresses) != place.size:
        return place
    return places.from_addresses(place.launcher, addresses, place.rank)


def _keras_addresses(environ):
    text = environ.get("KERAS_DISTRIBUTION_JOB_ADDRESSES", "")
    return [address.strip() for address in text.split(",") if address.strip()]


def _jaxjob(environ):
    """Kubeflow's JAXJob: one process in each pod. Others use these names for other purposes."""
    names = "PROCESS_ID", "NUM_PROCESSES", "COORDINATOR_ADDRESS"
    return places.from_rank_and_size("JAXJob", names, environ) if names[2] in environ else None


def srun(environ):
    """A task of SLURM's srun. A bare sbatch shell has no SLURM_STEP_NUM_TASKS."""
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]
    rank, size = (places.number(name, environ) for name in names[:2])
    if size is None or rank is None:
        return None
    local_rank, node = (places.number(name, environ) or 0 for name in (names[2], "SLURM_NODEID"))
    tasks = environ.get(names[3], "").strip()
    values = rank, size, local_rank, _tasks_on_node(tasks, node) or local_rank + 1
    return places.from_values("srun", names, values)


def _tasks_on_node(text, node):
    """How many tasks a node has, such as the last one in ``2(x3),1``; None: nothing tells."""
    for part in text.split(",") if text else []:
        tasks, _, times = part.partition("(x")
        numbers = whole_number(tasks), whole_number(times[:-1]) if times[-1:] == ")" else 1
        if None in numbers or times[-1:] not in ("", ")"):
            raise places.not_a_rank("SLURM_STEP_TASKS_PER_NODE", text)
        if node < numbers[1]:
            return numbers[0]
        node -= numbers[1]
    return None


def _torch_alike(environ):
    """RANK and WORLD_SIZE without all of torchrun's: PyTorchJob, DLC, Lightning, older launchers.

    Without LOCAL_RANK there is one process a machine.
    """
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    rank, size, local_rank = (places.number(name, environ) for name in names)
    if size is None or size < 2:
        return None
    if local_rank is None:
        for name in ("PET_NPROC_PER_NODE", "NPROC_PER_NODE"):
            processes = environ.get(name, "").strip()
            if (whole_number(processes) or 0) > 1:
                raise errors.RankError(
                    f"{name}={processes} asks for {processes} processes on each machine, but this "
                    "one was started without torchrun, which would start them: RANK and WORLD_SIZE "
                    f"do not count them alike. Start the script with torchrun, or set {name}=1 for "
                    "one process on each machine, or COMPAT_ALONE=1 to train alone."
                )
        return places.from_rank_and_size("RANK", ("RANK", "WORLD_SIZE", "MASTER_ADDR"), environ)
    if rank is None and places.number("NODE_RANK", environ) == 0:
        rank = local_rank  # Lightning's script launcher; on other nodes nothing tells the rank
    if rank is None:
        return None
    return places.from_values("RANK", names, (rank, size, local_rank, local_rank + 1), False)


def _refuse_unknown_place(environ):
    """Refuse to be alone where variables say that there are several processes."""
    for names, least in ((_SIZES, 2), (_RANKS, 1)):
        for name in names:
            text = environ.get(name, "").strip()
            # PET_NNODES may be a range, "1:4".
            numbers = [whole_number(part) for part in text.split(":") if part.isdecimal()]
            if any(number is None or number >= least for number in numbers):
                raise errors.RankError(
                    "{}={} says that several processes train together, but nothing tells "
                    "which of them this is: each would train alone. Start the script with a "
                    "launcher that does (compat run -n N, torchrun, mpirun, srun), set "
                    "COMPAT_RANK, COMPAT_SIZE, COMPAT_LOCAL_RANK and COMPAT_LOCAL_SIZE, or "
                    "set COMPAT_ALONE=1 to train alone.".format(name, text)
                )


# The rendezvous --------------------------------------------------------------------------------

# Where nothing tells a port, one of these is used: they lie above Linux's ephemeral ports.
_FIRST_PORT, _PORTS = 61440, 4096
# SageMaker's containers leave it to their processes.
_SAGEMAKER_PORT = 7777
# What names a job on its machines, and no other, of the launchers that tell.
_JOBS = {
    "srun": ["SLURM_JOB_ID", "SLURM_STEP_ID"],
    "mpirun": ["PMIX_NAMESPACE"],
    "PALS": ["PALS_APID"],
    "mpirun_rsh": ["MPIRUN_ID"],
}


def find_rendezvous(place: places.Place, environ: Mapping[str, str]) -> Optional[Tuple[str, int]]:
    """The host and the port of rank 0, where nothing else is the rendezvous; None: unknown. Pure.

    What the user sets comes before what a launcher tells. Ranks that are all on this machine need
    to be told no more than a name of their job that no other job has: its port follows from it.

    Raises:
        RankError: an address is not understood.
    """
    for name, where in _candidates(place, environ):
        if where:
            host, port = places.host_of(where), where.rpartition(":")[2]
            if not host or not 0 < (whole_number(port) or 0) < 65536:
                raise errors.RankError(
                    "{} {} {!r}, which is not a host and a port. Use the host name or "
                    "address of rank 0's machine and a free port there, such as "
                    "node1:29500.".format(name, "are" if " and " in name else "is", where)
                )
            return "127.0.0.1" if place.on_one_machine else host, int(port)
    return None


def require_rendezvous(place: places.Place, engine: str) -> Tuple[str, int]:
    """The host and the port of rank 0, which is the rendezvous.

    Arguments:
        engine: what they talk through, for the error.

    Raises:
        RankError: nothing tells where.
    """
    found = find_rendezvous(place, os.environ)
    if found is None:
        raise errors.RankError(
            f"This process is {place}, but nothing tells {engine} where the rendezvous is. Set "
            "MASTER_ADDR to the host name or address of rank 0's machine and MASTER_PORT to a free "
            "port there, the same for all ranks; or start the script with compat run -n "
            f"{place.size}."
        )
    return found


def torchrun_keeps_store(environ: Mapping[str, str]) -> bool:
    """Whether torchrun, and not rank 0, keeps the store that is the rendezvous of torch's ranks.

    As torch.distributed's ``rendezvous("env://")`` tells.
    """
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _candidates(place: places.Place, environ: Mapping[str, str]) -> Iterator[Tuple[str, str]]:
    """What may be the rendezvous: (what tells it, address or ""), in the order of precedence."""
    if place.launcher == LAUNCHERS[0][0]:
        yield "COMPAT_RENDEZVOUS", environ.get("COMPAT_RENDEZVOUS", "")
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        port = environ["MASTER_PORT"].strip()
        if torchrun_keeps_store(environ) and whole_number(port) is not None:
            port = str(int(port) + 1)  # torchrun itself listens at MASTER_PORT
        yield "MASTER_ADDR and MASTER_PORT", places.with_port(environ["MASTER_ADDR"].strip(), port)
    yield "JAX_COORDINATOR_ADDRESS", environ.get("JAX_COORDINATOR_ADDRESS", "").strip()
    if "COORDINATOR_ADDRESS" in environ and "COORDINATOR_PORT" in environ:
        host, port = (environ["COORDINATOR_" + name].strip() for name in ("ADDRESS", "PORT"))
        yield "COORDINATOR_ADDRESS and COORDINATOR_PORT", places.with_port(host, port)
    yield "KERAS_DISTRIBUTION_JOB_ADDRESSES", "".join(_keras_addresses(environ)[:1])
    if place.launcher in (places.TF_CONFIG, places.CLUSTER_SPEC):
        cluster, _, _ = places.tf_cluster(environ, place.launcher)
        yield place.launcher, places.tf_addresses(cluster)[0]
    if place.launcher == "SageMaker":
        yield "SM_HOSTS", places.with_port(places.sagemaker_hosts(environ)[0], _SAGEMAKER_PORT)
    job = [environ.get(name, "") for name in _JOBS.get(place.launcher, [""])]
    host = "127.0.0.1" if place.on_one_machine else _first_host(place, environ)
    if all(job) and host:
        derived = _FIRST_PORT + zlib.crc32(os.fsencode(".".join(job))) % _PORTS
        yield place.launcher, places.with_port(host, derived)


def _first_host(place, environ):
    """The machine of rank 0, or "" where nothing tells."""
    if place.launcher == "srun":
        return _first_of_hostlist(environ.get("SLURM_STEP_NODELIST", ""))
    # Open MPI's runtime, which is where mpirun was called: there rank 0 is, by default.
    found = re.search(r";tcp://([0-9.]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return found.group(1) if found and place.launcher == "mpirun" else ""


def _first_of_hostlist(text):
    """The first of SLURM's list of hosts: ``node01`` of ``node[01-04,07],gpu1``."""
    found = re.match(r"([^\[,]*)(?:\[([0-9]+)[^\]]*\]([^,]*))?", text.strip())
    return "".join(part or "" for part in found.groups()) if found else ""


# Rank 0 --------------------------------------------------------------------------------------


def listen(place: places.Place, host: str, port: int) -> Any:
    """A socket that listens at the rendezvous: for this machine alone if all ranks are on it.

    For several machines it listens at the address of ``host``. It listens at all addresses of
    this machine where that name stands for another one (a cluster's own proxy), or for the
    loopback interface, as Debian's /etc/hosts and PyTorchJob have rank 0's.

    Raises:
        RankError: the port is taken.
    """
    import socket  # for start-up time

    everywhere = "::" if socket.has_ipv6 else ""
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = everywhere
    if places.is_loopback(address) and not place.on_one_machine:
        address = everywhere
    try:
        try:
            return _listening(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return _listening(everywhere, port)
    except OSError as error:
        raise errors.RankError(
            "This process is {}, and it cannot listen at {}:{}, the rendezvous of the ranks: {}. "
            "Set MASTER_ADDR and MASTER_PORT to another host or port, the same for all "
            "ranks.".format(place, host, port, error.strerror)
        ) from error


def _listening(address, port):
    import socket  # for start-up time

    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        # The last job's connections may not be over yet.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == "::":
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((address, port))
        listening.listen(128)
    except BaseException:
        listening.close()
        raise
    return listening
