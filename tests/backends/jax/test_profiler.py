"""``compat.timeline()`` on JAX, where a profiler of the user's own is recording."""

import os

import pytest

import compat


@pytest.mark.row("compat.timeline()")
def test_a_profiler_that_is_recording_is_left_alone(tmp_path):
    compat.configure_gpu(simulate=3)
    import jax

    with jax.profiler.trace(str(tmp_path / "own")):
        with pytest.raises(compat.InvalidArgumentError) as caught:
            with compat.timeline(str(tmp_path / "timeline.json")):
                pass  # pragma: no cover
    assert str(caught.value) == (
        "timeline() records with the profiler of jax, which is recording already, for something "
        "else. End that before the block."
    )
    assert os.listdir(str(tmp_path)) == ["own"]


def test_versions_whose_profiles_cannot_be_read(tmp_path, monkeypatch):
    compat.configure_gpu(simulate=3)
    import jax

    monkeypatch.setattr(jax, "__version_info__", (0, 7, 1))
    with pytest.raises(compat.UnsupportedError) as caught:
        with compat.timeline(str(tmp_path / "timeline.json")):
            pass  # pragma: no cover
    assert str(caught.value) == (
        "jax cannot record when each device executes what in this version. Install JAX 0.7.2 or "
        "later; compat.report() shows what each device has computed."
    )
