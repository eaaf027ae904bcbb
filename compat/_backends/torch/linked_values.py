"""Gradients by a value of a call on which others of its values depend.

``images, styles = generator(z)``: on each device images come from that device's styles. What is
merged of the styles comes after them, so that no path of autograd's graph leads from the images
back to it. Its gradient is that of the replicas' parts, merged in the same way.
"""

import functools
import inspect
import threading
import weakref

import torch

from ... import _rows, errors
from ..._runtime import patching

_PARTS = "_compat_parts"
_patching = threading.Lock()


def find(values):
    """Return the keys of those values that others depend on.

    Arguments:
        values: those of one replica, by key.
    """
    nodes = {key: getattr(value, "grad_fn", None) for key, value in values.items()}
    nodes = {key: node for key, node in nodes.items() if node is not None}
    wanted, found, seen = set(nodes.values()), set(), set()
    pending = [each for node in wanted for each, _ in node.next_functions]
    while pending and found != wanted:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in wanted:
            found.add(node)
        pending += [each for each, _ in node.next_functions]
    return {key for key, node in nodes.items() if node in found}


class Parts:
    """The replicas' values that a value was put together from.

    Arguments:
        whole: what was put together.
        tensors: the values, the first replica's first.
        rule: a ``MergeRule``.
    """

    def __init__(self, whole, tensors, rule):
        self.whole, self.tensors = weakref.ref(whole), tensors
        self.rule, self.home = rule, whole.device

    @classmethod
    def attach(cls, whole, tensors, rule):
        """Have the gradients by ``whole`` be those by its parts."""
        parts = cls(whole, tensors, rule)
        setattr(whole, _PARTS, parts)
        whole.register_hook = parts.register_hook
        whole.retain_grad = parts.retain_grad
        if any(tensor.retains_grad for tensor in tensors):
            whole.retain_grad()
        with _patching:
            if patching.find(torch.autograd, "grad") is None:
                plain = torch.autograd.grad
                patching.Patch(torch.autograd, "grad", functools.partial(_grad, plain))

    def gradient(self, gradients, batched=False):
        """Return the gradient by the whole from those by the parts; None where there is none.

        Arguments:
            batched: whether the gradients have one dimension more, in front.
        """
        if all(each is None for each in gradients):
            return None
        is_replicated = self.rule.placement == _rows.REPLICATED
        if not is_replicated and self.rule.axis is None:
            raise errors.UnsupportedError(
                "A gradient is taken by a value that a parallelized model has returned, and from "
                "which others of its values were computed. compat can do that for values that "
                "have rows of the batch in one dimension, and this is a total over them. Take it "
                "inside the model, or run the model on one device: parallelize(model, gpus=1)."
            )
        example = next(each for each in gradients if each is not None)
        if is_replicated:
            return sum(each.to(self.home) for each in gradients if each is not None)
        shapes = [tensor.shape for tensor in self.tensors]
        shapes = [example.shape[:1] + shape if batched else shape for shape in shapes]
        filled = [
            example.new_zeros(shape) if each is None else each.to(self.home)
            for each, shape in zip(gradients, shapes)
        ]
        return torch.cat(filled, self.rule.axis + batched)

    def register_hook(self, hook):
        """Register a hook, in place of the tensor's method."""

        def call(gradients):
            gradient = self.gradient(gradients)
            if gradient is not None and hook(gradient) is not None:
                raise errors.UnsupportedError(
                    "A hook changes the gradient by a value that a parallelized model has "
                    "returned, and from which others of its values were computed: parts of that "
                    "gradient have gone back already. Register the hook inside the model, or run "
                    "the model on one device: parallelize(model, gpus=1)."
                )

        return torch.autograd.graph.register_multi_grad_hook(self.tensors, call)

    def retain_grad(self):
        """Keep the gradient, in place of the tensor's method."""
        own = []  # what comes back to the whole itself, which torch adds up
        torch.Tensor.retain_grad(self.whole())
        torch.Tensor.register_hook(self.whole(), own.append)

        def keep(gradient):
            whole = self.whole()
            rest = gradient - own.pop() if own else gradient
            if whole is not None:
                whole.grad = rest if whole.grad is None else whole.grad + rest

        self.register_hook(keep)


_SIGNATURE = inspect.signature(torch.autograd.grad)


def _grad(plain, *args, **kwargs):
    """Return what ``torch.autograd.grad()`` does, by values that have parts, too."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    wanted = given.arguments
    inputs = wanted["inputs"]
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    parts = [getattr(each, _PARTS, None) for each in inputs]
    if not any(parts):
        return plain(*args, **kwargs)
    counts = [1 if each is None else len(each.tensors) for each in parts]
    flat = [t for own, each in zip(inputs, parts) for t in (each.tensors if each else [own])]
    unused, fill = wanted["allow_unused"], wanted["materialize_grads"]
    wanted.update(inputs=flat, allow_unused=True, materialize_grads=False)
    found = iter(plain(*given.args, **given.kwargs))
    gradients = []
    for own, each, count in zip(inputs, parts, counts):
        values = [next(found) for _ in range(count)]
        gradient = each.gradient(values, wanted["is_grads_batched"]) if each else values[0]
        if gradient is None and fill:
            gradient = torch.zeros_like(own)
        if gradient is None and not unused:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
        gradients.append(gradient)
    return tuple(gradients)
