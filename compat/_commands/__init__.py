"""The commands of ``compat``, and what they have in common."""

import argparse
import sys
from typing import Any, Dict

#: The option ``--quiet`` of a command that shows progress.
QUIET: Dict[str, Any] = {"action": "store_true", "help": "show no line about work that takes long"}


# Of commands that run a script ---------------------------------------------------------------

BACKEND = """\
tensorflow, jax, torch, theano, mxnet, cntk, or one of third parties (default: the one that Keras
would use)"""


def script_usage(command):
    script = f"compat {command} [options] script.py [its arguments]\n"
    return script + f"       compat {command} [options] -m module [its arguments]"


def add_script(parser):
    rest = argparse.REMAINDER
    told = "in place of a script: the name of a module, as after python -m"
    parser.add_argument("-m", dest="module", nargs=rest, help=told)
    told = "a script's path; all that follows is the script's own"
    parser.add_argument("script", nargs="?", help=told)
    parser.add_argument("arguments", nargs=rest, help=argparse.SUPPRESS)


def script_of(arguments):
    """The script, or "-m" and the module, and its arguments; nothing where none is given."""
    if arguments.module is None:
        return [arguments.script] + arguments.arguments if arguments.script else []
    if not arguments.module or arguments.module[0].startswith("-"):
        arguments.parser.error("argument -m: the name of a module is needed")
    return ["-m"] + arguments.module


def number(what, fewest, most=sys.maxsize, others=()):
    """What argparse reads a number by: one within these limits, or one of the others."""

    def number(text):
        if not text.isdecimal() or not fewest <= int(text) <= most and int(text) not in others:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}")
        return int(text)

    return number


def ranks(text):
    if not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes; write -n 4")
    return int(text)
