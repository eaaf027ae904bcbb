"""What ``compat run --parallelize`` starts in place of a script: it configures, then runs that."""

import os
import sys
import types

import compat
from compat._process import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List

COMMAND = "compat run --parallelize"


def main(arguments: "List[str]") -> None:
    """Configure this process, and run a script in it as Python would.

    Arguments:
        arguments: the name of the backend, the script, or "-m" and a module, and its arguments.
    """
    backend, script = arguments[0], arguments[1:]
    process.configured_by = COMMAND
    configuration = compat.configure_gpu(backend=backend, parallelize=True)
    place = configuration.place
    if place is None or place.rank == 0:
        process.on_parallelized.append(_tell)
    run(script)


def run(script: "List[str]") -> None:
    """Run a script, or "-m" and a module, in this process as Python would."""
    if script[0] == "-m":
        _run_module(script[1:])
    else:
        _run_file(script)


def _tell(model, where):
    print("compat run: {} runs on {}".format(model, where), file=sys.stderr)
    sys.stderr.flush()


def _run_module(arguments):
    import runpy  # for start-up time

    sys.argv = arguments
    sys.path.insert(0, os.getcwd())
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _run_file(arguments):
    """Not by ``runpy``, which takes the module away before functions run that wait for the end."""
    path = arguments[0]
    sys.argv = arguments
    main_module = types.ModuleType("__main__")
    if path == "-":
        sys.path.insert(0, "")
        source = sys.stdin.buffer.read()
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        with open(path, "rb") as file:
            source = file.read()
        main_module.__file__ = path
    vars(main_module)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    exec(compile(source, "<stdin>" if path == "-" else path, "exec"), vars(main_module))
