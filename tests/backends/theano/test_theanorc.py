"""A .theanorc that compat writes: what else is in it stays, whatever happens meanwhile."""

import configparser
import fcntl
import os
import stat
import subprocess
import sys

import pytest

import compat
from compat._backends.theano import theanorc
from compat._backends.theano.flags import Flags

from .. import messages
from . import test_contract

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

theano_process = test_contract.theano_process

OLD = """\
# mine
[blas]
ldflags = -lopenblas  -lm

[global]
floatX: float64  ; never changed
device = gpu0
    # the old name
"""


NEW = """\
# mine
[blas]
ldflags = -lopenblas  -lm

[global]
floatX = float32
device = cuda1
    # the old name

[gpuarray]
preallocate = 0.5
"""


FLAGS = {"floatX": "float32", "device": "cuda1", "gpuarray.preallocate": "0.5"}


@pytest.fixture
def rc(tmp_path):
    path = tmp_path / ".theanorc"
    path.write_text(OLD)
    return path


def refusal(function, *arguments):
    return messages.refusal(compat.ConfigurationFileError, function, *arguments)


def names(path):
    return sorted(other.name for other in path.parent.iterdir())


def test_write_merges_into_what_the_user_has(rc):
    backup = theanorc.write(str(rc), FLAGS)
    assert rc.read_text() == NEW
    assert backup == str(rc) + ".before-compat"
    with open(backup) as file:
        assert file.read() == OLD
    assert names(rc) == [".theanorc", ".theanorc.before-compat"]


def test_write_does_nothing_where_all_is_said(rc):
    rc.write_text(NEW)
    before = rc.stat()
    assert theanorc.write(str(rc), FLAGS) == str(rc)
    after = rc.stat()
    for kept in ("st_ino", "st_mtime_ns", "st_ctime_ns"):  # reading it sets the time of access
        assert getattr(after, kept) == getattr(before, kept)
    assert names(rc) == [".theanorc"]


def test_write_makes_a_file_where_there_is_none(tmp_path):
    path = tmp_path / "new.rc"
    umask = os.umask(0o027)
    try:
        assert theanorc.write(str(path), {"device": "cpu", "dnn.conv.algo_fwd": "fft"}) is None
    finally:
        os.umask(umask)
    assert path.read_text() == "[global]\ndevice = cpu\n\n[dnn.conv]\nalgo_fwd = fft\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert names(path) == ["new.rc"]


def test_write_keeps_rights_owner_and_links(rc, tmp_path):
    (tmp_path / "dotfiles").mkdir()
    target = tmp_path / "dotfiles" / "theanorc"
    rc.rename(target)
    rc.symlink_to(target)
    target.chmod(0o604)
    if os.geteuid() == 0:
        os.chown(str(target), 1234, 2345)
    before = target.stat()
    backup = theanorc.write(str(rc), FLAGS)
    assert rc.is_symlink() and target.read_text() == NEW
    for path in (str(target), backup):
        after = os.stat(path)
        assert (after.st_mode, after.st_uid, after.st_gid) == (
            before.st_mode, before.st_uid, before.st_gid
        )  # fmt: skip


@pytest.mark.parametrize(
    "text, problem",
    [
        ("floatX = float32\n", "File contains no section headers. file: '{}', line: 1 "),
        ("[global]\nfloatX float32\n", "Source contains parsing errors: '{}' \t[line  2]: "),
        ("[a]\n[a]\n", "While reading from '{}' [line  2]: section 'a' already exists"),
    ],
)
def test_write_refuses_what_theano_cannot_read(rc, text, problem):
    rc.write_text(text)
    told = refusal(theanorc.write, str(rc), FLAGS)
    assert told.startswith("{} cannot be read: {}".format(rc, problem.format(rc)))
    assert told.endswith(
        ". Theano cannot be imported with it. Fix the file: each option stands once, as "
        "`name = value`, under a section such as [global]."
    )
    assert rc.read_text() == text
    assert names(rc) == [".theanorc"]


def test_write_says_why_it_cannot(tmp_path):
    path = tmp_path / "missing" / "rc"
    assert refusal(theanorc.write, str(path), FLAGS) == (
        "{} could not be written: [Errno 2] No such file or directory: '{}.lock'. The file is as "
        "it was before.".format(path, path)
    )


def test_which_file_is_written(tmp_path):
    home = {"HOME": str(tmp_path)}
    write = theanorc.file_to_write
    assert write(home) == str(tmp_path / ".theanorc")
    assert write(dict(home, THEANORC="/a:~/b:")) == str(tmp_path / "b")
    assert refusal(write, dict(home, THEANORC="")) == (
        "persist=True has no file to write: THEANORC is set and names none. Unset it, for "
        "~/.theanorc, or name a file."
    )


