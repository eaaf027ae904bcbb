"""``compat test script.py``: a user's own script on simulated devices, verified; then as ranks."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

from .. import _by_path, _detect, _verification, errors
from ..backend import Backend
from . import run_script

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

RANKS = 2


def run(
    script: "List[str]",
    devices: "Optional[int]" = None,
    backend: "Optional[str]" = None,
    ranks: "Optional[int]" = None,
    steps: int = 3,
    outcome: "Optional[Dict[str, Any]]" = None,
    hosts: "Optional[str]" = None,
) -> bool:
    """Run a script as it is, twice, and print a verdict on what was verified.

    Arguments:
        script: its path, or "-m" and a module, and its arguments.
        devices: how many simulated ones; None: 3.
        backend: its name; None: the one that Keras would use.
        ranks: as how many ranks the second time; None: 2; 0: not at all.
        steps: how many training steps of each model are verified.
        hosts: machines for the ranks, as ``compat run --hosts`` takes them; None: this one.
        outcome: a dictionary that gets what is printed, with the keys of docs/command-line.md.

    Returns:
        Whether several devices did what one does, and ranks stayed the same, wherever that could
        be compared; False, too, where nothing was.

    Raises:
        InvalidArgumentError: there is no such script, or ``hosts`` is not understood.
        UnsupportedError: there are hosts, and the backend has no ranks.
        NotInstalledError, AmbiguousBackendError: as ``configure_gpu()``.
    """
    if script[0] != "-m" and not os.path.isfile(script[0]):
        raise errors.no_script(script[0])
    if hosts is not None:
        ranks, hosts = run_script.ranks_on(hosts, ranks)
    devices = devices or 3
    outcome = {} if outcome is None else outcome
    chosen, _ = _detect.choose(backend, os.environ, typed=True)
    has_ranks = type(chosen).distribute is not Backend.distribute
    if hosts is not None and not has_ranks:
        raise errors.no_ranks(chosen.name)
    environ = dict(os.environ, COMPAT_VERIFY=str(steps))
    environ.update(chosen.recording)
    environ.update(_detect.keras_variable(chosen, os.environ))
    # Whatever PYTHONPATH says, the script finds this package: see _reported().
    other = _by_path.shadow(os.path.dirname(os.path.realpath(script[0])), {})
    if other:
        _say(errors.shadowed(run_script.name_of(script), other))
    outcome.update(backend=chosen.name, script=run_script.name_of(script), ranks=None)
    lines, same = _on_replicas(script, environ, chosen, devices, outcome)
    if ranks != 0 and has_ranks:
        more, also = _as_ranks(script, environ, chosen, ranks or RANKS, outcome, hosts)
        lines += [""] + more
        same = same and also
    outcome["same"] = same
    print("\n".join(["", "-" * 72] + lines), flush=True)
    return same


def _on_replicas(script, environ, chosen, devices, outcome):
    """The lines of the verdict on simulated devices, and whether it is good."""
    _say("{} on {} simulated devices ({})".format(run_script.name_of(script), devices, chosen.name))
    environ = dict(environ, COMPAT_SIMULATE=str(devices))
    status, reports = _reported([sys.executable] + script, environ)
    records = [record for report in reports for record in report]
    title = "compat test: {} on {} simulated devices of {}".format(
        os.path.basename(run_script.name_of(script)), devices, chosen.name
    )
    lines, same = [title, ""], True
    for record in records:
        lines += _verification.shown(record)
        same = same and _verification.is_good(record)
    if not any(sum(record["steps"].values()) for record in records):
        same = False
        if not any(record["failure"] for record in records):
            lines.append(
                "Nothing was verified: the script ran no step of a model that compat.parallelize() "
                "was given after compat.configure_gpu()."
            )
    if status and not any(record["failure"] for record in records):
        same = False
        lines.append("The script ended with exit status {}.".format(status))
    outcome["simulated"] = {"devices": devices, "status": status, "models": records, "same": same}
    lines.append("The same on several devices." if same else "NOT the same on several devices.")
    return lines, same


def _as_ranks(script, environ, chosen, ranks, outcome, hosts):
    """The lines of the verdict on ranks, and whether it is good."""
    where = "" if hosts is None else " on " + hosts
    _say("{} as {} ranks{}".format(run_script.name_of(script), ranks, where))
    command = _by_path.command("__main__") + ["run", "-n", str(ranks), "--gpus", "cpu"]
    command += ["--backend", chosen.framework] + (["--hosts", hosts] if hosts else [])
    status, _ = _reported(command + script, environ)
    outcome["ranks"] = {"size": ranks, "hosts": hosts, "status": status, "same": not status}
    who = "As {} ranks{}".format(ranks, where)
    if status:
        return ["{}: NOT well, exit status {} (see above).".format(who, status)], False
    return ["{}: all ended well, with the same weights.".format(who)], True


def _reported(command, environ):
    """Run a command, and return its exit status and the reports that its processes left."""
    folder = tempfile.mkdtemp(prefix="compat-test-")
    environ = dict(environ, COMPAT_VERIFY_REPORT=folder)
    # The script finds this compat as its own.
    path = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    path += [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []  # "" is this folder
    environ["PYTHONPATH"] = os.pathsep.join(path)
    try:
        status = subprocess.call(command, env=environ)
        reports = []
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name)) as file:
                reports.append(json.load(file))
        return status, reports
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say(text):
    print("compat test: " + text, file=sys.stderr, flush=True)
