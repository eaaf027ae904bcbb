"""What no rule about rows says though it is true, as tests/missing_rules.md lists it.

The proofs of the tables compare the page with what they find, or write it:

    COMPAT_WRITE_PAGES=1 python -m pytest tests/backends/theano/test_rules.py
"""

import os

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "missing_rules.md")


def check(title, found):
    """Compare the section of this title with a ``row_proof.Found``, or write it.

    What is missing for inputs that are sums or extremes over the rows is not listed: nothing needs
    it.
    """
    lines = sorted({t for t in found.missing if "Partial(" not in t.partition("]: result")[0]})
    with open(PAGE, encoding="utf-8") as file:
        text = file.read()
    begin = "\n## {}\n\n```text\n".format(title)
    before, heading, rest = text.partition(begin)
    listed, _, after = rest.partition("```\n")
    now = "".join(line + "\n" for line in lines)
    if os.environ.get("COMPAT_WRITE_PAGES"):
        with open(PAGE, "w", encoding="utf-8") as file:
            file.write(before + begin + now + "```\n" + after)
    else:
        assert heading, "{} has no section {!r}".format(PAGE, title)
        assert listed == now, "tests/missing_rules.md lists others; COMPAT_WRITE_PAGES=1 writes it"
