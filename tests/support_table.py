"""The tables of docs/support.md and docs/idioms.md, generated from the results of the tests.

    python tests/support_table.py RESULTS [--write]

RESULTS is the folder where each tox environment leaves its JUnit files. Prints two tables (what
ran in each environment, and where the tests marked ``row(name)`` passed), every test that was
skipped, every environment that was not run, where the time went, and the sum of all. Fails where
a test failed or an environment whose interpreter is here left no result; where CI is set, also
where an interpreter is missing or the page's tables are not the ones generated here.

Results count that are newer than the code: those of one environment stay when another is run. An
environment that is run begins by removing its own, and a run of selected tests
(``tox run -e py311-torch -- tests/backends -k masked``) leaves none; see toxfile.py.

--write updates the pages' tables from the results. Environments without a result keep their rows,
and are named; in docs/idioms.md, where environments are in the cells, their verdicts, and what was
not run in an environment stays as it is.

On the pages, what has the same cells is one row, and most environments are all but some.
"""

import configparser
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "docs", "support.md")
IDIOMS = os.path.join(ROOT, "docs", "idioms.md")
BEGIN = "<!-- generated table -->\n"
END = "<!-- end of the generated table -->\n"
HEADING = ("tox environment", "Python", "backend", "framework", "Keras", "contract", "tests")
FEATURES = ("feature", "tests passed in")
TIMES = ("setup", "tests", "cpu")
SLOWEST = 30
ENDINGS = (".xml", ".again.xml", ".models.xml")  # of each environment's results
#: What the second table calls the environments in which one process drives all devices, and how
#: the names of the others end.
ONE_PROCESS = "all of one process"
OTHERS = ("core", "horovod", "workers", "mpi", "launchers", "pocl")
#: How the page of idioms begins, before the environments' names.
COLUMNS = "In {}:\n\n"
SPLIT = "split"
ANY_PYTHON = "core"  # the core's tests, where the Pythons of the matrix's rows for it are missing
PROMISED_MINUTES = 35  # what the README says of a machine of two cores


def environments():
    """Return the rows of the matrix: tox environments that run tests, as (name, Python version)."""
    tox = configparser.ConfigParser()
    tox.read(os.path.join(ROOT, "tox.ini"), encoding="utf-8")
    for line in tox["tox"]["env_list"].split():
        if line.startswith("py"):
            digits = line.split("-")[0][2:]
            yield line, "{}.{}".format(digits[0], digits[1:])


class Result:
    """What one environment's JUnit files say, one for each process that ran tests, and tox.

    ``times`` are seconds by name, as far as they are known: those of TIMES, and when it began.
    """

    def __init__(self, paths, times):
        suites = [ElementTree.parse(path).getroot().find("testsuite") for path in paths]
        properties = [
            (p.get("name"), p.get("value")) for s in suites for p in s.iterfind("properties/*")
        ]
        # What the first process ran is what the environment is for: its properties prevail.
        self.properties = dict(reversed(properties))
        cpu = [float(value) for name, value in properties if name == "cpu"]
        self.times = dict(times, cpu=sum(cpu) if cpu else None)
        tests, self.skipped, failures, errors = (
            sum(int(suite.get(what)) for suite in suites)
            for what in ("tests", "skipped", "failures", "errors")
        )
        self.failed = failures + errors
        self.passed = tests - self.skipped - self.failed
        cases = [case for suite in suites for case in suite.iterfind("testcase")]
        self.skips = [
            "{}: {}".format(case.get("name"), case.find("skipped").get("message"))
            for case in cases
            if case.find("skipped") is not None
        ]
        self.failures = [
            "{}: {}".format(_name(case), _first_lines(found.get("message") or ""))
            for case in cases
            for found in case
            if found.tag in ("failure", "error")
        ]
        self.durations = [(float(case.get("time")), _name(case)) for case in cases]
        # The features whose tests ran here, and whether all of them passed.
        self.features = {}
        for case in cases:
            passed = not any(
                case.find(what) is not None for what in ("skipped", "failure", "error")
            )
            for row in case.iterfind("properties/property[@name='row']"):
                name = row.get("value")
                self.features[name] = passed and self.features.get(name, True)
        # What tests/idioms found, by idiom.
        found = [p.get("value") for c in cases for p in c.iterfind("properties/*[@name='verdict']")]
        self.verdicts = {name: kind for kind, _, name in (each.partition(": ") for each in found)}
        self.bad = self.failed or not self.passed

    def __str__(self):
        return "{0.passed} passed, {0.failed} failed, {0.skipped} skipped".format(self)


