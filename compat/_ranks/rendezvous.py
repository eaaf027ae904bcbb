"""The rendezvous, where ranks find each other, as the environment has it; rank 0's socket there."""

import errno
import os
import re
import zlib
from typing import Any, Iterator, Mapping, Optional, Tuple

from .. import errors
from .._configuration.numeric import whole_number
from . import sagemaker, tf_config
from .addresses import host_of, is_loopback, with_port
from .launchers import LAUNCHERS, keras_addresses
from .place import Place

# Where no variable has a port, one of these is used: they lie above Linux's ephemeral ports.
_FIRST_PORT, _PORTS = 61440, 4096

# SageMaker's containers leave the choice to their processes.
_SAGEMAKER_PORT = 7777

# Variables that identify a job on its machines, of the launchers that have such.
_JOBS = {
    "srun": ["SLURM_JOB_ID", "SLURM_STEP_ID"],
    "mpirun": ["PMIX_NAMESPACE"],
    "PALS": ["PALS_APID"],
    "mpirun_rsh": ["MPIRUN_ID"],
}


def find_rendezvous(place: Place, environ: Mapping[str, str]) -> Optional[Tuple[str, int]]:
    """Return the host and the port of rank 0's rendezvous, or None where they are unknown. Pure.

    Variables that the user sets take precedence over a launcher's. For ranks that are all on this
    machine an identifier of their job is enough, from which the port is derived.

    Raises:
        RankError: an address is not understood.
    """
    for name, where in _candidates(place, environ):
        if where:
            host, port = host_of(where), where.rpartition(":")[2]
            if not host or not 0 < (whole_number(port) or 0) < 65536:
                raise errors.RankError(
                    "{} {} {!r}, which is not a host and a port. Use the host name or "
                    "address of rank 0's machine and a free port there, such as "
                    "node1:29500.".format(name, "are" if " and " in name else "is", where)
                )
            return "127.0.0.1" if place.on_one_machine else host, int(port)
    return None


def require_rendezvous(place: Place, engine: str) -> Tuple[str, int]:
    """Return the host and the port of rank 0, which is the rendezvous.

    Arguments:
        place: that of this process.
        engine: the name of the ranks' engine, for the error.

    Raises:
        RankError: they are not known.
    """
    address = find_rendezvous(place, os.environ)
    if address is None:
        raise errors.RankError(
            f"This process is {place}, but nothing tells {engine} where the rendezvous is. Set "
            "MASTER_ADDR to the host name or address of rank 0's machine and MASTER_PORT to a free "
            "port there, the same for all ranks; or start the script with compat run -n "
            f"{place.size}."
        )
    return address


def torchrun_keeps_store(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun, not rank 0, keeps the store of torch's rendezvous.

    torch.distributed's ``rendezvous("env://")`` decides by the same variable.
    """
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _candidates(place: Place, environ: Mapping[str, str]) -> Iterator[Tuple[str, str]]:
    """Yield candidates for the rendezvous, by precedence: (name of a variable, address or "")."""
    if place.launcher == LAUNCHERS[0][0]:
        yield "COMPAT_RENDEZVOUS", environ.get("COMPAT_RENDEZVOUS", "")
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        port = environ["MASTER_PORT"].strip()
        if torchrun_keeps_store(environ) and whole_number(port) is not None:
            port = str(int(port) + 1)  # torchrun itself listens at MASTER_PORT
        yield "MASTER_ADDR and MASTER_PORT", with_port(environ["MASTER_ADDR"].strip(), port)
    yield "JAX_COORDINATOR_ADDRESS", environ.get("JAX_COORDINATOR_ADDRESS", "").strip()
    if "COORDINATOR_ADDRESS" in environ and "COORDINATOR_PORT" in environ:
        host, port = (environ["COORDINATOR_" + name].strip() for name in ("ADDRESS", "PORT"))
        yield "COORDINATOR_ADDRESS and COORDINATOR_PORT", with_port(host, port)
    yield "KERAS_DISTRIBUTION_JOB_ADDRESSES", "".join(keras_addresses(environ)[:1])
    if place.launcher in (tf_config.TF_CONFIG, tf_config.CLUSTER_SPEC):
        cluster, _, _ = tf_config.cluster_in(environ, place.launcher)
        yield place.launcher, tf_config.addresses_of(cluster)[0]
    if place.launcher == "SageMaker":
        yield "SM_HOSTS", with_port(sagemaker.hosts_in(environ)[0], _SAGEMAKER_PORT)
    job = [environ.get(name, "") for name in _JOBS.get(place.launcher, [""])]
    host = "127.0.0.1" if place.on_one_machine else _first_host(place, environ)
    if all(job) and host:
        derived = _FIRST_PORT + zlib.crc32(os.fsencode(".".join(job))) % _PORTS
        yield place.launcher, with_port(host, derived)


def _first_host(place, environ):
    """Return the machine of rank 0, or "" where nothing tells."""
    if place.launcher == "srun":
        return _first_of_hostlist(environ.get("SLURM_STEP_NODELIST", ""))
    # Open MPI's runtime, which is where mpirun was called: there rank 0 is, by default.
    match = re.search(r";tcp://([0-9.]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return match.group(1) if match and place.launcher == "mpirun" else ""


def _first_of_hostlist(text):
    """Return the first host of SLURM's list: ``node01`` of ``node[01-04,07],gpu1``."""
    match = re.match(r"([^\[,]*)(?:\[([0-9]+)[^\]]*\]([^,]*))?", text.strip())
    return "".join(part or "" for part in match.groups()) if match else ""


def listen(place: Place, host: str, port: int) -> Any:
    """Return a socket that listens at the rendezvous, on no more interfaces than it must.

    If all ranks are on this machine, it listens for this machine alone. For several machines it
    listens at the address of ``host``, or at all addresses of this machine where that name stands
    for another one (a cluster's own proxy), or for the loopback interface, as Debian's /etc/hosts
    and PyTorchJob have rank 0's.

    Raises:
        RankError: the port is taken.
    """
    import socket  # for start-up time

    everywhere = "::" if socket.has_ipv6 else ""
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = everywhere
    if is_loopback(address) and not place.on_one_machine:
        address = everywhere
    try:
        try:
            return _listening(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return _listening(everywhere, port)
    except OSError as error:
        raise errors.RankError(
            "This process is {}, and it cannot listen at {}:{}, the rendezvous of the ranks: {}. "
            "Set MASTER_ADDR and MASTER_PORT to another host or port, the same for all "
            "ranks.".format(place, host, port, error.strerror)
        ) from error


def _listening(address, port):
    import socket  # for start-up time

    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        # The last job's connections may not be over yet.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == "::":
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((address, port))
        listening.listen(128)
    except BaseException:
        listening.close()
        raise
    return listening
