"""Theano's flags: what compat reads and writes is what Theano itself then reports."""

import collections
import configparser
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys

import pytest

import compat
from compat._backends.theano import flags as theano_flags
from compat._backends.theano import theanorc
from compat._configuration import registry
from compat._configuration.device_choice import Devices
from compat._configuration.settings import Memory, Settings
from compat.testing import slow

from .. import messages

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

# Reads claims (an environment, and what compat says of each flag in it) and prints for each what
# Theano reports otherwise. With "fresh" Theano's own modules are executed anew for each; with
# "import" Theano is imported in a process each, which has numpy and scipy from this one.
PROBE = """
import importlib, json, logging, multiprocessing, os, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
how, path = sys.argv[1:]
claims = json.load(open(path, encoding="utf-8"))

def fresh(environ):
    os.environ.clear()
    os.environ.update(environ, PATH="")  # no compiler, which Theano would call each time
    for name in ("configparser", "configdefaults"):
        sys.modules.pop("theano." + name, None)
    parser = importlib.import_module("theano.configparser")
    theano.config = parser.config  # where configdefaults looks for what it has defined
    importlib.import_module("theano.configdefaults")
    return parser._config_var_list

def imported(environ):
    os.environ.clear()
    os.environ.update(environ)
    return importlib.import_module("theano").configparser._config_var_list

def otherwise(parameters, said):
    parameters = {p.fullname: p for p in parameters}
    for name, text in said.items():
        parameter = parameters[name]
        if text is None:
            if not parameter.is_default:
                yield "%s is %r, not the default" % (name, parameter.val)
        elif parameter.is_default:
            yield "%s is the default, not %r" % (name, text)
        elif parameter.val != parameter.filter(text):
            yield "%s is %r, not %r" % (name, parameter.val, text)

def answer(claim):
    environ, said = claim
    try:
        parameters = fresh(environ) if how == "fresh" else imported(environ)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return list(otherwise(parameters, said))

if how == "fresh":
    import theano
    answers = list(map(answer, claims))
else:
    import scipy.stats
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        answers = pool.map(answer, claims, 1)
print("answers:" + json.dumps(answers))
"""

VALUES = collections.OrderedDict(
    [
        ("device", ["cpu", "cuda", "cuda0", "cuda3", "opencl0:1"]),
        ("init_gpu_device", ["", "cuda1"]),
        ("floatX", ["float16", "float32", "float64", "32", "64"]),
        ("contexts", ["", "dev0->cuda0;dev1->cuda1", "a->cuda0"]),
        ("gpuarray.preallocate", ["0", ".5", "0.95", "-1", "2048"]),
        ("mode", ["Mode", "FAST_RUN", "FAST_COMPILE"]),
        ("optimizer", ["fast_compile", "fast_run", "None", "o2"]),
        ("openmp", ["True", "true", "1", "False", "false", "0"]),
        ("allow_gc", ["True", "false", "0"]),
        ("dnn.conv.algo_fwd", ["small", "fft", "time_once"]),
        ("exception_verbosity", ["low", "high"]),
        ("scan.allow_gc", ["1", "0"]),
    ]
    + [  # flags that are free texts
        (name, None)
        for name in (
            "base_compiledir", "compiledir_format", "cuda.root", "gcc.cxxflags", "ctc.root",
            "dnn.include_path", "magma.include_path", "magma.library_path", "optimizer_including",
        )
    ]
)  # fmt: skip
PIECES = (
    ["a", "Bc", "/usr/lib", "0", "-O3", "~", "~/x", "$", " ", "  ", "=", ":", ".", "[b]", "\u00e9"]
    + [",", "\\", "'", '"', "#", ";", "%", "%%", "%(USER)s", "%(TMPDIR)s", "%(platform)s", "\t"]
    + ["x,y", "a=b", "it's", '"two words"', " # not a comment", "; no"]
)


def text(rng):
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 5)))


def value(rng, name):
    return text(rng).strip() if VALUES[name] is None else rng.choice(VALUES[name])


def generate_flags(rng):
    """A THEANO_FLAGS text: escapes, quotes, duplicates, spaces, comments, entries gone wrong."""
    entries = []
    for _ in range(rng.randint(0, 6)):
        name = rng.choice(list(VALUES))
        plain = value(rng, name)
        style = rng.random()
        if style < 0.35:
            written = re.sub(r"([\\,'\"#])", r"\\\1", plain)
        elif style < 0.55:
            written = "'" + plain.replace("'", "") + "'"
        elif style < 0.75:
            written = '"' + re.sub(r'(["\\])', r"\\\1", plain) + '"'
        else:
            written = plain
        equals = "=" if rng.random() < 0.9 else " ="
        entries.append(name + equals + written)
        if rng.random() < 0.1:
            entries.append(rng.choice(["openmp", "", " ", "unknown=1", "gpuarray.x=2,,", "=3"]))
        if rng.random() < 0.04:
            entries.append("# the rest of the line\nallow_gc=0")
    return rng.choice([",", ", ", ","]).join(entries)


