"""Names of classes that a data set reads from files, and what is odd about them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lib.units import some_of


def naming_note(names: Iterable[str]) -> str:
    """Return what is odd about names of classes that were read as they stand; "" for nothing.

    Some are numbers and others are not, or two differ in case or in how a number is written alone: often they
    are two spellings of one class.
    """
    same, numbers, words, notes = dict[str | float, list[str]](), list[str](), list[str](), list[str]()
    for name in names:
        number = _finite(name)
        (words if number is None else numbers).append(name)
        same.setdefault(name.casefold() if number is None else number, []).append(name)
    if numbers and words:
        notes.append(f"numbers ({some_of(numbers)}) and texts ({some_of(words)}) are classes side by side")
    if alike := [" and ".join(each) for each in same.values() if len(each) > 1]:
        notes.append(f"classes that differ in spelling alone: {some_of(alike)}")
    return f"; NOTE: {'; '.join(notes)}" if notes else ""


def _finite(text: str) -> float | None:
    """Return the finite number that `text` is; None for other texts."""
    try:
        return found if math.isfinite(found := float(text)) else None
    except ValueError:
        return None
