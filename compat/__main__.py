"""The command line: ``python -m compat``, also ``python -m keras_gpu_compat`` and ``compat``."""

import argparse
import os
import sys

from . import __version__, environment, errors
from ._commands import QUIET
from ._commands import parser as command_parser
from ._runtime import progress

ENV = """\
Report which backend this Python would use and why, the versions, the drivers and GPUs, the
variables and files that matter, the ranks and what they could communicate through: what a report
of a bug needs. Configures nothing, imports no framework and initialises no GPU.

exit status: 0 all is well, 1 something is wrong (see the last lines of the report)."""

RUN = """\
Run a script as it is on chosen GPUs: the variables that its backend reads are set before it
starts. What only a call inside the script can set, such as memory, is left to configure_gpu()
there, which keeps to these GPUs. Where there are fewer, a line says so.

With -n or --hosts it runs several times at once, as ranks that train together through the engine
of the backend. One that fails ends all; --max-restarts starts all again. Ctrl-C interrupts all,
which may save what they have; a second one ends them.

exit status: the script's own, or that of the rank that failed; 2 where it could not be started;
128 + N where signal N ended it (130: Ctrl-C)."""

GPUS = """\
ids such as 0,2 (one number is an id, not a count), names, "free" or "free:2" for idle ones, "cpu"
for none (default: all visible ones)"""

BACKEND = """\
tensorflow, jax, torch, theano, mxnet, cntk, or one of third parties (default: the one that Keras
would use)"""

EXAMPLES = """\
examples:
  compat env                             which backend, which GPUs, what is wrong
  compat run --gpus 0,1 train.py         a script as it is, on two GPUs
  compat run -n 4 train.py --epochs 5    as four processes that train together, a GPU each
  compat test train.py                   whether it does the same on several devices
  compat machines 2 sh train.sh          what uses two machines, on this one
  compat pins theano --python 3.7        versions that are tested together
  compat tox                             your project's tests, on each backend
  compat unwrap old.h5                   the plain model in a file of multi_gpu_model

`compat COMMAND --help` tells more. `python -m compat` is the same as `compat`; where a file or
folder of yours is called compat, that would run: use `python -m keras_gpu_compat`."""

TEST = """\
Train a small model on one device and on several, from the same start on the same batches, and
compare step by step. CPU devices stand in if there are too few GPUs.

With a script: run it as it is on simulated devices, whatever it asks for, where the first steps of
each parallelized model are also done on one device and compared; then, where the backend has them,
as ranks. A verdict at the end says what was verified and what could not be.

exit status: 0 the same, 1 something differs or nothing was compared, 2 wrong arguments or no
backend."""


def main(arguments=None):
    """Run one command and return its exit status."""
    _open_standard_streams()
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if parsed.command is None:
        parser.error("a command is needed: env, run, test, machines, pins, tox or unwrap")
    if unknown:  # the command's usage, not that of all
        parsed.parser.error("unrecognized arguments: " + " ".join(unknown))
    if getattr(parsed, "quiet", False):
        os.environ[progress.VARIABLE] = "0"
    try:
        status = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has enough, as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left is flushed at the end
        return 128 + 13  # SIGPIPE
    except errors.CompatError as error:
        print(f"compat {parsed.command}: {error}", file=sys.stderr)
        return 2


