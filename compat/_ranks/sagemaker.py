"""SageMaker's script mode, which reports its hosts by ``SM_HOSTS``."""

from .place import Place
from .variables import from_json, not_a_rank, texts


def place(environ):
    """Return the place of a process: there is one on each machine."""
    hosts = hosts_in(environ)
    if len(hosts) < 2:
        return None
    mine = environ.get("SM_CURRENT_HOST", "")
    if mine not in hosts:
        raise not_a_rank("SM_CURRENT_HOST", mine)
    return Place(hosts.index(mine), len(hosts), 0, 1, "SageMaker")


def hosts_in(environ):
    """Return the hosts of all processes, in the order of ranks."""
    return from_json("SM_HOSTS", environ, lambda hosts: sorted(texts(hosts)), not_a_rank) or []
