"""A test of a script as it is: on simulated devices, then as ranks, with a verdict on both."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from typing import Any, Dict, List, Optional

from .. import _ranks, _verification, errors
from .._configuration import detection
from .._configuration.settings import listed
from .._ranks import nesting
from .._ranks.launch import output
from .._runtime import by_path
from ..backend import Backend
from . import check_script, name_of, reported_script

RANKS = 2
#: How many training steps of each model are verified.
STEPS = 3
# Seconds that an interrupted script has to save something, say, before it is killed.
GRACE = 5.0
#: Exit statuses: several devices do the same as one; they do not, or the script failed; or nothing
#: differs, but not everything was compared.
SAME, DIFFERS, NOT_COMPARED = 0, 1, 3
# Errors by which compat refuses a rank: the ranks have not trained.
_REFUSALS = re.compile(
    r"compat\.errors\.(?:NotInstalledError|BrokenInstallError|UnsupportedError): (.+)"
)


def verify_script(
    script: List[str],
    devices: Optional[int],
    backend: Optional[str],
    ranks: Optional[int],
    synchronizes: bool,
    outcome: Dict[str, Any],
) -> int:
    """Run a script as it is, twice, and print a verdict.

    Arguments:
        script: its path, or "-m" and a module, and its arguments.
        devices: how many simulated ones; None: 3.
        backend: its name; None: the one that Keras would use.
        ranks: as how many ranks the second time; None: 2; 0: not at all.
        synchronizes: whether batch normalization uses the whole batch's statistics.
        outcome: a dictionary for the results that are printed.

    Returns:
        The exit status: ``SAME`` if several devices did the same as one, and ranks stayed the same;
        ``DIFFERS`` if not, or if the script failed; ``NOT_COMPARED`` if nothing differed where not
        everything was compared, or the script did not run as ranks, such as without their engine.

    Raises:
        InvalidArgumentError: there is no such script, or it is a notebook.
        NotInstalledError, AmbiguousBackendError: as ``configure_gpu()``.
    """
    check_script(script, os.path.isfile(script[0]))
    devices = devices or 3
    chosen, _ = detection.choose(backend, os.environ, typed=True)
    has_ranks = type(chosen).distribute is not Backend.distribute
    paths = [os.path.dirname(by_path.PACKAGE), os.environ.get("PYTHONPATH")]  # "" is this folder
    path = os.pathsep.join(filter(None, paths))  # the script finds this compat
    environ = nesting.set_aside(os.environ)[0]  # the simulated devices are those of one process
    environ.update(COMPAT_VERIFY=str(STEPS), PYTHONPATH=path, **chosen.recording)
    environ.update(detection.keras_variable(chosen, os.environ))
    if synchronizes:
        environ["COMPAT_SYNC_BATCH_NORM"] = "1"
    name = name_of(script)
    other = by_path.shadow(os.path.dirname(os.path.realpath(script[0])), {})
    if other:
        output.say("compat test: " + errors.shadowed(name, other))
    outcome.update(backend=chosen.name, script=name, ranks=None)
    with tempfile.TemporaryDirectory(prefix="compat-test-") as path:
        folder = pathlib.Path(path)
        lines = _on_replicas(script, environ, chosen, devices, outcome, folder)
        size = RANKS if ranks is None else ranks
        missing = _missing_engine(chosen, size, environ) if size and has_ranks else None
        if missing:
            lines += ["", _refused(size, missing, outcome)]
        elif size and has_ranks:
            lines += [""] + _as_ranks(script, environ, chosen, size, outcome, folder)
    runs = [run for run in (outcome["simulated"], outcome["ranks"]) if run]
    outcome["same"] = _joined([run["same"] for run in runs])
    print("\n".join(["", "-" * 72] + lines), flush=True)
    if outcome["same"] is False or any(run["status"] for run in runs):
        return DIFFERS
    return SAME if outcome["same"] else NOT_COMPARED


def _on_replicas(script, environ, chosen, devices, outcome, folder):
    """Return the lines of the verdict on simulated devices."""
    output.say(f"compat test: {outcome['script']} on {devices} simulated devices ({chosen.name})")
    environ = dict(environ, COMPAT_SIMULATE=str(devices), COMPAT_VERIFY_REPORT=str(folder))
    status = _status([sys.executable] + script, environ)
    reports = [json.loads(path.read_text("utf-8")) for path in sorted(folder.iterdir())]
    records: List[Any] = sum(reports, [])
    script_name = os.path.basename(outcome["script"])
    lines = [f"compat test: {script_name} on {devices} simulated devices of {chosen.name}", ""]
    lines += sum(map(_verification.shown, records), [])
    if not records:
        lines.append(
            "Nothing was verified: no step was seen of a model that compat.parallelize() was given "
            "after compat.configure_gpu(). configure_gpu(parallelize=True) parallelizes each Keras "
            "model that the script compiles."
        )
    if status and not any(record["failure"] for record in records):
        lines.append(f"The script ended with exit status {status}.")
    verdicts = [record["same"] for record in records] or [None]
    same = _joined(verdicts)
    outcome["simulated"] = {"devices": devices, "status": status, "models": records, "same": same}
    return lines + [verdict_on_devices(same, records)]


def _joined(verdicts):
    """Return whether all are the same; None: not all were compared, and of the others all are."""
    return next((verdict for verdict in (False, None) if verdict in verdicts), True)


def verdict_on_devices(same: Optional[bool], records: List[Any]) -> str:
    """Return a line on all models that were verified on several devices."""
    kinds = list(dict.fromkeys(kind for each in records for kind in _verification.uncompared(each)))
    if same is None and any(map(_verification.compared_values, records)):
        return f"NOT COMPARED on several devices: {listed(kinds)}. All else is the same."
    return {
        True: "The same on several devices.",
        False: "NOT the same on several devices.",
        None: "Nothing was compared on several devices.",
    }[same]


def _refused(size, why, outcome):
    """Note in the outcome that a script did not run as ranks, and return a line that says so."""
    outcome["ranks"] = {"size": size, "status": None, "same": None}
    return f"NOT RUN as {size} ranks: {why} -n 0 leaves ranks out."


def _missing_engine(chosen, ranks, environ):
    """Return how to install the engine of the backend's ranks, or None if it is installed."""
    try:
        chosen.launcher(_ranks.Job(ranks, sys.executable, environ))
    except errors.NotInstalledError as error:
        return str(error)
    return None


