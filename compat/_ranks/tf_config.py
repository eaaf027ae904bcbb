"""Clusters of workers, as ``TF_CONFIG`` and Vertex AI's ``CLUSTER_SPEC`` describe them."""

from .. import errors
from .place import Place, stays_alone
from .variables import from_addresses, from_json, not_a_rank, texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

#: The variable from which TensorFlow's workers read the cluster and their task in it, as JSON.
TF_CONFIG = "TF_CONFIG"

#: The same of Vertex AI's containers: one process a machine.
CLUSTER_SPEC = "CLUSTER_SPEC"

# Names of kinds of tasks on AI Platform and SageMaker, and on Vertex AI.
_KINDS: "Dict[Any, str]" = {"master": "chief", "workerpool0": "chief", "workerpool1": "worker",
          "workerpool2": "ps", "workerpool3": "evaluator"}  # fmt: skip


def evaluator_in(environ: "Mapping[str, str]") -> "Optional[Place]":
    """Return the place of the process of ``TF_CONFIG`` that evaluates checkpoints, or None.

    It is not one of the ranks: its number is -1.
    """
    if stays_alone(environ) or from_json(TF_CONFIG, environ, _kind, _invalid) != "evaluator":
        return None
    return Place(-1, 1, 0, 1, TF_CONFIG)


def environ_of_worker(addresses: "Sequence[str]", index: int) -> "Dict[str, str]":
    """Return the variable by which a worker knows its cluster and its number in it."""
    import json  # not at start-up

    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    return {TF_CONFIG: json.dumps(config)}


def worker(environ: "Mapping[str, str]") -> "Optional[Place]":
    """Return the place of one of a cluster's workers, or None for other processes."""
    return _worker(TF_CONFIG, environ) or _worker(CLUSTER_SPEC, environ)


def _worker(name, environ):
    """Return the place of a worker by one variable. The chief, where there is one, is rank 0."""
    if (
        not environ.get(name, "").strip()
        or from_json(name, environ, _kind, _invalid) == "evaluator"
    ):
        return None
    cluster, kind, index = cluster_in(environ, name)
    addresses = addresses_of(cluster)
    if len(addresses) < 2 and (kind or name == TF_CONFIG):
        return None
    if kind not in ("chief", "worker") or not 0 <= index < len(cluster.get(kind, [])):
        raise _invalid(name, environ[name], f"the cluster has no task {kind} {index}")
    rank = index + (len(cluster.get("chief", [])) if kind == "worker" else 0)
    return from_addresses(name, addresses, rank)


def cluster_in(environ: "Mapping[str, str]", name: str = TF_CONFIG) -> "Tuple[Any, Any, int]":
    """Return a cluster as lists of addresses by kind, and this task's kind and index.

    Raises:
        RankError: it has parameter servers, or is not understood.
    """
    text = environ[name]

    def read(config):
        described = config.get("cluster")
        if described is None and config.get("sparseCluster"):
            # TFJob's dynamic workers know themselves and the parameter servers only.
            raise _sparse_cluster(text)
        cluster: "Dict[Any, List[str]]" = {}
        for kind, part in (described or {}).items():
            cluster.setdefault(_KINDS.get(kind, kind), []).extend(_addresses(part, text))
        if cluster.get("ps"):
            raise errors.RankError(
                f"{name}={text} names parameter servers, which compat does not use: ranks train in "
                "step. Give all machines as workers, or set COMPAT_ALONE=1 to train alone."
            )
        return cluster, _kind(config), int((config.get("task") or {}).get("index") or 0)

    return from_json(name, environ, read, _invalid)


def _kind(config):
    kind = (config.get("task") or {}).get("type")
    return _KINDS.get(kind, kind)


def addresses_of(cluster: "Mapping[str, List[str]]") -> "List[str]":
    """Return the addresses of a cluster's ranks, in their order. The chief is rank 0."""
    return cluster.get("chief", []) + cluster.get("worker", [])


def _addresses(part, text):
    """Return the addresses of one kind of task, which may be a list or a dictionary by index."""
    if isinstance(part, dict):
        by_index = {int(index): address for index, address in part.items()}
        if sorted(by_index) != list(range(len(by_index))):
            raise _sparse_cluster(text)
        part = [address for _, address in sorted(by_index.items())]
    return texts(part or [])


def _sparse_cluster(text):
    return errors.RankError(
        f"TF_CONFIG={text} names only some of the workers, so that nothing tells how many there "
        "are. Name all of them (in a TFJob, without enableDynamicWorker), or set COMPAT_ALONE=1 "
        "to train alone."
    )


def _invalid(name, text, problem):
    if name != TF_CONFIG:
        return not_a_rank(name, text)
    return errors.RankError(
        'TF_CONFIG={} is not understood: {}. Use JSON such as {{"cluster": {{"worker": '
        '["host1:2222", "host2:2222"]}}, "task": {{"type": "worker", "index": 0}}}}, or set '
        "COMPAT_ALONE=1 to train alone.".format(text, problem)
    )