def _first_lines(message):
    return "\n        ".join(line[:200] for line in message.splitlines()[:8])


def _name(case):
    """Return a test's class, or its module where it has none, and its name."""
    return "{}::{}".format(case.get("classname").rpartition(".")[2], case.get("name"))


def read(folder):
    """Results by environment, as far as they are newer than the code; see the top of the file."""
    results, since = {}, _since(folder)
    for name in [name for name, _ in environments()] + [ANY_PYTHON]:
        junit = _new(since, folder, *[name + end for end in ENDINGS])
        if junit:
            times = {}
            for path in _new(since, folder, name + ".json"):  # toxfile.py writes it
                with open(path, encoding="utf-8") as file:
                    times = json.load(file)
            results[name] = Result(junit, times)
    return results


def _new(since, folder, *files):
    """Return the paths of those files that are not older."""
    paths = [os.path.join(folder, file) for file in files]
    return [p for p in paths if os.path.exists(p) and os.path.getmtime(p) >= since]


def _since(folder):
    """When the code changed last, or tox built its wheel: what came first.

    Results of the run of tox that is being reported on count, whatever was edited meanwhile.
    """
    changed = max(map(os.path.getmtime, _code()))
    wheels = os.path.join(os.path.dirname(os.path.abspath(folder)), ".pkg", "dist")
    built = [os.path.join(wheels, wheel) for wheel in _listed(wheels)]
    return min(changed, max(map(os.path.getmtime, built))) if built else changed


def _code():
    """Yield the files on which results depend."""
    for name in ("setup.cfg", "tox.ini"):
        yield os.path.join(ROOT, name)
    for top in ("compat", "examples", "tests"):
        for folder, _, files in os.walk(os.path.join(ROOT, top)):
            yield from (os.path.join(folder, file) for file in files if file.endswith(".py"))


def _listed(folder):
    return os.listdir(folder) if os.path.isdir(folder) else []


def rows(results, kept=()):
    """One row for each environment, as on the page: nothing that changes with every commit.

    ``kept`` are the page's rows, for environments that have no result.
    """
    keys = ("backend", "framework", "keras", "contract")
    kept = {row[0]: row for row in kept}
    for name, python in environments():
        result = results.get(name)
        if result:
            facts = [result.properties.get(key, "none") for key in keys]
            yield [name, python] + facts + ["failed" if result.bad else "passed"]
        else:
            yield kept.get(name, [name, python] + [""] * len(keys) + ["not run"])


def feature_rows(results, kept=()):
    """One row for each feature: the environments in which all of its tests passed.

    ``kept`` are the page's rows, for environments that have no result.
    """
    passed = {}
    for feature, names in kept:
        for name in names.split(", "):
            if name not in results:
                passed.setdefault(feature, set()).add(name)
    for name, result in results.items():
        for feature, good in result.features.items():
            passed.setdefault(feature, set()).update([name] if good else [])
    matrix = [name for name, _ in environments()]
    return [
        [feature, ", ".join(name for name in matrix if name in passed[feature]) or "none"]
        for feature in sorted(passed)
    ]


def of_one_process():
    """Return the environments in which one process drives all devices."""
    return [name for name, _ in environments() if not name.endswith(OTHERS)]


def shortened(names):
    """Return a list of environments in fewer words, where most of those of one process are there.

    Such as "all of one process but py36-theano; py313-core".
    """
    listed, every = names.split(", "), of_one_process()
    missing = [name for name in every if name not in listed]
    if 2 * len(missing) >= len(every):
        return names
    text = ONE_PROCESS + (" but " + ", ".join(missing) if missing else "")
    return "; ".join([text] + [", ".join(n for n in listed if n not in every)]).rstrip("; ")


