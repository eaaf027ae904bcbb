"""\
Train a small model on one device and on several, from the same start on the same batches, and
compare step by step. CPU devices stand in if there are too few GPUs.

With a script: run it as it is on simulated devices, whatever it asks for, where the first steps of
each parallelized model are also done on one device and compared; then, where the backend has them,
as ranks. A verdict at the end says what was verified and what could not be.

exit status: 0 the same, 1 something differs or nothing was compared, 2 wrong arguments or no
backend."""

import contextlib
import functools
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import warnings
from typing import Any, List, Optional

from .. import _api, _keras, _ranks, _verification, errors
from .._configuration import detection, device_choice, gpu_selection
from .._ranks import nesting
from .._ranks.launch import output
from .._runtime import by_path, progress
from .._runtime.process import process
from ..backend import Backend
from . import BACKEND, add_script, check_script, name_of, number, reported_script, script_of

USAGE = """\
compat test [options]
       compat test [options] script.py [its arguments]
       compat test [options] -m module [its arguments]"""


def add_options(parser):
    told = "how many, 2 or more (default: all GPUs where there are two or more, else 3; of a "
    told += "script: 3)"
    devices = number("devices, 2 or more", 2)
    parser.add_argument("--devices", type=devices, metavar="N", help=told)
    parser.add_argument("--backend", metavar="NAME", help=BACKEND)
    told = "use CPU devices even where there are GPUs (with a script always)"
    parser.add_argument("--simulate", action="store_true", help=told)
    told = "of a script: as so many ranks the second time (default: 2; 0: not at all)"
    ranks = number("ranks to compare: 2 or more, or 0 for none", 2, others=[0])
    parser.add_argument("-n", dest="ranks", type=ranks, metavar="N", help=told)
    told = "print the outcome as one JSON object, and all else to stderr"
    parser.add_argument("--json", action="store_true", help=told)
    told = "show no line about work that takes long"
    parser.add_argument("--quiet", action="store_true", help=told)
    add_script(parser)


def execute(arguments):
    script = script_of(arguments)
    if arguments.ranks is not None and not script:
        arguments.parser.error("argument -n: a script is needed, or -m and a module")
    asked = arguments.devices, arguments.backend
    with _outcome(arguments.json) as outcome:
        if not script:
            return not compare_devices(*asked, arguments.simulate, outcome)
        return not verify_script(script, *asked, arguments.ranks, outcome)


@contextlib.contextmanager
def _outcome(is_printed):
    """The outcome, to be filled with what is printed, under the keys of docs/command-line.md.

    "same" stays None where nothing could be compared, and "error" gets the text of the error that
    is the reason. Where the outcome is printed, as a JSON object to stdout in the end, all that is
    started prints to stderr until then.
    """
    outcome = {"same": None, "error": None}  # type: dict
    failure = None
    if not is_printed:
        yield outcome
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)  # what libraries and other processes print
        with contextlib.redirect_stdout(sys.stderr):
            yield outcome
    except errors.CompatError as error:
        outcome["error"], failure = str(error), error
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    # JSON has neither NaN nor infinity: None in place of them.
    finite = json.loads(json.dumps(outcome), parse_constant=lambda constant: None)
    print(json.dumps(finite, indent=2, allow_nan=False), flush=True)
    if failure is not None:
        raise failure


# A small model ------------------------------------------------------------------------------

#: Rows of the batches: even, uneven, few, fewer than devices, one.
BATCHES = (64, 61, 13, 2, 1)
_say = functools.partial(print, flush=True)
TOLERANCE = 1e-5  # the largest difference of a weight that still counts as rounding


