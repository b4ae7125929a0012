"""Reads event files of TensorBoard with neither its package nor our writer."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Event:
    wall_time: float = 0.0
    step: int = 0
    file_version: str = ""
    starts_session: bool = False
    values: dict[str, float] = field(default_factory=dict)


def read_events(file: Path) -> list[Event]:
    """Every event, with both checksums of its record verified."""
    data, events = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        verify(data[:8], data[8:12])
        verify(data[12 : 12 + length], data[12 + length : 16 + length])
        events.append(event_of(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def verify(data: bytes, stored: bytes) -> None:
    (masked,) = struct.unpack("<I", stored)
    rotated = (masked - 0xA282EAD8) % 2**32
    assert (rotated >> 17 | rotated << 15) % 2**32 == slow_crc32c(data)


def slow_crc32c(data: bytes) -> int:
    """By division of polynomials, bit by bit, highest power first."""
    bits = [byte >> place & 1 for byte in data for place in range(8)] + [0] * 32
    for place in range(32):
        bits[place] ^= 1
    divisor = [1, *(0x1EDC6F41 >> place & 1 for place in range(31, -1, -1))]
    for start in range(len(bits) - 32):
        if bits[start]:
            for place, bit in enumerate(divisor):
                bits[start + place] ^= bit
    remainder = [bit ^ 1 for bit in bits[-32:]]
    return sum(bit << place for place, bit in enumerate(remainder))


def event_of(data: bytes) -> Event:
    event = Event()
    for number, value in fields(data):
        if number == 1:
            (event.wall_time,) = struct.unpack("<d", value)
        elif number == 2:
            event.step = value
        elif number == 3:
            event.file_version = value.decode()
        elif number == 5:
            event.values |= dict(scalar_of(one) for _, one in fields(value))
        elif number == 7:
            event.starts_session = dict(fields(value)) == {1: 1}
    return event


def scalar_of(data: bytes) -> tuple[str, float]:
    found = dict(fields(data))
    return found[1].decode(), struct.unpack("<f", found[2])[0]


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message: an int, or the bytes of anything else."""
    while data:
        key, data = varint(data)
        if key & 7 == 0:
            value, data = varint(data)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            length, data = varint(data)
        else:
            length = {1: 8, 5: 4}[key & 7]
        yield key >> 3, data[:length]
        data = data[length:]


def varint(data: bytes) -> tuple[int, bytes]:
    value = 0
    for place, byte in enumerate(data):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, data[place + 1 :]
    raise AssertionError("a number without its end")
