"""``compat run --hosts``: ranks on two machines, which are network namespaces of this one."""

import os
import re
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT, refusal
from outcomes import ended
from test_main import refused
from test_run import prepared

from compat import _ranks, errors
from compat._commands import machines
from compat._ranks.launch import rank_process, starter, watching
from compat._runtime import by_path


def test_all_ranks_on_this_machine():
    """Other machines: tests/test_grammars.py."""
    assert _ranks.parse_hosts("localhost:2") == [("localhost", 2)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,,b",
        ":2",
        "a:0",
        "a:x",
        "a:-1",
        "a,a:2",
        "a:2,ann@a:2",
        "localhost,b",
        "b,127.0.0.1:2",
    ],
)
def test_hosts_that_cannot_be_meant(text):
    assert refusal(errors.InvalidArgumentError, _ranks.parse_hosts, text) == (
        "--hosts {} is not understood. Use machines, by the names that all of them know, and how "
        "many ranks each is to run: --hosts first:4,second:4.".format(text)
    )


@pytest.mark.parametrize(
    "name",
    ["-oProxyCommand=touch x", "-v", "ann@-v", "-l@b", "b;id", "b id", "$(id)", "`id`", "b|c", "b&"]
    + ["b>x", "~", "*", "'b'", "b\\c", "b\nc", "../b", "@b", "ann@", "a@b@c", "b%c", "\0", "a=b"]
    + ["::1", "[::1]:2", "fe80::1", "b:2:3"],
)
def test_names_that_ssh_or_a_shell_would_take_for_something_else(name):
    for text in (name, "a:2," + name):
        host = text.rpartition(",")[2].strip()
        problem = " is not the name of a machine"
        if host.count(":") > 1:
            problem = " looks like an IPv6 address, and launchers take none"
        assert refusal(errors.InvalidArgumentError, _ranks.parse_hosts, text) == (
            "--hosts {}: {!r}{}. Use a name of letters, digits, '.', '-' and '_' that does not "
            "begin with '-', or an IPv4 address; user@name logs in as another user.".format(
                text, host, problem
            )
        )


def test_a_host_is_no_option_of_ssh():
    """Whatever it is: the second defence."""
    ssh = starter._agent("-oProxyCommand=touch x")
    assert ssh[-3:-1] == ["--", "-oProxyCommand=touch x"]


def test_no_variable_is_on_the_command_line_of_ssh(monkeypatch):
    """Where all users of both machines can read it."""
    monkeypatch.setenv("PYTHONPATH", "/secret")
    monkeypatch.setenv("TOKEN", "secret")
    assert "secret" not in " ".join(starter._agent("gamma"))


def test_ranks_meet_at_a_machine_not_at_its_user():
    first, _ = starter._places([("ann@first", 1), ("second", 1)], [5000], False)
    assert first[0]["COMPAT_RENDEZVOUS"] == "first:5000"


def test_launchers_that_take_no_users():
    from compat._ranks.engines import horovod, mpi

    job = _ranks.Job(2, "another python", {}, "a,ann@b")
    text = (
        "--hosts a,ann@b: {} takes no user@ in front of a machine. Name the user in ~/.ssh/config, "
        "as User under the machine's Host."
    )
    assert refusal(errors.InvalidArgumentError, mpi.launcher, job) == text.format("mpirun")
    told = refusal(errors.InvalidArgumentError, horovod.launcher, job, "mxnet")
    assert told == text.format("horovodrun")


def test_gpus_are_chosen_on_each_machine(toy):
    environ = {"CUDA_VISIBLE_DEVICES": "3"}
    for gpus in (None, "0,1", "cpu"):
        _, _, started, lines = prepared(gpus, "toy", None, environ, 2, "a,b")
        assert started["CUDA_VISIBLE_DEVICES"] == "3"
        assert started.get("COMPAT_GPUS") == gpus
        assert lines[0] == "toy (--backend toy was asked for), on a,b"
    with pytest.raises(errors.InvalidArgumentError, match="idle GPUs cannot be found on other"):
        prepared("free:2", "toy", None, environ, 2, "a,b")


