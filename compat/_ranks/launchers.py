"""A process's place among the ranks, as its launcher reports it in the environment.

Each launcher has different variables. Most have a rank, a size, and the same two among the
processes of one machine: ``LAUNCHERS``. Every other one has a function, below, in ``tf_config``
or in ``sagemaker``.
Where a variable implies several processes but none identifies this one, that is an error: each
would train alone. docs/launchers.md is the table for users;
tests/test_launchers.py has the environment that each launcher documents.
"""

from .. import errors
from .._configuration.numeric import whole_number
from . import sagemaker, tf_config, variables
from .place import Place, stays_alone
from .variables import not_a_rank, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Mapping, Optional

_FOUR = "{0}_RANK {0}_SIZE {0}_LOCAL_RANK {0}_LOCAL_SIZE"
#: Launchers, and their variables for the rank, the number of ranks, and the same two among the
#: processes of one machine. The first whose four are set counts.
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

# Variables that imply several processes, where no launcher's variables identify this one: sizes of
# 2 or more, and ranks of 1 or more.
_SIZES = [names.split()[1] for _, names in LAUNCHERS] + [
    "FLUX_JOB_SIZE", "JAX_NUM_PROCESSES", "KERAS_DISTRIBUTION_NUM_PROCESSES", "PET_NNODES",
]  # fmt: skip
_RANKS = [names.split()[0] for _, names in LAUNCHERS] + [
    "ALPS_APP_PE", "FLUX_TASK_RANK", "JAX_PROCESS_ID", "KERAS_DISTRIBUTION_PROCESS_ID",
    "LOCAL_RANK", "PET_NODE_RANK", "PMIX_RANK",
]  # fmt: skip
#: All of these.
NAMES = {name for _, names in LAUNCHERS for name in names.split()}.union(_SIZES, _RANKS)


def launched(environ: "Mapping[str, str]") -> "Optional[Place]":
    """Return the place that a launcher gave this process, or None where it is alone. Pure.

    Raises:
        RankError: the launcher's variables contradict each other, or report several processes and
            not which of them this is.
    """
    if stays_alone(environ):
        return None
    for launcher, names in LAUNCHERS:
        four = names.split()
        if all(name in environ for name in four):
            values = [environ[name].strip() for name in four]
            place: "Optional[Place]" = variables.from_values(launcher, four, values)
            return place if place is not None and place.size > 1 else None
    # A scheduler comes after what may have been started within one of its tasks.
    in_cluster = tf_config.worker, sagemaker.place
    for find in (_jax, _keras, _jaxjob) + in_cluster + (srun, _torch_alike):
        place = find(environ)
        if place is not None and place.size > 1:
            return place
    if tf_config.evaluator_in(environ) is None:
        _refuse_unknown_place(environ)
    return None


# Launchers by their own ways ------------------------------------------------------------------


def _jax(environ):
    """Return the place by the variables of ``jax.distributed.initialize()``."""
    names = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"
    return variables.from_rank_and_size("JAX's variables", names, environ)


def _keras(environ):
    """Return the place by the variables of ``keras.distribution.initialize()``."""
    kinds = "PROCESS_ID", "NUM_PROCESSES", "JOB_ADDRESSES"
    names = [f"KERAS_DISTRIBUTION_{kind}" for kind in kinds]
    place = variables.from_rank_and_size("Keras' variables", names, environ)
    addresses = keras_addresses(environ)
    if place is None or len(addresses) != place.size:
        return place
    return variables.from_addresses(place.launcher, addresses, place.rank)


def keras_addresses(environ: "Mapping[str, str]") -> "List[str]":
    """Return the addresses of Keras' variables, in the order of ranks."""
    text = environ.get("KERAS_DISTRIBUTION_JOB_ADDRESSES", "")
    return [address.strip() for address in text.split(",") if address.strip()]


def _jaxjob(environ):
    """Return the place in Kubeflow's JAXJob, which has one process in each pod.

    Others use these names for other purposes.
    """
    names = "PROCESS_ID", "NUM_PROCESSES", "COORDINATOR_ADDRESS"
    return variables.from_rank_and_size("JAXJob", names, environ) if names[2] in environ else None


def srun(environ: "Mapping[str, str]") -> "Optional[Place]":
    """Return the place of a task of SLURM's srun.

    The shell of sbatch, which is not such a task, has no SLURM_STEP_NUM_TASKS.
    """
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]
    rank, size = (number(name, environ) for name in names[:2])
    if size is None or rank is None:
        return None
    local_rank, node = (number(name, environ) or 0 for name in (names[2], "SLURM_NODEID"))
    tasks = environ.get(names[3], "").strip()
    values = rank, size, local_rank, _tasks_on_node(tasks, node) or local_rank + 1
    return variables.from_values("srun", names, values)


def _tasks_on_node(text, node):
    """Return how many tasks a node has, by a text such as ``2(x3),1``, or None if unknown."""
    for part in text.split(",") if text else []:
        tasks, _, times = part.partition("(x")
        numbers = whole_number(tasks), whole_number(times[:-1]) if times[-1:] == ")" else 1
        if None in numbers or times[-1:] not in ("", ")"):
            raise not_a_rank("SLURM_STEP_TASKS_PER_NODE", text)
        if node < numbers[1]:
            return numbers[0]
        node -= numbers[1]
    return None


def _torch_alike(environ):
    """Return the place by RANK and WORLD_SIZE, where not all of torchrun's variables are set.

    PyTorchJob, DLC, Lightning and older launchers set them. Without LOCAL_RANK there is one process
    on each machine.
    """
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    rank, size, local_rank = (number(name, environ) for name in names)
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
        return variables.from_rank_and_size("RANK", ("RANK", "WORLD_SIZE", "MASTER_ADDR"), environ)
    if rank is None and number("NODE_RANK", environ) == 0:
        rank = local_rank  # Lightning's script launcher; on other nodes the rank is not known
    if rank is None:
        return None
    return variables.from_values("RANK", names, (rank, size, local_rank, local_rank + 1), False)


def _refuse_unknown_place(environ):
    """Refuse to be alone where variables say that there are several processes."""
    for names, least in ((_SIZES, 2), (_RANKS, 1)):
        for name in names:
            text = environ.get(name, "").strip()
            # PET_NNODES may be a range, "1:4".
            numbers = [whole_number(part) for part in text.split(":") if part.isdecimal()]
            if any(value is None or value >= least for value in numbers):
                raise errors.RankError(
                    "{}={} says that several processes train together, but nothing tells "
                    "which of them this is: each would train alone. Start the script with a "
                    "launcher that does (compat run -n N, torchrun, mpirun, srun), set "
                    "COMPAT_RANK, COMPAT_SIZE, COMPAT_LOCAL_RANK and COMPAT_LOCAL_SIZE, or "
                    "set COMPAT_ALONE=1 to train alone.".format(name, text)
                )
