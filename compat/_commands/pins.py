"""\
Print the requirements of a backend, with a Keras that runs on it, in the versions with which
keras-gpu-compat is tested on a Python. With --keras or --framework: in the newest tested versions
that begin so.

exit status: 0, or 2 where a backend is not known, or is not tested on that Python or in these
versions."""

# ``compat pins``: the requirements of a backend, as tested on a Python, for files of others.

import argparse
import configparser
import email
import pathlib
import re
from operator import eq, ge, gt, le, lt, ne
from typing import Dict, List, Optional, Tuple

from .. import __version__, errors
from .._configuration import packages, pip_extras, spelling, tested_versions

DISTRIBUTION = "keras-gpu-compat"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backend", help="an extra's name: " + ", ".join(pip_extras.TESTED))
    text = "for that Python (default: this one; with a version, the one on which it is tested)"
    parser.add_argument("--python", type=_python, metavar="3.7", help=text)
    text = "with that version of Keras or tf.keras, or one that begins so"
    parser.add_argument("--keras", type=_version, metavar="3.8", help=text)
    text = "with that version of the framework, or one that begins so"
    parser.add_argument("--framework", type=_version, metavar="2.13", help=text)


def _python(text):
    match = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version of Python, such as 3.7")
    return int(match.group(1)), int(match.group(2))


def _version(text):
    if re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version, such as 3.8")
    return text


def execute(arguments):
    extra, python = known(arguments.backend), arguments.python
    if arguments.keras or arguments.framework:
        pair = tested_pair(extra, arguments.keras, arguments.framework, python)
        lines, python = pair.requirements, pair.python
    else:
        python = python or pip_extras.here()
        lines = pins(extra, python)
    python = pip_extras.spelled(python)
    print(f"# {extra} on Python {python}: as keras-gpu-compat {__version__} is tested")
    print("\n".join(lines))
    return 0


def known(extra: str) -> str:
    """Return an extra's name as setup.cfg spells it, from a user's, or from the name of a backend.

    Raises:
        InvalidArgumentError: there is none of that name.
    """
    for name in pip_extras.TESTED:
        if spelling.plain(name) == spelling.plain(extra):
            return name
    if extra in pip_extras.EXTRAS:
        return next(iter(pip_extras.EXTRAS[extra]))
    names = ", ".join(pip_extras.TESTED)
    raise errors.InvalidArgumentError(f"there are no pins for {extra!r}. Use one of {names}.")


def tested_pair(
    extra: str,
    keras: Optional[str],
    framework: Optional[str] = None,
    python: Optional[Tuple[int, int]] = None,
) -> tested_versions.Pair:
    """Return the newest tested pair with these versions of Keras and of the framework.

    Arguments:
        extra: its name, as a user writes it.
        keras: the version of Keras or its first numbers; None: any.
        framework: the same of the framework.
        python: the Python on which the pair is to be tested; None: any.

    Raises:
        InvalidArgumentError: the extra is unknown, or no pair has these versions.
    """
    extra = known(extra)
    candidates = tested_versions.of_extra(extra)
    pair = tested_versions.newest(
        (pair for pair in candidates if python in (None, pair.python)), framework, keras
    )
    if pair is None:
        versions = [("Keras", keras), ("framework", framework)]
        wanted = " and ".join(f"{name} {version}" for name, version in versions if version)
        wanted += f" on Python {pip_extras.spelled(python)}" if python else ""
        raise errors.InvalidArgumentError(
            f"{extra} is not tested with {wanted}. It is tested with {_summary(candidates)}."
        )
    return pair


def _summary(pairs):
    """Return the versions of Keras of these pairs, by Python, as a phrase."""
    by_python: Dict[str, List[str]] = {}
    for pair in pairs:
        name = "tf.keras" if pair.keras is None else pair.keras_name
        keras = f"{name} {pair.versions[1]}"
        by_python.setdefault(pip_extras.spelled(pair.python), []).append(keras)
    return "; ".join(
        f"{', '.join(dict.fromkeys(versions))} on Python {python}"
        for python, versions in by_python.items()
    )


