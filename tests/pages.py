"""Run a page of the documentation: its scripts, what it changes in them, and its commands.

A ``python`` block is ``train.py``; a ``diff`` block changes it; in a ``console`` block each line
after ``$ `` is a command, and what follows is what it prints, to standard error where it fails;
``...`` stands for anything.
"""

import os
import re
import subprocess


def blocks(path):
    """The fenced blocks of a page: their languages and their texts."""
    with open(path) as file:
        return re.findall(r"^```(\w+)\n(.*?)^```$", file.read(), re.DOTALL | re.MULTILINE)


def changed(script, change):
    """A script with the lines of a diff replaced."""
    lines = change.splitlines(True)
    before, after = (
        "".join(line[1:] or line for line in lines if line[0] not in skipped) for skipped in "+-"
    )
    assert script.count(before) == 1 or not before.strip(), change
    return script.replace(before, after)


def commands(console):
    """The commands of a block, and a pattern of what each prints."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, re.escape(printed).replace(re.escape("..."), ".*")


def run(path, folder, environ):
    """Do what the page says in a folder, and compare.

    Returns:
        How many commands were run.
    """
    count, script = 0, os.path.join(str(folder), "train.py")
    for language, text in blocks(path):
        if language in ("python", "diff"):
            if language == "diff":
                with open(script) as file:
                    text = changed(file.read(), text)
            with open(script, "w") as file:
                file.write(text)
        for command, printed in commands(text) if language == "console" else ():
            completed = subprocess.run(
                command,
                shell=True,
                cwd=str(folder),
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                universal_newlines=True,
                timeout=300,
            )
            # What frameworks log is not on the pages.
            said = completed.stderr if completed.returncode else completed.stdout
            assert re.match(printed + r"\Z", said, re.DOTALL), (command, said, completed.stderr)
            count += 1
    return count
