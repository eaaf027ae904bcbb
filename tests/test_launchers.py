"""The environments that launchers document: what compat makes of each, and the table in docs."""

import json
import os
import socket
import zlib

import pytest
from conftest import refusal

import compat
from compat._configuration import device_choice, gpu_selection
from compat._ranks import launchers, nesting, rendezvous, tf_config
from compat._ranks.place import Place

DOCS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "docs", "launchers.md")


def environment(variables, **changes):
    """Variables, in a text or a dictionary, with others besides or in their place."""
    if isinstance(variables, str):
        variables = dict(pair.split("=", 1) for pair in variables.split())
    return dict(variables, **changes)


def port_of(job):
    """Return the port that is derived from a launcher's name of its job."""
    return 61440 + zlib.crc32(job.encode()) % 4096


def worker(kind, index, **cluster):
    config = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(config)}


def pool(kind, index, *hosts, **more):
    """Vertex AI's, of machines with these names; ``more`` are pools besides."""
    cluster = {"workerpool0": [hosts[0] + ":2222"], "workerpool1": [h + ":2222" for h in hosts[1:]]}
    task = {"type": kind, "index": index, "trial": "1"}
    config = {"cluster": dict(cluster, **more), "environment": "cloud", "task": task}
    return {"CLUSTER_SPEC": json.dumps(config)}


# The third of four tasks of a step on two nodes, the first of the second node's two.
SRUN = (
    "SLURM_JOB_ID=77 SLURM_STEP_ID=1 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NODEID=1 "
    "SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2) "
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=gpu[07-08]"
)
SECOND = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"
FOUR = "{0}RANK=5 {0}SIZE=8 {0}LOCAL_RANK=1 {0}LOCAL_SIZE=4"
TORCH = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456"

