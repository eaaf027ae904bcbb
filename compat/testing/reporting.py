"""That the report says what each device has computed."""

import json

import pytest

import compat

from .. import _replicas
from .contract import BackendContract
from .models import CASES, DEVICES
from .spans import span


class ReportContract(BackendContract):
    """What ``compat.report()`` counts of a Keras model."""

    def sizes_of(self, rows):
        """How many rows of a batch each device computes."""
        return _replicas.sizes(rows, DEVICES)

    @span
    @pytest.mark.row("compat.report()")
    def test_report_says_what_each_device_did(self, keras, configuration, counted_anew):
        inputs, targets = CASES["dense"].data(61)
        model = self.compiled(keras, "dense", parallel=True)
        report = compat.report()
        assert [each.device for each in report.devices] == configuration.devices
        assert report.verdict.startswith("No batch was split: model ")
        assert not report.all_worked
        batches = [16, 16, 16, 13]
        model.fit(inputs, targets, batch_size=16, epochs=2, shuffle=False, verbose=0)
        trained = [2 * sum(part) for part in zip(*map(self.sizes_of, batches))]
        report = compat.report()
        assert [each.rows for each in report.devices] == trained
        model.evaluate(inputs, targets, batch_size=16, verbose=0)
        model.predict(inputs, batch_size=16, verbose=0)
        report = compat.report()
        assert [each.rows for each in report.devices] == [2 * rows for rows in trained]
        assert [each.training_rows for each in report.devices] == trained
        assert [each.steps for each in report.devices] == [16] * DEVICES
        assert report.verdict == "All 3 devices worked: {} to {} rows each.".format(
            2 * min(trained), 2 * max(trained)
        )
        found = json.loads(report.to_json())
        assert found["all_worked"] and found["verdict"] == report.verdict
        assert [each["rows"] for each in found["devices"]] == [2 * rows for rows in trained]

    @span
    def test_report_says_which_device_got_no_rows(self, keras, configuration, counted_anew):
        inputs, targets = CASES["dense"].data(2)
        model = self.compiled(keras, "dense", parallel=True)
        model.train_on_batch(inputs, targets)
        report = compat.report()
        sizes = self.sizes_of(2)
        assert [each.rows for each in report.devices] == sizes
        assert [each.steps for each in report.devices] == sizes
        assert report.verdict == (
            "Only 2 of 3 devices worked. {} got no rows: no batch had more than 2 rows, too few "
            "for 3 devices.".format(configuration.devices[sizes.index(0)])
        )
