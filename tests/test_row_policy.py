"""What cannot be split runs unsplit, with a warning, or is an error under ``strict=True``."""

import gc

import pytest
from conftest import refusal

import compat
from compat import _rows
from compat._runtime import reporting, unsplit_models

pytestmark = pytest.mark.usefixtures("process")

MEAN = _rows.Fallback(
    _rows.Reason.CROSS_BATCH, "lambda/MatMul (MatMul)", "layer 'lambda'", "train.py, line 12"
)
QR = _rows.Fallback(_rows.Reason.NO_RULE, "qr")
TRIED = _rows.Fallback(_rows.Reason.TRIAL_DIFFERS)
STRICT = (
    " It would have to run unsplit on cpu:0, which strict=True makes an error. Compute it in the "
    "loss passed to compile(), which sees the whole batch; run the model on one device, with "
    "parallelize(model, gpus=1); or drop strict=True."
)
#: Sentences of an operation and of whole models; backends' tests compare those of other reasons.
FOUND = {
    MEAN: "The operation lambda/MatMul (MatMul) in layer 'lambda' (train.py, line 12) of 'net' "
    "needs the whole batch, but each device sees only its shard.",
    _rows.Fallback(
        _rows.Reason.TRIAL_DIFFERS
    ): "Model 'net' gives different results for three samples at "
    "once than for two of them and the third, but each device sees only its shard.",
    _rows.Fallback(_rows.Reason.DIVERGES): "Model 'net' takes another code path on a shard of the "
    "batch, which is all that each device sees.",
    _rows.Fallback(
        _rows.Reason.BATCH_DIMENSION
    ): "Model 'net' has recurrent or attention layers whose batch is "
    "neither the first nor the second dimension of its arguments, so that compat cannot identify "
    "the batch dimension.",
}


class Model:
    pass


@pytest.mark.parametrize("fallback", FOUND)
def test_it_is_a_warning_that_names_operation_layer_and_line_and_an_error_under_strict(
    toy, fallback
):
    with pytest.warns(compat.CompatWarning) as caught:
        _rows.warn_unsplit(Model(), "net", fallback, "cpu:0", "The model")
    assert [str(each.message) for each in caught] == [
        FOUND[fallback] + " The model runs unsplit on cpu:0."
    ]
    compat.configure_gpu(simulate=2, strict=True)
    call = _rows.warn_unsplit, Model(), "net", fallback, "cpu:0"
    assert refusal(compat.UnsupportedError, *call) == FOUND[fallback] + STRICT


def test_the_report_says_how_much_was_split():
    models = Model(), Model(), Model()
    assert reporting.of_this_process(["cpu:0"], None, {}, {}).as_dict()["unsplit"] == {}
    with pytest.warns(compat.CompatWarning):
        _rows.warn_unsplit(models[0], "net", MEAN, "cpu:0")
        _rows.warn_unsplit(models[1], "other", QR, "cpu:0", "The model")
        _rows.warn_unsplit(models[2], "third", TRIED, "cpu:0", "The model")
    report = reporting.of_this_process(["cpu:0"], None, {}, {})
    assert str(report).endswith(
        "Model 'net' ran split up to the operation lambda/MatMul (MatMul) in layer\n"
        "'lambda' (train.py, line 12), unsplit from there on.\n"
        "Model 'other' ran unsplit, because of the operation qr.\n"
        "Model 'third' ran unsplit."
    )
    unsplit = {
        "net": "split up to the operation lambda/MatMul (MatMul) in layer 'lambda' (train.py, line "
        "12), unsplit from there on",
        "other": "unsplit, because of the operation qr",
        "third": "unsplit",
    }
    assert report.unsplit == reporting.joined([report.as_dict()]).unsplit == unsplit


def test_what_is_unsplit_in_between_is_said_so(toy):
    model = Model()
    with pytest.warns(compat.CompatWarning) as caught:
        _rows.warn_unsplit(model, "net", MEAN, "cpu:0", _rows.IN_BETWEEN)
    assert str(caught[0].message) == FOUND[MEAN] + (
        " It, and what is computed from it before the batch is split again, runs unsplit on cpu:0."
    )
    report = reporting.of_this_process(["cpu:0"], None, {}, {})
    assert report.unsplit["net"] == (
        "split, but unsplit from the operation lambda/MatMul (MatMul) in layer 'lambda' (train.py, "
        "line 12) on to where the batch is split again"
    )


def test_two_models_of_one_name_have_two_records_and_those_that_are_gone_do_not_add_up():
    unsplit, models = unsplit_models.UnsplitModels(), [Model(), Model()]
    for number, model in enumerate(models):
        unsplit.record(model, "net", f"unsplit, because of {number}")
    assert unsplit.by_name() == {
        "net": "unsplit, because of 0",
        "net (2)": "unsplit, because of 1",
    }
    unsplit.record(models[0], "net", "unsplit")
    assert unsplit.by_name() == {"net": "unsplit, because of 1", "net (2)": "unsplit"}
    del models, model
    gc.collect()
    assert len(unsplit.by_name()) == 2, "a report at the end of a script says so, too"
    unsplit.record(Model(), "net", "unsplit, because of a third")
    assert unsplit.by_name() == {"net": "unsplit, because of a third"}
