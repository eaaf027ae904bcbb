"""What programs come to, for tests that compare what they say."""

import os
import subprocess


def ended(command, environ=(), **options):
    """Return the exit status of a program, and what it printed to each stream.

    Arguments:
        command: the program and its arguments.
        environ: variables that differ.
        **options: as ``subprocess.run()`` takes them.
    """
    done = subprocess.run(
        list(map(str, command)),
        env=dict(os.environ, **dict(environ)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        **options,
    )
    return done.returncode, done.stdout, done.stderr
