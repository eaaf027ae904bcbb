"""\
Report which backend this Python would use and why, the versions, the drivers and GPUs, the
variables and files that matter, the ranks and what they could communicate through: what a report
of a bug needs. Configures nothing, imports no framework and initialises no GPU.

exit status: 0 all is well, 1 something is wrong (see the last lines of the report)."""

import json

from .. import environment


def add_options(parser):
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")


def execute(arguments):
    report = environment()
    print(json.dumps(report, indent=2) if arguments.json else report)
    return 1 if report["problems"] else 0
