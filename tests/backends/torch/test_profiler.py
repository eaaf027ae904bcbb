"""``compat.timeline()`` on torch: modules, and an own profiler."""

import json
import os
import subprocess
import sys

import pytest
import torch

import compat

pytestmark = pytest.mark.row("compat.timeline()")


def test_each_replica_is_recorded_forward_and_backward(tmp_path):
    compat.configure_gpu(simulate=3)
    model = compat.parallelize(torch.nn.Conv1d(8, 16, 3))
    model(torch.ones(61, 8, 5)).sum().backward()
    path = tmp_path / "timeline.json"
    with compat.timeline(str(path)):
        model(torch.ones(61, 8, 5)).sum().backward()
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["cpu:0", "cpu:1", "cpu:2"]
    executed = [(names[e["pid"]], e["name"]) for e in events if e["ph"] == "X"]
    for device in names.values():
        assert executed.count((device, "aten::conv1d")) == 1
        assert executed.count((device, "gradient of ConvolutionBackward0")) == 1


def test_a_profiler_that_is_recording_is_left_alone(tmp_path):
    """Another one would end it, silently."""
    compat.configure_gpu(simulate=3)
    with torch.profiler.profile() as profile:
        with pytest.raises(compat.InvalidArgumentError) as caught:
            with compat.timeline(str(tmp_path / "timeline.json")):
                pass  # pragma: no cover
        torch.ones(3).sum()
    assert str(caught.value) == (
        "timeline() records with the profiler of torch, which is recording already, for something "
        "else. End that before the block."
    )
    assert any(event.name == "aten::sum" for event in profile.events())
    assert not os.listdir(str(tmp_path))


def test_timelines_do_not_need_numpy(tmp_path):
    script = "import sys; sys.modules['numpy'] = None; import compat, torch"
    script += "\nwith compat.timeline(sys.argv[1]): torch.ones(3).sum()"
    subprocess.check_call([sys.executable, "-c", script, str(tmp_path / "timeline.json")])
