"""What cannot be split runs whole, with a warning, or is an error under ``strict=True``."""

import pytest
from conftest import refusal

import compat
from compat import _rows
from compat._runtime import reporting

pytestmark = pytest.mark.usefixtures("process")

MEAN = _rows.Across("lambda/Mean (Mean)", "layer 'lambda'", "train.py, line 12")
STRICT = (
    " It would have to run on cpu:0 with the whole batch, which strict=True makes an error. "
    "Compute it in the loss passed to compile(), which sees the whole batch; run the model on one "
    "device, with parallelize(model, gpus=1); or drop strict=True."
)
FOUND = {
    "mixed": "The operation lambda/Mean (Mean) in layer 'lambda' (train.py, line 12) of 'net' "
    "computes across the rows of a batch, of which each device has a part.",
    "tried": "Model 'net' gives other numbers for three rows of a batch together than for two of "
    "them and the third, and each device has a part of the batch.",
    "fails": "The operation qr of 'net' fails on a part of a batch, of which each device has one.",
    "diverged": "Model 'net' takes another path on a part of a batch, of which each device has "
    "one.",
    "gradient": "The operation Norm of 'net' has a gradient of its own that computes, or may "
    "compute, across the rows of a batch, of which each device has a part.",
    "opaque": "Model 'net' returns an object that is no tensor, such as a distribution, which "
    "cannot be put together from those of the devices.",
    "weight": "Model 'net' assigns to a trainable weight when it is called, and the devices share "
    "that weight.",
    "table": "Model 'net' looks up rows that depend on the batch and rows that do not in one "
    "table, and the gradients of the two cannot be told apart.",
    "rows": "Model 'net' has recurrent or attention layers whose batch is neither the first nor "
    "the second dimension of its arguments, so that compat cannot tell the rows.",
    "compiled": "The operation call of 'net' is a function that XLA compiles (jit_compile=True) "
    "with variables in it, which all have to be on its device; each device has a part of the "
    "batch.",
    "unknown": "The operation qr of 'net' may compute across the rows of a batch, of which each "
    "device has a part: compat has no rule for it, and cannot try it.",
}
OPERATIONS = {"fails": "qr", "gradient": "Norm", "compiled": "call", "unknown": "qr"}


def across(why):
    return MEAN if why == "mixed" else _rows.Across(OPERATIONS.get(why), why=why)


@pytest.mark.parametrize("why", sorted(FOUND))
def test_it_is_a_warning_that_names_operation_layer_and_line_and_an_error_under_strict(toy, why):
    with pytest.warns(compat.CompatWarning) as caught:
        _rows.runs_whole("net", across(why), "cpu:0", "The model")
    assert [str(each.message) for each in caught] == [
        FOUND[why] + " The model runs on cpu:0 with the whole batch."
    ]
    compat.configure_gpu(simulate=2, strict=True)
    call = _rows.runs_whole, "net", across(why), "cpu:0"
    assert refusal(compat.UnsupportedError, *call) == FOUND[why] + STRICT


def test_the_report_says_how_much_was_divided():
    assert reporting.of_this_process(["cpu:0"], None, {}, {}).as_dict()["whole"] == {}
    with pytest.warns(compat.CompatWarning):
        _rows.runs_whole("net", MEAN, "cpu:0")
        _rows.runs_whole("other", across("unknown"), "cpu:0", "The model")
        _rows.runs_whole("third", across("tried"), "cpu:0", "The model")
    report = reporting.of_this_process(["cpu:0"], None, {}, {})
    assert str(report).endswith(
        "Model 'net' was divided up to the operation lambda/Mean (Mean) in layer 'lambda'\n"
        "(train.py, line 12), whole from there on.\n"
        "Model 'other' was not divided, because of the operation qr.\n"
        "Model 'third' was not divided."
    )
    whole = {
        "net": "divided up to the operation lambda/Mean (Mean) in layer 'lambda' (train.py, line "
        "12), whole from there on",
        "other": "not divided, because of the operation qr",
        "third": "not divided",
    }
    assert report.whole == reporting.joined([report.as_dict()]).whole == whole
