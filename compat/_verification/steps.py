"""A step of a model, as a backend does it on one device and on all, and its objects' state."""

import contextlib
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

from .._runtime import containers
from .reasons import Incomparable

#: Values of a step by label: arrays.
Values = Mapping[str, Any]


def numbered(outputs: "Iterable[Any]") -> "Dict[str, Any]":
    """Return outputs without names by label."""
    return {f"output {number}": output for number, output in enumerate(outputs, 1)}


class Step:
    """One kind of step of one model; a subclass for each way in which a backend does steps.

    A *value* is an array of numbers with a label that a person understands: "the loss", "output 2
    (classes)", "weight dense_1/kernel", "state bn_1/moving_mean".
    """

    #: The type in which the model computes.
    dtype = "float32"
    #: The attributes with the step's inputs: nested lists, tuples and dictionaries of arrays.
    input_attributes: "Tuple[str, ...]" = ()
    #: ``attributes()`` before the step.
    start_attributes: "Optional[Attributes]" = None
    #: What the framework calls a part of a model.
    part = "layer"

    def read(self) -> "Dict[str, Any]":
        """Return all values that the step may change, by label, as arrays."""
        raise NotImplementedError

    def write(self, values: "Mapping[str, Any]") -> None:
        """Set values as ``read`` returns them."""
        raise NotImplementedError

    def give_up(self, values: "Mapping[str, Any]") -> None:
        """Leave the model with values, where the step's caller will get an error."""
        self.write(values)

    def by_design(self, inference: bool, changed: "Collection[str]") -> "Optional[Incomparable]":
        """Return why several devices differ from one by design (batch normalization), or None.

        Arguments:
            inference: whether ``outputs()`` are meant, not the step.
            changed: the labels of ``read()`` whose values the step changed on one device.
        """
        return None

    def random_rates(self) -> "Dict[str, str]":
        """Return the parts of the model that draw random numbers: see ``reasons.rates``."""
        return {}

    def is_weight(self, label: str) -> bool:
        """Return whether this is a value of floats that a gradient changes."""
        return label.startswith("weight ")

    def is_random(self, label: str) -> bool:
        """Return whether this is the state of a random number generator."""
        return False

    def attributes(self) -> "Attributes":
        """Return attributes of Python objects that the step may change, such as counters."""
        return Attributes([], lambda name, value: False)

    @contextlib.contextmanager
    def attributes_kept(self) -> "Iterator[None]":
        """Set them as before the step within a block, and as they are now afterwards."""
        after = self.attributes()
        if self.start_attributes is not None:
            self.start_attributes.put_back()
        try:
            yield
        finally:
            after.put_back()

    def on_one_device(self) -> "Dict[str, Any]":
        """Do the step unsplit, and return its results by label."""
        raise NotImplementedError

    def on_all_devices(self) -> "Tuple[Any, Dict[str, Any]]":
        """Do the step as it is, and return the result for its caller, and results by label."""
        raise NotImplementedError

    def finish(self, result: "Any", start: "Mapping[str, Any]") -> "Any":
        """Return the result for the step's caller, after the verification.

        Arguments:
            result: the one of ``on_all_devices()``.
            start: the values of ``read()`` before the step.
        """
        return result

    def operations(self) -> "Dict[str, Tuple[int, int]]":
        """Do the step on all devices once more, and return their operations: see ``Record``."""
        raise NotImplementedError

    def outputs(self, is_unsplit: bool) -> "Optional[Dict[str, Any]]":
        """Return the model's outputs for the step's batch in inference; None if unavailable."""
        return None


# State of objects --------------------------------------------------------------------------------


def variables_held(roots: "Sequence[Any]", kinds: "Any") -> "List[Any]":
    """Return all variables that are reachable from objects.

    By attributes, containers, and references of functions.

    Arguments:
        roots: the objects.
        kinds: the classes of variables, as ``isinstance`` takes them.
    """

    def is_variable(value: "Any") -> bool:
        return isinstance(value, kinds)

    return list(filter(is_variable, containers.reached(roots, is_variable)))


class Attributes:
    """A snapshot of attributes of objects, such as counters.

    Arguments:
        objects: the objects.
        is_kept: returns whether an attribute of a name and a value is one of them.
        forgets: whether such attributes that are new are deleted by ``put_back``.
    """

    def __init__(
        self, objects: "Iterable[Any]", is_kept: "Callable[[str, Any], bool]", forgets: bool = True
    ) -> None:
        self._is_kept = is_kept
        self._forgets = forgets
        self._held = [(vars(owner), self._of(vars(owner))) for owner in objects]

    def _of(self, attributes: "Mapping[str, Any]") -> "Dict[str, Any]":
        return {name: value for name, value in attributes.items() if self._is_kept(name, value)}

    def have_changed(self) -> bool:
        """Return whether an attribute has another value now."""
        return any(now.get(k) != v for now, values in self._held for k, v in values.items())

    def put_back(self) -> None:
        """Restore the attributes."""
        for attributes, values in self._held:
            for name in set(self._of(attributes)) - set(values) if self._forgets else ():
                del attributes[name]
            attributes.update(values)


def numbers_held(roots: "Sequence[Any]") -> "Attributes":
    """Return ``Attributes`` that are numbers, of objects and of all that they contain."""
    objects = filter(containers.has_attributes, containers.reached(roots, lambda value: False))
    return Attributes(objects, lambda name, value: type(value) in (int, float), forgets=False)
