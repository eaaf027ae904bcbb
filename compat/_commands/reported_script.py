"""What ``compat run --report`` starts in place of a script: it runs that, and reports then.

``--timeline`` has it record what devices execute, from the first model that is parallelized.
"""

import atexit
import contextlib
import json
import os
import sys
from typing import List

from .. import _ranks
from .._api import device_use
from .._ranks.launch.rank_process import REPORT_VARIABLE
from .._runtime import safe_files, timelines
from .._runtime.process import process
from . import parallelized_script


def main(arguments: List[str]) -> None:
    """Run a script in this process, and report when the process ends.

    Arguments:
        arguments: the files that get the report as JSON, the report as HTML and the timeline, or
            nothing; then what ``parallelized_script.main`` takes. The name of the backend is empty
            where nothing is to be parallelized but what the script does by itself.
    """
    (as_json, as_html, timeline, backend), script = arguments[:4], arguments[4:]
    left = os.environ.pop(REPORT_VARIABLE, None)  # not for processes that the script starts
    owner = os.getpid()

    def report():
        if os.getpid() == owner:  # none that has been forked
            found = device_use.report()
            if left is None:
                tell(found, as_json, as_html)
            else:
                safe_files.write(left, json.dumps(found.as_dict()))

    atexit.register(report)
    with _recorded(timeline) if timeline else contextlib.ExitStack():
        if backend:
            parallelized_script.main([backend] + script)
        else:
            parallelized_script.run(script)


@contextlib.contextmanager
def _recorded(path):
    """Within, a timeline is recorded once a model has been parallelized."""
    owner, recording = os.getpid(), contextlib.ExitStack()
    began = []  # type: List[str]

    def begin(model, where):
        if not began:
            began.append(timelines.of_rank(path, _ranks.own_place()))
            recording.enter_context(device_use.timeline(path))

    process.on_parallelized.append(begin)
    try:
        yield
    finally:
        process.on_parallelized.remove(begin)
        if os.getpid() == owner:  # none that has been forked
            recording.close()
            sys.stdout.flush()
            said = "--timeline {}: no model was parallelized, so nothing was recorded."
            if began:
                said = "the timeline is in {}; open it at https://ui.perfetto.dev"
            print("compat run: " + said.format(*began or [path]), file=sys.stderr, flush=True)


def tell(report, as_json, as_html):
    """Print a report, after all that the script has printed, and write it to files, if any."""
    sys.stdout.flush()
    print("compat run: what each device did\n{}".format(report), file=sys.stderr, flush=True)
    if as_json:
        safe_files.write(as_json, report.to_json() + "\n")
    if as_html:
        safe_files.write(as_html, report.to_html())
