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
from typing import Any, Dict, List

from .. import _keras, _ranks, errors
from .._configuration import detection, device_choice, discovery, gpu_selection, packages, registry
from .._ranks import launchers
from .._ranks.engines import installed as engines
from .._runtime import by_path, markup
from .._version import __version__
from . import environment_text

_GENERAL = "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "KERAS_BACKEND", "KERAS_HOME"
# Shown where they are set.
_OPTIONAL = "HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "ROCR_VISIBLE_DEVICES"
# Distributions whose versions explain failures, besides those of the frameworks themselves.
_PACKAGES = r"jax-(cuda|rocm).+|jaxlib|numpy|nvidia-.+|tensorflow-metal|triton"
# How a problem ends where a command mends it.
_COMMAND = re.compile(r": ((?:apt-get|conda|export|mv|pip|unset) .+?)\.?$", re.DOTALL)
_PLACE = "launcher", "rank", "size", "local_rank", "local_size"
_CGROUP_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


class Environment(Dict[str, Any]):
    """What there is, as an object of JSON, that prints as a report; in a notebook it is a table."""

    def __str__(self):
        return environment_text.text(self)

    def _repr_html_(self):
        found = environment_text.sections(self)
        return markup.sections(found, ["problems"] if self["problems"] else [])


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
        "engines": [engine._asdict() for engine in engines.engines()],
        "problems": problems,
    }
    other = by_path.shadow(os.getcwd(), os.environ)
    if other:
        _add(problems, [errors.shadowed("scripts in " + os.getcwd(), other)])
    return Environment(found)


def _add(problems, texts, command=None):
    """Note problems that are new, each with the command that mends it, or None."""
    for text in map(str, texts):
        match = _COMMAND.search(text)
        problem = {"problem": text, "command": match.group(1) if match else command}
        if text not in [each["problem"] for each in problems]:
            problems.append(problem)


# What is found --------------------------------------------------------------------------------


def _system():
    memory = _told(lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return {
        "platform": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "distribution": _distribution(),
        "libc": _told(lambda: os.confstr("CS_GNU_LIBC_VERSION")),
        "cores": os.cpu_count(),
        "usable_cores": discovery.usable_cores(),
        "memory": memory,
        "memory_limit": _memory_limit(memory),
    }


def _distribution():
    """Linux's, by the name that it gives itself (os-release(5)), or None."""
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        with contextlib.suppress(OSError, ValueError):
            with open(path, encoding="utf-8", errors="replace") as file:
                words = [word.partition("=") for word in shlex.split(file.read(), comments=True)]
            names = [value for name, _, value in words if name == "PRETTY_NAME"]
            if names:
                return names[0]
    return None


def _told(ask):
    """What the system tells, or None: it is another one, or has another library."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return ask() or None
    return None


def _memory_limit(memory):
    """That of a container, in bytes; None where there is none, or it is above the memory."""
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            with open(path, encoding="utf-8") as file:
                limit = int(file.read())
            if memory is None or limit < memory:
                return limit
    return None


def _backend(problems):
    """The backend, the versions and the variables."""
    installed = detection.installed()
    try:
        chosen, reason = detection.choose()
    except errors.CompatError as error:
        _add(problems, [error], _for_another_backend(installed))
        backend, variables, shown = None, (), installed
    else:
        backend = {"name": chosen.name, "framework": chosen.framework, "reason": reason}
        variables = chosen.variables
        shown = [chosen] + [b for b in installed if b.framework != chosen.framework]
        _add(problems, chosen.problems(os.environ))
    _add(problems, detection.problems(os.environ))
    known = registry.backends() + shown  # a plug-in may be the one chosen
    distributions = {name for each in known for name in each.distributions}
    pattern = "|".join([_PACKAGES] + sorted(re.escape(name.lower()) for name in distributions))
    names = sorted(set(_GENERAL).union(variables))
    others = {name for name in os.environ if name in _OPTIONAL or name.startswith("COMPAT_")}
    return {
        "backend": backend,
        "versions": {n: v for each in shown for n, v in _keras.versions(each).items()},
        "packages": packages.matching(pattern),
        "variables": {n: os.environ.get(n) for n in names + sorted(others.difference(names))},
    }


def _for_another_backend(installed):
    """What to type where no backend was chosen, and the error does not say it."""
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
    """The drivers, the GPUs of the machine, and which of them are visible."""
    machine = device_choice.discover()
    every = gpu_selection.parse_gpus(None)
    visible = device_choice.choose(every, None, os.environ, discover=lambda: machine)
    _add(problems, visible.problems)
    failures = getattr(machine, "failures", [])
    gpus, why = None, "nvidia-smi is missing or fails"  # type: Any, Any
    if machine is not None:
        gpus = [{name: getattr(gpu, name) for name in gpu.__slots__} for gpu in machine]
        why = None if machine else machine.why()
    texts = [
        f"{failure}: the driver does not work as it should, and frameworks may find no GPU. Load "
        "it, or restart the machine where it was updated."
        for failure in failures
    ]
    module = "nvidia" if "nvidia-smi" in "".join(failures) else "amdgpu"
    _add(problems, texts, "sudo modprobe " + module)
    told = {"text": str(visible), "entries": list(visible.gpus), "variable": visible.variable}
    drivers = discovery.drivers()
    return {"drivers": drivers, "gpus": gpus, "why_no_gpus": why, "visible": told}


def _rank(problems):
    """This process's place among ranks; None where it is alone, Nones where nothing tells it."""
    try:
        place = launchers.launched(os.environ) or _ranks.evaluator()
    except errors.RankError as error:
        _add(problems, [error], "export COMPAT_ALONE=1")
        return dict.fromkeys(_PLACE)
    try:
        _ranks.timeout(os.environ)
    except errors.InvalidArgumentError as error:
        _add(problems, [error], "unset COMPAT_TIMEOUT")
    return place and {name: getattr(place, name) for name in _PLACE}
