"""The versions of frameworks and of Keras that are tested together; see docs/versions.md."""

import re
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from . import pip_extras

# A group begins with the extra of setup.cfg that brings the backend, the Python on which the group
# is tested, what its scripts import as Keras, and what all its pairs install besides. Each line
# below it is a pair: the framework, Keras unless the framework brings it, what this pair alone
# installs besides.
#
# Left out: a torch before 2.13 comes as a build for CUDA of gigabytes; TensorFlow before 1.13 has
# no wheel for a Python after 3.6, and TensorFlow 2.15 requires Keras 2.15; the packages keras 2.6.0
# and 2.8.0 have no keras.optimizers.SGD; CNTK before 2.6 has no wheel; keras-mxnet before 2.2.4.2
# fails in SGD on MXNet 1.5 and newer; MXNet 1.8.0 lacks libopenblas.so.0, which its wheel has from
# .post0 on.
_PAIRS = """
torch 3.11 keras
    torch==2.13.0 keras==3.0.5
    torch==2.13.0 keras==3.1.1
    torch==2.13.0 keras==3.2.1
    torch==2.13.0 keras==3.3.3
    torch==2.13.0 keras==3.4.1
    torch==2.13.0 keras==3.5.0
    torch==2.13.0 keras==3.6.0
    torch==2.13.0 keras==3.7.0
    torch==2.13.0 keras==3.8.0
    torch==2.13.0 keras==3.9.2
    torch==2.13.0 keras==3.10.0
    torch==2.13.0 keras==3.11.3
    torch==2.13.0 keras==3.12.4
    torch==2.13.0 keras==3.13.2
    torch==2.13.0 keras==3.14.1
    torch==2.13.0 keras==3.15.1
    torch==2.14.1 keras==3.15.1

jax 3.11 keras
    jax==0.4.20 keras==3.0.5 jaxlib==0.4.20 numpy<2 scipy<1.13
    jax==0.4.22 keras==3.0.5 jaxlib==0.4.22 numpy<2 scipy<1.13
    jax==0.4.23 keras==3.0.5 jaxlib==0.4.23 numpy<2 scipy<1.13
    jax==0.4.26 keras==3.1.1 jaxlib==0.4.26 numpy<2 scipy<1.13
    jax==0.4.30 keras==3.3.3 jaxlib==0.4.30
    jax==0.4.31 keras==3.4.1 jaxlib==0.4.31
    jax==0.4.35 keras==3.5.0 jaxlib==0.4.35
    jax==0.4.38 keras==3.6.0
    jax==0.5.0 keras==3.8.0
    jax==0.5.3 keras==3.9.2
    jax==0.6.2 keras==3.10.0
    jax==0.7.1 keras==3.11.3
    jax==0.8.3 keras==3.12.4
    jax==0.9.0 keras==3.13.2
    jax==0.9.1 keras==3.14.1
    jax==0.10.2 keras==3.15.1

keras3 3.11 keras
    tensorflow-cpu==2.16.2 keras==3.0.5
    tensorflow-cpu==2.16.2 keras==3.1.1
    tensorflow-cpu==2.16.2 keras==3.3.3
    tensorflow-cpu==2.17.1 keras==3.4.1
    tensorflow-cpu==2.17.1 keras==3.5.0
    tensorflow-cpu==2.18.1 keras==3.6.0
    tensorflow-cpu==2.18.1 keras==3.8.0
    tensorflow-cpu==2.19.1 keras==3.9.2
    tensorflow-cpu==2.19.1 keras==3.10.0
    tensorflow-cpu==2.20.0 keras==3.11.3
    tensorflow-cpu==2.20.0 keras==3.12.4
    tensorflow-cpu==2.21.0 keras==3.13.2
    tensorflow-cpu==2.21.0 keras==3.14.1
    tensorflow-cpu==2.21.0 keras==3.15.1

tf_keras 3.11 tf_keras
    tensorflow==2.16.2 tf_keras==2.16.0
    tensorflow==2.17.1 tf_keras==2.17.0
    tensorflow==2.18.1 tf_keras==2.18.0
    tensorflow==2.19.1 tf_keras==2.19.0
    tensorflow==2.20.0 tf_keras==2.20.1
    tensorflow==2.21.0 tf_keras==2.21.0

tensorflow 3.11 tensorflow.keras numpy<2
    tensorflow-cpu==2.12.1
    tensorflow-cpu==2.13.1
    tensorflow-cpu==2.14.1
    tensorflow-cpu==2.15.1

tensorflow 3.11 keras numpy<2
    tensorflow-cpu==2.15.1 keras==2.15.0

tensorflow 3.8 tensorflow.keras protobuf<3.21 h5py<4
    tensorflow-cpu==2.4.4
    tensorflow-cpu==2.5.3
    tensorflow-cpu==2.6.5
    tensorflow-cpu==2.7.4
    tensorflow-cpu==2.8.4
    tensorflow-cpu==2.9.3
    tensorflow-cpu==2.10.1
    tensorflow-cpu==2.11.1

tensorflow 3.8 keras protobuf<3.21 h5py<4
    tensorflow-cpu==2.11.1 keras==2.11.0

tensorflow20 3.7 keras protobuf<3.21 h5py<3 numpy<1.19
    tensorflow==2.0.4 keras==2.3.1
    tensorflow-cpu==2.1.4 keras==2.3.1
    tensorflow-cpu==2.2.3 keras==2.3.1

tensorflow23 3.7 keras protobuf<3.21 h5py<3 numpy<1.19
    tensorflow-cpu==2.3.4 keras==2.4.3

tensorflow23 3.7 tensorflow.keras protobuf<3.21 h5py<3 numpy<1.19
    tensorflow==2.0.4
    tensorflow-cpu==2.1.4
    tensorflow-cpu==2.2.3
    tensorflow-cpu==2.3.4

tensorflow1 3.7 keras protobuf<3.21 h5py<3 numpy<1.19
    tensorflow==1.13.2 keras==2.2.4
    tensorflow==1.14.0 keras==2.2.5
    tensorflow==1.14.0 keras==2.3.1
    tensorflow-cpu==1.15.0 keras==2.2.4
    tensorflow-cpu==1.15.0 keras==2.3.0
    tensorflow-cpu==1.15.0 keras==2.3.1

tensorflow1 3.7 tensorflow.keras protobuf<3.21 h5py<3 numpy<1.19
    tensorflow==1.13.2
    tensorflow==1.14.0
    tensorflow-cpu==1.15.0

tensorflow112 3.6 keras protobuf<3.18 h5py<3 numpy<1.17
    tensorflow==1.4.1 keras==2.0.8
    tensorflow==1.5.1 keras==2.1.3
    tensorflow==1.6.0 keras==2.1.5
    tensorflow==1.7.1 keras==2.1.6
    tensorflow==1.8.0 keras==2.2.0
    tensorflow==1.9.0 keras==2.2.0
    tensorflow==1.10.1 keras==2.1.6
    tensorflow==1.10.1 keras==2.2.2
    tensorflow==1.11.0 keras==2.2.4
    tensorflow==1.12.3 keras==2.2.4

tensorflow112 3.6 tensorflow.keras protobuf<3.18 h5py<3 numpy<1.17
    tensorflow==1.12.3

mxnet 3.6 keras h5py==2.10.0
    mxnet==1.2.1.post1 keras-mxnet==2.1.6.1
    mxnet==1.3.1 keras-mxnet==2.2.0
    mxnet==1.3.1 keras-mxnet==2.2.2
    mxnet==1.4.1 keras-mxnet==2.2.4
    mxnet==1.4.1 keras-mxnet==2.2.4.1
    mxnet==1.5.1 keras-mxnet==2.2.4.2 numpy==1.19.5
    mxnet==1.6.0 keras-mxnet==2.2.4.2 numpy==1.19.5
    mxnet==1.7.0.post2 keras-mxnet==2.2.4.2 numpy==1.19.5
    mxnet==1.8.0.post0 keras-mxnet==2.2.4.3 numpy==1.19.5
    mxnet==1.9.0 keras-mxnet==2.2.4.3 numpy==1.19.5
    mxnet==1.9.1 keras-mxnet==2.2.4.3 numpy==1.19.5

theano 3.6 keras numpy==1.16.6 scipy==1.2.3 h5py==2.10.0 setuptools<58
    theano==0.9.0 keras==2.0.8
    theano==0.9.0 keras==2.1.3
    theano==1.0.0 keras==2.1.2
    theano==1.0.1 keras==2.1.3
    theano==1.0.2 keras==2.1.6
    theano==1.0.3 keras==2.2.2
    theano==1.0.4 keras==2.2.4
    theano==1.0.5 keras==2.2.5
    theano==1.0.5 keras==2.3.1

cntk 3.6 keras numpy==1.19.5 h5py==2.10.0 pip
    cntk==2.6 keras==2.1.6
    cntk==2.6 keras==2.2.4
    cntk==2.7.post2 keras==2.1.6
    cntk==2.7.post2 keras==2.2.4
    cntk==2.7.post2 keras==2.2.5
    cntk==2.7.post2 keras==2.3.1
"""

