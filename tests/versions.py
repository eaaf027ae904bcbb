"""Run the pairs of versions of docs/versions.md, and write its table.

    tox run -e versions -- [TEXT ...] [--edges] [--jobs N] [--keep] [--table]

Each pair of compat/_configuration/tested_versions.py gets an environment, in which this runs the
span contract, three examples by ``compat test``, and a job of two ranks where the backend can start
ranks without a library of its own. The environment is removed; what came of the pair stays in
.tox/versions, as JSON and as the log of all commands; ``--table`` makes it a line of the table.

    TEXT        only pairs whose extra, Python or requirements contain all these texts
    --edges     only the oldest and newest pairs, each with one of the examples in turn, as in CI
    --jobs N    run N pairs at a time (default: one for each two cores)
    --keep      keep the environments
    --table     run nothing; write the table, with the results of earlier runs that are there

exit status: 0 where all that ran holds, or fails as tested_versions.FAULTS says; else 1.
"""

import argparse
import collections
import concurrent.futures
import configparser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree

import support_table

ROOT = pathlib.Path(__file__).absolute().parents[1]
sys.path.insert(0, str(ROOT))

from compat._configuration import pip_extras, tested_versions  # noqa: E402

WORK = ROOT / ".tox" / "versions"
PAGE = ROOT / "docs" / "versions.md"
EXAMPLES = ("mlp", "vae", "lstm_text")
#: Backends whose ranks communicate through what the framework itself brings.
RANKS = ("jax", "tensorflow2", "torch")
EDGES = (
    "torch==2.13.0 keras==3.0.5",
    "jax==0.4.20 keras==3.0.5",
    "tensorflow-cpu==2.1.4",
    "tensorflow==1.13.2",
    "tensorflow==1.8.0 keras==2.2.0",
    "mxnet==1.4.1 keras-mxnet==2.2.4",
    "theano==1.0.1 keras==2.1.3",
)
#: What compat says where a version cannot do what a script asks for, in any rank, or not verify it.
REFUSAL = re.compile(
    r"^(?:\[\d+\] )?compat\.errors\.UnsupportedError: (.*)"
    r"|^.*CompatWarning: (verify=\d+: .* Verify it with .*)",
    re.MULTILINE,
)
#: Theano's implementations in Python, for examples: those in C take minutes to compile. The
#: contract has such flags of its own, which give way to any in the environment.
IN_PYTHON = "optimizer=fast_compile,optimizer_excluding=conv_gemm:AbstractConvCheck,cxx="
LIBRARIES = ("cntk",)  # need what [options]openmpi of tox.ini names
LIMIT = 1500  # seconds, of each command
SHOWN = 3  # faults of a pair that are printed


