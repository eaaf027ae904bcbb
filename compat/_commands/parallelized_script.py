"""What ``compat run --parallelize`` starts in place of a script: it configures, then runs that.

At the end it says so where the script has used one device only.
"""

import atexit
import os
import runpy
import sys
import types
import zipfile
from typing import List

import compat
from compat._configuration.settings import listed
from compat._runtime.process import process

COMMAND = "compat run --parallelize"


def main(arguments: List[str]) -> None:
    """Configure this process, and run a script in it as Python would.

    Arguments:
        arguments: the name of the backend; empty: the script configures; then the script, or "-m"
            and a module, and its arguments.
    """
    backend, script = arguments[0], arguments[1:]
    if backend:
        process.configured_by = COMMAND
        place = compat.configure_gpu(backend=backend, parallelize=True).place
        if place is None or place.rank == 0:
            process.on_parallelized.append(_tell)
    atexit.register(_tell_if_unused, os.getpid())
    run(script)


def run(script: List[str]) -> None:
    """Run a script, or "-m" and a module, in this process as Python would."""
    if script[0] != "-m":
        _run_file(script)
        return
    sys.argv = script[1:]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(script[1], run_name="__main__", alter_sys=True)


def _tell_if_unused(owner):
    if process.uses_devices or os.getpid() != owner or compat.rank() != 0:
        return
    remedy = " With --parallelize, its Keras models run on the simulated devices."
    if process.configuration is None:
        said = "--simulate had no effect: the script never called compat.configure_gpu()."
    elif len(process.configuration.devices) == 1:
        return
    else:
        said = "no model was {}given to compat.parallelize(), so none was divided over {}."
        compiled = "compiled or " if process.parallelizes_compiled else ""
        said = said.format(compiled, listed(process.configuration.devices))
        remedy = "" if compiled else remedy
    sys.stdout.flush()
    print("compat run: " + said + remedy, file=sys.stderr, flush=True)


def _tell(model, where):
    print("compat run: {} runs on {}".format(model, where), file=sys.stderr, flush=True)


def _run_file(arguments):
    """Not by ``runpy``, which takes the module away before functions run that wait for the end.

    But for a folder or an archive with a ``__main__.py``, which Python runs, too.
    """
    path = arguments[0]
    sys.argv = arguments
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    main_module = types.ModuleType("__main__")
    if path == "-":
        folder, name, source = "", "<stdin>", sys.stdin.buffer.read()
    else:
        folder, name = os.path.dirname(os.path.realpath(path)), path
        with open(path, "rb") as file:
            source = file.read()
        main_module.__file__ = path
    sys.path.insert(0, folder)
    vars(main_module)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    exec(compile(source, name, "exec"), vars(main_module))
