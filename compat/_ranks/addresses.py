"""Addresses of hosts and ports, as texts."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Union


def with_port(host: str, port: "Union[int, str]") -> str:
    """Return ``host:port``, or ``[IPv6]:port``."""
    return "[{}]:{}".format(host, port) if ":" in host else "{}:{}".format(host, port)


def host_of(address: str) -> str:
    """Return the host of ``host``, ``host:port`` or ``[IPv6]:port``."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback interface."""
    return host in ("localhost", "::1") or host.startswith("127.")