# Each launcher's row in the docs: the environment that it documents, and the place it stands for
# (rank, size, local rank, local size), what compat calls it, and the rendezvous.
JOINED = {
    "compat run": (
        FOUR.format("COMPAT_") + " COMPAT_RENDEZVOUS=node1:45001",
        (5, 8, 1, 4), "compat run", ("node1", 45001),
    ),
    "horovodrun": (FOUR.format("HOROVOD_"), (5, 8, 1, 4), "horovodrun", None),
    "torchrun": (
        "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=node1 "
        "MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True",
        (5, 8, 1, 4), "torchrun", ("node1", 29501),
    ),
    "Ray TorchTrainer": (
        SECOND + " NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=40001",
        (3, 4, 1, 2), "torchrun", ("10.0.0.1", 40001),
    ),
    "Spark TorchDistributor": (
        SECOND + " MASTER_ADDR=10.0.0.1 MASTER_PORT=40001",
        (3, 4, 1, 2), "torchrun", ("10.0.0.1", 40001),
    ),
    "SageMaker torch_distributed": (
        SECOND + " MASTER_ADDR=algo-1 MASTER_PORT=7777 SM_CURRENT_HOST=algo-2 SM_NUM_GPUS=2 "
        'SM_HOSTS=["algo-1","algo-2"]',
        (3, 4, 1, 2), "torchrun", ("algo-1", 7777),
    ),
    "DeepSpeed": (
        "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4 CROSS_RANK=1 CROSS_SIZE=2 "
        "MASTER_ADDR=node1 MASTER_PORT=29500",
        (5, 8, 1, 4), "deepspeed", ("node1", 29500),
    ),
    "mpirun (Open MPI)": (
        FOUR.format("OMPI_COMM_WORLD_") + " PMIX_RANK=5 PMIX_NAMESPACE=993722369 "
        "OMPI_MCA_orte_hnp_uri=993722368.0;tcp://10.0.0.7:48641;tcp6://[fd00::2]:46497",
        (5, 8, 1, 4), "mpirun", ("10.0.0.7", port_of("993722369")),
    ),
    "Kubeflow MPIJob": (
        FOUR.format("OMPI_COMM_WORLD_") + " OMPI_MCA_orte_keep_fqdn_hostnames=true "
        "OMPI_MCA_orte_default_hostfile=/etc/mpi/hostfile K_MPI_JOB_ROLE=worker "
        "KUBERNETES_SERVICE_HOST=10.96.0.1 MASTER_ADDR=job-worker-0.job MASTER_PORT=29500",
        (5, 8, 1, 4), "mpirun", ("job-worker-0.job", 29500),
    ),
    "mpiexec (MPICH, Intel MPI)": (
        "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4 PMI_FD=8",
        (5, 8, 1, 4), "mpiexec", None,
    ),
    "Cray PALS": (
        "PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=8 PALS_RANKID=5 PALS_NODEID=0 "
        "PALS_APID=ab12",
        (5, 8, 1, 8), "PALS", ("127.0.0.1", port_of("ab12")),
    ),
    "mpirun_rsh (MVAPICH2)": (FOUR.format("MV2_COMM_WORLD_"), (5, 8, 1, 4), "mpirun_rsh", None),
    "jsrun": (FOUR.format("JSM_NAMESPACE_"), (5, 8, 1, 4), "jsrun", None),
    "srun": (SRUN, (2, 4, 0, 2), "srun", ("gpu07", port_of("77.1"))),
    "srun --mpi=pmi2": (
        SRUN + " PMI_RANK=2 PMI_SIZE=4 PMI_JOBID=77.1 SLURM_MPI_TYPE=pmi2",
        (2, 4, 0, 2), "srun", ("gpu07", port_of("77.1")),
    ),
    "srun --mpi=pmix": (
        SRUN + " PMIX_RANK=2 PMIX_NAMESPACE=slurm.pmix.77.1 SLURM_MPI_TYPE=pmix",
        (2, 4, 0, 2), "srun", ("gpu07", port_of("77.1")),
    ),
    "Kubeflow PyTorchJob": (
        TORCH + " PET_MASTER_ADDR=job-master-0 PET_MASTER_PORT=23456 PET_NNODES=2 "
        "PET_NODE_RANK=1 PET_NPROC_PER_NODE=auto KUBERNETES_SERVICE_HOST=10.96.0.1",
        (1, 2, 0, 1), "RANK", ("job-master-0", 23456),
    ),
    "Alibaba DLC": (
        TORCH + " NPROC_PER_NODE=1", (1, 2, 0, 1), "RANK", ("job-master-0", 23456),
    ),
    "Lightning": (
        "LOCAL_RANK=1 NODE_RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=5001",
        (1, 4, 1, 2), "RANK", ("127.0.0.1", 5001),
    ),
    "Kubeflow JAXJob": (
        "COORDINATOR_ADDRESS=job-worker-0 COORDINATOR_PORT=6666 NUM_PROCESSES=2 PROCESS_ID=1",
        (1, 2, 0, 1), "JAXJob", ("job-worker-0", 6666),
    ),
    "JAX's variables": (
        "JAX_COORDINATOR_ADDRESS=node1:1234 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1",
        (1, 2, 0, 1), "JAX's variables", ("node1", 1234),
    ),
    "Keras' variables": (
        "KERAS_DISTRIBUTION_JOB_ADDRESSES=10.0.0.1:1234,10.0.0.2:2345,10.0.0.2:2346 "
        "KERAS_DISTRIBUTION_NUM_PROCESSES=3 KERAS_DISTRIBUTION_PROCESS_ID=2",
        (2, 3, 1, 2), "Keras' variables", ("10.0.0.1", 1234),
    ),
    "TF_CONFIG": (
        worker("worker", 1, chief=["a:1"], worker=["b:1", "a:2", "b:2"], evaluator=["a:9"]),
        (2, 4, 1, 2), "TF_CONFIG", ("a", 1),
    ),
    "AI Platform, SageMaker (TensorFlow)": (
        worker("worker", 0, master=["a:1"], worker=["b:1"]), (1, 2, 0, 1), "TF_CONFIG", ("a", 1),
    ),
    "Vertex AI": (
        pool("workerpool1", 0, "cmle-0", "cmle-1", "cmle-2"),
        (1, 3, 0, 1), "CLUSTER_SPEC", ("cmle-0", 2222),
    ),
    "SageMaker script mode": (
        'SM_HOSTS=["algo-2","algo-1"] SM_CURRENT_HOST=algo-2 SM_NUM_GPUS=1',
        (1, 2, 0, 1), "SageMaker", ("algo-1", 7777),
    ),
}  # fmt: skip
JOINED = {name: (environment(row[0]),) + row[1:] for name, row in JOINED.items()}

