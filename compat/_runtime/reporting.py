"""The report of each device's work, an object that prints as a table."""

import textwrap
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .. import errors
from .._configuration import settings
from . import markup, operation_times, work
from .process import process

WIDTH = 80
# Of a model on ranks.
_ALONE = "did not train together with the others"


class DeviceUse(NamedTuple):
    """The work of one device, or of one rank.

    Attributes:
        device: its name, as the framework has it.
        rank: the rank that has the device; None without ranks.
        rows: how many rows it has computed of the batches of parallelized models.
        training_rows: how many of these were training.
        steps: batches of which it has computed rows.
        busy: the part of the last ``timeline()`` in which it was executing operations; or None.
        memory_peak: the peak of the framework's memory on its GPU, in bytes; or None.
        idle: why it has computed no rows, a phrase; None where it has.
        timeline_seconds: how long the last ``timeline()`` is; or None.
        busy_parts: ``busy`` of each of equal parts of it, in their order; or None.
    """

    device: str
    rank: "Optional[int]" = None
    rows: int = 0
    training_rows: int = 0
    steps: int = 0
    busy: "Optional[float]" = None
    memory_peak: "Optional[int]" = None
    idle: "Optional[str]" = None
    timeline_seconds: "Optional[float]" = None
    busy_parts: "Optional[Sequence[float]]" = None

    def __str__(self) -> str:
        return self.device if self.rank is None else f"rank {self.rank}"

    @property
    def title(self) -> str:
        """The device's name, with its rank where there are several."""
        return self.device if self.rank is None else f"{self}: {self.device}"


