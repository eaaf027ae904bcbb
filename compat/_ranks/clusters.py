"""The place of a process in a cluster that a variable describes: TF_CONFIG and its like.

TensorFlow's workers find the cluster and their task in ``TF_CONFIG``. Vertex AI tells other
containers the same by ``CLUSTER_SPEC``, SageMaker its hosts by ``SM_HOSTS``.
"""

import functools

from .. import errors
from .place import Place, from_addresses, not_a_rank, stays_alone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

#: The variable that tells TensorFlow's workers the cluster and their task in it, as JSON.
TF_CONFIG = "TF_CONFIG"
#: The same of Vertex AI's containers: one process a machine.
CLUSTER_SPEC = "CLUSTER_SPEC"

# What AI Platform and SageMaker, and Vertex AI, call a kind of task.
_KINDS = {"master": "chief", "workerpool0": "chief", "workerpool1": "worker",
          "workerpool2": "ps", "workerpool3": "evaluator"}  # type: dict  # fmt: skip
# What JSON raises that is none, or is nested too deeply, or has other types than are expected.
_MALFORMED = ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError


def evaluator(environ: "Mapping[str, str]") -> "Optional[Place]":
    """The place of the process of ``TF_CONFIG`` that evaluates what the others have saved.

    It is none of the ranks: its number is -1. None: this is another process.
    """
    if stays_alone(environ) or _read(TF_CONFIG, environ, _kind) != "evaluator":
        return None
    return Place(-1, 1, 0, 1, TF_CONFIG)


def environ_of_worker(addresses: "Sequence[str]", index: int) -> "Dict[str, str]":
    """The variable that tells a worker its cluster and its number in it."""
    import json  # not at start-up

    tells = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    return {TF_CONFIG: json.dumps(tells)}


def worker(environ):
    """As ``_worker``, of the first variable that tells."""
    return _worker(TF_CONFIG, environ) or _worker(CLUSTER_SPEC, environ)


def _worker(name, environ):
    """The place of one of a cluster's workers, or None: alone, or the one that evaluates.

    The chief, where there is one, is rank 0.
    """
    if not environ.get(name, "").strip() or _read(name, environ, _kind) == "evaluator":
        return None
    cluster, kind, index = tf_cluster(environ, name)
    addresses = tf_addresses(cluster)
    if len(addresses) < 2 and (kind or name == TF_CONFIG):
        return None
    if kind not in ("chief", "worker") or not 0 <= index < len(cluster.get(kind, [])):
        raise _invalid(name, environ[name], f"the cluster has no task {kind} {index}")
    rank = index + (len(cluster.get("chief", [])) if kind == "worker" else 0)
    return from_addresses(name, addresses, rank)


def tf_cluster(environ: "Mapping[str, str]", name: str = TF_CONFIG) -> "Tuple[Any, Any, int]":
    """A cluster as lists of addresses by kind, and this task's kind and index.

    Raises:
        RankError: it has parameter servers, or is not understood.
    """
    return _read(name, environ, functools.partial(_cluster, name, environ[name]))


def _cluster(name, text, config):
    found = config.get("cluster")
    if found is None and config.get("sparseCluster"):
        # TFJob's dynamic workers know themselves and the parameter servers, and no other.
        raise _sparse_cluster(text)
    cluster = {}  # type: dict
    for name_of_kind, part in (found or {}).items():
        addresses = _addresses(part, text)
        cluster.setdefault(_KINDS.get(name_of_kind, name_of_kind), []).extend(addresses)
    if cluster.get("ps"):
        raise errors.RankError(
            f"{name}={text} names parameter servers, which compat does not use: ranks train in "
            "step. Give all machines as workers, or set COMPAT_ALONE=1 to train alone."
        )
    return cluster, _kind(config), int((config.get("task") or {}).get("index") or 0)


def _kind(config):
    kind = (config.get("task") or {}).get("type")
    return _KINDS.get(kind, kind)


def tf_addresses(cluster: "Mapping[str, List[str]]") -> "List[str]":
    """The addresses of a cluster's ranks, in their order: the chief is rank 0."""
    return cluster.get("chief", []) + cluster.get("worker", [])


def _addresses(part, text):
    """A part of a cluster as a list: TensorFlow takes a dictionary by index, too."""
    if isinstance(part, dict):
        by_index = {int(index): address for index, address in part.items()}
        if sorted(by_index) != list(range(len(by_index))):
            raise _sparse_cluster(text)
        part = [address for _, address in sorted(by_index.items())]
    return _texts(part or [])


def _texts(found):
    """A list of texts, such as addresses, as it is."""
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"not a list of texts: {found!r}")
    return found


def sagemaker(environ):
    """SageMaker's script mode: one process a machine."""
    hosts = sagemaker_hosts(environ)
    if len(hosts) < 2:
        return None
    mine = environ.get("SM_CURRENT_HOST", "")
    if mine not in hosts:
        raise not_a_rank("SM_CURRENT_HOST", mine)
    return Place(hosts.index(mine), len(hosts), 0, 1, "SageMaker")


def sagemaker_hosts(environ):
    return _read("SM_HOSTS", environ, lambda hosts: sorted(_texts(hosts))) or []


def _read(name, environ, read):
    """What ``read`` makes of a variable's JSON, or None where it is not set."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    import json  # not at start-up

    try:
        return read(json.loads(text))
    except _MALFORMED as error:
        raise _invalid(name, text, error) from error


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
