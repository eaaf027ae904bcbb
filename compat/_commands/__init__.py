"""The commands of ``compat``, and what they have in common."""

import argparse
import sys

from .. import errors


def number(what, fewest, most=sys.maxsize, others=()):
    """Return what argparse reads a number by: one within these limits, or one of the others."""

    def number(text):
        if not text.isdecimal() or not fewest <= int(text) <= most and int(text) not in others:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}")
        return int(text)

    return number


# A command that runs a script --------------------------------------------------------------

BACKEND = """\
tensorflow, jax, torch, theano, mxnet, cntk, or one of third parties (default: the one that Keras
would use)"""


def add_script(parser):
    rest = argparse.REMAINDER
    text = "in place of a script: the name of a module, as after python -m"
    parser.add_argument("-m", dest="module", nargs=rest, help=text)
    text = "a script's path; all that follows is the script's own"
    parser.add_argument("script", nargs="?", help=text)
    parser.add_argument("arguments", nargs=rest, help=argparse.SUPPRESS)


def script_of(arguments):
    """Return the script, or "-m" and the module, and its arguments; nothing where none is given."""
    if arguments.module is None:
        return [arguments.script] + arguments.arguments if arguments.script else []
    if not arguments.module or arguments.module[0].startswith("-"):
        arguments.parser.error("argument -m: the name of a module is needed")
    return ["-m"] + arguments.module


def name_of(script):
    """Return the script's path, or the module's name after ``-m``."""
    return script[1] if script[0] == "-m" else script[0]


def check_script(script, is_there):
    """Refuse a script that is not there, and a notebook: Python would evaluate its JSON."""
    name = name_of(script)
    if name.lower().endswith(".ipynb"):
        raise errors.InvalidArgumentError(
            f"{name} is a notebook, which Python cannot run. Make a script of it with "
            "`jupyter nbconvert --to script`, or call compat.configure_gpu() in its first cell."
        )
    if script[0] != "-m" and not is_there:
        raise errors.InvalidArgumentError(
            f"there is no file {name}. Give the path of a script, or -m and the name of a module; "
            "what follows are its own arguments."
        )
