"""What 8 and 64 GPUs could reach, computed from bytes and bandwidths: ``python cluster_model.py``.

No such machine is here, so this is a model and no measurement. It takes from published benchmarks
how fast one GPU trains, and from results.json the bytes that replicas send (``bytes_*.py`` count
them), and divides bytes by the bandwidth of the link that carries most. Each figure is a range:
from nothing overlapped (compute, then send) to all that can overlap: replicas send weights during
the forward pass and gradients during the backward pass, ranks send gradients during the backward
pass, which is two thirds of a step.

Replicas form a chain. A device passes a weight on when it has arrived as a whole, so the last of N
devices has all weights when they have passed one link, and the largest of them the N - 2 further
links. Gradients take the same way back. The model leaves out: the activations and outputs that
cross devices (few beside the weights), the sums at each device, what it takes to start copies and
kernels from one process, and links that several GPUs share.
"""

import collections
import json
import os

#: Images per second of one P100 at a batch of 64 (TensorFlow's benchmarks of 2017), parameters, and
#: those of the largest weight.
Model = collections.namedtuple("Model", "name images_per_second parameters largest")
MODELS = (
    Model("Inception V3", 142.0, 23.9e6, 2.05e6),
    Model("ResNet-50", 219.0, 25.6e6, 2.36e6),
    Model("VGG-16", 154.0, 138.4e6, 102.8e6),
)
BATCH = 64
BACKWARD = 2.0 / 3  # of a step's computing

#: Bytes per second in one direction: PCIe 3.0 with 16 lanes as measured between GPUs, and
#: 25 Gbit/s Ethernet. Seconds from one rank to the next: Python does not take part.
PCIE, ETHERNET = 12e9, 25e9 / 8
LATENCY = 5e-6  # by RDMA; TCP takes ten times as long
#: What Horovod and DistributedDataParallel fuse gradients into: at least this many bytes.
BUCKET = 25e6

#: ``moved``: over the busiest link in one direction in a step, in times the weights. ``weights``:
#: the part of it that is sent before the forward pass has ended; ranks have their weights.
Setup = collections.namedtuple("Setup", "name devices bandwidth moved weights messages published")


def figures():
    """Return the figures of results.json."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results.json")
    with open(path) as file:
        return json.load(file)["figures"]


def bytes_of_replicas(figures):
    """Return what was counted: label -> devices -> counts (see ``traffic.counted``)."""
    counted = {}
    for name in sorted(figures):
        if name.startswith("bytes-"):
            for label, by_devices in figures[name].items():
                counted[label] = {int(number): by_devices[number] for number in by_devices}
    return counted


def busiest(figures, devices, kind):
    """Return the bytes over the busiest link in a step, in times the weights, of any backend."""
    counts = [by_devices[devices] for by_devices in bytes_of_replicas(figures).values()]
    steps = [(each[kind], each["weights"]) for each in counts]
    return max(max(step["sent"], step["received"]) / weights for step, weights in steps)


def setups(figures):
    """Return the setups.

    Replicas send what was counted. The weights pass a link in the forward pass, as in the first
    batch of predict(), and the gradients pass it in the backward pass, in the other direction.
    Ranks form a ring, where each link carries 2 (N - 1) / N W in one direction; servers have one
    link for all their GPUs.

    Arguments:
        figures: those of results.json.
    """
    for n in (2, 4, 8):
        published = {4: "multi_gpu_model 53 %", 8: "tuned towers 93 %"}.get(n, "")
        moved, weights = [busiest(figures, n, kind) for kind in ("train", "predict, first")]
        yield Setup("replicas, PCIe", n, PCIE, moved, weights, 2 * (n - 1), published)
    for n, published in ((8, ""), (64, ""), (512, "Horovod 90 %, VGG-16 68 %")):
        moved = 2.0 * (n - 1) / n
        yield Setup("ranks, 25 Gbit/s", n, ETHERNET, moved, 0, 2 * (n - 1), published)


def sending(model, setup):
    """Return the seconds for which weights and gradients are sent."""
    weights = 4 * model.parameters
    if setup.weights:
        hops = setup.devices - 1
        seconds = weights * setup.weights / setup.bandwidth
        seconds += (hops - 1) * 4 * model.largest / setup.bandwidth + hops * LATENCY
        return seconds, seconds  # gradients take the way of the weights
    buckets = max(1.0, weights // BUCKET)
    return 0.0, weights * setup.moved / setup.bandwidth + buckets * setup.messages * LATENCY


def efficiency(model, setup):
    """Return the share of N times one GPU's speed: without any overlap, and with all of it."""
    compute = BATCH / model.images_per_second
    forward, backward = sending(model, setup)
    overlapped = max((1 - BACKWARD) * compute, forward) + max(BACKWARD * compute, backward)
    return compute / (compute + forward + backward), compute / overlapped


def table(figures):
    """Return the rows of a table of all setups and models, the first its headings."""
    names = ["{}, share of linear speed".format(model.name) for model in MODELS]
    headings = ["", "GPUs", "bytes over the busiest link", "hops of a weight or bucket"]
    yield headings + names + ["published"]
    for setup in setups(figures):
        row = [setup.name, str(setup.devices), "{:.2f} W".format(setup.moved), str(setup.messages)]
        for model in MODELS:
            low, high = efficiency(model, setup)
            row.append("{:.0f} to {:.0f} %".format(100 * low, 100 * high))
        yield row + [setup.published]


if __name__ == "__main__":
    for row in table(figures()):
        print("  ".join("{:>22}".format(cell) for cell in row))
