"""Checks that the steps of a parallelized model ran on its devices.

Two independent records are compared: the batches that compat counted where it
split them, and the operations that the framework reports for each device.
"""

import contextlib
import sys
import weakref
from _thread import get_ident
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
)

from .. import errors
from .._configuration import settings
from . import work
from .process import process

#: Kinds of steps, as a message names them.
KINDS = {"train": "training step", "evaluate": "evaluation", "predict": "prediction"}

# The batches of this thread; those of all, where it has others compute for it.
_COUNTS = work.batches_of_thread, work.batches


class Executed(Dict[str, int]):
    """Numbers of operations that each device has executed.

    Attributes:
        is_known: False where the framework could not record it this time.
    """

    is_known = True


class _RunningSteps:
    """The steps that are being checked, each by its check, kind and thread.

    Graphs count batches for all threads together. A step is disturbed where another thread had one
    meanwhile, since what graphs have counted may be the other one's.
    """

    def __init__(self) -> None:
        self._disturbed: "Dict[Any, bool]" = {}
        # Those that have yet to begin, as where a function has only been traced.
        self._waiting: "Set[Any]" = set()

    def __contains__(self, step: "Any") -> bool:
        return step in self._disturbed

    def has_any(self, check: "Any") -> bool:
        """Return whether this thread has a step of a check, of any kind."""
        steps = list(self._disturbed)
        return any((owner, thread) == (check, get_ident()) for owner, _, thread in steps)

    def begin(self, step: "Any", waits: bool) -> None:
        """Note that a step begins, or that it may begin any time."""
        self._disturbed[step] = False
        if waits:
            self._waiting.add(step)
        threads = sys._current_frames()  # others have ended, within a loop of the script's, say
        steps = [
            running_step
            for running_step in list(self._disturbed)
            if running_step not in self._waiting
        ]
        steps = [running_step for running_step in steps if running_step[-1] in threads]
        if len({thread for _, _, thread in steps}) > 1:
            self._disturbed.update(dict.fromkeys(steps, True))

    def end(self, step: "Any") -> bool:
        """Note that a step has ended, and return whether it was disturbed."""
        self._waiting.discard(step)
        return self._disturbed.pop(step, False)


_running = _RunningSteps()


class _Baseline:
    """Counts before a step.

    Attributes:
        calls: how often each hook was called.
    """

    def __init__(self, hooks: "Dict[str, Any]") -> None:
        self._counts = [read() for read in _COUNTS]
        self.calls = {name: hook.calls for name, hook in hooks.items()}

    def batches_since(self, kind: str) -> "List[Any]":
        """Return the batches of a kind of step that were counted since then."""
        for read, counted in zip(_COUNTS, self._counts):
            batches = [
                batch
                for batch, number in read().items()
                if number > counted.get(batch, 0) and (batch[2] or kind != "train")
            ]
            if batches:
                return batches
        return []


