"""Operations that have branches, or a graph of their own inside: rules about their rows."""

from ... import _rows
from ..._rows import REPLICATED, Mixed, Replicated, Sharded, Unknown
from ..._rows.values import shared


def branched(node, values, rows):
    count = node.op.n_outs
    kinds = [value.placement for value in values]
    pairs = [list(pair) for pair in zip(kinds[1 : 1 + count], kinds[1 + count :])]
    for pair in pairs:
        if all(isinstance(each, Sharded) for each in pair):
            pair[:] = [shared(pair) or Mixed()] * 2
    return [_rows.chosen(kinds[0], pair) for pair in pairs]


def inlined(node, values, rows):
    """``OpFromGraph``."""
    inputs = zip(node.op.local_inputs, node.inputs, values)
    pairs = [(inner, outer, value.placement, 0) for inner, outer, value in inputs]
    inside = rows.inside(pairs, node.op.local_outputs)
    return [inside.value(each).placement for each in node.op.local_outputs]


def looped(node, values, rows):
    """``scan``: rows along another dimension than that of the steps, or a step for each row."""
    from theano.scan_module.scan_utils import scan_args

    loop = scan_args(node.inputs, node.outputs, node.op.inputs, node.op.outputs, node.op.info)
    of = dict(zip(node.inputs, [value.placement for value in values]))
    states = loop.outer_in_mit_sot + loop.outer_in_sit_sot
    found = _rows.without_rows(list(of.values()))
    if found is not None or loop.outer_in_mit_mot:
        return found or Unknown("a loop's gradient")
    over_rows = any(_is_first(of[v]) for v in loop.outer_in_seqs)
    found = _over_rows(loop, of, rows) if over_rows else None
    if found is None and not isinstance(of[loop.n_steps], Replicated):
        found = Mixed()
    if isinstance(found, Mixed) or any(_is_first(of[v]) for v in states):
        return Mixed()
    same = zip(loop.inner_in_shared + loop.inner_in_non_seqs,
               loop.outer_in_shared + loop.outer_in_non_seqs)  # fmt: skip
    pairs = [(inner, outer, of[outer], 0) for inner, outer in same]
    steps = zip(loop.inner_in_seqs, loop.outer_in_seqs)
    pairs += [(i, o, REPLICATED if over_rows else _moved(of[o], -1), 1) for i, o in steps]
    taps = loop.inner_in_mit_sot + [[v] for v in loop.inner_in_sit_sot]
    held, before = [_moved(of[v], -1) for v in states], None
    while held != before:
        inner = [(v, *state, 1) for each, *state in zip(taps, states, held) for v in each]
        inside = rows.inside(pairs + inner, loop.inner_outputs)
        new = {v: inside.value(v).placement for v in loop.inner_outputs}
        after = [new[v] for v in loop.inner_out_mit_sot + loop.inner_out_sit_sot]
        held, before = [_agreed(*pair) for pair in zip(held, after)], held
    if any(not isinstance(new[v], Replicated) for v in loop.cond):
        return Mixed()  # the rows tell where it ends
    lengths = rows.sizes.numbers(loop.n_steps)
    for outer, before in zip(loop.outer_out_mit_sot + loop.outer_out_sit_sot, states):
        rows.sizes.set(outer, rows.sizes.dimensions(before))
    for outer, v in zip(loop.outer_out_nit_sot, loop.inner_out_nit_sot):
        steps = None if loop.cond or lengths is None else list(map(int, lengths))
        rows.sizes.set(outer, [steps] + inside.sizes.dimensions(v))
    if over_rows:
        return [found] * len(loop.outer_out_nit_sot) + [REPLICATED] * len(loop.outer_out_shared)
    found = held + [new[v] for v in loop.inner_out_nit_sot]
    return [_moved(each, 1) for each in found] + [REPLICATED] * len(loop.outer_out_shared)


def _over_rows(loop, of, rows):
    """The placement of a step for each row, which hands nothing on to the next one."""
    along = [of[v] for v in loop.outer_in_seqs]
    steps = rows.sizes.numbers(loop.n_steps)
    lengths = [rows.sizes.dimensions(v)[0] for v in loop.outer_in_seqs]
    if loop.cond or loop.outer_in_sit_sot or loop.outer_in_mit_sot or steps is None:
        return Mixed()
    if not all(isinstance(of[v], Replicated) for v in loop.outer_in_non_seqs):
        return Mixed()
    if not all(map(_is_first, along)) or any(list(map(int, steps)) != n for n in lengths):
        return Mixed()
    return shared(along) or Mixed()


def _is_first(placement):
    return isinstance(placement, Sharded) and placement.axis == 0


def _moved(placement, by):
    if isinstance(placement, Sharded):
        return placement.replace(axis=placement.axis + by)
    return placement


def _agreed(before, after):
    """What the states of a loop are, before each of its steps and after."""
    if before == after:
        return before
    if isinstance(before, Sharded) and isinstance(after, Sharded):
        return shared([before, after]) or Mixed()
    kinds = [each for each in (before, after) if isinstance(each, (Mixed, Unknown))]
    return kinds[0] if kinds == [Unknown()] else Mixed()
