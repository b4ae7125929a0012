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

_NODES = re.compile(r"(?P<least>[1-9][0-9]{0,3})(?::(?P<most>[1-9][0-9]{0,3}))?")
_ENDPOINT = re.compile(r"[\w.-]+:(?P<port>[1-9][0-9]{0,4})")
_LARGEST_PORT = 65535
# Seconds a sufficient number of nodes waits for more; seconds between keep-alives; missed ones allowed.
LAST_CALL, KEEP_ALIVE, ATTEMPTS = 5, 2, 3
_ANYWHERE = ("192.0.2.1", 9)  # TEST-NET-1 (RFC 5737): a UDP connect looks up the route and sends nothing
_SIOCGIFADDR = 0x8915  # linux/sockios.h: request for the address of an interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Rendezvous of `least` to `most` nodes at `endpoint`, which is one of them."""

    least: int
    most: int
    endpoint: str

    @property
    def is_elastic(self) -> bool:
        """True if the number of nodes may vary."""
        return self.least < self.most


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


def gathering_of(*, nodes: str, endpoint: str | None, default: str = "") -> Gathering | None:
    """Return what CONFIG_DIST_NNODES and CONFIG_DIST_ENDPOINT request; None for one node.

    default: the endpoint of several nodes where none is requested. Raises ConfigError where they make no
    sense.
    """
    found = _NODES.fullmatch(nodes)
    least = int(found["least"]) if found else 0
    most = int(found["most"] or least) if found else 0
    if not found or most < least:
        raise ConfigError(
            f"CONFIG_DIST_NNODES={nodes} is no number of machines",
            todo="write it as 4, or as 2:4 for two to four",
        )
    if most == 1:
        if endpoint:
            raise ConfigError(
                f"CONFIG_DIST_ENDPOINT={endpoint} is for several machines",
                why=f"CONFIG_DIST_NNODES={nodes} is one",
                todo="set CONFIG_DIST_NNODES to their number, or leave CONFIG_DIST_ENDPOINT empty",
            )
        return None
    endpoint = endpoint or default
    place = _ENDPOINT.fullmatch(endpoint)
    if place is None or int(place["port"]) > _LARGEST_PORT:
        raise ConfigError(
            f"CONFIG_DIST_ENDPOINT={endpoint} is no place to meet",
            why=f"{nodes} machines are to train together",
            todo=f"write it as HOST:PORT, the host being one of them, the port at most {_LARGEST_PORT}",
        )
    return Gathering(least=least, most=most, endpoint=endpoint)


def check_shares(gathering: Gathering, *, processes: int, target: int) -> None:
    """Raise PlanError where some allowed number of nodes cannot split the effective batch evenly."""
    for nodes in range(gathering.least, gathering.most + 1):
        if target % (nodes * processes):
            raise PlanError(
                f"an effective batch of {target} cannot be shared by {nodes} x {processes} process(es)",
                why=f"CONFIG_DIST_NNODES allows {gathering.least} to {gathering.most}",
                todo="set CONFIG_TARGET_EFFECTIVE_BATCH to a multiple of each number of processes",
            )


def route_to(endpoint: str) -> Route | None:
    """Find the route from this node to HOST:PORT; None where there is none yet."""
    host, _, port = endpoint.rpartition(":")
    if host == "localhost" or _is_loopback(host):
        address = "127.0.0.1" if host == "localhost" else host
        return Route(address=address, interface=LOOPBACK, is_host=None, serves=address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        hosted = _is_loopback(str(place[0]))  # the name is this node's own
        with socket.socket(socket.AF_INET if hosted else family, socket.SOCK_DGRAM) as asking:
            asking.connect(_ANYWHERE if hosted else place)
            address = str(asking.getsockname()[0])
    except OSError:
        return None  # torchrun retries for longer, and reports what it could not reach
    end = str(place[0])
    is_host = None if hosted or end in _addresses_of_own_name() else address == end
    # A node whose own name resolves to loopback cannot know the address by which others reach it.
    serves = None if hosted or is_host is False else end
    return Route(address=address, interface=_interface_with(address), is_host=is_host, serves=serves)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _addresses_of_own_name() -> set[str]:
    try:
        return {str(place[0]) for *_, place in socket.getaddrinfo(socket.gethostname(), None)}
    except socket.gaierror:
        return set()


def _interface_with(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
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
    gathering: Gathering, *, processes: int, restarts: int, name: str, route: Route | None = None
) -> Sequence[str]:
    """Return torchrun's options on each node.

    name: rendezvous id, shared by the nodes of one job. route: of this node; None to resolve names instead.
    """
    nodes = f"{gathering.least}:{gathering.most}" if gathering.is_elastic else str(gathering.least)
    conf = f"last_call_timeout={LAST_CALL},keep_alive_interval={KEEP_ALIVE},keep_alive_max_attempt={ATTEMPTS}"
    if route is not None and route.is_host is not None:
        conf += f",is_host={str(route.is_host).lower()}"
    return (
        f"--nnodes={nodes}",
        f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={gathering.endpoint}",
        f"--rdzv-id={name}",
        f"--rdzv-conf={conf}",
        *([] if route is None else [f"--local-addr={route.address}"]),
    )
