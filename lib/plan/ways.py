"""Parallelism strategies considered for a plan, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lib.plan.show import NARROW_COLUMNS
from lib.plan.strategies import Candidate
from lib.plan.types import Memory, Strategy
from lib.units import GB


@dataclass(frozen=True, slots=True, kw_only=True)
class WayToSpread:
    """One parallelism strategy, its predicted need and its verdict."""

    strategy: Strategy
    world: int  # processes
    shard: int
    micro_batch: int | None  # None, as the next three fields, where it is not possible
    accumulation: int | None
    memory: Memory | None
    step_seconds: tuple[float, float] | None  # fastest and slowest estimate
    verdict: str

    @classmethod
    def of(cls, candidate: Candidate, verdict: str) -> WayToSpread:
        """Make the row of a candidate of `choose_strategy`."""
        sizes = candidate.sizes
        return cls(
            strategy=candidate.layout.strategy,
            world=candidate.layout.world,
            shard=candidate.layout.shard,
            micro_batch=sizes.split.micro_batch if sizes is not None else None,
            accumulation=sizes.split.accumulation if sizes is not None else None,
            memory=sizes.memory if sizes is not None else None,
            step_seconds=candidate.seconds,
            verdict=verdict,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict that JSON can hold."""
        return {
            "strategy": self.strategy,
            "world": self.world,
            "shard": self.shard,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "need_bytes": self.memory.need_bytes if self.memory is not None else None,
            "step_seconds_estimate": list(self.step_seconds) if self.step_seconds is not None else None,
            "verdict": self.verdict,
        }


def ways_text(ways: Sequence[WayToSpread], *, columns: int) -> Iterator[str]:
    """Format a line per strategy: batch, memory of the fullest device, seconds of a step, verdict."""
    yield "Ways to share the work (seconds of a step are an estimate, and assume the rates between devices):"
    widest = max(7, *(len(_name(way)) for way in ways))
    for way in ways:
        cut = "" if way.micro_batch is None else f"{way.micro_batch} x {way.accumulation}"
        need = "" if way.memory is None else f"{way.memory.need_bytes / GB:.2f} GB"
        time = "" if way.step_seconds is None else f"{way.step_seconds[0]:.3g} to {way.step_seconds[1]:.3g} s"
        head = f"  {_name(way):<{widest}} {cut:>10} {need:>10}  {time:<18} "
        if columns < NARROW_COLUMNS:
            yield head.rstrip()
            yield from textwrap.wrap(way.verdict, columns, initial_indent="    ", subsequent_indent="    ")
        else:
            yield from textwrap.wrap(
                head + way.verdict, columns, subsequent_indent=" " * len(head), drop_whitespace=True
            )


def _name(way: WayToSpread) -> str:
    if way.strategy == "split" and way.world > 1:
        return "split+ddp"
    return way.strategy + (f"/{way.shard}" if way.strategy == "hsdp" else "")
