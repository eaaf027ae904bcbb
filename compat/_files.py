"""Files in folders where others may have put something else in their place."""

import errno
import os
import stat


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
