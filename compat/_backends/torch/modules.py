"""torch's own modules on several devices: their ``forward``, their buffers and attributes."""

import contextlib
import inspect
import types

import torch

from ..._runtime import patching
from . import batches
from .calls import tag
from .outcomes import is_users
from .reductions import State
from .replicas import ReplicatedMethod, untagged, warn_not_divided


class ForwardMethod(patching.InstanceMethod):
    """A ``forward`` that hides that of a module's class, also from torch.compile()."""

    method = "forward"

    def install(self, module):
        """A function: ``torch.compile`` takes no other callables for methods.

        It leaves the code of this package as it is, and compiles the module's own. Trainers choose
        the columns of their data by the signature of the plain method.
        """
        torch._dynamo.trace_rules.add(__name__.partition(".")[0])

        def forward(module, *args, **kwargs):
            return self(module, *args, **kwargs)

        plain = inspect.signature(self.plain(module))
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = plain.replace(parameters=[own] + list(plain.parameters.values()))
        forward.made_by = self
        self.hidden = module.__dict__.get("forward")
        module.__dict__["forward"] = types.MethodType(forward, module)

    def is_only_traced(self, module, batch):
        return getattr(batch, "is_meta", False) is True or torch.jit.is_tracing()

    @classmethod
    def of(cls, module):
        function = getattr(module.__dict__.get("forward"), "__func__", None)
        made_by = getattr(function, "made_by", None)
        return made_by if isinstance(made_by, cls) else None

    @classmethod
    def install_on(cls, module, given):
        """Take the present one away; unless ``given`` is None, install another, made with that."""
        present = cls.of(module)
        if present is not None:
            present.remove(module)
        if given is not None:
            cls(given).install(module)


class ReplicatedForward(ForwardMethod, ReplicatedMethod):
    """The ``forward`` of a torch module on several devices."""

    def converter(self, model):
        return None

    def most_replicas(self, model, rows):
        """In training torch's batch normalization refuses a batch of one row."""
        kind = torch.nn.modules.batchnorm._BatchNorm
        normalised = any(isinstance(part, kind) and part.training for part in model.modules())
        return max(1, rows // 2) if normalised else len(self.devices)

    def home(self, model, arguments):
        """Where the module's weights lie, as the plain module's outputs would."""
        kinds = (torch.Tensor, batches.PackedSequence)
        first = next(leaf for leaf in arguments.leaves if isinstance(leaf, kinds))
        return next(model.parameters(), first.data).device

    def layouts(self, model, arguments):
        first = arguments.leaves[0]
        if batches.declared(model) is not None and isinstance(first, torch.Tensor):
            if first.dim() == 2 and first.is_floating_point():
                warn_not_divided(model, "a sequence without a batch")
                return []
        return super().layouts(model, arguments)

    def choices_for(self, model):
        own = batches.declared(model)
        if own is not None:
            return [(own, "all" if isinstance(model, torch.nn.RNNBase) else None)]
        inside = any(batches.declared(part) is not None for part in model.modules())
        return batches.CHOICES if inside else super().choices_for(model)

    def state(self, model):
        return ModuleReplicas(model)


#: Where modules keep what ``register_forward_hook()`` and its like are given.
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
         "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")  # fmt: skip


def hooks_of(module):
    """A function that gives a module and those within it the hooks that they have now."""
    found = [getattr(part, name, {}) for part in module.modules() for name in HOOKS]
    kept = [(hooks, dict(hooks)) for hooks in found]

    def put_back():
        for hooks, before in kept:
            if len(hooks) != len(before):
                hooks.clear()
                hooks.update(before)

    return put_back


class _CopyOfTable(torch.autograd.Function):
    """``Tensor.to()`` for sparse gradients, which torch's own refuses to take back."""

    @staticmethod
    def forward(ctx, table, device):
        ctx.home = table.device
        return table.to(device, copy=True)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.home), None


class ModuleReplicas:
    """Runs the replicas of a torch module, each with weights and buffers of its own.

    Buffers start from the same value in each replica, and are set once. So do the attributes of
    the module, and of those within it, that its forward pass sets, and the hooks it registers.
    """

    def __init__(self, module):
        self.parts = []
        self.sparse = set()  # of tables whose gradients are: embeddings'
        self.places = []  # dictionary of a module within, name there, weight or buffer
        for path, part in module.named_modules():
            if is_users(part):
                self.parts.append((path, part))
            if getattr(part, "sparse", False) is True:
                self.sparse.update(map(id, part._parameters.values()))
            for values in part._parameters, part._buffers:
                self.places += [(values, name, v) for name, v in values.items() if v is not None]
        known = {id(value): (values, name) for values, name, value in reversed(self.places)}
        self.before = {("state", name): buffer for name, buffer in module.named_buffers()}
        self.buffers = {key: known[id(buffer)] for key, buffer in self.before.items()}  # places
        self.attributes = {}  # (path, attribute) -> module, function that nests new leaves, keys
        self.module, self.put_hooks_back = module, hooks_of(module)

    def run(self, forward, device, copy, args, kwargs, watch):
        given = {key: self.before[key].to(device, copy=True) for key in self.buffers}
        copies = {id(self.before[key]): buffer for key, buffer in given.items()}
        for key, buffer in given.items() if watch is not None else ():
            tag(buffer, State(self.before[key]))
        for _, _, value in self.places:
            if id(value) not in copies:  # more than one where weights are tied
                differs = copy or value.device != device
                if id(value) in self.sparse and differs:
                    copies[id(value)] = _CopyOfTable.apply(value, device)
                else:
                    copies[id(value)] = value.to(device, copy=copy)
        before = [(path, part, dict(vars(part))) for path, part in self.parts]
        try:
            for values, name, value in self.places:
                values[name] = copies[id(value)]
            with watch or contextlib.ExitStack():
                result = forward(*args, **kwargs)
            state = {key: values[name] for key, (values, name) in self.buffers.items()}
        finally:
            for values, name, value in self.places:
                values[name] = value
            changed = self.changed(before)
        state.update(changed)
        return result, [], state, given

    def changed(self, before):
        """The values in attributes that forward has set; afterwards they are as before."""
        found = {}
        for path, module, was in before:
            for name, value in list(vars(module).items()):
                if name in was and was[name] is value:
                    continue
                leaves, unflatten, _ = batches.flatten(value)
                if not leaves or not all(isinstance(v, (torch.Tensor, int, float)) for v in leaves):
                    continue
                keys = [("attribute", path, name, index) for index in range(len(leaves))]
                self.attributes[path, name] = (module, unflatten, keys)
                earlier = batches.flatten(was.get(name))[0]
                found.update(zip(keys, leaves))
                self.before.update(zip(keys, earlier) if len(earlier) == len(leaves) else ())
                if name in was:
                    module.__dict__[name] = was[name]
                else:
                    del module.__dict__[name]
        self.register = hooks_of(self.module)  # what this replica leaves
        self.put_hooks_back()
        return found

    def finish(self, merged):
        """Set buffers, attributes and hooks, once."""
        self.register()
        with torch.no_grad():
            for key, value in merged.items():
                if key[0] == "state":
                    self.before[key].copy_(value)
        for (_, name), (module, unflatten, keys) in self.attributes.items():
            if all(key in merged for key in keys):
                module.__dict__[name] = unflatten([untagged(merged[key]) for key in keys])
