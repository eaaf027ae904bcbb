"""Where torch ran the operations of a step: from its profiler."""

from . import timeline

# What a layer computes with, and what autograd computes its gradient with.
PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::convolution", "aten::embedding")
GRADIENTS = PRODUCTS + ("aten::convolution_backward", "aten::embedding_dense_backward")


def products(step):
    """For each replica, how many layers' products ``step()`` computed, and how many gradients.

    From torch's profiler: a product is called by its replica's forward pass, and the gradient
    that autograd computes has its operation's sequence number.
    """
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    events = profile.events()
    owners, placed = timeline.owners(events), {}  # type: dict, dict
    for event in events:
        # A convolution calls its own implementation.
        if event.name in PRODUCTS and _within(event.cpu_parent, PRODUCTS) is None:
            device = timeline.replica(event)
            if device is not None:
                placed.setdefault(device, [0, 0])[0] += 1
        gradient = _within(event, timeline.GRADIENT) if event.name in GRADIENTS else None
        if gradient is not None and gradient.sequence_nr in owners:
            placed.setdefault(owners[gradient.sequence_nr], [0, 0])[1] += 1
    return {device: tuple(counts) for device, counts in placed.items()}


def _within(event, names):
    """The innermost operation around this one, or itself, whose name begins so, or None."""
    while event is not None and not event.name.startswith(names):
        event = event.cpu_parent
    return event
