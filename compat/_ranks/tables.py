"""Lookup tables of a model's layers, which are not arrays: they must be equal on all ranks.

So must be whatever else a layer learns by ``adapt()`` and does not keep in an array.
"""

from .. import _keras, errors
from . import checksum


def is_table(weight):
    """Return whether a weight is a table: tf.keras lists those that it saves among the weights."""
    return hasattr(weight, "get_tensors")


def numbers(model):
    """Return the checksum of all tables, as numbers that every engine gathers exactly."""
    return checksum.of_text(repr([content for _, content in _tables(model)]))


def agree(model, engine, rows):
    """Check that all ranks have the same tables.

    Arguments:
        model: the one that has the tables.
        engine: that of the ranks.
        rows: the ranks' ``numbers``.

    Raises:
        RankError: a layer's table differs. It names the layer.
    """
    if checksum.same(rows):
        return
    tables = _tables(model)
    if not checksum.same(engine.gather([len(tables)])):
        raise errors.ranks_differ(engine.place, model.name)
    checksums = engine.gather_each([checksum.of_text(repr(content)) for _, content in tables])
    for (layer, content), of_ranks in zip(tables, checksums):
        ranks = [rank for rank, row in enumerate(of_ranks) if row != of_ranks[0]]
        if ranks:
            raise errors.RankError(
                f"Layer {layer.name!r} of model {model.name!r} looks its input up in a table that "
                f"is another one on {errors.numbered_ranks(ranks)} than on rank 0; on rank "
                f"{engine.place.rank} of {engine.place.size} it has {len(content)} entries. Ranks "
                "would train on other indices. Give adapt() the same data on every rank, before "
                "shard(), or set the same vocabulary."
            )


def _tables(model):
    """Return pairs of a layer and the content of its table, in one order on all ranks."""
    if not hasattr(model, "_flatten_layers"):  # of a Keras that has no such layers
        return []
    tables = []
    for layer in _keras.all_layers(model):
        weights = getattr(layer, "_non_trainable_weights", ())  # as tf.keras has them
        if hasattr(layer, "get_vocabulary"):
            tables.append((layer, list(layer.get_vocabulary())))
        elif getattr(layer, "bin_boundaries", None) is not None:
            tables.append((layer, [float(value) for value in layer.bin_boundaries]))
        else:
            tables += [(layer, _entries(weight)) for weight in weights if is_table(weight)]
    return tables


def _entries(table):
    """Return the content of a table: tensors of keys and values, in any order."""
    return sorted(map(repr, zip(*(tensor.numpy().tolist() for tensor in table.get_tensors()))))
