"""The code in the documentation: run a page of it, or check what cannot be run.

A ``python`` block of a page that is run is ``train.py``; a ``diff`` block changes it; in a
``console`` block each line after ``$ `` is a command, and what follows is what it prints; ``...``
stands for anything. What a command that fails prints may be on standard error.
"""

import os
import re
import subprocess
import sys
import textwrap

from sources import ROOT

FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


# Of this process before its tests configure it, which is when this module is imported.
ENVIRON = dict(os.environ)


def blocks(document, sections=None):
    """Return the fenced blocks of a page: their languages ("" where none is named) and their texts.

    Arguments:
        document: its path in the project.
        sections: the headings of those that count (``## ...``); None: the whole page.
    """
    with open(os.path.join(ROOT, *document.split("/")), encoding="utf-8") as file:
        text = file.read()
    if sections:
        parts = re.split("^## ", text, flags=re.MULTILINE)
        by_heading = {part.partition("\n")[0]: part for part in parts}
        text = "\n".join(by_heading[heading] for heading in sections)
    return [(language, textwrap.dedent(text)) for _, language, text in FENCE.findall(text)]


def fragment(document, beginning):
    """Return the block of a page with this beginning, for a test that runs it separately."""
    (text,) = {text for _, text in blocks(document) if text.startswith(beginning)}
    return text


def changed(script, change):
    """Return a script with the lines of a diff replaced."""
    lines = change.splitlines(True)
    before, after = (
        "".join(line[1:] or line for line in lines if line[0] not in skipped) for skipped in "+-"
    )
    assert script.count(before) == 1 or not before.strip(), change
    return script.replace(before, after)


def commands(console):
    """Return the commands of a block, each with a pattern of its output."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, re.escape(printed).replace(re.escape("..."), ".*")


def taken(document, sections=None):
    """Return the blocks that ``run`` runs, without scripts that are replaced before a command."""
    scripts = []  # and changes, that no command has run yet
    for language, text in blocks(document, sections):
        if language == "python":
            scripts = [text]
        elif language == "diff":
            scripts.append(text)
        elif language == "console":
            yield from scripts + [text]
            scripts = []


def run(document, folder, environ, sections=None, changes=()):
    """Run the commands of a page in a folder, and compare their output.

    ``python`` and ``compat`` are this interpreter and its compat.

    Arguments:
        document: the path of the page.
        folder: the current folder of the commands.
        environ: their environment.
        sections: the headings of those to run; None: the whole page.
        changes: pairs of a part of one command and of what runs in its place.

    Returns:
        How many commands were run.
    """
    count, script = 0, os.path.join(str(folder), "train.py")
    programs = os.path.dirname(sys.executable)
    folders = list(filter(None, [ROOT, environ.get("PYTHONPATH")]))
    environ = dict(environ, PATH=programs + os.pathsep + environ["PATH"])
    environ.update(PYTHONPATH=os.pathsep.join(folders))
    environ.update(HOME=str(folder))  # no keras.json of somebody's
    environ.pop("COMPAT_VERIFY", None)  # as users have it: under simulate=, one step is verified
    unchanged = dict(changes)
    for language, text in blocks(document, sections):
        if language in ("python", "diff"):
            if language == "diff":
                with open(script) as file:
                    text = changed(file.read(), text)
            with open(script, "w") as file:
                file.write(text)
        for command, printed in commands(text) if language == "console" else ():
            for part in [part for part in unchanged if part in command]:
                command = command.replace(part, unchanged.pop(part))
            completed = subprocess.run(
                re.sub("^compat ", "python -m compat ", command),
                shell=True,
                cwd=str(folder),
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                universal_newlines=True,
                timeout=300,
            )
            # What frameworks log is not on the pages.
            said = [completed.stdout] + [completed.stderr] * bool(completed.returncode)
            matches = [each for each in said if re.match(printed + r"\Z", each, re.DOTALL)]
            is_right = matches and (printed or not completed.returncode)
            assert is_right, (command, completed.stdout, completed.stderr)
            # TensorFlow 1.15 logs which code reads names that it deprecates.
            compats = f"From {os.path.join(ROOT, 'compat', '')}"
            assert compats not in completed.stderr, (command, completed.stderr)
            count += 1
    assert not unchanged
    return count
