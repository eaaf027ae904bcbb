"""``compat env``: a report that tells enough of this environment for a report of a bug.

What is found becomes one object, with the keys that ``--json`` prints; texts are made from it.
Nothing is configured, no framework is imported, and no GPU is initialised.
"""

import contextlib
import os
import platform
import re
import shlex
import sys
import textwrap
from typing import Any, Dict, List, Sequence, Tuple

from .. import _keras, _ranks, errors
from .._configuration import (
    detection,
    device_choice,
    discovery,
    gpu_selection,
    packages,
    registry,
    tested_versions,
)
from .._configuration.numeric import whole_number
from .._configuration.settings import report
from .._ranks import launchers, waiting
from .._ranks.engines.installed import Installed, engines
from .._runtime import __version__, by_path, markup

_GENERAL = "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "KERAS_BACKEND", "KERAS_HOME"
# Shown where they are set.
_OPTIONAL = "HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "ROCR_VISIBLE_DEVICES"
# Distributions whose versions explain failures, besides those of the frameworks themselves.
_PACKAGES = r"jax-(cuda|rocm).+|jaxlib|numpy|nvidia-.+|tensorflow-metal|triton"
# How a problem ends where a command fixes it.
_COMMAND = re.compile(r": ((?:apt-get|conda|export|mv|pip|unset) .+?)\.?$", re.DOTALL)
_PLACE = "launcher", "rank", "size", "local_rank", "local_size"
#: Columns of the text; commands, paths and the like, which are not broken, may be longer.
WIDTH = 80
_NO_BACKEND = {"name": "none", "reason": "see the problems"}
_CGROUP_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


class Environment(Dict[str, Any]):
    """What there is, as an object of JSON, that prints as a report; in a notebook it is a table."""

    def __str__(self):
        return report(_sections(self, WIDTH - len("keras.json  ")))

    def _repr_html_(self):
        return markup.sections(_sections(self), ["problems"] if self["problems"] else [])


def collect() -> Environment:
    problems: List[Dict[str, Any]] = []
    found = {
        "compat": __version__,
        "python": {"version": sys.version.split()[0], "executable": sys.executable},
        "system": _system(),
        **_backend(problems),
        "keras_json": _keras_json(problems),
        **_gpus(problems),
        "ranks": _rank(problems),
        "engines": [engine._asdict() for engine in engines()],
        "problems": problems,
    }
    other = by_path.shadow(os.getcwd(), os.environ)
    if other:
        _add(problems, [errors.shadowed("scripts in " + os.getcwd(), other)])
    return Environment(found)


def _add(problems, texts, command=None):
    """Note problems that are new, each with the command that fixes it, or None."""
    for text in map(str, texts):
        match = _COMMAND.search(text)
        if text not in [entry["problem"] for entry in problems]:
            problems.append({"problem": text, "command": match.group(1) if match else command})


# What is found --------------------------------------------------------------------------------


