"""Each text of an error or a warning is compared whole by a test, wherever it is raised."""

import itertools
import os
import re

from sources import MODULES, ROOT, SHORTEST, is_sentence, texts

# Texts that a test compares in more than one part, by their beginnings.
IN_PARTS = ("Theano's flags say device={}, but compat chose {}",)


def _expected():
    """All texts in the tests, also as they are without the escapes of a pattern."""
    places = [os.path.join(ROOT, "tests"), os.path.join(ROOT, "compat", "testing")]
    for folder, _, names in itertools.chain.from_iterable(map(os.walk, places)):
        for name in names:
            if name.endswith(".py") and name not in (os.path.basename(__file__), "test_errors.py"):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    for text in texts(file.read()):
                        yield text
                        if "\\" in text:
                            yield re.sub(r"\\(.)", r"\1", text)


def _holds(text, parts):
    """Whether the parts stand in the text, one after the other."""
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_every_text_is_compared_whole():
    expected, missing = {text for text in _expected() if len(text) > SHORTEST // 2}, []
    for module, (_, source) in MODULES.items():
        if module.startswith("compat.testing") or module == "compat.__main__":
            continue  # test_main.py compares the whole help
        for text in filter(is_sentence, texts(source)):
            parts = [part for part in re.split(r"\{[^{}]*\}", text) if part]
            if not text.startswith(IN_PARTS) and not any(_holds(e, parts) for e in expected):
                missing.append("{}: {}".format(module, text))
    assert not missing
