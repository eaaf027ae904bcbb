"""Other projects' own tests, plain and with every Keras model parallelized, and what differs.

    .tox/py38-tensorflow/bin/python tests/peers/peers.py ~/keras/tests metrics_test.py

in the environment of a backend, with a checkout of the project. What passes plain and fails
parallel is a fault of compat's, or one of the differences that docs/peers.md tells. Options that
are not known here are pytest's, such as ``-k metric`` and ``--timeout 600``.

exit status: 0 nothing fails that passes plain, 1 something does, or nothing passes plain.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

Result = collections.namedtuple("Result", "outcome cause split")


def run(checkout, arguments, **environ):
    """Return the results of pytest in a checkout, by the tests' names."""
    path = os.pathsep.join([HERE, ROOT] + os.environ.get("PYTHONPATH", "").split(os.pathsep))
    with tempfile.TemporaryDirectory() as folder:
        written = os.path.join(folder, "results.xml")
        command = [sys.executable, "-m", "pytest", "-p", "every_model_parallel", "-q"]
        # What needs a package that is not here cannot be collected; the others are run.
        command += ["--continue-on-collection-errors"]
        command += ["-p", "no:cacheprovider", "--junitxml", written]
        subprocess.call(
            command + arguments,
            cwd=checkout,
            env=dict(os.environ, PYTHONPATH=path.rstrip(os.pathsep), **environ),
        )
        return read(written)


def read(path):
    """Return the results in a file of pytest's ``--junitxml``."""
    found = {}
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        skipped = any(child.tag == "skipped" for child in case)
        outcome = "failed" if bad else "skipped" if skipped else "passed"
        properties = [each.get("name") for each in case.iter("property")]
        name = "{}::{}".format(case.get("classname"), case.get("name"))
        name = re.sub("0x[0-9a-f]+", "0x", name)  # where an argument of the test is this time
        cause = cause_of(bad[0].get("message") or bad[0].text or "") if bad else ""
        found[name] = Result(outcome, cause, "split" in properties)
    return found


def cause_of(message):
    """Return a message without its numbers and names, the same for all failures of one cause."""
    message = message.strip().split("\n")[0]
    return re.sub(r"'[^']*'|\d[\d.e+-]*", "#", message)[:160]


def compared(plain, parallel):
    """Return a comparison of two runs, in lines; and the tests that fail in the second alone."""
    lines = []
    for title, results in ("plain", plain), ("parallel", parallel):
        counts = collections.Counter(result.outcome for result in results.values())
        told = ", ".join("{} {}".format(counts[o], o) for o in ("passed", "failed", "skipped"))
        lines.append("{:9} {}".format(title, told))
    split = sum(result.split for result in parallel.values())
    lines.append("tests that split a batch among devices: {}".format(split))
    causes = collections.defaultdict(list)
    missing = Result("missing", "not run at all", False)
    for name in sorted(name for name in plain if plain[name].outcome == "passed"):
        result = parallel.get(name, missing)
        if result.outcome != "passed":
            causes[result.cause or result.outcome].append(name)
    for cause, names in sorted(causes.items(), key=lambda pair: -len(pair[1])):
        lines += ["", "{} x {}".format(len(names), cause)] + ["    " + name for name in names]
    return lines, [name for names in causes.values() for name in names]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", help="where the project is, whose tests are run there")
    parser.add_argument("--devices", type=int, default=2, help="how many are simulated (2)")
    parser.add_argument(
        "--verify", default="1,0", help="steps that compat compares, a run for each number (1,0)"
    )
    options, arguments = parser.parse_known_args()
    plain = run(options.checkout, arguments, PEERS_DEVICES="")
    if not any(result.outcome == "passed" for result in plain.values()):
        sys.exit("No test passes in plain Keras, so that nothing can be compared.")
    status, devices = 0, str(options.devices)
    for verify in options.verify.split(","):
        parallel = run(options.checkout, arguments, PEERS_DEVICES=devices, COMPAT_VERIFY=verify)
        lines, fail = compared(plain, parallel)
        print("\n".join(["", "verify={}".format(verify)] + lines), flush=True)
        status |= bool(fail)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
