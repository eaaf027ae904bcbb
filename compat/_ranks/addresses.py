"""Addresses of hosts and ports, as texts. Pure."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def with_port(host: str, port: "Any") -> str:
    """``host:port``, or ``[IPv6]:port``."""
    return "[{}]:{}".format(host, port) if ":" in host else "{}:{}".format(host, port)


def host_of(address):
    """The host of ``host``, ``host:port`` or ``[IPv6]:port``."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
