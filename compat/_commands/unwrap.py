"""\
Write a file of multi_gpu_model or make_parallel, a whole model or weights, as one of the model
inside, its optimizer's state included. Needs h5py, runs nothing of the file.

exit status: 0 written, 2 it could not be."""

# ``compat unwrap``: the file of a model that ``multi_gpu_model`` wrapped becomes the model's.
#
# With h5py alone: no framework is imported, no layer is made, and no code in the file (Lambda
# layers have some) is looked at.

import itertools
import json
import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .. import errors
from .._runtime import safe_files
from . import wrapped_model


def add_options(parser):
    parser.add_argument("file", help="HDF5, from model.save() or model.save_weights()")
    text = "the new file (default: old.unwrapped.h5 beside old.h5; name the old file to replace it)"
    parser.add_argument("-o", dest="output", metavar="FILE", help=text)
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    text = "of weights: to_json() of the plain model, where the weights' names are ambiguous"
    parser.add_argument("--model", metavar="JSON", help=text)


def execute(arguments):
    print(run(arguments.file, arguments.output, arguments.force, arguments.model))
    return 0


def run(path: str, output: Optional[str], force: bool, model: Optional[str]) -> str:
    """Write the file of the model inside of the wrapper in ``path``.

    Arguments:
        path: an HDF5 file, of a whole model or of weights.
        output: the new file; None for ``old.unwrapped.h5`` beside ``old.h5``. The same as
            ``path``: the old file is replaced.
        force: replace a file that is there.
        model: a file with ``to_json()`` of the model inside, for a file of weights whose names
            are ambiguous.

    Returns:
        What was written, in words.

    Raises:
        ModelFileError: a file cannot be read or written, or contains no wrapper.
        NotInstalledError: h5py is not installed.
    """
    if output is None:
        stem, extension = os.path.splitext(path)
        output = stem + ".unwrapped" + (extension or ".h5")
    _check(path)
    try:
        import h5py
    except ImportError as error:
        raise errors.NotInstalledError(
            f"compat unwrap reads HDF5 files with h5py, which cannot be imported here ({error}). "
            "Install it: pip install h5py"
        ) from error
    config = None if model is None else _architecture(model)
    if not force and os.path.exists(output) and not os.path.samefile(output, path):
        raise errors.ModelFileError(
            f"{output} is there already. Name another file with -o, or replace it with --force."
        )
    try:
        with h5py.File(path, "r") as old:
            plan = _planned(path, old, config)
            _check_writable(output)
            with safe_files.written(output, os.stat(path)) as file:
                with h5py.File(file.name, "w") as new:
                    _write(old, new, plan)
    except errors.CompatError:
        raise
    except Exception as error:  # what a broken file has may be of any type
        reason = str(error.args[0] if isinstance(error, LookupError) and error.args else error)
        raise errors.ModelFileError(
            f"{path} cannot be unwrapped: {reason.strip().rstrip('.')}. Nothing was written."
        ) from error
    return f"{output}: {plan.summary()}"


def _check(path):
    """Refuse a file that is not HDF5, since h5py's own error is unclear."""
    try:
        with open(path, "rb", opener=safe_files.plain) as file:
            start = file.read(8)
    except OSError as error:
        raise errors.ModelFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    if start != b"\x89HDF\r\n\x1a\n":
        raise errors.ModelFileError(
            f"{path} is not an HDF5 file. compat unwrap takes what model.save() or "
            "model.save_weights() wrote with a name that ends in .h5."
        )


def _architecture(path):
    """Return the configuration of a model, from the file that ``--model`` names."""
    try:
        with open(path, "rb", opener=safe_files.plain) as file:
            config = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError) as error:
        raise errors.ModelFileError(f"--model {path} cannot be read: {error}.") from error
    if wrapped_model.layers_of(config) is None:
        raise errors.ModelFileError(
            f'--model {path} has no layers of a model. Write it with open("model.json", '
            '"w").write(model.to_json()), where model is the plain one.'
        )
    return config


