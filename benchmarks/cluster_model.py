"""What 8 and 64 GPUs could reach, computed from bytes and bandwidths: ``python cluster_model.py``.

No such machine is here, so this is a model and no measurement. It takes from published benchmarks
how fast one GPU trains, counts the bytes that a step moves, and divides them by the bandwidth of
the link that carries most. Each figure is a range: from nothing overlapped (compute, then send) to
all that can overlap (gradients are sent while the backward pass, two thirds of a step, goes on).
"""

import collections

#: Images per second of one P100 at a batch of 64 (TensorFlow's benchmarks of 2017), and weights.
Model = collections.namedtuple("Model", "name images_per_second parameters")
MODELS = (
    Model("Inception V3", 142.0, 23.9e6),
    Model("ResNet-50", 219.0, 25.6e6),
    Model("VGG-16", 154.0, 138.4e6),
)
BATCH = 64
BACKWARD = 2.0 / 3  # of a step's computing

#: Bytes per second in one direction: PCIe 3.0 with 16 lanes as measured between GPUs, and
#: 25 Gbit/s Ethernet. Seconds from one rank to the next: Python does not take part.
PCIE, ETHERNET = 12e9, 25e9 / 8
LATENCY = 5e-6  # by RDMA; TCP takes ten times as long
#: What Horovod and DistributedDataParallel fuse gradients into: at least this many bytes.
BUCKET = 25e6

#: ``moved``: over the busiest link in one direction, in times the weights.
Setup = collections.namedtuple("Setup", "name devices bandwidth moved messages published")


def setups():
    """Return the setups, and the bytes that each moves over the busiest link, in times the weights.

    One process sums gradients on one device and sends weights from there (see "bytes across
    devices"): 2 (N - 1) W pass that device's link, half in each direction. Ranks form a ring, where
    each link carries 2 (N - 1) / N W in one direction; servers have one link for all their GPUs.
    """
    for n in (2, 4, 8):
        published = {4: "multi_gpu_model 53 %", 8: "tuned towers 93 %"}.get(n, "")
        yield Setup("replicas, PCIe", n, PCIE, n - 1.0, 2, published)
    for n, published in ((8, ""), (64, ""), (512, "Horovod 90 %, VGG-16 68 %")):
        moved = 2.0 * (n - 1) / n
        yield Setup("ranks, 25 Gbit/s", n, ETHERNET, moved, 2 * (n - 1), published)


def efficiency(model, setup):
    """Return the share of N times one GPU's speed: without any overlap, and with all of it."""
    compute = BATCH / model.images_per_second
    weights = 4 * model.parameters
    buckets = max(1.0, weights // BUCKET)
    send = weights * setup.moved / setup.bandwidth + buckets * setup.messages * LATENCY
    overlapped = (1 - BACKWARD) * compute + max(BACKWARD * compute, send)
    return compute / (compute + send), compute / overlapped


def table():
    """Return the rows of a table of all setups and models, the first its headings."""
    names = ["{}, share of linear speed".format(model.name) for model in MODELS]
    headings = ["", "GPUs", "bytes over the busiest link", "messages per bucket"]
    yield headings + names + ["published"]
    for setup in setups():
        row = [setup.name, str(setup.devices), "{:.2f} W".format(setup.moved), str(setup.messages)]
        for model in MODELS:
            low, high = efficiency(model, setup)
            row.append("{:.0f} to {:.0f} %".format(100 * low, 100 * high))
        yield row + [setup.published]


if __name__ == "__main__":
    for row in table():
        print("  ".join("{:>22}".format(cell) for cell in row))
