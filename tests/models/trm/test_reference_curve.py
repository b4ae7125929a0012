"""The curve that others are compared with, as docs/benchmarks/puzzles.md tells of it."""

from __future__ import annotations

from pathlib import Path

from scripts import curve as script
from scripts.curve import read_stored

ROOT = Path(__file__).resolve().parents[3]


def test_the_shipped_reference_is_one() -> None:
    (file,) = (ROOT / "docs" / "benchmarks" / "curves").glob("*.json")
    reference = read_stored(file)
    assert reference.column == "exact_accuracy" and len(reference.points) == 4
    reached = reference.examples_to(script.THRESHOLD)
    text = (ROOT / "docs" / "benchmarks" / "puzzles.md").read_text(encoding="utf-8")
    assert reached is not None and f"in about {round(reached, -2):,.0f} examples" in text