@progress.shown("comparing one device with several")
def compare_devices(devices, backend, simulate, outcome):
    """Configure, train twice side by side, and print the comparison as it goes.

    Arguments:
        devices: how many, or None for all GPUs, or 3 simulated ones where there are not two.
        backend: its name, or None for the one that Keras would use.
        simulate: use CPU devices even if there are enough GPUs.
        outcome: a dictionary that gets what is printed.

    Returns:
        Whether the weights were the same, to ``TOLERANCE``, after every step, and every device
        worked, forward and backward.
    """
    # Tensor cores round float32 to ten bits of mantissa, differently for each batch size.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    os.environ.update(detection.choose(backend, typed=True)[0].recording)
    configuration = _configure(devices, backend, simulate)
    _say(configuration)
    count = len(configuration.devices)
    outcome.update(backend=configuration.backend, devices=list(configuration.devices))
    if count < (devices or 2):
        raise errors.DevicesNotFoundError(
            f"{devices or 2} devices are needed for the comparison, but the framework shows "
            f"{', '.join(configuration.devices)}."
        )
    process.records_operations = True
    keras = _keras.import_keras(detection.choose(configuration.backend)[0])
    where = f"{configuration.devices[0]}, the same on {count} devices"
    _say(f"\nOne dense model on {where}, SGD with momentum:\n")
    same = _compare(keras, count, outcome)
    outcome["same"] = _show_where(configuration.devices, outcome) and same
    return outcome["same"]


def _show_where(devices, outcome):
    """Print where the first step's products ran; whether each device had its part."""
    ran = process.verified[-1].operations if process.verified else {}
    products = outcome["products"] = {each: list(ran.get(each, (0, 0))) for each in devices}
    worked = [device for device in devices if min(products[device]) > 0]
    _say("\nMatrix products of a step that each device ran, forward + backward:")
    _say("\n".join("  {}: {} + {}".format(device, *products[device]) for device in devices))
    if len(worked) < len(devices):
        _say(f"NOT on all devices: {len(worked)} of {len(devices)} worked.")
    return len(worked) == len(devices)


def _configure(devices, backend, simulate):
    if not simulate:
        everything = gpu_selection.parse_gpus(None)
        simulate = len(device_choice.choose(everything, None, os.environ)) < (devices or 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.CompatWarning)  # the report shows them
        asked = {"simulate": devices or 3} if simulate else {"gpus": devices}
        return _api.configure_gpu(backend=backend, verify=1, **asked)


def _dense(keras):
    inputs = keras.layers.Input(shape=(8,))
    hidden = keras.layers.Dense(16, activation="tanh")(inputs)
    return keras.models.Model(inputs, keras.layers.Dense(4, activation="sigmoid")(hidden))


def _compare(keras, count, outcome):
    """Train the model on one device, and its equal on all."""
    import numpy as np

    single, several = (_api.parallelize(_dense(keras), gpus) for gpus in (1, count))
    several.set_weights(single.get_weights())
    for model in single, several:
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    random = np.random.RandomState(0)
    outcome.update(tolerance=TOLERANCE, steps=[])
    _say(f"step  rows  loss on 1  loss on {count:<2} largest difference of a weight")
    for step, rows in enumerate(BATCHES, 1):
        inputs = random.normal(size=(rows, 8)).astype("float32")
        targets = random.uniform(size=(rows, 4)).astype("float32")
        losses = [_train(model, inputs, targets) for model in (single, several)]
        weights = single.get_weights(), several.get_weights()
        difference = _verification.largest_difference(*weights)
        outcome["steps"].append({"rows": rows, "losses": losses, "difference": difference})
        _say("{:4}  {:4}  {:9.7f}  {:10.7f}  {:.1e}".format(step, rows, *losses + [difference]))
    same = all(each["difference"] <= TOLERANCE for each in outcome["steps"])  # NaN is not
    verdict = "The same: no weight ever differs" if same else "NOT the same: a weight differs"
    _say(f"\n{verdict} by more than {TOLERANCE:g}.")
    return same


def _train(model, inputs, targets):
    if hasattr(model, "reset_metrics"):  # Keras 3 averages over calls
        model.reset_metrics()
    loss = model.train_on_batch(inputs, targets)
    return float(loss[0] if isinstance(loss, (list, tuple)) else loss)


# A user's own script -------------------------------------------------------------------------

RANKS = 2
#: How many training steps of each model are verified.
STEPS = 3
# Seconds that an interrupted script has to save something, say, before it is killed.
GRACE = 5.0
#: By whether they are the same; None: nothing was compared.
VERDICTS = {
    True: "The same on several devices.",
    False: "NOT the same on several devices.",
    None: "Nothing was compared on several devices.",
}


