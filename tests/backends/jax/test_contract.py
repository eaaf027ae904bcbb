"""Keras 3 on JAX: the contract, and what is special to programs that XLA partitions."""

import math

import pytest

import compat
from compat._backends.jax import profiler
from compat._backends.jax.configuration import reads_profiles
from compat.testing import (
    CASES,
    DEVICES,
    in_span,
    span,
)

from ..shared_parts import KerasParts


def executed(model, inputs, targets):
    """Train one step; by device, what JAX's profiler saw it execute."""
    return profiler.executed_operations(lambda: model.train_on_batch(inputs, targets))


class TestJAX(KerasParts):
    product_in_timelines = "dot"
    backend = "jax"
    across_rows = "right"
    extension = ".keras"
    exempt_hooks = {
        "model._get_jax_state": "JAX moves arrays that no one has placed to the devices of a "
        "program, and refuses those that were placed on others",
    }

    def test_a_hook_that_is_not_reached_is_never_silent(self, keras, configuration):
        self.parallel()  # the rule for sorts, which is replaced once for the process, stays
        super().test_a_hook_that_is_not_reached_is_never_silent(keras, configuration)

    # Keras' own step gives up the weights that it replaces, and may be interrupted in between.
    test_a_fit_that_is_interrupted_can_be_run_again = None

    def test_a_distribution_of_the_script_is_kept(self, keras, automatic):
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        try:
            model = self.build(keras, "dense")
            self.check_left_alone(model, "keras.distribution.set_distribution() was called.")
        finally:
            keras.distribution.set_distribution(None)

    @span
    @pytest.mark.row("compat.timeline()")
    def test_timeline_says_when_each_device_executed_what(self, keras, configuration, tmp_path):
        if reads_profiles():
            return super().test_timeline_says_when_each_device_executed_what(
                keras, configuration, tmp_path
            )
        with pytest.raises(compat.UnsupportedError, match="Install JAX 0.7.2 or later"):
            with compat.timeline(str(tmp_path / "timeline.json")):
                pass  # pragma: no cover

    def placement(self, model, inputs, targets):
        found = executed(model, inputs, targets)
        for operation in sum(found.values(), []):  # nothing was computed unsplit
            rows = len(targets[0] if isinstance(targets, list) else targets)
            assert rows not in sum(operation.shapes, []), operation.name
        return profiler.products(found)

    def shard_sizes(self, model, inputs, targets):
        def is_forward(operation):
            return operation.shapes[0][-1] == 16 and "transpose(" not in operation.name

        found = executed(model, inputs, targets)
        assert sorted(found) == ["cpu:0", "cpu:1", "cpu:2"]
        for ran in found.values():  # from 8 features to the 16 units of the layer "hidden"
            products = [o.shapes for o in ran if is_forward(o) and 8 in o.shapes[1]]
            (result,) = [result for result, _, _ in products]
            yield 1 if len(result) == 1 else result[0]  # a vector, up to JAX 0.9

    def sizes_of(self, rows):
        each = math.ceil(rows / DEVICES)
        return [min(each, max(0, rows - i * each)) for i in range(DEVICES)]

    @pytest.mark.parametrize("samples", in_span([2, 14, 61], [14, 2]))
    def test_batch_is_split_evenly(self, keras, samples):
        """XLA's shards are all of one size, that of the largest of an even split.

        It fills up the last ones: a step takes as long as with sizes that differ by a row.
        """
        model = self.compiled(keras, "dense", parallel=True)
        sizes = list(self.shard_sizes(model, *CASES["dense"].data(samples)))
        assert sizes == [math.ceil(samples / DEVICES)] * DEVICES
