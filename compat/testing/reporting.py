"""That the report says what each device has computed."""

import json
import os

import pytest

import compat

from .._rows import split_rows
from .contract import BackendContract
from .models import DEVICES, fit_in_order
from .spans import span


class ReportContract(BackendContract):
    """What ``compat.report()`` counts of a Keras model."""

    #: What the names of operations that are matrix products have in common, in a timeline; None
    #: where the framework does not record when its devices execute what.
    product_in_timelines = None

    def sizes_of(self, rows):
        """How many rows of a batch each device computes."""
        return split_rows.sizes(rows, DEVICES)

    @span
    @pytest.mark.row("compat.report()")
    def test_report_says_what_each_device_did(self, keras, configuration, counted_anew):
        model, inputs, targets = self.parallel_and_data(keras, "dense", 32)
        report = compat.report()
        assert [each.device for each in report.devices] == configuration.devices
        assert report.verdict.startswith("No batch was split: model ")
        assert not report.all_worked
        batches = [16, 16]
        fit_in_order(model, inputs, targets, epochs=2)
        trained = [2 * sum(part) for part in zip(*map(self.sizes_of, batches))]
        report = compat.report()
        assert [each.rows for each in report.devices] == trained
        model.evaluate(inputs, targets, batch_size=16, verbose=0)
        model.predict(inputs, batch_size=16, verbose=0)
        report = compat.report()
        assert [each.rows for each in report.devices] == [2 * rows for rows in trained]
        assert [each.training_rows for each in report.devices] == trained
        assert [each.steps for each in report.devices] == [8] * DEVICES
        verdict = "All 3 devices worked: {} to {} rows each."
        assert report.verdict == verdict.format(2 * min(trained), 2 * max(trained))
        found = json.loads(report.to_json())
        assert found["all_worked"] and found["verdict"] == report.verdict
        assert [each["rows"] for each in found["devices"]] == [2 * rows for rows in trained]

    @span
    @pytest.mark.row("compat.timeline()")
    def test_timeline_says_when_each_device_executed_what(self, keras, configuration, tmp_path):
        model, inputs, targets = self.parallel_and_data(keras, "dense", 61)
        model.fit(inputs, targets, batch_size=61, verbose=0)
        path = str(tmp_path / "timeline.json")
        if self.product_in_timelines is None:
            with pytest.raises(compat.UnsupportedError) as caught:
                with compat.timeline(path):
                    pass  # pragma: no cover
            assert str(caught.value) == (
                f"{self.instance().name} cannot record when each device executes what. "
                "compat.report() tells what each device has computed."
            )
            assert not os.listdir(str(tmp_path))
            return
        with compat.timeline(path):
            model.fit(inputs, targets, batch_size=61, epochs=5, verbose=0)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        assert list(names.values()) == configuration.devices
        ran = [e for e in events if e["ph"] == "X"]
        end = max(e["ts"] + e["dur"] for e in ran)
        assert min(e["ts"] for e in ran) == 0 and all(e["dur"] >= 0 for e in ran)
        uses = compat.report().devices
        for place, device in names.items():
            here = [e for e in ran if e["pid"] == place]
            products = [e for e in here if self.product_in_timelines in e["name"]]
            # Two layers in five steps; some of the backward products may be part of fused kernels.
            assert 10 <= len(products) <= 100, (device, sorted({e["name"] for e in here}))
            (busy,) = [each.busy for each in uses if each.device == device]
            assert 0 < busy <= 1
            assert busy * end <= sum(e["dur"] for e in here) + 1
