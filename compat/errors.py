"""Every exception class of compat, and the texts that several places raise.

Each text states the request, the finding and the remedy. Each class is a ``CompatError`` and
the built-in exception that a caller would catch. A text with one caller is where it is raised.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Iterable, Mapping, Optional, Sequence, Tuple

    from ._ranks.place import Place

_LONGEST = 1900  # characters of a message


def shortened(text: str) -> str:
    """Return a message, without its middle if it repeats a very long value."""
    rest = len(text) - _LONGEST
    if rest <= 0:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} ... ({rest} characters left out) ... {text[-half:]}"


class CompatError(Exception):
    """Base class of all errors of compat."""

    # TensorFlow's autograph raises such classes again, with its own lines in the text; others
    # become a StagingError.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__

    def __str__(self) -> str:
        """Return the message, shortened."""
        return shortened(super().__str__())


class InvalidArgumentError(CompatError, ValueError):
    """An argument has a form or a value that compat does not know."""

    problem = ""  # of the value alone, for the text about a command's option


class UnknownOptionError(CompatError, TypeError):
    """A keyword option that no backend knows."""


class UnsupportedError(CompatError, NotImplementedError):
    """The backend lacks a capability."""


class NotInstalledError(CompatError, ImportError):
    """The requested framework is not installed."""


class PythonNotFoundError(CompatError, OSError):
    """The requested interpreter does not exist."""


class BrokenInstallError(CompatError, ImportError):
    """The framework is installed, but importing it fails."""


class AmbiguousBackendError(CompatError, RuntimeError):
    """Several backends fit, and compat does not guess."""


class DevicesNotUsedError(CompatError, RuntimeError):
    """A parallelized model did not run on all of its devices."""


class TooLateError(CompatError, RuntimeError):
    """The framework has already fixed a setting."""


class AlreadyConfiguredError(CompatError, RuntimeError):
    """A second ``configure_gpu()`` contradicts the first."""


class DevicesNotFoundError(CompatError, RuntimeError):
    """There are fewer devices than requested, under ``strict=True``."""


class DeviceFailedError(CompatError, RuntimeError):
    """A requested device did not come up in the framework."""


class NotAModelError(CompatError, TypeError):
    """The argument of ``parallelize()`` is not a model of an installed Keras."""


class ResultsDifferError(CompatError, ArithmeticError):
    """A model computes other results on several devices than on one."""


class RankError(CompatError, RuntimeError):
    """Ranks cannot train together."""


class RankLostError(RankError):
    """Another rank failed, ended, or does not answer; this one cannot continue without it."""


class ConfigurationFileError(CompatError, OSError):
    """A configuration file cannot be read or written."""


class ModelFileError(CompatError, OSError):
    """A saved model cannot be read or written, or is not of the requested kind."""


class CompatWarning(UserWarning):
    """Work continues, but not as requested."""


def class_of(value: object) -> str:
    """Return the class of a value that is not a model, as a phrase.

    A class itself may lack a call.
    """
    if isinstance(value, type):
        return f"the class {value.__name__!r} itself"
    return repr(type(value).__module__ + "." + type(value).__name__)


GPUS_OPTIONS = """\
    --gpus 0,2      these ids, counted inside CUDA_VISIBLE_DEVICES where it is set
    --gpus 2        the one GPU with this id
    --gpus GPU-8932f937
                    GPUs, or MIG instances, by name
    --gpus free     the idle GPUs
    --gpus free:2   two idle GPUs
    --gpus cpu      no GPU
    --gpus all      every visible GPU, as without --gpus"""


# Choosing the backend -------------------------------------------------------------------------


def broken_install(framework: str, problem: object) -> "BrokenInstallError":
    """Return the error that a framework is installed, but cannot be imported."""
    return BrokenInstallError(
        f"{framework} is installed, but importing it fails: {problem}. Run `python -c 'import "
        f"{framework}'` to see all of it."
    )


# Configuring ----------------------------------------------------------------------------------


def too_late(framework: str, problem: str, remedy: str) -> "TooLateError":
    """Return the error that a setting cannot be changed any more."""
    return TooLateError(
        f"configure_gpu() came too late for {framework}: {problem}.\n{remedy}" + in_notebook()
    )


def in_notebook() -> str:
    """Return the remedy for code in a notebook's kernel, a sentence; elsewhere nothing."""
    if "ipykernel" not in sys.modules:
        return ""
    return " In this notebook: restart the kernel, and run the cell with configure_gpu() first."


