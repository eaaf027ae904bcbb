"""What the pages claim: sentences have tests, and numbers are those of the results."""

import json
import os
import re

import claims
import pytest
import support_table
from sources import ROOT

from compat._configuration import tested_versions


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


# Sentences and their tests --------------------------------------------------------------------


def test_the_boldest_sentences_have_tests():
    table = claims.tests()
    without = [each for each in claims.bold() if not claims.tests_of(*each, table)]
    assert without == [], "weaken them, or name their tests in tests/claims.txt"


def test_the_sentences_that_have_tests_are_on_the_pages():
    found = {page: list(claims.sentences(read(*page.split("/")))) for page in claims.pages()}
    for page, beginning in claims.tests():
        assert [s for s in found[page] if s.startswith(beginning)], (page, beginning)


@pytest.mark.parametrize("test", sorted({t for tests in claims.tests().values() for t in tests}))
def test_their_tests_exist(test):
    path, _, name = test.partition("::")
    assert re.search(r"^ *def {}\(".format(name), read(*path.split("/")), re.MULTILINE)


def test_sentences_of_a_page():
    page = "# Every heading\n\nIt does. Each\nrow, [always](a.md#b).\n\n```\nnever\n```\n\n"
    page += "- `any`: so\n  it is\n- two\n\n| a | every cell |\n\n[Is any?](b.md) No. ![All](c)\n"
    found = [sentence for sentence in claims.sentences(page) if sentence]
    cells = ["a", "every cell", "No."]
    assert found == ["It does.", "Each row, [always].", "`any`: so it is", "two"] + cells


def test_all_and_same_claim_nothing_in_conditions_requirements_and_cells():
    claim = ["Any", "All ranks train.", "If two differ, all end.", "It is the same: see [there]."]
    none = [
        "the same",
        "It ends if all ranks fail, and waits.",
        "Ranks need the same data.",
        "`all`.",
    ]
    assert [each for each in claim + none if claims.is_bold(each)] == claim


def test_the_pages_can_be_read():
    """At most 30,000 words, without the backends' pages: what has a letter or a digit is one."""
    pages = [page for page in claims.pages() if page.count("/") < 2]
    words = [word for page in pages for word in read(*page.split("/")).split()]
    assert len([word for word in words if re.search("[A-Za-z0-9]", word)]) <= 30000


# What was tried -------------------------------------------------------------------------------


def test_the_first_screen_says_that_no_gpu_has_run_it():
    assert "**No GPU has run compat yet**" in "".join(read("README.md").splitlines(True)[:25])
    assert "nothing on this page has been tried on a GPU" in read("docs", "configure_gpu.md")
    assert re.match("# .*overhead on two CPU cores\n", read("docs", "benchmarks.md"))
    assert "How fast" not in read("docs", "index.md")


def test_the_readme_names_the_versions_of_tensorflow_2_that_ci_tests():
    rows, _ = support_table.page_rows()
    frameworks = {row[3] for row in rows if row[2] == "tensorflow2"}
    versions = sorted((re.findall(r"(\d+)\.(\d+)", name)[0] for name in frameworks), key=_number)
    listed = [".".join(version) for version in versions]
    assert len(listed) == 5
    text = "of TensorFlow 2 these five: {} and {}.".format(", ".join(listed[:-1]), listed[-1])
    assert text in " ".join(read("README.md").split())


def _number(version):
    return tuple(map(int, version))


def test_the_two_calls_are_the_same_where_a_process_drives_several_devices():
    """CNTK drives one, and ranks need a third call."""
    readme = " ".join(read("README.md").split())
    first = readme.partition("Two calls, the same on ")[2].partition(":")[0]
    drives = re.findall(
        r"^\| \[([\w ]+)\]\(docs/backends.* \| (yes|no) \|", read("README.md"), re.M
    )
    assert len(drives) == len(tested_versions.pip_extras.EXTRAS)
    for name, answer in drives:
        assert (name in first) == (answer == "yes"), name
    assert "`compat.shard()` around its data, runs as ranks" in readme
    assert "the same two calls run as" not in " ".join(read("docs", "ranks.md").split())


# Numbers --------------------------------------------------------------------------------------


def test_what_is_slower_is_what_was_measured():
    results = json.loads(read("benchmarks", "results.json"))
    page = " ".join(read("docs", "choosing.md").split())
    first = [
        (found["compat"] / peer, found["verified"] / peer)
        for name, works in results["figures"].items()
        if name.startswith("first")
        for found in works.values()
        for peer in [found.get("peer", found["plain"])]
    ]
    compat, verified = zip(*first)
    assert (
        "{:.1f} to {:.1f} times that of a peer, or [up to {:.1f} times when verified]".format(
            min(compat), max(compat), max(verified)
        )
        in page
    )
    of_fits = {
        kind: max(
            found["wall"][len(found["wall"]) // 2]
            for name, found in results["rows"].items()
            if name.endswith(kind)
        )
        for kind in ("-fit-1", "-on-batch")
    }
    assert "[up to {:.1f} and {:.1f} times]".format(*of_fits.values()) in page
    norms = [
        found["steps"]["on"]["wall"] / found["steps"]["off"]["wall"]
        for name, found in results["figures"].items()
        if name.startswith("norm")
    ]
    assert "[up to {:.1f} times]".format(max(norms)) in page


def test_the_model_of_more_gpus_is_what_it_computes(monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(ROOT, "benchmarks"))
    model = __import__("cluster_model")
    rows = [row for row in model.table(model.figures()) if row[1] in ("8", "64")]
    shares = [row[5:7] for row in rows if (row[0].startswith("ranks"), row[1]) != (True, "8")]
    page = " ".join(read("docs", "benchmarks.md").split())
    replicas, ranks = shares
    assert "reach {} of linear speed for ResNet-50 and {} for VGG-16".format(*replicas) in page
    assert "which exchange parts of it, {} and {}.".format(*ranks) in page