# What is to be written ------------------------------------------------------------------------


class Plan(NamedTuple):
    """Contents of the new file: the groups of layers, and attributes in place of others.

    Attributes:
        source: the group of the wrapper's layer that has all the weights.
        layers: names of layers, each with the names of its weights, in Keras' order.
        attributes: to be written as JSON.
        note: what a user should know besides.
    """

    source: Any
    layers: List[Tuple[str, List[str]]]
    attributes: Dict[str, Any] = {}
    note: str = ""

    def summary(self) -> str:
        """Return what is written, in words."""
        layers = [name for name, weights in self.layers if weights]
        number = sum(len(weights) for _, weights in self.layers)
        return f"{number} weights of {len(layers)} layers ({', '.join(layers)}){self.note}"


def _planned(path, old, config):
    """Return the plan of the new file.

    Arguments:
        path: its path, for messages.
        old: the opened file.
        config: the configuration of the model inside, where a file of weights does not have it.
    """
    whole = "model_config" in old.attrs
    weights = old.get("model_weights") if whole else old
    layers = [] if weights is None else _names(weights, "layer_names")
    if not layers and ("layers" in old or "_layer_checkpoint_dependencies" in old):
        raise errors.ModelFileError(
            f"{path} has weights in the format of Keras 3 (.weights.h5), which compat unwrap does "
            "not read. Load it into the wrapper, built by your code, and save the weights of "
            "compat.unwrap(parallel)."
        )
    if not layers:
        raise errors.ModelFileError(
            f"{path} is HDF5, but neither a whole model nor weights of Keras: it has no "
            "layer_names. Some versions of Keras stopped halfway when they saved a wrapper whole "
            '("can\'t pickle module objects"); use a file of save_weights() then.'
        )
    groups = [(name, _names(weights[name], "weight_names")) for name in layers]
    version = _text(old.attrs.get("keras_version", ""))
    if version.startswith("3."):
        raise errors.ModelFileError(
            f"{path} was saved by Keras {version}, whose models compat unwrap does not read. Load "
            "it, and save compat.unwrap(model)."
        )
    if not whole:
        return _planned_of_weights(path, weights, groups, config)
    if config is not None:
        raise errors.ModelFileError(
            f"--model is for files of weights; {path} is a whole model and has its own layers. "
            "Leave --model out."
        )
    try:
        wrapped = wrapped_model.inside(json.loads(_text(old.attrs["model_config"])))
    except (ValueError, LookupError, TypeError, AttributeError):
        wrapped = None
    name = None if wrapped is None else wrapped_model.name_of(wrapped.layer)
    if wrapped is None or [layer for layer, names in groups if names] != [name]:
        raise errors.ModelFileError(
            f"{path} does not contain a multi_gpu_model wrapper: no layer of it is a model that "
            "has all the weights and is called on parts of a batch, as multi_gpu_model and "
            "make_parallel make it. Load it as it is."
        )
    flat = dict(groups)[name]
    attributes = {"model_config": {key: wrapped.layer[key] for key in ("class_name", "config")}}
    if "training_config" in old.attrs:
        training = json.loads(_text(old.attrs["training_config"]))
        training = {key: _renamed(value, wrapped.outputs) for key, value in training.items()}
        attributes["training_config"] = training
    layers = _layers(path, flat, wrapped.layer)
    # Its state is that of the weights in their order, which stays.
    note = ", and the optimizer's state" if "optimizer_weights" in old else ""
    return Plan(weights[name], layers, attributes, note)


