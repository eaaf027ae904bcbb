"""How many lines of code folders have, without comments, docstrings and blank lines.

python tests/code_lines.py compat tests
"""

import ast
import collections
import io
import pathlib
import sys
import tokenize

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def _lines_of(found):
    return {line for first, last in found for line in range(first, last + 1)}


def code_lines(source):
    """Return the number of lines of a module that have code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = [(each.start[0], each.end[0]) for each in tokens if each.type not in _NO_CODE]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        (node.body[0].lineno, node.body[0].end_lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    ]
    return len(_lines_of(code) - _lines_of(docstrings))


def main(folders):
    for folder in map(pathlib.Path, folders):
        counts = collections.Counter()
        for path in sorted(folder.rglob("*.py")):
            part = path.relative_to(folder).parts[0]
            counts[part] += code_lines(path.read_text(encoding="utf-8"))
        for part, count in counts.most_common():
            print("{:7} {}/{}".format(count, folder, part))
        print("{:7} {}".format(sum(counts.values()), folder))


if __name__ == "__main__":
    main(sys.argv[1:])
