"""Keras' HDF5 files: lists of names in attributes, whichever h5py reads or wrote them."""

import itertools
import json

#: A list that is longer in an attribute is cut into name0, name1 ...: HDF5 has a limit.
ATTRIBUTE_LIMIT = 64512


def text(value):
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def names(group, attribute):
    """A list of names in an attribute, or in several, where one would be too large; [] if none."""
    numbered = map((attribute + "{}").format, itertools.count())
    parts = itertools.takewhile(group.attrs.__contains__, numbered)
    whole = [attribute] if attribute in group.attrs else parts
    return [text(name) for part in whole for name in group.attrs[part]]


def write_names(group, attribute, names):
    """As Keras does: an array of bytes, cut where it is too large."""
    import numpy as np  # which h5py needs

    encoded = np.asarray([name.encode("utf-8") for name in names])
    size = max(1, ATTRIBUTE_LIMIT // encoded.itemsize)
    for number, start in enumerate(range(0, max(1, len(encoded)), size)):
        name = f"{attribute}{number}" if len(encoded) > size else attribute
        group.attrs[name] = encoded[start : start + size]


def copy_attributes(old, new, others):
    """Attributes as they are, but texts as bytes, which every Keras decodes."""
    for name, value in old.attrs.items():
        if not name.startswith("layer_names"):
            value = json.dumps(others[name]) if name in others else value
            new.attrs[name] = value.encode("utf-8") if isinstance(value, str) else value