class Report(NamedTuple):
    """The work of each device: printable, and as a dictionary.

    Attributes:
        devices: a ``DeviceUse`` for each configured device; or for each rank.
        models: where each parallelized model runs, by its name.
        unsplit: how far each model is split that is not split in full, by its name.
        not_told: how many batches had an unknown number of rows.
        absent: ranks that ended without a report.
        comparisons: how often the ranks have compared their weights.
        unused: the warning of each model that did not run on all of its devices, by its name.
        same_rows: the warning of each model that all ranks trained on the same rows, by its name.
        refused: models for which ``parallelize()`` has failed, by name, and the class of the error.
    """

    devices: "List[DeviceUse]"
    models: "Mapping[str, str]"
    unsplit: "Mapping[str, str]" = {}
    not_told: int = 0
    absent: "Sequence[int]" = ()
    comparisons: int = 0
    unused: "Mapping[str, str]" = {}
    same_rows: "Mapping[str, str]" = {}
    refused: "Mapping[str, str]" = {}

    @property
    def all_worked(self) -> bool:
        """True if every device has computed rows of its own of each model that runs on several."""
        if not self.devices or self.absent or self.unused or self.same_rows:
            return False
        return all(device.rows for device in self.devices)

    @property
    def verdict(self) -> str:
        """A sentence or two on whether every device was used, derived from the counts."""
        if not self.absent:
            return self._verdict_of_counts()
        ranks = errors.numbered_ranks(self.absent)
        absent = f"No report came from {ranks}: ended by a signal, or by its machine."
        return self._verdict_of_counts() + " " + absent if self.devices else absent

    def _verdict_of_counts(self) -> str:
        uses, several = self.devices, len(self.devices) > 1
        if not any(use.rows for use in uses):
            return self._nothing_counted()
        word = "devices" if uses[0].rank is None else "ranks"
        rows = sorted(use.rows for use in uses if use.rows)
        if all(use.rows for use in uses):
            who = f"All {len(uses)} {word}" if several else str(uses[0])
            if self.absent:
                who = f"{len(uses)} of {len(uses) + len(self.absent)} {word}"
            many = _rows(rows[0]) if rows[0] == rows[-1] else f"{rows[0]:,} to {rows[-1]:,} rows"
            is_in_vain = word == "ranks" and (self.unused or self.same_rows)
            worked = "computed rows" if is_in_vain else "worked"
            verdict = "{} {}: {}{}.".format(who, worked, many, " each" if several else "")
        else:
            verdict = f"Only {len(rows)} of {len(uses) + len(self.absent)} {word} worked."
            for reason in dict.fromkeys(use.idle for use in uses if use.idle):
                names = [str(use) for use in uses if use.idle == reason]
                named = settings.listed(names)
                if len(names) <= settings.LISTED:
                    named = " and ".join(names)
                verdict += f" {named} got no rows: {reason}."
        if self.unused:
            done = "did not run on all devices" if word == "devices" else _ALONE
            verdict += f" {_models(self.unused)} {done}: see below."
        elif self.same_rows:
            were = "was" if len(self.same_rows) == 1 else "were"
            verdict += (
                f" {_models(self.same_rows)} {were} trained on the same rows by all ranks: see "
                "below."
            )
        elif not any(use.training_rows for use in uses):
            verdict += " None of it was training: no model was trained."
        if self.not_told:
            verdict += f" {_not_told(self.not_told)}"
        return verdict

    def _nothing_counted(self) -> str:
        if self.unused and any(use.rank is not None for use in self.devices):
            return f"No batch was counted. {_models(self.unused)} {_ALONE}: see below."
        if self.unused:
            return f"No batch was split. {_models(self.unused)} did not run on all devices."
        if self.not_told:
            return _not_told(self.not_told)
        if not self.models and self.refused:
            return f"No batch was counted: {errors.not_parallelized(self.refused)}."
        if not self.models:
            consequence = "none was split over devices"
            if any(use.rank is not None for use in self.devices):
                consequence = "the ranks trained nothing together"
            return (
                "No batch was counted: no model was given to compat.parallelize(), so "
                f"{consequence}."
            )
        model, where = next(iter(self.models.items()))
        if any(use.rank is not None for use in self.devices):
            return f"No batch was counted: model {model!r} runs as {where}, and was not trained."
        if "," in where:
            return (
                f"No batch was split: model {model!r} was given {where}, and was never trained or "
                "called, or ran in one piece."
            )
        return (
            f"No batch was counted: model {model!r} runs on one device, {where}, so none was split "
            "over devices."
        )

    def as_dict(self) -> "Dict[str, Any]":
        """Return the report for JSON, with the keys of docs/report.md."""
        report = dict(self._asdict(), absent=list(self.absent))
        report["devices"] = [dict(device._asdict()) for device in self.devices]
        return dict(report, all_worked=self.all_worked, verdict=self.verdict)

    def to_json(self) -> str:
        """Return the report as JSON."""
        import json  # for start-up time

        return json.dumps(self.as_dict(), indent=2)

    def __repr__(self) -> str:
        return f"<Report {self.verdict}>"

    def __str__(self) -> str:
        sentences = [self.verdict] + self._unsplit_lines() + self._warnings()
        lines = [line for text in sentences for line in textwrap.wrap(text, WIDTH)]
        return "\n".join(_table(self.devices) + lines)

    def to_html(self) -> str:
        """Return the report as a page for a browser, with a picture that has a row per device."""
        return markup.document("What each device did", self._repr_html_())

    def _repr_html_(self) -> str:
        uses, most = self.devices, max([use.rows for use in self.devices] + [1])
        shares = [(use, use.rows / most) for use in uses]
        lanes = [markup.Lane(u.title, _rows(u.rows), share, wrong=not share) for u, share in shares]
        lanes += [markup.Lane(f"rank {n}", "no report", 0, wrong=True) for n in self.absent]
        shown = [markup.sentence(self.verdict, not self.all_worked)]
        shown += map(markup.sentence, self._unsplit_lines())
        shown += [markup.sentence(text, True) for text in self._warnings()]
        shown += [markup.picture("Rows that each device has computed", lanes)] if lanes else []
        recorded = [(use.title, use) for use in uses if use.busy_parts]
        if recorded:
            text = "When each device was executing operations, in the last timeline{}:"
            from_where = "; of each rank, from its own first one on" * (uses[0].rank is not None)
            shown.append(markup.sentence(text.format(from_where)))
            shown.append(operation_times.picture(recorded))
        if uses:
            columns = _columns(uses)
            if any(use.idle for use in uses):
                columns.append(("no rows because", [use.idle or "" for use in uses]))
            rows = zip(*([name] + values for name, values in columns))
            idle = [1 + place for place, use in enumerate(uses) if not use.rows]
            shown.append(markup.table(rows, idle, heading=True))
        return "\n".join(shown)

    def _warnings(self) -> "List[str]":
        return [*self.unused.values(), *self.same_rows.values()]

    def _unsplit_lines(self) -> "List[str]":
        return ["Model {!r} ran {}.".format(*pair) for pair in sorted(self.unsplit.items())]


