"""``shard()`` of iterators of MXNet: this rank's rows of each batch."""

import copy

from . import arrays, batch_agreement, joined_engine


def takes(data):
    """Return whether this is an iterator of MXNet."""
    return hasattr(data, "provide_data") and hasattr(data, "iter_next")


def shard(place, iterator, batch_size=None):
    """Return an iterator of this rank's rows of each batch."""
    if batch_size is not None and iterator.batch_size not in (0, batch_size):
        raise arrays.other_batch_size(batch_size, iterator.batch_size)
    if iterator.batch_size:
        place.rows_of_batch(iterator.batch_size)
    base = next(kind for kind in reversed(type(iterator).__mro__) if kind.__name__ == "DataIter")
    return PartOfDataIter.make(base, place, iterator)


def _getter(name):
    """Return a method of a ``DataIter`` that returns an attribute of the current batch."""
    return lambda self: getattr(self._current, name)


class PartOfDataIter(batch_agreement.PartOfObject):
    """This rank's rows of each batch. MXNet's own class is the other base class of instances."""

    def __init__(self, place, iterator):
        super().__init__(place, iterator)
        self._begins = True
        self.batch_size = iterator.batch_size and place.rows_of_batch(iterator.batch_size)

    @property
    def provide_data(self):
        """The names and shapes of this rank's inputs."""
        return self._described(self._whole.provide_data)

    @property
    def provide_label(self):
        """The names and shapes of this rank's labels."""
        return self._described(self._whole.provide_label)

    def _described(self, descriptions):
        return descriptions and [self._description(one) for one in descriptions]

    def _description(self, whole):
        axis = _axis(whole)
        name, shape = whole[:2]
        rows = self._place.rows_of_batch(shape[axis])
        shape = tuple(shape[:axis]) + (rows,) + tuple(shape[axis + 1 :])
        if not hasattr(whole, "layout"):
            return name, shape
        return type(whole)(name, shape, whole.dtype, whole.layout)

    def reset(self):
        """Begin from the first batch."""
        self._whole.reset()
        self._begins = True

    def next(self):
        """Return this rank's rows of the next batch."""
        batch = self._whole.next()
        if self._begins:
            self._begins = False
            engine = joined_engine.ready(self.name, getattr(self._whole, "shuffle", False))
            if engine is not None:
                batch_agreement.compare(
                    engine, self.name, arrays.checksum([batch.data, batch.label])
                )
        return self._part(batch)

    def iter_next(self):
        """Move to the next batch, and return whether there is one."""
        try:
            self._current = self.next()
        except StopIteration:
            return False
        return True

    getdata, getlabel, getindex, getpad = map(_getter, ("data", "label", "index", "pad"))

    def _part(self, whole):
        data = whole.provide_data or self._whole.provide_data
        label = whole.provide_label or self._whole.provide_label
        rows = whole.data[0].shape[_axis(data[0])]
        self._place.rows_of_batch(rows)
        start, stop = self._place.part_of(rows)

        def mine(parts, descriptions):
            return parts and [
                part.slice_axis(_axis(description), start, stop)
                if _axis(description)
                else part[start:stop]
                for part, description in zip(parts, descriptions)
            ]

        batch = copy.copy(whole)
        batch.data, batch.label = mine(whole.data, data), mine(whole.label, label)
        batch.provide_data = self._described(whole.provide_data)
        batch.provide_label = self._described(whole.provide_label)
        batch.index = None if whole.index is None else whole.index[start:stop]
        if whole.pad is not None:
            batch.pad = max(0, stop - max(start, rows - whole.pad))
        return batch


def _axis(description):
    """Return the batch axis: the first, but for layouts such as "TNC"."""
    layout = getattr(description, "layout", None)
    return max(0, layout.find("N")) if layout else 0
