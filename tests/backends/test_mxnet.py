"""MXNet under keras-mxnet: the contract, and what is special to it."""

import collections
import json
import os

import pytest

from compat.testing import ParallelContract

# What a layer computes with: matrix products, convolutions, look-ups. The loss has none of them.
OPERATIONS = ("dot", "Convolution", "FullyConnected", "Embedding")


def operations(model, inputs, targets, path):
    """Operations per device in one training step, as MXNet's engine recorded them."""
    import mxnet as mx

    # One operation a record, not a bulk of them.
    os.environ["MXNET_EXEC_BULK_EXEC_TRAIN"] = "0"
    mx.profiler.set_config(profile_symbolic=True, filename=path)
    mx.nd.waitall()
    mx.profiler.set_state("run")
    try:
        model.train_on_batch(inputs, targets)
        mx.nd.waitall()
    finally:
        mx.profiler.set_state("stop")
    mx.profiler.dump(finished=False)
    with open(path) as file:
        text = file.read()
    # The first file begins an object that is never ended; later ones go on with its list.
    listed = text[text.index("[") + 1 :] if text.startswith("{") else text
    events = json.loads("[" + listed[listed.index("{") : listed.rindex("}") + 1] + "]")
    return collections.Counter(
        ("cpu({})".format(event["pid"]), event["name"])
        for event in events
        if event["ph"] == "B"
    )


class TestMXNet(ParallelContract):
    backend = "mxnet"

    @pytest.fixture(autouse=True, scope="class")
    def profile(self, request, tmp_path_factory):
        request.cls.profile_path = str(tmp_path_factory.mktemp("profile") / "trace.json")

    def placement(self, model, inputs, targets):
        counted = operations(model, inputs, targets, self.profile_path)
        placed = {}
        for (device, name), count in counted.items():
            backward = name.startswith("_backward_")
            if (name[len("_backward_") :] if backward else name) in OPERATIONS:
                placed.setdefault(device, [0, 0])[backward] += count
        return {device: tuple(counts) for device, counts in placed.items()}

    def shard_sizes(self, model, inputs, targets):
        model.train_on_batch(inputs, targets)
        name = model.inputs[0].name
        bodies = model._compat_replicas.phases["train"].bodies
        assert [str(b.arg_dict[name].context) for b in bodies] == ["cpu(0)", "cpu(1)", "cpu(2)"]
        return [body.arg_dict[name].shape[0] for body in bodies]
