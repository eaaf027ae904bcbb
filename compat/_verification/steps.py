"""A step of a model, as a backend does it on one device and on all."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Mapping, Optional, Tuple


#: Why training with batch normalization differs by design; of a layer, say, and its name.
NORMALISED = "{} {!r} normalises each replica's rows by their own statistics"


class Step:
    """One kind of step of one model; a subclass for each way in which a backend does steps.

    A *value* is an array of numbers with a label that a person understands: "the loss", "output 2
    (classes)", "weight dense_1/kernel", "state bn_1/moving_mean".
    """

    #: The type in which the model computes.
    dtype = "float32"
    #: Why training differs by design, such as batch normalization, a phrase; or None.
    by_design = None  # type: Optional[str]

    def read(self) -> "Dict[str, Any]":
        """All that the step may change, by label, as arrays."""
        raise NotImplementedError

    def write(self, values: "Mapping[str, Any]") -> None:
        """Set what ``read`` gave."""
        raise NotImplementedError

    def give_up(self, values: "Mapping[str, Any]") -> None:
        """Leave the model with these values, where the step's caller will get an error."""
        self.write(values)

    def is_weight(self, label: str) -> bool:
        """Whether this is a value of floats that a gradient changes."""
        return label.startswith("weight ")

    def is_random(self, label: str) -> bool:
        """Whether this is the state of a random number generator."""
        return False

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