def expanded(text):
    """Return the list of environments that was shortened."""
    if not text.startswith(ONE_PROCESS):
        return text
    text, _, others = text.partition("; ")
    missing = text.partition(" but ")[2].split(", ")
    listed = [name for name in of_one_process() if name not in missing] + others.split(", ")
    return ", ".join(name for name, _ in environments() if name in listed)


def merged(table):
    """Return the rows of a table, those that differ in their first cells alone as one."""
    first = {}
    for row in table:
        first.setdefault(tuple(row[1:]), []).append(row[0])
    return [["; ".join(names)] + list(rest) for rest, names in first.items()]


def unmerged(table):
    """Return the rows that were merged, sorted."""
    return sorted([name] + row[1:] for row in table for name in row[0].split("; "))


def verdicts():
    """Return the verdicts of docs/idioms.md, by environment and idiom."""
    columns, _, table = page_tables(IDIOMS).partition("\n\n")
    names = columns.partition(" ")[2].rstrip(":").split(", ") if table else []
    heading, _, *lines = [cells(line) for line in table.splitlines()] or [[], []]
    found = {name: {} for name in names}
    for line in unmerged(lines):
        for name in names:
            kinds = [kind for kind, cell in zip(heading, line) if name in cell.split(", ")]
            found[name][line[0]] = kinds[0] if kinds else SPLIT
    return found


def idiom_table(results):
    """Return the table of docs/idioms.md: the environments whose verdict is not "split"."""
    found = verdicts()
    for name, result in results.items():
        if result.verdicts:
            found[name] = dict(found.get(name, {}), **result.verdicts)
    names = [name for name, _ in environments() if name in found]
    if not names:
        return ""
    kinds = sorted({kind for verdicts in found.values() for kind in verdicts.values()} - {SPLIT})
    kinds.sort(key="-".__eq__)
    table = [
        [idiom] + [", ".join(n for n in names if found[n].get(idiom, "-") == k) for k in kinds]
        for idiom in sorted(set().union(*found.values()))
    ]
    return COLUMNS.format(", ".join(names)) + markdown(["idiom"] + kinds, merged(table))


