"""The arguments of ``configure_gpu()``, normalised, and its report."""

from .. import errors
from .numeric import whole_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

    from .._ranks.place import Place
    from .device_choice import Devices

FLOATX = ("float16", "bfloat16", "float32", "float64")
_SWITCHES = {"yes": True, "true": True, "on": True, "1": True}
_SWITCHES.update({"no": False, "false": False, "off": False, "0": False, "none": False})
#: The most devices that a report lists.
LISTED = 16
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


class _Value:
    """A value that equals others of its class with the same attributes."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)


class Memory(_Value):
    """The amount of each GPU's memory to take; exactly one of the three is set.

    Arguments:
        grow: take memory as it is needed.
        fraction: a part of each GPU's memory, above 0 and at most 1.
        size: per GPU, in bytes.
    """

    def __init__(
        self, grow: bool = False, fraction: "Optional[float]" = None, size: "Optional[int]" = None
    ) -> None:
        self.grow = grow
        self.fraction = fraction
        self.size = size

    def __str__(self) -> str:
        if self.grow:
            return "grow"
        if self.size:
            return f"{self.size / 2.0**20:.10g} MiB per GPU"
        return f"{self.fraction:g} of each GPU"


def parse_memory(memory: "Any") -> "Optional[Memory]":
    """Normalise ``memory=`` to a ``Memory``, or None.

    Raises:
        InvalidArgumentError: a ``ValueError`` that lists the forms.
    """
    if memory is None:
        return None
    if isinstance(memory, bool):
        raise _invalid_memory(memory, "True and False name no amount")
    if isinstance(memory, (int, float)):
        if not 0 < memory <= 1:
            raise _invalid_memory(memory, "a number is a fraction, above 0 and at most 1")
        return Memory(fraction=float(memory))
    if not isinstance(memory, str):
        raise _invalid_memory(memory, f"it is a {type(memory).__name__}")
    text = memory.strip().lower()
    if text in ("grow", "growth"):
        return Memory(grow=True)
    digits = text.rstrip("bgikm ")
    unit = text[len(digits) :].strip()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise _invalid_memory(memory, "it is no size with a unit") from None
    if size <= 0:
        raise _invalid_memory(memory, "a size is above 0")
    return Memory(size=size)


def parse_floatx(floatx: "Optional[str]") -> "Optional[str]":
    """Check ``floatx=``: one of ``FLOATX``, or None."""
    if floatx is not None and floatx not in FLOATX:
        raise errors.InvalidArgumentError(
            f'floatx={floatx!r} is not understood. Use "float16", "bfloat16" (Keras 3), '
            '"float32", "float64", or None (what Keras is set to).'
        )
    return floatx


def parse_switch(name: str, value: "Any") -> bool:
    """Parse an argument that is True or False, or a text from a command line or a file.

    Raises:
        InvalidArgumentError: a ``ValueError``: it is neither, nor one of the texts for them.
    """
    switch = _SWITCHES.get(str(value).strip().lower())
    if switch is None:
        raise errors.InvalidArgumentError(
            f'{name}={value!r} is not understood. Use True or False, or one of the texts "yes", '
            '"no", "true", "false", "on", "off", "1", "0".'
        )
    return switch


def parse_simulate(simulate: "Any") -> "Optional[int]":
    """Check ``simulate=``: a number of devices, 1 or more, or None."""
    if simulate is None:
        return None
    if isinstance(simulate, bool) or not hasattr(simulate, "__index__") or simulate < 1:
        raise errors.InvalidArgumentError(
            f"simulate={simulate!r} is not understood. Use the number of CPU devices that shall "
            "stand in for GPUs, 1 or more, or None (no simulation)."
        )
    number: int = simulate.__index__()
    return number


def simulated_from_outside(environ: "Mapping[str, str]") -> "Optional[int]":
    """Return the number of simulated devices in ``COMPAT_SIMULATE``, or None."""
    text = environ.get("COMPAT_SIMULATE", "").strip()
    if not text:
        return None
    number = whole_number(text)
    if not number:
        raise errors.InvalidArgumentError(
            f"COMPAT_SIMULATE={text!r} is not a number of devices, 1 or more. Set it to one, for "
            "example COMPAT_SIMULATE=3, or remove it."
        )
    return number


class Every(_Value):
    """A schedule that verifies one training step of each ``interval``, from the first one on.

    Arguments:
        interval: 1 or more.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def __str__(self) -> str:
        return f"every {self.interval}"

    def __repr__(self) -> str:
        return repr(str(self))


