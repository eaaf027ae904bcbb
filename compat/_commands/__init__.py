"""The commands of ``compat``: see ``compat.__main__``."""

import argparse
from typing import Any, Dict

#: The option ``--quiet`` of a command that shows progress.
QUIET: Dict[str, Any] = {"action": "store_true", "help": "show no line about work that takes long"}


def parser(commands, name, run, told, description, usage=None):
    """A new parser of one command, which ``run`` carries out."""
    text = argparse.RawDescriptionHelpFormatter
    added = commands.add_parser(
        name, help=told, description=description, usage=usage, formatter_class=text
    )
    added.set_defaults(run=run, parser=added)
    return added
