"""Event files of TensorBoard for tests: a stand-in for its package, and a reader of files of either."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import pytest

INSTALLED = importlib.util.find_spec("tensorboard") is not None


class _Message(dict[str, Any]):
    """Stands for a protocol buffer: its fields, serialized as JSON."""

    START = 1

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)

    def SerializeToString(self) -> bytes:
        return json.dumps(self).encode()


class _RecordWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        self._file.write(data + b"\n")

    def flush(self) -> None:
        self._file.flush()


def use_stand_in(patch: pytest.MonkeyPatch) -> None:
    """Put modules that write JSON lines in place of those of tensorboard that the sink imports."""
    contents = {
        "tensorboard": {},
        "tensorboard.compat.proto.event_pb2": {"Event": _Message, "SessionLog": _Message},
        "tensorboard.compat.proto.summary_pb2": {"Summary": _Message},
        "tensorboard.summary.writer.record_writer": {"RecordWriter": _RecordWriter},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin="a test")
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)


@dataclass
class Event:
    wall_time: float = 0.0
    step: int = 0
    file_version: str = ""
    starts_session: bool = False
    values: dict[str, float] = field(default_factory=dict)


def read_events(file: Path) -> list[Event]:
    """Every event of a file that the stand-in or the package has written."""
    data = file.read_bytes()
    if data and not data.startswith(b"{"):
        return _read_by_package(file)
    return [
        Event(
            wall_time=one["wall_time"],
            step=one.get("step", 0),
            file_version=one.get("file_version", ""),
            starts_session="session_log" in one,
            values={value["tag"]: value["simple_value"] for value in one.get("summary", {}).get("value", ())},
        )
        for one in map(json.loads, data.splitlines())
    ]


def _read_by_package(file: Path) -> list[Event]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [
        Event(
            wall_time=one.wall_time,
            step=one.step,
            file_version=one.file_version,
            starts_session=one.session_log.status == 1,
            values={value.tag: value.simple_value for value in one.summary.value},
        )
        for one in LegacyEventFileLoader(str(file)).Load()
    ]
