"""Gradients with respect to a result of a call on which other results depend.

``images, styles = generator(z)``: on each device images come from that device's styles. What is
merged of the styles comes after them, so that no path of autograd's graph leads from the images
back to it. Its gradient is that of the replicas' parts, merged in the same way.
"""

import functools
import inspect
import threading
import weakref
from typing import Any, List

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
    results, reached, seen = set(nodes.values()), set(), set()
    pending = [source for node in results for source, _ in node.next_functions]
    while pending and reached != results:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in results:
            reached.add(node)
        pending += [source for source, _ in node.next_functions]
    return {key for key, node in nodes.items() if node in reached}


class Parts:
    """The replicas' values from which a value was merged.

    Arguments:
        whole: the merged value.
        tensors: the values, the first replica's first.
        rule: a ``MergeRule``.
    """

    def __init__(self, whole, tensors, rule):
        self.whole, self.tensors = weakref.ref(whole), tensors
        self.rule, self.home = rule, whole.device

    @classmethod
    def attach(cls, whole, tensors, rule):
        """Have gradients with respect to ``whole`` be those with respect to its parts."""
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

    def gradient(self, gradients: "List[Any]", batched: bool = False) -> Any:
        """Return the gradient with respect to the whole, or None.

        Arguments:
            gradients: those with respect to the parts, or None for each.
            batched: whether the gradients have one dimension more, in front.
        """
        if all(gradient is None for gradient in gradients):
            return None
        is_replicated = self.rule.placement == _rows.REPLICATED
        if not is_replicated and self.rule.axis is None:
            raise errors.UnsupportedError(
                "A gradient is taken by a value that a parallelized model has returned, and from "
                "which others of its values were computed. compat can do that for values that "
                "have rows of the batch in one dimension, and this is a total over them. Take it "
                "inside the model, or run the model on one device: parallelize(model, gpus=1)."
            )
        example = next(gradient for gradient in gradients if gradient is not None)
        if is_replicated:
            return sum(g.to(self.home) for g in gradients if g is not None)
        shapes = [tensor.shape for tensor in self.tensors]
        shapes = [example.shape[:1] + shape if batched else shape for shape in shapes]
        filled = [
            example.new_zeros(shape) if gradient is None else gradient.to(self.home)
            for gradient, shape in zip(gradients, shapes)
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
        direct = []  # gradients of the whole itself, which torch adds up
        torch.Tensor.retain_grad(self.whole())
        torch.Tensor.register_hook(self.whole(), direct.append)

        def keep(gradient):
            whole = self.whole()
            rest = gradient - direct.pop() if direct else gradient
            if whole is not None:
                whole.grad = rest if whole.grad is None else whole.grad + rest

        self.register_hook(keep)


_SIGNATURE = inspect.signature(torch.autograd.grad)


def _grad(plain, *args, **kwargs):
    """Return gradients as ``torch.autograd.grad()``, also with respect to values with parts."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    inputs = arguments["inputs"]
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    parts = [getattr(tensor, _PARTS, None) for tensor in inputs]
    if not any(parts):
        return plain(*args, **kwargs)
    counts = [1 if linked is None else len(linked.tensors) for linked in parts]
    flat = [t for x, linked in zip(inputs, parts) for t in (linked.tensors if linked else [x])]
    unused, fill = arguments["allow_unused"], arguments["materialize_grads"]
    arguments.update(inputs=flat, allow_unused=True, materialize_grads=False)
    of_parts = iter(plain(*bound.args, **bound.kwargs))
    gradients = []
    for tensor, linked, count in zip(inputs, parts, counts):
        values = [next(of_parts) for _ in range(count)]
        gradient = values[0]
        if linked is not None:
            gradient = linked.gradient(values, arguments["is_grads_batched"])
        if gradient is None and fill:
            gradient = torch.zeros_like(tensor)
        if gradient is None and not unused:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
        gradients.append(gradient)
    return tuple(gradients)
