"""The commands of ``compat``, and what they have in common."""

import argparse
import sys


def number(what, fewest, most=sys.maxsize, others=()):
    """What argparse reads a number by: one within these limits, or one of the others."""

    def number(text):
        if not text.isdecimal() or not fewest <= int(text) <= most and int(text) not in others:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}")
        return int(text)

    return number
