"""Relay of all TCP connections between machines: it holds back what they send, or resets the connections.

A program for the network that joins them, whose routes deliver their connections here. It reads commands from
standard input, one a line, and answers each with a line: "hold ADDRESS" (or "hold all"), "held" (answers when
something is held back), "go", "reset". Arguments: the ports to listen at.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from collections.abc import Sequence

_SOL_IP, _IP_TRANSPARENT = 0, 19  # linux/in.h: accept connections to addresses of others


class Relay:
    """The open connections, and the addresses whose data are held back."""

    def __init__(self) -> None:
        self._held_back = set[str]()
        self._changed = asyncio.Condition()
        self._holds = asyncio.Event()  # something is held back
        self._open = set[asyncio.StreamWriter]()

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect to where `writer`'s peer meant to, and pass on what both send."""
        (source, *_), (target, port, *_) = (
            writer.get_extra_info("peername"),
            writer.get_extra_info("sockname"),
        )
        self._open.add(writer)
        try:
            other_reader, other = await asyncio.open_connection(target, port)
        except OSError:
            self._reset([writer])
            return
        self._open.add(other)
        both, ends = [writer, other], {source, target, "all"}
        try:
            await asyncio.gather(
                self._pass_on(reader, other, ends), self._pass_on(other_reader, writer, ends)
            )
        except OSError:
            self._reset(both)
        for one in both:
            one.close()
            self._open.discard(one)

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends: set[str]
    ) -> None:
        more = True
        while more:
            data = await reader.read(1 << 16)
            async with self._changed:
                while self._held_back & ends:
                    self._holds.set()
                    await self._changed.wait()
            more = bool(data)
            if more:
                writer.write(data)
                await writer.drain()
            else:
                writer.write_eof()

    def _reset(self, writers: Sequence[asyncio.StreamWriter]) -> None:
        for writer in writers:
            opened = writer.get_extra_info("socket")
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            self._open.discard(writer)

    async def obey(self, command: str) -> None:
        """Do what one line asks for."""
        match command.split():
            case ["hold", address]:
                self._held_back.add(address)
                self._holds.clear()
            case ["held"]:
                await self._holds.wait()
            case ["go"]:
                async with self._changed:
                    self._held_back.clear()
                    self._changed.notify_all()
            case ["reset"]:
                self._reset(list(self._open))
            case _:
                raise ValueError(command)


async def main(ports: Sequence[int]) -> None:
    """Serve until the end of standard input."""
    relay = Relay()
    for port in ports:
        listener = socket.socket()
        listener.setsockopt(_SOL_IP, _IP_TRANSPARENT, 1)
        listener.bind(("0.0.0.0", port))
        await asyncio.start_server(relay.join, sock=listener)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await relay.obey(line)
        print("done", flush=True)
    os._exit(0)  # without cancelling what passes on data, which asyncio would report


if __name__ == "__main__":
    asyncio.run(main([int(port) for port in sys.argv[1:]]))