def parse_verify(
    verify: "Any", environ: "Mapping[str, str]", simulated: "Optional[int]"
) -> "Union[int, Every]":
    """Return how many steps to verify.

    By default those of ``COMPAT_VERIFY``, else 1 where GPUs are simulated.

    Returns:
        A number, or ``Every``.

    Raises:
        InvalidArgumentError: it is neither a number of steps, from 0, nor "every" with one.
    """
    if verify is None:
        verify = environ.get("COMPAT_VERIFY", "").strip() or int(bool(simulated))
        if isinstance(verify, str) and whole_number(verify) is not None:
            verify = whole_number(verify)
    if isinstance(verify, str):
        word, _, number = verify.strip().lower().partition(" ")
        interval = whole_number(number.strip())
        if word == "every" and interval:
            return Every(interval)
    if isinstance(verify, bool) or not hasattr(verify, "__index__") or verify < 0:
        raise errors.InvalidArgumentError(
            f"verify={verify!r} (or the variable COMPAT_VERIFY) is not a number of steps to "
            'verify. Give 0 for none, or 1 or more, for example verify=1, or verify="every 100" '
            "for one training step in 100."
        )
    number_of_steps: int = verify.__index__()
    return number_of_steps


def parse_sync_batch_norm(wanted: "Any", environ: "Mapping[str, str]") -> bool:
    """Return whether batch normalization uses the whole batch: as given, or as a variable says.

    Raises:
        InvalidArgumentError: it is neither None, nor True or False.
    """
    if wanted is None:
        wanted = environ.get("COMPAT_SYNC_BATCH_NORM", "").strip() or False
    return parse_switch("sync_batch_norm", wanted)


class Settings:
    """Settings that a backend is to apply: the chosen devices, and the other arguments.

    Arguments:
        devices: the ``Devices`` chosen for this process.
        memory: a ``Memory``; None: the backend's default.
        floatx: "float16", "bfloat16", "float32" or "float64"; None: what Keras is set to.
        persist: whether to write the settings to the backend's configuration file, too.
        strict: whether fewer devices than requested are an error.
        options: keyword options of ``configure_gpu()``, by name, also those of other backends.
        verify: how many training steps of each model are compared with one device; or ``Every``.
        parallelize: whether every Keras model is parallelized when it is compiled.
        sync_batch_norm: whether batch normalization uses the statistics of the whole batch.
        gpus: the request for devices, for reports: "gpus=2".
    """

    def __init__(
        self,
        devices: "Devices",
        memory: "Optional[Memory]" = None,
        floatx: "Optional[str]" = None,
        persist: bool = False,
        strict: bool = False,
        options: "Optional[Mapping[str, Any]]" = None,
        verify: "Union[int, Every]" = 0,
        parallelize: bool = False,
        sync_batch_norm: bool = False,
        gpus: str = "",
    ) -> None:
        self.devices = devices
        self.memory = memory
        self.floatx: "Optional[str]" = floatx
        self.persist = persist
        self.strict = strict
        self.options = dict(options or {})
        self.verify: "Union[int, Every]" = verify
        self.parallelize = parallelize
        self.sync_batch_norm = sync_batch_norm
        self.gpus = gpus

    def __eq__(self, other: object) -> bool:
        return dict(vars(self), gpus="") == dict(vars(other), gpus="")

    def __str__(self) -> str:
        return self._with(f"devices: {self.devices}")

    def request(self) -> str:
        """Return the request, whatever its outcome."""
        return self._with(self.gpus) if self.gpus else str(self)

    def _with(self, devices: str) -> str:
        parts = [devices]
        parts += [f"memory: {self.memory}"] * (self.memory is not None)
        parts += [f"floatx: {self.floatx}"] * (self.floatx is not None)
        switches = "persist", "strict", "parallelize", "sync_batch_norm"
        parts += [name for name in switches if getattr(self, name)]
        parts += [f"verify: {self.verify}"] * bool(self.verify)
        parts += ["{}={!r}".format(*option) for option in sorted(self.options.items())]
        return ", ".join(parts)