def _planned_of_weights(path, weights, groups, config):
    """Return the plan for a file that has nothing but weights and their names."""
    holding = [(name, names) for name, names in groups if names]
    name, flat = holding[0] if len(holding) == 1 else (None, [])
    scopes = {weight.rpartition("/")[0] for weight in flat}
    if name is None or len(groups) <= 2 or scopes == {name}:
        raise errors.ModelFileError(
            f"{path} does not contain a multi_gpu_model wrapper: {len(holding)} of its "
            f"{len(groups)} layers have weights. A wrapper has one, the model inside, between "
            "layers without weights. Load it as it is."
        )
    if config is not None:
        return Plan(weights[name], _layers(path, flat, config))
    try:
        layers = wrapped_model.groups_by_names(flat, name)
    except ValueError as problem:
        raise errors.ModelFileError(
            f"{path} has weights without the model, and their names do not show the order of its "
            f'layers: {problem}. Write the plain model with open("model.json", '
            '"w").write(model.to_json()) and add --model model.json.'
        ) from None
    note = (
        "\nIdentified by the weights' names, in their order. If layers of the model are models, or "
        "were not trained (trainable=False), add --model model.json, from the plain model's "
        "to_json()."
    )
    return Plan(weights[name], layers, note=note)


def _layers(path, flat, config):
    """Return the layers of a model whose configuration is known, each with its weights."""
    owners = wrapped_model.owners(flat, config)
    layers = wrapped_model.layers_with_groups(config)
    weights: Dict[str, List[str]] = {layer: [] for layer in layers}
    if owners is None or not weights.keys() >= set(owners):
        model = wrapped_model.name_of(config) or config["class_name"]
        raise errors.ModelFileError(
            f"{path} cannot be unwrapped: the names of its weights ({', '.join(flat[:3])}, ...) do "
            f"not show which layers of {model!r} have them."
        )
    for weight, owner in zip(flat, owners):
        weights[owner].append(weight)
    return list(weights.items())


def _renamed(value, outputs):
    """Return part of a training configuration, with the model's own names of outputs in dicts."""
    if isinstance(value, dict) and set(value) & set(outputs):
        return {outputs.get(key, key): entry for key, entry in value.items()}
    return value


# Reading and writing --------------------------------------------------------------------------


def _check_writable(path):
    try:
        safe_files.check_writable(path)
    except OSError as error:
        raise errors.ModelFileError(f"{path} cannot be written: {error.strerror}.") from error


def _write(old, new, plan):
    source, target = old, new
    if plan.attributes:  # of a whole model
        source, target = old["model_weights"], new.create_group("model_weights")
        _copy_attributes(old, new, plan.attributes)
        for name in old:
            if name != "model_weights":
                old.copy(name, new)
    _copy_attributes(source, target, {})
    _write_names(target, "layer_names", [name for name, _ in plan.layers])
    for name, weights in plan.layers:
        group = target.require_group(name)
        _write_names(group, "weight_names", weights)
        for weight in weights:
            plan.source.file.copy(plan.source[weight], group, name=weight)


# Names in attributes, whichever h5py reads or wrote them --------------------------------------

#: A list that is longer in an attribute is cut into name0, name1 ...: HDF5 has a limit.
ATTRIBUTE_LIMIT = 64512


def _text(value):
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _names(group, attribute):
    """Return a list of names in an attribute, or in several, where one would be too large.

    [] if none.
    """
    numbered = map((attribute + "{}").format, itertools.count())
    parts = itertools.takewhile(group.attrs.__contains__, numbered)
    whole = [attribute] if attribute in group.attrs else parts
    return [_text(name) for part in whole for name in group.attrs[part]]


def _write_names(group, attribute, names):
    """Write names as Keras does: an array of bytes, cut where it is too large."""
    import numpy as np  # which h5py needs

    encoded = np.asarray([name.encode("utf-8") for name in names])
    size = max(1, ATTRIBUTE_LIMIT // encoded.itemsize)
    for number, start in enumerate(range(0, max(1, len(encoded)), size)):
        name = f"{attribute}{number}" if len(encoded) > size else attribute
        group.attrs[name] = encoded[start : start + size]


def _copy_attributes(old, new, others):
    """Copy attributes as they are, but texts as bytes, which every Keras decodes."""
    for name, value in old.attrs.items():
        if not name.startswith("layer_names"):
            value = json.dumps(others[name]) if name in others else value
            new.attrs[name] = value.encode("utf-8") if isinstance(value, str) else value
