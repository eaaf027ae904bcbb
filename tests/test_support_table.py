"""The report at the end of a run of tox, and the tables that it writes."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import support_table

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="0" failures="{failures}" skipped="1" tests="{tests}"
 time="7.9"><properties><property name="backend" value="theano" />
<property name="framework" value="theano 1.0.5" /><property name="keras" value="keras 2.2.4" />
<property name="contract" value="{contract}" /><property name="cpu" value="70.3" />
</properties><testcase classname="tests.test_file" name="test_a" time="0.001">
<skipped message="why not" /></testcase>
<testcase classname="tests.test_file.TestClass" name="test_b" time="{slowest}">
<properties><property name="row" value="native" /></properties></testcase>
<testcase classname="tests.test_file" name="test_c" time="1.500">
<properties><property name="row" value="native" /></properties>{failure}
</testcase></testsuite>
</testsuites>
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Report on results, by environment, on a machine with these Pythons and no other."""
    monkeypatch.delenv("CI", raising=False)
    machine, results = tmp_path / "bin", tmp_path / "results"
    wheels = tmp_path / ".pkg" / "dist"
    for folder in (machine, results, wheels):
        folder.mkdir(parents=True)
    (wheels / "a.whl").write_text("")
    os.utime(str(wheels / "a.whl"), (1000, 1000))
    monkeypatch.setenv("PATH", str(machine))
    idioms = tmp_path / "idioms.md"
    idioms.write_text(support_table.BEGIN + support_table.idiom_table({}) + support_table.END)
    monkeypatch.setattr(support_table, "IDIOMS", str(idioms))

    def run(failures, pythons=(), began=500, minutes=3, tox=1, options=(), **results_have):
        values = dict({"tests": 5, "contract": "whole", "slowest": 2}, **results_have)
        for name, count in failures.items():
            failure = '<failure message="no GPU&#10;more" />' if count else ""
            text = JUNIT.format(failures=count, failure=failure, **values)
            (results / (name + ".xml")).write_text(text)
            times = {"run": tox, "began": began, "setup": 65, "tests": minutes * 60 - 65}
            (results / (name + ".json")).write_text(json.dumps(times))
        for python in pythons:
            (machine / ("python" + python)).symlink_to(sys.executable)
        status = support_table.main(str(results), *options)
        return status, capsys.readouterr().out.splitlines()

    run.results = results
    return run


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Return a page of features without rows."""
    page = tmp_path / "support.md"
    page.write_text("before\n" + support_table.BEGIN + support_table.END + "after\n")
    monkeypatch.setattr(support_table, "PAGE", str(page))
    return page


def row_of(lines, name):
    """Return the cells of the row of an environment, or of a feature."""
    (row,) = [line for line in lines if line.startswith("| {} ".format(name))]
    return support_table.cells(row)


def everything(**failures):
    counts = {name: 0 for name, _ in support_table.environments()}
    counts.update({name.replace("_", "-"): count for name, count in failures.items()})
    return counts


def test_missing_interpreters_are_named_and_fail_in_ci(run, monkeypatch):
    status, lines = run({"py37-theano": 0})
    assert status == 0
    assert "not run: py36-theano: this machine has no Python 3.6" in lines
    assert not [line for line in lines if line.startswith("not run: py37-theano:")]
    assert lines[-1] == "4 passed, 0 failed, 1 skipped"
    monkeypatch.setenv("CI", "true")
    status, lines = run({})
    assert status == 1
    assert "CI needs every interpreter of the matrix" in lines


def test_missing_result_fails_where_the_interpreter_is_here(run):
    status, lines = run({"py37-theano": 0}, pythons=["3.6"])
    assert status == 1
    assert (
        "no result: py36-theano: it was not run since the code changed, or it did not come to its "
        "tests" in lines
    )


def test_result_of_older_code_does_not_count(run):
    run({"py37-theano": 0})
    os.utime(str(run.results / "py37-theano.xml"), (999, 999))
    _, lines = run({})
    assert "not run: py37-theano: this machine has no Python 3.7" in lines
    assert lines[-1] == "0 passed, 0 failed, 0 skipped"


def test_result_counts_when_another_environment_is_run_later(run):
    """Each run of tox builds a wheel, of the same code."""
    run({"py37-theano": 0})
    later = time.time() + 1000
    os.utime(str(run.results.parent / ".pkg" / "dist" / "a.whl"), (later, later))
    _, lines = run({})
    assert "py37-theano: 4 passed, 0 failed, 1 skipped" in lines


def test_report_works_before_tox_has_built_anything(run):
    shutil.rmtree(str(run.results.parent / ".pkg"))
    status, lines = run({})
    assert status == 0
    assert lines[-1] == "0 passed, 0 failed, 0 skipped"


def test_core_on_another_python_counts_and_is_no_row(run):
    status, lines = run({"core": 1})
    assert status == 1
    assert "failed: core: 3 passed, 1 failed, 1 skipped" in lines
    assert not [line for line in lines if line.startswith("| core")]
    assert "| native  | none            |" in lines


def test_environment_where_every_test_was_skipped_has_failed(run):
    status, lines = run({"py37-theano": 0}, tests=1)
    assert status == 1
    assert "failed: py37-theano: 0 passed, 0 failed, 1 skipped" in lines


def test_failures_fail_and_skips_are_shown(run):
    status, lines = run(everything(py37_theano=2))
    assert status == 1
    assert "py37-theano: 2 passed, 2 failed, 1 skipped" in lines
    assert "    skipped test_a: why not" in lines
    shown = lines.index("    test_file::test_c: no GPU")
    assert lines[shown + 1] == "        more"
    assert row_of(lines, "py37-theano") == [
        "py37-theano", "3.7", "theano", "theano 1.0.5", "keras 2.2.4", "whole", "failed",
    ]  # fmt: skip


def test_failed_commands_are_named_and_fail(run):
    """Of environments without tests as well, and until those are run again."""
    lint = run.results / "lint.json"
    lint.write_text(json.dumps({"failed": ["ruff check ."]}))
    status, lines = run({"py37-theano": 0})
    assert status == 1
    assert lines[-2] == "failed: lint: ruff check ."
    os.utime(str(lint), (999, 999))
    status, _ = run({})
    assert status == 0


def test_features_are_in_the_environments_where_all_their_tests_passed(run):
    _, lines = run({"py36-theano": 0, "py37-theano": 1, "py37-mxnet": 0})
    assert row_of(lines, "native") == ["native", "py37-mxnet, py36-theano"]


def test_results_of_several_processes_are_added(run):
    _, lines = run({"py36-theano": 0, "py36-theano.again": 1})
    assert "py36-theano: 7 passed, 1 failed, 2 skipped" in lines
    assert rows_of_times(lines)["py36-theano"] == ["1:05", "1:55", "2:21"]  # CPU


def test_page_must_have_the_tables_and_is_given_them(run, page):
    status, lines = run(everything())
    assert status == 1
    assert "docs/support.md has other tables: tox run -e report -- --write" in lines
    assert support_table.main(str(run.results), "--write") == 0
    status, lines = run({})
    assert status == 0
    text = page.read_text()
    assert text.startswith("before\n" + support_table.BEGIN + "| tox environment ")
    assert text.endswith(" |\n" + support_table.END + "after\n")


def test_only_rows_that_have_results_are_written(run, page):
    run(everything())
    support_table.main(str(run.results), "--write")
    before = support_table.page_rows()
    shutil.rmtree(str(run.results))
    run.results.mkdir()
    run({"py37-theano": 1}, contract="span", pythons=["3.6"])
    status, lines = run({}, options=["--write"])
    assert status == 1  # a test failed
    assert "docs/support.md: the rows of py37-theano were written" in lines
    untouched = [line for line in lines if line.startswith("unchanged, no result: ")]
    names = [name for name, _ in support_table.environments()]
    names.remove("py37-theano")
    assert untouched[0].partition(": ")[2].split(", ") == names
    assert not [line for line in lines if line.startswith(("no result", "not run"))]
    first, second = support_table.page_rows()
    changed = [row for row, old in zip(first, before[0]) if row != old]
    assert changed == [
        ["py37-theano", "3.7", "theano", "theano 1.0.5", "keras 2.2.4", "span", "failed"]
    ]
    assert second == [["native", ", ".join(names)]]
    assert "| native  | all of one process but py37-theano; py36-core, " in page.read_text()


def test_nothing_is_written_where_there_are_no_results(run, page):
    run(everything(), options=["--write"])
    for result in run.results.iterdir():
        result.unlink()
    text = page.read_text()
    _, lines = run({}, options=["--write"])
    assert "docs/support.md: the rows of no environment were written" in lines
    assert page.read_text() == text


VERDICTS = """<testsuites><testsuite tests="2" skipped="0" failures="1" errors="0">
<testcase classname="a" name="b" time="0"><properties>
<property name="verdict" value="{0}: Lambda: arithmetic" /></properties></testcase>
<testcase classname="a" name="c" time="0"><properties>
<property name="verdict" value="split: CTC" /></properties><failure message="" /></testcase>
</testsuite></testsuites>"""


def test_verdicts_of_idioms_are_written_by_environment(run, page):
    found = {"py37-theano": "split", "py311-jax": "unsplit"}
    support_table.write_page("", support_table.IDIOMS)
    for name, verdict in found.items():
        (run.results / (name + ".models.xml")).write_text(VERDICTS.format(verdict))
    run({}, options=["--write"])
    assert support_table.verdicts() == {
        name: {"CTC": "split", "Lambda: arithmetic": verdict} for name, verdict in found.items()
    }
    (run.results / "py37-theano.models.xml").write_text(VERDICTS.format("refused"))
    (run.results / "py311-jax.models.xml").unlink()
    run({"py311-jax": 0}, options=["--write"])  # which did not come to its idioms
    found["py37-theano"] = "refused"
    assert {
        name: each["Lambda: arithmetic"] for name, each in support_table.verdicts().items()
    } == found


def test_verdicts_that_differ_have_a_reason():
    """JAX's have one in common: XLA splits what computes across rows, too."""
    with open(support_table.IDIOMS, encoding="utf-8") as file:
        reasons = file.read().partition(support_table.END)[2]
    found = support_table.verdicts()
    assert len(found) > 1 and set(found.pop("py311-jax").values()) <= {"split", "-", "one device"}
    kinds = {
        idiom: {verdicts[idiom] for verdicts in found.values()} - {"-"}
        for idiom in next(iter(found.values()))
    }
    differing = {idiom for idiom, verdicts in kinds.items() if len(verdicts) > 1}
    explained = "; ".join(re.findall(r"^\| (\w.+?) +\|", reasons, re.M)).split("; ")
    assert sorted(explained) == sorted(differing | {"idiom"})