TRAPS = {
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "link": lambda path: os.symlink(os.path.join(os.path.dirname(path), "treasure"), path),
    "dangling link": lambda path: os.symlink(os.path.join(os.path.dirname(path), "no"), path),
}


@pytest.mark.parametrize("trap", sorted(TRAPS))
@pytest.mark.parametrize("ending", [".before-compat", ".lock"])
def test_a_backup_or_a_lock_that_is_no_file_is_an_error(rc, tmp_path, trap, ending):
    (tmp_path / "treasure").write_text("mine")
    path = str(rc) + ending
    TRAPS[trap](path)
    before = os.lstat(path)
    told = refusal(theanorc.write, str(rc), FLAGS)
    assert told.startswith("{} could not be written: [Errno ".format(rc))
    assert told.endswith("'{}'. The file is as it was before.".format(path))
    assert rc.read_text() == OLD and os.lstat(path) == before
    assert (tmp_path / "treasure").read_text() == "mine" and not (tmp_path / "no").exists()


def test_a_lock_that_another_process_keeps_is_not_waited_for_for_ever(rc, monkeypatch):
    monkeypatch.setattr(theanorc, "_LOCK_TIMEOUT", 0.1)
    lock = str(rc) + ".lock"
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        told = refusal(theanorc.write, str(rc), FLAGS)
    assert told == (
        "{0} could not be written: [Errno 16] Another process has held it for 0.1 seconds: "
        "'{0}.lock'. The file is as it was before.".format(rc)
    )
    assert rc.read_text() == OLD


@pytest.mark.parametrize("trap", ["FIFO", "folder"])
def test_a_link_to_what_is_no_file_stays(rc, tmp_path, trap):
    rc.unlink()
    target = tmp_path / "target"
    TRAPS[trap](str(target))
    rc.symlink_to(target)
    assert "could not be written" in refusal(theanorc.write, str(rc), FLAGS)
    assert rc.is_symlink() and not target.is_file()


def test_a_link_to_a_file_that_is_not_there_yet(rc, tmp_path):
    rc.unlink()
    (tmp_path / "dotfiles").mkdir()
    rc.symlink_to(os.path.join("dotfiles", "theanorc"))
    assert theanorc.write(str(rc), {"device": "cpu"}) is None
    assert rc.is_symlink()
    assert (tmp_path / "dotfiles" / "theanorc").read_text() == "[global]\ndevice = cpu\n"


DEFAULTS = "[DEFAULT]\nfloatX = float64\nmode = FAST_COMPILE\n"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_defaults_do_not_begin_to_hold_in_a_new_section(rc, tmp_path, elsewhere):
    """Of sections that are not there Theano takes nothing of [DEFAULT], which then would appear."""
    own = "" if elsewhere else DEFAULTS
    rc.write_text(own)
    first = tmp_path / "first"
    first.write_text(DEFAULTS if elsewhere else "")
    before = [str(first)]
    environ = {"THEANORC": os.pathsep.join(before + [str(rc)])}
    assert Flags(environ).get("mode") is None
    assert refusal(theanorc.write, str(rc), {"floatX": "float32"}, before) == (
        "persist=True has written nothing: it needs a section [global], and what a section "
        "[DEFAULT] says of floatx and mode would then hold there, where it does not yet. Move that "
        "from [DEFAULT] into the sections that it is for, or add the line [global] yourself."
    )
    assert rc.read_text() == own and names(rc) == sorted([".theanorc", "first"])
    rc.write_text(own + "[global]\n")
    theanorc.write(str(rc), {"floatX": "float32"}, before)
    flags = Flags(environ)
    assert (flags.get("floatX"), flags.get("mode")) == ("float32", "FAST_COMPILE")
    assert own in rc.read_text()


