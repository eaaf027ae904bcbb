"""The job files of docs/launchers.md: they parse, and compat joins the processes that they start.

Each process's environment is the one that its launcher documents, of test_launchers.py, with the
numbers that follow from the file. Runs in tox's environment ``docs``, which has a parser of YAML.
"""

import ast
import json
import os
import re
import subprocess

import pytest
import test_blocks
import yaml
from sources import ROOT
from test_launchers import JOINED, environment, pool

from compat._ranks import launchers, rendezvous

JOBS = os.path.join(ROOT, "docs", "jobs")


def read(name):
    with open(os.path.join(JOBS, name), encoding="utf-8") as file:
        return file.read()


def documented(launcher, **changes):
    """Return a launcher's environment with other values; it has no other variables."""
    environ = JOINED[launcher][0]
    assert set(changes) <= set(environ)
    return dict(environ, **{name: str(value) for name, value in changes.items()})


def on_machines(machines, each):
    """Rank, local rank and machine of each process."""
    return [(m * each + i, i, m) for m in range(machines) for i in range(each)]


def slurm():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", read("slurm.sh"), re.M))
    nodes, each = int(options["nodes"]), int(options["ntasks-per-node"])
    assert options["gpus-per-node"] == options["ntasks-per-node"]
    for rank, local, node in on_machines(nodes, each):
        yield documented(
            "srun",
            SLURM_PROCID=rank,
            SLURM_LOCALID=local,
            SLURM_NODEID=node,
            SLURM_NTASKS=nodes * each,
            SLURM_STEP_NUM_TASKS=nodes * each,
            SLURM_STEP_TASKS_PER_NODE="{}(x{})".format(each, nodes),
            SLURM_STEP_NUM_NODES=nodes,
        )


def pytorchjob():
    specs = yaml.safe_load(read("pytorchjob.yaml"))["spec"]["pytorchReplicaSpecs"]
    assert specs["Master"]["replicas"] == 1
    size = 1 + specs["Worker"]["replicas"]
    for rank in range(size):
        yield documented(
            "Kubeflow PyTorchJob",
            RANK=rank,
            WORLD_SIZE=size,
            PET_NODE_RANK=rank,
            PET_NNODES=size,
            MASTER_ADDR="localhost" if rank == 0 else "train-master-0",
        )


def mpijob():
    spec = yaml.safe_load(read("mpijob.yaml"))["spec"]
    specs, each = spec["mpiReplicaSpecs"], spec["slotsPerWorker"]
    (launcher,) = specs["Launcher"]["template"]["spec"]["containers"]
    (worker,) = specs["Worker"]["template"]["spec"]["containers"]
    machines = specs["Worker"]["replicas"]
    assert launcher["command"][:3] == ["mpirun", "-np", str(machines * each)]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == each
    names = [name for name in JOINED["Kubeflow MPIJob"][0] if name.startswith("OMPI_COMM_WORLD_")]
    for rank, local, _ in on_machines(machines, each):
        values = {"RANK": rank, "SIZE": machines * each, "LOCAL_RANK": local, "LOCAL_SIZE": each}
        changes = {name: values[name[len("OMPI_COMM_WORLD_") :]] for name in names}
        environ = documented("Kubeflow MPIJob", **changes)
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # not in this file
            del environ[name]
        yield environ


def vertex():
    counts = [p["replicaCount"] for p in yaml.safe_load(read("vertex.yaml"))["workerPoolSpecs"]]
    assert counts[0] == 1 and len(counts) == 2
    hosts = ["cmle-{}".format(number) for number in range(sum(counts))]
    yield pool("workerpool0", 0, *hosts)
    for number in range(counts[1]):
        yield pool("workerpool1", number, *hosts)


def arguments(name, function):
    """Return the arguments of a call in a Python file that are literals."""
    for node in ast.walk(ast.parse(read(name))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == function:
            return {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    raise LookupError(function)


def sagemaker():
    asked = arguments("sagemaker_job.py", "PyTorch")
    assert asked["distribution"] == {"torch_distributed": {"enabled": True}}
    machines, each = asked["instance_count"], {"ml.g5.12xlarge": 4}[asked["instance_type"]]
    hosts = ["algo-{}".format(number + 1) for number in range(machines)]
    for rank, local, machine in on_machines(machines, each):
        yield documented(
            "SageMaker torch_distributed",
            RANK=rank,
            WORLD_SIZE=machines * each,
            LOCAL_RANK=local,
            LOCAL_WORLD_SIZE=each,
            SM_CURRENT_HOST=hosts[machine],
            SM_HOSTS=json.dumps(hosts),
            SM_NUM_GPUS=each,
        )


def ray():
    size = arguments("ray_job.py", "ScalingConfig")["num_workers"]
    for rank in range(size):  # on machines with one GPU each
        yield documented(
            "Ray TorchTrainer",
            RANK=rank,
            WORLD_SIZE=size,
            LOCAL_RANK=0,
            LOCAL_WORLD_SIZE=1,
            NODE_RANK=rank,
        )


def hosts():
    """Those of slurm-hosts.sh, by its own commands; ``compat run`` starts these ranks."""
    text = read("slurm-hosts.sh")
    command = re.search(r"^hosts=\$\((.*)\)$", text, re.M).group(1)
    listed = command.replace('scontrol show hostnames "$SLURM_JOB_NODELIST"', "printf 'a\\nb\\n'")
    given = subprocess.check_output(["bash", "-c", listed]).decode().strip()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    each = int(options["gpus-per-node"])
    assert given == "a:{0},b:{0}".format(each) and options["nodes"] == "2"
    for rank, local, _ in on_machines(2, each):
        values = "COMPAT_RANK={} COMPAT_SIZE={} COMPAT_LOCAL_RANK={} COMPAT_LOCAL_SIZE={}"
        yield environment(values.format(rank, 2 * each, local, each))


FILES = {
    "mpijob.yaml": (mpijob, 4, 2, False),
    "pytorchjob.yaml": (pytorchjob, 4, 1, True),
    "ray_job.py": (ray, 4, 1, True),
    "sagemaker_job.py": (sagemaker, 8, 4, True),
    "slurm-hosts.sh": (hosts, 8, 4, False),
    "slurm.sh": (slurm, 8, 4, True),
    "vertex.yaml": (vertex, 4, 1, True),
}


def test_every_job_is_here_and_on_the_page():
    assert sorted(os.listdir(JOBS)) == sorted(FILES)
    page = read(os.path.join("..", "launchers.md"))
    assert sorted(re.findall(r"^\[(jobs/(\S+))\]\(\1\)$", page, re.M)) == sorted(
        ("jobs/" + name, name) for name in FILES
    )


@pytest.mark.parametrize("name", sorted(FILES))
def test_processes_are_joined(name):
    environments, size, local_size, meets = FILES[name]
    environments = list(environments())
    places = [launchers.launched(environ) for environ in environments]
    assert [place.rank for place in places] == list(range(size))
    assert {place.size for place in places} == {size}
    assert {place.local_size for place in places} == {local_size}
    assert [place.local_rank for place in places] == [r % local_size for r in range(size)]
    if meets:  # the last rank knows where; the first may know itself by another name
        assert rendezvous.find_rendezvous(places[-1], environments[-1]) is not None


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_parse(name):
    text = read(name)
    if name.endswith(".sh"):
        test_blocks.check_shell(text)
    elif name.endswith(".py"):
        test_blocks.check_python(text)
    else:
        assert yaml.safe_load(text)
