"""Rendezvous stores that listen at no more than the requested address.

A TCPStore that opens its own socket listens on every interface, whatever host it is given. It has no
password, and torch unpickles what it finds there: whoever reaches the port can run code in the job.
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import socket
from collections.abc import Mapping

from torch._C._distributed_c10d import FileStore, Store, TCPStore  # typed here alone

from lib.distributed.local_ranks import STORE_VARIABLE


def open_rank_store(
    environment: Mapping[str, str], *, rank: int, world: int, timeout: datetime.timedelta
) -> Store:
    """Open a process group's store: a FileStore on one node, else rank 0's at MASTER_ADDR."""
    if file := environment.get(STORE_VARIABLE):
        return FileStore(file, world)
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    if rank == 0:
        return serve_at(host, port, world=world, timeout=timeout)
    return TCPStore(host, port, world, is_master=False, timeout=timeout)


def serve_at(host: str, port: int, *, timeout: datetime.timedelta, world: int | None = None) -> TCPStore:
    """Serve a TCPStore at that address of this node only; on all interfaces if `host` is a name.

    A name may resolve here (to 127.0.1.1, say) to another address than elsewhere. Port 0 is a free one.
    Another store of this process with that port and multi_tenant=True, as torchrun's agent makes one, becomes
    a client of it. world: number of ranks to wait for. Raises OSError where the address is in use.
    """
    try:
        is_address = ipaddress.ip_address(host).version == 4
    except ValueError:
        is_address = False
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host if is_address else "", port))
        return TCPStore(
            host,
            listener.getsockname()[1],
            world,
            is_master=True,
            timeout=timeout,
            wait_for_workers=world is not None,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )


def serve_unless_served(endpoint: str, *, timeout: datetime.timedelta) -> TCPStore | None:
    """Serve HOST:PORT as `serve_at` does; None where another launch on this node does so already."""
    host, _, port = endpoint.rpartition(":")
    try:
        return serve_at(host, int(port), timeout=timeout)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None
