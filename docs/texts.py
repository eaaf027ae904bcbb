"""The texts of compat's errors and warnings, read from its source, for docs/troubleshooting.md.

The page's sections name the modules whose texts follow there
(``Texts of `compat._configuration.detection` ``), and explain some of them: a list item begins with
the beginning of a text in bold.
"""

import ast
import collections
import functools
import re
import string
import textwrap

from sources import MODULES, is_sentence, template, text_nodes

import compat

OF = re.compile(r"^Texts of (`[\w.]+`(?:,\s+`[\w.]+`)*)\.$", re.MULTILINE)
EXPLANATION = re.compile(r"^- \*\*(.+?)\*\* (.+?)(?=\n- \*\*|\n\n|\Z)", re.MULTILINE | re.DOTALL)
# What ends an error, in a text of its own.
ENDING = re.compile(
    "(Build|Call|Compute|Give|Have|Install|Leave|Likely|Look|Make|Pass|Put|Remove|See|Set|Start|"
    "Use) "
)

# What is filled in at the beginning of a text, and single words between.
FILLED_IN = re.compile(r"(?:(?:<[^<>]*>|\.\.\.)[^\w<]*(?:\w+ (?=<|\.\.\.))?)*")

CLASSES = [name for name in compat.__all__ if name.endswith(("Error", "Warning"))]

#: place: the module, for ``compat.errors`` with the function; kind: the class of the error or
#: "CompatWarning", or None where the source does not tell; names: of what is filled in.
Text = collections.namedtuple("Text", "place kind template names")


@functools.lru_cache(maxsize=None)
def all_texts():
    """Every text of an error or a warning, in the order of the source."""
    found = collections.OrderedDict()
    for module in sorted(MODULES):
        if module.startswith("compat.testing") or module == "compat.__main__":
            continue
        for text in _in_module(module, MODULES[module][1]):
            found.setdefault((text.place, text.template), text)
    return list(found.values())


def _in_module(module, source):
    tree = ast.parse(source)
    kinds, names, functions, left_out = {}, {}, {}, set()
    if module.startswith("compat._commands"):  # constants there are what --help prints
        assigned = [node.value for node in tree.body if isinstance(node, ast.Assign)]
        left_out.update(inside for value in assigned for inside in ast.walk(value))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            if node.body and isinstance(node.body[0], ast.Expr):
                left_out.add(node.body[0].value)
        if isinstance(node, ast.FunctionDef):
            for inside in ast.walk(node):
                functions.setdefault(inside, node.name)
        if isinstance(node, ast.Call):
            called = _name(node.func)
            if called == "format" and isinstance(node.func, ast.Attribute):
                filled = [_name(argument) for argument in node.args]
                names[node.func.value] = filled, {k.arg: _name(k.value) for k in node.keywords}
            called = "CompatWarning" if called == "warn" else called
            if called in CLASSES and node.args:
                for inside in ast.walk(node.args[0]):
                    kinds[inside] = called
        if isinstance(node, ast.JoinedStr):
            filled = [part for part in node.values if isinstance(part, ast.FormattedValue)]
            names[node] = [_name(part.value) for part in filled], {}
    for node in sorted(text_nodes(tree), key=lambda node: (node.lineno, node.col_offset)):
        text = template(node)
        if text is None:
            continue
        kind = kinds.get(node)
        if node not in left_out and (is_sentence(text) or kind and " " in text and len(text) > 20):
            place = module
            if module == "compat.errors":
                place += "." + functions.get(node, "")
            yield Text(place, kind, text, names.get(node, ([], {})))


def _name(node):
    """Return a word for an expression."""
    if isinstance(node, ast.Name):
        return node.id.strip("_")
    if isinstance(node, ast.Attribute):
        return node.attr.strip("_")
    if isinstance(node, ast.Call) and node.args and _name(node.func) in ("join", "repr", "str"):
        return _name(node.args[0])
    if isinstance(node, ast.Call) and _name(node.func) in ("format", "map", "sorted"):
        return "..."
    for inner in ("func", "value"):
        if isinstance(getattr(node, inner, None), ast.AST):
            return _name(getattr(node, inner))
    return "..."