_MEMORY = "outputs of a step on several devices get each other's memory; use jax 0.4.24 or later"
#: Frameworks that train wrong on several devices, without compat as well: what is wrong, and what
#: to use.
FAULTS: "Dict[str, str]" = {"jax==0.4.22": _MEMORY, "jax==0.4.23": _MEMORY}


class Pair(NamedTuple):
    """A version of a framework, and a version of Keras that is tested with it.

    Attributes:
        extra: the extra of setup.cfg that brings the backend.
        python: the Python on which the pair is tested, (3, 11).
        keras_name: what scripts import as Keras: "keras", "tf_keras" or "tensorflow.keras".
        requirements: all that is installed: first the framework, then, unless the framework
            brings it, Keras.
    """

    extra: str
    python: "Tuple[int, int]"
    keras_name: str
    requirements: "List[str]"

    @property
    def framework(self) -> str:
        """The framework's requirement."""
        return self.requirements[0]

    @property
    def keras(self) -> "Optional[str]":
        """The requirement of Keras; None where the framework brings it."""
        return None if self.keras_name == "tensorflow.keras" else self.requirements[1]

    @property
    def versions(self) -> "Tuple[str, str]":
        """The versions of the framework and of Keras, which are one where it is tf.keras."""
        framework = name_and_version(self.framework).split()[1]
        return framework, name_and_version(self.keras or self.framework).split()[1]

    @property
    def fault(self) -> str:
        """The fault and the version to use in its place; "": the pair has none."""
        return FAULTS.get(self.framework, "")

    def __str__(self) -> str:
        return " ".join(filter(None, (self.framework, self.keras)))


