"""Run status: the content of status.json, which lib/runs/directory.py reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

State: TypeAlias = Literal["running", "done", "failed", "preempted", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The last recorded status of a run.

    state:  "unknown" if status.json is missing or damaged; `reason` then says which. A run that
            was killed stays "running" and holds no lock.
    facts:  further facts of the run, such as its final metrics.
    """

    state: State
    reason: str = ""
    step: int = 0
    pid: int = 0
    host: str = ""
    time: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
