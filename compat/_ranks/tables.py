"""Lookup tables of a model's layers, which hold no array: they must be equal on all ranks.

So is whatever else a layer learns by ``adapt()`` and does not keep in an array.
"""

from .. import _keras, errors
from . import checksum


def is_table(weight):
    """Return whether one of a model's weights is a table: tf.keras lists those that it saves."""
    return hasattr(weight, "get_tensors")


def numbers(model):
    """Return the checksum of all tables, as numbers that every engine gathers exactly."""
    return checksum.of_text(repr([content for _, content in _tables(model)]))


def agree(model, engine, rows):
    """Check that all ranks have the same tables.

    Arguments:
        rows: the ranks' ``numbers``.

    Raises:
        RankError: a layer's table differs. It names the layer.
    """
    if checksum.same(rows):
        return
    tables = _tables(model)
    if not checksum.same(engine.gather([len(tables)])):
        raise errors.ranks_differ(engine.place, model.name)
    each = engine.gather_each([checksum.of_text(repr(content)) for _, content in tables])
    for (layer, content), found in zip(tables, each):
        ranks = [rank for rank, row in enumerate(found) if row != found[0]]
        if ranks:
            raise errors.RankError(
                f"Layer {layer.name!r} of model {model.name!r} looks its input up in a table that "
                f"is another one on {errors.numbered_ranks(ranks)} than on rank 0; on rank "
                f"{engine.place.rank} of {engine.place.size} it has {len(content)} entries. Ranks "
                "would train on other indices. Give adapt() the same data on every rank, before "
                "shard(), or set the same vocabulary."
            )


def _tables(model):
    """Pairs of a layer and what is in its table, in an order that is the same on all ranks."""
    if not hasattr(model, "_flatten_layers"):  # of a Keras that has no such layers
        return []
    found = []
    for layer in _keras.all_layers(model):
        weights = getattr(layer, "_non_trainable_weights", ())  # as tf.keras has them
        if hasattr(layer, "get_vocabulary"):
            found.append((layer, list(layer.get_vocabulary())))
        elif getattr(layer, "bin_boundaries", None) is not None:
            found.append((layer, [float(value) for value in layer.bin_boundaries]))
        else:
            found += [(layer, _entries(weight)) for weight in weights if is_table(weight)]
    return found


def _entries(table):
    """Return the content of a table: tensors of keys and values, in any order."""
    return sorted(map(repr, zip(*(tensor.numpy().tolist() for tensor in table.get_tensors()))))
