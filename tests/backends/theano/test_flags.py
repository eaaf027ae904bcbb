"""Theano's flags: what compat reads and writes is what Theano itself then reports."""

import collections
import configparser
import json
import os
import random
import re
import shutil
import subprocess
import sys

import compat
from compat._backends.theano import configuration, theanorc
from compat._backends.theano import flags as theano_flags
from compat._configuration import registry
from compat._configuration.device_choice import Devices
from compat._configuration.settings import Memory, Settings
from compat.testing import slow

from ..messages import refusal
from . import test_contract

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
theano_process = test_contract.theano_process

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
    """Generate a THEANO_FLAGS text: escapes, quotes, duplicates, spaces, comments, faults."""
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
    """Generate a .theanorc: sections, comments, indentation, continued and odd values, CRLF."""
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
    """Generate an environment with THEANO_FLAGS and files, in a new folder."""
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
    """Return Theano's flags in an environment by compat, or None where it refuses them."""
    try:
        flags = theano_flags.Flags(environ)
    except compat.CompatError:
        return None
    return {name: flags.get(name) for name in VALUES}


def ask_theano(how, claims, folder):
    """Return the differences between Theano's flags and those claimed, for each claim."""
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
    ours = configuration.requested_flags(settings, environ, range(len(settings.devices.gpus)))
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
    ours = configuration.requested_flags(settings, without, range(len(settings.devices.gpus)))
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
    """Return a file's comments, and its options and headers, in their order."""
    if not os.path.exists(path):
        return [], []
    with open(path, encoding="utf-8") as file:
        text = file.read()
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    lines = [line.strip() for line in text.split("\n")]
    order = [(s, o) for s in parser.sections() for o in parser.options(s)]
    return [line for line in lines if line.startswith(("#", ";"))], order


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


def test_a_file_to_read_that_is_none(tmp_path):
    path = str(tmp_path / "rc")
    os.mkfifo(path)
    assert refusal(compat.ConfigurationFileError, theano_flags.Flags, {"THEANORC": path}) == (
        "{} cannot be read: it is not a regular file. Theano would wait for what it says when it "
        "is imported. Put a file there, or name one in THEANORC.".format(path)
    )
    for skipped in (tmp_path, tmp_path / "missing"):  # as Theano skips them
        flags = theano_flags.Flags({"THEANORC": str(skipped)})
        assert flags.get("device") is None and flags.files == []
    assert theano_flags.Flags({"THEANORC": os.devnull}).get("device") is None


def test_a_file_that_theano_cannot_read_is_an_error_before_the_import(theano_process, tmp_path):
    path = tmp_path / ".theanorc"
    path.write_text("floatX = float32\n")
    shown = theano_process(
        """
        show(text=refusal(gpus=0, persist=True), imported="theano" in sys.modules)
        """
    )
    told = "ConfigurationFileError: {} cannot be read: File contains no section".format(path)
    assert shown["text"].startswith(told)
    assert not shown["imported"]
    assert path.read_text() == "floatX = float32\n"