def _open_standard_streams():
    """Have standard streams that are closed lead nowhere, here and in what this process starts.

    The next file that is opened would get such a stream's number, and what libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this stream's
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))


def _parser():
    parser = argparse.ArgumentParser(
        prog="compat",
        description="GPUs and several devices for every Keras backend.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version="compat " + __version__)
    commands = parser.add_subparsers(dest="command", metavar="command")

    env = command_parser(commands, "env", _env, "report what is installed, set and wrong", ENV)
    env.add_argument("--json", action="store_true", help="the same as one JSON object")

    run = command_parser(commands, "run", _run, "run a script on chosen GPUs", RUN, _usage("run"))
    told = "as so many ranks, each with one of the GPUs, that train together (1: alone)"
    run.add_argument("-n", dest="ranks", type=_ranks, metavar="N", help=told)
    told = "machines, reached by ssh, and how many ranks each may run: first:4,second:4"
    run.add_argument("--hosts", help=told)
    run.add_argument("--gpus", help=GPUS)
    run.add_argument("--backend", metavar="NAME", help=BACKEND)
    told = "another interpreter, of any age; compat need not be installed there"
    run.add_argument("--python", help=told)
    told = "how long a rank waits for the others (default: 600)"
    run.add_argument("--timeout", metavar="SECONDS", help=told)
    told = "so many CPU devices stand in for GPUs, whatever configure_gpu() asks for"
    devices = _number("devices, 1 or more", 1)
    run.add_argument("--simulate", metavar="N", type=devices, help=told)
    told = "run every Keras model that the script compiles on all the devices, or on all ranks"
    run.add_argument("--parallelize", action="store_true", help=told)
    told = "at the end, print what each device did, or each rank: was every one used?"
    run.add_argument("--report", action="store_true", help=told)
    run.add_argument("--report-json", metavar="FILE", help="the same, also as JSON in a file")
    told = "the same, also as a picture for a browser, in a file"
    run.add_argument("--report-html", metavar="FILE", help=told)
    told = "the same, and what each device executed when, in a file for a browser's trace viewer"
    run.add_argument("--timeline", metavar="FILE", help=told)
    told = "of ranks other than rank 0, show standard error only"
    run.add_argument("--quiet", action="store_true", help=told)
    told = "append all that each rank prints to a file there, rank-0.log and so on"
    run.add_argument("--log-dir", metavar="DIR", help=told)
    told = "start all ranks again when one fails, at most so many times (default: 0)"
    restarts = _number("restarts, 0 or more", 0)
    run.add_argument("--max-restarts", metavar="N", type=restarts, default=0, help=told)
    _add_script(run)

    usage = "compat test [options]\n       " + _usage("test")
    test = command_parser(commands, "test", _test, "compare several devices with one", TEST, usage)
    told = "how many, 2 or more (default: all GPUs where there are two or more, else 3; of a "
    told += "script: 3)"
    devices = _number("devices, 2 or more", 2)
    test.add_argument("--devices", type=devices, metavar="N", help=told)
    test.add_argument("--backend", metavar="NAME", help=BACKEND)
    told = "use CPU devices even where there are GPUs (with a script always)"
    test.add_argument("--simulate", action="store_true", help=told)
    told = "of a script: as so many ranks the second time (default: 2; 0: not at all)"
    test.add_argument("-n", dest="ranks", type=_ranks_to_compare, metavar="N", help=told)
    told = "of a script: run the ranks on these machines, as compat run --hosts does"
    test.add_argument("--hosts", help=told)
    told = "print the outcome as one JSON object, and all else to stderr"
    test.add_argument("--json", action="store_true", help=told)
    test.add_argument("--quiet", **QUIET)
    _add_script(test)

    from ._commands import machines, pins, tox_ini, unwrap  # for start-up time

    for command in (machines, pins, tox_ini, unwrap):
        command.add_to(commands)
    return parser


def _usage(command):
    script = f"compat {command} [options] script.py [its arguments]\n"
    return script + f"       compat {command} [options] -m module [its arguments]"


def _add_script(parser):
    rest = argparse.REMAINDER
    told = "in place of a script: the name of a module, as after python -m"
    parser.add_argument("-m", dest="module", nargs=rest, help=told)
    told = "a script's path; all that follows is the script's own"
    parser.add_argument("script", nargs="?", help=told)
    parser.add_argument("arguments", nargs=rest, help=argparse.SUPPRESS)


def _script(arguments):
    """The script, or "-m" and the module, and its arguments; nothing where none is given."""
    if arguments.module is None:
        return [arguments.script] + arguments.arguments if arguments.script else []
    if not arguments.module or arguments.module[0].startswith("-"):
        arguments.parser.error("argument -m: the name of a module is needed")
    return ["-m"] + arguments.module


def _number(what, fewest, *others):
    """What argparse reads a number by: one that is ``fewest`` or more, or one of the others."""

    def number(text):
        if not text.isdecimal() or int(text) < fewest and int(text) not in others:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}")
        return int(text)

    return number


def _ranks(text):
    if not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes; write -n 4")
    return int(text)


def _ranks_to_compare(text):
    _ranks(text)  # its error where this is no number at all
    return _number("ranks to compare: 2 or more, or 0 for none", 2, 0)(text)


# The commands ---------------------------------------------------------------------------------


def _env(arguments):
    import json  # for start-up time

    found = environment()
    print(json.dumps(found, indent=2) if arguments.json else found)
    return 1 if found["problems"] else 0


def _run(arguments):
    from ._commands import run_script  # for start-up time

    script = _script(arguments)
    if not script:
        arguments.parser.error("a script is needed, or -m and a module")
    return run_script.run(script, arguments)


def _test(arguments):
    script = _script(arguments)
    for option, given in (("-n", arguments.ranks), ("--hosts", arguments.hosts)):
        if given is not None and not script:
            arguments.parser.error(f"argument {option}: a script is needed, or -m and a module")
    if arguments.hosts is not None and arguments.ranks == 0:
        arguments.parser.error("argument --hosts: not with -n 0, which asks for no ranks")
    if arguments.json:
        from ._commands import outcome  # for start-up time

        with outcome.printed() as filled:
            return _compare(arguments, script, filled)
    return _compare(arguments, script, None)


def _compare(arguments, script, outcome):
    """The exit status; ``outcome`` is a dictionary to be filled, or None."""
    asked = arguments.devices, arguments.backend
    if script:
        from ._commands import verify_script  # for start-up time

        ranks, hosts = arguments.ranks, arguments.hosts
        return not verify_script.run(script, *asked, ranks, outcome=outcome, hosts=hosts)
    from ._commands import selftest  # for start-up time

    return not selftest.run(*asked, arguments.simulate, outcome)


if __name__ == "__main__":
    sys.exit(main())