def verify_script(script, devices, backend, ranks, outcome) -> bool:
    """Run a script as it is, twice, and print a verdict on what was verified.

    Arguments:
        script: its path, or "-m" and a module, and its arguments.
        devices: how many simulated ones; None: 3.
        backend: its name; None: the one that Keras would use.
        ranks: as how many ranks the second time; None: 2; 0: not at all.
        outcome: a dictionary that gets what is printed.

    Returns:
        Whether several devices did what one does, and ranks stayed the same, wherever that could
        be compared; False, too, where nothing was, where the script failed, or where ``ranks`` were
        asked for and their engine is not installed.

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
            lines += ["", f"Not run as {size} ranks. {missing}"]
            outcome["ranks"] = ranks and {"size": size, "status": None, "same": None}
        elif size and has_ranks:
            lines += [""] + _as_ranks(script, environ, chosen, size, outcome, folder)
    runs = [each for each in (outcome["simulated"], outcome["ranks"]) if each]
    found = [each["same"] for each in runs]
    outcome["same"] = next((same for same in (False, None) if same in found), True)
    print("\n".join(["", "-" * 72] + lines), flush=True)
    return bool(outcome["same"]) and not any(each["status"] for each in runs)


def _on_replicas(script, environ, chosen, devices, outcome, folder):
    """Return the lines of the verdict on simulated devices."""
    output.say(f"compat test: {outcome['script']} on {devices} simulated devices ({chosen.name})")
    environ = dict(environ, COMPAT_SIMULATE=str(devices), COMPAT_VERIFY_REPORT=str(folder))
    status = _status([sys.executable] + script, environ)
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


def _missing_engine(chosen, ranks, environ):
    """Return which engine of the backend's ranks is to be installed, and how.

    None: there is one.
    """
    try:
        chosen.launcher(_ranks.Job(ranks, sys.executable, environ))
    except errors.NotInstalledError as error:
        return str(error)
    return None


def _as_ranks(script, environ, chosen, ranks, outcome, folder):
    """Return the verdict on ranks, as lines.

    What they print as errors is shown where all ended well.
    """
    output.say(f"compat test: {outcome['script']} as {ranks} ranks")
    options = ["run", "-n", str(ranks), "--gpus", "cpu", "--backend", chosen.framework]
    report = folder / "ranks.json"
    command = by_path.command("__main__") + options + ["--report-json", str(report)] + script
    with open(folder / "errors", "w+", encoding="utf-8", errors="replace") as file:
        status = _status(command, environ, stderr=file)
        file.seek(0)
        said = file.read()
    compared = report.exists() and json.loads(report.read_text("utf-8"))["comparisons"]
    # A script that ends like this on simulated devices, too, does so for a reason of its own.
    is_own = status == outcome["simulated"]["status"] != 0
    same = not status if compared and not is_own else None
    outcome["ranks"] = {"size": ranks, "status": status, "same": same}
    if status:
        shown = " ".join(map(shlex.quote, ["python", "-m", "compat"] + options + script))
        verdict = f"NOT well, exit status {status}: {_last_error(said.splitlines())}"
        return [f"As {ranks} ranks: {verdict}", f"This shows more: {shown}"]
    print(said, end="", file=sys.stderr, flush=True)
    if not compared:
        verdict = "all ended well, but nothing was compared: they trained no model together."
    else:
        verdict = "all ended well, with the same weights."
    return [f"As {ranks} ranks: {verdict}"]


def _last_error(lines):
    """Return in a line what ``compat run`` reports of the rank that failed, or its error."""
    if reported_script.REPORT in lines:
        lines = lines[: lines.index(reported_script.REPORT)]
    begins = [line.startswith("compat run: ") for line in lines]
    last = len(lines) - 1 - begins[::-1].index(True)  # it says with what it begins, at least
    frames = [place for place in range(last, len(lines)) if lines[place].startswith("  File ")]
    behind = lines[frames[-1] :] if frames else []
    said = lines[last].partition(": ")[2]
    return next((line for line in behind if line.strip() and not line.startswith(" ")), said)


def _status(command, environ, stderr=None):
    """Return the exit status of a command, which a Ctrl-C reaches, too.

    It ends by itself, in ``GRACE``.

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
