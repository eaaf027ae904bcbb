"""``python -m keras_gpu_compat``: the command line of ``compat`` by a name that is nobody else's.

``python -m compat`` looks in the current folder first, where there may be a ``compat.py``.
"""

import importlib.util
import os
import sys


def main(arguments=None):
    """Run one command of ``compat``'s and return its exit status."""
    path = os.path.join(
        os.path.dirname(os.path.abspath(__file__)), "compat", "_runtime", "by_path.py"
    )
    spec = importlib.util.spec_from_file_location("by_path", path)
    assert spec is not None and spec.loader is not None
    by_path = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(by_path)
    return by_path.load("__main__").main(arguments)


if __name__ == "__main__":
    sys.exit(main())