def _system():
    memory = _queried(lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return {
        "platform": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "distribution": _distribution(),
        "libc": _queried(lambda: os.confstr("CS_GNU_LIBC_VERSION")),
        "cores": os.cpu_count(),
        "usable_cores": discovery.usable_cores(),
        "memory": memory,
        "memory_limit": _memory_limit(memory),
    }


def _distribution():
    """Return the name of the Linux distribution, from os-release(5), or None."""
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        with contextlib.suppress(ValueError):
            for word in shlex.split(discovery.content(path), comments=True):
                if word.startswith("PRETTY_NAME="):
                    return word.partition("=")[2]
    return None


def _queried(query):
    """Return what the system answers, or None: it is another system, or has another library."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return query() or None
    return None


def _memory_limit(memory):
    """Return the limit of a container, in bytes; None: there is none, or it exceeds the memory."""
    for path in _CGROUP_LIMITS:
        limit = whole_number(discovery.content(path).strip())  # None: not there, or "max"
        if limit is not None and (memory is None or limit < memory):
            return limit
    return None


def _backend(problems):
    """Return the backend, the versions and the variables."""
    installed = detection.installed()
    try:
        chosen, reason = detection.choose()
    except errors.CompatError as error:
        _add(problems, [error], _for_another_backend(installed))
        backend, shown, tested, outside = None, installed, {}, []
        variables: "Sequence[str]" = ()
    else:
        backend = {"name": chosen.name, "framework": chosen.framework, "reason": reason}
        variables = chosen.variables
        shown = [chosen] + [b for b in installed if b.framework != chosen.framework]
        tested = tested_versions.ranges(chosen.name)
        outside = tested_versions.outside(chosen.name, _keras.versions(chosen))
        _add(problems, chosen.problems(os.environ))
    _add(problems, detection.problems(os.environ))
    # A plug-in may be the one chosen.
    distributions = {name for b in registry.backends() + shown for name in b.distributions}
    pattern = "|".join([_PACKAGES] + sorted(re.escape(name.lower()) for name in distributions))
    names = sorted(set(_GENERAL).union(variables))
    others = {name for name in os.environ if name in _OPTIONAL or name.startswith("COMPAT_")}
    return {
        "backend": backend,
        "versions": {n: v for b in shown for n, v in _keras.versions(b).items()},
        "tested": {"ranges": tested, "outside": outside},
        "packages": packages.matching(pattern),
        "variables": {n: os.environ.get(n) for n in names + sorted(others.difference(names))},
    }


def _for_another_backend(installed):
    """Return what to type where no backend was chosen, and the error does not say it."""
    if len(installed) == 1 and os.environ.get("KERAS_BACKEND"):
        return "unset KERAS_BACKEND"
    return "export KERAS_BACKEND=" + installed[0].framework if installed else None


def _keras_json(problems):
    path = detection.keras_json(os.environ)
    try:
        content, readable = detection.read_keras_json(path), True
    except errors.CompatError as error:
        content, readable = {}, False
        _add(problems, [error])
    return {"path": path, "exists": os.path.exists(path), "readable": readable, "content": content}


def _gpus(problems):
    """Return the drivers, the GPUs of the machine, and which of them are visible."""
    machine = device_choice.discover()
    every = gpu_selection.parse_gpus(None)
    visible = device_choice.choose(every, None, os.environ, discover=lambda: machine)
    _add(problems, visible.problems)
    failures = getattr(machine, "failures", [])
    gpus: Any = None
    why_none: Any = "nvidia-smi is missing or fails"
    if machine is not None:
        gpus = [dict(gpu._asdict()) for gpu in machine]
        why_none = None if machine else machine.why()
    texts = [
        f"{failure}: the driver does not work as it should, and frameworks may find no GPU. Load "
        "it, or restart the machine where it was updated."
        for failure in failures
    ]
    module = "nvidia" if "nvidia-smi" in "".join(failures) else "amdgpu"
    _add(problems, texts, "sudo modprobe " + module)
    choice = {"text": str(visible), "entries": list(visible.gpus), "variable": visible.variable}
    return {
        "drivers": discovery.drivers(),
        "gpus": gpus,
        "why_no_gpus": why_none,
        "visible": choice,
    }


def _rank(problems):
    """Return this process's place among ranks.

    None where it is alone, Nones where it is unknown.
    """
    try:
        place = launchers.launched(os.environ) or _ranks.evaluator()
    except errors.RankError as error:
        _add(problems, [error], "export COMPAT_ALONE=1")
        return dict.fromkeys(_PLACE)
    try:
        waiting.timeout(os.environ)
    except errors.InvalidArgumentError as error:
        _add(problems, [error], "unset COMPAT_TIMEOUT")
    return place and {name: getattr(place, name) for name in _PLACE}


# As text, for people to read and to paste ------------------------------------------------------


def _sections(found: Dict[str, Any], width: int = sys.maxsize) -> List[Tuple[str, List[str]]]:
    """Return headings, each with lines of at most this width, if they can be broken."""
    sections = [
        ("compat", [found["compat"]]),
        ("python", ["{version} ({executable})".format(**found["python"])]),
        ("system", _system_lines(found["system"])),
        ("backend", ["{name} ({reason})".format(**found["backend"] or _NO_BACKEND)]),
        ("versions", [_pairs(found["versions"]) or "no framework, no Keras"]),
        *[("tested", _tested_lines(found["tested"]))] * bool(found["tested"]["ranges"]),
        ("packages", [_pairs(found["packages"]) or "none"]),
        ("variables", _variable_lines(found["variables"])),
        ("keras.json", [_keras_json_line(found["keras_json"])]),
        ("drivers", [_drivers_line(found["drivers"])]),
        ("GPUs", _gpu_lines(found)),
        ("visible", [found["visible"]["text"]]),
        ("ranks", [_rank_line(found)]),
        ("engines", [str(Installed(**engine)) for engine in found["engines"]] or ["none"]),
    ]
    problems = [line for problem in found["problems"] for line in _problem_lines(problem, width)]
    wrapped = [(heading, _wrapped(lines, width)) for heading, lines in sections]
    return wrapped + [("problems", problems or ["none"])]


def _wrapped(lines, width):
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [part for line in lines for part in wrapper.wrap(line)]


def _problem_lines(problem, width):
    """Return a problem, and below it the command that fixes it, ready to be pasted."""
    text, command = problem["problem"], problem["command"]
    if command and text.rstrip(".").endswith(command):
        text = text.rstrip(".")[: -len(command)].rstrip()
    return _wrapped(text.split("\n"), width) + (["    " + command] if command else [])


def _pairs(versions):
    return ", ".join("{} {}".format(*pair) for pair in versions.items())


def _tested_lines(tested):
    ranges = ["{} {} to {}".format(name, *ends) for name, ends in tested["ranges"].items()]
    return [", ".join(ranges)] + tested["outside"]


def _system_lines(system):
    names = [system["platform"] + " " + system["machine"], system["distribution"], system["libc"]]
    memory = "memory unknown" if system["memory"] is None else _gib(system["memory"]) + " memory"
    if system["memory_limit"] is not None:
        memory += ", limited to " + _gib(system["memory_limit"])
    return [
        ", ".join(name for name in names if name),
        "{usable_cores} of {cores} CPU cores, {}".format(memory, **system),
    ]


def _gib(number):
    return f"{number / 2**30:.1f} GiB"


def _variable_lines(variables):
    lines = ["{}={}".format(*pair) for pair in variables.items() if pair[1] is not None]
    absent = [name for name in variables if variables[name] is None]
    return lines + (["not set: " + ", ".join(absent)] if absent else [])


def _keras_json_line(keras_json):
    if not keras_json["readable"]:
        return "{path} (unreadable)".format(**keras_json)
    if not keras_json["exists"]:
        return "{path} (not there)".format(**keras_json)
    values = ", ".join("{}={}".format(*pair) for pair in sorted(keras_json["content"].items()))
    return "{}: {}".format(keras_json["path"], values)


def _drivers_line(drivers):
    names = {"nvidia": "NVIDIA", "cuda": "runs CUDA up to", "amdgpu": "amdgpu", "rocm": "ROCm"}
    return ", ".join(names[n] + " " + drivers[n] for n in names if drivers[n]) or "none found"


def _gpu_lines(found):
    why = found["why_no_gpus"]
    if found["gpus"] is None:
        return ["unknown: " + why]
    return [_gpu_line(gpu) for gpu in found["gpus"]] or ["none" + (why and ": " + why)]


def _gpu_line(gpu):
    if gpu["variable"] == discovery.HIP:
        return "{index}: of AMD, chosen by {variable}".format(**gpu)
    if not gpu["uuid"]:
        return "{index}: nvidia-smi is missing or fails, so nothing more is known".format(**gpu)
    used, total = (_number(gpu[name], 2**20) for name in ("memory_used", "memory_total"))
    text = "{index}: {name}, {} of {} MiB used, {} % busy, {uuid}"
    return text.format(used, total, _number(gpu["utilization"]), **gpu)


def _number(number, unit=1):
    return "?" if number is None else f"{number / unit:.0f}"


def _rank_line(found):
    place = found["ranks"]
    if place is None:
        return "none: this process is alone"
    if place["rank"] is None:
        return "unknown (see the problems)"
    if place["rank"] < 0:
        return "none: this process evaluates what ranks save ({launcher})".format(**place)
    text = "rank {rank} of {size}, {local_rank} of {local_size} on this machine ({launcher})"
    return text.format(**place)
