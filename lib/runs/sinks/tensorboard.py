"""TensorBoard event files, written without its package: a TFRecord file of protocol buffers.

A record is the length of its data (8 bytes, little-endian), the masked CRC-32C of these 8 bytes, the data,
and their masked CRC-32C. The data are an Event, of which these fields are used
(tensorflow/core/util/event.proto and framework/summary.proto):

    Event       1 wall_time: double   2 step: int64   3 file_version: string   5 summary   7 session_log
    Summary     1 value, repeated
    Value       1 tag: string   2 simple_value: float
    SessionLog  1 status: 1 is START
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from lib.errors import os_error
from lib.runs.directory import EVENTS
from lib.runs.sinks.base import Row, scalars

_FILE_VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, lowest bit first
_MASK_DELTA = 0xA282EAD8  # TFRecord masks checksums, as data may contain checksums
_FLOAT_MAX = 3.4028234663852886e38  # larger values, such as a perplexity, become infinite
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types of protocol buffers


class EventFile:
    """Sink that writes the rows of a run to one event file, new each time the run starts or resumes.

    A TensorBoard that has read an earlier file takes the second event of a new one for a restart at step 0
    and forgets what it has. It moves to the new file only from one that still exists: the last of the
    earlier files is emptied, the others are removed.
    """

    def __init__(self, folder: Path, *, began: float) -> None:
        """began: seconds since the epoch. A row's wall time is this plus its seconds of training.

        Raises ToolkitError if the file cannot be written.
        """
        self._seconds = self._began = began
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._earlier = sorted(folder.glob(f"{EVENTS}*"))
            number = 1 + max((int(path.suffix[1:]) for path in self._earlier), default=0)
            self._file = (folder / f"{EVENTS}{number:06d}").open("xb")
        except OSError as error:
            raise os_error("write", error) from error
        self._write(
            _event(began, 0, _message(3, _FILE_VERSION)), _event(began, 0, _message(7, _number(1, 1)))
        )

    def send(self, rows: Sequence[Row]) -> None:
        """Append rows as events. Raises ToolkitError if the file cannot be written."""
        self._write(*map(self._event, rows))
        try:
            for path in self._earlier[-1:]:
                os.truncate(path, 0)
            for path in self._earlier[:-1]:
                path.unlink()
        except OSError as error:
            raise os_error("remove", error) from error
        self._earlier.clear()

    def close(self, *, done: bool) -> None:  # noqa: ARG002
        """Close the file."""
        self._file.close()

    def _event(self, row: Row) -> bytes:
        if "seconds" in row:
            self._seconds = self._began + row["seconds"]
        values = (
            _message(1, _message(1, name.encode()) + _float(2, value)) for name, value in scalars(row).items()
        )
        return _event(self._seconds, row["step"], _message(5, b"".join(values)))

    def _write(self, *events: bytes) -> None:
        try:
            self._file.write(b"".join(map(record, events)))
            self._file.flush()
        except OSError as error:
            error.filename = self._file.name
            raise os_error("write", error, todo="free some space") from error


def record(data: bytes) -> bytes:
    """Encode one record of a TFRecord file."""
    length = struct.pack("<Q", len(data))
    return length + _masked_checksum(length) + data + _masked_checksum(data)


def crc32c(data: bytes) -> int:
    """CRC-32C, the cyclic redundancy check with Castagnoli's polynomial (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = [_remainder(byte) for byte in range(256)]


def _masked_checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def _event(seconds: float, step: int, what: bytes) -> bytes:
    return _field(1, _DOUBLE) + struct.pack("<d", seconds) + _number(2, step) + what


def _float(number: int, value: float) -> bytes:
    single = value if abs(value) <= _FLOAT_MAX else math.copysign(math.inf, value)
    return _field(number, _FLOAT) + struct.pack("<f", single)


def _message(number: int, data: bytes) -> bytes:
    return _field(number, _BYTES) + _varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return _field(number, _VARINT) + _varint(value)


def _field(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    """Encode an integer >= 0: seven bits a byte, lowest first; the eighth bit says that more follow."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(groups) + bytes([value])
