"""What the processes of a run listen to, and a run that holds still to be asked."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.runner import ROOT

_LISTENING = "0A"  # net/tcp_states.h
# Python runs it in every process when it starts. Each rank, once it has met the others and told them of its
# weights, says that it is there, and waits for a file "go".
_HOLD = """
import os, pathlib, time
if "LOCAL_RANK" in os.environ:
    import lib.devices.base
    original = lib.devices.base.DistributedBackend.wrap
    def wrap(*arguments, **options):
        wrapped = original(*arguments, **options)
        folder = pathlib.Path({folder!r})
        (folder / ("held-" + str(os.getpid()))).touch()
        while not (folder / "go").exists():
            time.sleep(0.02)
        return wrapped
    lib.devices.base.DistributedBackend.wrap = wrap
"""


def hold(folder: Path) -> dict[str, str]:
    """The environment of a run whose ranks wait before their first step; its folder gets what that takes."""
    (folder / "sitecustomize.py").write_text(_HOLD.format(folder=str(folder)))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def held(folder: Path) -> list[Path]:
    """A file for each rank that waits."""
    return list(folder.glob("held-*"))


def open_addresses(processes: Iterable[int]) -> set[str]:
    """Addresses beyond the loopback device at which these processes listen, as ADDRESS:PORT."""
    found = set()
    for process in processes:
        place = Path("/proc", str(process))
        listening = dict(
            row for name in ("tcp", "tcp6") for row in _listening(place / "net" / name)
        )  # of all processes that share its network
        links = (_target(link) for link in (place / "fd").iterdir())
        found |= {listening[link] for link in links if link in listening}
    return {place for place in found if not _address(place).is_loopback}


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""  # closed meanwhile


def _listening(table: Path) -> Iterable[tuple[str, str]]:
    for line in table.read_text().splitlines()[1:]:
        _, own, _, state, _, _, _, _, _, inode, *_ = line.split()
        if state == _LISTENING:
            number, port = own.split(":")
            words = [bytes.fromhex(number[at : at + 8])[::-1] for at in range(0, len(number), 8)]
            yield f"socket:[{inode}]", f"{ipaddress.ip_address(b''.join(words))}:{int(port, 16)}"


def _address(place: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(place.rpartition(":")[0])
    return getattr(address, "ipv4_mapped", None) or address
