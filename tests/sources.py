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
    """Return a source, parsed."""
    return ast.parse(source)


@functools.lru_cache(None)
def nodes(parsed):
    """All nodes of a tree, which takes longer than to parse it."""
    return list(ast.walk(parsed))


def template(node):
    """Return a text, of an f-string as a format for ``str.format()``; None of other constants."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            template(part)
            if isinstance(part, ast.FormattedValue)
            else template(part).replace("{", "{{").replace("}", "}}")
            for part in node.values
        )
    if isinstance(node, ast.FormattedValue):
        conversion = "" if node.conversion == -1 else "!" + chr(node.conversion)
        spec = "" if node.format_spec is None else ":" + template(node.format_spec)
        return "{" + conversion + spec + "}"
    text = node.value if hasattr(node, "value") else node.s
    return text if isinstance(text, str) else None


def text_nodes(parsed):
    """Return the nodes of all texts, an f-string as a whole."""
    strings = [node for node in nodes(parsed) if isinstance(node, ast.JoinedStr)]
    parts = {part for node in strings for part in ast.walk(node) if part is not node}
    kinds = "Constant", "Str", "JoinedStr"
    return [node for node in nodes(parsed) if type(node).__name__ in kinds and node not in parts]


@functools.lru_cache(None)
def texts(source):
    """Return the texts in a source, without docstrings."""
    parsed = tree(source)
    docstrings = {
        node.body[0].value
        for node in nodes(parsed)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = [template(node) for node in text_nodes(parsed) if node not in docstrings]
    return [text for text in found if text is not None]


def is_sentence(text):
    """Not a list of names, nor the pattern of a regular expression."""
    return len(text) >= SHORTEST and " " in text and re.search(r"[a-z{}'\")]\. |\.$", text)