def test_lists_of_environments_are_those_that_were_shortened():
    alone = support_table.of_one_process()
    matrix = [name for name, _ in support_table.environments()]
    few, most = ", ".join(alone[:9]), [name for name in matrix if name not in alone[1:3]]
    assert support_table.shortened(few) == support_table.expanded(few) == few
    assert support_table.shortened(", ".join(alone)) == support_table.ONE_PROCESS
    for names in (alone, alone[3:], alone[3:] + ["py37-theano-mpi"], most, matrix):
        listed = ", ".join(sorted(names, key=matrix.index))
        assert len(support_table.shortened(listed)) < len(listed)
        assert support_table.expanded(support_table.shortened(listed)) == listed


def test_rows_with_the_same_cells_are_one():
    rows = [["a", "x", "y"], ["b", "x", ""], ["c", "x", "y"]]
    assert support_table.merged(rows) == [["a; c", "x", "y"], ["b", "x", ""]]
    assert support_table.unmerged(support_table.merged(rows)) == rows


def test_the_pages_have_no_row_twice():
    """So that a table of a hundred rows is one of thirty."""
    for page in (support_table.PAGE, support_table.IDIOMS):
        table = support_table.page_tables(page).rpartition("\n\n")[2]
        cells = [tuple(support_table.cells(line)[1:]) for line in table.splitlines()]
        assert len(set(cells)) == len(cells) > 20


