"""torch's own modules on several devices: their ``forward``, their buffers and attributes."""

import contextlib
import copy
import types

import torch

from ... import _patching
from . import batches
from .reductions import State, tag
from .replicas import MOST_TRIED, Replicated, untagged, warn_not_divided


class ForwardMethod(_patching.InstanceMethod):
    """A ``forward`` that hides that of a module's class, also from torch.compile()."""

    method = "forward"

    def install(self, module):
        super().install(module)
        module.__dict__[self.method] = _Bound(self, module)

    def remove(self, module):
        super().remove(module)
        function = getattr(module.__dict__.get(self.method), "__func__", None)
        if isinstance(function, ForwardMethod):
            module.__dict__[self.method] = _Bound(function, module)


class ReplicatedForward(Replicated, ForwardMethod):
    """The ``forward`` of a torch module on several devices."""

    method = ForwardMethod.method

    def converter(self, model):
        return None

    def is_only_traced(self, model, tensor):
        return tensor.is_meta or torch.jit.is_tracing()

    def most_replicas(self, model, rows):
        """In training torch's batch normalization refuses a batch of one row."""
        kind = torch.nn.modules.batchnorm._BatchNorm
        normalised = any(isinstance(part, kind) and part.training for part in model.modules())
        return max(1, rows // 2) if normalised else len(self.devices)

    def home(self, model, arguments):
        """Where the module's weights lie, as the plain module's outputs would."""
        tensors = [v for v in arguments.leaves if isinstance(v, torch.Tensor)]
        weight = next(model.parameters(), tensors[0] if tensors else arguments.leaves[0].data)
        return weight.device

    def layout(self, model, arguments):
        if batches.declared(model) is not None:
            layout = batches.declared_layout(model, arguments)
            if layout is None:
                warn_not_divided(model, "a sequence without a batch")
            return layout
        kind = (model.training, arguments.key)
        if kind not in self.choices:
            self.choices[kind] = self.find_layout(model, arguments)
        return batches.layout(arguments, *self.choices[kind])

    def find_layout(self, model, arguments):
        """Try what takes the rows to where the modules within ``model`` declare them."""
        if not batches.has_declared(model):
            return (0,)
        home = self.home(model, arguments)
        for choice in batches.CHOICES:
            layout = batches.layout(arguments, *choice)
            if layout is None:
                return choice
            rows = list(range(batches.telling_rows(arguments)))
            for whole in [()] + [(leaf,) for leaf in layout.cut()[1:][:MOST_TRIED]]:
                seen = batches.Seen(model, len(rows))
                try:
                    with seen:
                        self.try_rows(model, arguments, layout.without(whole), home, rows)
                except Exception:  # whatever a model says of rows that are none
                    continue
                if seen.fits():
                    return choice
        raise batches.no_layout(model, arguments)

    def state(self, model):
        return ModuleReplicas(model)


class _Bound:
    """Like a bound method, which torch.compile() would look for the source of."""

    def __init__(self, function, module):
        self.__func__ = function
        self.__self__ = module

    def __call__(self, *args, **kwargs):
        return self.__func__(self.__self__, *args, **kwargs)

    def __deepcopy__(self, memo):
        return _Bound(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self):
        return getattr, (self.__self__, self.__func__.method)


class ModuleReplicas:
    """Runs the replicas of a torch module, each with weights and buffers of its own.

    Buffers start from the same value in each replica, and are set once. So do the attributes of
    the module, and of those within it, that its forward pass sets.
    """

    def __init__(self, module):
        self.parts = []
        self.places = []  # dictionary of a module within, name there, weight or buffer
        self.buffers, self.buffer_places = {}, {}
        known = set()
        for path, part in module.named_modules():
            if _is_own(part):
                self.parts.append((path, part))
            for values in part._parameters, part._buffers:
                places = [(values, name, v) for name, v in values.items() if v is not None]
                self.places += places
                for _, name, value in places:
                    if values is part._buffers and id(value) not in known:
                        known.add(id(value))
                        key = "state", "{}.{}".format(path, name) if path else name
                        self.buffers[key], self.buffer_places[key] = value, (values, name)
        self.before = dict(self.buffers)  # and attributes
        self.attributes = {}  # (path, attribute) -> module, function that nests new leaves

    def is_average(self, key):
        return False

    def run(self, forward, device, copy, args, kwargs, watch):
        given = {key: buffer.to(device, copy=True) for key, buffer in self.buffers.items()}
        copies = {id(self.buffers[key]): buffer for key, buffer in given.items()}
        if watch is not None:
            for key, buffer in given.items():
                tag(buffer, State(self.buffers[key]))
        for _, _, value in self.places:
            if id(value) not in copies:  # more than one where weights are tied
                copies[id(value)] = value.to(device, copy=copy)
        before = {path: dict(vars(part)) for path, part in self.parts}
        try:
            for values, name, value in self.places:
                values[name] = copies[id(value)]
            with watch or contextlib.ExitStack():
                result = forward(*args, **kwargs)
            state = {key: values[name] for key, (values, name) in self.buffer_places.items()}
        finally:
            for values, name, value in self.places:
                values[name] = value
        state.update(self.changed(before))
        return result, [], state, given

    def changed(self, before):
        """The values in attributes that forward has set; afterwards they are as before."""
        found = {}
        for path, module in self.parts:
            was = before[path]
            for name, value in list(vars(module).items()):
                if name in was and was[name] is value or not _is_value(value):
                    continue
                leaves, unflatten, _ = batches.flatten(value)
                self.attributes[path, name] = (module, unflatten, len(leaves))
                earlier = batches.flatten(was.get(name))[0]
                for index, leaf in enumerate(leaves):
                    key = ("attribute", path, name, index)
                    found[key] = leaf
                    if len(earlier) == len(leaves):
                        self.before[key] = earlier[index]
                if name in was:
                    module.__dict__[name] = was[name]
                else:
                    del module.__dict__[name]
        return found

    def finish(self, merged):
        """Set buffers and attributes, once."""
        with torch.no_grad():
            for key, value in merged.items():
                if key[0] == "state":
                    self.buffers[key].copy_(value)
        for (path, name), (module, unflatten, count) in self.attributes.items():
            keys = [("attribute", path, name, index) for index in range(count)]
            if all(key in merged for key in keys):
                module.__dict__[name] = unflatten([untagged(merged[key]) for key in keys])


def _is_own(module):
    """Whether torch has not made a module: the forward of such may set anything."""
    return not type(module).__module__.startswith("torch.nn")


@contextlib.contextmanager
def attributes_kept(module):
    """Within, what forward sets on the module, and on those within it, is forgotten."""
    before = [(part, dict(vars(part))) for part in module.modules() if _is_own(part)]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


def _is_value(value):
    """Whether an attribute is made of tensors and numbers."""
    if isinstance(value, (types.FunctionType, types.MethodType, torch.nn.Module)):
        return False
    leaves = batches.flatten(value)[0]
    kinds = (torch.Tensor, int, float)
    return bool(leaves) and all(isinstance(leaf, kinds) for leaf in leaves)


def install(module, devices):
    """Have a module run on several devices."""
    ReplicatedForward(devices).install(module)


def remove(module):
    """Make a module plain."""
    replicated = ReplicatedForward.of(module)
    if replicated is not None:
        replicated.remove(module)
