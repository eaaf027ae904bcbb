"""The public calls that tell: what there is, and what each device did, how much and when."""

from .. import _api, _ranks
from .._configuration import settings
from .._runtime.process import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ContextManager

    from .._runtime.operation_times import Timeline
    from .._runtime.reporting import Report
    from .environment import Environment


def environment() -> "Environment":
    """Return what ``compat env`` tells: backend, versions, GPUs, what is set, and what is wrong.

    Returns:
        A dictionary with the keys of ``compat env --json``; print it for the report, or leave it as
        the last line of a notebook's cell for a table.
    """
    from .environment import collect  # for start-up time

    return collect()


def report() -> "Report":
    """Return a report of what each configured device has done so far.

    Rows and steps are counted where each batch of a parallelized model is split, so they are those
    that were computed. In a rank they are this rank's own, of training and evaluation;
    ``compat run --report`` shows all ranks together.

    Returns:
        A ``Report``: print it for a table and a verdict; ``as_dict()``, ``to_json()`` and, with a
        picture, ``to_html()`` return the same. In a notebook it is shown so.
    """
    from .._runtime import reporting  # for start-up time

    configuration, place = process.configuration, _ranks.own_place()
    names, peaks = [], {}
    models = {name: settings.listed(devices) for name, devices in process.parallelized_before}
    if configuration is not None:
        names, peaks = configuration.devices, _api.configured_backend().memory_peaks()
        models.update(configuration.parallelized)
    rank = None if place is None else place.rank
    return reporting.of_this_process(names, rank, models, peaks)


def timeline(path: str) -> "ContextManager[Timeline]":
    """Record what each device executes within a block, and write it as a timeline.

    ::

        with compat.timeline("timeline.json"):
            model.fit(x, y)

    Open the file in a browser, at ui.perfetto.dev or chrome://tracing: each configured device has
    a line of its own. The framework's own profiler records, which slows the block down and keeps
    each operation in memory: record some steps, not a whole training. ``report()`` then has the
    share of that time that each device was busy.

    Arguments:
        path: the file, which is written when the block ends, even by an exception. In a rank, the
            rank's number comes before the ending: ``timeline.rank1.json``.

    Returns:
        A context manager. What it gives is in a notebook, once the block has ended, a picture of
        when each device was executing something.

    Raises:
        InvalidArgumentError: the file cannot be written, or a timeline is being recorded already
            (a ``ValueError``).
        UnsupportedError: the framework does not record when its devices execute what: Theano and
            CNTK (a ``NotImplementedError``).
    """
    from .._runtime import operation_times  # for start-up time

    return operation_times.recorded(path, _api.configured_backend(), _ranks.own_place())