def rows_of_times(lines):
    """Return the table of times: setting up, tests and CPU by environment."""
    start = lines.index("   setup     tests       CPU  (minutes:seconds)") + 1
    rows = [line.split() for line in lines[start : lines.index("", start)]]
    return {row[-1]: row[:-1] for row in rows}


def test_times_of_environments_and_their_sum(run):
    run({"py36-theano": 0}, minutes=5)
    _, lines = run({"py37-theano": 0})
    assert rows_of_times(lines) == {
        "py36-theano": ["1:05", "3:55", "1:10"],
        "py37-theano": ["1:05", "1:55", "1:10"],
        "sum": ["2:10", "5:50", "2:21"],
    }


def test_times_that_are_missing_or_old_are_unknown(run):
    run({"py36-theano": 0, "py37-theano": 0, "py38-theano": 0})
    (run.results / "py36-theano.json").unlink()
    os.utime(str(run.results / "py37-theano.json"), (999, 999))
    _, lines = run({})
    assert rows_of_times(lines) == {
        "py36-theano": ["?", "?", "1:10"],
        "py37-theano": ["?", "?", "1:10"],
        "py38-theano": ["1:05", "1:55", "1:10"],
        "sum": ["1:05", "1:55", "3:31"],
    }


def test_slowest_tests_of_all_environments(run):
    run({"py36-theano": 0}, slowest=2)
    run({"py37-theano": 0}, slowest=9.26)
    _, lines = run({"py38-theano": 0}, slowest=1.25)
    start = lines.index("the slowest tests:") + 1
    slowest = [line.split() for line in lines[start : lines.index("", start)]]
    assert slowest[:2] == [
        ["9.3", "s", "py37-theano", "TestClass::test_b"],
        ["2.0", "s", "py36-theano", "TestClass::test_b"],
    ]
    assert [test[0] for test in slowest] == "9.3 2.0 1.5 1.5 1.5 1.2 0.0 0.0 0.0".split()
    assert "test_file::test_c" in slowest[2]


