"""Operations that have branches, or a graph of their own inside: rules about their rows."""

from theano.scan_module.scan_utils import scan_args

from ... import _rows
from ..._rows import REPLICATED, Mixed, Replicated, Sharded, Unknown


def branched(node, values, rows):
    count = node.op.n_outs
    kinds = [value.placement for value in values]
    pairs = zip(kinds[1 : 1 + count], kinds[1 + count :])
    return [_rows.chosen(kinds[0], pair) for pair in pairs]


def inlined(node, values, rows):
    """``OpFromGraph``."""
    inputs = zip(node.op.local_inputs, node.inputs, values)
    pairs = [(inner, outer, value.placement, 0) for inner, outer, value in inputs]
    inside = rows.inside(pairs, node.op.local_outputs)
    return [inside.value(each).placement for each in node.op.local_outputs]


def looped(node, values, rows):
    """``scan``: rows along another dimension than that of the steps. A step for each is tried."""
    loop = scan_args(node.inputs, node.outputs, node.op.inputs, node.op.outputs, node.op.info)
    of = dict(zip(node.inputs, [value.placement for value in values]))
    if loop.outer_in_mit_mot:
        return Unknown("a loop's gradient")
    states = loop.outer_in_mit_sot + loop.outer_in_sit_sot
    if any(_is_first(of[v]) for v in loop.outer_in_seqs):
        others = [of[v] for v in loop.outer_in_non_seqs]
        alone = not states + loop.cond and all(isinstance(each, Replicated) for each in others)
        return Unknown("a step for each row") if alone else Mixed()
    if not isinstance(of[loop.n_steps], Replicated) or any(_is_first(of[v]) for v in states):
        return Mixed()
    held, inside = _in_each_step(loop, of, states, rows)
    if any(not isinstance(inside.value(v).placement, Replicated) for v in loop.cond):
        return Mixed()  # the rows tell where it ends
    for outer, before in zip(loop.outer_out_mit_sot + loop.outer_out_sit_sot, states):
        rows.sizes.set(outer, rows.sizes.dimensions(before))
    for outer, v in zip(loop.outer_out_nit_sot, loop.inner_out_nit_sot):
        steps = None if loop.cond else loop.n_steps
        rows.sizes.set(outer, [steps] + inside.sizes.dimensions(v))
    found = held + [inside.value(v).placement for v in loop.inner_out_nit_sot]
    return [_moved(each, 1) for each in found] + [REPLICATED] * len(loop.outer_out_shared)


def _in_each_step(loop, of, states, rows):
    """What the states are in each step, and the graph of a step, followed until that is so.

    A step sees sequences and states without their first dimension.
    """
    same = zip(loop.inner_in_shared + loop.inner_in_non_seqs,
               loop.outer_in_shared + loop.outer_in_non_seqs)  # fmt: skip
    pairs = [(inner, outer, of[outer], 0) for inner, outer in same]
    steps = zip(loop.inner_in_seqs, loop.outer_in_seqs)
    pairs += [(inner, outer, _moved(of[outer], -1), 1) for inner, outer in steps]
    taps = loop.inner_in_mit_sot + [[v] for v in loop.inner_in_sit_sot]
    held, before = [_moved(of[v], -1) for v in states], None
    while held != before:
        of_states = [(v, *state, 1) for each, *state in zip(taps, states, held) for v in each]
        inside, before = rows.inside(pairs + of_states, loop.inner_outputs), held
        new = map(inside.value, loop.inner_out_mit_sot + loop.inner_out_sit_sot)
        # What they are before a step, and after it.
        held = [_rows.chosen(REPLICATED, [was, is_now.placement]) for was, is_now in zip(held, new)]
    return held, inside


def _is_first(placement):
    return isinstance(placement, Sharded) and placement.axis == 0


def _moved(placement, by):
    has_rows = isinstance(placement, Sharded)
    return placement.replace(axis=placement.axis + by) if has_rows else placement