def test_a_rank_sees_the_gpus_that_were_asked_for_on_its_machine():
    assert rank_process._gpus({}) == {}
    assert rank_process._gpus({"COMPAT_GPUS": "cpu"}) == {"CUDA_VISIBLE_DEVICES": "-1"}


def test_a_login_s_own_variables_stay_on_its_machine():
    exported = {"PATH": "/bin", "THEANO_FLAGS": ""}
    own = {"HOME": "/h", "SSH_TTY": "t", "BASH_FUNC_f%%": ""}
    assert starter.exported(dict(own, **exported)) == exported


# Two machines ---------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path):
    """Start a program as ranks on ``node1`` and ``node2``."""
    started = []
    here = tmp_path / "here"
    here.mkdir()
    (here / "compat.py").write_text("raise SystemExit(0)")  # which nothing of compat's may import

    def job(program, where="node1:1,node2:2", options=""):
        script = tmp_path / "script.py"
        begin = "import os, socket, sys, time, compat\nrank = compat.rank()\n"
        script.write_text(begin + textwrap.dedent(program))
        size = sum(slots for _, slots in _ranks.parse_hosts(where))
        command = by_path.command("_ranks.launch.starter") + [where]
        command += by_path.command("_ranks.launch.rank_process")
        command += [sys.executable, str(script), "it's"]
        launch = (
            "import os, sys\ndel sys.path[0]\nfrom compat._ranks.launch import output, watching\n"
            "sys.exit(watching.launch({!r}, dict(os.environ), {}, True, {})[0])".format(
                command, size, options
            )
        )
        process = subprocess.Popen(
            machines.command(2, sys.executable, "-c", launch),
            env=dict(os.environ, PYTHONPATH=ROOT, COMPAT_TEST_SAID="what is set"),
            cwd=str(here),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
        )
        started.append(process)
        return process

    yield job
    for process in started:
        process.kill()
        process.wait()


def finished(process):
    """Return the exit status, the lines printed, and standard error, survivors included."""
    # Less than compat run gives the launcher to end the others, which it has to do by itself.
    out, err = process.communicate(timeout=watching.GRACE - 1)
    return process.returncode, sorted(out.splitlines()), err


def test_each_machine_runs_its_ranks(job):
    status, out, err = finished(
        job(
            """
            place = compat.local_rank(), compat.size(), os.environ["COMPAT_LOCAL_SIZE"]
            said = os.environ["COMPAT_TEST_SAID"], os.path.basename(os.getcwd()), sys.argv[1]
            print(socket.gethostname(), *(place + said))
            """,
            "node1:1,ann@node2:2",
        )
    )
    assert (status, err) == (0, "")
    said = "what is set {} it's".format(out[0].split()[-2])
    places = "[0] node1 0 3 1 ", "[1] node2 0 3 2 ", "[2] node2 1 3 2 "
    assert out == [place + said for place in places]


def test_ranks_meet_where_all_machines_can_reach_it(job):
    status, out, _ = finished(
        job(
            """
            host, port = os.environ["COMPAT_RENDEZVOUS"].split(":")
            if rank == 0:
                with socket.socket() as server:
                    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    server.bind((host, int(port)))
                    server.listen(2)
                    print(sorted(server.accept()[0].recv(4).decode() for _ in range(2)))
            else:
                for _ in range(50):
                    try:
                        socket.create_connection((host, int(port))).sendall(b"%d" % rank)
                        break
                    except ConnectionRefusedError:
                        time.sleep(0.1)
            """
        )
    )
    assert (status, out) == (0, ["[0] ['1', '2']"])


def test_one_that_fails_ends_all_on_both_machines(job):
    """``compat.testing.ranks`` has one that fails on the other machine."""
    status, _, err = finished(job("raise ValueError('no') if rank == 0 else time.sleep(60)"))
    assert status == 1
    assert "compat run: rank 0 of 3 failed with exit status 1" in err
    assert err.endswith("ValueError: no\n")


