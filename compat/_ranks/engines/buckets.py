"""What ranks sum up together: buckets, as those of torch's DistributedDataParallel."""

#: Bytes of the first bucket and of the others.
SIZES = [2**20, 25 * 2**20]


def filled(items):
    """The buckets: what all values of one have in common, and the values. Full ones come first.

    Arguments:
        items: of each value what it has in common with others, its bytes, and itself.
    """
    full = []  # type: list
    being_filled = {}  # type: dict
    for kind, size, value in items:
        values, before = being_filled.pop(kind, ([], 0))
        values.append(value)
        if before + size < SIZES[min(len(full), 1)]:
            being_filled[kind] = values, before + size
        else:
            full.append((kind, values))
    return full + [(kind, values) for kind, (values, _) in being_filled.items()]