UNKNOWN = (
    "{}={} says that several processes train together, but nothing tells which of them this is: "
    "each would train alone. Start the script with a launcher that does (compat run -n N, "
    "torchrun, mpirun, srun), set COMPAT_RANK, COMPAT_SIZE, COMPAT_LOCAL_RANK and "
    "COMPAT_LOCAL_SIZE, or set COMPAT_ALONE=1 to train alone."
)
WITHOUT_TORCHRUN = (
    "{0}=8 asks for 8 processes on each machine, but this one was started without torchrun, which "
    "would start them: RANK and WORLD_SIZE do not count them alike. Start the script with "
    "torchrun, or set {0}=1 for one process on each machine, or COMPAT_ALONE=1 to train alone."
)
SPARSE = (
    "TF_CONFIG={TF_CONFIG} names only some of the workers, so that nothing tells how many there "
    "are. Name all of them (in a TFJob, without enableDynamicWorker), or set COMPAT_ALONE=1 to "
    "train alone."
)
PARAMETER_SERVERS = (
    "{}={} names parameter servers, which compat does not use: ranks train in step. Give all "
    "machines as workers, or set COMPAT_ALONE=1 to train alone."
)

# Rows of what no process can be told its place by: the environment, and the error, with the
# variables of the environment to be filled in.
REFUSED = {
    "Flux": ("FLUX_TASK_RANK=5 FLUX_JOB_SIZE=8", UNKNOWN.format("FLUX_JOB_SIZE", 8)),
    "aprun": ("ALPS_APP_PE=1", UNKNOWN.format("ALPS_APP_PE", 1)),
    "Kubeflow TrainJob without torchrun": (
        "PET_NNODES=2 PET_NODE_RANK=0 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=job-0",
        UNKNOWN.format("PET_NNODES", 2),
    ),
    "PyTorchJob with nprocPerNode, without torchrun": (
        TORCH + " PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8",
        WITHOUT_TORCHRUN.format("PET_NPROC_PER_NODE"),
    ),
    "Alibaba DLC with NPROC_PER_NODE, without torchrun": (
        TORCH + " NPROC_PER_NODE=8", WITHOUT_TORCHRUN.format("NPROC_PER_NODE"),
    ),
    "Lightning on its second node": (
        "LOCAL_RANK=1 NODE_RANK=1 WORLD_SIZE=4", UNKNOWN.format("WORLD_SIZE", 4),
    ),
    "TF_CONFIG with a sparse cluster": (
        {"TF_CONFIG": '{"sparseCluster": {"worker": {"1": "a:1"}}, "task": {"type": "worker"}}'},
        SPARSE,
    ),
    "TF_CONFIG with parameter servers": (
        worker("worker", 0, worker=["a:1", "b:1"], ps=["c:1"]),
        PARAMETER_SERVERS.format("TF_CONFIG", "{TF_CONFIG}"),
    ),
    "Vertex AI with parameter servers": (
        pool("workerpool0", 0, "a", "b", workerpool2=["c:2222"]),
        PARAMETER_SERVERS.format("CLUSTER_SPEC", "{CLUSTER_SPEC}"),
    ),
}  # fmt: skip


def error_of(call, *arguments):
    return refusal(compat.RankError, call, *arguments)


def four(place):
    return place.rank, place.size, place.local_rank, place.local_size


@pytest.mark.parametrize("launcher", sorted(JOINED))
def test_joined(launcher):
    environ, place, name, address = JOINED[launcher]
    found = launchers.launched(environ)
    assert four(found) == place
    assert str(found) == "rank {} of {} ({})".format(place[0], place[1], name)
    assert rendezvous.find_rendezvous(found, environ) == address
    assert launchers.launched(dict(environ, COMPAT_ALONE="1")) is None


@pytest.mark.parametrize("launcher", sorted(REFUSED))
def test_refused(launcher):
    environ, text = environment(REFUSED[launcher][0]), REFUSED[launcher][1]
    assert error_of(launchers.launched, environ) == text.format(**environ)
    assert launchers.launched(dict(environ, COMPAT_ALONE="1")) is None


def test_docs_have_a_row_for_each():
    with open(DOCS, encoding="utf-8") as file:
        rows = [line.strip("|\n ").split("|") for line in file if line.startswith("| ")]
    named = {4: set(), 3: set()}
    for row in rows:
        named[len(row)].update(row[0].strip().replace("`", "").split("; "))
    joined, refused = named[4], named[3]
    assert joined - {"launcher", "---"} == set(JOINED)
    assert refused - {"environment", "---"} == set(REFUSED)


# What makes a place ---------------------------------------------------------------------------


