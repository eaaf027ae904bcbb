"""setup.cfg says the rest. Here: the description that an index of packages shows.

There links of README.md to other files of the project lead nowhere, and those within it need not
work; they become the files' names, and plain text.
"""

import os
import re

from setuptools import setup


def description():
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "README.md"), "rb") as file:
        text = file.read().decode("utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!\w+:)([^)]+)\)", _named, text)


def _named(link):
    text, path = link.groups()
    if path.startswith("#"):
        return text
    return path if text == path else "{} ({})".format(text, path)


setup(long_description=description())