def generate_file(rng):
    """A .theanorc: sections, comments, indentation, continued and odd values, CRLF."""
    lines = []
    sections = {}
    margin = rng.choice(["", "", "", "  ", "\t"])
    for name in rng.sample(list(VALUES), rng.randint(0, 7)):
        section, _, option = name.rpartition(".")
        sections.setdefault(section or "global", []).append((option, value(rng, name), name))
    names = list(sections) + rng.choice([[], [], ["global"], ["mine"], ["DEFAULT"]])
    for section in rng.sample(sorted(set(names)), len(set(names))):
        lines += rng.choice([[], [""], ["# about " + section, ""], ["; old", "", "  # indented"]])
        lines.append(rng.choice(["", margin]) + "[{}]".format(section))
        options = sections.get(section, [])
        if section in ("mine", "DEFAULT"):
            options = [("unknown", text(rng).strip(), None), ("deterministic", "more", None)]
        for option, plain, name in options:
            lines += rng.choice([[], [], [], ["# why"], [""]])
            case = rng.choice([str, str, str.lower, str.upper])
            lines.append(margin + case(option) + rng.choice([" = ", "=", ": ", " =  "]) + plain)
            if name and VALUES[name] is None and rng.random() < 0.3:
                lines += [margin + "    and more", "  # between", "", margin + "  last"]
    if rng.random() < 0.1:
        lines.insert(0, rng.choice(["orphan = 1", "no value", "[global]\n[global]"]))
    end = "\r\n" if rng.random() < 0.2 else "\n"
    return end.join(lines) + rng.choice([end, end, ""])


def generate_environ(rng, folder):
    """An environment with THEANO_FLAGS and files, in a new folder."""
    folder.mkdir()
    environ = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    environ.update(HOME=str(folder), TMPDIR="/tmp/a,b", USER="ann")
    files = [rng.choice(["a.rc", "~/b.rc", "with, comma", "c"]) for _ in range(rng.randint(1, 3))]
    for name in sorted(set(files)) if rng.random() < 0.7 else []:
        if rng.random() < 0.85:
            path = folder / name.replace("~/", "")
            path.write_bytes(generate_file(rng).encode("utf-8"))
        environ["THEANORC"] = os.pathsep.join(
            name if name.startswith("~") else str(folder / name) for name in files
        )
    if "THEANORC" not in environ and rng.random() < 0.8:
        (folder / ".theanorc").write_bytes(generate_file(rng).encode("utf-8"))
    if rng.random() < 0.9:
        environ["THEANO_FLAGS"] = generate_flags(rng)
    return environ


def generate_settings(rng):
    gpus = [str(i) for i in rng.sample(range(8), rng.choice([0, 0, 1, 2, 3]))]
    memory = [None, Memory(grow=True), Memory(fraction=0.5), Memory(fraction=1.0), Memory(size=3e9)]
    options = {
        name: value(rng, name)
        for name in rng.sample(list(VALUES), rng.randint(0, 2))
        if name not in ("floatX", "device", "contexts", "init_gpu_device")
    }
    return Settings(
        Devices(gpus, range(len(gpus))),
        memory=rng.choice(memory),
        floatx=rng.choice([None, "float32", "float64", "float16"]),
        options={"theano_flags": options} if options else {},
    )


def readings(environ):
    """What compat says Theano's flags are in this environment, or None where it refuses it."""
    try:
        flags = theano_flags.Flags(environ)
    except compat.CompatError:
        return None
    return {name: flags.get(name) for name in VALUES}


def ask_theano(how, claims, folder):
    """What Theano reports otherwise than claimed, for each claim."""
    path = folder / "claims.json"
    path.write_text(json.dumps(claims), encoding="utf-8")
    command = [sys.executable, "-c", PROBE, how, str(path)]
    output = subprocess.check_output(command, cwd=str(folder))
    return json.loads(output.decode().partition("answers:")[2])