class Environment:
    """A pair's environment, and the commands that run in it.

    Arguments:
        pair: the pair.
        is_edge: whether it runs as one of the edges; tests may then leave out what others have.

    Attributes:
        folder: its path.
        log: the path of the file with all that its commands print.
    """

    def __init__(self, pair, is_edge=False):
        self.pair = pair
        self.folder = WORK / name_of(pair)
        self.log = self.folder.with_name(self.folder.name + ".log")
        self.python = str(self.folder / "bin" / "python")
        shutil.rmtree(str(self.folder), ignore_errors=True)
        (self.folder / "home").mkdir(parents=True)
        self.log.write_text("")
        # An environment starts many processes: what they import is compiled once.
        # Tests take for granted what a row of tox.ini installs.
        left_out = "COMPAT_", "KERAS_", "PYTHONDONTWRITEBYTECODE", "TOX_"
        others = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        self.variables = dict(
            others,
            HOME=str(self.folder / "home"),
            UV_CACHE_DIR=os.environ.get("UV_CACHE_DIR") or os.path.expanduser("~/.cache/uv"),
            UV_PYTHON_DOWNLOADS="never",
            PYTHONPATH=str(ROOT),
            COMPAT_TEST_KERAS=pair.keras_name,
            COMPAT_VERIFY="0",
            OMP_NUM_THREADS="1",
            OPENBLAS_NUM_THREADS="1",
            TF_CPP_MIN_LOG_LEVEL="2",
        )
        if is_edge:
            self.variables["COMPAT_TEST_EDGES"] = "edges"
        if pair.keras_name == "tf_keras":
            self.variables["TF_USE_LEGACY_KERAS"] = "1"
        if pair.extra == "tensorflow20" and pair.keras is not None:
            self.variables["COMPAT_TEST_MODE"] = "keras23"  # as in tox.ini
        if pair.extra in LIBRARIES:
            self.variables["LD_LIBRARY_PATH"] = str(self.folder / "debian" / "libraries")
        if pair.extra == "theano":
            # Of programs that the contract compiles, once: the folder stays.
            self.variables["COMPAT_TEST_COMPILED"] = str(WORK / "compiled" / name_of(pair))

    def run(self, *command, **variables):
        """Run a command; return its exit status, and what it printed."""
        began = time.time()
        try:
            ran = subprocess.run(
                command, cwd=str(ROOT), env=dict(self.variables, **variables), timeout=LIMIT,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
            status, output = ran.returncode, ran.stdout
        except subprocess.TimeoutExpired as error:
            status, output = 124, str(error)
        with self.log.open("a", encoding="utf-8") as log:
            print("$", *command, file=log)
            print(output, "[{}] {:.0f} s".format(status, time.time() - began), sep="\n", file=log)
        return status, output

    def install(self):
        """Install the pair and what the tests need; return the error, or None."""
        python = "python" + pip_extras.spelled(self.pair.python)
        commands = [
            ["uv", "venv", "--quiet", "--allow-existing", "--python", python, str(self.folder)],
            ["uv", "pip", "install", "--quiet", "--python", self.python, "pytest<10",
             "pytest-timeout"] + self.pair.requirements,
        ]  # fmt: skip
        if self.pair.extra == "mxnet":
            # What keras-mxnet 2.2.0 to 2.2.2 requires wants Keras itself, which is in its place.
            without = self.folder / "overrides.txt"
            without.write_text("keras; python_version < '3'", encoding="utf-8")
            commands[-1] += ["--override", str(without)]
        if self.pair.extra in LIBRARIES:
            tox = configparser.ConfigParser(interpolation=None)
            tox.read(str(ROOT / "tox.ini"), encoding="utf-8")
            command = [sys.executable, "tests/debian.py", str(self.folder / "debian")]
            commands.append(command + tox["options"]["openmpi"].split())
        for command in commands:
            status, output = self.run(*command)
            if status:
                return output.strip()
        # As in tox's environments (toxfile.py), frameworks are imported in a fifth less time.
        for packages in self.folder.glob("lib/python*/site-packages"):
            (packages / "collect_less.pth").write_text(
                "import gc; gc.set_threshold(100000, 50, 100)\n"
            )
        if self.pair.extra == "jax":
            # As in tox.ini, programs compile in a third of the time. A jaxlib that does not know
            # the flag ends the process.
            flags = {"XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
            if not self.run(self.python, "-c", "import jax; jax.devices()", **flags)[0]:
                self.variables.update(flags)
                # Not for an older one: from what JAX 0.4.26 has kept, plain Keras trains to other
                # numbers.
                cache = str(self.folder / "home" / "compiled")
                self.variables["JAX_COMPILATION_CACHE_DIR"] = cache
        return None

    def contract(self):
        """Run the span contract; return how many tests passed, and the errors by failed tests."""
        results = self.folder / "results.xml"
        status, output = self.run(
            self.python, "-m", "pytest", "tests/backends", "-m", "span", "-p", "no:cacheprovider",
            "--timeout=600", "-q", "--junitxml", str(results),
        )  # fmt: skip
        if not results.exists():
            deaths = [line for line in output.splitlines() if line.startswith("Fatal Python error")]
            return 0, {"pytest": deaths[0] if deaths else _last_line(output)}
        cases = list(xml.etree.ElementTree.parse(str(results)).getroot().iter("testcase"))
        failures = {case.get("name"): _failure(case) for case in cases}
        failures = {name: message for name, message in failures.items() if message is not None}
        if status and not failures:
            failures["pytest"] = _last_line(output)
        passed = sum(len(case.findall("*")) == len(case.findall("properties")) for case in cases)
        return passed, failures

    def script(self, name):
        """Return the path of an example, which imports Keras by the pair's name for it."""
        text = (ROOT / "examples" / (name + ".py")).read_text(encoding="utf-8")
        text = re.sub(r"\b(from|import) keras\b", r"\1 " + self.pair.keras_name, text)
        path = self.folder / (name + ".py")
        path.write_text(text, encoding="utf-8")
        return str(path)

    def example(self, name):
        """Run an example by ``compat test``; return why it failed, or None.

        The steps of a random one are compared in inference.
        """
        command = self.python, "-m", "compat", "test", "-n", "0", "--quiet", self.script(name)
        variables = {"COMPAT_VERIFY": ""}
        if self.pair.extra == "theano":
            variables["THEANO_FLAGS"] = IN_PYTHON
        status, output = self.run(*command, **variables)
        is_compared = status == 3 and _last_line(output).startswith("NOT COMPARED")
        return _reason(output) if status and not is_compared else None

    def ranks(self):
        """Run a job of two ranks; return why it failed, or None."""
        options = ["-n", "2", "--simulate", "2", "--report"]
        path = pathlib.Path(self.script("mlp"))
        # It evaluates the initial weights, which tf.keras before 2.7 draws by TensorFlow's seed.
        seed = "from numpy.random import seed as set_random_seed"
        of_tensorflow = "\n\n    __import__('tensorflow').random.set_seed(1337)"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(seed, seed + of_tensorflow), encoding="utf-8")
        status, output = self.run(self.python, "-m", "compat", "run", *options, str(path))
        return _reason(output) if status else None


def _reason(output):
    """Return the last line of a command that failed, or "refused: " and why compat refused it."""
    refusal, last = REFUSAL.search(output), _last_line(output)
    if refusal and (refusal.group(1) or last.startswith("Nothing was compared")):
        return "refused: " + (refusal.group(1) or refusal.group(2))
    return last


def _last_line(output):
    return (output.strip().splitlines() or ["nothing was printed"])[-1][:300]


def _failure(case):
    """Return the first line of what a test failed with, or None."""
    for kind in ("failure", "error"):
        for element in case.iter(kind):
            return ((element.get("message") or "").strip().splitlines() or [kind])[0][:300]
    return None


def name_of(pair):
    """Return the name of a pair's environment, log and result: py3.11-torch-2.13.0-keras-3.0.5."""
    name = "py{}-{}".format(pip_extras.spelled(pair.python), pair)
    return re.sub(r"[^\w.]+", "-", name + ("" if pair.keras else " tf.keras"))


def result_of(pair, example=None, keep=False):
    """Run a pair; return what came of it, as it is written to its JSON file.

    Arguments:
        pair: the pair.
        example: the only example to run, of an edge; None: all of them.
        keep: whether to keep its environment.
    """
    began, examples = time.time(), [example] if example else EXAMPLES
    environment = Environment(pair, bool(example))
    error = environment.install()
    result = {"faults": {} if error is None else {"installation": error.splitlines()[-1]}}
    result.update(refused={}, examples=list(examples))
    if error is None:
        result["tests"], result["faults"] = environment.contract()
        reasons = {"examples/{}.py".format(name): environment.example(name) for name in examples}
        if pip_extras.BACKENDS[pair.extra] in RANKS:
            reasons["two ranks"] = environment.ranks()
        for test, reason in reasons.items():
            if reason is not None:
                _, refused, sentence = reason.rpartition("refused: ")
                result["refused" if refused else "faults"][test] = sentence
    result["seconds"] = round(time.time() - began)
    if not keep:
        shutil.rmtree(str(environment.folder), ignore_errors=True)
    path = environment.folder.with_name(environment.folder.name + ".json")
    path.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def is_as_expected(pair, result):
    """Return whether a pair holds, or fails as was known."""
    return not result["faults"] or bool(pair.fault)


def told(pair, result):
    """Return the line that is printed of a pair."""
    lines = ["{}: {}".format(test, said) for test, said in result["faults"].items()]
    verdict = "holds" if not lines else "does not hold" + (", as known" if pair.fault else "")
    counted = "{} tests, {} s".format(result.get("tests", 0), result["seconds"])
    counted += "".join(", refused: " + test for test in result.get("refused", ()))
    rest = ["... and {} more, in the log".format(len(lines) - SHOWN)] * (len(lines) > SHOWN)
    return "\n    ".join(
        ["{}: {} ({})".format(name_of(pair), verdict, counted)] + lines[:SHOWN] + rest
    )


# The page -------------------------------------------------------------------------------------

COLUMNS = (
    "Python",
    "framework, Keras",
    "versions",
    "span contract",
    "examples",
    "two ranks",
    "result",
)
FIRST_SENTENCE = re.compile(r"^[^;]*?\. (?=[A-Z])")  # of what is refused; what follows is advice


def row(pair, result):
    """Return what is known of a pair: what names it, in three cells, and its cells of the table."""
    of = tested_versions.name_and_version
    faults = collections.OrderedDict(result["faults"])
    verdict = "holds" if not faults else pair.fault or "does not hold: {}".format(*faults)
    has_ranks = pip_extras.BACKENDS[pair.extra] in RANKS
    refused = {
        test: FIRST_SENTENCE.sub("", text, count=1)
        for test, text in result.get("refused", {}).items()
    }
    by = collections.OrderedDict((text, []) for _, text in sorted(refused.items()))
    for test, text in sorted(refused.items()):
        by[text].append(test)
    failed = set(faults) | set(refused)
    failing = failed - {"two ranks"} - {"examples/{}.py".format(name) for name in EXAMPLES}
    ran = result.get("examples", EXAMPLES)
    examples = sum("examples/{}.py".format(name) not in failed for name in ran)
    return [
        pip_extras.spelled(pair.python),
        of(pair.framework),
        of(pair.keras) if pair.keras else "tf.keras",
        "passed" if result.get("tests") and not failing else "fails",
        "{} of {}".format(examples * ("tests" in result), len(ran)),
        _word("two ranks", faults, refused) if has_ranks else "",
        "; ".join([verdict] + ["{}: {}".format(_listed(by[text]), text) for text in by]),
    ]


def lines_of(rows):
    """Return the lines of the table: one for pairs that differ in their versions alone."""
    groups = collections.OrderedDict()
    for python, framework, keras, *rest in rows:
        framework, version = framework.split(" ")
        keras, _, of_keras = keras.partition(" ")
        names = ", ".join([framework, keras])
        group = groups.setdefault((python, names, tuple(rest)), collections.OrderedDict())
        group.setdefault(version, []).append(of_keras)
    for (python, names, rest), versions in groups.items():
        texts = [": ".join(filter(None, [v, ", ".join(k)])) for v, k in versions.items()]
        yield [python, names, "; ".join(texts)] + list(rest)


def rows_of(lines):
    """Return the rows that are in the lines of the table."""
    for python, names, versions, *rest in lines:
        framework, keras = names.split(", ")
        for text in versions.split("; "):
            version, _, of_keras = text.partition(": ")
            for each in of_keras.split(", "):
                pair = ["{} {}".format(framework, version), "{} {}".format(keras, each).strip()]
                yield [python] + pair + rest


def _listed(tests):
    """Return the names of tests that are refused for one reason."""
    examples = ["examples/{}.py".format(name) for name in sorted(EXAMPLES)]
    return "the examples" if tests == examples else ", ".join(tests)


def _word(test, faults, refused):
    """Return how a test of a pair went."""
    return "fails" if test in faults else "refused" if test in refused else "same"


def rows_of_page():
    """Return what the page has, by the three cells that name a pair."""
    lines = support_table.page_tables(str(PAGE)).splitlines()[2:]
    return {tuple(cells[:3]): cells for cells in rows_of(map(support_table.cells, lines))}


def write_page():
    """Write the table: lines of results in .tox/versions, and of others as they are on the page."""
    known, rows = rows_of_page(), []
    for pair in tested_versions.pairs():
        path = WORK / (name_of(pair) + ".json")
        name = tuple(row(pair, {"faults": {}, "seconds": 0})[:3])
        if path.exists():
            rows.append(row(pair, json.loads(path.read_text(encoding="utf-8"))))
        elif name in known:
            rows.append(known[name])
    support_table.write_page(support_table.markdown(COLUMNS, lines_of(rows)), str(PAGE))


def is_chosen(pair, texts):
    words = [pair.extra, pip_extras.spelled(pair.python), pair.keras_name] + pair.requirements
    return all(text in " ".join(words) for text in texts)


def main(arguments):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--edges", action="store_true")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    if options.table:
        return write_page()
    WORK.mkdir(parents=True, exist_ok=True)
    chosen = [pair for pair in tested_versions.pairs() if is_chosen(pair, options.texts)]
    if options.edges:
        chosen = [pair for pair in chosen if str(pair) in EDGES]
    unexpected = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = {}
        for number, pair in enumerate(chosen):
            example = EXAMPLES[number % len(EXAMPLES)] if options.edges else None
            running[pool.submit(result_of, pair, example, options.keep)] = pair
        for done in concurrent.futures.as_completed(running):
            pair, result = running[done], done.result()
            unexpected += not is_as_expected(pair, result)
            print(told(pair, result), flush=True)
    print("{} pairs, {} not as expected".format(len(chosen), unexpected))
    return int(bool(unexpected) or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
