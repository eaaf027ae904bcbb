"""Sums over ranks within a differentiated function, at which a step is cut into programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compat
from compat._backends.jax import gradient_marks, ranked_programs, reductions
from compat.testing import DEVICES


@pytest.fixture(scope="module", autouse=True)
def devices():
    """Have as many as other tests of this process."""
    compat.configure_gpu(simulate=DEVICES)


def total(x):
    (result,) = gradient_marks.mark(gradient_marks.SUM, [], [x.sum(0)], False)
    return (x * result**2).sum()


@pytest.mark.parametrize(
    "function", [total, jax.jit(total), jax.checkpoint(total), jax.jit(jax.checkpoint(total))]
)
def test_a_step_is_cut_at_sums_forward_and_backward(function):
    """As if all of three ranks had these rows."""
    x = jnp.arange(6.0).reshape(3, 2)
    args = [], x, 1.0, []
    program = ranked_programs.Program(lambda *args: jax.grad(function)(args[1]), [], *args)
    assert reductions.within_functions(program.jaxpr) is None
    assert program.last == 2
    found = program([x, 1.0], lambda values: 3 * values)
    np.testing.assert_allclose(found, jnp.stack([27 * x.sum(0) ** 2] * 3))


def test_gradients_of_many_functions_have_a_sum_for_each():
    jaxpr = jax.make_jaxpr(jax.vmap(jax.grad(total)))(jnp.ones((4, 3, 2)))
    marks = [one for one in jaxpr.eqns if one.primitive is gradient_marks.mark_p]
    assert [mark.outvars[0].aval.shape for mark in marks] == [(4, 2), (4, 2)]


def test_a_step_that_is_not_compiled_sums_at_once_but_in_functions_that_are():
    def exchange(values, is_weighted):
        assert not is_weighted
        return [3 * value for value in values]

    def total(x):
        (result,) = gradient_marks.mark(gradient_marks.SUM, [], [x], False, exchange)
        return (x * result).sum()

    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.grad(total)(x), 6 * x)
    with pytest.warns(compat.CompatWarning) as warned:
        np.testing.assert_allclose(jax.jit(total)(x), (x * x).sum())
    assert [str(each.message) for each in warned] == [
        "A function that the script compiles, in a step that is not compiled, has a sum over "
        "ranks, as of batch normalization by the statistics of the whole batch. It takes that of "
        "each rank's own rows. Compile the step: leave out run_eagerly=True and jit_compile=False."
    ]
