"""Metrics of ``mx.mod.Module`` on several contexts: those of the whole batch."""

import numpy as np
import pytest

import compat
from compat.testing import in_span

from .gluon_models import mx as mx  # the fixture

pytestmark = pytest.mark.row("MXNet Module")

METRICS = ["rmse", "pearsonr", "loss", "largest"]


def module(mx, parallel):
    sym = mx.sym
    output = sym.FullyConnected(sym.var("data"), num_hidden=1, name="dense")
    found = mx.mod.Module(sym.LinearRegressionOutput(output, name="lin"), label_names=["lin_label"])
    return compat.parallelize(found) if parallel else found


def rows_of(mx, rows, size):
    random = np.random.RandomState(0)
    inputs, labels = random.normal(size=(rows, 3)), random.normal(size=(rows, 1))
    return mx.io.NDArrayIter(inputs, labels, size, label_name="lin_label")


def metric(mx, name):
    if name == "largest":
        return mx.metric.np(lambda labels, outputs: np.abs(labels - outputs).max())
    return mx.metric.create(name)


def trained(mx, parallel, name, rows, size):
    """Return a module after a fit; the metric's values after each batch, and the last epoch's."""
    found, values = module(mx, parallel), []

    def note(param):
        values.extend(value for _, value in param.eval_metric.get_name_value())

    found.fit(
        rows_of(mx, rows, size), num_epoch=2, eval_metric=metric(mx, name),
        initializer=mx.init.One(), optimizer_params={"learning_rate": 0.05},
        batch_end_callback=note, eval_end_callback=note,
        eval_data=rows_of(mx, rows, size), validation_metric=metric(mx, name),
    )  # fmt: skip
    return found, values


@pytest.mark.parametrize("name", in_span(METRICS, ["rmse"]))
@pytest.mark.parametrize("rows, size", [(10, 10), (10, 4), (2, 2)])
def test_metrics_are_those_of_the_batch(mx, name, rows, size):
    """Of ``fit``, ``score`` and ``update_metric``; also where the last batch is padded."""
    found = []
    for parallel in (False, True):
        each, values = trained(mx, parallel, name, rows, size)
        values += [value for _, value in each.score(rows_of(mx, rows, size), metric(mx, name))]
        given = metric(mx, name)
        for batch in rows_of(mx, rows, size):
            each.forward(batch, is_train=False)
            each.update_metric(given, batch.label)
        values.append(given.get()[1])
        found.append((values, each.predict(rows_of(mx, rows, size)).asnumpy()))
    (plain, predicted), (parallel, others) = found
    assert len(plain) > 4
    np.testing.assert_allclose(plain, parallel, rtol=1e-5, atol=1e-6)
    assert predicted.shape == others.shape == (rows, 1)
    np.testing.assert_allclose(predicted, others, rtol=1e-5, atol=1e-6)
