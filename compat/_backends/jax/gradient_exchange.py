"""Gradients in a rank's step: exchanged eagerly, or checked to be means over all ranks."""

import inspect

import jax
import jax.numpy as jnp
from jax._src import source_info_util
from jax.tree_util import tree_leaves, tree_map, tree_unflatten

from ... import errors
from ..._ranks import arrays, batch_parts, keras3_state, losses
from . import gradient_marks


class EagerStep:
    """A step that is not compiled, which exchanges eagerly what ``gradient_marks`` would mark.

    Arguments:
        step: a ``RankedJAXStep``.
        trainable: the weights with which it begins.
        share: a function that gives this rank's share of the rows.
    """

    def __init__(self, step, trainable, share):
        self.step, self.share = step, share
        self.trainable = list(trainable)
        self.has_exchanged = False

    def mark(self, kind, primals, values, is_weighted=True):
        """Return the mean over ranks of gradients of weights; other values unchanged."""
        is_due = kind == gradient_marks.SUM
        if kind == gradient_marks.APPLIED:
            is_due = self.step.has_local or not self.has_exchanged
        elif kind == gradient_marks.GRADIENT:
            is_due = self._are_weights(primals)
        if not is_due or not values or self.step.compute.is_asking:
            return values
        if kind == gradient_marks.SUM:  # which may be of a differentiated function
            return gradient_marks.mark(kind, [], values, is_weighted, self.exchange)
        if any(isinstance(value, jax.core.Tracer) for value in values):
            if not self.step.has_local:
                line = errors.users_line().strip(" ()")
                errors.warn(_UNCHECKED.format(self.step.model.name, line))
            self.step.has_local = True
            return values
        self.has_exchanged = True
        return self.exchange(values, is_weighted)

    def exchange(self, values, is_weighted):
        """Return the sums of arrays over all ranks, or the means weighted by their rows."""
        types = [str(value.dtype) for value in values]
        dtype = "float64" if "float64" in types else "float32"
        share = self.share() if is_weighted else 1
        parts = [jnp.asarray(value).astype(dtype).ravel() * share for value in values]
        return arrays.like(values, self.step.sum(jnp.concatenate(parts)))

    def _are_weights(self, values):
        """Return whether these are the model's weights, or other values in place of all of them."""
        ids = set(map(id, self.trainable))
        shapes = [(value.shape, value.dtype) for value in values]
        return all(id(value) in ids for value in values) or shapes == [
            (value.shape, value.dtype) for value in self.trainable
        ]


def check(model, program):
    """Check that a compiled step updates weights and the optimizer's state alike on all ranks.

    Raises:
        UnsupportedError: they depend on values of each rank's own rows.
    """
    places = tree_unflatten(program.results, program.jaxpr.outvars)
    _, (trainable, _, optimizer, _) = places
    origin = program.decision_of(tree_leaves([trainable, optimizer]))
    if origin is not None:
        raise errors.unsupported(
            "jax",
            "train model {!r} as one of several ranks: what train_step() computes in {} is that of "
            "each rank's own rows, and weights or the optimizer's state depend on it".format(
                model.name, line_of(origin)
            ),
            "Let them depend on gradients of jax.grad() or jax.value_and_grad(), which are those "
            "of all ranks where they are not within jax.lax.scan(), jax.vmap() or the like.",
        )


def warn_of_inner(model, program):
    """Warn that a loss depends on a gradient of weights, which ranks do not exchange within it."""
    inner = program.inner()
    if inner is not None:
        errors.warn(
            "The gradient of weights in {}, within a function of which model {!r} takes the "
            "gradient, is that of each rank's own rows. Where the loss is not linear in it, ranks "
            "train to other numbers than one process.".format(line_of(inner), model.name)
        )


def check_applied(step, program, state, data):
    """Check an optimizer's inputs, if they were not computed from gradients of all ranks.

    Then ranks average them, which is right if they are means over rows: in the first step they are
    computed from parts of a batch as well. All ranks call this at once.

    Arguments:
        step: a ``RankedJAXStep``.
        program: the ``ranked_programs.Program`` of the step.
        state: the state with which the step begins.
        data: its batch.

    Raises:
        RankError: they are not means over rows.
    """
    line = line_of(program.applied())
    is_random = draws_numbers(program) or keras3_state.averaged(step.model)
    is_mean = None if is_random else _is_mean(step.applied, state, data)
    answers = [answer for (answer,) in step.engine.gather([_ANSWERS.index(is_mean)])]
    if _ANSWERS.index(False) in answers:
        raise errors.RankError(
            "What the optimizer of model {!r} is given is computed in {} from gradients of each "
            "rank's own rows, and is no mean over rows. Take gradients by jax.grad() or "
            "jax.value_and_grad() outside of jax.lax.scan(), jax.vmap() or the like: those are of "
            "all ranks.".format(step.model.name, line)
        )
    if _ANSWERS.index(None) in answers:
        errors.warn(_UNCHECKED.format(step.model.name, line))


def _is_mean(applied, state, data):
    """Return whether the value of a batch is the mean of its parts' values; None: inconclusive."""
    leaves = [leaf for leaf in tree_leaves(data) if getattr(leaf, "shape", None)]
    rows, compute = batch_parts.rows_of(leaves), jax.jit(applied)
    if rows is None or rows < 2:
        return None

    def computed(part):
        return compute(state, tree_map(lambda leaf: leaf[part.rows], data))

    try:
        whole = computed(batch_parts.WHOLE)
        parts = batch_parts.in_two(rows, max(1, rows // 3))
        mean = sum(computed(part) * part.share for part in parts)
    except (TypeError, ValueError):  # such as where a number of rows does not divide
        return None
    distance = jnp.abs(whole - mean).max()
    return bool(distance <= losses.rounding("float32") * jnp.abs(whole).max())


#: Results of ``_is_mean``, of which ranks gather the indices.
_ANSWERS = [True, False, None]
_UNCHECKED = (
    "What the optimizer of model {!r} is given is computed in {} from gradients of each rank's own "
    "rows, of which ranks take the mean. Whether that is what one process computes could not be "
    "checked. It is not if it clips or normalises gradients: take these by jax.grad() or "
    "jax.value_and_grad() outside of jax.lax.scan(), jax.vmap() or the like."
)
RANDOM = "threefry", "random_bits", "rng_bit_generator"


def draws_numbers(program):
    """Return whether a program draws random numbers."""
    return any(map(str(program.jaxpr).__contains__, RANDOM))


def line_of(operation, unknown="an operation"):
    """Return the line of the script that created an operation, or ``unknown``."""
    source = operation.source_info
    if "traceback" in inspect.signature(source_info_util.user_frames).parameters:
        source = source.traceback  # JAX 0.7 and later
    frames = source_info_util.user_frames(source)
    lines = [(frame.file_name, frame.start_line) for frame in frames]
    return errors.innermost_line(lines[::-1]) or unknown