class UsageCheck:
    """Checks the first training step, evaluation and prediction of one model.

    A step is checked again when the model has another function for it, as after ``compile()``.

    Arguments:
        model: the model's name.
        devices: its devices, as the backend names them.
        record: returns a context manager that gives a dictionary, which has the number of
            operations that each device executed in the first step when the block ends. None: the
            framework does not report that.
        hooks: returns the methods that compat replaced on the model, by name, which count their
            ``calls``.
        why_unsplit: returns the text of the warning where a user-defined training step splits no
            batch, or None.
        is_unsplit: returns whether a warning has said that the model runs unsplit, or some of it.
    """

    def __init__(
        self,
        model: str,
        devices: "Sequence[str]",
        record: "Optional[Callable[[], ContextManager[Dict[str, int]]]]",
        hooks: "Callable[[], Dict[str, Any]]",
        why_unsplit: "Callable[[], Optional[str]]" = lambda: None,
        is_unsplit: "Callable[[], bool]" = lambda: False,
    ) -> None:
        self.model, self.devices = model, list(devices)
        self.record, self.hooks = record, hooks
        self.why_unsplit, self.is_unsplit = why_unsplit, is_unsplit
        self._confirmed: "Dict[str, Any]" = {}  # by kind, the function that was checked
        self._own = object()  # in keys of steps, where this would be kept alive
        self._told: "Set[str]" = set()  # kinds of which a problem is reported already

    def is_due(self, kind: str, running: bool = False) -> bool:
        """Return whether a step outside the framework's own methods is to be checked.

        Arguments:
            kind: one of ``KINDS``.
            running: whether also within one that is being checked.
        """
        is_running = not running and _running.has_any(self._own)
        return not (kind in self._confirmed or kind in self._told or is_running or work.uncounted)

    def missed(self, kind: str) -> None:
        """Report a step of a kind that has reached none of the hooks."""
        calls = {hook: method.calls for hook, method in self.hooks().items()}
        self._told.add(kind)
        self._report_unsplit(kind, "", calls)

    @contextlib.contextmanager
    def step(
        self,
        kind: str,
        function: "Callable[[], Any]" = lambda: None,
        name: str = "",
        waits: bool = False,
    ) -> "Iterator[None]":
        """Check one or more steps of a kind, which run in a block.

        Arguments:
            kind: one of ``KINDS``.
            function: returns what the framework calls for such a step, where it keeps that.
            name: the framework's method that does the steps, for messages.
            waits: whether the step begins later, or never.

        Raises:
            DevicesNotUsedError: devices were not used, under ``configure_gpu(strict=True)``.
        """
        key = self._own, kind, get_ident()
        is_checked = _is_of(self._confirmed.get(kind), function())
        if is_checked or key in _running or work.uncounted:
            yield
            return
        before = _Baseline(self.hooks())
        executed: "Optional[Dict[str, int]]" = None
        _running.begin(key, waits)
        try:
            with contextlib.ExitStack() as recording:
                with contextlib.suppress(errors.UnsupportedError):
                    executed = recording.enter_context(self.record()) if self.record else None
                yield
        finally:
            is_disturbed = _running.end(key) and bool(process.graph_counters)
        is_known = getattr(executed, "is_known", True) and not is_disturbed
        batches = before.batches_since(kind)
        if kind in self._told:  # within, already
            self._told.discard(kind)
            self._confirmed[kind] = reference_to(function())
            return
        problem = None
        if not is_disturbed:
            problem = self._problem(batches, executed if is_known else None, before.calls)
        if is_known or problem:
            self._confirmed[kind] = reference_to(function())
        if problem and not batches:
            self._report_unsplit(kind, name, before.calls)
        elif problem:
            self._report(f"the first {KINDS[kind]}", name, problem)

    def call(self, method: "Callable[..., Any]", args: "Sequence[Any]", kwargs: "Any") -> "Any":
        """Call a public method of the framework's whose steps are checked."""
        return method(*args, **kwargs)

    def _problem(
        self,
        counted: "Sequence[Any]",
        executed: "Optional[Dict[str, int]]",
        calls: "Dict[str, int]",
    ) -> "Optional[str]":
        """Return the problem, a clause that follows the name of the step, or None."""
        if not counted:
            if self.is_unsplit() or executed is not None and not any(executed.values()):
                return None  # a warning has said so; or nothing was computed
            return "no batch was split."
        if not self.is_unsplit() and all(_is_alone(sizes) for _, sizes, _ in counted):
            return "one device computed every batch alone. " + self._unreached(calls)
        claimed = {
            device
            for devices, sizes, _ in counted
            for device, rows in zip(devices, sizes or ())
            if rows and device in self.devices
        }
        if executed is None:
            return None
        if not any(executed.values()):
            return "the framework recorded no operation on any device. " + self._unreached(calls)
        idle = [device for device in self.devices if device in claimed and not executed.get(device)]
        if not idle:
            return None
        process.idle_devices.update(idle)
        return (
            f"the framework executed no operation on {settings.listed(idle)}, to which rows were "
            "given. The session, context or mesh in use has fewer devices than configure_gpu() has "
            "set up, or places operations elsewhere. Let compat configure it: leave out "
            "device_count, visible_device_list and the like."
        )

    def _report_unsplit(self, kind: str, name: str, calls: "Dict[str, int]") -> None:
        """Report that no batch was split."""
        why = self.why_unsplit() if kind == "train" else None
        if why:
            report_text(self.model, why)
        else:
            split = f"no batch was split over {settings.listed(self.devices)}. "
            self._report(f"the first {KINDS[kind]}", name, split + self._unreached(calls))

    def _unreached(self, calls: "Dict[str, int]") -> str:
        hooks = self.hooks().items()
        uncalled = [name for name, method in hooks if method.calls == calls.get(name, 0)]
        return unreached(f"model.{name}" for name in uncalled)

    def _report(self, step: str, name: str, problem: str) -> None:
        report(self.model, step, name, problem)


def _nothing() -> None:
    """Stand for a reference to a function that the framework has not made."""


def reference_to(function: "Any") -> "Callable[[], Any]":
    """Return a weak reference, if possible, so that no check keeps a function alive.

    Of None it is ``_nothing``, which differs from a dead reference.
    """
    if function is None:
        return _nothing
    try:
        return weakref.ref(function)
    except TypeError:
        return lambda: function


def _is_of(reference: "Optional[Callable[[], Any]]", function: "Any") -> bool:
    """Return whether a reference, or None, is one to this function."""
    if function is None:
        return reference is _nothing
    return reference is not None and reference() is function


def report(model: str, step: str, name: str, problem: str) -> None:
    """Warn of a model that did not run as ``parallelize()`` set it up, and note it for reports.

    Arguments:
        model: its name.
        step: when: "the first training step".
        name: the framework's method that did it; may be empty.
        problem: a clause that follows these.

    Raises:
        DevicesNotUsedError: in place of the warning, under ``configure_gpu(strict=True)``.
    """
    where = f" ({name}())" if name else ""
    report_text(model, f"In {step} of model {model!r}{where} {problem}")


def report_text(model: str, text: str) -> None:
    """Warn of a model, as ``report`` does, with a complete text."""
    process.unused.setdefault(model, text)
    configuration = process.configuration
    if configuration is not None and configuration.settings.strict:
        raise errors.DevicesNotUsedError(text)
    errors.warn(text)


def unreached(names: "Iterable[str]") -> str:
    """Return the sentences that hooks were not called, with the remedy.

    Arguments:
        names: of functions and methods; none: it is unknown which.
    """
    hooks = settings.listed([f"{name}()" for name in names])
    cause = "Something else runs the model in place of what parallelize() set up."
    if hooks:
        cause = f"What parallelize() put in place of {hooks} was not called."
    return (
        f"{cause} Another library has replaced it, or this version of the framework takes "
        "another way: call parallelize() after such libraries have changed the model, and "
        "report it with the output of `python -m compat env` if there is none."
    )


def _is_alone(sizes: "Optional[Sequence[int]]") -> bool:
    """Return whether one device of several computed a batch that could have been split."""
    return sizes is not None and len(sizes) > 1 and max(sizes) == sum(sizes) > 1
