"""A search in the graph of any framework."""


def nearest(wanted, is_found, inputs_of):
    """Return the nearest ancestors that satisfy a predicate, each once, in order.

    Arguments:
        wanted: where the search begins; those that satisfy the predicate are found themselves.
        is_found: the predicate.
        inputs_of: what something in the graph is computed from; nothing for leaves.
    """
    found, seen, stack = [], set(), list(reversed(wanted))
    while stack:
        each = stack.pop()
        if each in seen:
            continue
        seen.add(each)
        if is_found(each):
            found.append(each)
        else:
            stack += reversed(list(inputs_of(each)))
    return found
