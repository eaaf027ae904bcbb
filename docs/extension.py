"""What Sphinx does with the pages besides MyST's Markdown, so that they read well on a code host.

- Links out of this folder become the files' names: the site has no such pages.
- The contents at the side are the links of index.md.
- A list item of api.md that is a name of compat's is followed by its documentation.
- A line that is nothing but a link to a file in jobs/ is followed by the file.
- A section of troubleshooting.md gets the texts of the modules that it names: see texts.py.
- The address of a page that was merged into another one leads there.
"""

import importlib
import inspect
import os
import re

import texts

HERE = os.path.dirname(os.path.abspath(__file__))

LINK = re.compile(r"^- \[[^\]]+\]\(([\w/.-]+)\.md\)", re.MULTILINE)
SECTIONS = {
    "Arguments:": "param",
    "Attributes:": "ivar",
    "Raises:": "raises",
    "Returns:": "returns",
}
NAME = re.compile(r"^- `(compat(?:\.\w+)+)`(?:: (.+))?$", re.MULTILINE)
FILE = re.compile(r"^\[(jobs/([\w.-]+))\]\(\1\)$", re.MULTILINE)
#: Where the contents of removed pages are now.
MOVED = {
    "clusters": "launchers.html#jobs",
    "rows": "how-it-works.html#operations-that-need-the-whole-batch",
}
REDIRECT = """\
<!doctype html>
<meta charset="utf-8">
<title>{0}</title>
<meta http-equiv="refresh" content="0; url={0}">
<a href="{0}">{0}</a>
"""
LEXERS = {".sh": "bash", ".yaml": "yaml", ".py": "python", ".toml": "toml"}


def without_links_outside(text, page):
    """Links to files that are not in this folder as text: the link's, and the file's name."""

    def name(link):
        text, target = link.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(page), target.partition("#")[0]))
        if not path.startswith(".."):
            return link.group()
        path = path.lstrip("./").replace(os.sep, "/")
        return text if text.strip("`") == path else "{} (`{}`)".format(text, path)

    return re.sub(r"\[([^\]]+)\]\((\.\./[^)]+)\)", name, text)


def with_contents(text):
    """index.md with the trees of contents that its lists of links are, one for each heading."""
    trees = []
    for part in re.split("^## ", text, flags=re.MULTILINE)[1:]:
        pages = LINK.findall(part)
        if pages:
            caption = part.partition("\n")[0]
            trees.append(
                "```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```\n".format(
                    caption, "\n".join(pages)
                )
            )
    return text + "\n" + "\n".join(trees)


def with_documentation(text):
    """api.md with the directive of autodoc in place of each name."""
    return NAME.sub(
        lambda item: "\n```{{eval-rst}}\n{}\n```\n".format(directive(*item.groups())), text
    )


def public(name):
    """Return the object of a name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def directive(name, description):
    """Return an object's documentation: its docstring, or for data the text in api.md."""
    value = public(name)
    if description:
        return ".. py:data:: {}\n\n   {}".format(name, description.replace("`", "``"))
    if inspect.isclass(value):
        if issubclass(value, Exception):
            return ".. autoexception:: {}\n   :show-inheritance:".format(name)
        return ".. autoclass:: {}\n   :members:\n   :inherited-members:".format(name)
    return ".. autofunction:: " + name


def sections(app, what, name, value, options, lines):
    """Turn the sections of a docstring into fields of reStructuredText, as a hook of autodoc.

    Each paragraph of a section is one of its items, ``name: text``, or all that is returned.
    """
    field, result = None, []
    for line in lines:
        if line in SECTIONS:
            field = SECTIONS[line]
            result.append("")
            if field == "returns":
                result.append(":returns:")
        elif line and not line.startswith(" "):
            field = None
            result.append(line)
        elif field in (None, "returns") or line.startswith("     ") or not line:
            result.append(line)
        else:
            item, _, text = line.strip().partition(":")
            result.append(":{} {}:{}".format(field, item.replace("*", r"\*"), text))
    lines[:] = result + [""]


def skipped(app, what, name, value, skip, options):
    """Skip the tests of a contract, which subclasses do not call, as a hook of autodoc."""
    return True if name.startswith("test_") else None


def with_files(text):
    """Return a page with the files of jobs/ in place of its links to them."""

    def included(link):
        path, name = link.groups()
        lexer = LEXERS[os.path.splitext(name)[1]]
        return "```{{literalinclude}} {}\n:language: {}\n:caption: {}\n```".format(
            path, lexer, path
        )

    return FILE.sub(included, text)


def read(app, page, source):
    """Change a page's text before MyST reads it, as a hook of Sphinx."""
    text = without_links_outside(source[0], page)
    text = with_files(text)
    if page == "index":
        text = with_contents(text)
    if page == "troubleshooting":
        text = texts.with_texts(text)
    if page == "api":
        text = with_documentation(text)
    source[0] = text


def outdated(app, env, added, changed, removed):
    """Return the pages that are made of compat's source, too, as a hook of Sphinx."""
    return ["api", "troubleshooting"]


def redirect(app, error):
    """Write a page for each address of MOVED, as a hook of Sphinx."""
    if error is None and app.builder.format == "html":
        for name, target in MOVED.items():
            path = os.path.join(app.outdir, name + ".html")
            with open(path, "w", encoding="utf-8") as file:
                file.write(REDIRECT.format(target))


def setup(app):
    app.connect("build-finished", redirect)
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", sections)
    app.connect("autodoc-skip-member", skipped)
    return {"parallel_read_safe": True}
