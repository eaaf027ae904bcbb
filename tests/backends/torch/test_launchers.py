"""Ranks of torch under real launchers, and what these tell a process of any framework."""

import subprocess
import sys

import pytest

from compat.testing import slow

from .. import launchers
from ..launchers import MPICH, PLACE, Launchers, environment, run, slurm  # noqa: F401  # a fixture

PROGRAM = """\
import sys
import numpy as np
import compat

configuration = compat.configure_gpu(gpus="cpu", backend="torch")
import torch

torch.manual_seed(1 + max(compat.rank(), 0))
layers = torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
model = compat.parallelize(torch.nn.Sequential(*layers))
x = np.random.RandomState(0).rand(33, 6).astype("float32")
x, y = map(torch.tensor, compat.shard((x, x.sum(axis=1, keepdims=True)), 10))
sgd, rows = torch.optim.SGD(model.parameters(), 0.1), compat.local_batch_size(10)
for start in range(0, len(x), rows):
    sgd.zero_grad()
    (model(x[start : start + rows]) - y[start : start + rows]).square().mean().backward()
    sgd.step()
weights = np.concatenate([weight.detach().numpy().ravel() for weight in model.parameters()])
np.save("{}/{}-of-{}".format(sys.argv[1], compat.rank(), compat.size()), weights)
sys.stdout.write("{}\\n".format(configuration.place))
"""


def rendezvous():
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launchers.free_port())}


@pytest.mark.row("launchers: srun, mpirun, mpiexec, torchrun, PyTorchJob")
class TestTorchLaunchers(Launchers):
    backend = "torch"
    program = PROGRAM

    @slow  # as JAX's
    def test_torchrun(self, check):
        super().test_torchrun(check)

    def test_srun(self, check, slurm):  # noqa: F811
        check([launchers.BIN + "/srun", "--ntasks=2"], "srun", slurm)

    def test_mpirun(self, check):
        launcher = [launchers.BIN + "/mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
        check(launcher + ["-n", "2"], "mpirun", launchers.OPEN_MPI)

    @slow  # torchrun sets these, too
    def test_pytorchjob(self, check):
        """MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE alone."""
        both = 'RANK=0 "$@" & RANK=1 "$@" && wait $!'
        check(["sh", "-c", both, "sh"], "RANK", dict(rendezvous(), WORLD_SIZE="2"))

    def test_mpiexec_of_mpich(self, check):
        """It tells no rendezvous."""
        check(MPICH, "mpiexec", dict(rendezvous(), LD_LIBRARY_PATH=launchers.LIBRARIES))


# Debian's plugin for pmix looks for its library in /usr alone.
@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_srun_tells_the_place(slurm, mpi):  # noqa: F811
    command = [launchers.BIN + "/srun", "--mpi=" + mpi, "--ntasks=3", sys.executable, "-c", PLACE]
    assert run(command, environment("torch", **slurm)) == ["0 3 0", "1 3 1", "2 3 2"]


def test_a_batch_script_is_alone_and_its_steps_are_not(slurm, tmp_path):  # noqa: F811
    """The shell has SLURM_NTASKS and SLURM_PROCID=0, and runs once."""
    script, out = tmp_path / "job.sh", tmp_path / "out"
    line = '{} -c "{}"\n'.format(sys.executable, PLACE)
    script.write_text("#!/bin/sh\n{}{}/srun {}".format(line, launchers.BIN, line))
    command = ["/sbatch", "--quiet", "--wait", "--ntasks=2", "--output=" + str(out), str(script)]
    command[0] = launchers.BIN + command[0]
    assert run(command, environment("torch", **slurm)) == []
    said = out.read_text().splitlines()
    assert said[0] == "0 1 0" and sorted(said[1:]) == ["0 2 0", "1 2 1"]


# Threads of gloo get the interpreter only where the script waits: as on a busy machine.
GROUP = """\
import sys

sys.setswitchinterval(100)
import torch
import compat

rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", "file://" + sys.argv[2], rank=rank, world_size=2)
print(compat.configure_gpu(gpus="cpu").place)
torch.manual_seed(rank)
model = compat.parallelize(torch.nn.Linear(3, 1))
rows = torch.arange(12.0).reshape(4, 3)[2 * rank : 2 * rank + 2]
model(rows).square().mean().backward()
print(model.weight.tolist(), model.weight.grad.tolist())
torch.distributed.destroy_process_group()
"""
AGAIN = """\
torch.distributed.init_process_group("gloo", "file://" + sys.argv[2] + "2", rank=rank, world_size=2)
"""


@pytest.mark.parametrize(
    "more",
    [pytest.param(each, marks=slow) for each in ("", AGAIN)],
    ids=["destroyed", "made again"],
)
def test_the_process_group_that_a_script_has_made_counts(tmp_path, more):
    """No launcher's variable is set: without the group each process would train alone.

    The end of the process waits for gloo's threads, although the script has destroyed its group.
    """
    command = [sys.executable, "-c", GROUP + more]
    jobs = [
        subprocess.Popen(
            command + [str(rank), str(tmp_path / "store")],
            env=environment("torch"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    texts = [job.communicate(timeout=100) for job in jobs]
    assert not any(b"Traceback" in errors for _, errors in texts), texts
    said = [text.decode().splitlines() for text, _ in texts]
    assert [job.returncode for job in jobs] == [0, 0]
    assert [place for place, _ in said] == [
        "rank {} of 2 (torch.distributed)".format(rank) for rank in (0, 1)
    ]
    assert said[0][1] == said[1][1]
