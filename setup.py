"""setup.cfg has the metadata. Here: the long description that a package index shows.

README.md has links to other files of the project, which lead nowhere on an index: they become the
files' names, and its picture a caption. Links to its own headings become plain text.
"""

import os
import re

from setuptools import setup


def description():
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "README.md"), "rb") as file:
        text = file.read().decode("utf-8")
    return re.sub(r"!?\[([^\]]+)\]\((?!\w+:)([^)]+)\)", _named, text)


def _named(link):
    text, path = link.groups()
    if path.startswith("#"):
        return text
    return path if text == path else "{} ({})".format(text, path)


setup(long_description=description())
