"""The model inside of a saved wrapper: which layer it is, and whose each of its weights is.

Works on what Keras writes, configurations and names of weights. Nothing of it is made or run.
"""

import collections
import itertools
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

Inside = NamedTuple("Inside", [("layer", Dict[str, Any]), ("outputs", Dict[str, str])])


def layers_of(config: Any) -> Optional[List[Any]]:
    """Return the configurations of the layers of a model.

    None where this is not a model's configuration.

    ``{"class_name": ..., "config": ...}``; a Sequential before Keras 2.2.3 has a list as its own.
    """
    inner = config.get("config") if isinstance(config, dict) else None
    layers = inner.get("layers") if isinstance(inner, dict) else inner
    if isinstance(layers, list) and all(isinstance(layer, dict) for layer in layers):
        return layers
    return None


def name_of(layer):
    """Return the name of a layer in a configuration; those of a Sequential have it inside only."""
    inner = layer.get("config")
    return layer.get("name") or (inner.get("name") if isinstance(inner, dict) else None)


def inside(config: Any) -> Optional[Inside]:
    """Return the layer that is the model inside, and what the wrapper's outputs are called there.

    A wrapper gives each call of the one model in it a part of all of its own inputs, and puts what
    comes out together along the rows. A siamese network, whose calls have an input each, is none.

    Arguments:
        config: of a whole model, as in the attribute ``model_config`` of its file.

    Returns:
        The layer's configuration, and a dict: name of a wrapper's output -> the model's own.
    """
    layers = layers_of(config) or []
    models = [layer for layer in layers if layers_of(layer) is not None]
    if len(models) != 1 or not isinstance(config["config"], dict):
        return None
    by_name = {name_of(layer): layer for layer in layers}
    model = models[0]
    parts = [_roots(call, by_name) for call in model.get("inbound_nodes") or ()]
    inputs = {_source(each) for each in config["config"].get("input_layers") or ()}
    if not parts or any(part != inputs for part in parts):
        return None
    names = output_names(model)
    outputs = {}
    for name, node, _ in config["config"].get("output_layers") or ():
        tensors = {(source[0], source[2]) for source in by_name[name]["inbound_nodes"][node]}
        (source, index), *others = tensors
        if others or source != name_of(model) or not _joins(by_name[name], len(parts)):
            return None
        outputs[name] = names[index] if index < len(names) else name
    return Inside(model, outputs) if outputs else None


def _source(entry):
    return entry[0] if isinstance(entry, list) else entry


def _roots(call, by_name):
    """Return the inputs of the wrapper that the tensors of a call are made from."""
    todo = [source[0] for source in call]
    for name in todo:  # which grows meanwhile
        calls = by_name[name].get("inbound_nodes") or ()
        todo += [source[0] for each in calls for source in each if source[0] not in todo]
    return {name for name in todo if not by_name[name].get("inbound_nodes")}


def _joins(layer, calls):
    """Return whether a layer concatenates rows, or is ``compat.multi_gpu_model``'s own."""
    own, one = layer["config"], calls == 1
    joins = {
        "Concatenate": own.get("axis") == 0,
        "Merge": own.get("mode") == "concat" and own.get("concat_axis") == 0,
        "Activation": one and own.get("activation") == "linear",
        "LeakyReLU": one and own.get("alpha", own.get("negative_slope")) == 1,
    }
    return joins.get(layer.get("class_name"), False)


def output_names(model: Dict[str, Any]) -> List[str]:
    """Return what Keras calls the outputs of a model: the layers that they come from."""
    own = model["config"]
    if isinstance(own, dict) and "output_layers" in own:
        return [_source(each) for each in own["output_layers"]]
    return [name_of(layers_of(model)[-1])]  # type: ignore  # of a Sequential


def layers_with_groups(model: Dict[str, Any]) -> List[str]:
    """Return the names of the layers that Keras lists in a file of weights.

    A Sequential has no inputs.
    """
    layers = layers_of(model) or []
    if not isinstance(model["config"], dict) or "output_layers" not in model["config"]:
        layers = [layer for layer in layers if layer.get("class_name") != "InputLayer"]
    return [name_of(layer) for layer in layers]


# Whose each weight is -------------------------------------------------------------------------


def _names_within(value):
    """Return the names of all layers within a configuration: of wrappers, cells, nested models."""
    if isinstance(value, list):
        return [name for each in value for name in _names_within(each)]
    if not isinstance(value, dict):
        return []
    own = [name_of(value)] if "class_name" in value and name_of(value) else []
    return own + _names_within(list(value.values()))


