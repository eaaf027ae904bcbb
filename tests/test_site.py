"""The documentation's site, as docs/extension.py makes it of the pages; Sphinx is not needed here.

``tox run -e docs`` builds it.
"""

import hashlib
import json
import os
import re
import sys
import types
import xml.etree.ElementTree as ElementTree

import pytest
import sources
from sources import MODULES, ROOT, is_sentence
from test_distribution import headings

import compat
import compat.backend
import compat.testing
import compat.testing.ranks

DOCS = os.path.join(ROOT, "docs")
sys.path.append(DOCS)
import draw  # noqa: E402
import extension  # noqa: E402
import texts  # noqa: E402


def read(*path):
    with open(os.path.join(DOCS, *path), encoding="utf-8") as file:
        return file.read()


def pages():
    """Return the pages' names as Sphinx knows them."""
    for folder, _, names in os.walk(DOCS):
        for name in sorted(names):
            if name.endswith(".md"):
                path = os.path.relpath(os.path.join(folder, name), DOCS)
                yield path[: -len(".md")].replace(os.sep, "/")


def test_index_leads_to_each_page():
    contents = re.findall(r"^([\w/.-]+)$", extension.with_contents(read("index.md")), re.M)
    assert sorted(contents) == sorted(set(pages()) - {"index"})


def test_addresses_of_merged_pages_lead_to_their_sections(tmp_path):
    """docs/check_links.py follows them in the built site."""
    app = types.SimpleNamespace(builder=types.SimpleNamespace(format="html"), outdir=str(tmp_path))
    extension.redirect(app, None)
    assert not set(extension.MOVED) & set(pages())
    for name, target in extension.MOVED.items():
        page, _, anchor = target.partition(".html#")
        assert anchor in headings(os.path.join(DOCS, page + ".md"))
        assert 'url={}"'.format(target) in (tmp_path / (name + ".html")).read_text()


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


# docs/troubleshooting.md ----------------------------------------------------------------------


def test_every_text_has_an_entry():
    """In the one section whose modules are its own; no module is named that is not there."""
    page = read("troubleshooting.md")
    named = [module for _, modules, _ in texts.sections(page) for module in modules]
    assert len(named) == len(set(named))
    assert not [text for text in texts.all_texts() if texts.section_of(text, named) is None]
    for module in named:
        in_errors = module.startswith("compat.errors.") and hasattr(compat.errors, module[14:])
        assert in_errors or module in MODULES, module
    whole = texts.with_texts(page)
    missing = [t for t in texts.all_texts() if texts._fence(texts.readable(t)) not in whole]
    assert not missing


def test_all_texts_of_the_source_are_found():
    """Those that test_texts.py has compared whole, and the shorter ones of errors and warnings."""
    found = {text.template for text in texts.all_texts()}
    for module, (_, source) in MODULES.items():
        if not module.startswith(("compat.testing", "compat.__main__", "compat._commands")):
            assert set(filter(is_sentence, sources.texts(source))) <= found, module
    assert "{}={!r} is not understood. Use a number, 1 or more." in found
    assert "{} cannot be read: {}. {}" in found  # no sentence, but raised


def test_explanations_are_of_texts_of_their_section():
    page = read("troubleshooting.md")
    every = [module for _, modules, _ in texts.sections(page) for module in modules]
    for heading, modules, explanations in texts.sections(page):
        here = [t for t in texts.all_texts() if texts.section_of(t, every) in modules]
        for beginning in explanations:
            matching = [text for text in here if texts.explained_by(text, beginning)]
            assert matching, (heading, beginning)
    assert sum(len(explanations) for _, _, explanations in texts.sections(page)) == page.count(
        "\n- **"
    )


def test_headings_begin_with_the_messages_first_fixed_words():
    headings = [texts.anchor(t) for t in texts.all_texts() if not texts.is_ending(t)]
    assert not [heading for heading in headings if heading.startswith(("<", "..."))]
    readable = {texts.anchor(text): texts.readable(text) for text in texts.all_texts()}
    for heading, text in readable.items():
        assert re.sub(r" \.\.\.$", "", heading) in " ".join(text.split())
    assert "there already, so nothing was written" in headings  # <others> in <abspath>: there ...


SOURCE = '''
"""A docstring, which is no text of an error. At all."""
CONSTANT = "A sentence of more than fifty characters stands in a constant, too."

def check(path, names):
    if not path:
        raise errors.RankError("{!r}: {} and {} more of them".format(path, ", ".join(names), 3))
    warn("{0} is {0}, {size:.1f}".format(path.name, size=path.stat()))
    return "short"
'''


def test_texts_of_a_source():
    found = texts._in_module("compat._ranks", SOURCE)
    assert [(text.kind, texts.readable(text)) for text in found] == [
        (None, "A sentence of more than fifty characters stands in a constant, too."),
        ("RankError", "<path>: <names> and ... more of them"),
        ("CompatWarning", "<name> is <name>, <stat>"),
    ]
    commands = texts._in_module("compat._commands.pins", SOURCE)
    assert [text.kind for text in commands] == ["RankError", "CompatWarning"]


def test_an_entry():
    text = texts.Text(
        "compat._ranks", "RankError", "Rank {}_1 has *no* batches: {}.", (["rank"], {})
    )
    assert texts.entry(text, {"Rank ..._1 has": "It is\nfull."}) == (
        "### Rank \\<rank\\>\\_1 has \\*no\\* batches\n\n"
        "```text\nRank <rank>_1 has *no* batches: ....\n```\n\n"
        "It is full.\n\n{py:obj}`~compat.RankError`"
    )


# docs/draw.py ---------------------------------------------------------------------------------


def test_pictures_are_those_that_are_drawn():
    assert sorted(os.listdir(os.path.join(DOCS, "pictures"))) == sorted(draw.PICTURES)
    for name, picture in draw.PICTURES.items():
        assert read("pictures", name) == str(picture()), "run: python docs/draw.py"
        ElementTree.fromstring(str(picture()))  # is XML
        readme = read(os.pardir, "README.md").replace("(docs/", "(")
        shown = readme + read("how-it-works.md") + read("report.md")
        shown += read("parallelize.md")
        assert "(pictures/{})".format(name) in shown


#: The page that docs/screenshots/report.png shows, as the beginning of its SHA-256.
SHOWN = "f8afce9f467d7dfc"


def test_the_screenshot_is_of_the_report_of_now():
    """Of headless Chromium, 900 pixels wide."""
    with open(os.path.join(DOCS, "recorded_report.json"), encoding="utf-8") as file:
        page = draw.reporting.joined([json.load(file)]).to_html()
    with open(os.path.join(DOCS, "screenshots", "report.png"), "rb") as file:
        content = file.read()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[12:16] == b"IHDR"
    assert int.from_bytes(content[16:20], "big") == 900
    found = hashlib.sha256(page.encode()).hexdigest()[:16]
    assert found == SHOWN, "take docs/screenshots/report.png again, then set SHOWN to " + found
    assert "(screenshots/report.png)" in read("report.md")