def test_a_job_of_two_machines_is_started_again_and_logged_on_the_first(job, tmp_path):
    logs = tmp_path / "logs"
    options = "quiet=True, max_restarts=1, logs=output.Logs({!r}, 3, ['x.py'])".format(str(logs))
    status, out, err = finished(
        job(
            """
            print("restart", os.environ["COMPAT_RESTART"], "on", socket.gethostname())
            if os.environ["COMPAT_RESTART"] == "0":
                os.kill(os.getpid(), 9) if rank == 2 else time.sleep(60)
            """,
            options=options,
        )
    )
    assert status == 0
    assert out == ["[0] restart 0 on node1", "[0] restart 1 on node1"][-len(out) :]
    assert err == (
        "compat run: rank 2 of 3 was killed by signal 9; the others were ended.\n"
        "compat run: the last lines that rank 2 printed to standard output:\n"
        "[2] restart 0 on node2\n"
        "compat run: restart 1 of 1, because rank 2 of 3 was killed by signal 9.\n"
    )
    for rank, host in enumerate(["node1", "node2", "node2"]):
        lines = (logs / "rank-{}.log".format(rank)).read_text().splitlines()
        headers = [line.rpartition(", ")[2] for line in lines if "====" in line]
        assert headers == ["restart 0: x.py", "restart 1: x.py"]
        assert lines[-1] == "restart 1 on " + host


def test_a_machine_that_cannot_be_reached_is_heard(job):
    status, out, err = finished(job("time.sleep(60)", "node1:1,gamma:1"))
    assert (status, out) == (255, [])
    # Rank 0 may have started by then, and report its end.
    assert re.match(
        "ssh: connect to host gamma port 22: No route to host\n"
        "compat run: the launcher ended with exit status 255; nothing was heard of the end of "
        "(ranks 0 and 1|rank 1)\\.\n\\Z",
        err,
    )


def test_no_rank_survives_the_one_who_started_all(job):
    status, out, err = finished(
        job(
            """
            if rank == 0:
                print("told")
                starter = os.getppid()  # rank_process; above it the machine's process, then this
                for _ in range(2):
                    with open("/proc/{}/stat".format(starter)) as file:
                        starter = int(file.read().rpartition(")")[2].split()[1])
                os.kill(starter, 9)
            time.sleep(60)
            """
        )
    )
    assert (status, out) == (1, ["[0] told"])
    assert "the launcher ended with exit status -9" in err


@pytest.mark.parametrize("number", ["two", "1", "250"])
def test_wrong_numbers_of_machines_are_told_the_right_ones(number):
    message = "argument N: {!r} is not a number of machines, 2 to 249\n".format(number)
    assert refused("machines", number, "true").endswith(message)


@pytest.mark.parametrize("arguments", [[], ["2"]])
def test_machines_without_a_command_are_told_that_it_is_missing(arguments):
    err = refused("machines", *arguments)
    assert err.startswith("usage: compat machines N command [its arguments]\n")
    assert re.search("error: the following arguments are required: .*command", err)


def test_missing_programs_are_told(monkeypatch, tmp_path):
    for name in ("unshare", "mount", "nsenter"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    message = "^compat machines needs ip, which PATH has not. Try: apt-get install .*iproute2$"
    with pytest.raises(SystemExit, match=message):
        machines.main(["2", "true"])


def test_processes_of_two_commands_have_different_numbers():
    """Both share the disk, and Open MPI's files there have a process in their names."""
    program = machines.command(2, sys.executable, "-c", "import os; print(os.getpid())")
    commands = [subprocess.Popen(program, stdout=subprocess.PIPE) for _ in range(2)]
    assert len({command.communicate()[0] for command in commands}) == 2


def test_survivors_are_told():
    program = "import subprocess; subprocess.Popen(['sleep', '60'])"
    status, _, err = ended(machines.command(2, sys.executable, "-c", program))
    assert (status, err) == (1, "compat machines: left running: sleep 60\n")