def test_slowest_tests_are_no_more_than_a_person_reads(run):
    _, lines = run(everything())
    start = lines.index("the slowest tests:") + 1
    assert lines.index("", start) - start == 30


@pytest.mark.parametrize("minutes", [support_table.PROMISED_MINUTES + late for late in (-1, 1)])
def test_tests_that_take_too_long_are_warned_of(run, monkeypatch, minutes):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    run({"py36-theano": 0})
    status, lines = run({"py37-theano": 0}, began=560, minutes=minutes - 1)
    assert status == 0
    time = "{}:00 from the first environment's start to the last one's end, on 2 cores".format(
        minutes
    )
    promised = support_table.PROMISED_MINUTES
    warning = "WARNING: the tests took {} minutes on 2 cores; README says at most {} on two"
    warnings = [warning.format(minutes, promised)] * (minutes > promised)
    assert time in lines
    assert [line for line in lines if "WARNING" in line] == warnings


def test_time_is_that_of_the_last_run(run):
    run({"py36-theano": 0}, began=500, minutes=3, tox=400)
    _, lines = run({"py37-theano": 0}, began=90000, minutes=2, tox=89000)
    assert [line for line in lines if " from the first environment's start" in line] == [
        "2:00 from the first environment's start to the last one's end, on {} cores".format(
            os.cpu_count()
        )
    ]


def test_contract_is_what_the_first_process_ran(run):
    run({"py36-theano": 0}, contract="span")
    _, lines = run({"py36-theano.again": 0, "py37-theano": 0}, contract="whole")
    contracts = [row_of(lines, "py3{}-theano".format(minor))[5] for minor in (6, 7, 8)]
    assert contracts == ["span", "whole", ""]  # the last one was not run


BUSY = """
import subprocess
import sys


def test_that_starts_a_process():
    one_second = "import time\\nwhile time.process_time() < 1: pass"
    subprocess.check_call([sys.executable, "-c", one_second])
"""


def test_results_have_the_cpu_of_tests_and_what_they_start(tmp_path):
    """tests/conftest.py records it, here as a plugin."""
    file, junit = tmp_path / "test_busy.py", str(tmp_path / "results.xml")
    file.write_text(BUSY)
    path = os.pathsep.join([os.path.join(support_table.ROOT, "tests"), support_table.ROOT])
    subprocess.check_call(
        [sys.executable, "-m", "pytest", "-p", "conftest", "--junitxml", junit, str(file)],
        cwd=str(tmp_path),
        env=dict(os.environ, PYTHONPATH=path),
    )
    assert support_table.Result([junit], {}).times["cpu"] > 1