def joined(reports: "Sequence[Mapping[str, Any]]", absent: "Sequence[int]" = ()) -> "Report":
    """Return the report of several ranks.

    Arguments:
        reports: that of each rank, as ``as_dict()`` returns it.
        absent: ranks that have left none.
    """
    uses = [DeviceUse(**use) for report in reports for use in report["devices"]]
    models, unsplit, unused, same_rows, refused = (
        {name: where for report in reports for name, where in report[key].items()}
        for key in ("models", "unsplit", "unused", "same_rows", "refused")
    )
    not_told = sum(report["not_told"] for report in reports)
    comparisons = min([report["comparisons"] for report in reports] or [0])
    uses.sort(key=lambda use: use.rank or 0)
    return Report(uses, models, unsplit, not_told, absent, comparisons, unused, same_rows, refused)


def _models(names: "Mapping[str, str]") -> str:
    word = "Model " if len(names) == 1 else "Models "
    return word + settings.listed([repr(name) for name in names])


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number:,} rows"


def _not_told(batches: int) -> str:
    return (
        "The rows of {:,} {} are not known: the model reads tensors of its own, which nothing "
        "feeds.".format(batches, "batch" if batches == 1 else "batches")
    )


def _columns(uses: "Sequence[DeviceUse]") -> "List[Tuple[str, List[str]]]":
    """Return columns with their names, without those that are unknown of all devices."""
    columns = [
        ("rank", ["-" if use.rank is None else str(use.rank) for use in uses]),
        ("device", [use.device for use in uses]),
        ("rows", [f"{use.rows:,}" for use in uses]),
        ("in training", [f"{use.training_rows:,}" for use in uses]),
        ("steps", [f"{use.steps:,}" for use in uses]),
        ("busy", [operation_times.share(use.busy) for use in uses]),
        ("memory peak", [_mebibytes(use.memory_peak) for use in uses]),
    ]
    return [column for column in columns if any(value != "-" for value in column[1])]


def _table(uses: "Sequence[DeviceUse]") -> "List[str]":
    """Aligned columns."""
    cells = []
    for name, values in _columns(uses):
        width = max(map(len, [name] + values))
        justified = str.ljust if name == "device" else str.rjust
        cells.append([justified(value, width) for value in [name] + values])
    return ["  ".join(line).rstrip() for line in zip(*cells)]


def _mebibytes(value: "Optional[int]") -> str:
    return "-" if value is None else f"{value / 2.0**20:,.0f} MiB"


# Counted batches -----------------------------------------------------------------------------


def of_this_process(
    names: "Sequence[str]",
    rank: "Optional[int]",
    models: "Mapping[str, str]",
    memory_peaks: "Mapping[str, int]",
) -> "Report":
    """Return the report of this process so far.

    Arguments:
        names: of the configured devices; of a rank its one.
        rank: this process's; None without ranks.
        models: where each parallelized model runs, by its name.
        memory_peaks: of GPUs, by their names, in bytes.
    """
    if rank is not None:
        names = list(names[:1]) or ["-"]
    seen: "Dict[str, List[Any]]" = {name: [] for name in names}
    not_told = 0
    for (devices, sizes, training), number in sorted(work.batches().items(), key=str):
        not_told += number if sizes is None else 0
        # A device may not be configured, or no more.
        for name, size in zip(list(seen)[:1] if devices == ("",) else devices, sizes or ()):
            size = 0 if name in process.idle_devices else size
            seen.setdefault(name, []).append((size * number, number, training, sizes))
    uses = []
    for name, batches in seen.items():
        rows = sum(rows for rows, _, _, _ in batches)
        use = DeviceUse(
            name,
            rank,
            rows,
            training_rows=sum(rows for rows, _, training, _ in batches if training),
            steps=sum(number for rows, number, _, _ in batches if rows),
            memory_peak=memory_peaks.get(name),
            idle=None if rows else _why_idle(name, [sizes for _, _, _, sizes in batches]),
            **process.activities[name]._asdict() if name in process.activities else {},
        )
        uses.append(use)
    unsplit, unused = process.unsplit.by_name(), dict(process.unused)
    more = dict(process.same_rows), dict(process.refused)
    return Report(uses, models, unsplit, not_told, (), process.comparisons, unused, *more)


def _why_idle(name: str, batches: "Sequence[Sequence[int]]") -> str:
    """Return why a device got no rows, by the sizes of the shards of each batch."""
    if name in process.idle_devices:
        return "the framework executed no operation there"
    if not batches:
        return "no batch was split over it"
    largest = max(map(sum, batches))
    fewest = min(map(len, batches))
    if largest < fewest:
        return f"no batch had more than {_rows(largest)}, too few for {fewest} devices"
    if all(sum(map(bool, sizes)) == 1 for sizes in batches):
        return "the batches could not be split and ran on one device"
    return f"batches of up to {largest:,} rows left none for it"
