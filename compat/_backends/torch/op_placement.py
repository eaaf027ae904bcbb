"""Where torch ran the operations of a step: from its profiler."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass

# What a layer computes with, and what autograd computes its gradient with.
PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::convolution", "aten::embedding")
GRADIENTS = PRODUCTS + ("aten::convolution_backward", "aten::embedding_dense_backward")


def products(step):
    """For each replica, how many layers' products ``step()`` computed, and how many gradients.

    From torch's profiler: a product lies within the time of its replica's forward pass, and the
    gradient that autograd computes has its operation's sequence number.
    """
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    events = profile.events()
    replicas = [e for e in events if e.name.startswith("replica on ")]
    placed, owners = {}, {}  # type: Any, Any
    for event in events:
        owner = next((r for r in replicas if within(event, r)), None)
        if owner is not None and event.sequence_nr >= 0:
            owners[event.sequence_nr] = owner.name
        if owner is not None and event.name in PRODUCTS and not _nested(event):
            placed.setdefault(owner.name, [0, 0])[0] += 1
    for event in events:
        if event.name in GRADIENTS:
            gradient = _gradient(event)
            if gradient is not None and gradient.sequence_nr in owners:
                placed[owners[gradient.sequence_nr]][1] += 1
    return {name[len("replica on ") :]: tuple(counts) for name, counts in placed.items()}


def within(event, replica):
    inside, around = event.time_range, replica.time_range
    return (
        event.thread == replica.thread and around.start <= inside.start and inside.end <= around.end
    )


def _nested(event):
    """Whether another product calls this one: a convolution its own implementation."""
    parent = event.cpu_parent
    return parent is not None and (parent.name in PRODUCTS or _nested(parent))


def _gradient(event):
    """The step of autograd's backward pass that this operation belongs to, or None."""
    while event is not None and not event.name.startswith("autograd::engine::evaluate_function"):
        event = event.cpu_parent
    return event