# Kills a child before each call of a function written in C that may ask the system for something:
# nothing else changes a file. Prints how many there were.
KILL = """
import os, sys
from compat._backends.theano import theanorc
path, flags, new = sys.argv[1], eval(sys.argv[2]), sys.argv[3]
real = os.path.realpath(path)

def content(path):
    return open(path).read() if os.path.exists(path) else None

def is_system_call(function):
    module = getattr(function, "__module__", None)
    return (module or type(function.__self__).__module__) in ("posix", "_io", "io", "fcntl")

def killed(at):
    child = os.fork()
    if child == 0:
        seen = [0]
        def count(frame, event, argument):
            if event == "c_call" and is_system_call(argument):
                seen[0] += 1
                if seen[0] == at:
                    os._exit(1)
        sys.setprofile(count)
        theanorc.write(path, flags)
        sys.setprofile(None)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0

at, old, found = 1, content(path), set()
while killed(at):
    after, backup = content(path), content(real + ".before-compat")
    assert after in (old, new), (at, after)
    assert backup in (None, old), (at, backup)
    assert os.path.realpath(path) == real
    found.add(after)
    theanorc.write(path, flags)  # what it left stops nobody
    assert content(path) == new
    for name in os.listdir(os.path.dirname(real)):
        if name.startswith(os.path.basename(real) + "."):
            os.unlink(os.path.join(os.path.dirname(real), name))
    with open(path, "w") as file:
        file.write(old)
    at += 1
assert content(path) == new and found == {old, new}
print(at - 1)
"""


def test_a_crash_leaves_the_old_file_or_the_new_one(rc, tmp_path):
    (tmp_path / "dotfiles").mkdir()
    rc.rename(tmp_path / "dotfiles" / "theanorc")
    rc.symlink_to(tmp_path / "dotfiles" / "theanorc")
    command = [sys.executable, "-c", KILL, str(rc), repr(FLAGS), NEW]
    output = subprocess.check_output(command, env=dict(os.environ, PYTHONPATH=ROOT))
    assert int(output) > 50


@pytest.mark.parametrize("at, left", [(1, []), (2, [".theanorc.before-compat"])])
def test_a_full_disk_leaves_the_old_file(rc, monkeypatch, at, left):
    """While the backup is written, or the file."""
    fsync, synchronized = os.fsync, []

    def fails(descriptor):
        synchronized.append(descriptor)
        if len(synchronized) == at:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    assert refusal(theanorc.write, str(rc), FLAGS) == (
        "{} could not be written: [Errno 28] No space left on device. The file is as it was "
        "before.".format(rc)
    )
    assert rc.read_text() == OLD and names(rc) == [".theanorc"] + left


WRITE_MANY = """
import sys
from compat._backends.theano import theanorc
path, name = sys.argv[1:]
for number in range(8):
    theanorc.write(path, {"%s.o%d" % (name, number): str(number), "last": name})
"""


def test_processes_that_write_at_once_lose_nothing(rc):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE_MANY, str(rc), name], env=dict(os.environ, PYTHONPATH=ROOT)
        )
        for name in "abc"
    ]
    while any(writer.poll() is None for writer in writers):
        parser = configparser.ConfigParser()
        parser.read(str(rc))  # a reader never sees half a file
        assert parser.get("blas", "ldflags") == "-lopenblas  -lm"
    assert [writer.returncode for writer in writers] == [0] * 3
    parser = configparser.ConfigParser()
    parser.read(str(rc))
    for name in "abc":
        assert parser.items(name) == [("o%d" % n, str(n)) for n in range(8)]
    assert names(rc) == [".theanorc", ".theanorc.before-compat"]


def test_persist_writes_the_file_that_wins_and_theano_reads_it(theano_process, tmp_path):
    first, last = tmp_path / "first.rc", tmp_path / "last.rc"
    first.write_text("[global]\nfloatX = float32\ncontexts = a->cuda0\n")
    last.write_text("# mine\n[dnn]\nenabled = False  \n")
    last.chmod(0o600)
    shown = theano_process(
        """
        import compat
        options = {"theano_flags": {"gcc.cxxflags": "-DA=50%"}}
        show(applied=compat.configure_gpu(
            gpus=0, floatx="float64", persist=True, **options).applied)
        """,
        flags="contexts=,cxx=",
        THEANORC="{}:{}".format(first, last),
    )
    assert first.read_text() == "[global]\nfloatX = float32\ncontexts = a->cuda0\n"
    assert last.read_text() == (
        "# mine\n[dnn]\nenabled = False  \n\n[global]\ndevice = cpu\ncontexts = \n"
        "floatX = float64\n\n[gcc]\ncxxflags = -DA=50%%\n"
    )
    assert stat.S_IMODE(last.stat().st_mode) == 0o600
    assert shown["applied"][3:] == [
        "{} is read, too".format(first),
        "{} is read, too".format(last),
        "{} written, as it was: {}.before-compat".format(last, last),
        "keras.backend.set_floatx('float64')",
    ]
    shown = theano_process(
        """
        from theano import config
        show(
            config=[config.device, config.contexts, config.floatX, config.gcc.cxxflags],
            dnn=config.dnn.enabled,
        )
        """,
        THEANORC="{}:{}".format(first, last),
    )
    assert shown == {"config": ["cpu", "", "float64", "-DA=50%"], "dnn": "False"}