def generate_claims(seed, folder):
    """Three claims: of an environment as it is, with THEANO_FLAGS merged, with a file written.

    One claim, None, where compat refuses the environment.
    """
    rng = random.Random(seed)
    theano = registry.load("theano")
    environ = generate_environ(rng, folder)
    before = readings(environ)
    if before is None:
        return [(environ, None)]
    settings = generate_settings(rng)
    ours = theano_flags.asked(settings, environ, range(len(settings.devices.gpus)))
    merged = dict(environ, **theano.environ(settings, environ))
    claims = [(environ, before), (merged, dict(before, **ours))]
    assert readings(merged) == claims[1][1]

    written = folder.with_name(folder.name + "-written")
    shutil.copytree(str(folder), str(written))
    without = {
        name: text.replace(str(folder), str(written))
        for name, text in environ.items()
        if name != "THEANO_FLAGS"
    }
    before = readings(without)
    ours = theano_flags.asked(settings, without, range(len(settings.devices.gpus)))
    path = theanorc.file_to_write(without)
    comments, order = comments_and_order(path)
    earlier = [other for other in theano_flags.files(without) if other != path]
    try:
        theanorc.write(path, ours, earlier)
    except compat.ConfigurationFileError as error:
        assert "what a section [DEFAULT] says of " in str(error)
        assert comments_and_order(path) == (comments, order)
        return claims
    new_comments, new_order = comments_and_order(path)
    assert new_comments == comments
    assert [option for option in new_order if option in order] == order
    return claims + [(without, dict(before, **ours))]


def comments_and_order(path):
    """A file's comments, and its options and headers, in their order."""
    if not os.path.exists(path):
        return [], []
    with open(path, encoding="utf-8") as file:
        text = file.read()
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    lines = [line.strip() for line in text.split("\n")]
    order = [(s, o) for s in parser.sections() for o in parser.options(s)]
    return [line for line in lines if line.startswith(("#", ";"))], order


# Reading and writing agree with Theano --------------------------------------------------------

COMBINATIONS = 40
IMPORTS = 3


def test_theano_reports_what_compat_reads_and_writes(tmp_path):
    claims, refused = [], []
    for seed in range(COMBINATIONS):
        for environ, said in generate_claims(seed, tmp_path / str(seed)):
            (claims if said is not None else refused).append((environ, said or {}))
    answers = ask_theano("fresh", claims + refused, tmp_path)
    wrong = [pair for pair in zip(answers, claims) if pair[0]]
    assert len(claims) > 2 * COMBINATIONS
    assert not wrong, wrong[:3]
    # Where compat refuses to read, Theano does so, too.
    assert len(refused) > 2
    refusals = ["ValueError", "MissingSectionHeaderError", "DuplicateSectionError", "ParsingError"]
    refusals += ["DuplicateOptionError", "UnicodeDecodeError"]
    for answer, (environ, _) in zip(answers[len(claims) :], refused):
        assert answer and answer[0] in refusals, (answer, environ)


@slow
def test_imported_theano_reports_it_too(tmp_path):
    """A sample of the same with nothing but `import theano`, of each kind of claim."""
    sample = []
    for seed in range(1000, 1100):
        claims = [c for c in generate_claims(seed, tmp_path / str(seed)) if c[1] is not None]
        if len(claims) != 3:
            continue
        environ, said = claims[len(sample) % 3]
        # Without a compiler nothing is compiled for these folders, which would take a minute.
        flags = theano_flags.merge_flags(environ.get("THEANO_FLAGS", ""), {"cxx": ""})
        environ["THEANO_FLAGS"] = flags
        sample.append((environ, said))
        if len(sample) == IMPORTS:
            break
    assert ask_theano("import", sample, tmp_path) == [[]] * IMPORTS


# Writing a file -------------------------------------------------------------------------------

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


# Traps and strangers in its folder ------------------------------------------------------------


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
    monkeypatch.setattr(theanorc, "_PATIENCE", 0.1)
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


def test_a_file_to_read_that_is_none(tmp_path):
    path = str(tmp_path / "rc")
    os.mkfifo(path)
    assert refusal(theano_flags.Flags, {"THEANORC": path}) == (
        "{} cannot be read: it is not a regular file. Theano would wait for what it says when it "
        "is imported. Put a file there, or name one in THEANORC.".format(path)
    )
    for skipped in (tmp_path, tmp_path / "missing"):  # as Theano skips them
        flags = theano_flags.Flags({"THEANORC": str(skipped)})
        assert flags.get("device") is None and flags.files == []
    assert theano_flags.Flags({"THEANORC": os.devnull}).get("device") is None


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
    assert theano_flags.Flags(environ).get("mode") is None
    assert refusal(theanorc.write, str(rc), {"floatX": "float32"}, before) == (
        "persist=True has written nothing: it needs a section [global], and what a section "
        "[DEFAULT] says of floatx and mode would then hold there, where it does not yet. Move that "
        "from [DEFAULT] into the sections that it is for, or add the line [global] yourself."
    )
    assert rc.read_text() == own and names(rc) == sorted([".theanorc", "first"])
    rc.write_text(own + "[global]\n")
    theanorc.write(str(rc), {"floatX": "float32"}, before)
    flags = theano_flags.Flags(environ)
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
