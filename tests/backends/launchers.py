"""Real launchers, whatever the framework: SLURM's srun, Open MPI's and MPICH's mpirun, torchrun.

Debian's packages lie in a folder of the tox environment (tests/debian.py), so each needs to be
told where its own parts are. SLURM is a controller and a node on this machine.
"""

import contextlib
import getpass
import os
import socket
import subprocess
import sys
import time

import pytest

FOLDER = os.path.join(sys.prefix, "debian")
BIN = os.path.join(FOLDER, "usr", "bin")
LIBRARIES = os.path.join(FOLDER, "libraries")

PLACE = "import compat; print('{} {} {}'.format(compat.rank(), compat.size(), compat.local_rank()))"


_reserved = []


def free_port():
    """Return a port that is free until a server listens there: see ``starter._reserved_ports``."""
    _reserved.append(socket.socket())
    _reserved[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved[-1].bind(("", 0))
    return _reserved[-1].getsockname()[1]


def environment(backend, **variables):
    environ = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    return dict(environ, KERAS_BACKEND=backend, COMPAT_TIMEOUT="100", **variables)


# SLURM ----------------------------------------------------------------------------------------

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node.log
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Return an environment in which SLURM's commands find a cluster of this machine alone."""
    folder = str(tmp_path_factory.mktemp("slurm"))
    plugins = os.path.join(LIBRARIES, "slurm-wlm")
    configuration = os.path.join(folder, "slurm.conf")
    with open(configuration, "w") as file:
        file.write(
            CONFIGURATION.format(
                host=socket.gethostname().split(".")[0],
                ports=[free_port(), free_port()],
                user=getpass.getuser(),
                plugins=plugins,
                folder=folder,
            )
        )
    found = {
        "SLURM_CONF": configuration,
        "LD_LIBRARY_PATH": LIBRARIES + ":" + plugins,
    }
    environ = dict(os.environ, **found)
    programs = os.path.join(FOLDER, "usr", "sbin")
    with contextlib.ExitStack() as stack:
        for command in (
            [os.path.join(programs, "slurmctld-wlm"), "-D"],
            [os.path.join(programs, "slurmd-wlm"), "-D"]
            + ["-d", os.path.join(programs, "slurmstepd-wlm")],
        ):
            daemon = subprocess.Popen(
                command + ["-f", configuration],
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
        state = [os.path.join(BIN, "sinfo"), "--noheader", "--format=%T"]
        until = time.monotonic() + 60
        while subprocess.run(state, env=environ, stdout=subprocess.PIPE).stdout != b"idle\n":
            assert time.monotonic() < until, open(os.path.join(folder, "node.log")).read()
            time.sleep(0.2)
        yield found


# Running --------------------------------------------------------------------------------------


def run(command, environ, timeout=300):
    """Return a launcher's standard output, by line and in order; a failure shows all."""
    job = subprocess.run(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=timeout,
    )
    out, err = job.stdout.decode(), job.stderr.decode()
    assert job.returncode == 0, out + err
    return sorted(line for line in out.splitlines() if line.strip())


class Launchers:
    """Two ranks of a backend under launchers. Subclasses name the backend and have a program.

    Each rank says which it is, and saves its weights in the end. It began with other ones. What a
    launcher tells is read alike for all backends; torchrun also has a store of torch's own.
    """

    backend = ""
    program = ""

    alone = None  # the weights of one process, once they are known

    @pytest.fixture
    def script(self, tmp_path):
        path = tmp_path / "train.py"
        path.write_text(self.program)
        return path

    @pytest.fixture
    def one_process(self, script):
        kind = type(self)
        if kind.alone is None:
            command = [sys.executable, str(script), str(script.parent)]
            assert run(command, environment(self.backend)) == ["None"]
            kind.alone = self.weights(script.parent, 0, 1)
        return kind.alone

    @pytest.fixture
    def check(self, script, one_process, tmp_path):
        """Run two ranks with a launcher's command in front, and compare them."""

        def check(launcher, name, variables=()):
            command = list(launcher) + [sys.executable, str(script), str(tmp_path)]
            said = run(command, environment(self.backend, **dict(variables)))
            said = [line for line in said if line.startswith("rank ")]  # gloo prints, too
            assert said == ["rank {} of 2 ({})".format(rank, name) for rank in (0, 1)]
            self.compare(tmp_path, one_process)

        return check

    def compare(self, folder, one_process):
        import numpy as np

        first, second = (self.weights(folder, rank, 2) for rank in (0, 1))
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, one_process, rtol=1e-5, atol=1e-6)

    def weights(self, folder, rank, size):
        import numpy as np

        return np.load(str(folder / "{}-of-{}.npy".format(rank, size)))

    def test_torchrun(self, check):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        check(launcher + ["--nproc-per-node=2"], "torchrun")


OPEN_MPI = {
    "OPAL_PREFIX": os.path.join(FOLDER, "usr"),
    "LD_LIBRARY_PATH": LIBRARIES,
    "PATH": BIN + os.pathsep + os.environ["PATH"],
    "OMPI_MCA_mca_base_component_show_load_errors": "0",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "PMIX_MCA_pcompress_base_silence_warning": "1",
}
MPICH = [os.path.join(BIN, "mpiexec.hydra"), "-launcher", "fork", "-n", "2"]
