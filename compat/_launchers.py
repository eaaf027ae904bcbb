"""The place among the ranks that a launcher gives this process, from its environment alone.

Each launcher has variables of its own. Most tell a rank, a size, and the same two among the
processes of one machine: ``LAUNCHERS``. Every other one has a function below. Where a variable
says that there are several processes but nothing says which of them this is, that is an error:
each would train alone. docs/launchers.md is the table for users; tests/test_launchers.py has the
environment that each launcher documents.
"""

from . import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator, List, Mapping, Optional, Tuple

#: Launchers, and their variables for the rank, the number of ranks, and the same two among the
#: processes of one machine. The first whose four are set tells.
LAUNCHERS = (
    ("compat run", "COMPAT_RANK COMPAT_SIZE COMPAT_LOCAL_RANK COMPAT_LOCAL_SIZE"),
    ("horovodrun", "HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE"),
    # Ray Train, Spark's TorchDistributor and SageMaker's torch_distributed set the same four.
    ("torchrun", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"),
    ("deepspeed", "RANK WORLD_SIZE LOCAL_RANK LOCAL_SIZE"),
    (
        "mpirun",  # Open MPI, and so Kubeflow's MPIJob
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpiexec", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("PALS", "PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE"),  # Cray's mpiexec and aprun
    (
        "mpirun_rsh",  # MVAPICH2
        "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK "
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "jsrun",
        "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE",
    ),
)

#: The variable that tells TensorFlow's workers the cluster and their task in it, as JSON.
TF_CONFIG = "TF_CONFIG"

# Variables that say that there are several processes, where none of the launchers here tells which
# of them this is: sizes of 2 or more, and ranks of 1 or more.
_SIZES = [names.split()[1] for _, names in LAUNCHERS] + [
    "FLUX_JOB_SIZE", "JAX_NUM_PROCESSES", "KERAS_DISTRIBUTION_NUM_PROCESSES", "PET_NNODES",
]  # fmt: skip
_RANKS = [names.split()[0] for _, names in LAUNCHERS] + [
    "ALPS_APP_PE", "FLUX_TASK_RANK", "JAX_PROCESS_ID", "KERAS_DISTRIBUTION_PROCESS_ID",
    "LOCAL_RANK", "PET_NODE_RANK", "PMIX_RANK",
]  # fmt: skip

# Where nothing tells a port, one of these is used: they lie above Linux's ephemeral ports.
_FIRST_PORT, _PORTS = 61440, 4096
# SageMaker's containers leave it to their processes.
_SAGEMAKER_PORT = 7777


class Ranks:
    """This process's place: its rank of so many, and the same on its own machine.

    Where a launcher does not tell how many ranks the machine has, ``local_size`` is how many
    there must be at least. ``on_one_machine``: all ranks are known to be on one, None: where the
    sizes say so.
    """

    __slots__ = ("rank", "size", "local_rank", "local_size", "launcher", "on_one_machine")

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


def launched(environ: "Mapping[str, str]") -> "Optional[Ranks]":
    """The place that a launcher gave this process, or None where it is alone. Pure.

    Raises:
        RankError: the launcher's variables contradict each other, or tell of several processes
            and not which of them this is.
    """
    if is_to_be_alone(environ):
        return None
    for launcher, names in LAUNCHERS:
        place = _told(launcher, names.split(), [environ.get(name) for name in names.split()])
        if place is not None:
            return place if place.size > 1 else None
    # A scheduler comes after what may have been started within one of its tasks.
    for find in (_jax, _keras, _jaxjob, _worker, _worker_pool, _sagemaker, _srun, _torch_alike):
        place = find(environ)
        if place is not None and place.size > 1:
            return place
    if not is_evaluator(environ):
        _refuse_unknown_place(environ)
    return None


def is_to_be_alone(environ: "Mapping[str, str]") -> bool:
    """Whether the user says so, whatever the environment has besides: ``COMPAT_ALONE=1``."""
    return environ.get("COMPAT_ALONE", "").strip() not in ("", "0")


def is_evaluator(environ: "Mapping[str, str]") -> bool:
    """Whether this is the process of ``TF_CONFIG`` that evaluates what the others have saved."""
    if is_to_be_alone(environ):
        return False
    config = _parsed(TF_CONFIG, environ)
    return config is not None and (config.get("task") or {}).get("type") == "evaluator"


def _told(launcher, names, values):
    """The place that the values of four variables are, or None where one of them is not set."""
    if None in values:
        return None
    texts = [value.strip() for value in values]
    if not all(text.isdecimal() for text in texts):
        raise errors.invalid_ranks(launcher, names, texts)
    rank, size, local_rank, local_size = map(int, texts)
    if not (rank < size and local_rank < local_size <= size):
        raise errors.invalid_ranks(launcher, names, texts)
    return Ranks(rank, size, local_rank, local_size, launcher)


def _number(name, environ):
    """A variable's number from 0, or None where it is not set.

    Raises:
        RankError: it is something else.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise errors.not_a_rank(name, text)
    return int(text)


def _counted(launcher, machines, rank):
    """A place among ranks whose machines are known, in the order of ranks."""
    mine = machines[rank]
    local_rank, local_size = machines[:rank].count(mine), machines.count(mine)
    return Ranks(rank, len(machines), local_rank, local_size, launcher)


def _one_per_machine(launcher, names, environ, where):
    """A place by rank and size alone: one rank a machine, or all on this one.

    Arguments:
        names: the variables of the rank and of the size.
        where: rank 0's address: on this machine's loopback interface, so are all. But on
            Kubernetes, PyTorchJob tells rank 0 "localhost" and the others its name.
    """
    rank, size = (_number(name, environ) for name in names)
    if rank is None or size is None:
        return None
    if rank >= size:
        raise errors.invalid_ranks(launcher, names, [str(rank), str(size)])
    here = is_loopback(_host(where)) and "KUBERNETES_SERVICE_HOST" not in environ
    return Ranks(rank, size, rank, size, launcher) if here else Ranks(rank, size, 0, 1, launcher)


# Launchers by their own ways ------------------------------------------------------------------


def _jax(environ):
    """The variables of ``jax.distributed.initialize()``."""
    names = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"
    return _one_per_machine("JAX's variables", names, environ, _jax_address(environ))


def _jax_address(environ):
    return environ.get("JAX_COORDINATOR_ADDRESS", "").strip()


def _keras(environ):
    """The variables of ``keras.distribution.initialize()``."""
    names = "KERAS_DISTRIBUTION_PROCESS_ID", "KERAS_DISTRIBUTION_NUM_PROCESSES"
    addresses = _keras_addresses(environ)
    place = _one_per_machine("Keras' variables", names, environ, "".join(addresses[:1]))
    if place is not None and len(addresses) == place.size:
        return _counted(place.launcher, [_host(address) for address in addresses], place.rank)
    return place


def _keras_addresses(environ):
    text = environ.get("KERAS_DISTRIBUTION_JOB_ADDRESSES", "")
    return [address.strip() for address in text.split(",") if address.strip()]


def _jaxjob(environ):
    """Kubeflow's JAXJob: one process in each pod. Others use these names for other purposes."""
    if "COORDINATOR_ADDRESS" not in environ:
        return None
    names = "PROCESS_ID", "NUM_PROCESSES"
    return _one_per_machine("JAXJob", names, environ, environ["COORDINATOR_ADDRESS"])


def _worker(environ):
    """The place of one of TensorFlow's workers, or None: alone, or the one that evaluates.

    The chief ("master" on AI Platform and SageMaker), where there is one, is rank 0.
    """
    if _parsed(TF_CONFIG, environ) is None or is_evaluator(environ):
        return None
    cluster, kind, index = tf_cluster(environ)
    addresses = tf_addresses(cluster)
    if len(addresses) < 2:
        return None
    if kind not in ("chief", "worker") or not 0 <= index < len(cluster.get(kind, [])):
        problem = "the cluster has no task {} {}".format(kind, index)
        raise errors.invalid_tf_config(environ[TF_CONFIG], problem)
    rank = index + (len(cluster.get("chief", [])) if kind == "worker" else 0)
    return _counted(TF_CONFIG, [_host(address) for address in addresses], rank)


def tf_cluster(environ: "Mapping[str, str]") -> "Tuple[Any, Any, int]":
    """The cluster of ``TF_CONFIG`` as lists of addresses by kind, and this task's kind and index.

    Raises:
        RankError: it has parameter servers, or is not understood.
    """
    text = environ[TF_CONFIG]
    config = _parsed(TF_CONFIG, environ)
    found = config.get("cluster")
    if found is None and config.get("sparseCluster"):
        # TFJob's dynamic workers know themselves and the parameter servers, and no other.
        raise errors.sparse_cluster(text)
    task = config.get("task") or {}
    try:
        cluster = {kind: _addresses(part) for kind, part in (found or {}).items()}
        kind, index = task.get("type"), int(task.get("index") or 0)
    except LookupError:
        raise errors.sparse_cluster(text) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise errors.invalid_tf_config(text, error) from error
    if cluster.get("ps"):
        raise errors.parameter_servers(text)
    if "master" in cluster:
        cluster["chief"] = cluster.pop("master") + cluster.get("chief", [])
    return cluster, "chief" if kind == "master" else kind, index


def tf_addresses(cluster: "Mapping[str, List[str]]") -> "List[str]":
    """The addresses of a cluster's ranks, in their order: the chief is rank 0."""
    return cluster.get("chief", []) + cluster.get("worker", [])


def _addresses(part):
    """A part of a cluster as a list: TensorFlow takes a dictionary by index, too."""
    if isinstance(part, dict):
        by_index = {int(index): address for index, address in part.items()}
        return [str(by_index[index]) for index in range(len(by_index))]
    return [str(address) for address in part or []]


def _worker_pool(environ):
    """Vertex AI's CLUSTER_SPEC, for containers of one's own: one process a machine."""
    pools = _vertex_pools(environ)
    if pools is None:
        return None
    text, (counts, kind, index) = environ["CLUSTER_SPEC"], pools
    if len(counts.get("workerpool2", [])):
        raise errors.parameter_servers(text, "CLUSTER_SPEC")
    machines = counts.get("workerpool0", []) + counts.get("workerpool1", [])
    if kind not in ("workerpool0", "workerpool1") or not 0 <= index < len(counts.get(kind, [])):
        if len(machines) < 2 or kind == "workerpool3":  # which evaluates
            return None
        raise errors.not_a_rank("CLUSTER_SPEC", text)
    rank = index + (len(counts["workerpool0"]) if kind == "workerpool1" else 0)
    return Ranks(rank, len(machines), 0, 1, "CLUSTER_SPEC")


def _vertex_pools(environ):
    """The addresses of each pool, and this task's pool and index; None without CLUSTER_SPEC."""
    config = _parsed("CLUSTER_SPEC", environ)
    if config is None:
        return None
    try:
        counts = {pool: list(part) for pool, part in config["cluster"].items()}
        return counts, config["task"]["type"], int(config["task"].get("index") or 0)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise errors.not_a_rank("CLUSTER_SPEC", environ["CLUSTER_SPEC"]) from error


def _sagemaker(environ):
    """SageMaker's script mode: one process a machine."""
    hosts = _sagemaker_hosts(environ)
    if len(hosts) < 2:
        return None
    mine = environ.get("SM_CURRENT_HOST", "")
    if mine not in hosts:
        raise errors.not_a_rank("SM_CURRENT_HOST", mine)
    return Ranks(hosts.index(mine), len(hosts), 0, 1, "SageMaker")


def _sagemaker_hosts(environ):
    text = environ.get("SM_HOSTS", "").strip()
    if not text:
        return []
    import json

    try:
        return sorted(str(host) for host in json.loads(text))
    except (ValueError, TypeError) as error:
        raise errors.not_a_rank("SM_HOSTS", text) from error


def _srun(environ):
    """A task of SLURM's srun. A bare sbatch shell has no SLURM_STEP_NUM_TASKS."""
    size, rank = _number("SLURM_STEP_NUM_TASKS", environ), _number("SLURM_PROCID", environ)
    if size is None or rank is None:
        return None
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]
    local_rank = _number("SLURM_LOCALID", environ) or 0
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number("SLURM_NODEID", environ) or 0
    local_size = tasks[node] if node < len(tasks) else local_rank + 1
    values = [str(value) for value in (rank, size, local_rank, local_size)]
    return _told("srun", names, values)


def _tasks_per_node(text):
    """``2(x3),1`` as ``[2, 2, 2, 1]``."""
    import re

    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def _torch_alike(environ):
    """RANK and WORLD_SIZE without all of torchrun's: PyTorchJob, DLC, Lightning, older launchers.

    Without LOCAL_RANK there is one process a machine.
    """
    size, local_rank = _number("WORLD_SIZE", environ), _number("LOCAL_RANK", environ)
    names = ["RANK", "WORLD_SIZE"]
    rank = _number("RANK", environ)
    if size is None or size < 2:
        return None
    if local_rank is None:
        for name in ("PET_NPROC_PER_NODE", "NPROC_PER_NODE"):
            processes = environ.get(name, "").strip()
            if processes.isdecimal() and int(processes) > 1:
                raise errors.processes_without_torchrun(name, processes)
        return _one_per_machine("RANK", names, environ, environ.get("MASTER_ADDR", ""))
    if rank is None and _number("NODE_RANK", environ) == 0:
        rank = local_rank  # Lightning's script launcher; on other nodes nothing tells the rank
    if rank is None:
        return None
    names.append("LOCAL_RANK")
    if not rank < size or not local_rank < size:
        values = [str(value) for value in (rank, size, local_rank)]
        raise errors.invalid_ranks("RANK", names, values)
    return Ranks(rank, size, local_rank, local_rank + 1, "RANK", False)


def _refuse_unknown_place(environ):
    """Refuse to be alone where variables say that there are several processes."""
    for names, least in ((_SIZES, 2), (_RANKS, 1)):
        for name in names:
            text = environ.get(name, "").strip()
            # PET_NNODES may be a range, "1:4".
            numbers = [int(number) for number in text.split(":") if number.isdecimal()]
            if numbers and max(numbers) >= least:
                raise errors.place_unknown(name, text)


def _parsed(name, environ):
    """A variable's JSON object, or None where it is not set."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    import json

    try:
        config = json.loads(text)
        task = config.get("task") or {}
        task.get("type")
        return config
    except (ValueError, AttributeError) as error:
        if name == TF_CONFIG:
            raise errors.invalid_tf_config(text, error) from error
        raise errors.not_a_rank(name, text) from error


# Where ranks meet -----------------------------------------------------------------------------


def meeting(ranks: "Ranks", environ: "Mapping[str, str]") -> "Optional[Tuple[str, int]]":
    """Rank 0's host and the port where ranks meet that have no launcher's store; None: unknown.

    What the user sets comes before what a launcher tells. Ranks that are all on this machine need
    to be told no more than a name of their job that no other job has: its port follows from it.

    Raises:
        RankError: an address is not understood.
    """
    for name, where in _meetings(ranks, environ):
        if where:
            host, port = _host(where), where.rpartition(":")[2]
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise errors.invalid_meeting_point(name, where)
            return "127.0.0.1" if ranks.on_one_machine else host, int(port)
    return None


def torchrun_keeps_store(environ: "Mapping[str, str]") -> bool:
    """Whether torchrun, and not rank 0, keeps the store where torch's ranks meet.

    As torch.distributed's ``rendezvous("env://")`` tells.
    """
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meetings(ranks: "Ranks", environ: "Mapping[str, str]") -> "Iterator[Tuple[str, str]]":
    """Where ranks may meet, as (what tells it, address), the first that is not empty first."""
    if ranks.launcher == LAUNCHERS[0][0]:
        yield "COMPAT_MEETING", environ.get("COMPAT_MEETING", "")
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        port = environ["MASTER_PORT"].strip()
        if torchrun_keeps_store(environ) and port.isdecimal():
            port = str(int(port) + 1)  # torchrun itself listens at MASTER_PORT
        yield "MASTER_ADDR and MASTER_PORT", address(environ["MASTER_ADDR"].strip(), port)
    yield "JAX_COORDINATOR_ADDRESS", _jax_address(environ)
    if "COORDINATOR_ADDRESS" in environ and "COORDINATOR_PORT" in environ:
        host, port = (environ["COORDINATOR_" + name].strip() for name in ("ADDRESS", "PORT"))
        yield "COORDINATOR_ADDRESS and COORDINATOR_PORT", address(host, port)
    yield "KERAS_DISTRIBUTION_JOB_ADDRESSES", "".join(_keras_addresses(environ)[:1])
    if ranks.launcher == TF_CONFIG:
        cluster, _, _ = tf_cluster(environ)
        yield TF_CONFIG, tf_addresses(cluster)[0]
    if ranks.launcher == "CLUSTER_SPEC":
        yield "CLUSTER_SPEC", str(_vertex_pools(environ)[0]["workerpool0"][0])
    if ranks.launcher == "SageMaker":
        yield "SM_HOSTS", address(_sagemaker_hosts(environ)[0], _SAGEMAKER_PORT)
    job = _job(ranks, environ)
    if job:
        host = "127.0.0.1" if ranks.on_one_machine else _first_host(ranks, environ)
        if host:
            import zlib

            derived = _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
            yield ranks.launcher, address(host, derived)


def _job(ranks, environ):
    """What names this job on its machines, and no other, as far as the launcher tells; or ""."""
    names = {
        "srun": ["SLURM_JOB_ID", "SLURM_STEP_ID"],
        "mpirun": ["PMIX_NAMESPACE"],
        "PALS": ["PALS_APID"],
        "mpirun_rsh": ["MPIRUN_ID"],
    }.get(ranks.launcher, [])
    values = [environ.get(name, "") for name in names]
    return ".".join(values) if values and all(values) else ""


def _first_host(ranks, environ):
    """The machine of rank 0, or "" where nothing tells."""
    if ranks.launcher == "srun":
        return _first_of_hostlist(environ.get("SLURM_STEP_NODELIST", ""))
    import re

    # Open MPI's runtime, which is where mpirun was called: there rank 0 is, by default.
    found = re.search(r";tcp://([0-9.]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return found.group(1) if found and ranks.launcher == "mpirun" else ""


def _first_of_hostlist(text):
    """The first of SLURM's list of hosts: ``node01`` of ``node[01-04,07],gpu1``."""
    import re

    found = re.match(r"([^\[,]*)(?:\[([0-9]+)[^\]]*\]([^,]*))?", text.strip())
    return "".join(part or "" for part in found.groups()) if found else ""


def address(host: str, port: "Any") -> str:
    """``host:port``, or ``[IPv6]:port``."""
    return "[{}]:{}".format(host, port) if ":" in host else "{}:{}".format(host, port)


def _host(address):
    """The host of ``host``, ``host:port`` or ``[IPv6]:port``."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