def pins(extra: str, python: Tuple[int, int]) -> List[str]:
    """Return the requirements of an extra on a Python, without markers.

    Arguments:
        extra: its name, as a user writes it.
        python: the first two numbers of its version.

    Raises:
        InvalidArgumentError: there is no such extra, or it is not tested on that Python.
        NotInstalledError: this package is a copy without its metadata.
        UnsupportedError: the metadata has a requirement that is not understood.
    """
    extra = known(extra)
    if python not in pip_extras.TESTED[extra]:
        version, newest = map(pip_extras.spelled, (python, pip_extras.TESTED[extra][-1]))
        raise errors.InvalidArgumentError(
            f"{extra} is not tested on Python {version}, so there are no pins for it. It is tested "
            f"on {pip_extras.tested(extra)}; choose one of these with --python, such as --python "
            f"{newest}."
        )
    return list(filter(None, (_applying(line, extra, python) for line in _declared(extra))))


def _declared(extra: str) -> List[str]:
    """Return requirements with their markers, of this package and not of another copy.

    ``importlib.metadata``, which Python 3.6 and 3.7 do not have, takes the first on ``sys.path``.
    In a checkout, which may be installed as editable, setup.cfg is newer than what was installed.
    """
    folder = pathlib.Path(__file__).absolute().parents[2]
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(str(folder / "setup.cfg"), encoding="utf-8")
    if setup.get("metadata", "name", fallback="") == DISTRIBUTION:
        lines = filter(None, setup["options.extras_require"][extra].splitlines())
        return [line + (" and" if ";" in line else ";") + f' extra == "{extra}"' for line in lines]
    path = next(folder.glob("keras_gpu_compat-*.dist-info/METADATA"), None)
    if path is None:
        raise errors.NotInstalledError(
            f"the pins are in the metadata of keras-gpu-compat, which {folder} does not have. "
            "Install it with pip, not by copying its files."
        )
    metadata = email.message_from_string(path.read_text(encoding="utf-8"))
    return metadata.get_all("Requires-Dist", [])


_REQUIREMENT = re.compile(r"([\w.-]+)\s*\(?([^()@]*)\)?")
_CLAUSE = re.compile(r"(?:python_version\s*(<=|>=|<|>|==|!=)|extra\s*==)\s*(['\"])([\w.-]+)\2")
_COMPARISONS = {"==": eq, "!=": ne, "<=": le, ">=": ge, "<": lt, ">": gt}


def _applying(line, extra, python):
    """Return a requirement as one writes it, the lower bound first, without spaces and parentheses.

    None where its marker, clauses joined by ``and``, is not true for an extra on a Python.
    """
    requirement, _, marker = line.partition(";")
    clauses = re.sub(r"[()]", " ", marker).split(" and ")
    parts = _REQUIREMENT.fullmatch(requirement.strip())
    conditions = list(filter(None, (_CLAUSE.fullmatch(clause.strip()) for clause in clauses)))
    if parts is None or len(conditions) < len(clauses):
        raise errors.UnsupportedError(
            f"the requirement {line.strip()!r} in the metadata of keras-gpu-compat is not "
            "understood. Install this version of it anew; if that does not help, please report it."
        )
    for comparison, _, value in (condition.groups() for condition in conditions):
        if comparison is None:  # an extra, which setuptools may have normalised
            applies = packages.normalised(value) == extra
        else:
            release = tuple(int(number) for number in value.split("."))
            applies = _COMPARISONS[comparison](python, release)
        if not applies:
            return None
    bounds = [re.sub(r"\s", "", bound) for bound in parts.group(2).split(",")]
    return parts.group(1) + ",".join(sorted(bounds, reverse=True))