def pairs() -> "List[Pair]":
    """Return all pairs, also those of which something does not hold."""
    found = []
    for group in _PAIRS.strip().split("\n\n"):
        head, *lines = group.splitlines()
        extra, version, keras_name, *besides = head.split()
        major, minor = map(int, version.split("."))
        for line in lines:
            found.append(Pair(extra, (major, minor), keras_name, line.split() + besides))
    return found


def name_and_version(requirement: str) -> str:
    """Return a requirement as reports name it: "torch 2.13.0" for "torch==2.13.0"."""
    name, _, version = requirement.partition("==")
    return "{} {}".format("tensorflow" if name == "tensorflow-cpu" else name, version)


def of_extra(extra: str) -> "List[Pair]":
    """Return the pairs of an extra that hold; of its backend's first extra those of all extras."""
    backend = pip_extras.BACKENDS[extra]
    extras = [extra] if extra != pip_extras.EXTRAS[backend][0] else pip_extras.EXTRAS[backend]
    return [pair for pair in pairs() if pair.extra in extras and not pair.fault]


def newest(
    candidates: "Iterable[Pair]",
    framework: "Optional[str]" = None,
    keras: "Optional[str]" = None,
) -> "Optional[Pair]":
    """Return the pair with the newest framework, and of these with the newest Keras, or None.

    Arguments:
        candidates: pairs.
        framework: the version of the framework or its first numbers, "2.13"; None: any.
        keras: the same of Keras.
    """

    def rank(pair: Pair) -> "Tuple[bool, List[Tuple[int, ...]]]":
        return keras == pair.versions[1], list(map(_numbers, pair.versions))

    wanted = _numbers(framework or ""), _numbers(keras or "")
    matching = [
        pair
        for pair in candidates
        if all(
            _numbers(version)[: len(numbers)] == numbers
            for version, numbers in zip(pair.versions, wanted)
        )
    ]
    return max(matching, key=rank, default=None)


def ranges(backend: str) -> "Dict[str, Tuple[str, str]]":
    """Return the oldest and the newest tested version of what a backend runs with.

    Arguments:
        backend: the backend's name.

    Returns:
        The versions of its framework and of each Keras package, by name, such as
        ``{"torch": ("2.13.0", "2.14.1"), "keras": ("3.0.5", "3.15.1")}``; empty for a backend of a
        third party.
    """
    versions: "Dict[str, List[str]]" = {}
    for pair in pairs():
        if pip_extras.BACKENDS[pair.extra] == backend:
            for requirement in filter(None, (pair.framework, pair.keras)):
                name, version = name_and_version(requirement).split()
                versions.setdefault(name, []).append(version)
    return {
        name: (min(tested, key=_numbers), max(tested, key=_numbers))
        for name, tested in versions.items()
    }


def outside(backend: str, versions: "Mapping[str, str]") -> "List[str]":
    """Return a warning for each version that is older or newer than all tested ones.

    A version that differs from the newest only after its second number is not newer.

    Arguments:
        backend: the backend's name.
        versions: the installed versions of its framework and of Keras packages, by name.
    """
    warnings = []
    for name, (oldest, newest) in ranges(backend).items():
        numbers = _numbers(versions.get(name, ""))
        is_older = numbers < _numbers(oldest)
        if numbers and (is_older or numbers[:2] > _numbers(newest)[:2]):
            warnings.append(
                f"{name} {versions[name]} is {'older' if is_older else 'newer'} than the versions "
                f"that compat is tested with, {oldest} to {newest}. `compat test` shows whether a "
                "script of yours trains to the same numbers on several devices with it."
            )
    return warnings


def fault(versions: "Mapping[str, str]") -> "Tuple[str, str, str]":
    """Return the framework that trains wrong on several devices, what is wrong, and what to use.

    Three empty texts: none of the installed versions does.

    Arguments:
        versions: the installed versions, by name.
    """
    for requirement, text in FAULTS.items():
        name, version = name_and_version(requirement).split()
        if versions.get(name) == version:
            what, _, instead = text.partition("; ")
            return f"{name} {version}", what, instead
    return "", "", ""


def _numbers(version: str) -> "Tuple[int, ...]":
    """Return the numbers of a release, (1, 2, 1) for "1.2.1.post1"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()
