"""The boldest sentences of the pages, and the tests that are named after them.

    python tests/claims.py

prints the sentences of the README and of docs/ that say always, never, any, every, all or same,
with their tests, as tests/claims.txt has them: a page and the beginning of a sentence, and below
it the tests. test_claims.py fails where one has none: write the sentence so that it claims less, or
name its test there. Other sentences may be there, too.

"All" and "same" claim nothing in a condition or requirement ("if all ranks fail", "ranks need the
same data"), and in a cell of a table or an item that is no sentence ("the same").
"""

import collections
import os
import re
import sys

from pages import FENCE
from sources import ROOT

BOLDEST = re.compile(r"\b(always|never|any|every)\b", re.IGNORECASE)
BOLD = re.compile(r"\b(all(?!-)|same)\b", re.IGNORECASE)
CONDITION = re.compile(
    r"\b(if|when|where|whether|unless|until|as long as)\b[^,;:.]*", re.IGNORECASE
)
REQUIREMENT = re.compile(r"[^,;:.]*\b(must|needs?|ha(ve|s) to)\b[^,;:.]*")
FULL_STOP = re.compile(r"[.:]\W*$")
GENERATED = re.compile(r"<!-- (generated table|\w+: written).*?<!-- end of .*?-->", re.DOTALL)
HEADING = re.compile(r"^#.*$", re.MULTILINE)
#: Where a paragraph, an item of a list or a cell of a table ends.
ENDS = re.compile(r"\n\s*\n|\n(?= *(?:-|\d\.) )|\|")
SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[])")
CODE = re.compile(r"`[^`]*`")
TITLE = re.compile(r"\[[^]]*\?\]\([^)]*\)")  # of a page that is a question
PICTURE = re.compile(r"!\[[^]]*\]\([^)]*\)")
ADDRESS = re.compile(r"(?<=\])\([^)]*\)")
TABLE = os.path.join(ROOT, "tests", "claims.txt")


def pages():
    """Yield the paths of all pages, from the project's folder."""
    yield "README.md"
    for folder, _, names in sorted(os.walk(os.path.join(ROOT, "docs"))):
        for name in sorted(names):
            if name.endswith(".md"):
                yield os.path.relpath(os.path.join(folder, name), ROOT).replace(os.sep, "/")


def sentences(text):
    """Yield the sentences of a page, without pictures, addresses, headings, and blocks of code."""
    for pattern in (FENCE, GENERATED, HEADING, TITLE, PICTURE, ADDRESS):
        text = pattern.sub("", text)
    for part in ENDS.split(text):
        yield from SENTENCE.split(" ".join(part.split()).lstrip("- "))


def is_bold(sentence):
    """Return whether a sentence claims something with one of the words, outside of code."""
    text = CODE.sub("", sentence)
    if BOLDEST.search(text):
        return True
    return bool(
        FULL_STOP.search(text) and BOLD.search(REQUIREMENT.sub("", CONDITION.sub("", text)))
    )


def bold():
    """Yield the sentences that have to have tests: (page, sentence)."""
    for page in pages():
        with open(os.path.join(ROOT, page), encoding="utf-8") as file:
            for sentence in sentences(file.read()):
                if is_bold(sentence):
                    yield page, sentence


def tests():
    """Return the tests by (page, beginning of a sentence)."""
    found, key = collections.OrderedDict(), None
    with open(TABLE, encoding="utf-8") as file:
        for line in filter(str.strip, file):
            if line.startswith(" "):
                found[key].append(line.strip())
            else:
                key = tuple(line.strip().split(": ", 1))
                found[key] = []
    return found


def tests_of(page, sentence, table):
    """Return the tests of a sentence."""
    entries = [names for (of, begin), names in table.items() if of == page]
    begins = [begin for (of, begin) in table if of == page]
    return [n for begin, names in zip(begins, entries) if sentence.startswith(begin) for n in names]


def main():
    table, without = tests(), 0
    for page, sentence in bold():
        found = tests_of(page, sentence, table)
        without += not found
        print("{}: {}".format(page, sentence), *found, sep="\n    ")
    print("{} of these sentences name no test".format(without))


if __name__ == "__main__":
    sys.exit(main())
