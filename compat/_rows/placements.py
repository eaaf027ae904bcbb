"""How a value depends on the rows of a batch: the words of all backends.

As in torch's DTensor, a placement tells how the values that the devices have, each of its own rows,
are related to the value of the whole batch.
"""


class Placement:
    """What is known of one value. Placements are compared by what they say."""

    __slots__ = ()  # type: tuple

    def _said(self):
        return (type(self),) + tuple(getattr(self, name) for name in self.__slots__)

    def __eq__(self, other):
        return isinstance(other, Placement) and self._said() == other._said()

    def __hash__(self):
        return hash(self._said())

    def __repr__(self):
        first = [getattr(self, name) for name in self.__slots__[:1]]
        usual = type(self)(*first)
        said = list(map(repr, first)) + [
            f"{name}={getattr(self, name)!r}"
            for name in self.__slots__[1:]
            if getattr(self, name) != getattr(usual, name)
        ]
        return "{}({})".format(type(self).__name__, ", ".join(said))


class Replicated(Placement):
    """The same on every device: it does not depend on the batch."""

    __slots__ = ()


class Sharded(Placement):
    """Each device has the values of its own rows.

    Arguments:
        axis: the dimension that the rows are along.
        inner: how many neighbouring elements each row has there, None where that is not known:
            (rows, time) reshaped to one dimension has ``time`` of them.
        copies: how often the batch is there, one copy after the other: (time, rows) reshaped to
            one dimension has ``time`` copies.
        even: whether each row has as many elements as any other.
    """

    __slots__ = ("axis", "inner", "copies", "even")

    def __init__(self, axis, inner=1, copies=1, even=True):
        self.axis = axis
        self.inner = inner
        self.copies = copies
        self.even = even

    def replace(self, **changes):
        said = {name: changes.get(name, getattr(self, name)) for name in self.__slots__}
        return Sharded(**said)


class Partial(Placement):
    """The value of the whole batch is a sum, mean, maximum or minimum of the devices' values.

    Arguments:
        how: "sum", "mean", "max" or "min".
        denominator: what a mean is weighted by, as the backend names it; None: the rows.
    """

    __slots__ = ("how", "denominator")

    def __init__(self, how, denominator=None):
        self.how = how
        self.denominator = denominator


class Count(Placement):
    """It depends on the number of rows alone, which is another one on each device.

    Arguments:
        places: of a vector of sizes, such as a shape, the elements that grow with the batch; None
            where that is not known, or for a single number.
    """

    __slots__ = ("places",)

    def __init__(self, places=None):
        self.places = None if places is None else frozenset(places)


class _Reasoned(Placement):
    __slots__ = ("why",)

    def __init__(self, why=None):
        self.why = why

    def _said(self):
        return (type(self),)  # for whatever reason


class Mixed(_Reasoned):
    """It may depend on several rows at once: it is right only where the whole batch is."""

    __slots__ = ()


class Unknown(_Reasoned):
    """No rule tells. It is tried (see ``trial``), and else treated as ``Mixed``."""

    __slots__ = ()


REPLICATED = Replicated()
