"""Verification of models on torch: a step done on one device, from the same state.

Of a torch module, whose optimizer is not known here, a step is a call: its results, its buffers,
and the gradients of its parameters for a random gradient of its results.
"""

import contextlib

import numpy as np
import torch

from ... import _keras, _verification
from ..._rows import split_rows
from ..._verification import keras_steps
from . import batches, models, timeline
from .batches import tensors_in
from .side_effects import Kept, KerasReach, ModuleReach, array_of

_RANDOM = "random numbers of "


class VerifiedTorchStep(keras_steps.Verified):
    """The method by which Keras makes the function of a step."""

    def is_ready(self, model):
        # Keras builds model, optimizer and metrics before the first step, unless train_step is
        # the user's own; then it is the optimizers that may not have their state yet.
        optimizers = keras_steps.optimizers(model) if self.kind == "train" else ()
        return model.built and all(optimizer.built for optimizer in optimizers)

    def verified(self, model):
        """In ranks that of a training step; others stay as they are."""
        if self.verification.ranks and self.kind != "train":
            return getattr(model, keras_steps.FUNCTIONS[self.kind])
        return super().verified(model)

    @property
    def step(self):
        return _RankedStep if self.verification.ranks else TorchStep


class _RandomStep(_verification.Step):
    """A step that changes torch's own random numbers as well as what its subclasses know."""

    def __init__(self, *given):
        super().__init__(*given)
        self.differentiated = torch.is_grad_enabled()

    def give_up(self, values):
        super().give_up(values)
        # An interruption may come where torch.no_grad() begins or ends, which leaves it on.
        torch.set_grad_enabled(self.differentiated)

    def read(self):
        states = {_RANDOM + name: each.get_state() for name, each in batches.generators().items()}
        return dict(super().read(), **{label: state.numpy() for label, state in states.items()})

    def write(self, values):
        super().write(values)
        for name, generator in batches.generators().items():
            if _RANDOM + name in values:
                generator.set_state(torch.from_numpy(values[_RANDOM + name]))

    def left_outside(self):
        return self.noted.changed() if self.noted else {}  # None: the step is verified no more

    def is_random(self, label):
        return label.startswith(_RANDOM) or super().is_random(label)


class TorchStep(_RandomStep, keras_steps.KerasStep):
    def as_array(self, value):
        return _keras.keras_of(self.model).ops.convert_to_numpy(value)

    def operations(self):
        return timeline.products(lambda: self.function.made(self.data))

    def attributes(self):
        return Kept(KerasReach, self.model, super().attributes())

    def on_one_device(self):
        return dict(super().on_one_device(), **self.left_outside())

    def on_all_devices(self):
        given, results = super().on_all_devices()
        return given, dict(results, **self.left_outside())

    def infer(self, inputs):
        with torch.no_grad():
            return super().infer(inputs)


class _RankedStep(TorchStep):
    """The ranks' batches are put together, and each rank does the step of all their rows by itself.

    From the same state. The results of one rank's rows, such as its metrics, are not compared.
    """

    def __init__(self, method, function, batches):
        super().__init__(method, function, batches)
        from .ranks import RankedKerasCall  # not where there are no ranks: imports their engines

        self.ranked = RankedKerasCall.of(self.model)
        self.ranked.start(self.model)  # rank 0's weights, from which the step begins
        self.own, tree = batches, _keras.keras_of(self.model).tree
        first = next(leaf for leaf in tree.flatten(batches) if np.ndim(leaf))
        sizes = self.ranked.engine.gather([len(first)])
        start = sum(size for (size,) in sizes[: self.ranked.engine.place.rank])
        self.rows = slice(start, start + len(first))
        self.data = tree.map_structure(self.of_all_ranks, batches)

    def of_all_ranks(self, leaf):
        if not np.ndim(leaf):
            return leaf
        tensor = torch.as_tensor(leaf)
        whole = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        return self.ranked.engine.concatenate(whole).to(tensor.dtype)

    def on_one_device(self):
        with self.ranked.alone():
            return super().on_one_device()

    def on_all_devices(self):
        return self.function.made(self.own), {}

    def is_random(self, label):
        own = label.startswith(("the loss", "metric "))
        return own or super().is_random(label)

    def outputs(self, undivided):
        """Those of this rank's rows, computed alone or among all rows."""
        given, self.data = self.data, self.data if undivided else self.own
        try:  # inputs that are off by rounding may have replaced them already
            with self.ranked.alone():
                found = super().outputs(True)
        finally:
            self.data = given
        own = self.rows if undivided else slice(None)
        return found and {k: v[own] for k, v in found.items() if "output:" not in k}

    def operations(self):
        return {}


# torch ----------------------------------------------------------------------------------------


def _outputs(result):
    return _verification.numbered(map(array_of, tensors_in(result)))


