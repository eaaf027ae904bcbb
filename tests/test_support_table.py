"""The report at the end of a run of tox: nothing is left out unsaid."""

import os
import sys

import pytest
import support_table

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="0" failures="{failures}" skipped="1" tests="{tests}"
 time="7.9"><properties><property name="backend" value="theano" />
<property name="framework" value="theano 1.0.5" /><property name="keras" value="keras 2.2.4" />
</properties><testcase name="test_a"><skipped message="why not" /></testcase>
<testcase name="test_b"><properties><property name="row" value="native" /></properties></testcase>
<testcase name="test_c"><properties><property name="row" value="native" /></properties>{failure}
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

    def run(failures, pythons=(), tests=5, **environ):
        for name, count in failures.items():
            failure = "<failure />" if count else ""
            text = JUNIT.format(failures=count, tests=tests, failure=failure)
            (results / (name + ".xml")).write_text(text)
        for python in pythons:
            (machine / ("python" + python)).symlink_to(sys.executable)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        status = support_table.main(str(results))
        return status, capsys.readouterr().out.splitlines()

    run.results = results
    return run


def everything(**failures):
    counts = {name: 0 for name, _ in support_table.environments()}
    counts.update({name.replace("_", "-"): count for name, count in failures.items()})
    return counts


def test_missing_interpreters_are_named_and_fail_in_ci(run):
    status, lines = run({"py37-theano": 0})
    assert status == 0
    assert "not run: py36-theano: this machine has no Python 3.6" in lines
    assert not [line for line in lines if line.startswith("not run: py37-theano:")]
    assert lines[-1] == "4 passed, 0 failed, 1 skipped"
    status, lines = run({}, CI="true")
    assert status == 1
    assert "CI needs every interpreter of the matrix" in lines


def test_missing_result_fails_where_the_interpreter_is_here(run):
    status, lines = run({"py37-theano": 0}, pythons=["3.6"])
    assert status == 1
    assert "no result: py36-theano: it did not come to its tests" in lines


def test_result_of_an_earlier_run_does_not_count(run):
    run({"py37-theano": 0})
    os.utime(str(run.results / "py37-theano.xml"), (999, 999))
    _, lines = run({})
    assert "not run: py37-theano: this machine has no Python 3.7" in lines
    assert lines[-1] == "0 passed, 0 failed, 0 skipped"


def test_environment_where_every_test_was_skipped_has_failed(run):
    status, lines = run({"py37-theano": 0}, tests=1)
    assert status == 1
    assert "failed: py37-theano: 0 passed, 0 failed, 1 skipped" in lines


def test_failures_fail_and_skips_are_shown(run):
    status, lines = run(everything(py37_theano=2))
    assert status == 1
    assert "py37-theano: 2 passed, 2 failed, 1 skipped in 8 s" in lines
    assert "    skipped test_a: why not" in lines
    row = [line for line in lines if line.startswith("| py37-theano ")]
    assert [cell.strip() for cell in row[0].strip("|").split("|")] == [
        "py37-theano", "3.7", "theano", "theano 1.0.5", "keras 2.2.4", "failed",
    ]  # fmt: skip


def test_features_are_in_the_environments_where_all_their_tests_passed(run):
    _, lines = run({"py36-theano": 0, "py37-theano": 1, "py37-mxnet": 0})
    rows = [line for line in lines if line.startswith("| native")]
    assert [cell.strip() for cell in rows[0].strip("|").split("|")] == [
        "native", "py37-mxnet, py36-theano",
    ]  # fmt: skip


def test_results_of_several_processes_are_added(run):
    run({"py36-theano": 0, "py36-theano.again": 1})
    _, lines = run({})
    assert "py36-theano: 7 passed, 1 failed, 2 skipped in 16 s" in lines


def test_readme_must_have_the_table_and_is_given_it(run, tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text("before\n" + support_table.BEGIN + support_table.END + "after\n")
    monkeypatch.setattr(support_table, "README", str(readme))
    status, lines = run(everything())
    assert status == 1
    assert "README.md has other tables: tox run -e report -- --write" in lines
    assert support_table.main(str(run.results), "--write") == 0
    status, lines = run({})
    assert status == 0
    text = readme.read_text()
    assert text.startswith("before\n" + support_table.BEGIN + "| tox environment ")
    assert text.endswith(" |\n" + support_table.END + "after\n")
