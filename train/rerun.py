"""Differences between a stored run and its rerun."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lib.runs.directory import RunDir

# Free, and hence usable, memory differs between any two moments; it matters only if the plan differs.
_PASSING = {"free_bytes", "usable_bytes", "reasons"}


def changes(run: RunDir, *, now: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each fact that differs between `run` and `now` (directory.OBJECTS -> content).

    Raises ToolkitError if `run` lacks such a file.
    """
    for name, content in now.items():
        before, after = dict(_facts(run.read_json(name))), dict(_facts(content))
        for fact in [*before, *(fact for fact in after if fact not in before)]:
            if before.get(fact) != after.get(fact):
                yield f"{name}: {fact} {_told(before.get(fact))} -> {_told(after.get(fact))}"


def _facts(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every plain value in nested objects and lists, with its path in words."""
    if isinstance(content, Mapping):
        entries = [(str(key), value) for key, value in content.items() if key not in _PASSING]
    elif isinstance(content, list | tuple):
        entries = [(str(index), value) for index, value in enumerate(content)]
    else:
        yield path, content
        return
    for key, value in entries:
        yield from _facts(value, f"{path} {key}".lstrip())


def _told(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
