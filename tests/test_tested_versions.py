"""The versions that compat is tested with: the table, and what is said of other versions."""

import re

import pytest
import versions

from compat._configuration import pip_extras, tested_versions


def test_each_pair_is_there_once():
    names = [versions.name_of(pair) for pair in tested_versions.pairs()]
    assert len(set(names)) == len(names)
    assert {pair.extra for pair in tested_versions.pairs()} <= set(pip_extras.TABLE)
    texts = list(map(str, tested_versions.pairs()))
    assert set(tested_versions.FAULTS) <= {pair.framework for pair in tested_versions.pairs()}
    assert set(versions.EDGES) <= set(texts)


def test_pins_of_setup_cfg_are_within_the_ranges():
    """A version that a row of tox.ini installs is not warned of."""
    for extra, backend in pip_extras.BACKENDS.items():
        assert tested_versions.ranges(backend), extra


@pytest.mark.parametrize(
    "installed, word",
    [
        ("0.4.19", "older"),
        ("0.4.20", None),
        ("0.10.99", None),
        ("0.11.0.dev2", "newer"),
        ("1.0", "newer"),
        ("unknown", None),
    ],
)
def test_versions_outside_of_the_range(monkeypatch, installed, word):
    monkeypatch.setattr(tested_versions, "_PAIRS", JAX)
    warnings = tested_versions.outside("jax", {"jax": installed, "keras": "3.15.9"})
    expected = (
        "jax {} is {} than the versions that compat is tested with, 0.4.20 to 0.10.2. `compat "
        "test` shows whether a script of yours trains to the same numbers on several devices with "
        "it."
    )
    assert warnings == [expected.format(installed, word)] * bool(word)


JAX = """
jax 3.11 keras
    jax==0.4.20 keras==3.0.5 jaxlib==0.4.20 numpy<2
    jax==0.10.2 keras==3.15.1
    jax==0.9.1 keras==3.14.1
"""


def test_a_backend_of_a_third_party_has_no_range():
    assert tested_versions.ranges("toy") == {}
    assert tested_versions.outside("toy", {"keras": "9.0"}) == []


def test_newest_of_pairs(monkeypatch):
    monkeypatch.setattr(tested_versions, "_PAIRS", JAX)
    pairs = tested_versions.pairs()
    assert str(tested_versions.newest(pairs)) == "jax==0.10.2 keras==3.15.1"
    assert str(tested_versions.newest(pairs, keras="3.14")) == "jax==0.9.1 keras==3.14.1"
    assert str(tested_versions.newest(pairs, framework="0.4")) == "jax==0.4.20 keras==3.0.5"
    assert tested_versions.newest(pairs, framework="0.1") is None  # and not 0.10


# The page -------------------------------------------------------------------------------------


def test_the_page_has_a_line_for_each_pair():
    """And what a line says is what `compat pins` takes for granted."""
    rows = versions.rows_of_page()
    expected = {}
    for pair in tested_versions.pairs():
        cells = versions.row(pair, {"faults": {}, "seconds": 0})
        expected[tuple(cells[:3])] = (pair.fault or "holds").partition("; ")[0]
    said = {pair: cells[-1].partition("; ")[0] for pair, cells in rows.items()}
    assert said == expected


SPELLED = {"tensorflow": "TensorFlow", "keras": "Keras", "mxnet": "MXNet", "theano": "Theano"}
SPELLED.update(jax="JAX", cntk="CNTK")


@pytest.mark.parametrize("backend", pip_extras.EXTRAS)
def test_pages_name_the_ranges_of_the_table(backend):
    """The README, and the page of the backend."""
    readme = (versions.ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\| \[.*docs/backends/{}.md.*".format(backend), readme, re.MULTILINE)
    page = versions.ROOT / "docs" / "backends" / (backend + ".md")
    first = " ".join(page.read_text(encoding="utf-8").split("\n\n")[1].split())
    for name, tested in tested_versions.ranges(backend).items():
        text = " to ".join(re.sub(r"\.post.*", "", version) for version in tested)
        is_keras = "keras" in name
        assert "{} {}".format(SPELLED.get(name, name), text) in (line if is_keras else first)
        assert text in first and text in line


def test_a_line_of_the_page(monkeypatch):
    monkeypatch.setattr(tested_versions, "_PAIRS", JAX)
    pair = tested_versions.pairs()[0]
    result = {"tests": 90, "seconds": 70, "faults": {}}
    line = ["3.11", "jax 0.4.20", "keras 3.0.5", "passed", "3 of 3", "same", "holds"]
    assert versions.row(pair, result) == line
    result["faults"] = {"test_a": "AssertionError", "examples/vae.py": "x", "two ranks": "y"}
    assert versions.row(pair, result)[3:] == [
        "fails",
        "2 of 3",
        "fails",
        "does not hold: test_a",
    ]
    monkeypatch.setitem(tested_versions.FAULTS, pair.framework, "No ranks; JAX 0.4.30 has them.")
    assert versions.row(pair, result)[-1] == "No ranks; JAX 0.4.30 has them."
    refused = {"two ranks": "JAX cannot train as rank 1 of 2. Install 0.4.26; or later."}
    result.update(faults={"two ranks": "y"}, refused=refused)
    assert versions.row(pair, result)[3:6] == ["passed", "3 of 3", "fails"]
    assert versions.row(pair, result)[-1].endswith("two ranks: Install 0.4.26; or later.")
    assert versions.row(pair, {"faults": {"installation": "x"}})[3:5] == ["fails", "0 of 3"]


def test_pairs_that_differ_in_versions_alone_are_one_line():
    rows = list(versions.rows_of_page().values())
    lines = list(versions.lines_of(rows))
    assert len(lines) < len(rows) / 4
    assert list(versions.rows_of(lines)) == rows
    table = versions.support_table.markdown(versions.COLUMNS, lines)
    assert table == versions.support_table.page_tables(str(versions.PAGE))


def test_what_is_printed_of_a_pair():
    (pair,) = [each for each in tested_versions.pairs() if str(each) == "tensorflow==1.13.2"]
    said = versions.told(pair, {"tests": 9, "seconds": 70, "faults": {}})
    assert said == "py3.7-tensorflow-1.13.2-tf.keras: holds (9 tests, 70 s)"
    faults = {"test_{}".format(n): "wrong" for n in range(5)}
    said = versions.told(pair, {"tests": 9, "seconds": 70, "faults": faults})
    assert said.splitlines()[0].endswith(": does not hold (9 tests, 70 s)")
    assert said.splitlines()[1] == "    test_0: wrong"
    assert said.splitlines()[-1] == "    ... and 2 more, in the log"
