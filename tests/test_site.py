"""The documentation's site, as docs/extension.py makes it of the pages; Sphinx is not needed here.

``tox run -e docs`` builds it.
"""

import os
import re
import sys

import pytest
from sources import ROOT

import compat
import compat.backend
import compat.testing
import compat.testing.ranks

DOCS = os.path.join(ROOT, "docs")
sys.path.append(DOCS)
import extension  # noqa: E402


def read(*path):
    with open(os.path.join(DOCS, *path), encoding="utf-8") as file:
        return file.read()


def pages():
    """The pages' names as Sphinx knows them."""
    for folder, _, names in os.walk(DOCS):
        for name in sorted(names):
            if name.endswith(".md"):
                path = os.path.relpath(os.path.join(folder, name), DOCS)
                yield path[: -len(".md")].replace(os.sep, "/")


def test_index_leads_to_each_page():
    contents = re.findall(r"^([\w/.-]+)$", extension.with_contents(read("index.md")), re.M)
    assert sorted(contents) == sorted(set(pages()) - {"index"})


def test_reference_has_each_public_name():
    listed = [name for name, _ in extension.NAME.findall(read("api.md"))]
    assert len(listed) == len(set(listed))
    documented = {id(extension.public(name)) for name in listed if callable(extension.public(name))}
    for module in (compat, compat.backend, compat.testing):
        for name in module.__all__:
            full = "{}.{}".format(module.__name__, name)
            value = extension.public(full)
            is_there = full in listed or callable(value) and id(value) in documented
            assert is_there or name == "__version__", full


def test_reference_says_what_data_is():
    for name, description in extension.NAME.findall(read("api.md")):
        assert bool(description) != callable(extension.public(name)), name


DOCSTRING = """\
What it does.

Arguments:
    first: what it
        is.
    *others: more: of them.

        A paragraph.

Returns:
    A thing: this one.

Raises:
    A, B: both.

The end."""
FIELDS = """\
What it does.

:param first: what it
        is.
:param \\*others: more: of them.

        A paragraph.

:returns:
    A thing: this one.

:raises A, B: both.

The end."""


def test_sections_of_docstrings():
    lines = DOCSTRING.splitlines()
    extension.sections(None, "function", "name", None, None, lines)
    assert re.sub("\n\n+", "\n\n", "\n".join(lines).strip()) == FIELDS


@pytest.mark.parametrize(
    "page, text, result",
    [
        ("ci", "[tests/a](../tests/a)", "tests/a"),
        ("ci", "[`tests/a`](../tests/a)", "`tests/a`"),
        ("ci", "[how](../CONTRIBUTING.md#tests) to", "how (`CONTRIBUTING.md`) to"),
        ("backends/jax", "[ranks](../ranks.md#data)", "[ranks](../ranks.md#data)"),
        ("backends/jax", "[a](../../README.md)", "a (`README.md`)"),
    ],
)
def test_links_out_of_the_folder(page, text, result):
    assert extension.without_links_outside(text, page) == result


def test_files_stand_below_the_links_to_them():
    line = "Before.\n\n[jobs/a.sh](jobs/a.sh)\n\nAfter [jobs/b.sh](jobs/b.sh)."
    assert extension.with_files(line) == (
        "Before.\n\n```{literalinclude} jobs/a.sh\n:language: bash\n:caption: jobs/a.sh\n```"
        "\n\nAfter [jobs/b.sh](jobs/b.sh)."
    )
