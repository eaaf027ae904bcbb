"""Files in folders where others may have put something else in their place."""

import errno
import os
import stat
import tempfile


def plain(path: str, flags: int, mode: int = 0o666) -> int:
    """As ``os.open()``, for a regular file only; also an ``opener`` of ``open()``.

    A FIFO without a writer would block for ever.

    Raises:
        OSError: it cannot be opened, or is a FIFO, a folder, a device.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), mode)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "It is not a regular file", path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_writable(path: str) -> None:
    """Find out that a file can be written later; nothing is left.

    Raises:
        OSError: its folder is not there or may not be written to, or a folder has its name.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    handle, beside = _beside(path)
    os.close(handle)
    os.unlink(beside)


def write(path: str, text: str) -> None:
    """Write a text file under another name, and rename: what is there is whole at any time."""
    handle, beside = _beside(path)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(beside, 0o666 & ~umask)
        os.replace(beside, os.path.realpath(path))
    except BaseException:
        os.unlink(beside)
        raise


def _beside(path):
    target = os.path.realpath(path)
    return tempfile.mkstemp(".tmp", os.path.basename(target) + ".", os.path.dirname(target))
