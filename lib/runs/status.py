"""How a run is: the content of its status.json, which lib/runs/directory.py reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

State: TypeAlias = Literal["running", "done", "failed", "preempted", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a run is, or was when it last said so.

    state:  "unknown" where status.json is missing or damaged; `reason` then says which. A run that
            was killed stays "running" and holds no lock.
    facts:  what else the run has to tell, such as its final metrics.
    """

    state: State
    reason: str = ""
    step: int = 0
    pid: int = 0
    host: str = ""
    time: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