def readable(text):
    """Return a template with a name for each placeholder, in angle brackets."""
    positional, keywords = text.names
    parts, count = [], 0
    try:
        fields = list(string.Formatter().parse(text.template))
    except ValueError:  # a text with braces that is no template
        return text.template
    if not positional and not keywords and "{}" not in text.template:
        return text.template
    for literal, field, _, _ in fields:
        parts.append(literal)
        if field is None:
            continue
        if field == "" or field.isdigit():
            place = int(field) if field else count
            count += 1
            name = positional[place] if place < len(positional) else "..."
        else:
            name = keywords.get(field, field)
        parts.append("..." if name == "..." else "<{}>".format(name))
    return "".join(parts)


def anchor(text):
    """Return the beginning of a text, from its first fixed words on, for a heading."""
    plain = " ".join(readable(text).split())
    plain = plain[FILLED_IN.match(plain).end() :]
    first = re.split(r"(?<=[a-z0-9)>'\"]{2})[.:;] ", plain)[0].rstrip(".:")
    first = first if len(first) > 25 else plain
    return first if len(first) <= 90 else first[:87].rpartition(" ")[0] + " ..."


def sections(page):
    """Return the page's sections: headings, modules, and explanations by beginnings of texts."""
    for part in re.split("^## ", page, flags=re.MULTILINE)[1:]:
        listed = OF.search(part)
        if listed:
            modules = re.findall(r"`([\w.]+)`", listed.group(1))
            yield part.partition("\n")[0], modules, dict(EXPLANATION.findall(part))


def section_of(text, modules):
    """Return the longest of the names that is, or is above, the place of a text, or None."""
    fitting = [m for m in modules if text.place == m or text.place.startswith(m + ".")]
    return max(fitting, key=len) if fitting else None


def explained_by(text, beginning):
    """Whether an explanation is of this text; ``...`` stands for what is filled in."""
    plain = " ".join(re.sub(r"<[^<>]*>", "...", readable(text)).split())
    return plain.startswith(" ".join(beginning.split()))


def with_texts(page):
    """Return the page with an entry for each text."""
    texts, every = all_texts(), [m for _, modules, _ in sections(page) for m in modules]
    parts = re.split("\n(?=## )", page)
    result = []
    for part in parts:
        listed = OF.search(part)
        if not listed:
            result.append(part)
            continue
        modules = re.findall(r"`([\w.]+)`", listed.group(1))
        explanations = dict(EXPLANATION.findall(part))
        head = EXPLANATION.sub("", OF.sub("", part)).rstrip()
        here = [text for text in texts if section_of(text, every) in modules]
        entries = [entry(text, explanations) for text in here if not is_ending(text)]
        endings = sorted({readable(text) for text in here if is_ending(text)})
        if endings:
            entries.append(
                "Errors of this section may end with:\n\n" + "\n".join(map(_fence, endings))
            )
        result.append(head + "\n\n" + "\n\n".join(entries) + "\n")
    return "\n".join(result)


def is_ending(text):
    return text.kind is None and bool(ENDING.match(text.template.strip()))


def entry(text, explanations):
    """One text: a heading, the text whole, its class, and what explains it."""
    heading = re.sub(r"([\\`*_{}\[\]<>#|!$~^])", r"\\\1", anchor(text))
    said = [why for beginning, why in explanations.items() if explained_by(text, beginning)]
    lines = ["### " + heading, _fence(readable(text))]
    if said:
        lines.append(" ".join(said[0].split()))
    if text.kind:
        lines.append("{{py:obj}}`~compat.{}`".format(text.kind))
    return "\n\n".join(lines)


def _fence(text):
    lines = [textwrap.fill(line, 90, break_long_words=False) for line in text.splitlines()]
    return "```text\n{}\n```".format("\n".join(lines).strip("\n"))
