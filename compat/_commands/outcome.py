"""``compat test --json``: the outcome as one JSON object on stdout, and all else on stderr."""

import contextlib
import json
import os
import sys
from typing import Any, Dict, Iterator

from .. import errors


@contextlib.contextmanager
def printed() -> Iterator[Dict[str, Any]]:
    """Within, this process and those that it starts print to stderr; then the outcome is printed.

    Yields:
        The outcome, to be filled: "same" stays None where nothing could be compared, and "error"
        gets the text of the error that is the reason.
    """
    outcome: Dict[str, Any] = {"same": None, "error": None}
    try:
        with _stdout_on_stderr():
            yield outcome
    except errors.CompatError as error:
        outcome["error"] = str(error)
        _print(outcome)
        raise
    _print(outcome)


def _print(outcome):
    # JSON has neither NaN nor infinity: None in place of them.
    finite = json.loads(json.dumps(outcome), parse_constant=lambda constant: None)
    print(json.dumps(finite, indent=2, allow_nan=False), flush=True)


@contextlib.contextmanager
def _stdout_on_stderr():
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)  # what libraries and other processes print
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
