"""Verification of models on torch: a step done on one device, from the same state.

Of a torch module, whose optimizer is not known here, a step is a call: its results, its buffers,
and the gradients of its parameters for a random gradient of its results.
"""

import contextlib
import sys

from ... import _keras, _replicas, _verification
from ..._verification import keras_steps
from . import modules, op_placement, replicas


class VerifiedStep(keras_steps.Verified):
    """The method by which Keras makes the function of a step."""

    def is_ready(self, model):
        # Keras builds model, optimizer and metrics before the first step, unless train_step is
        # the user's own; then it is the optimizers that may not have their state yet.
        optimizers = keras_steps.optimizers(model) if self.kind == "train" else ()
        return model.built and all(optimizer.built for optimizer in optimizers)

    def make_undivided(self, model):
        return keras_steps.made_anew(self, model)

    def step(self, function, args):
        return _Step(self, function, args[0])


class _Step(keras_steps.KerasStep):
    def __init__(self, method, function, data):
        super().__init__(method, function)
        self.data = data

    def as_array(self, value):
        convert = _keras.keras_of(self.model).ops.convert_to_numpy
        return convert(value.detach() if hasattr(value, "detach") else value)

    def on_one_device(self):
        with _replicas.undivided():
            return self.named(self.function.undivided(self.data))

    def on_all_devices(self):
        results = self.function.made(self.data)
        return results, self.named(results)

    def operations(self):
        return op_placement.products(lambda: self.function.made(self.data))

    def outputs(self, undivided):
        data = self.data[0]
        inputs = data[0] if isinstance(data, tuple) else data
        with _replicas.undivided() if undivided else contextlib.ExitStack():
            with sys.modules["torch"].no_grad():
                try:
                    results = self.model(inputs, training=False)
                except NotImplementedError:  # a model whose train_step calls its parts
                    return None
        return self.outputs_and_losses(results, self.model.losses)


# torch ----------------------------------------------------------------------------------------


class VerifiedForward(modules.ForwardMethod):
    """The ``forward`` of a torch module, whose first calls are verified."""

    def __init__(self, verification):
        super().__init__([])
        self.verification = verification

    @classmethod
    def install_on(cls, module, verification):
        present = cls.of(module)
        if present is not None:
            present.remove(module)
        if verification is not None:
            cls(verification).install(module)

    @replicas.outside_of_graphs
    def __call__(self, module, *args, **kwargs):
        pytorch = sys.modules["torch"]
        kind = "train" if module.training and pytorch.is_grad_enabled() else "predict"
        forward = self.plain(module)
        leaves = pytorch.utils._pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, pytorch.Tensor)]
        if (
            not self.verification.wants(kind)
            or any(tensor.is_meta for tensor in tensors)
            or pytorch.jit.is_tracing()
            or any(map(pytorch.nn.parameter.is_lazy, module.parameters()))
        ):
            return forward(*args, **kwargs)
        return self.verification.verify(kind, _Call(module, forward, args, kwargs))


class _Call(_verification.Step):
    def __init__(self, module, forward, args, kwargs):
        self.torch = sys.modules["torch"]
        self.module = module
        self.forward = forward
        self.args = args
        self.kwargs = kwargs
        self.differentiated = self.torch.is_grad_enabled()
        names = {str(p.dtype).split(".")[-1] for p in module.parameters()}
        if self.torch.is_autocast_enabled():
            names.add(str(self.torch.get_autocast_gpu_dtype()).split(".")[-1])
        self.dtype = keras_steps.coarsest(names)
        kind = self.torch.nn.modules.batchnorm._BatchNorm
        for name, part in module.named_modules():
            if isinstance(part, kind) and part.training:
                self.by_design = _verification.NORMALISED.format(
                    "module", name or type(part).__name__
                )
        self.random = self._random_state()

    def _random_state(self):
        cuda = self.torch.cuda
        return self.torch.get_rng_state(), cuda.get_rng_state_all() if cuda.is_available() else []

    def _set_random_state(self):
        cpu, cuda = self.random
        self.torch.set_rng_state(cpu)
        if cuda:
            self.torch.cuda.set_rng_state_all(cuda)

    def _labelled(self):
        for name, parameter in self.module.named_parameters():
            yield "weight " + name, parameter
        for name, buffer in self.module.named_buffers():
            yield "state " + name, buffer

    def _array(self, tensor):
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == self.torch.bfloat16 else tensor).numpy().copy()

    def read(self):
        return {label: self._array(tensor) for label, tensor in self._labelled()}

    def write(self, values):
        for label, tensor in self._labelled():
            if label in values:
                # Not an operation that autograd would count as a change: the values come back.
                tensor.data.copy_(self.torch.as_tensor(values[label]))

    def on_one_device(self):
        with _replicas.undivided(), modules.attributes_kept(self.module):
            result = self.forward(*self.args, **self.kwargs)
        return self._named(result, keep=False)

    def on_all_devices(self):
        self._set_random_state()
        result = self.forward(*self.args, **self.kwargs)
        return result, self._named(result, keep=True)

    def _tensors(self, result):
        leaves = self.torch.utils._pytree.tree_leaves(result)
        return [leaf for leaf in leaves if isinstance(leaf, self.torch.Tensor)]

    def _named(self, result, keep):
        """Results and gradients by label; ``keep`` leaves autograd's graph to the caller."""
        named = {
            "output {}".format(place + 1): self._array(tensor)
            for place, tensor in enumerate(self._tensors(result))
        }
        for name, gradient in self._gradients(result, keep):
            named["gradient of " + name] = self._array(gradient)
        return named

    def _gradients(self, result, keep):
        pytorch = self.torch
        results = [tensor for tensor in self._tensors(result) if tensor.requires_grad]
        parameters = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        if not (self.differentiated and results and parameters):
            return []
        generator = pytorch.Generator().manual_seed(0)
        upstream = [
            pytorch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
            for tensor in results
        ]
        gradients = pytorch.autograd.grad(
            results, [p for _, p in parameters], upstream, retain_graph=keep, allow_unused=True
        )
        pairs = zip(parameters, gradients)
        return [(name, g.to_dense()) for (name, _), g in pairs if g is not None]

    def operations(self):
        def step():
            self._named(self.forward(*self.args, **self.kwargs), keep=False)

        return op_placement.products(step)

    def outputs(self, undivided):
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            with _replicas.undivided() if undivided else contextlib.ExitStack():
                with self.torch.no_grad():
                    result = self.forward(*self.args, **self.kwargs)
        finally:
            for part, training in modes:
                part.training = training
        return {
            "output {}".format(place + 1): self._array(tensor)
            for place, tensor in enumerate(self._tensors(result))
        }