def _as_ranks(script, environ, chosen, ranks, outcome, folder):
    """Return the verdict on ranks, as lines. Their standard error is shown if all ended well."""
    output.say(f"compat test: {outcome['script']} as {ranks} ranks")
    options = ["run", "-n", str(ranks), "--gpus", "cpu", "--backend", chosen.framework]
    report = folder / "ranks.json"
    command = by_path.command("__main__") + options + ["--report-json", str(report)] + script
    with open(folder / "errors", "w+", encoding="utf-8", errors="replace") as file:
        status = _status(command, environ, stderr=file)
        file.seek(0)
        printed = file.read()
    reported = json.loads(report.read_text("utf-8")) if report.exists() else {}
    compared = reported.get("comparisons")
    # A script that ends with this status on simulated devices, too, has another problem.
    is_scripts = status == outcome["simulated"]["status"] != 0
    same = not status if compared and not is_scripts else None
    outcome["ranks"] = {"size": ranks, "status": status, "same": same}
    if status:
        shown = " ".join(map(shlex.quote, ["python", "-m", "compat"] + options + script))
        error = _last_error(printed.splitlines())
        line = f"As {ranks} ranks: NOT well, exit status {status}: {error}"
        refusal = _REFUSALS.match(error)
        if refusal and not is_scripts:
            line = _refused(ranks, refusal.group(1), outcome)
        return [line, f"This shows more: {shown}"]
    print(printed, end="", file=sys.stderr, flush=True)
    if not compared:
        verdict = "all ended well, but nothing was compared: they trained no model together."
    elif reported["same_rows"]:
        verdict = (
            "all ended well, with the same weights, but trained on the same rows, so that nothing "
            "is gained: call compat.shard()."
        )
    else:
        verdict = "all ended well, with the same weights."
    return [f"As {ranks} ranks: {verdict}"]


def _last_error(lines):
    """Return the error of the rank that failed in a line, or how ``compat run`` reports it."""
    if reported_script.REPORT in lines:
        lines = lines[: lines.index(reported_script.REPORT)]
    begins = [line.startswith("compat run: ") for line in lines]
    last = len(lines) - 1 - begins[::-1].index(True)  # it says with what it begins, at least
    frames = [place for place in range(last, len(lines)) if lines[place].startswith("  File ")]
    behind = lines[frames[-1] :] if frames else []
    report = lines[last].partition(": ")[2]
    return next((line for line in behind if line.strip() and not line.startswith(" ")), report)


def _status(command, environ, stderr=None):
    """Return the exit status of a command, which has ``GRACE`` to end after Ctrl-C.

    ``subprocess.call()`` would kill it a quarter of a second later, and at once on Python 3.6.
    """
    with subprocess.Popen(command, env=environ, stderr=stderr) as started:
        try:
            return started.wait()
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(GRACE)
            raise
        finally:
            started.kill()
