"""The first steps of a parallelized model are checked: whether all of its devices worked.

The backend is tests/plugin, whose devices are threads.
"""

import contextlib
import threading
import types
import warnings

import numpy as np
import pytest

import compat
from compat import errors
from compat._runtime import usage, work
from compat._runtime.process import process
from compat._runtime.usage import UsageCheck

pytestmark = pytest.mark.usefixtures("process")

THREE = ["cpu:0", "cpu:1", "cpu:2"]
HOOKS = {
    "call": types.SimpleNamespace(calls=0),
    "make_train_function": types.SimpleNamespace(calls=0),
}
UNREACHED = (
    "In the first training step of model 'net' (fit()) no batch was split over cpu:0, cpu:1, "
    "cpu:2. What parallelize() put in place of model.call(), model.make_train_function() was not "
    "called. Another library has replaced it, or this version of the framework takes another way: "
    "call parallelize() after such libraries have changed the model, and report it with the output "
    "of `python -m compat env` if there is none."
)


class Model:
    """A model of the framework's; all are named "net"."""


def check_of(executed=None, hooks=HOOKS, model=None):
    @contextlib.contextmanager
    def record():
        yield executed

    return UsageCheck(
        "net",
        THREE,
        None if executed is None else record,
        lambda: hooks,
        is_unsplit=lambda: model in process.unsplit,
    )