def device_failed(framework: str, device: str, problem: object, remedy: str) -> "DeviceFailedError":
    """Return the error that a framework did not bring up a device."""
    return DeviceFailedError(f"{framework} did not bring up {device}: {problem}.\n{remedy}")


def unsupported(backend: str, action: str, remedy: str) -> "UnsupportedError":
    """Return the error that a backend lacks a capability: it "cannot" do the ``action``."""
    return UnsupportedError(f"{backend} cannot {action}. {remedy}")


# Parallelizing --------------------------------------------------------------------------------


def builds_no_model(function: str, value: object) -> "NotAModelError":
    """Return the error that a function passed to ``parallelize()`` returns no model."""
    return NotAModelError(
        f"parallelize() was given the function {function}, which returned {class_of(value)}, not "
        "a model."
    )


# Ranks ----------------------------------------------------------------------------------------


def too_few_rows(rows: int, size: int) -> "InvalidArgumentError":
    """Return the error that ``shard()`` cannot give each rank a row."""
    return InvalidArgumentError(
        f"{rows} rows are too few for {size} ranks. Give shard() one row per rank or more."
    )


def numbered_ranks(numbers: "Iterable[int]") -> str:
    """Return ranks by their numbers, as a phrase."""
    texts = [str(number) for number in numbers]
    if len(texts) < 2:
        return "rank " + "".join(texts)
    return "ranks {} and {}".format(", ".join(texts[:-1]), texts[-1])


def not_parallelized(refused: "Mapping[str, str]") -> str:
    """Return that ``parallelize()`` has failed, as a clause.

    Arguments:
        refused: the class of the error, by the name of the model.
    """
    name, error = next(iter(refused.items()))
    more = len(refused) - 1
    others = f" and {more} other{'s' * (more > 1)}" if more else ""
    return f"compat.parallelize() failed for {name!r}{others} ({error})"


def not_writable(option: str, error: "OSError") -> "InvalidArgumentError":
    """Return the error that an output file, as the user has named it, is not writable."""
    return InvalidArgumentError(
        f"{option} cannot be written: {error.strerror}. Name a file in a folder that is there and "
        "that you may write to; nothing was started."
    )


def profiler_runs(framework: str) -> "InvalidArgumentError":
    """Return the error that a framework's profiler is in use already."""
    return InvalidArgumentError(
        f"timeline() records with the profiler of {framework}, which is recording already, for "
        "something else. End that before the block."
    )


def no_ranks(backend: str) -> "UnsupportedError":
    """Return the error that a backend does not train on several ranks."""
    return unsupported(
        backend,
        "train as one of several ranks yet",
        "Start the script without a launcher (compat run without -n); parallelize() then uses the "
        "devices of one process.",
    )


def rank_lost(
    place: "Place", waited: str, absent: "Sequence[int]", problem: object
) -> "RankLostError":
    """Return the error that a rank has waited in vain for those that are ``absent``."""
    lost = numbered_ranks(absent) if absent else "another rank"
    waited += users_line()
    return RankLostError(
        f"Rank {place.rank} of {place.size} waited {waited}, but {lost} failed, ended or did not "
        f"come: {problem}. Look at what {lost} printed. (COMPAT_TIMEOUT, or compat run --timeout, "
        "sets how many seconds ranks wait.)"
    )


def user_of_host(hosts: str, launcher: str) -> "InvalidArgumentError":
    """Return the error that a launcher takes no user names in ``--hosts``."""
    return InvalidArgumentError(
        f"--hosts {hosts}: {launcher} takes no user@ in front of a machine. Name the user in "
        "~/.ssh/config, as User under the machine's Host."
    )


