"""Files in folders where others may write, too; the one way in which compat writes files."""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from typing import IO, Any, Iterator, Optional

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has none


def plain(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file, as ``os.open()`` does; also an ``opener`` of ``open()``.

    A FIFO without a writer would block for ever.

    Raises:
        OSError: it cannot be opened, or is a FIFO, a folder, a device.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), mode)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise _os_error(errno.EISDIR, path)
    raise OSError(errno.EINVAL, "It is not a regular file", path)


# Writing --------------------------------------------------------------------------------------


def check_writable(path: str) -> None:
    """Check that a file can be written later, leaving nothing behind.

    Raises:
        OSError: its folder does not exist or is not writable, a folder has its name, or the file
            is not writable.
    """
    like = _status_of(path)
    if is_replaced(path):
        file = _beside(os.path.realpath(path), like)
        file.close()
        os.unlink(file.name)


def write(path: str, text: str) -> None:
    """Write a text file, as ``written()`` does."""
    with written(path) as file:
        file.write(text.encode("utf-8"))


@contextlib.contextmanager
def written(path: str, like: "Optional[os.stat_result]" = None) -> "Iterator[IO[bytes]]":
    """Yield a file to be filled, whose content ``path`` has in the end.

    A regular file, or the one that a link leads to, is replaced as a whole, by one with its owner
    and mode. All else (a FIFO, a device, /dev/stdout) stays, and is written to.

    Arguments:
        path: the file's.
        like: the model of a file that does not exist yet, as for ``replacement()``.
    """
    there = _status_of(path)
    if is_replaced(path):
        with replacement(os.path.realpath(path), there or like) as file:
            yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "content"), "w+b") as file:
            yield file
        with open(file.name, "rb") as content, open(path, "wb", opener=_through) as through:
            shutil.copyfileobj(content, through)


@contextlib.contextmanager
def replacement(path: str, like: "Optional[os.stat_result]" = None) -> "Iterator[IO[bytes]]":
    """Yield a new file to be filled, which takes the place of ``path`` in the end.

    A crash leaves the old file or the new one, complete.

    Arguments:
        path: no link: it would not be followed.
        like: ``os.stat()`` of the file whose mode and owner it is to have; None: a new one's.
    """
    _status_of(path)  # an error, where it may not be written to
    file = _beside(path, like)
    try:
        with file:
            yield file
            file.flush()
            if like is not None:
                give(file.fileno() if os.chmod in os.supports_fd else file.name, like)
            os.fsync(file.fileno())
        os.replace(file.name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise


def give(place: "Any", like: "os.stat_result") -> None:
    """Give a file, by its descriptor or path, the mode of another, and its owner if permitted."""
    if os.name == "posix" and (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.chown(place, like.st_uid, like.st_gid)
    os.chmod(place, stat.S_IMODE(like.st_mode))


def _os_error(number: int, path: str) -> "OSError":
    return OSError(number, os.strerror(number), path)  # of the class for that number


def _status_of(path: str) -> "Optional[os.stat_result]":
    """Return the ``os.stat()`` of a file, which has to be writable; None: there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise _os_error(errno.EISDIR, path)
    if not os.access(path, os.W_OK):
        raise _os_error(errno.EACCES, path)
    return status


def is_replaced(path: str) -> bool:
    """Return whether there is no file, or a regular one.

    All else (/dev/stdout, too) is written to.
    """
    return not os.path.exists(path) or os.path.isfile(path) and _descriptor(path) is None


def _descriptor(path: str) -> "Optional[int]":
    """Return the file descriptor that /dev/stdout, /dev/fd/1 and the like name."""
    folder, name = os.path.split(os.path.abspath(path))
    if name.isdecimal() and os.path.realpath(folder) == os.path.realpath("/dev/fd"):
        return int(name)
    return _descriptor(os.path.join(folder, os.readlink(path))) if os.path.islink(path) else None


def _through(path: str, flags: int) -> int:
    """Open a file that is not regular. An open one is duplicated: opened anew it would be cut.

    It is not created, which Linux refuses for another user's FIFO in /tmp.
    """
    print(end="", flush=True)  # it may be standard output, which there need not be
    number = _descriptor(path)
    return os.open(path, os.O_WRONLY) if number is None else os.dup(number)


def _beside(path: str, like: "Optional[os.stat_result]") -> "IO[bytes]":
    """Return a new file in the same folder, whose name is unpredictable and never too long."""
    rights = 0o666 if like is None else 0o600  # less what the process withholds (umask)
    return open(
        os.path.join(os.path.dirname(path), f".compat-{os.urandom(8).hex()}.tmp"),
        "xb",
        opener=lambda path, flags: os.open(path, flags | NOFOLLOW, rights),
    )