def warned(check, step, kind="train", name="fit"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with check.step(kind, name=name):
            step()
    return [str(each.message) for each in caught]


def count(sizes=(2, 2, 3), training=True):
    return lambda: work.count(THREE, sizes, training)


def test_a_step_on_all_devices_is_silent_and_checked_once():
    check = check_of(dict.fromkeys(THREE, 5))
    assert warned(check, count()) == []
    assert warned(check, lambda: None) == [], "it was checked again"
    assert warned(check, lambda: None, "predict") == [
        UNREACHED.replace("training step", "prediction")
    ]


def test_a_step_that_no_hook_counted():
    assert warned(check_of(dict(dict.fromkeys(THREE, 0), **{"cpu:0": 9})), bool) == [UNREACHED]
    assert process.unused == {"net": UNREACHED}


def test_without_hooks_and_without_a_record():
    (text,) = warned(check_of(hooks={}), lambda: None)
    assert text == (
        "In the first training step of model 'net' (fit()) no batch was split over cpu:0, cpu:1, "
        "cpu:2. Something else runs the model in place of what parallelize() set up. Another "
        "library has replaced it, or this version of the framework takes another way: call "
        "parallelize() after such libraries have changed the model, and report it with the output "
        "of `python -m compat env` if there is none."
    )


def test_a_record_without_operations():
    (text,) = warned(check_of(dict.fromkeys(THREE, 0), hooks={}), count())
    assert text.startswith(
        "In the first training step of model 'net' (fit()) the framework recorded no operation on "
        "any device. "
    )


def test_devices_that_executed_nothing():
    (text,) = warned(check_of({"cpu:0": 9, "cpu:1": 3}), count())
    assert text == (
        "In the first training step of model 'net' (fit()) the framework executed no operation on "
        "cpu:2, to which rows were given. The session, context or mesh in use has fewer devices "
        "than configure_gpu() has set up, or places operations elsewhere. Let compat configure it: "
        "leave out device_count, visible_device_list and the like."
    )
    assert process.idle_devices == {"cpu:2"}


@pytest.mark.parametrize("sizes", [(1, 1, 0), (1, 0, 0)])
def test_a_device_without_rows_need_not_execute_anything(sizes):
    executed = {device: 1 for device, rows in zip(THREE, sizes) if rows}
    assert warned(check_of(executed), count(sizes)) == []


def test_a_device_that_computed_every_batch_alone():
    (text,) = warned(check_of(dict.fromkeys(THREE, 5)), count((7, 0, 0)))
    assert text == (
        "In the first training step of model 'net' (fit()) one device computed every batch alone. "
        "What parallelize() put in place of model.call(), model.make_train_function() was not "
        "called. Another library has replaced it, or this version of the framework takes another "
        "way: call parallelize() after such libraries have changed the model, and report it with "
        "the output of `python -m compat env` if there is none."
    )
    model = Model()
    process.unsplit.record(model, "net", "unsplit, because its layer is stateful")
    assert warned(check_of({"cpu:0": 9}, model=model), count((7, 0, 0))) == []


def test_nothing_is_reported_of_what_was_not_computed_or_said_before():
    assert warned(check_of(dict.fromkeys(THREE, 0)), lambda: None) == []
    model = Model()
    process.unsplit.record(model, "net", "unsplit, because its layer is stateful")
    assert warned(check_of({"cpu:0": 9}, model=model), lambda: None) == []


def test_a_model_that_runs_unsplit_hides_nothing_of_another_one_of_its_name():
    """As of two modules of one class in torch, whose name is that of the class."""
    unsplit, other = Model(), Model()
    process.unsplit.record(unsplit, "net", "unsplit, because its layer is stateful")
    assert warned(check_of({"cpu:0": 9}, model=other), lambda: None) == [UNREACHED]
    process.unsplit.discard(other)  # as where it is parallelized again
    assert unsplit in process.unsplit and other not in process.unsplit


def test_a_step_within_another_one_of_its_kind_belongs_to_it():
    check = check_of(dict.fromkeys(THREE, 5))

    def step():
        with check.step("train", name="fit_generator"):
            pass
        count()()

    assert warned(check, step) == []


def test_a_step_with_another_function_is_checked_again():
    check, function = check_of({"cpu:0": 1}), ["made first"]
    for made, expected in (("made first", 1), ("made first", 0), ("made by compile()", 1)):
        function[0] = made
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with check.step("train", lambda: function[0]):
                pass
        assert len(caught) == expected


def test_what_other_threads_compute_meanwhile_is_not_taken_for_this_one_s():
    """Another thread's batch has rows for three devices, this one's for one."""
    check = check_of({"cpu:0": 1})

    def step():
        thread = threading.Thread(target=count())
        thread.start()
        thread.join()
        work.count(THREE, (1, 0, 0), True)

    assert warned(check, step) == []


def test_what_other_threads_compute_for_a_step_is_its_own():
    def step():
        thread = threading.Thread(target=count())
        thread.start()
        thread.join()

    assert warned(check_of(dict.fromkeys(THREE, 1)), step) == []


def test_batches_of_graphs_are_checked_another_time_where_threads_meet(monkeypatch):
    counted, both = {}, threading.Barrier(2)
    monkeypatch.setitem(process.graph_counters, "table", lambda: counted.items())
    check = check_of({"cpu:0": 1})

    def step():
        both.wait()
        counted[tuple(THREE), (2, 2, 3), True] = 1 + len(counted)
        both.wait()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=lambda: _within(check, step)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not caught
    del counted[tuple(THREE), (2, 2, 3), True]
    assert len(warned(check, lambda: counted.update({(tuple(THREE), (2, 2, 3), True): 5}))) == 1


def _within(check, step):
    with check.step("train"):
        step()


def test_a_step_that_fails_says_nothing_more():
    check = check_of({"cpu:0": 9})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(KeyError), check.step("train"):
                raise KeyError
    assert len(warned(check, lambda: None)) == 1


# With a real backend ------------------------------------------------------------------------------


@pytest.fixture
def network():
    from compat_numpy.networks import Network

    compat.configure_gpu(backend="numpy", simulate=3, verify=0)
    return compat.parallelize(Network(8, 16, 4))


DATA = np.ones((7, 8)), np.ones((7, 4))


def test_all_devices_worked(network):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network.train_on_batch(*DATA)
        network.predict(DATA[0])
    report = compat.report()
    assert report.verdict == "All 3 devices worked: 4 to 6 rows each." and report.all_worked


def test_what_is_not_reached_is_in_the_report(network):
    network.gradients = type(network).gradients.__get__(network)  # as another library does
    with pytest.warns(compat.CompatWarning) as caught:
        network.train_on_batch(*DATA)
    (warning,) = caught
    assert "model 'Network' (train_on_batch())" in str(warning.message)
    assert warning.filename == __file__
    report = compat.report()
    assert not report.all_worked
    assert report.verdict == ("No batch was split. Model 'Network' did not run on all devices.")
    assert str(warning.message) in " ".join(str(report).split("\n"))
    assert report.as_dict()["unused"] == {"Network": str(warning.message)}
    assert str(warning.message).split(" (")[0] in report.to_html().replace("&#x27;", "'")
    network.predict(DATA[0])
    verdict = compat.report().verdict
    assert verdict.endswith("Model 'Network' did not run on all devices: see below.")


def test_strict_makes_it_an_error():
    from compat_numpy.networks import Network

    compat.configure_gpu(backend="numpy", simulate=3, verify=0, strict=True)
    network = compat.parallelize(Network(8, 16, 4))
    network.gradients = type(network).gradients.__get__(network)
    with pytest.raises(errors.DevicesNotUsedError, match="no batch was split"):
        network.train_on_batch(*DATA)


def test_kinds_are_those_of_keras_methods():
    from compat._keras import watched_methods

    assert set(watched_methods._KINDS.values()) == set(usage.KINDS)


def test_what_cannot_be_recorded_this_time_is_checked_again():
    """As where the script records something itself: only what was counted is known."""
    executed = usage.Executed.fromkeys(THREE, 0)
    executed.is_known = False
    check = check_of(executed)
    assert warned(check, count()) == []
    assert warned(check, lambda: None) == [UNREACHED], "it was not checked again"


def test_a_backend_that_reports_nothing_for_this_model_is_silent():
    def record():
        raise errors.UnsupportedError("it does not report which devices execute what")

    check = UsageCheck("net", THREE, record, lambda: HOOKS)
    assert warned(check, count()) == []


def test_a_step_that_ended_with_its_thread_disturbs_no_other(monkeypatch):
    counted = {}
    monkeypatch.setitem(process.graph_counters, "table", lambda: counted.items())
    check, left = check_of({"cpu:0": 1}), []

    def leave():
        left.append(check.step("train"))
        left[0].__enter__()

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert len(warned(check, lambda: counted.update({(tuple(THREE), (2, 2, 3), True): 5}))) == 1
