"""``compat test script.py``: a user's own script on simulated devices, verified; then as ranks."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, List, Optional

from .. import _verification, errors
from .._configuration import detection
from .._ranks.launch import output
from .._runtime import by_path
from ..backend import Backend
from . import scripts

RANKS = 2
#: How many training steps of each model are verified.
STEPS = 3
#: By whether they are the same; None: nothing was compared.
VERDICTS = {
    True: "The same on several devices.",
    False: "NOT the same on several devices.",
    None: "Nothing was compared on several devices.",
}


def run(script, devices=None, backend=None, ranks=None, outcome=None) -> bool:
    """Run a script as it is, twice, and print a verdict on what was verified.

    Arguments:
        script: its path, or "-m" and a module, and its arguments.
        devices: how many simulated ones; None: 3.
        backend: its name; None: the one that Keras would use.
        ranks: as how many ranks the second time; None: 2; 0: not at all.
        outcome: a dictionary that gets what is printed, with the keys of docs/command-line.md.

    Returns:
        Whether several devices did what one does, and ranks stayed the same, wherever that could
        be compared; False, too, where nothing was, or where the script failed.

    Raises:
        InvalidArgumentError: there is no such script, or it is a notebook.
        NotInstalledError, AmbiguousBackendError: as ``configure_gpu()``.
    """
    scripts.check(script, os.path.isfile(script[0]))
    devices = devices or 3
    outcome = {} if outcome is None else outcome
    chosen, _ = detection.choose(backend, os.environ, typed=True)
    has_ranks = type(chosen).distribute is not Backend.distribute
    paths = [os.path.dirname(by_path.PACKAGE), os.environ.get("PYTHONPATH")]  # "" is this folder
    path = os.pathsep.join(filter(None, paths))  # the script finds this compat
    environ = dict(os.environ, COMPAT_VERIFY=str(STEPS), PYTHONPATH=path, **chosen.recording)
    environ.update(detection.keras_variable(chosen, os.environ))
    name = scripts.name_of(script)
    other = by_path.shadow(os.path.dirname(os.path.realpath(script[0])), {})
    if other:
        output.say("compat test: " + errors.shadowed(name, other))
    outcome.update(backend=chosen.name, script=name, ranks=None)
    with tempfile.TemporaryDirectory(prefix="compat-test-") as path:
        folder = pathlib.Path(path)
        lines = _on_replicas(script, environ, chosen, devices, outcome, folder)
        ranks = RANKS if ranks is None else ranks
        if ranks and has_ranks:
            lines += ["", _as_ranks(script, environ, chosen, ranks, outcome, folder)]
    runs = [each for each in (outcome["simulated"], outcome["ranks"]) if each]
    found = [each["same"] for each in runs]
    outcome["same"] = next((same for same in (False, None) if same in found), True)
    print("\n".join(["", "-" * 72] + lines), flush=True)
    return bool(outcome["same"]) and not any(each["status"] for each in runs)


def _on_replicas(script, environ, chosen, devices, outcome, folder):
    """The lines of the verdict on simulated devices."""
    output.say(f"compat test: {outcome['script']} on {devices} simulated devices ({chosen.name})")
    environ = dict(environ, COMPAT_SIMULATE=str(devices), COMPAT_VERIFY_REPORT=str(folder))
    status = subprocess.call([sys.executable] + script, env=environ)
    reports = [json.loads(each.read_text("utf-8")) for each in sorted(folder.iterdir())]
    records: List[Any] = sum(reports, [])
    script_name = os.path.basename(outcome["script"])
    lines = [f"compat test: {script_name} on {devices} simulated devices of {chosen.name}", ""]
    lines += sum(map(_verification.shown, records), [])
    same: Optional[bool] = all(map(_verification.is_good, records))
    failed = any(record["failure"] for record in records)
    if not failed and not any(sum(record["steps"].values()) for record in records):
        same = None
        lines.append(
            "Nothing was verified: the script ran no step of a model that compat.parallelize() "
            "was given after compat.configure_gpu()."
        )
    if status and not failed:
        lines.append(f"The script ended with exit status {status}.")
    outcome["simulated"] = {"devices": devices, "status": status, "models": records, "same": same}
    lines.append(VERDICTS[same])
    return lines


def _as_ranks(script, environ, chosen, ranks, outcome, folder):
    """The verdict on ranks as a line."""
    output.say(f"compat test: {outcome['script']} as {ranks} ranks")
    command = by_path.command("__main__") + ["run", "-n", str(ranks), "--gpus", "cpu"]
    command += ["--backend", chosen.framework]
    report = folder / "ranks.json"
    command += ["--report-json", str(report)] + script
    status = subprocess.call(command, env=environ)
    compared = report.exists() and json.loads(report.read_text("utf-8"))["comparisons"]
    # A script that ends like this on simulated devices, too, does so for a reason of its own.
    is_own = status == outcome["simulated"]["status"] != 0
    same = not status if compared and not is_own else None
    outcome["ranks"] = {"size": ranks, "status": status, "same": same}
    said = "all ended well, with the same weights."
    if status:
        said = f"NOT well, exit status {status} (see above)."
    elif not compared:
        said = "all ended well, but nothing was compared: they trained no model together."
    return f"As {ranks} ranks: {said}"
