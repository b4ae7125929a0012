"""Rendezvous of several nodes: their number, the endpoint, and torchrun's options."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lib.distributed.local_ranks import LOOPBACK, on_interface
from lib.errors import ConfigError, PlanError
from lib.units import counted

_NODES = re.compile(r"(?P<min>[1-9][0-9]{0,3})(?::(?P<max>[1-9][0-9]{0,3}))?")
_ENDPOINT = re.compile(r"[\w.-]+:(?P<port>[1-9][0-9]{0,4})")
_LARGEST_PORT = 65535
# Seconds a sufficient number of nodes waits for more; seconds between keep-alives; missed ones allowed.
LAST_CALL, KEEP_ALIVE, ATTEMPTS = 5, 2, 3
_TEST_NET = ("192.0.2.1", 9)  # TEST-NET-1 (RFC 5737): a UDP connect looks up the route and sends nothing
_SIOCGIFADDR = 0x8915  # linux/sockios.h: request for the address of an interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Rendezvous of `min_nodes` to `max_nodes` nodes at `endpoint`, which is one of them."""

    min_nodes: int
    max_nodes: int
    endpoint: str

    @property
    def is_elastic(self) -> bool:
        """True if the number of nodes may vary."""
        return self.min_nodes < self.max_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Network route from this node to the rendezvous endpoint.

    Host names do not give it: Debian and Ubuntu resolve a machine's own name to 127.0.1.1, so that torchrun
    does not recognise its node as the endpoint, and gloo tells the others to connect to themselves.
    """

    address: str  # of this node, as the others reach it
    interface: str | None  # the network interface with that address; None if unknown
    is_host: bool | None  # true if this node is the endpoint; None where torchrun finds out
    serves: str | None = None  # the endpoint's address if it is this node's and numeric


def rendezvous_of(*, nodes: str, endpoint: str | None, default: str = "") -> Rendezvous | None:
    """Return what CONFIG_DIST_NNODES and CONFIG_DIST_ENDPOINT request; None for one node.

    default: endpoint of several nodes. Raises ConfigError where they are malformed or contradict.
    """
    found = _NODES.fullmatch(nodes)
    min_nodes = int(found["min"]) if found else 0
    max_nodes = int(found["max"] or min_nodes) if found else 0
    if not found or max_nodes < min_nodes:
        raise ConfigError(
            f"CONFIG_DIST_NNODES={nodes} is not a number of nodes",
            todo="write it as 4, or as 2:4 for two to four",
        )
    if max_nodes == 1:
        if endpoint:
            raise ConfigError(
                f"CONFIG_DIST_ENDPOINT={endpoint} is for several nodes",
                why=f"CONFIG_DIST_NNODES={nodes} is one",
                todo="set CONFIG_DIST_NNODES to their number, or leave CONFIG_DIST_ENDPOINT empty",
            )
        return None
    endpoint = endpoint or default
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or int(match["port"]) > _LARGEST_PORT:
        raise ConfigError(
            f"CONFIG_DIST_ENDPOINT={endpoint} is not a rendezvous endpoint"
            if endpoint
            else "CONFIG_DIST_ENDPOINT is not set",
            why=f"{nodes} nodes need one" + ("" if endpoint else ", which only make sbatch finds by itself"),
            todo=f"set CONFIG_DIST_ENDPOINT=HOST:PORT: one of the nodes, and a port up to {_LARGEST_PORT}",
        )
    return Rendezvous(min_nodes=min_nodes, max_nodes=max_nodes, endpoint=endpoint)


def check_shares(rendezvous: Rendezvous, *, processes: int, target: int, unit: int) -> None:
    """Raise PlanError where the largest number of nodes cannot share the effective batch.

    unit: samples that a process gets at least, 1 or those of a normalisation group.
    """
    nodes = rendezvous.max_nodes
    if target < nodes * processes * unit:
        raise PlanError(
            f"an effective batch of {target} cannot be split over {nodes} x {counted(processes, 'process')}",
            why=f"each needs at least {counted(unit, 'sample')}, and CONFIG_DIST_NNODES allows {nodes} nodes",
            todo="raise CONFIG_TARGET_EFFECTIVE_BATCH, or allow fewer nodes",
        )


def route_to(endpoint: str) -> Route | None:
    """Find the route from this node to HOST:PORT; None where there is none yet."""
    host, _, port = endpoint.rpartition(":")
    if host == "localhost" or _is_loopback(host):
        address = "127.0.0.1" if host == "localhost" else host
        return Route(address=address, interface=LOOPBACK, is_host=None, serves=address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        is_own_name = _is_loopback(str(target[0]))  # the name is this node's own
        with socket.socket(socket.AF_INET if is_own_name else family, socket.SOCK_DGRAM) as udp:
            udp.connect(_TEST_NET if is_own_name else target)
            address = str(udp.getsockname()[0])
    except OSError:
        return None  # torchrun retries for longer, and reports what it could not reach
    resolved = str(target[0])
    is_host = None if is_own_name or resolved in _addresses_of_own_name() else address == resolved
    # A node whose own name resolves to loopback cannot know the address by which others reach it.
    serves = None if is_own_name or is_host is False else resolved
    return Route(address=address, interface=_interface_with(address), is_host=is_host, serves=serves)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _addresses_of_own_name() -> set[str]:
    try:
        return {str(found[0]) for *_, found in socket.getaddrinfo(socket.gethostname(), None)}
    except socket.gaierror:
        return set()


def _interface_with(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(udp, _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def environment_of(route: Route | None) -> Mapping[str, str]:
    """Return variables of torchrun and the workers on several nodes; the user's take precedence."""
    # A lost store is reported in one line, without C++ stack traces.
    variables = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if route is not None and route.interface is not None:
        variables |= on_interface(route.interface)
    return variables


def torchrun_options(
    rendezvous: Rendezvous, *, processes: int, restarts: int, name: str, route: Route | None = None
) -> Sequence[str]:
    """Return torchrun's options on a node. name: rendezvous id of the job. route: None to resolve names."""
    nodes = (
        f"{rendezvous.min_nodes}:{rendezvous.max_nodes}"
        if rendezvous.is_elastic
        else str(rendezvous.min_nodes)
    )
    conf = f"last_call_timeout={LAST_CALL},keep_alive_interval={KEEP_ALIVE},keep_alive_max_attempt={ATTEMPTS}"
    if route is not None and route.is_host is not None:
        conf += ",is_host=false"  # the endpoint's launch serves it: its agent, too, is a client
    return (
        f"--nnodes={nodes}",
        f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous.endpoint}",
        f"--rdzv-id={name}",
        f"--rdzv-conf={conf}",
        *([] if route is None else [f"--local-addr={route.address}"]),
    )