@pytest.mark.parametrize("launcher, names", launchers.LAUNCHERS)
def test_part_of_a_launcher_never_makes_a_process_alone(launcher, names):
    variables = dict(zip(names.split(), "5818"))
    for name in variables:
        rest = {n: v for n, v in variables.items() if n != name}
        try:
            place = launchers.launched(rest)
        except compat.RankError as error:
            assert "COMPAT_ALONE=1" in str(error)
        else:  # RANK and WORLD_SIZE, with or without LOCAL_RANK
            assert (place.rank, place.size) == (5, 8) and {"RANK", "WORLD_SIZE"} <= set(rest)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1",
        "RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=1",
        # A bare sbatch shell of four tasks, and a step of one task within it.
        "SLURM_JOB_ID=77 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0",
        "SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=1",
        "NUM_PROCESSES=8 PROCESS_ID=1",  # not JAXJob's
        "PET_NNODES=1:1 PET_NODE_RANK=0",
        "LOCAL_RANK=0 NODE_RANK=0",
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        worker("worker", 0, worker=["a:1"]),
        worker("master", 0, master=["a:1"]),
        'SM_HOSTS=["algo-1"] SM_CURRENT_HOST=algo-1',
        pool("workerpool0", 0, "a"),
        pool("workerpool3", 0, "a", "b", workerpool3=["c:2222"]),
    ],
)
def test_alone(environ):
    assert launchers.launched(environment(environ)) is None


