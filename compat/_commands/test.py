"""\
Train a small model on one device and on several, from the same start on the same batches, and
compare step by step. CPU devices stand in if there are too few GPUs.

With a script: run it as it is on simulated devices, whatever it asks for, where the first steps of
each parallelized model are also done on one device and compared; then, where the backend has them,
as ranks. A verdict at the end says what was compared and what was not.

exit status: 0 the same, 1 something differs, only one device worked or the script failed, 2 wrong
arguments or no backend, 3 nothing differs, but some training, test or prediction steps were not
compared (batch normalization, dropout), or the script did not run as ranks."""

import argparse
import contextlib
import json
import os
import sys
from typing import Any, Dict

from .. import errors
from . import BACKEND, add_script, device_comparison, number, script_of, script_test

USAGE = """\
compat test [options]
       compat test [options] script.py [its arguments]
       compat test [options] -m module [its arguments]"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compat test``."""
    text = "how many, 2 or more (default: all GPUs where there are two or more, else 3; of a "
    text += "script: 3)"
    devices = number("devices, 2 or more", 2)
    parser.add_argument("--devices", type=devices, metavar="N", help=text)
    parser.add_argument("--backend", metavar="NAME", help=BACKEND)
    text = "use CPU devices even where there are GPUs (with a script always)"
    parser.add_argument("--simulate", action="store_true", help=text)
    text = "of a script: as so many ranks the second time (default: 2; 0: not at all)"
    ranks = number("ranks to compare: 2 or more, or 0 for none", 2, others=[0])
    parser.add_argument("-n", dest="ranks", type=ranks, metavar="N", help=text)
    text = "of a script: batch normalization uses the statistics of the whole batch, so that its "
    text += "training steps are compared, too"
    parser.add_argument("--sync-batch-norm", action="store_true", help=text)
    text = "print the outcome as one JSON object, and all else to stderr"
    parser.add_argument("--json", action="store_true", help=text)
    text = "show no line about work that takes long"
    parser.add_argument("--quiet", action="store_true", help=text)
    add_script(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Compare devices, or test a script, and return the exit status."""
    script = script_of(arguments)
    if arguments.ranks is not None and not script:
        arguments.parser.error("argument -n: a script is needed, or -m and a module")
    if arguments.sync_batch_norm and not script:
        arguments.parser.error("argument --sync-batch-norm: a script is needed, or -m and a module")
    options = arguments.devices, arguments.backend
    with _outcome(arguments.json) as outcome:
        if not script:
            return not device_comparison.compare_devices(*options, arguments.simulate, outcome)
        ranks, synchronizes = arguments.ranks, arguments.sync_batch_norm
        return script_test.verify_script(script, *options, ranks, synchronizes, outcome)


@contextlib.contextmanager
def _outcome(is_printed):
    """Yield a dictionary for the outcome, with the keys of docs/command-line.md.

    "same" stays None where nothing could be compared, and "error" gets the text of the error that
    is the reason. Where the outcome is printed, as a JSON object to stdout at the end, all that is
    started prints to stderr until then.

    Arguments:
        is_printed: whether it is.
    """
    outcome: Dict[str, Any] = {"same": None, "error": None}
    failure = None
    if not is_printed:
        yield outcome
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)  # for the output of libraries and other processes
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
