"""Verification of torch modules: a call repeated on one device, from the same state.

The optimizer is not known here, so that a step is a call: its results, its buffers, and the
gradients of its parameters for a random gradient of its results.
"""

import contextlib

import torch

from ... import _verification
from ..._rows.splitting import unsplit
from ..._runtime import synchronized
from ..._verification import keras_steps
from . import profiler
from .arguments import CallArguments, first_batch
from .native import ForwardMethod
from .side_effects import ModuleReach
from .state import Hooks, Snapshot
from .tensors import array_of, tensors_in
from .verification import RandomStep


def _outputs(result):
    return _verification.numbered(map(array_of, tensors_in(result)))


class VerifiedForward(ForwardMethod):
    """The ``forward`` of a torch module, whose first calls are verified."""

    def __init__(self, verification):
        super().__init__([])
        self.verification = verification

    @torch.compiler.disable
    def invoke(self, module, *args, **kwargs):
        """Run the module, and verify the call if it is due."""
        kind = "train" if module.training and torch.is_grad_enabled() else "predict"
        forward = self.plain(module)
        if (
            not self.verification.wants(kind)
            or self.is_only_traced(module, first_batch((args, kwargs)))
            or any(map(torch.nn.parameter.is_lazy, module.parameters()))
            or not self.verification.is_due(kind)
        ):
            return forward(*args, **kwargs)
        return self.verification.verify(kind, _ModuleCall(module, forward, args, kwargs))


class _StepOfModule(_verification.Step):
    """A step that changes a module's parameters and buffers."""

    def _labelled(self):
        weights = [("weight " + name, value) for name, value in self.module.named_parameters()]
        return weights + [("state " + name, value) for name, value in self.module.named_buffers()]

    def read(self):
        """Return parameters and buffers as arrays, by label."""
        return {label: array_of(tensor) for label, tensor in self._labelled()}

    def write(self, values):
        """Restore parameters and buffers."""
        for label, tensor in self._labelled():
            if label in values and tensor.layout is torch.strided:  # nothing sets a sparse one
                # Not an operation that autograd would count as a change: the values come back.
                tensor.data.copy_(torch.as_tensor(values[label]))


class _ModuleCall(RandomStep, _StepOfModule):
    input_attributes = ("leaves",)
    part = "module"

    def __init__(self, module, forward, args, kwargs):
        super().__init__()
        self.module, self.forward, self.args, self.kwargs = module, forward, args, kwargs
        self.arguments = was = CallArguments(args, kwargs)
        self.leaves = [was.copied(leaf, leaf) for leaf in was.leaves]
        self.put_hooks_back = Hooks(list(module.modules())).put_back
        self.dtype = ""
        self.note_types(module.parameters())

    def note_types(self, tensors):
        """Note the coarsest type of weights, results and autocast."""
        names = {str(tensor.dtype).split(".")[-1] for tensor in tensors} | {self.dtype}
        if torch.is_autocast_enabled():
            names.add(str(torch.get_autocast_gpu_dtype()).split(".")[-1])
        self.dtype = keras_steps.coarsest(names)

    def by_design(self, inference, changed):
        """Return why results differ by design, or None."""
        is_asked = synchronized.is_asked(self.module)
        for name, part in self.module.named_modules():
            is_normalising = isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
            is_normalising = is_normalising and not (is_asked or synchronized.asks(part))
            if is_normalising and (part.running_mean is None or part.training and not inference):
                return _verification.normalized(self.part, name or type(part).__name__, self.module)
        return None

    def random_rates(self):
        """Return the rates of modules in training that draw random numbers."""
        named = self.module.named_modules()
        return _verification.rates((name, part) for name, part in named if part.training)

    def give_up(self, values):
        """Restore the state, arguments and hooks."""
        super().give_up(values)
        self.arguments.restore()
        self.put_hooks_back()

    def attributes(self):
        """Return a snapshot of the values that the call reaches."""
        return Snapshot(ModuleReach, self.module)

    def on_one_device(self):
        """Return results, gradients and side effects of the call on one device."""
        # What the caller differentiates has kept the buffers, whose values come back.
        kept = torch.autograd._unsafe_preserve_version_counter(tuple(self.module.buffers()))
        with kept, unsplit:
            return self._again(self._named)

    def _again(self, named):
        """Repeat the call, with arguments such as caches, and hooks, as they were before it.

        Arguments:
            named: a function of the result, whose value is returned.
        """
        now, was = CallArguments(self.args, self.kwargs), self.arguments
        put_hooks_back = Hooks(list(self.module.modules())).put_back
        self.put_hooks_back()
        leaves = [was.copied(leaf, kept) for leaf, kept in zip(was.leaves, self.leaves)]
        try:
            with was.substituted(leaves) as (args, kwargs):
                return named(self.forward(*args, **kwargs))
        finally:
            now.restore()
            put_hooks_back()

    def on_all_devices(self):
        """Return the result of the call, and that by label."""
        result = self.forward(*self.args, **self.kwargs)
        self.note_types(tensors_in(result))
        return result, self._named(result)

    def _named(self, result):
        """Return results and gradients by label, without freeing autograd's graph."""
        named = dict(_outputs(result), **self.left_outside())
        results = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if self.differentiated and results and parameters:
            kept = self.attributes()  # which hooks on gradients may change
            random = torch.Generator().manual_seed(0)
            upstream = [torch.randn(t.shape, generator=random).to(t) for t in results]
            gradients = torch.autograd.grad(
                results, list(parameters.values()), upstream, retain_graph=True, allow_unused=True
            )
            kept.put_back()
            pairs = [(n, g.to_dense()) for n, g in zip(parameters, gradients) if g is not None]
            named.update(("gradient of " + name, array_of(gradient)) for name, gradient in pairs)
        return named

    def operations(self):
        """Return counts of products by device."""
        return profiler.products(lambda: self._again(self._named))

    def outputs(self, is_unsplit):
        """Return results in inference, by label."""
        with contextlib.ExitStack() as afterwards, torch.no_grad():
            if is_unsplit:
                afterwards.enter_context(unsplit)
            for part in self.module.modules():
                afterwards.callback(setattr, part, "training", part.training)
            self.module.eval()  # which may be user-defined
            return self._again(_outputs)
