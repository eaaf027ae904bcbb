"""\
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

# The command line: ``python -m compat``, also ``python -m keras_gpu_compat`` and ``compat``.
# Each command is a module of ``_commands`` with its name. The docstring is what --help prints, and
# ``USAGE`` the usage, where argparse cannot tell.

import argparse
import importlib
import os
import sys

from . import __version__, errors
from ._runtime import progress

COMMANDS = {
    "env": "report what is installed, set and wrong",
    "run": "run a script on chosen GPUs",
    "test": "compare several devices with one",
    "machines": "a command as if on several machines",
    "pins": "print the versions of a backend that are tested together",
    "tox": "write a tox.ini that runs your tests on each backend",
    "unwrap": "the plain model in a file of multi_gpu_model",
}


def main(arguments=None):
    """Run one command and return its exit status."""
    _open_standard_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(arguments)
    parsed, unknown = parser.parse_known_args(arguments)
    if parsed.command is None:
        parser.error("a command is needed: env, run, test, machines, pins, tox or unwrap")
    if unknown:  # the command's usage, not that of all
        parsed.parser.error("unrecognized arguments: " + " ".join(unknown))
    if getattr(parsed, "quiet", False):
        os.environ[progress.VARIABLE] = "0"
    try:
        status = parsed.execute(parsed)
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


def _parser(arguments):
    """Return a parser with the options of the commands that are among the arguments."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="compat", epilog=__doc__, formatter_class=text)
    parser.description = "GPUs and several devices for every Keras backend."
    parser.add_argument("--version", action="version", version="compat " + __version__)
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, told in COMMANDS.items():
        added = commands.add_parser(name, help=told, formatter_class=text)
        if name in arguments:  # only what is asked for is imported, for start-up time
            command = importlib.import_module("._commands." + name, __package__)
            added.description, added.usage = command.__doc__, getattr(command, "USAGE", None)
            added.set_defaults(execute=command.execute, parser=added)
            command.add_options(added)
    return parser


if __name__ == "__main__":
    sys.exit(main())
