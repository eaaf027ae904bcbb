"""A step of a model, as a backend does it on one device and on all."""

import contextlib
from typing import Any, Collection, Dict, Iterator, Mapping, Optional, Tuple

from .reachable import Attributes

#: Why batch normalization differs by design; of a layer, say, and its name.
NORMALISED = "{} {!r} normalises each replica's rows by their own statistics"


def numbered(outputs):
    """Outputs that have no names, by label."""
    return {f"output {number}": output for number, output in enumerate(outputs, 1)}


class Step:
    """One kind of step of one model; a subclass for each way in which a backend does steps.

    A *value* is an array of numbers with a label that a person understands: "the loss", "output 2
    (classes)", "weight dense_1/kernel", "state bn_1/moving_mean".
    """

    #: The type in which the model computes.
    dtype = "float32"
    #: The attributes with what the step is given: nested lists, tuples and dictionaries of arrays.
    given = ()  # type: Tuple[str, ...]
    #: ``attributes()`` before the step.
    noted = None  # type: Optional[Attributes]

    def read(self) -> "Dict[str, Any]":
        """All that the step may change, by label, as arrays."""
        raise NotImplementedError

    def write(self, values: "Mapping[str, Any]") -> None:
        """Set what ``read`` gave."""
        raise NotImplementedError

    def give_up(self, values: "Mapping[str, Any]") -> None:
        """Leave the model with these values, where the step's caller will get an error."""
        self.write(values)

    def by_design(self, inference: bool, changed: "Collection[str]") -> "Optional[str]":
        """Why several devices differ from one by design: batch normalization. A phrase, or None.

        Arguments:
            inference: whether this is about ``outputs()``, not about the step.
            changed: the labels of ``read()`` whose values it changed on one device.
        """
        return None

    def is_weight(self, label: str) -> bool:
        """Whether this is a value of floats that a gradient changes."""
        return label.startswith("weight ")

    def is_random(self, label: str) -> bool:
        """Whether this is the state of a random number generator."""
        return False

    def attributes(self) -> "Attributes":
        """What Python's objects note of what is done, as it is now: numbers of calls, say."""
        return Attributes([], bool)

    @contextlib.contextmanager
    def attributes_kept(self) -> "Iterator[None]":
        """Within, they begin with what they were before the step; afterwards they are as now."""
        after = self.attributes()
        if self.noted is not None:
            self.noted.put_back()
        try:
            yield
        finally:
            after.put_back()

    def on_one_device(self) -> "Dict[str, Any]":
        """Do the step undivided, and return its results by label."""
        raise NotImplementedError

    def on_all_devices(self) -> "Tuple[Any, Dict[str, Any]]":
        """Do the step as it is, and return what its caller gets, and its results by label."""
        raise NotImplementedError

    def finish(self, given: "Any", start: "Mapping[str, Any]") -> "Any":
        """What the step's caller gets, when nothing is left to verify.

        Arguments:
            given: what ``on_all_devices()`` had for it.
            start: what ``read()`` gave before the step.
        """
        return given

    def operations(self) -> "Dict[str, Tuple[int, int]]":
        """Do the step on all devices once more, and tell what ran where: see ``Record``."""
        raise NotImplementedError

    def outputs(self, undivided: bool) -> "Optional[Dict[str, Any]]":
        """What the model computes of the step's batch, in inference; None: that cannot be had."""
        return None