def ranks_differ(place: "Place", model: str) -> "RankError":
    """Return the error that a model has other variables on another rank."""
    return RankError(
        f"Model {model!r} has other weights on rank {place.rank} than on rank 0: their number or "
        "their shapes differ. Build the same model, and compile it with the same optimizer, on "
        "every rank."
    )


# Names of old scripts -------------------------------------------------------------------------


def shadowed(script: str, path: str) -> str:
    """Return the warning that a script finds another module named compat.

    Arguments:
        script: the script.
        path: of the module, or of its package's ``__init__.py``.
    """
    import shlex  # for start-up time

    folder, name = os.path.split(str(path))
    if name == "__init__.py":
        folder, name = os.path.split(folder)
    old, new = (shlex.quote(os.path.join(folder, stem)) for stem in (name, "my_" + name))
    return (
        f"`import compat` in {script} finds {path}, not this package. To use "
        f"compat.configure_gpu() there, rename that one, also where it is imported: mv {old} {new}"
    )


# Arguments ------------------------------------------------------------------------------------


def invalid_number_option(option: str, value: object) -> "InvalidArgumentError":
    """Return the error that an option is not a number from 1."""
    return InvalidArgumentError(f"{option}={value!r} is not understood. Use a number, 1 or more.")


# Devices --------------------------------------------------------------------------------------


def fewer(shortage: "Tuple[str, str]", going_on_with: str, strict: bool) -> str:
    """Return the warning that there are fewer devices than requested.

    Arguments:
        shortage: the request, and the devices found.
        going_on_with: the devices in use.
        strict: whether that is an error.

    Raises:
        DevicesNotFoundError: under ``strict``.
    """
    text = "{} was asked for, but {}. {}.".format
    if strict:
        raise DevicesNotFoundError(
            text(*shortage, "Ask for fewer, or drop strict=True to go on with what there is")
        )
    return text(*shortage, f"Going on with {going_on_with}")


# Warnings -------------------------------------------------------------------------------------


def warn(text: str) -> None:
    """Issue a ``CompatWarning`` at the user's line that led to it.

    Without one, as in a thread of a framework, at the innermost line outside of compat.
    """
    import warnings

    _, level = _users_frame(sys._getframe(1))
    warnings.warn(shortened(text), CompatWarning, stacklevel=level + 1)


def users_line() -> str:
    """Return the user's line that the main thread executes: " (train.py, line 12)", or ""."""
    import threading  # for start-up time

    frame, _ = _users_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    if frame is None:
        return ""
    return f" ({os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno})"


def at_lines(lines: "Iterable[str]") -> str:
    """Return results of ``users_line()`` as one phrase: " (a.py, line 1; a.py, line 9)"."""
    named = [line.strip(" ()") for line in lines if line]
    return " ({})".format("; ".join(named)) if named else ""


def innermost_line(frames: "Sequence[Tuple[str, int]]") -> "Optional[str]":
    """Return the innermost line that is the user's: "train.py, line 12"; or None.

    Arguments:
        frames: pairs of a file and a line, the innermost last.
    """
    for path, line in reversed(frames):
        if is_users_file(path) and not path.startswith("<"):
            return f"{os.path.basename(path)}, line {line}"
    return None


def is_users_file(path: str) -> bool:
    """Return whether a file belongs neither to an installed package nor to Python's library."""
    libraries = [
        os.path.dirname(module_file) + os.sep
        for module_file in (os.__file__, os.path.abspath(__file__))
    ]
    if path.startswith((*libraries, "<frozen")) or "-packages" + os.sep in path:
        return False
    # Functions converted by autograph are in a file that is gone: the line of the caller helps.
    return not os.path.basename(path).startswith("__autograph_generated_file")


def _users_frame(frame: "Optional[FrameType]") -> "Tuple[Optional[FrameType], int]":
    """Return the innermost frame that is the user's.

    Returns:
        That frame or None, and its distance from the first one, counted from 1; where it is None,
        that of the innermost frame outside of compat.
    """
    level, outside = 1, None
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != __name__.partition(".")[0]:
            outside = outside or level
            if is_users_file(frame.f_code.co_filename):
                return frame, level
        frame, level = frame.f_back, level + 1
    return None, outside or 1
