"""The sources of compat, for tests that read them."""

import ast
import functools
import os
import re

# Shorter texts are phrases that texts are put together from.
SHORTEST = 50

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _modules():
    found = {}
    for folder, _, files in os.walk(os.path.join(ROOT, "compat")):
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                module = os.path.relpath(path, ROOT)[: -len(".py")].replace(os.sep, ".")
                module = module[: -len(".__init__")] if name == "__init__.py" else module
                with open(path, encoding="utf-8") as file:
                    found[module] = path, file.read()
    return found


MODULES = _modules()


@functools.lru_cache(None)
def tree(source):
    """A source, parsed."""
    return ast.parse(source)


@functools.lru_cache(None)
def texts(source):
    """The texts in a source, without docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {
        node.body[0].value
        for node in nodes
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in nodes:
        if type(node).__name__ in ("Constant", "Str") and node not in docstrings:
            text = node.value if hasattr(node, "value") else node.s
            if isinstance(text, str):
                found.append(text)
    return found


def is_sentence(text):
    """Not a list of names, nor the pattern of a regular expression."""
    return len(text) >= SHORTEST and " " in text and re.search(r"[a-z{}'\")]\. |\.$", text)
