"""``compat unwrap`` without h5py: which files it refuses, and whose a weight is by its name.

``tests/backends/unwrapping.py`` has the files that Keras writes.
"""

import json
import sys

import conftest
import pytest

import compat
from compat._commands import unwrap, wrapped_model

HDF5 = b"\x89HDF\r\n\x1a\n"


def refusal(path, kind=compat.ModelFileError, model=None):
    return conftest.refusal(kind, unwrap.run, str(path), None, False, model)


def test_what_is_no_hdf5_file(tmp_path):
    path = tmp_path / "old.h5"
    assert refusal(path) == "{} cannot be read: No such file or directory.".format(path)
    path.write_bytes(b"")
    assert refusal(path) == (
        "{} is not an HDF5 file. compat unwrap takes what model.save() or model.save_weights() "
        "wrote with a name that ends in .h5.".format(path)
    )
    assert refusal(tmp_path) == "{} cannot be read: Is a directory.".format(tmp_path)


def test_without_h5py(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    path = tmp_path / "old.h5"
    path.write_bytes(HDF5)
    assert refusal(path, compat.NotInstalledError) == (
        "compat unwrap reads HDF5 files with h5py, which cannot be imported here (import of h5py "
        "halted; None in sys.modules). Install it: pip install h5py"
    )
    assert [each.name for each in tmp_path.iterdir()] == ["old.h5"]


def test_the_architecture_is_one(tmp_path):
    path = tmp_path / "model.json"
    with pytest.raises(compat.ModelFileError) as error:
        unwrap._architecture(str(path))
    assert str(error.value).startswith("--model {} cannot be read: ".format(path))
    path.write_text("{")
    with pytest.raises(compat.ModelFileError) as error:
        unwrap._architecture(str(path))
    assert str(error.value) == (
        "--model {} cannot be read: Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1).".format(path)
    )
    path.write_text('{"a": 1}')
    with pytest.raises(compat.ModelFileError) as error:
        unwrap._architecture(str(path))
    assert str(error.value) == (
        '--model {} has no layers of a model. Write it with open("model.json", '
        '"w").write(model.to_json()), where model is the plain one.'.format(path)
    )
    path.write_text(json.dumps(model("a")))
    assert unwrap._architecture(str(path)) == model("a")


def layer(name, kind="Dense", **config):
    return {"name": name, "class_name": kind, "config": dict(config, name=name)}


def model(*layers, **more):
    layers = [each if isinstance(each, dict) else layer(each) for each in layers]
    return dict({"class_name": "Model", "config": {"name": "model_1", "layers": layers}}, **more)


@pytest.mark.parametrize(
    "weights, layers, owners",
    [
        ("a/k a/b c/k c/b", "a c", "a a c c"),
        # The moving averages come after all that is trained.
        ("a/g c/k a/m", "a c", "a c a"),
        # What is not trained comes last, wherever it stands.
        ("c/k a/k", "a c", "c a"),
        ("block/a/k block/c/k", "block/a block/c", "block/a block/c"),
        # TensorFlow made names anew: those of a clone, and those that are another layer's.
        ("d_3/k d_1_1/k d_2_1/k", "d d_1 d_2", "d d_1 d_2"),
        ("d_1/k d_1_1/k", "d d_1", "d d_1"),
        ("d_1/k d_2/k d_1_1/k", "d d_1 d_2", None),
        ("scope/a/k scope/c/k", "a c", "a c"),
        # Names that tell nothing.
        ("x/k a/k", "a c", None),
        ("Variable:0", "a", None),
        ("c/k a/k c/b a/b", "a c", None),
    ],
)
def test_whose_a_weight_is(weights, layers, owners):
    found = wrapped_model.owners(weights.split(), model(*layers.split()))
    assert found == (owners and owners.split())


def test_a_weight_of_a_layer_that_is_not_listed():
    config = {"class_name": "Sequential", "config": [layer("x", "InputLayer"), layer("a")]}
    with pytest.raises(compat.ModelFileError, match="old.h5 cannot be unwrapped: the names of"):
        unwrap._layers("old.h5", ["x/k", "a/k"], config)


def test_a_layer_that_has_others():
    inner = layer("encoder", "Sequential", layers=[layer("d_1"), layer("d_2")])
    both = layer("both", "Bidirectional", layer=layer("rnn"))
    for names, owners in (
        ("d_3/k d_1/k d_2/k both/forward_rnn/k d_1/m", "d_3 encoder encoder both encoder"),
        # As a whole not trained: what would be trained comes first within it.
        ("d_3/k both/backward_rnn/k d_1/k d_2/k d_1/m", "d_3 both encoder encoder encoder"),
    ):
        assert wrapped_model.owners(names.split(), model("d_3", inner, both)) == owners.split()


@pytest.mark.parametrize(
    "weights, layers",
    [
        ("a/k a/b c/k a/m", "a c"),
        ("both/forward_rnn/k both/backward_rnn/k", "both"),
        ("rnn/lstm_cell_3/k rnn/lstm_cell_4/k", "rnn"),
        ("conv1/conv/k conv1/bn/g", "conv1/conv conv1/bn"),
        ("model_1/a/k model_1/c/k", "a c"),
        ("d/k d_1/k d_2/k", "d d_1 d_2"),
    ],
)
def test_layers_by_the_names_of_weights(weights, layers):
    groups = wrapped_model.groups_by_names(weights.split(), "model_1")
    assert [name for name, _ in groups] == layers.split()
    assert sorted(each for _, names in groups for each in names) == sorted(weights.split())


@pytest.mark.parametrize(
    "weights, problem",
    [
        ("d_2/k d_1/k", "'d_1' comes after 'd_2'"),
        ("Variable:0", "the name 'Variable:0' names no layer"),
        (
            "a/g c/k a/moving_mean:0 b/k",
            "'b/k' comes after 'a/moving_mean:0', so 'b' was not trained, and Keras lists it apart "
            "from its place",
        ),
    ],
)
def test_names_that_leave_the_order_open(weights, problem):
    with pytest.raises(ValueError) as error:
        wrapped_model.groups_by_names(weights.split(), "model_1")
    assert str(error.value) == problem
    file = {"inner": {}, "in": {}, "out": {}}
    groups = [("in", []), ("inner", weights.split()), ("out", [])]
    planned = unwrap._planned_of_weights
    told = conftest.refusal(compat.ModelFileError, planned, "old.h5", file, groups, None)
    assert told == (
        "old.h5 has weights without the model, and their names do not show the order of its "
        'layers: {}. Write the plain model with open("model.json", "w").write(model.to_json()) and '
        "add --model model.json.".format(problem.replace("model_1", "inner"))
    )


def wrapper(calls, joint):
    """Return a wrapper's configuration: on which layers the model inside is called, what joins."""
    called = [[[name, 0, 0, {}]] for name in calls]
    inner = dict(layer("inner", "Sequential"), inbound_nodes=called)
    inner["config"] = [{"class_name": "Dense", "config": {"name": "d"}}]  # as Keras 2.0 has it
    sources = [["inner", 1 + index, 0, {}] for index, _ in enumerate(calls)]
    layers = [dict(layer(name, "InputLayer"), inbound_nodes=[]) for name in ("a", "b")]
    layers += [
        dict(layer(name, "Lambda"), inbound_nodes=[[[source, 0, 0, {}]]])
        for name, source in (("a_1", "a"), ("a_2", "a"), ("b_1", "b"))
    ]
    layers += [inner, dict(joint, inbound_nodes=[sources])]
    made = model(*layers)
    inputs = sorted({name[0] for name in calls})
    made["config"]["input_layers"] = [[name, 0, 0] for name in inputs]
    made["config"]["output_layers"] = [[joint["name"], 0, 0]]
    return made


ROWS = layer("out", "Concatenate", axis=0)


def test_the_model_inside():
    old = layer("out", "Merge", mode="concat", concat_axis=0)
    for joint in (ROWS, old):
        found = wrapped_model.inside(wrapper(["a_1", "a_2"], joint))
        assert found.layer["name"] == "inner" and found.outputs == {"out": "d"}
    one = wrapper(["a"], layer("out", "Activation", activation="linear"))
    assert wrapped_model.inside(one).layer["name"] == "inner"  # compat's own


@pytest.mark.parametrize(
    "config",
    [
        wrapper(["a_1", "b_1"], ROWS),  # a siamese network
        wrapper(["a_1", "a_2"], layer("out", "Concatenate", axis=-1)),
        wrapper(["a_1", "a_2"], layer("out", "Lambda")),
        wrapper(["a"], layer("out", "Activation", activation="softmax")),
        model("a"),
        {"class_name": "Sequential", "config": []},
        [],
    ],
)
def test_no_wrapper(config):
    assert wrapped_model.inside(config) is None


def test_names_of_outputs_in_what_was_compiled():
    assert unwrap._renamed({"out": "mse", "b": 1}, {"out": "d"}) == {"d": "mse", "b": 1}
    assert unwrap._renamed({"class_name": "Mean"}, {"out": "d"}) == {"class_name": "Mean"}
    assert unwrap._renamed("mse", {"out": "d"}) == "mse"