def cells(line):
    """Return the cells of a line of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def markdown(heading, table):
    """Return a table, its columns aligned but for long ones."""
    lines = [heading] + list(table)
    widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
    widths = [len(name) if width > 40 else width for name, width in zip(heading, widths)]
    lines.insert(1, ["-" * width for width in widths])
    return "".join(
        "| {} |\n".format(" | ".join(cell.ljust(width) for cell, width in zip(line, widths)))
        for line in lines
    )


def tables(results, kept=((), ())):
    """Both tables, as the page has them, with the rows of environments that have no result."""
    first, second = rows(results, kept[0]), feature_rows(results, kept[1])
    second = merged([[feature, shortened(names)] for feature, names in second])
    return markdown(HEADING, first) + "\n" + markdown(FEATURES, second)


def page_tables(page=None):
    """Return the tables that the page has."""
    with open(page or PAGE, encoding="utf-8") as file:
        return file.read().partition(BEGIN)[2].partition(END)[0]


def page_rows():
    """Return the rows of both tables, as lists of cells, as they were before they were merged."""
    first, second = [
        [cells(line) for line in table.strip().splitlines()[2:]]
        for table in page_tables().partition("\n\n")[::2]
    ]
    return first, [[feature, expanded(names)] for feature, names in unmerged(second)]


def write_page(table, page=None):
    with open(page or PAGE, encoding="utf-8") as file:
        before, _, rest = file.read().partition(BEGIN)
    with open(page or PAGE, "w", encoding="utf-8") as file:
        file.write(before + BEGIN + table + END + rest.partition(END)[2])


def interpreter_answers(python):
    """Whether this machine has that Python, as tox looks for it: on the PATH."""
    try:
        subprocess.check_output(["python" + python, "-c", ""], stderr=subprocess.STDOUT)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def not_run(results):
    """Return what was not run and why, and whether that is a failure: (lines, failures)."""
    lines, failures = [], []
    for name, python in environments():
        if name in results:
            continue
        if interpreter_answers(python):
            failures.append(
                "no result: {}: it was not run since the code changed, or it did not come to its "
                "tests".format(name)
            )
        else:
            lines.append("not run: {}: this machine has no Python {}".format(name, python))
    return lines, failures


def failed_commands(folder):
    """Return the failures by environment, those without a result of tests among them."""
    for path in _new(_since(folder), folder, *sorted(_listed(folder))):
        if path.endswith(".json"):
            with open(path, encoding="utf-8") as file:
                failed = json.load(file).get("failed", ())
            name = os.path.basename(path)[: -len(".json")]
            yield from ("failed: {}: {}".format(name, command) for command in failed)


def slowest_tests(results):
    """Return the slowest tests of all environments, the slowest first."""
    tests = [test + (name,) for name, result in results.items() for test in result.durations]
    width = max(len(name) for name, _ in environments())
    yield "the slowest tests:"
    for seconds, test, name in sorted(tests, reverse=True)[:SLOWEST]:
        yield "{:8.1f} s  {:{}}  {}".format(seconds, name, width, test)


def times_by_environment(results):
    """Where the time went, with the sum of what is known."""
    line = "{:>8}  {:>8}  {:>8}  {}".format
    yield line("setup", "tests", "CPU", "(minutes:seconds)")
    times = [[result.times.get(key) for key in TIMES] for result in results.values()]
    sums = [sum(filter(None, column)) for column in zip(*times)] or [0] * len(TIMES)
    for name, seconds in list(zip(results, times)) + [("sum", sums)]:
        yield line(*[_minutes(each) for each in seconds] + [name])


def _minutes(seconds):
    return "?" if seconds is None else "{}:{:02}".format(*divmod(round(seconds), 60))


def whole_time(results):
    """How long the last run of tox took, and a warning if that is too long."""
    times = [result.times for result in results.values() if "began" in result.times]
    if not times:
        return
    last = max(each.get("run", 0) for each in times)
    times = [each for each in times if each.get("run", 0) == last]
    ends = [each["began"] + each["setup"] + each["tests"] for each in times]
    seconds = max(ends) - min(each["began"] for each in times)
    cores = os.cpu_count()
    yield "{} from the first environment's start to the last one's end, on {} cores".format(
        _minutes(seconds), cores
    )
    if seconds > 60 * PROMISED_MINUTES:
        yield (
            "WARNING: the tests took {:.0f} minutes on {} cores; README says at most {} on two"
        ).format(seconds / 60, cores, PROMISED_MINUTES)


def main(folder, *options):
    results = read(folder)
    table = tables(results, page_rows() if "--write" in options else ((), ()))
    print(table)
    for name, result in results.items():
        print("{}: {}".format(name, result))
        for skip in result.skips:
            print("    skipped {}".format(skip))
    for lines in (slowest_tests(results), times_by_environment(results), whole_time(results)):
        print("\n" + "\n".join(lines))
    missing, failures = not_run(results)
    if "--write" in options:
        write_page(table)
        write_page(idiom_table(results), IDIOMS)
        without = [name for name, _ in environments() if name not in results]
        written = "docs/support.md: the rows of {} were written"
        missing, failures = [written.format(_list(results))], []
        if without:
            missing.append("unchanged, no result: {}".format(", ".join(without)))
    failures += failed_commands(folder)
    for name, result in results.items():
        if result.bad:
            failures.append("failed: {}: {}".format(name, result))
            failures += ["    {}".format(failure) for failure in result.failures]
    print("\n".join(missing))
    if "--write" not in options:
        if not missing and not failures:
            for page, made in ((PAGE, table), (IDIOMS, idiom_table(results))):
                if made != page_tables(page):
                    told = "docs/{} has other tables: tox run -e report -- --write"
                    failures.append(told.format(os.path.basename(page)))
        if os.environ.get("CI") and missing:
            failures.append("CI needs every interpreter of the matrix")
    print("\n".join(failures))
    passed, failed, skipped = (
        sum(getattr(result, what) for result in results.values())
        for what in ("passed", "failed", "skipped")
    )
    print("{} passed, {} failed, {} skipped".format(passed, failed, skipped))
    return 1 if failures else 0


def _list(results):
    return ", ".join(name for name, _ in environments() if name in results) or "no environment"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
