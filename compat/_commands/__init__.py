"""The commands of ``compat``: see ``compat.__main__``."""

import argparse


def parser(commands, name, run, told, description, usage=None):
    """A new parser of one command, which ``run`` carries out."""
    text = argparse.RawDescriptionHelpFormatter
    added = commands.add_parser(
        name, help=told, description=description, usage=usage, formatter_class=text
    )
    added.set_defaults(run=run, parser=added)
    return added
