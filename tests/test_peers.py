"""``tests/peers/peers.py``: what it makes of two runs of somebody else's tests."""

import os
import sys

from conftest import ROOT

sys.path.insert(0, os.path.join(ROOT, "tests", "peers"))
import peers

del sys.path[0]

RESULTS = """\
<testsuites><testsuite>
<testcase classname="a" name="same"><properties><property name="split" value="yes"/></properties>
</testcase>
<testcase classname="a" name="breaks">{}</testcase>
<testcase classname="a" name="breaks_too">{}</testcase>
<testcase classname="a" name="never"><failure message="assert 3 == 4"/></testcase>
<testcase classname="a" name="left"><skipped/></testcase>
</testsuite></testsuites>
"""
FAILURE = "<failure message=\"compat.errors.UnsupportedError: model '{0}' of {0} rows&#10;more\"/>"


def test_what_passes_plain_and_fails_parallel_is_told_by_cause(tmp_path):
    path = tmp_path / "results.xml"
    found = []
    for failures in (("", ""), (FAILURE.format(1), FAILURE.format(2))):
        path.write_text(RESULTS.format(*failures))
        found.append(peers.read(str(path)))
    lines, fail = peers.compared(*found)
    assert lines == [
        "plain     3 passed, 1 failed, 1 skipped",
        "parallel  1 passed, 3 failed, 1 skipped",
        "tests that split a batch among devices: 1",
        "",
        "2 x compat.errors.UnsupportedError: model # of # rows",
        "    a::breaks",
        "    a::breaks_too",
    ]
    assert fail == ["a::breaks", "a::breaks_too"]


def test_what_is_skipped_or_not_run_at_all_does_not_pass(tmp_path):
    path = tmp_path / "results.xml"
    path.write_text(RESULTS.format("", ""))
    plain = peers.read(str(path))
    assert peers.compared(plain, plain)[1] == []
    path.write_text(RESULTS.format("<skipped/>", "").replace('name="same"', 'name="other"'))
    lines, fail = peers.compared(plain, peers.read(str(path)))
    assert lines[3:] == [
        "",
        "1 x skipped",
        "    a::breaks",
        "",
        "1 x not run at all",
        "    a::same",
    ]
    assert fail == ["a::breaks", "a::same"]
