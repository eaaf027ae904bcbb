"""The program that ``compat run`` starts in place of a script, for what is done around it.

``--parallelize`` has it configure first, and ``--report`` report in the end; ``--timeline`` has it
record what devices execute, from the first model that is parallelized. ``--simulate`` has it say in
the end where the script has used one device only. Each rank leaves its outcome for ``compat run``.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import socket
import sys
import types
import zipfile
from typing import Any, Dict, List

from .. import _api, _ranks, errors
from .._api import device_use
from .._configuration.settings import listed
from .._ranks.launch.messages import HOLD, OUTCOME_VARIABLE, RELEASE
from .._runtime import by_path, operation_times, safe_files
from .._runtime.process import process
from . import saved_files

#: The line in front of a report.
REPORT = "compat run: what each device did"


def main(arguments: List[str]) -> None:
    """Run a script in this process, as Python would.

    Arguments:
        arguments: whether to report; the name of the backend to configure for ``--parallelize``,
            empty where the script configures; the files that get the report as JSON, the report as
            HTML and the timeline, or nothing; then the script, or "-m" and a module, and its
            arguments.
    """
    (reports, backend, as_json, as_html, timeline), script = arguments[:5], arguments[5:]
    owner = os.getpid()
    left = os.environ.pop(OUTCOME_VARIABLE, None)  # not for processes that the script starts
    failures: List[BaseException] = []
    leave: "Any" = None  # what a rank leaves for ``compat run``

    if reports or left is not None:
        outcome: Dict[str, Any] = _watched_outcome() if left is not None else {}

        def report():
            if os.getpid() != owner:  # it has been forked
                return
            use = device_use.report() if reports else None
            if left is None:
                show(use, as_json, as_html)
            else:
                outcome.update(_outcome(), report=use and use.as_dict())
                outcome["saved"] = sorted(outcome["saved"])
                safe_files.write(left, json.dumps(outcome))

        def report_first(model, where):
            """Report before a framework ends that has been imported since."""
            atexit.unregister(report)
            atexit.register(report)

        atexit.register(report)
        process.on_parallelized.append(report_first)
        leave = None if left is None else report
    recording = contextlib.ExitStack()
    outcomes = _record(timeline, recording) if timeline else []
    try:
        if backend:
            process.configured_by = "compat run --parallelize"
            place = _api.configure_gpu(backend=backend, parallelize=True).place
            if place is None or place.rank == 0:
                process.on_parallelized.append(_say_where)
        if left is None and (backend or not reports):
            atexit.register(_say_if_unused, owner, failures)
        if script[0] == "-m":
            sys.argv = script[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script[1], run_name="__main__", alter_sys=True)
        else:
            _run_file(script)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            failures.append(error)
        sys.excepthook = _without_own_frames(sys.excepthook, leave)
        raise
    finally:
        if os.getpid() == owner:  # none that has been forked
            recording.close()
            if outcomes:
                _say("compat run: " + outcomes[-1])


def _watched_outcome():
    """Return the part of this rank's outcome that is collected while the script runs."""
    saved: "Dict[str, Any]" = {"saved": set()}
    saved_files.note(saved["saved"])
    return saved


def _outcome():
    """Return the outcome of this rank, for ``job_findings``."""
    return {
        "host": socket.gethostname(),
        "together": process.uses_devices or _has_own_communication(),
        "refused": process.refused,
        "parallelizes_compiled": process.parallelizes_compiled,
    }


def _has_own_communication():
    """Return whether the script may train its ranks together without compat."""
    if any(name in sys.modules for name in ("horovod", "mpi4py")):
        return True
    if "TF_CONFIG" not in os.environ:
        return False
    names = "MultiWorkerMirroredStrategy", "CollectiveAllReduceStrategy"
    strategies = [each for each in gc.get_objects() if type(each).__name__ in names]
    ours = [getattr(engine, "strategy", None) for engine in process.engines.values()]
    return any(strategy not in ours for strategy in strategies)


def _without_own_frames(hook, leave):
    """Return a function that calls a ``sys.excepthook``, without frames that only watch the script.

    Arguments:
        hook: the function that Python, or the script, has there.
        leave: a function that leaves the outcome of a rank, which may be ended soon; None: this is
            no rank. ``compat run`` shows the same traceback of several ranks once.
    """
    own = {__file__, os.path.abspath(by_path.__file__), saved_files.__file__}

    def from_script(trace):
        while trace is not None and trace.tb_frame.f_code.co_filename in own:
            trace = trace.tb_next
        if trace is not None and sys.version_info >= (3, 7):  # before, it cannot be changed
            trace.tb_next = from_script(trace.tb_next)
        return trace

    def excepthook(kind, error, trace):
        trace = from_script(trace)
        if leave is not None:
            with contextlib.suppress(Exception):  # called again at the end
                leave()
        is_pythons = hook is sys.__excepthook__ and sys.stderr is sys.__stderr__
        is_held = leave is not None and issubclass(kind, Exception) and is_pythons
        if is_held:
            print(HOLD, file=sys.stderr, flush=True)
        hook(kind, error.with_traceback(trace), trace)
        if is_held:
            print(RELEASE, file=sys.stderr, flush=True)

    return excepthook


def _say(text):
    """Print a line, after all that the script has printed."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def _say_where(model, where):
    _say(f"compat run: {model} runs on {where}")


def _say_if_unused(owner, failures):
    if process.uses_devices or failures or os.getpid() != owner:
        return
    remedy = " With --parallelize, its Keras models run on the simulated devices."
    if process.configuration is None:
        problem = "--simulate had no effect: the script never called compat.configure_gpu()."
    elif len(process.configuration.devices) == 1:
        return
    else:
        compiled, remedy = ("compiled or ", "") if process.parallelizes_compiled else ("", remedy)
        problem = f"no model was {compiled}given to compat.parallelize()"
        if process.refused:
            problem, remedy = errors.not_parallelized(process.refused), ""
        problem += f", so none was split over {listed(process.configuration.devices)}."
    _say("compat run: " + problem + remedy)


def _run_file(arguments):
    """Run a file as Python would; by ``runpy`` only a folder or an archive with a ``__main__.py``.

    ``runpy`` takes the module away before functions run that wait for the end.
    """
    path = arguments[0]
    sys.argv = arguments
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    main_module = types.ModuleType("__main__")
    with open(path, "rb") as file:
        source = file.read()
    if sys.version_info >= (3, 9):  # as Python does since then
        path = os.path.abspath(path)
    main_module.__file__ = path
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    vars(main_module)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    exec(compile(source, path, "exec"), vars(main_module))


def _record(path, recording):
    """Have a timeline recorded from the first model that is parallelized to the end of a stack.

    Returns:
        A list of outcomes, whose last one is printed once the stack has ended well.
    """
    outcomes = [f"--timeline {path}: no model was parallelized, so nothing was recorded."]

    def begin(model, where):
        if len(outcomes) == 1:
            path_of_rank = operation_times.of_rank(path, _ranks.own_place())
            outcomes.append(
                f"the timeline is in {path_of_rank}; open it at https://ui.perfetto.dev"
            )
            recording.enter_context(device_use.timeline(path))

    process.on_parallelized.append(begin)
    recording.callback(process.on_parallelized.remove, begin)
    return outcomes


def show(report, as_json, as_html):
    """Print a report, and write it to files, if any."""
    _say(f"{REPORT}\n{report}")
    if as_json:
        safe_files.write(as_json, report.to_json() + "\n")
    if as_html:
        safe_files.write(as_html, report.to_html())