def owners(weights: List[str], model: Dict[str, Any]) -> Optional[List[str]]:
    """Return the layer of each weight of a model; None where the names leave that open.

    Keras lists the trainable weights, layer by layer, then the others, layer by layer. The name of
    a weight begins with its layer's. TensorFlow adds a number to a name that its graph had already,
    and so may make another layer's of it: the order says which it is.

    Arguments:
        weights: the names of all weights, in Keras' order.
        model: its configuration.
    """
    layers = layers_of(model) or []
    within = [set(_names_within(layer)) for layer in layers]
    several = [len(names) > 1 for names in within]
    known = collections.defaultdict(list)  # by name, which layers are or have one called so
    for index, names in enumerate(within):
        for name in names:
            known[name].append(index)
    # The best way to each state: whether only weights that are not trained follow, the layer, and
    # the part of the name that shows it. Its costs, and the layers on it, each with that part.
    start = False, -1, ""
    best: Dict[Tuple[bool, int, str], Tuple[int, List[Tuple[int, str]]]] = {start: (0, [])}
    for weight in weights:
        candidates = _candidates(weight.split("/")[:-1], known)
        ways: Dict[Tuple[bool, int, str], Tuple[int, List[Tuple[int, str]]]] = {}
        for (late, last, text), (cost, path) in best.items():
            for index, label, more in candidates:
                goes_on = index > last or (index == last and (several[index] or label == text))
                for is_late in {late, True} if goes_on else {True} - {late}:
                    total = cost + more + 4 * (is_late != late)
                    state = is_late, index, label
                    if state not in ways or total < ways[state][0]:
                        ways[state] = total, path + [(index, label)]
        best = ways
    if not best:
        return None
    path = min(best.values(), key=lambda way: way[0])[1]
    layer_of, text_of = {label: index for index, label in path}, dict(path)
    for index, label in path:
        if layer_of[label] != index or not (several[index] or text_of[index] == label):
            return None
    return [name_of(layers[index]) for index, _ in path]


def _candidates(scope, known):
    """Return layers that a weight in this scope may be of, by which text, and at what cost."""
    found: Dict[int, Tuple[int, int, str]] = {}
    longest = max([name.count("/") + 1 for name in known], default=0)
    for start in range(len(scope)):
        for end in range(min(len(scope), start + longest), start, -1):
            text = "/".join(scope[start:end])
            for cut in range(3):
                for index in known.get(re.sub(r"(_\d+){%d}$" % cut, "", text) if cut else text, ()):
                    entry = cut + 3 * start, -end, text
                    found[index] = min(found.get(index, entry), entry)
    return [(index, text, cost) for index, (cost, _, text) in found.items()]


def groups_by_names(weights: List[str], model: str) -> List[Tuple[str, List[str]]]:
    """Return the layers of a model of which only the weights' names are known, with their weights.

    Arguments:
        weights: the names of all weights, in Keras' order.
        model: the name of the model that has them, a layer of the wrapper.

    Raises:
        ValueError: the names leave open in which order the layers are; why, as a phrase.
    """
    groups: Dict[str, List[str]] = {}
    untrained = None
    for weight in weights:
        layer = _layer_of(weight, model)
        if layer is None:
            raise ValueError(f"the name {weight!r} names no layer")
        if layer not in groups and untrained:
            raise ValueError(
                f"{weight!r} comes after {untrained!r}, so {layer!r} was not trained, and Keras "
                "lists it apart from its place"
            )
        groups.setdefault(layer, []).append(weight)
        if re.search(r"/moving_(mean|variance)(_\d+)?(:0)?$", weight):
            untrained = untrained or weight
    last: Dict[str, Tuple[int, str]] = {}
    for layer in groups:
        base, number = re.match(r"(.*?)(?:_(\d+))?$", layer).groups()  # type: ignore
        entry = int(number or 0), layer
        if entry < last.get(base, entry):
            raise ValueError(f"{layer!r} comes after {last[base][1]!r}")
        last[base] = entry
    return list(groups.items())


# What Bidirectional, and the cells of recurrent layers, add to their names.
_WITHIN_LAYER = re.compile(r"^(forward|backward)_|_cells?(_\d+)?$")


def _layer_of(weight, model):
    scope = weight.split("/")[:-1]
    if len(scope) > 1 and scope[0] == model:  # a Sequential that was built when it was called
        del scope[0]
    named = itertools.takewhile(lambda part: not _WITHIN_LAYER.search(part), scope[1:])
    return "/".join([*scope[:1], *named]) or None
