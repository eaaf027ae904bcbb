"""The support tables of the README, from the results of the tests.

    python tests/support_table.py RESULTS [--write]

RESULTS is the folder where each tox environment leaves its JUnit files. Prints two tables (what
ran in each environment, and where the tests marked ``row(name)`` passed), every test that was
skipped, every environment that was not run, and the sum of all. Fails where a test failed or an
environment whose interpreter is here left no result; where CI is set, also where an interpreter
is missing or the README's tables are not the ones generated here. --write puts the tables into
the README.
"""

import configparser
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
README = os.path.join(ROOT, "README.md")
BEGIN = "<!-- support table: written by tests/support_table.py -->\n"
END = "<!-- end of the support table -->\n"
HEADING = ("tox environment", "Python", "backend", "framework", "Keras", "tests")
FEATURES = ("feature", "tests passed in")


def environments():
    """The tox environments that run tests, as (name, Python version)."""
    tox = configparser.ConfigParser()
    tox.read(os.path.join(ROOT, "tox.ini"), encoding="utf-8")
    for line in tox["tox"]["env_list"].split():
        if line.startswith("py"):
            digits = line.split("-")[0][2:]
            yield line, "{}.{}".format(digits[0], digits[1:])


class Result:
    """What one environment's JUnit files say: one for each process that ran tests."""

    def __init__(self, paths):
        suites = [ElementTree.parse(path).getroot().find("testsuite") for path in paths]
        self.properties = {
            p.get("name"): p.get("value") for s in suites for p in s.iterfind("properties/*")
        }
        tests, self.skipped, failures, errors = (
            sum(int(suite.get(what)) for suite in suites)
            for what in ("tests", "skipped", "failures", "errors")
        )
        self.failed = failures + errors
        self.passed = tests - self.skipped - self.failed
        self.seconds = sum(float(suite.get("time")) for suite in suites)
        cases = [case for suite in suites for case in suite.iterfind("testcase")]
        self.skips = [
            "{}: {}".format(case.get("name"), case.find("skipped").get("message"))
            for case in cases
            if case.find("skipped") is not None
        ]
        # The features whose tests ran here, and whether all of them passed.
        self.features = {}
        for case in cases:
            passed = not any(
                case.find(what) is not None for what in ("skipped", "failure", "error")
            )
            for row in case.iterfind("properties/property[@name='row']"):
                name = row.get("value")
                self.features[name] = passed and self.features.get(name, True)
        self.bad = self.failed or not self.passed

    def __str__(self):
        return "{0.passed} passed, {0.failed} failed, {0.skipped} skipped".format(self)


def read(folder):
    """Results by environment: those of the wheel that was built last."""
    results = {}
    for name, _ in environments():
        paths = [os.path.join(folder, name + ending) for ending in (".xml", ".again.xml")]
        new = [p for p in paths if os.path.exists(p) and os.path.getmtime(p) >= _built(folder)]
        if new:
            results[name] = Result(new)
    return results


def _built(folder):
    """When this run of tox built its wheel: results that are older come from an earlier one."""
    wheels = os.path.join(os.path.dirname(os.path.abspath(folder)), ".pkg", "dist")
    times = [os.path.getmtime(os.path.join(wheels, wheel)) for wheel in os.listdir(wheels)]
    return max(times)


def rows(results):
    """One row for each environment, as in the README: nothing that changes with every commit."""
    for name, python in environments():
        result = results.get(name)
        facts = result.properties if result else {}
        outcome = "not run" if not result else "failed" if result.bad else "passed"
        columns = [facts.get(key, "none") for key in ("backend", "framework", "keras")]
        yield [name, python] + (columns if result else ["", "", ""]) + [outcome]


def feature_rows(results):
    """One row for each feature: the environments in which all of its tests passed."""
    passed = {}
    for name, result in results.items():
        for feature, good in result.features.items():
            passed.setdefault(feature, []).extend([name] if good else [])
    return [[feature, ", ".join(passed[feature]) or "none"] for feature in sorted(passed)]


def markdown(heading, table):
    """A table, its columns aligned but for a long last one."""
    lines = [heading] + list(table)
    widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
    if widths[-1] > 40:
        widths[-1] = len(heading[-1])
    lines.insert(1, ["-" * width for width in widths])
    return "".join(
        "| {} |\n".format(" | ".join(cell.ljust(width) for cell, width in zip(line, widths)))
        for line in lines
    )


def tables(results):
    """Both tables, as the README has them."""
    return markdown(HEADING, rows(results)) + "\n" + markdown(FEATURES, feature_rows(results))


def readme_tables():
    """The tables that the README has."""
    with open(README, encoding="utf-8") as file:
        return file.read().partition(BEGIN)[2].partition(END)[0]


def write_readme(table):
    with open(README, encoding="utf-8") as file:
        before, _, rest = file.read().partition(BEGIN)
    with open(README, "w", encoding="utf-8") as file:
        file.write(before + BEGIN + table + END + rest.partition(END)[2])


def interpreter_answers(python):
    """Whether this machine has that Python, as tox looks for it: on the PATH."""
    try:
        subprocess.check_output(["python" + python, "-c", ""], stderr=subprocess.STDOUT)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def not_run(results):
    """What was not run and why, and whether that is a failure: (lines, failures)."""
    lines, failures = [], []
    for name, python in environments():
        if name in results:
            continue
        if interpreter_answers(python):
            failures.append("no result: {}: it did not come to its tests".format(name))
        else:
            lines.append("not run: {}: this machine has no Python {}".format(name, python))
    return lines, failures


def main(folder, *options):
    results = read(folder)
    table = tables(results)
    print(table)
    for name, result in results.items():
        print("{}: {} in {:.0f} s".format(name, result, result.seconds))
        for skip in result.skips:
            print("    skipped {}".format(skip))
    missing, failures = not_run(results)
    failures += ["failed: {}: {}".format(n, results[n]) for n in results if results[n].bad]
    print("\n".join(missing))
    if "--write" in options:
        write_readme(table)
    elif not missing and not failures and table != readme_tables():
        failures.append("README.md has other tables: tox run -e report -- --write")
    if os.environ.get("CI") and missing:
        failures.append("CI needs every interpreter of the matrix")
    print("\n".join(failures))
    passed, failed, skipped = (
        sum(getattr(result, what) for result in results.values())
        for what in ("passed", "failed", "skipped")
    )
    print("{} passed, {} failed, {} skipped".format(passed, failed, skipped))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
