"""The place of a process in a cluster that a variable describes: TF_CONFIG and its like.

TensorFlow's workers find the cluster and their task in ``TF_CONFIG``. Vertex AI tells other
containers the same by ``CLUSTER_SPEC``, SageMaker its hosts by ``SM_HOSTS``.
"""

from .. import errors
from .place import Place, from_addresses, is_to_be_alone, not_a_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

#: The variable that tells TensorFlow's workers the cluster and their task in it, as JSON.
TF_CONFIG = "TF_CONFIG"

# What JSON raises that is none, or is nested too deeply, or has other types than are expected.
_MALFORMED = ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError


def evaluator(environ: "Mapping[str, str]") -> "Optional[Place]":
    """The place of the process of ``TF_CONFIG`` that evaluates what the others have saved.

    It is none of the ranks: its number is -1. None: this is another process.
    """
    config = None if is_to_be_alone(environ) else _parsed(TF_CONFIG, environ)
    if config is None or (config.get("task") or {}).get("type") != "evaluator":
        return None
    return Place(-1, 1, 0, 1, TF_CONFIG)


def environ_of_worker(addresses: "Sequence[str]", index: int) -> "Dict[str, str]":
    """The variable that tells a worker its cluster and its number in it."""
    import json  # not at start-up

    tells = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    return {TF_CONFIG: json.dumps(tells)}


def worker(environ):
    """The place of one of TensorFlow's workers, or None: alone, or the one that evaluates.

    The chief ("master" on AI Platform and SageMaker), where there is one, is rank 0.
    """
    if _parsed(TF_CONFIG, environ) is None or evaluator(environ):
        return None
    cluster, kind, index = tf_cluster(environ)
    addresses = tf_addresses(cluster)
    if len(addresses) < 2:
        return None
    if kind not in ("chief", "worker") or not 0 <= index < len(cluster.get(kind, [])):
        problem = "the cluster has no task {} {}".format(kind, index)
        raise _invalid_tf_config(environ[TF_CONFIG], problem)
    rank = index + (len(cluster.get("chief", [])) if kind == "worker" else 0)
    return from_addresses(TF_CONFIG, addresses, rank)


def tf_cluster(environ: "Mapping[str, str]") -> "Tuple[Any, Any, int]":
    """The cluster of ``TF_CONFIG`` as lists of addresses by kind, and this task's kind and index.

    Raises:
        RankError: it has parameter servers, or is not understood.
    """
    text = environ[TF_CONFIG]
    config = _parsed(TF_CONFIG, environ)
    found = config.get("cluster")
    if found is None and config.get("sparseCluster"):
        # TFJob's dynamic workers know themselves and the parameter servers, and no other.
        raise _sparse_cluster(text)
    task = config.get("task") or {}
    try:
        cluster = {kind: _addresses(part) for kind, part in (found or {}).items()}
        kind, index = task.get("type"), int(task.get("index") or 0)
    except LookupError:
        raise _sparse_cluster(text) from None
    except _MALFORMED as error:
        raise _invalid_tf_config(text, error) from error
    if cluster.get("ps"):
        raise _parameter_servers(text)
    if "master" in cluster:
        cluster["chief"] = cluster.pop("master") + cluster.get("chief", [])
    return cluster, "chief" if kind == "master" else kind, index


def tf_addresses(cluster: "Mapping[str, List[str]]") -> "List[str]":
    """The addresses of a cluster's ranks, in their order: the chief is rank 0."""
    return cluster.get("chief", []) + cluster.get("worker", [])


def _addresses(part):
    """A part of a cluster as a list: TensorFlow takes a dictionary by index, too."""
    if isinstance(part, dict):
        by_index = {int(index): address for index, address in part.items()}
        part = [by_index[index] for index in range(len(by_index))]
    return _texts(part or [])


def _texts(found):
    """A list of texts, such as addresses, as it is."""
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise TypeError("not a list of texts: {!r}".format(found))
    return found


def worker_pool(environ):
    """Vertex AI's CLUSTER_SPEC, for containers of one's own: one process a machine."""
    pools = vertex_pools(environ)
    if pools is None:
        return None
    text, (counts, kind, index) = environ["CLUSTER_SPEC"], pools
    if counts.get("workerpool2"):
        raise _parameter_servers(text, "CLUSTER_SPEC")
    if not counts.get("workerpool0"):
        raise not_a_rank("CLUSTER_SPEC", text)
    machines = counts["workerpool0"] + counts.get("workerpool1", [])
    if kind not in ("workerpool0", "workerpool1") or not 0 <= index < len(counts.get(kind, [])):
        if len(machines) < 2 or kind == "workerpool3":  # which evaluates
            return None
        raise not_a_rank("CLUSTER_SPEC", text)
    rank = index + (len(counts["workerpool0"]) if kind == "workerpool1" else 0)
    return Place(rank, len(machines), 0, 1, "CLUSTER_SPEC")


def vertex_pools(environ):
    """The addresses of each pool, and this task's pool and index; None without CLUSTER_SPEC."""

    def read(config):
        pools, task = config["cluster"].items(), config["task"]
        index = int(task.get("index") or 0)
        return {pool: _texts(part) for pool, part in pools}, task["type"], index

    return _parsed("CLUSTER_SPEC", environ, read)


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
    return _parsed("SM_HOSTS", environ, lambda hosts: sorted(_texts(hosts))) or []


def _with_task(config):
    """A cluster's description, which may tell the type of a task."""
    (config.get("task") or {}).get("type")
    return config


def _parsed(name, environ, read=_with_task):
    """What ``read`` makes of a variable's JSON, or None where it is not set."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    import json  # not at start-up

    try:
        return read(json.loads(text))
    except _MALFORMED as error:
        if name == TF_CONFIG:
            raise _invalid_tf_config(text, error) from error
        raise not_a_rank(name, text) from error


def _sparse_cluster(text):
    return errors.RankError(
        "TF_CONFIG={} names only some of the workers, so that nothing tells how many there "
        "are. Name all of them (in a TFJob, without enableDynamicWorker), or set "
        "COMPAT_ALONE=1 to train alone.".format(text)
    )


def _invalid_tf_config(text, problem):
    return errors.RankError(
        'TF_CONFIG={} is not understood: {}. Use JSON such as {{"cluster": {{"worker": '
        '["host1:2222", "host2:2222"]}}, "task": {{"type": "worker", "index": 0}}}}, or set '
        "COMPAT_ALONE=1 to train alone.".format(text, problem)
    )


def _parameter_servers(text, name="TF_CONFIG"):
    return errors.RankError(
        "{}={} names parameter servers, which compat does not use: ranks train in step. Give "
        "all machines as workers, or set COMPAT_ALONE=1 to train alone.".format(name, text)
    )