@pytest.mark.parametrize(
    "launcher, text",
    [
        ("torchrun", "RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2"),
        ("torchrun", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2"),
        ("torchrun", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=3"),
        ("torchrun", "RANK=-1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"),
        ("torchrun", "RANK=one WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"),
        ("RANK", "RANK=2 WORLD_SIZE=2"),
        ("RANK", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2"),
        ("JAX's variables", "JAX_PROCESS_ID=2 JAX_NUM_PROCESSES=2"),
        (
            "srun",
            "SLURM_PROCID=4 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=4",
        ),
    ],
)
def test_contradictions_are_errors(launcher, text):
    assert error_of(launchers.launched, environment(text)) == (
        "The environment of {} contradicts itself: {}. Ranks count from 0 and are fewer than the "
        "size. Start the script with its launcher again, or set COMPAT_ALONE=1 to train "
        "alone.".format(launcher, text.replace(" ", ", "))
    )


@pytest.mark.parametrize(
    "name, environ",
    [
        ("RANK", "RANK=one WORLD_SIZE=2"),
        ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID=0 JAX_NUM_PROCESSES=two"),
        ("SM_HOSTS", "SM_HOSTS=algo-1,algo-2 SM_CURRENT_HOST=algo-1"),
        ("SM_CURRENT_HOST", 'SM_HOSTS=["algo-1","algo-2"] SM_CURRENT_HOST=algo-3'),
        ("CLUSTER_SPEC", "CLUSTER_SPEC={"),
        ("CLUSTER_SPEC", {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"]}}'}),
        ("CLUSTER_SPEC", pool("workerpool1", 1, "a", "b")),
    ],
)
def test_what_is_no_place_is_an_error(name, environ):
    environ = environment(environ)
    assert error_of(launchers.launched, environ) == (
        "{}={} does not tell the rank of this process in a way that compat understands. Set "
        "COMPAT_RANK, COMPAT_SIZE, COMPAT_LOCAL_RANK and COMPAT_LOCAL_SIZE instead, or "
        "COMPAT_ALONE=1 to train alone.".format(name, environ[name])
    )


def test_what_runs_within_a_task_of_a_scheduler_comes_first():
    for launcher in ("compat run", "torchrun", "mpirun (Open MPI)", "JAX's variables", "TF_CONFIG"):
        environ, place, _, _ = JOINED[launcher]
        assert four(launchers.launched(environment(SRUN, **environ))) == place


def test_ranks_by_number_alone_are_one_a_machine_or_all_on_this_one():
    """On Kubernetes PyTorchJob tells its first pod "localhost", and the others its name."""
    local = environment("RANK=1 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500")
    place = launchers.launched(local)
    assert four(place) == (1, 3, 1, 3) and place.on_one_machine
    pod = environment("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost KUBERNETES_SERVICE_HOST=10.0.0.1")
    place = launchers.launched(pod)
    assert four(place) == (0, 2, 0, 1) and not place.on_one_machine


@pytest.mark.parametrize(
    "text, counts",
    [
        ("3", [3]), ("2(x3),1", [2, 2, 2, 1]), ("4(x2)", [4, 4]), ("1,2(x2)", [1, 2, 2]),
        ("2(x999999999)", [2, 2]), ("", []),
    ],
)  # fmt: skip
def test_tasks_on_each_node(text, counts):
    nodes = range(len(counts) + (len(text) < 9))
    found = [launchers._tasks_on_node(text, node) for node in nodes]
    assert found == (counts + [None])[: len(nodes)]


@pytest.mark.parametrize(
    "text, host",
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu09", "gpu07"),
        ("gpu[07-08]", "gpu07"),
        ("rack1-gpu[7,9-11],login", "rack1-gpu7"),
        ("gpu[1-2].cluster", "gpu1.cluster"),
    ],
)
def test_first_of_hostlist(text, host):
    assert rendezvous._first_of_hostlist(text) == host


# TF_CONFIG ------------------------------------------------------------------------------------


def test_tf_config_tells_the_place():
    """The chief is rank 0, workers on one machine are its local ranks."""
    for chief in ("chief", "master"):
        cluster = {chief: ["a:1"], "worker": ["b:1", "a:2", "b:2"], "evaluator": ["a:9"]}
        tasks = (chief, 0), ("worker", 0), ("worker", 1), ("worker", 2)
        places = [four(launchers.launched(worker(*task, **cluster))) for task in tasks]
        assert places == [(0, 4, 0, 2), (1, 4, 0, 2), (2, 4, 1, 2), (3, 4, 1, 2)]
    place = launchers.launched(worker("worker", "1", worker=["[::1]:1", "[::1]:2"]))
    assert (place.rank, place.local_rank) == (1, 1)


def test_a_cluster_by_index():
    """As TensorFlow's ``ClusterSpec`` takes it; one with gaps does not tell how many there are."""
    place = launchers.launched(worker("worker", 1, worker={"1": "b:1", "0": "a:1"}))
    assert four(place) == (1, 2, 0, 1)
    environ = worker("worker", 1, worker={"1": "b:1"})
    assert error_of(launchers.launched, environ) == SPARSE.format(**environ)


def test_the_evaluator_is_no_rank_and_never_the_chief(monkeypatch):
    environ = worker("evaluator", 0, worker=["a:1", "b:1"], evaluator=["c:1"])
    assert launchers.launched(environ) is None
    monkeypatch.setenv("TF_CONFIG", environ["TF_CONFIG"])
    assert (compat.rank(), compat.size(), compat.is_chief()) == (-1, 1, False)
    monkeypatch.setenv("COMPAT_ALONE", "1")
    assert (compat.rank(), compat.is_chief()) == (0, True)


@pytest.mark.parametrize(
    "environ, problem",
    [
        (
            {"TF_CONFIG": "{"},
            "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ({"TF_CONFIG": "[]"}, "'list' object has no attribute 'get'"),
        (
            worker("worker", "one", worker=["a:1", "b:1"]),
            "invalid literal for int() with base 10: 'one'",
        ),
        (worker("worker", 2, worker=["a:1", "b:1"]), "the cluster has no task worker 2"),
        (worker("worker", -1, worker=["a:1", "b:1"]), "the cluster has no task worker -1"),
        (worker("chief", 0, worker=["a:1", "b:1"]), "the cluster has no task chief 0"),
    ],
)
def test_a_tf_config_that_no_rank_can_have_is_an_error(environ, problem):
    assert error_of(launchers.launched, environ) == (
        'TF_CONFIG={} is not understood: {}. Use JSON such as {{"cluster": {{"worker": '
        '["host1:2222", "host2:2222"]}}, "task": {{"type": "worker", "index": 0}}}}, or set '
        "COMPAT_ALONE=1 to train alone.".format(environ["TF_CONFIG"], problem)
    )


# The rendezvous -------------------------------------------------------------------------------


def test_what_the_user_sets_comes_before_what_the_launcher_tells():
    place = launchers.launched(environment(SRUN))
    for given in "MASTER_ADDR=node9 MASTER_PORT=1", "JAX_COORDINATOR_ADDRESS=node9:1":
        assert rendezvous.find_rendezvous(place, environment(SRUN + " " + given)) == ("node9", 1)


def test_ranks_that_nothing_tells_where_to_meet(monkeypatch):
    """As those that mpiexec of MPICH starts."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    place = Place(1, 2, 1, 2, "mpiexec")
    assert error_of(rendezvous.require_rendezvous, place, "torch.distributed") == (
        "This process is rank 1 of 2 (mpiexec), but nothing tells torch.distributed where the "
        "rendezvous is. Set MASTER_ADDR to the host name or address of rank 0's machine and "
        "MASTER_PORT to a free port there, the same for all ranks; or start the script with "
        "compat run -n 2."
    )


def test_ranks_of_one_machine_meet_on_its_loopback_interface():
    step = environment(SRUN, SLURM_PROCID="0", SLURM_NODEID="0", SLURM_STEP_TASKS_PER_NODE="4")
    host, port = rendezvous.find_rendezvous(launchers.launched(step), step)
    assert (host, port) == ("127.0.0.1", port_of("77.1"))
    other = dict(step, SLURM_STEP_ID="2")  # of the same job, at the same time
    assert rendezvous.find_rendezvous(launchers.launched(other), other)[1] != port
    environ = environment(
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=myself MASTER_PORT=29500"
    )
    place = launchers.launched(environ)
    assert rendezvous.find_rendezvous(place, environ) == ("127.0.0.1", 29500)


@pytest.mark.parametrize(
    "variables, address",
    [
        ("JAX_COORDINATOR_ADDRESS=node1", "node1"),
        ("JAX_COORDINATOR_ADDRESS=node1:", "node1:"),
        ("JAX_COORDINATOR_ADDRESS=:29500", ":29500"),
        ("JAX_COORDINATOR_ADDRESS=node1:70000", "node1:70000"),
        ("JAX_COORDINATOR_ADDRESS=node1:http", "node1:http"),
        ("MASTER_ADDR=node1 MASTER_PORT=http", "node1:http"),
    ],
)
def test_an_address_that_is_none_is_an_error(variables, address):
    environ = environment("RANK=0 WORLD_SIZE=2 " + variables)
    names = " and ".join(environment(variables))
    verb = "are" if "MASTER" in names else "is"
    assert error_of(rendezvous.find_rendezvous, launchers.launched(environ), environ) == (
        "{} {} {!r}, which is not a host and a port. Use the host name or address of rank 0's "
        "machine and a free port there, such as node1:29500.".format(names, verb, address)
    )


def test_an_unknown_rendezvous_is_an_error(monkeypatch):
    environ = environment("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    place = launchers.launched(environ)
    assert error_of(rendezvous.require_rendezvous, place, "torch.distributed") == (
        "This process is rank 1 of 2 (mpiexec), but nothing tells torch.distributed where the "
        "rendezvous is. Set MASTER_ADDR to the host name or address of rank 0's machine and "
        "MASTER_PORT to a free port there, the same for all ranks; or start the script with compat "
        "run -n 2."
    )


def listening_at(host, on_one_machine):
    place = Place(0, 2, 0, 2 if on_one_machine else 1, "srun")
    with rendezvous.listen(place, host, 0) as listening:
        return listening.getsockname()[0]


def test_rank_0_listens_where_the_others_are_and_nowhere_else():
    assert listening_at("127.0.0.1", on_one_machine=True) == "127.0.0.1"
    # As Debian's /etc/hosts has the machine's own name: other machines could not come.
    everywhere = listening_at("127.0.1.1", on_one_machine=False)
    assert everywhere in ("::", "0.0.0.0")
    # Another machine's address, such as that of a proxy in front of this one.
    assert listening_at("192.0.2.77", on_one_machine=False) == everywhere


def test_a_port_that_is_taken_is_an_error():
    place = Place(0, 2, 0, 2, "srun")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        told = error_of(rendezvous.listen, place, "127.0.0.1", port)
    assert told == (
        "This process is rank 0 of 2 (srun), and it cannot listen at 127.0.0.1:{}, the rendezvous "
        "of the ranks: Address already in use. Set MASTER_ADDR and MASTER_PORT to another host or "
        "port, the same for all ranks.".format(port)
    )


# The GPU of a rank ----------------------------------------------------------------------------


def choose(environ, gpus):
    """Return the choice of a rank on a machine where it sees a number of GPUs."""
    machine = [device_choice.GPU(index) for index in range(gpus)]
    place = launchers.launched(environ)
    return device_choice.choose_for_rank(
        gpu_selection.parse_gpus(None), environ, place, lambda: machine
    )


@pytest.mark.parametrize("task", ["0", "1"])
def test_a_gpu_that_the_scheduler_bound_is_no_shortage(task):
    """With --gpus-per-task each task sees one GPU, and often it is number 0 for all of them."""
    step = environment(SRUN, SLURM_PROCID=task, SLURM_LOCALID=task, SLURM_NODEID="0")
    bound = dict(step, CUDA_VISIBLE_DEVICES="0", SLURM_STEP_GPUS="4,5")
    devices = choose(bound, 1)
    assert (devices.gpus, devices.shortage) == (("0",), None)
    bound = dict(step, CUDA_VISIBLE_DEVICES="0", SLURM_GPUS_ON_NODE="2")
    assert choose(bound, 1).shortage is None
    assert choose(dict(step, SLURM_GPUS_ON_NODE="1"), 1).shortage  # two tasks share it
    unlisted = device_choice.choose_for_rank(
        gpu_selection.parse_gpus(None), bound, launchers.launched(bound), list
    )
    unlisted.settle(1)  # by a framework, such as on AMD's GPUs without their commands
    assert (unlisted.gpus, unlisted.shortage) == (("0",), None)
    wrapped = dict(JOINED["mpirun (Open MPI)"][0], OMPI_COMM_WORLD_LOCAL_RANK=task)
    assert choose(dict(wrapped, CUDA_VISIBLE_DEVICES=task), 2).shortage is None
    assert choose(dict(wrapped, CUDA_VISIBLE_DEVICES="3"), 4).shortage  # all four share it


# One launcher within another ---------------------------------------------------------------------

#: What starts the processes whose places it tells. Variables of the others are set by hand, or by
#: a cluster for all that runs there.
STARTS_PROCESSES = {
    "compat run", "horovodrun", "torchrun", "deepspeed", "mpirun", "mpiexec", "PALS",
    "mpirun_rsh", "jsrun", "srun",
}  # fmt: skip


@pytest.mark.parametrize("launcher", sorted(JOINED))
def test_ranks_are_not_started_within_ranks(launcher):
    environ, place, name, _ = JOINED[launcher]
    environ = environment(environ)
    is_nested = name in STARTS_PROCESSES
    if name == "torchrun":
        is_nested = launcher == "torchrun"
    elif launcher.startswith("srun --mpi"):
        name = nesting.started_by(environ).launcher  # the PMI's, or SLURM's own
    if not is_nested:
        nesting.refuse(environ, "-n 2")
        return
    rank, size, _, _ = place
    assert error_of(nesting.refuse, environ, "-n 2") == (
        f"-n 2 would start ranks here, but this process is itself rank {rank} of {size} ({name}): "
        f"each of the {size} would start a job of its own, whose rank 0 writes the same files. "
        f"Start the script with one launcher: {name} alone, with python in place of compat run, "
        f"or compat run alone. COMPAT_ALONE=1 starts {size} separate jobs."
    )
    nesting.refuse(dict(environ, COMPAT_ALONE="1"), "-n 2")


def test_what_an_earlier_job_has_left_hides_no_launcher():
    left = environment("RANK=0 WORLD_SIZE=2", TF_CONFIG=JOINED["TF_CONFIG"][0]["TF_CONFIG"])
    assert nesting.started_by(left) is None
    mpirun = environment(JOINED["mpirun (Open MPI)"][0], **left)
    assert nesting.started_by(mpirun).launcher == "mpirun"
    assert nesting.started_by(environment(SRUN, **left)).launcher == "srun"
    # Processes of one rank start ranks, such as a task of SLURM for each machine.
    one = environment("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=1")
    assert nesting.started_by(one) is None


@pytest.mark.parametrize("launcher", sorted(JOINED) + sorted(REFUSED))
def test_a_process_that_is_to_be_alone(launcher):
    environ = environment(dict(JOINED, **REFUSED)[launcher][0], HOME="/home/me")
    alone, left_out = nesting.set_aside(environ)
    assert launchers.launched(alone) is None and tf_config.evaluator_in(alone) is None
    assert alone["HOME"] == "/home/me"
    assert left_out == sorted(set(environ) - set(alone))
    assert nesting.set_aside(alone) == (alone, [])
    # Another job may be started there, and MPI finds nothing of the one around it.
    assert not {"MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE"} & set(alone)


def test_the_environment_of_a_process_that_is_alone_stays():
    environ = environment("RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=1 PROCESS_ID=1")
    assert nesting.set_aside(environ) == (environ, [])
