"""Exhibits of a trained model: frozen objects that a task makes and a report shows.

They are stored as JSON, which is all that the page template reads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeAlias

Points: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """Fields of every kind."""

    title: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Exhibit):
    """Rows of text below a head. The first cell of a row names it. folded: shown on request."""

    folded: bool = False
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix(Exhibit):
    """Counts by true class (rows) and predicted class (columns)."""

    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One image. png: its file in base64."""

    png: str
    caption: str
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures(Exhibit):
    """Images side by side."""

    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Exhibit):
    """A text with its line breaks."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(Exhibit):
    """Lines of (x, y) points by name."""

    x: str
    y: str
    lines: tuple[tuple[str, Points], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One state of a square puzzle. marks: of each cell, one of given, right, wrong and empty."""

    caption: str
    cells: tuple[tuple[str, ...], ...]
    marks: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boards(Exhibit):
    """States of one puzzle in order."""

    boards: tuple[Board, ...]


def to_json(exhibit: Exhibit) -> dict[str, Any]:
    """Return the fields, and the name of the class as "kind"."""
    return {"kind": type(exhibit).__name__, **dataclasses.asdict(exhibit)}
