"""SageMaker's script mode, which has its hosts in ``SM_HOSTS``."""

from .place import Place
from .variables import from_json, not_a_rank, texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Mapping, Optional


def place(environ: "Mapping[str, str]") -> "Optional[Place]":
    """Return the place of this process, of which each machine has one, or None."""
    hosts = hosts_in(environ)
    if len(hosts) < 2:
        return None
    mine = environ.get("SM_CURRENT_HOST", "")
    if mine not in hosts:
        raise not_a_rank("SM_CURRENT_HOST", mine)
    return Place(hosts.index(mine), len(hosts), 0, 1, "SageMaker")


def hosts_in(environ: "Mapping[str, str]") -> "List[str]":
    """Return the hosts of all processes, in the order of ranks."""
    return from_json("SM_HOSTS", environ, lambda hosts: sorted(texts(hosts)), not_a_rank) or []