class Configuration:
    """The choices and settings of ``configure_gpu()``; printing it gives a report.

    Attributes:
        backend: the backend's name, e.g. "tensorflow2".
        reason: why that backend was chosen.
        versions: framework and Keras versions, by name.
        devices: the devices to train on, as the framework names them.
        settings: the arguments, normalised, and the chosen devices.
        environ: the environment variables that were set, and their values (None: removed).
        applied: what was set in the framework or in files, a line each.
        warnings: deviations from the request, a sentence each.
        place: this process's place among the ranks; None where it is alone.
        parallelized: where each parallelized model runs, by its name, whether the script called
            ``parallelize()`` or ``parallelize=True`` did.
    """

    def __init__(
        self,
        backend: str,
        reason: str,
        versions: "Mapping[str, str]",
        devices: "Sequence[str]",
        settings: "Settings",
        environ: "Mapping[str, Optional[str]]",
        applied: "Sequence[str]",
        warnings: "Sequence[str]",
        place: "Optional[Place]" = None,
    ) -> None:
        self.backend: str = backend
        self.reason: str = reason
        self.versions: "Dict[str, str]" = dict(versions)
        self.devices: "List[str]" = list(devices)
        self.settings: Settings = settings
        self.environ: "Dict[str, Optional[str]]" = dict(environ)
        self.applied: "List[str]" = list(applied)
        self.warnings: "List[str]" = list(warnings)
        self.place: "Optional[Place]" = place
        self.parallelized: "Dict[str, str]" = {}

    def __repr__(self) -> str:
        return f"<Configuration {self.backend} on {listed(self.devices)}>"

    def __str__(self) -> str:
        return report(self._sections())

    def _repr_html_(self) -> str:
        from .._runtime import markup  # for start-up time

        return markup.sections(self._sections(), ["warnings"] if self.warnings else [])

    def _sections(self) -> "List[Tuple[str, List[str]]]":
        variables = [
            f"{name} removed" if value is None else f"{name}={value}"
            for name, value in sorted(self.environ.items())
        ]
        models = ["{} on {}".format(*pair) for pair in self.parallelized.items()]
        if self.settings.parallelize and not models:
            models = ["no model has been compiled yet"]
        return [
            ("backend", [f"{self.backend} ({self.reason})"]),
            ("versions", [", ".join("%s %s" % pair for pair in self.versions.items())]),
            ("asked", [self.settings.request()]),
            ("chosen", [self.settings.devices.outcome()]),
            ("devices", [listed(self.devices)]),
            ("ranks", [str(self.place)] if self.place else []),
            ("models", models),
            ("variables", variables or ["none set"]),
            ("applied", self.applied or ["nothing"]),
            ("warnings", self.warnings or ["none"]),
        ]


def listed(devices: "Sequence[str]") -> str:
    """Return names of devices in a line; of many, the first ones, the last, and their number."""
    if len(devices) <= LISTED:
        return ", ".join(devices)
    first = ", ".join(devices[:3])
    return f"{first}, ..., {devices[-1]} ({len(devices)} devices)"


def report(sections: "Sequence[Tuple[str, Sequence[str]]]") -> str:
    """Lay out (heading, lines) pairs in two columns; a heading without lines is left out."""
    width = max(len(heading) for heading, _ in sections) + 2
    return "\n".join(
        "{:<{}}{}".format(heading if index == 0 else "", width, line)
        for heading, lines in sections
        for index, line in enumerate(lines)
    )


def _invalid_memory(memory: "Any", problem: str) -> "errors.InvalidArgumentError":
    return errors.InvalidArgumentError(
        f'memory={memory!r} is not understood: {problem}. Use "grow" (take memory as it is '
        'needed), a fraction of each GPU such as 0.5, a size per GPU such as "4GiB" or "512MiB", '
        "or None (the backend's default)."
    )
