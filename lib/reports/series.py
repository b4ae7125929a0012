"""Series of metrics.jsonl, thinned for a page: the lowest and the highest value of equal stretches."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.runs import metrics

MOST_POINTS = 2000  # of a line
LINES = {"train": "training", "eval": "evaluation"}  # names of the kinds of rows
# Columns that are no curves: coordinates, and counts of what an evaluation saw.
_PLAIN = metrics.NOT_METRICS - {"learning_rate", "samples_per_second", metrics.PEAK}


@dataclass(frozen=True, slots=True)
class Series:
    """One column of the rows of one kind. seconds: of training so far, at the same steps."""

    kind: str
    column: str
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))

    def to_json(self, **more: Any) -> dict[str, Any]:
        """Return at most MOST_POINTS points and the number of rows, with `more` about the line."""
        kept = extremes(self.values, MOST_POINTS)
        points = {
            "step": [self.steps[place] for place in kept],
            "seconds": [round(self.seconds[place], 3) for place in kept],
            "value": [float(f"{self.values[place]:.7g}") for place in kept],
        }
        return {"kind": self.kind, "column": self.column, "rows": len(self.values), **more, **points}


def extremes(values: Sequence[float], most: int) -> list[int]:
    """Return the places of all values, or of at most `most`: the ends, the extremes of equal stretches."""
    count, stretches = len(values), most // 2 - 1
    if count <= most:
        return list(range(count))
    kept = {0, count - 1}
    for number in range(stretches):
        own = range(number * count // stretches, (number + 1) * count // stretches)
        kept |= {choose(own, key=values.__getitem__) for choose in (min, max)}
    return sorted(kept)


def read_series(path: Path, *, ended: bool = False) -> list[Series]:
    """Return the curves of a metrics.jsonl by kind of row, in the order of the file.

    A file that does not exist yet has none. Raises ToolkitError for a damaged one.
    ended: as for `metrics.rows`.
    """
    found = series_of(metrics.rows(path, ended=ended)) if path.exists() else []
    return [each for each in found if each.column not in _PLAIN]


def series_of(rows: Iterable[Mapping[str, Any]]) -> list[Series]:
    """Return every numeric column by kind of row, in one pass."""
    found: dict[tuple[str, str], Series] = {}
    seconds = 0.0
    for row in rows:
        kind, numbers = row.get("kind"), {name: value for name, value in row.items() if _is_number(value)}
        step = numbers.pop("step", None)
        if kind not in LINES or step is None:
            continue
        seconds = numbers.get("seconds", seconds)
        for column, value in numbers.items():
            series = found.setdefault((kind, column), Series(kind, column))
            series.steps.append(int(step))
            series.values.append(value)
            series.seconds.append(seconds)
    return list(found.values())


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # and not bool
