"""``python .../compat/_runtime/by_path.py MODULE ARGUMENTS...``: run a module of this very package.

``python -m compat`` looks for ``compat`` in the current folder first, where a script of the user's
may have that name. What compat starts, here and on other machines, is started by path instead.
"""

import os
import sys
from typing import Any, List, Mapping, Optional

#: The folder of this package.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def command(module: str) -> "List[str]":
    """Return the command that runs ``compat.<module>`` with the arguments that follow it."""
    return [sys.executable, os.path.abspath(__file__), module]


def load(module: str) -> "Any":
    """Import ``compat.<module>`` of the package that this file belongs to."""
    import importlib.util

    if "compat" not in sys.modules:
        path = os.path.join(PACKAGE, "__init__.py")
        spec = importlib.util.spec_from_file_location("compat", path)
        assert spec is not None and spec.loader is not None
        package = sys.modules["compat"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module("compat." + module)


def shadow(folder: str, environ: "Mapping[str, str]") -> "Optional[str]":
    """Return the file that ``import compat`` finds in a script's folder instead of this package.

    Looks where Python does before it comes to installed packages: in the script's own folder,
    whatever the current one is, and in ``PYTHONPATH``. Imports nothing.

    Returns:
        The path of the file, or None where there is none or it is a copy of this package.
    """
    import importlib.machinery

    path = environ.get("PYTHONPATH")
    paths = [folder] + (path.split(os.pathsep) if path else [])
    spec = importlib.machinery.PathFinder.find_spec("compat", paths)
    if spec is None or not spec.has_location or spec.origin is None:  # or a folder of no package
        return None
    other = os.path.abspath(spec.origin)
    this_file = os.path.relpath(os.path.abspath(__file__), PACKAGE)
    return None if os.path.exists(os.path.join(os.path.dirname(other), this_file)) else other


if __name__ == "__main__":
    # Python puts this folder first, whose files are no modules of their own.
    if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    sys.exit(load(sys.argv[1]).main(sys.argv[2:]))
