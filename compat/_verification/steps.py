"""A step of a model, as a backend does it on one device and on all; and what its objects hold."""

import contextlib
from typing import Any, Collection, Dict, Iterator, Mapping, Optional, Tuple

from .._runtime import containers

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
    input_attributes: "Tuple[str, ...]" = ()
    #: ``attributes()`` before the step.
    start_attributes: "Optional[Attributes]" = None

    def read(self) -> "Dict[str, Any]":
        """Return all that the step may change, by label, as arrays."""
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
        """Return whether this is a value of floats that a gradient changes."""
        return label.startswith("weight ")

    def is_random(self, label: str) -> bool:
        """Return whether this is the state of a random number generator."""
        return False

    def attributes(self) -> "Attributes":
        """Return what Python's objects note of what is done, as it is now.

        Numbers of calls, say.
        """
        return Attributes([], bool)

    @contextlib.contextmanager
    def attributes_kept(self) -> "Iterator[None]":
        """Within, they begin with what they were before the step; afterwards they are as now."""
        after = self.attributes()
        if self.start_attributes is not None:
            self.start_attributes.put_back()
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
        """Return what the step's caller gets, when nothing is left to verify.

        Arguments:
            given: what ``on_all_devices()`` had for it.
            start: what ``read()`` gave before the step.
        """
        return given

    def operations(self) -> "Dict[str, Tuple[int, int]]":
        """Do the step on all devices once more, and tell what ran where: see ``Record``."""
        raise NotImplementedError

    def outputs(self, undivided: bool) -> "Optional[Dict[str, Any]]":
        """Return what the model computes of the step's batch, in inference.

        None: that cannot be had.
        """
        return None


# What objects hold --------------------------------------------------------------------------------


def variables_held(roots, kinds):
    """Return all variables that objects hold.

    In attributes, containers, and what functions refer to.

    Arguments:
        roots: the objects.
        kinds: the classes of variables, as ``isinstance`` takes them.
    """

    def is_variable(value):
        return isinstance(value, kinds)

    return list(filter(is_variable, containers.reached(roots, is_variable)))


class Attributes:
    """What attributes of some objects are now, such as counters.

    Arguments:
        objects: those that have them.
        is_kept: whether an attribute of that name and value is one of them.
        forgets: whether those that an object gets later are taken from it, too.
    """

    def __init__(self, objects, is_kept, forgets=True):
        self._is_kept = is_kept
        self._forgets = forgets
        self._held = [(vars(each), self._of(vars(each))) for each in objects]

    def _of(self, attributes):
        return {name: value for name, value in attributes.items() if self._is_kept(name, value)}

    def have_changed(self):
        return any(now.get(k) != v for now, values in self._held for k, v in values.items())

    def put_back(self):
        for attributes, values in self._held:
            for name in set(self._of(attributes)) - set(values) if self._forgets else ():
                del attributes[name]
            attributes.update(values)


def numbers_held(roots):
    """``Attributes`` that are numbers, of objects and of all that they hold."""
    objects = filter(containers.has_attributes, containers.reached(roots, lambda value: False))
    return Attributes(objects, lambda name, value: type(value) in (int, float), forgets=False)