class VerifiedModuleForward(models.ForwardMethod):
    """The ``forward`` of a torch module, whose first calls are verified."""

    def __init__(self, verification):
        super().__init__([])
        self.verification = verification

    @torch.compiler.disable
    def invoke(self, module, *args, **kwargs):
        kind = "train" if module.training and torch.is_grad_enabled() else "predict"
        forward = self.plain(module)
        if (
            not self.verification.wants(kind)
            or self.is_only_traced(module, batches.first_batch((args, kwargs)))
            or any(map(torch.nn.parameter.is_lazy, module.parameters()))
            or not self.verification.is_due(kind)
        ):
            return forward(*args, **kwargs)
        return self.verification.verify(kind, _ModuleCall(module, forward, args, kwargs))


class _StepOfModule(_verification.Step):
    """What changes a module's parameters and buffers."""

    def _labelled(self):
        weights = [("weight " + name, value) for name, value in self.module.named_parameters()]
        return weights + [("state " + name, value) for name, value in self.module.named_buffers()]

    def read(self):
        return {label: array_of(tensor) for label, tensor in self._labelled()}

    def write(self, values):
        for label, tensor in self._labelled():
            if label in values and tensor.layout is torch.strided:  # nothing sets a sparse one
                # Not an operation that autograd would count as a change: the values come back.
                tensor.data.copy_(torch.as_tensor(values[label]))


class _ModuleCall(_RandomStep, _StepOfModule):
    given = ("leaves",)

    def __init__(self, module, forward, args, kwargs):
        super().__init__()
        self.module, self.forward, self.args, self.kwargs = module, forward, args, kwargs
        self.arguments = was = batches.DividedArguments(args, kwargs)
        self.leaves = [was.copied(leaf, leaf) for leaf in was.leaves]
        self.put_hooks_back = models.Hooks(list(module.modules())).put_back
        self.dtype = ""
        self.note_types(module.parameters())

    def note_types(self, tensors):
        """The coarsest type that is computed in, as far as weights and results tell."""
        names = {str(tensor.dtype).split(".")[-1] for tensor in tensors} | {self.dtype}
        if torch.is_autocast_enabled():
            names.add(str(torch.get_autocast_gpu_dtype()).split(".")[-1])
        self.dtype = keras_steps.coarsest(names)

    def by_design(self, inference, changed):
        for name, part in self.module.named_modules():
            is_normalising = isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
            if is_normalising and (part.running_mean is None or part.training and not inference):
                return _verification.NORMALISED.format("module", name or type(part).__name__)
        return None

    def give_up(self, values):
        super().give_up(values)
        self.arguments.restore()
        self.put_hooks_back()

    def attributes(self):
        return Kept(ModuleReach, self.module)

    def on_one_device(self):
        # What the caller differentiates has kept the buffers, whose values come back.
        kept = torch.autograd._unsafe_preserve_version_counter(tuple(self.module.buffers()))
        with kept, split_rows.undivided():
            return self._again(self._named)

    def _again(self, named):
        """Do the call with arguments and hooks as they were: it may have changed a cache, say.

        Arguments:
            named: gives what is returned, from the result.
        """
        now, was = batches.DividedArguments(self.args, self.kwargs), self.arguments
        put_hooks_back = models.Hooks(list(self.module.modules())).put_back
        self.put_hooks_back()
        leaves = [was.copied(leaf, kept) for leaf, kept in zip(was.leaves, self.leaves)]
        try:
            with was.given(leaves) as (args, kwargs):
                return named(self.forward(*args, **kwargs))
        finally:
            now.restore()
            put_hooks_back()

    def on_all_devices(self):
        result = self.forward(*self.args, **self.kwargs)
        self.note_types(tensors_in(result))
        return result, self._named(result)

    def _named(self, result):
        """Results and gradients by label; autograd's graph is left to the caller."""
        named = dict(_outputs(result), **self.left_outside())
        results = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if self.differentiated and results and parameters:
            kept = self.attributes()  # by hooks on what comes back
            random = torch.Generator().manual_seed(0)
            upstream = [torch.randn(t.shape, generator=random).to(t) for t in results]
            found = torch.autograd.grad(
                results, list(parameters.values()), upstream, retain_graph=True, allow_unused=True
            )
            kept.put_back()
            pairs = [(n, g.to_dense()) for n, g in zip(parameters, found) if g is not None]
            named.update(("gradient of " + name, array_of(gradient)) for name, gradient in pairs)
        return named

    def operations(self):
        return timeline.products(lambda: self._again(self._named))

    def outputs(self, undivided):
        with contextlib.ExitStack() as afterwards, torch.no_grad():
            if undivided:
                afterwards.enter_context(split_rows.undivided())
            for part in self.module.modules():
                afterwards.callback(setattr, part, "training", part.training)
            self.module.eval()  # which may be the user's own
            return self._again(_outputs)
